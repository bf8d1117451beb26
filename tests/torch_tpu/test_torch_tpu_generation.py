"""Text on torch_tpu: the greedy tokens of `generate` on the CPU, by one program for prompts and one for each token."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, GenerationConfig, MistralConfig, Qwen2Config


for name in ("generation", "trainers"):
    sys.path.insert(0, str(Path(__file__).parents[1] / name))

from test_generator import GREEDY, PROMPTS, generate_eagerly, make, pad_left, place  # noqa: E402
from test_predicted_text import LENGTHS, NEW, Metrics, eager, model_of, rows_of  # noqa: E402
from test_text_in_training import Writes  # noqa: E402

from hf_tpu_ext import TPUSFTConfig, TPUTrainer, TPUTrainingArguments, generate  # noqa: E402
from hf_tpu_ext.generation import Generator  # noqa: E402
from hf_tpu_ext.step.fingerprint import Fingerprint  # noqa: E402


def on_device(tpu, config_cls=Qwen2Config, **settings):
    model = make(config_cls, **settings)
    model.set_attn_implementation("sdpa")
    return place(model, tpu)


@pytest.fixture(scope="module")
def qwen(tpu):
    return on_device(tpu)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "operators"])
@pytest.mark.parametrize(
    "settings",
    [dict(), dict(repetition_penalty=1.8), dict(min_new_tokens=7), dict(max_new_tokens=1), dict(max_new_tokens=20)],
    ids=str,
)
def test_greedy_tokens_are_those_of_generate(tpu, qwen, settings, whole):
    def by_operators(function, state):
        compiled = tpu.programs.compile(function, state, Fingerprint(trusts_code=True), None)
        compiled.why_traced = "operators are asked for"
        return compiled

    settings = {**GREEDY, **settings}
    compile = None if whole else by_operators
    generator = Generator(qwen, tpu, GenerationConfig(**settings), [8, 16], compile=compile)
    expected = generate_eagerly(make(), PROMPTS, **settings)
    for _ in range(2):
        assert generator.generate(PROMPTS).token_ids == expected


def test_sliding_window(tpu):
    settings = dict(config_cls=MistralConfig, sliding_window=6)
    expected = generate_eagerly(make(**settings), PROMPTS, **GREEDY)
    generator = Generator(on_device(tpu, **settings), tpu, GenerationConfig(**GREEDY), [16])
    assert generator.generate(PROMPTS).token_ids == expected


def test_a_token_is_one_program_and_few_are_waited_for(tpu, qwen):
    generator = Generator(qwen, tpu, GenerationConfig(**{**GREEDY, "max_new_tokens": 40, "eos_token_id": -1}), [8, 16])
    spent = []
    for prompts in (PROMPTS, [prompt[:8] for prompt in PROMPTS], [prompt[::-1] for prompt in PROMPTS]):
        tpu.wait()
        before = tpu.counters()
        generator.generate(prompts)
        tpu.wait()
        spent.append(tpu.counters() - before)
    # The tokens, and whether there are to be more after 16 and 32 of them.
    assert [each.reads for each in spent] == [3] * 3
    # What the program of a token changes in place (the cache of three layers, and what is known of each row) is made a tensor of
    # its own before it is run for the first time.
    assert spent[0].executions - (2 * 3 + 4) == spent[2].executions <= 40 + 5
    # Another declared length is another program of the prompts, and no other one.
    assert (spent[1].compiles, spent[2].compiles) == (1, 0)


def test_it_ends_with_the_last_row(tpu, qwen):
    """After 16 tokens nothing is there to be written."""
    config = GenerationConfig(**{**GREEDY, "max_new_tokens": 400, "eos_token_id": list(range(97))})
    tpu.wait()
    before = tpu.counters()
    made = Generator(qwen, tpu, config, [16]).generate(PROMPTS)
    assert [len(row) for row in made.token_ids] == [1] * len(PROMPTS)
    assert (tpu.counters() - before).executions < 60


def test_other_settings_of_the_model_are_another_program(tpu):
    """As an adapter that was turned off."""
    model = on_device(tpu)
    generator = Generator(model, tpu, GenerationConfig(**GREEDY), [16])
    assert generator.generate(PROMPTS).token_ids == generate_eagerly(make(), PROMPTS, **GREEDY)
    reference = make()
    for changed in (model, reference):
        for layer in changed.model.layers:
            layer.self_attn.scaling *= 0.25
    expected = generate_eagerly(reference, PROMPTS, **GREEDY)
    assert generator.generate(PROMPTS).token_ids == expected != generate_eagerly(make(), PROMPTS, **GREEDY)


def test_log_probs_are_those_of_a_forward_pass(tpu, qwen):
    config = GenerationConfig(max_new_tokens=12, do_sample=True, temperature=0.7, top_k=20)
    generator = Generator(qwen, tpu, config, [16])
    made = generator.generate(PROMPTS, seed=3)
    assert made == generator.generate(PROMPTS, seed=3) != generator.generate(PROMPTS, seed=4)
    for prompt, tokens, log_probs in zip(PROMPTS, made.token_ids, made.log_probs, strict=True):
        with torch.no_grad():
            logits = make()(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1] / 0.7
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(log_probs), expected, rtol=0, atol=1e-5)


def test_public_function_has_arguments_of_generate(qwen):
    padded = pad_left(PROMPTS)
    expected = make().generate(input_ids=padded.ids, attention_mask=padded.mask, **GREEDY)
    assert torch.equal(generate(qwen, padded.ids, padded.mask, **GREEDY), expected)


@pytest.mark.parametrize("compile_step", ["auto", pytest.param("off", marks=pytest.mark.slow)])
def test_predicted_text(tpu, runs, tmp_path, compile_step):
    """10 rows in batches of 4: tokens are eager's, before training and after it."""
    rows, metrics = rows_of(LENGTHS), Metrics()
    trainer = TPUTrainer(
        model=model_of(runs),
        args=TPUTrainingArguments(
            output_dir=str(tmp_path),
            per_device_eval_batch_size=4,
            report_to="none",
            max_steps=2,
            learning_rate=1e-2,
            predict_with_generate=True,
            generation_max_new_tokens=NEW,
            compile_step=compile_step,
        ),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=runs.tokenizer,
        data_collator=DataCollatorForSeq2Seq(runs.tokenizer),
        compute_metrics=metrics,
    )
    trainer.evaluate()
    np.testing.assert_array_equal(metrics.predictions, eager(model_of(runs), rows))
    trainer.train()
    predictions = trainer.predict(rows.select(range(8))).predictions
    model = model_of(runs)
    model.load_state_dict(tpu.fetch(dict(trainer.model.state_dict(keep_vars=True))))
    # Training adds the end of the tokenizer.
    model.generation_config = trainer.model.generation_config
    np.testing.assert_array_equal(predictions, eager(model, rows.select(range(8))))
    tpu.wait()
    before = tpu.compiles()
    trainer.predict(rows.select(range(8)))
    tpu.wait()
    assert tpu.compiles() == before


@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointing", "no checkpointing"])
def test_text_in_training_is_that_of_the_weights_of_now(runs, capsys, checkpointing):
    """Steps are compiled whole meanwhile, or the trainer would raise."""
    config = {"compile_step": "step", "gradient_checkpointing": checkpointing, "show_samples": 1}
    trainer = runs.ours(train=False, config_cls=TPUSFTConfig, max_steps=4, learning_rate=3e-2, **config)
    eager_model = AutoModelForCausalLM.from_pretrained(runs.model_dir, dtype=torch.float32).eval()
    writes = Writes(trainer, [[5, 9, 7], [11, 6, 8, 12, 15, 9, 7, 20]], eager_model)
    trainer.add_callback(writes)
    trainer.train()
    assert writes.found == writes.expected and writes.found[0] != writes.found[-1]
    assert [spent.compiles for spent in writes.spent[1:]] == [0] * 3
    shown = capsys.readouterr().out
    assert "before:" in shown and "after:" in shown
