"""Stacked layers compute what the layers do, and give the gradients of each."""

from functools import cache

import pytest
import torch
import torch_xla
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from hf_tpu_ext.backends.cpu import CPUBackend
from hf_tpu_ext.errors import UserError
from hf_tpu_ext.examples.tiny import make_model
from hf_tpu_ext.layers import activation_checkpointing, layer_loop
from hf_tpu_ext.layers.attention import static_masks
from hf_tpu_ext.layers.frozen_weights import find_plain_linear
from hf_tpu_ext.layers.layer_list import (
    CalledLayers,
    Pattern,
    find_layers,
    find_patterns,
    why_layer_differs,
    why_layers_differ,
    why_no_loop,
)
from hf_tpu_ext.layers.layer_scan import LayerStack
from hf_tpu_ext.layers.layer_trace import LayerTraces
from hf_tpu_ext.layers.static_kernels import use_static_kernels


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    directories = {}

    def load(layers=3, family="qwen3", **sizes):
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, **sizes}
        if (key := (family, str(sizes))) not in directories:
            directories[key] = make_model(tmp_path_factory.mktemp("model"), family, **sizes)
        return AutoModelForCausalLM.from_pretrained(directories[key])

    return load


@pytest.fixture(scope="module")
def load_alternating(load):
    """Eight layers: two periods of a local, a local and a global one, and two local ones."""

    def load_alternating():
        types = ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention"] * 2
        return load(8, "gemma3_text", layer_types=types, sliding_window=5)

    return load_alternating


@pytest.fixture
def load_scaled(load, monkeypatch):
    """Layers whose functions depend on a buffer, another number in each."""
    forward = Qwen3MLP.forward
    monkeypatch.setattr(Qwen3MLP, "forward", lambda module, x: forward(module, x) * module.scale)

    def load_scaled():
        model = load()
        for index, layer in enumerate(model.model.layers):
            layer.mlp.register_buffer("scale", torch.tensor(1.0 + index))
        return model

    return load_scaled


def patterns_of(xla, model):
    parent, name = find_layers(model)
    traces = LayerTraces(model, (parent, name), xla, None)
    assert traces.refusal is None
    return find_patterns(
        len(parent.layers), lambda *pair: why_layer_differs(parent.layers, *pair) or traces.why_differs(*pair)
    )


def forward_and_backward(xla, model, policy=None, dtype=None):
    """Loss, gradients by their names in the model, and the program. Stacked unless `policy` is `None`."""
    use_static_kernels(model)
    xla.place(model).train()
    stack = None
    if policy is not None:
        parent, name = find_layers(model)
        plain = find_plain_linear(model)
        stack = LayerStack(parent.layers, xla, policy, by_rows=True, patterns=patterns_of(xla, model), plain=plain)
        stack.stack()
        parent.layers = stack
    ids = xla.send(torch.arange(48).reshape(4, 12) + 7)
    # As many pads as there are rows before.
    mask = xla.send((torch.arange(12) < torch.arange(12, 8, -1)[:, None]).long())
    xla.wait()
    with static_masks(), xla.autocast(dtype):
        loss = model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    program = torch_xla._XLAC._get_xla_tensors_hlo([loss, *gradients.values()])
    loss, gradients = xla.fetch([loss, gradients])
    if stack is not None:
        prefix = "model.layers."
        runs = [numbers for pattern in stack.patterns for numbers in pattern.numbers]
        numbers_of = {numbers[0]: numbers for numbers in runs}
        for name in (name for name in stack.tensors if prefix + name in gradients):
            first, _, rest = name.partition(".")
            for number, part in zip(numbers_of[int(first)], gradients.pop(prefix + name), strict=True):
                gradients[f"{prefix}{number}.{rest}"] = part
    return loss, gradients, program


@pytest.fixture(scope="module")
def computed(xla, load):
    """What [`forward_and_backward`] gives for a model that `load` makes: what several tests look at is computed once."""

    @cache
    def compute(
        policy=None,
        dtype=None,
        least_summed=activation_checkpointing._LEAST_SUMMED,
        block_tokens=layer_loop._BLOCK_TOKENS,
        **model,
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(activation_checkpointing, "_LEAST_SUMMED", least_summed)
            patch.setattr(layer_loop, "_BLOCK_TOKENS", block_tokens)
            return forward_and_backward(xla, load(**model), policy, dtype)

    return compute


def assert_same(found, expected, tolerance=1e-6):
    """The loss and all gradients are those of another computation."""
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=0)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert (gradient - found[1][name]).norm() < tolerance * gradient.norm(), name


DTYPES = pytest.mark.parametrize(
    "dtype", [None, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=["float32", "bfloat16"]
)


@DTYPES
@pytest.mark.parametrize("policy", ["none", "full", "dots"])
def test_loss_and_gradients_are_those_of_the_layers(computed, policy, dtype):
    assert_same(computed(policy, dtype), computed(None, dtype), 1e-6 if dtype is None else 2**-7)


@pytest.mark.ci
@pytest.mark.parametrize("policy", ["none", "full", "dots"])
def test_routers_have_the_gradient_of_their_load(computed, policy):
    routed = dict(layers=2, family="qwen3_moe", output_router_logits=True, router_aux_loss_coef=10.0)
    expected, found = computed(**routed), computed(policy, **routed)
    assert expected[0] > computed(layers=2, family="qwen3_moe")[0] + 1
    assert (" while(" in found[2]) == (policy != "none")
    assert_same(found, expected)


@pytest.mark.ci
def test_weights_that_only_choose_have_no_gradient(xla, load, monkeypatch):
    """As those of an indexer of attention: an optimizer leaves them alone, and does not decay them."""
    forward = Qwen3MLP.forward

    def forward_chosen(module, x):
        with torch.no_grad():
            chosen = module.chooser(x) > 0
        return forward(module, x) * chosen

    def choosing():
        model = load()
        for index, layer in enumerate(model.model.layers):
            torch.manual_seed(index)
            layer.mlp.chooser = torch.nn.Linear(32, 1)
        return model

    monkeypatch.setattr(Qwen3MLP, "forward", forward_chosen)
    expected = forward_and_backward(xla, choosing())
    assert not any("chooser" in name for name in expected[1])
    for policy in ("none", "full", "dots"):
        found = forward_and_backward(xla, choosing(), policy)
        assert (" while(" in found[2]) == (policy != "none")
        assert_same(found, expected)


@pytest.mark.ci
def test_layers_have_their_own_buffers(xla, load_scaled):
    expected = forward_and_backward(xla, load_scaled())
    for policy in ("none", "full"):
        model = load_scaled()
        layers = model.model.layers
        found = forward_and_backward(xla, model, policy)
        model.model.layers.unstack()
        assert_same(found, expected)
        assert [layer.mlp.scale.item() for layer in layers] == [1, 2, 3]


@pytest.mark.ci
@pytest.mark.parametrize("policy", ["full", "dots"])
def test_weights_are_converted_in_their_turn(xla, load, computed, monkeypatch, policy):
    expected = computed(policy, torch.bfloat16)
    monkeypatch.setattr("hf_tpu_ext.backends.xla.program_parts._LEAST_KEPT", 1)
    loss, gradients, program = forward_and_backward(xla, load(), policy, torch.bfloat16)
    assert torch.equal(loss, expected[0])
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[1][name]), name
    # Forward and backward, each of the weights of a layer.
    kept = program.count(" opt-barrier(") - expected[2].count(" opt-barrier(")
    assert kept == 2 * len(dict(load().model.layers[0].named_parameters()))
    # Nothing is converted where autocast is off.
    assert " opt-barrier(" not in forward_and_backward(xla, load(), policy)[2]


@pytest.mark.parametrize("policy", ["full", "dots"])
def test_gradients_of_all_layers_are_as_short_as_the_products(computed, policy):
    _, gradients, program = computed(policy, torch.bfloat16)
    *_, carried = (line.partition(" while(")[0] for line in program.splitlines() if " while(" in line)
    # Of the projections up and down, the weights and their gradients. A norm computes in float32.
    for shape, count in (("3,48,32", 2), ("3,32,48", 1)):
        assert (carried.count(f"f32[{shape}]"), carried.count(f"bf16[{shape}]")) == (count, count)
    assert "bf16[3,32]" not in carried
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}


@pytest.mark.parametrize("policy", ["full", "dots"])
def test_the_program_does_not_grow_with_depth(computed, policy):
    programs = [computed(policy)[2], computed(policy, layers=6)[2]]
    assert programs[0].count(" = ") == programs[1].count(" = ")
    assert programs[0].count(" while(") == 2


@pytest.mark.ci
@DTYPES
@pytest.mark.parametrize("policy", ["full", "dots"])
def test_blocks_of_rows_give_the_same(computed, policy, dtype):
    expected = computed(policy, dtype, least_summed=8)
    found = computed(policy, dtype, least_summed=8, block_tokens=2 * 12)
    # One in each of the loops over layers, and no more of anything that is large.
    assert (expected[2].count(" while("), found[2].count(" while(")) == (2, 4)
    assert found[2].count(" dot(") == expected[2].count(" dot(")
    assert_same(found, expected, 1e-6 if dtype is None else 2**-7)
    assert all(found[1][name].dtype == gradient.dtype for name, gradient in expected[1].items())


def test_kept_products_are_not_computed_again(computed):
    full, dots = (computed(policy, least_summed=8)[2].count(" dot(") for policy in ("full", "dots"))
    # q, k, v, o, gate and up.
    assert full - dots == 6


def assert_holds(state, expected):
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name].cpu(), tensor), name


def assert_loads_and_unstacks(model, parent, layers, expected):
    """A model whose `parent.layers` are stacked takes other values, and the layers have them afterwards."""
    doubled = {name: 2 * tensor for name, tensor in expected.items()}
    model.load_state_dict(doubled)
    parent.layers.unstack()
    parent.layers = layers
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.cpu(), doubled[name]), name


def test_state_dict_is_that_of_the_layers(xla, load):
    model, expected = load(), load().state_dict()
    xla.place(model)
    parent, _ = find_layers(model)
    layers = parent.layers
    parent.layers = stack = LayerStack(layers, xla, "full")
    stack.stack()
    assert all(len(parameter) == 3 for parameter in stack.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == load().num_parameters()
    for state in (model.state_dict(), model.state_dict(keep_vars=True)):
        assert_holds(state, expected)
    assert_loads_and_unstacks(model, parent, layers, expected)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in load().named_parameters()]


def test_answers_in_the_middle_of_training(xla, load):
    """With a cache of keys and values, which is each layer's own."""
    model = load()
    ids = torch.arange(6)[None] + 9
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    parent, _ = find_layers(model)
    parent.layers = stack = LayerStack(parent.layers, CPUBackend("for the test"), "full")
    stack.stack()
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected)


class Dropping(GradientCheckpointingLayer):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.dropout = nn.Dropout(0.5)

    def forward(self, hidden):
        return self.dropout(hidden * self.weight)


def test_dropout_is_drawn_the_same_way_twice_and_anew_for_each_layer(xla):
    layers = nn.ModuleList([Dropping() for _ in range(3)]).to(xla.device).train()
    stack = LayerStack(layers, xla, "full")
    stack.stack()
    hidden = xla.send(torch.ones(64, 64)).requires_grad_()
    xla.wait()
    # Something has drawn from the same state before.
    output = nn.functional.dropout(hidden, 0.5)
    for layer in stack[:3]:
        output = layer(output)
    output.sum().backward()
    output, gradient, drawn = xla.fetch([output, hidden.grad, stack.tensors["0.weight"].grad])
    # Each layer and the input keep a half, and double it: what is left is 16, and so is its gradient.
    assert torch.equal(output, gradient)
    assert set(output.unique().tolist()) == {0.0, 16.0}
    assert 0.03 < (output > 0).float().mean() < 0.1
    assert torch.equal(drawn, output.sum(0).expand(3, -1))


def test_what_differs_is_named(load):
    layers, patterns = load().model.layers, [Pattern(0, (1,), 3)]
    assert why_layers_differ(layers, patterns) is None
    layers[1].self_attn.scaling = 3.0
    assert why_layers_differ(layers, patterns) == "self_attn of layer 1 differs from that of layer 0"
    layers = load().model.layers
    layers[2].mlp.down_proj.weight.requires_grad_(False)
    assert why_layers_differ(layers, patterns) == "mlp.down_proj of layer 2 differs from that of layer 0"
    layers = load().model.layers
    layers[1].register_forward_hook(print)
    assert why_no_loop(layers) == "a hook is registered on the whole of layer 1"
    layers = load().model.layers
    layers[2].register_buffer("mask", torch.ones(2, dtype=torch.bool))
    assert why_no_loop(layers) == "the whole of layer 2 has buffers of bool"
    layers = load().model.layers
    layers[1].register_full_backward_pre_hook(print)
    assert why_no_loop(layers) == "a hook is registered on the whole of layer 1"
    # Each would be trained by itself.
    layers = load().model.layers
    layers[2].mlp = layers[0].mlp
    assert why_no_loop(layers) == "mlp.gate_proj.weight of layer 2 is also mlp.gate_proj.weight of layer 0"


# ---- Layers that repeat in a pattern ----


@pytest.mark.parametrize(
    ("kinds", "patterns"),
    [
        ("aaaa", [(0, (1,), 4)]),
        ("abab", [(0, (1, 1), 2)]),
        # Gemma 3 of 1B: four periods, and two local layers.
        ("aaaaab" * 4 + "aa", [(0, (5, 1), 4), (24, (2,), 1)]),
        # A dense layer before those with experts.
        ("baaaaaa", [(1, (1,), 6)]),
        ("aaabbbbc", [(0, (1,), 3), (3, (4,), 1)]),
        ("abcabcabd", [(0, (1, 1, 1), 2)]),
        ("abac", []),
        ("a", []),
    ],
)
def test_the_patterns_leave_the_fewest_layers(kinds, patterns):
    found = find_patterns(len(kinds), lambda earlier, number: None if kinds[earlier] == kinds[number] else "differs")
    assert found == patterns


@pytest.mark.ci
@DTYPES
# Which layers a pattern has is the same for each of them.
@pytest.mark.parametrize(
    "policy", ["full", *(pytest.param(each, marks=pytest.mark.slow) for each in ("none", "dots"))]
)
def test_alternating_layers_are_a_loop_over_their_period(xla, load_alternating, policy, dtype):
    expected = forward_and_backward(xla, load_alternating(), dtype=dtype)
    found = forward_and_backward(xla, load_alternating(), policy, dtype)
    # Forward and backward: over periods, in each over its local layers, and over the last two.
    assert found[2].count(" while(") == (0 if policy == "none" else 6)
    assert_same(found, expected, 1e-6 if dtype is None else 2**-7)


@pytest.mark.slow
def test_bfloat16_is_not_farther_from_float64_than_unrolled_layers(xla, load_alternating):
    model = load_alternating().double().train()
    ids = torch.arange(48).reshape(4, 12) + 7
    mask = (torch.arange(12) < torch.arange(12, 8, -1)[:, None]).long()
    model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
    exact = {name: parameter.grad for name, parameter in model.named_parameters()}
    errors = {}
    for policy in (None, "full", "dots"):
        _, gradients, _ = forward_and_backward(xla, load_alternating(), policy, torch.bfloat16)
        squares = [((gradients[name] - gradient).norm() / gradient.norm()) ** 2 for name, gradient in exact.items()]
        errors[policy] = torch.stack(squares).mean().sqrt()
    # Over all parameters: the same but for the order of sums.
    assert max(errors["full"], errors["dots"]) < 1.02 * errors[None], errors


def test_state_dict_of_a_pattern_is_that_of_the_layers(xla, load_alternating):
    model, expected = load_alternating(), load_alternating().state_dict()
    xla.place(model)
    parent, _ = find_layers(model)
    layers = parent.layers
    parent.layers = stack = LayerStack(layers, xla, "full", patterns=patterns_of(xla, model))
    stack.stack()
    assert stack.patterns == [(0, (2, 1), 2), (6, (2,), 1)]
    assert [len(stack.tensors[f"{number}.mlp.up_proj.weight"]) for number in (0, 2, 6)] == [4, 2, 2]
    assert_holds(model.state_dict(), expected)
    assert_loads_and_unstacks(model, parent, layers, expected)


def reason_of(xla, model, change=lambda layers: None):
    xla.place(model)
    parent, name = find_layers(model)
    change(parent.layers)
    traces = LayerTraces(model, (parent, name), xla, None)
    return traces.refusal or traces.why_differs(0, 1)


def test_layers_are_compared_by_what_they_compute(xla, load, monkeypatch):
    assert reason_of(xla, load()) is None
    forward = Qwen3MLP.forward

    def by_number(module, x):
        return forward(module, x) * (1 if module.number < 1 else 2)

    def number(layers):
        for index, layer in enumerate(layers):
            layer.mlp.number = index

    monkeypatch.setattr(Qwen3MLP, "forward", by_number)
    assert reason_of(xla, load(), number) == "layer 1 computes something else than layer 0"


def test_layers_that_change_their_buffers_are_no_loop(xla, load_scaled, monkeypatch):
    assert reason_of(xla, load_scaled()) is None
    forward = Qwen3MLP.forward
    monkeypatch.setattr(Qwen3MLP, "forward", lambda module, x: forward(module, x) + module.scale.add_(1))
    assert reason_of(xla, load_scaled()) == "layer 0 changes its buffer mlp.scale"


def test_a_model_that_needs_other_inputs_is_no_loop(xla, load, monkeypatch):
    def needs_images(module, x):
        raise ValueError("pixel_values are missing")

    monkeypatch.setattr(Qwen3MLP, "forward", needs_images)
    assert "Qwen3ForCausalLM cannot be traced with text alone (ValueError: pixel_values" in reason_of(xla, load())


def test_layers_are_compared_by_what_they_are_called_with(xla, load):
    model = load(4, "gemma2", layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=5)
    assert reason_of(xla, model) == "layer 1 is called with another attention_mask than layer 0"


def test_layers_that_are_called_with_a_trained_tensor_are_no_loop(xla, load):
    model = load()
    rotary = model.model.rotary_emb
    rotary.scale, forward = torch.nn.Parameter(torch.ones(1)), rotary.forward
    rotary.forward = lambda *args, **kwargs: tuple(part * rotary.scale for part in forward(*args, **kwargs))
    reason = "layers are called with position_embeddings.0, which gets a gradient"
    assert reason_of(xla, model) == reason
    rotary.scale.requires_grad_(False)
    assert reason_of(xla, model) is None


def test_what_a_model_adds_between_layers_is_no_loop(xla, load, monkeypatch):
    added = []

    def between(model):
        # What the model makes of the output of its first layer.
        upstream = CalledLayers.__iter__

        def calls(self):
            for number, call in enumerate(upstream(self)):
                yield (
                    (lambda hidden, *args, call=call, **kwargs: call(hidden, *args, **kwargs) + 1)
                    if number == 0 and added
                    else call
                )

        monkeypatch.setattr(CalledLayers, "__getitem__", lambda self, index: calls(self))
        return model

    added.append(True)
    assert reason_of(xla, between(load())) == "the model computes something between layers 0 and 1"
    # Where it does so with some batches only, and was seen to do nothing.
    added.clear()
    model = load()
    xla.place(model).train()
    patterns = patterns_of(xla, model)
    model.model.layers = stack = LayerStack(model.model.layers, xla, "full", patterns=patterns)
    stack.stack()
    ids = xla.send(torch.arange(12)[None])
    with static_masks():
        model(input_ids=ids, use_cache=False)
        added.append(True)
        with pytest.raises(UserError, match="something between layers 0 and 1. Set scan_layers='off'"):
            model(input_ids=ids, use_cache=False)
        added.clear()
        model(input_ids=ids, use_cache=False)
