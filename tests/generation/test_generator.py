"""Completions by two programs: the tokens of `generate`, log-probabilities of a forward pass."""

import copy
import os
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
)

from hf_tpu_ext.generation import Generator, generate
from hf_tpu_ext.layers.layer_list import Pattern
from hf_tpu_ext.layers.layer_scan import LayerStack
from hf_tpu_ext.sharding.plan import place_model


CHIPS = int(os.environ.get("CPU_NUM_DEVICES", "1"))
SIZES = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    # Far from uniform, for first choices not to depend on the order of summation.
    initializer_range=0.3,
)
END = 5
PROMPTS = [
    [17, 61, 8],
    [12, 90, 33, 45, 76, 9, 20, 84, 51],
    [66, 7],
    [25, 31, 94, 10, 58, 70, 39, 82, 14, 47, 6, 91],
    [80],
]
GREEDY = dict(max_new_tokens=10, do_sample=False)


def make(config_cls=Qwen2Config, **settings):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_cls(**{**SIZES, **settings}), attn_implementation="eager").eval()
    model.generation_config.update(eos_token_id=END, pad_token_id=0)
    return model


def pad_left(prompts):
    length = max(map(len, prompts))
    ids = torch.zeros(len(prompts), length, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :] = torch.tensor(prompt)
        mask[row, length - len(prompt) :] = 1
    return SimpleNamespace(ids=ids, mask=mask)


def generate_eagerly(model, prompts, **config):
    padded = pad_left(prompts)
    made = model.generate(input_ids=padded.ids, attention_mask=padded.mask, **config)[:, padded.ids.shape[1] :]
    return [row[: row.index(END) + 1] if END in row else row for row in made.tolist()]


def place(model, backend):
    mesh = {"data": backend.num_chips, "fsdp": 1}
    backend.use_mesh(mesh)
    place_model(model, backend, mesh)
    return model


def stacked(backend, *config, patterns=(), **settings):
    """A model whose layers run as a loop."""
    model = place(make(*config, **settings), backend)
    stack = LayerStack(model.model.layers, backend, "full", patterns=patterns)
    stack.stack()
    model.model.layers = stack
    return model


@pytest.fixture(scope="module")
def qwen(xla):
    """A model on the device, and the same on the host."""
    return SimpleNamespace(eager=make(), model=place(make(), xla), backend=xla)


@pytest.mark.parametrize(
    "settings",
    [
        dict(),
        dict(repetition_penalty=1.8),
        dict(min_new_tokens=7),
        dict(eos_token_id=[END, 11, 70], max_new_tokens=12),
        dict(max_new_tokens=1),
        dict(suppress_tokens=[4, 8, 15, 16, 23, 42]),
    ],
    ids=str,
)
def test_greedy_tokens_are_those_of_generate(qwen, settings):
    settings = {**GREEDY, **settings}
    ends = settings.get("eos_token_id", [END])
    padded = pad_left(PROMPTS)
    expected = qwen.eager.generate(input_ids=padded.ids, attention_mask=padded.mask, **settings)
    expected = expected[:, padded.ids.shape[1] :].tolist()
    found = Generator(qwen.model, qwen.backend, GenerationConfig(**settings), [8, 16]).generate(PROMPTS).token_ids
    for row, text in zip(expected, found, strict=True):
        length = next((index for index, token in enumerate(row, 1) if token in ends), len(row))
        assert text == row[:length] and all(type(token) is int for token in text)


@pytest.mark.parametrize(
    ("config_cls", "settings"),
    [
        (LlamaConfig, dict(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})),
        (MistralConfig, dict(sliding_window=6)),
        (GemmaConfig, dict(head_dim=16)),
        (Qwen2Config, dict(num_key_value_heads=4, tie_word_embeddings=True)),
        # Its attention knows no keys that heads share.
        (GPTNeoXConfig, dict()),
    ],
    ids=["llama", "sliding window", "gemma", "a key for each head", "gpt_neox"],
)
def test_other_models(xla, config_cls, settings):
    expected = generate_eagerly(make(config_cls, **settings), PROMPTS, **GREEDY)
    model = place(make(config_cls, **settings), xla)
    assert Generator(model, xla, GenerationConfig(**GREEDY), [16]).generate(PROMPTS).token_ids == expected


def test_prompts_of_one_token(xla):
    """Which are as long as a token after a prompt is, by the attention of TPUs."""
    prompts = [[17], [66]]
    expected = generate_eagerly(make(), prompts, **GREEDY)
    mesh = {"data": xla.num_chips, "fsdp": 1}
    xla.use_mesh(mesh)
    model = make()
    place_model(model, xla, mesh, attention="splash")
    assert Generator(model, xla, GenerationConfig(**GREEDY), [1]).generate(prompts).token_ids == expected


def test_layers_as_a_loop(xla):
    expected = generate_eagerly(make(), PROMPTS, **GREEDY)
    assert Generator(stacked(xla), xla, GenerationConfig(**GREEDY), [8, 16]).generate(PROMPTS).token_ids == expected


@pytest.mark.ci
@pytest.mark.parametrize("room", [None, pytest.param(0, marks=pytest.mark.slow)], ids=["copies", "in place"])
def test_alternating_layers_as_a_loop(xla, monkeypatch, room):
    """Layers of the loop between others, with and without copies of their weights."""
    if room is not None:
        monkeypatch.setattr("hf_tpu_ext.generation.memory.find_room", lambda backend: room)
    sliding, full = "sliding_attention", "full_attention"
    types = [full, sliding, full, sliding, full, full]
    gemma = dict(head_dim=16, sliding_window=6, num_hidden_layers=len(types), layer_types=types)
    expected = generate_eagerly(make(Gemma3TextConfig, **gemma), PROMPTS, **GREEDY)
    model = stacked(xla, Gemma3TextConfig, patterns=[Pattern(0, (1, 1), 2), Pattern(4, (2,), 1)], **gemma)
    assert Generator(model, xla, GenerationConfig(**GREEDY), [8, 16]).generate(PROMPTS).token_ids == expected
    model = stacked(xla, Gemma3TextConfig, patterns=[Pattern(1, (1, 1), 2)], **gemma)
    assert Generator(model, xla, GenerationConfig(**GREEDY), [8, 16]).generate(PROMPTS).token_ids == expected


def test_two_programs_and_one_read(qwen):
    generator = Generator(qwen.model, qwen.backend, GenerationConfig(**{**GREEDY, "max_new_tokens": 9}), [8, 16])
    spent = []
    for prompts in (PROMPTS, [prompt[:8] for prompt in PROMPTS], [prompt[::-1] for prompt in PROMPTS]):
        qwen.backend.wait()
        before = qwen.backend.counters()
        generator.generate(prompts)
        spent.append(qwen.backend.counters() - before)
    # A prefill for each declared length, and one program for all tokens after it.
    assert [each.compiles for each in spent] == [2, 1, 0]
    assert [(each.executions, each.reads, each.fallbacks) for each in spent] == [(2, 1, 0)] * 3


def test_log_probs_are_those_of_a_forward_pass(qwen):
    config = GenerationConfig(max_new_tokens=12, do_sample=True, temperature=0.7)
    made = Generator(qwen.model, qwen.backend, config, [16]).generate(PROMPTS, seed=3)
    # In float64: in float32 the reference is as far from it as what is tested.
    reference = copy.deepcopy(qwen.eager).double()
    for prompt, tokens, log_probs in zip(PROMPTS, made.token_ids, made.log_probs, strict=True):
        ids = torch.tensor([prompt + tokens])
        with torch.no_grad():
            logits = reference(ids).logits[0, len(prompt) - 1 : -1] / 0.7
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(log_probs, dtype=torch.float64), expected, rtol=0, atol=1e-5)


@pytest.mark.ci
def test_copies_of_a_prompt_are_read_once(qwen):
    shapes = []

    def run(name, shape, execute):
        shapes.append((name, shape))
        return execute()

    config = GenerationConfig(max_new_tokens=8, do_sample=True, repetition_penalty=1.3)
    generator = Generator(qwen.model, qwen.backend, config, [16], run)
    prompts = [prompt for prompt in PROMPTS for _ in range(4 * CHIPS)]
    each, once = (generator.generate(prompts, seed=2, copies=copies) for copies in (1, 4))
    assert once.token_ids == each.token_ids
    for found, expected in zip(once.log_probs, each.log_probs, strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=1e-5)
    # Prompts that are not there so often are read as they are.
    shifted = generator.generate(prompts[1:] + prompts[:1], seed=2, copies=4)
    assert shifted == generator.generate(prompts[1:] + prompts[:1], seed=2)
    rows = len(prompts)
    # The fourth is run by the handle of the program that the first and the third have traced.
    read = [shape for name, shape in shapes if name == "prefill"]
    assert read == [(rows, 16), (rows // 4, 16), (rows, 16)]


def test_lengths_in_any_order_and_any_seed(qwen):
    config = GenerationConfig(max_new_tokens=4, do_sample=True)
    made = Generator(qwen.model, qwen.backend, config, [8, 16]).generate(PROMPTS, seed=7)
    assert Generator(qwen.model, qwen.backend, config, [16, 8]).generate(PROMPTS, seed=7 + 2**32) == made


def test_samples_follow_the_seed(qwen):
    generator = Generator(qwen.model, qwen.backend, GenerationConfig(max_new_tokens=8, do_sample=True), [16])
    first, again, other = (generator.generate(PROMPTS, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.token_ids != other.token_ids
    torch.manual_seed(7)
    drawn = generator.generate(PROMPTS)
    torch.manual_seed(7)
    assert generator.generate(PROMPTS) == drawn


def test_public_function_has_arguments_of_generate(qwen):
    padded = pad_left(PROMPTS)
    expected = qwen.eager.generate(input_ids=padded.ids, attention_mask=padded.mask, **GREEDY)
    found = generate(qwen.model, padded.ids, padded.mask, **GREEDY)
    assert torch.equal(found, expected)
    twice = generate(
        qwen.model,
        input_ids=padded.ids,
        attention_mask=padded.mask,
        generation_config=GenerationConfig(max_length=16, do_sample=True, num_return_sequences=2),
        seed=1,
    )
    assert twice.shape[0] == 2 * len(PROMPTS) and twice.shape[1] <= 16
    assert torch.equal(twice[:2, : padded.ids.shape[1]], padded.ids[:1].expand(2, -1))


@pytest.mark.parametrize("length", [5, 20])
def test_without_a_length_as_many_tokens_as_by_default(qwen, length):
    ids = torch.randint(3, SIZES["vocab_size"], (1, length), generator=torch.Generator().manual_seed(length))
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = qwen.eager.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
    assert torch.equal(generate(qwen.model, ids, torch.ones_like(ids), **settings), expected)
    assert expected.shape[1] == length + 20


def test_without_a_length_no_more_tokens_than_the_model_has_positions(xla):
    sizes = dict(vocab_size=97, n_embd=32, n_layer=2, n_head=2)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, n_positions=16, bos_token_id=1, eos_token_id=END)).eval()
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = torch.tensor([[7, 8, 9, 11]])
    expected = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
    assert expected.shape[1] == 16
    assert torch.equal(generate(model, ids, torch.ones_like(ids), **settings), expected)


def test_the_mask_of_padded_prompts_is_found(qwen):
    padded = pad_left(PROMPTS)
    expected = qwen.eager.generate(input_ids=padded.ids, attention_mask=padded.mask, **GREEDY)
    assert torch.equal(generate(qwen.model, padded.ids, **GREEDY), expected)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(max_length=3), ["max_length=3", "prompts of 4 tokens", "max_new_tokens=256"]),
        (dict(output_scores=True), ["output_scores=True", "Leave it out"]),
        (dict(return_dict_in_generate=True), ["return_dict_in_generate=True", "Leave it out"]),
    ],
    ids=str,
)
def test_arguments_of_generate_that_cannot_work_are_refused(qwen, settings, words):
    with pytest.raises(ValueError) as error:
        generate(qwen.model, torch.ones(1, 4, dtype=torch.long), **settings)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(num_beams=4), ["num_beams=4", "Leave it out"]),
        (dict(min_length=9), ["min_length=9", "min_new_tokens"]),
        (dict(no_repeat_ngram_size=3), ["no_repeat_ngram_size=3", "repetition_penalty"]),
        (dict(stop_strings=["."]), ["stop_strings"]),
        (dict(max_new_tokens=None, max_length=None), ["max_new_tokens=256"]),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(qwen, settings, words):
    with pytest.raises(ValueError) as error:
        Generator(qwen.model, qwen.backend, GenerationConfig(**{**GREEDY, **settings}), [16])
    assert all(word in str(error.value) for word in words)


def test_models_with_another_state_are_refused(xla):
    from transformers import Qwen3NextConfig

    sizes = dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, shared_expert_intermediate_size=8)
    config = Qwen3NextConfig(**SIZES, **sizes, layer_types=["linear_attention", "linear_attention", "full_attention"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="Qwen3NextForCausalLM has layers of type linear_attention"):
        Generator(model, xla, GenerationConfig(**GREEDY), [8])


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gpt_neo", "GPTNeoForCausalLM computes with a cache of another form"),
        ("xglm", "XGLMForCausalLM computes with a cache of another form"),
        ("trocr", "TrOCRForCausalLM computes with a cache of another form"),
        # Its positions are columns, and there is padding on the left.
        ("bart", r"BartForCausalLM takes the column of a token, .* for its position \(embed_positions\)"),
        # The types of its layers are a property.
        ("mamba", "MambaForCausalLM has layers of type linear_attention"),
    ],
)
def test_models_with_another_cache_are_refused(xla, model_type, reason):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type))
    with pytest.raises(ValueError, match=reason):
        Generator(model, xla, GenerationConfig(**GREEDY), [8])


@pytest.mark.ci
@pytest.mark.parametrize(
    ("own", "undone"),
    [
        (dict(repetition_penalty=1.8), dict(repetition_penalty=None)),
        (dict(suppress_tokens=[*range(5, 30)]), dict(suppress_tokens=None)),
    ],
    ids=str,
)
def test_a_setting_of_the_model_is_undone_by_none(qwen, monkeypatch, own, undone):
    ids = torch.tensor([[7, 8, 9, 11]])
    expected = generate_eagerly(qwen.eager, ids.tolist(), **GREEDY)
    for name, value in own.items():
        monkeypatch.setattr(qwen.model.generation_config, name, value)
    assert generate(qwen.model, ids, **GREEDY)[0, 4:].tolist() != expected[0]
    assert generate(qwen.model, ids, **GREEDY, **undone)[0, 4:].tolist() == expected[0]


def test_a_model_that_takes_no_cache_is_refused(qwen):
    class WithoutCache(type(qwen.model)):
        def forward(self, input_ids, **kwargs):
            raise AssertionError("is not called")

    with torch.device("meta"):
        model = WithoutCache(qwen.model.config)
    with pytest.raises(ValueError, match="WithoutCache takes neither `cache` nor `past_key_values`"):
        Generator(model, qwen.backend, GenerationConfig(**GREEDY), [8])


def test_tokens_and_positions_outside_of_tables_are_refused_as_by_generate(qwen, xla):
    """As IndexErrors of eager PyTorch. A program would take the last row of a table."""
    config = GenerationConfig(**GREEDY)
    rows = qwen.model.get_input_embeddings().num_embeddings
    with pytest.raises(IndexError):
        generate_eagerly(qwen.eager, [[5, rows]], **GREEDY)
    with pytest.raises(ValueError, match=f"Prompt 1 holds the token id {rows}, .* has {rows} rows"):
        Generator(qwen.model, xla, config, [8]).generate([[5], [5, rows]])
    sizes = dict(vocab_size=rows, n_embd=32, n_layer=2, n_head=2, eos_token_id=END)
    new = GREEDY["max_new_tokens"]
    eager = GPT2LMHeadModel(GPT2Config(**sizes, n_positions=4 + new)).eval()
    with pytest.raises(IndexError):
        generate_eagerly(eager, [[5] * 6], **{**GREEDY, "eos_token_id": None})
    model = place(copy.deepcopy(eager), xla)
    generator = Generator(model, xla, config, [8])
    with pytest.raises(ValueError, match=f"Prompt 1 has 6 tokens, and up to {new} are .* for {4 + new} \\(wpe\\)"):
        generator.generate([[5], [5] * 6])
    assert generator.generate([[5] * 5]).token_ids == generate_eagerly(eager, [[5] * 5], **GREEDY)


@pytest.mark.ci
@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_length_are_those_of_short_texts(xla, rope_type):
    """Upstream's own code for them asks for the length, which ended the process within a loop of a program."""
    rope = {"rope_type": rope_type, "factor": 4.0, "rope_theta": 100.0}
    config_cls, settings = LlamaConfig, dict(max_position_embeddings=24)
    if rope_type == "longrope":
        rope |= dict(short_factor=[1.0] * 4, long_factor=[4.0] * 4)
        config_cls, settings = Phi3Config, dict(max_position_embeddings=96, original_max_position_embeddings=24)
        settings |= dict(pad_token_id=0)
    model = make(config_cls, rope_parameters=rope, **settings)
    expected = generate_eagerly(model, PROMPTS, **GREEDY)
    generator = Generator(place(model, xla), xla, GenerationConfig(**GREEDY), [16])
    before = xla.compiles()
    for compiled in (2, 2, 2):
        assert generator.generate(PROMPTS).token_ids == expected
        assert xla.compiles() - before <= compiled
    assert not any("forward" in vars(module) for module in model.modules())
    # The last token has no position: 15 and 10 are 24 tokens.
    assert len(generator.generate([[7] * 15]).token_ids) == 1
    with pytest.raises(ValueError, match=f"Prompt 0 has 16 .* other frequencies beyond 24 .*rope_type='{rope_type}'"):
        generator.generate([[7] * 16])


def test_prompts_that_do_not_fit_are_refused(qwen):
    generator = Generator(qwen.model, qwen.backend, GenerationConfig(**GREEDY), [8])
    with pytest.raises(ValueError, match="Prompt 1 has 9 tokens, and the declared length of prompts is 8"):
        generator.generate(PROMPTS)
    with pytest.raises(ValueError, match="Prompt 0 has no tokens"):
        generator.generate([[]])
    ids = torch.tensor([[7, 8, 0]])
    with pytest.raises(ValueError, match='padding_side="left"'):
        generate(qwen.model, ids, (ids > 0).long(), **GREEDY)
    with pytest.raises(ValueError, match="streamer"):
        generate(qwen.model, ids, streamer=print)
