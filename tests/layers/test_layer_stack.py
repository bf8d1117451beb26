"""Stacked layers compute what the layers do, and give the gradients of each."""

import pytest
import torch
import torch_xla
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_tpu_ext.backends.cpu import CPUBackend
from hf_tpu_ext.examples.tiny import make_model
from hf_tpu_ext.layers.attention import static_masks
from hf_tpu_ext.layers.layer_list import find_layers, why_layers_differ
from hf_tpu_ext.layers.layer_scan import LayerStack
from hf_tpu_ext.layers.static_kernels import use_static_kernels


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    def load(layers=3):
        directory = tmp_path_factory.mktemp("model")
        make_model(directory, hidden_size=32, intermediate_size=48, num_hidden_layers=layers)
        return AutoModelForCausalLM.from_pretrained(directory)

    return load


def forward_and_backward(xla, model, policy=None, dtype=None):
    """Loss, gradients by their names in the model, and the program. Stacked unless `policy` is `None`."""
    use_static_kernels(model)
    xla.place(model).train()
    stack = None
    if policy is not None:
        parent, name = find_layers(model)
        stack = LayerStack(parent.layers, xla, policy, by_rows=True)
        stack.stack()
        parent.layers = stack
    ids = xla.send(torch.arange(48).reshape(4, 12) + 7)
    # As many pads as there are rows before.
    mask = xla.send((torch.arange(12) < torch.arange(12, 8, -1)[:, None]).long())
    xla.wait()
    with static_masks(), xla.autocast(dtype):
        loss = model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    program = torch_xla._XLAC._get_xla_tensors_hlo([loss, *gradients.values()])
    loss, gradients = xla.fetch([loss, gradients])
    if stack is not None:
        prefix = "model.layers."
        for name in [name for name in gradients if name.startswith(prefix)]:
            whole = gradients.pop(name)
            rest = name.removeprefix(f"{prefix}0.")
            gradients.update({f"{prefix}{index}.{rest}": part for index, part in enumerate(whole)})
    return loss, gradients, program


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("policy", ["none", "full", "dots"])
def test_loss_and_gradients_are_those_of_the_layers(xla, load, policy, dtype):
    loss, gradients, _ = forward_and_backward(xla, load(), dtype=dtype)
    again_loss, again_gradients, _ = forward_and_backward(xla, load(), policy, dtype)
    tolerance = 1e-6 if dtype is None else 2**-7
    torch.testing.assert_close(again_loss, loss, rtol=tolerance, atol=0)
    assert gradients.keys() == again_gradients.keys()
    for name, gradient in gradients.items():
        assert (gradient - again_gradients[name]).norm() < tolerance * gradient.norm(), name


@pytest.mark.parametrize("policy", ["full", "dots"])
def test_weights_are_converted_in_their_turn(xla, load, monkeypatch, policy):
    expected = forward_and_backward(xla, load(), policy, torch.bfloat16)
    monkeypatch.setattr("hf_tpu_ext.backends.xla.loops._LEAST_KEPT", 1)
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
def test_the_program_does_not_grow_with_depth(xla, load, policy):
    programs = [forward_and_backward(xla, load(layers), policy)[2] for layers in (3, 6)]
    assert programs[0].count(" = ") == programs[1].count(" = ")
    assert programs[0].count(" while(") == 2


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("policy", ["full", "dots"])
def test_blocks_of_rows_give_the_same(xla, load, monkeypatch, policy, dtype):
    monkeypatch.setattr("hf_tpu_ext.layers.activation_checkpointing._LEAST_SUMMED", 8)
    loss, gradients, program = forward_and_backward(xla, load(), policy, dtype)
    monkeypatch.setattr("hf_tpu_ext.layers.row_blocks._BLOCK_TOKENS", 2 * 12)
    again_loss, again_gradients, in_blocks = forward_and_backward(xla, load(), policy, dtype)
    # One in each of the loops over layers, and no more of anything that is large.
    assert (program.count(" while("), in_blocks.count(" while(")) == (2, 4)
    assert in_blocks.count(" dot(") == program.count(" dot(")
    tolerance = 1e-6 if dtype is None else 2**-7
    torch.testing.assert_close(again_loss, loss, rtol=tolerance, atol=0)
    for name, gradient in gradients.items():
        assert again_gradients[name].dtype == gradient.dtype
        assert (gradient - again_gradients[name]).norm() < tolerance * gradient.norm(), name


def test_kept_products_are_not_computed_again(xla, load, monkeypatch):
    monkeypatch.setattr("hf_tpu_ext.layers.activation_checkpointing._LEAST_SUMMED", 8)
    full, dots = (forward_and_backward(xla, load(), policy)[2].count(" dot(") for policy in ("full", "dots"))
    # q, k, v, o, gate and up.
    assert full - dots == 6


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
        assert state.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(state[name].cpu(), tensor), name
    doubled = {name: 2 * tensor for name, tensor in expected.items()}
    model.load_state_dict(doubled)
    stack.unstack()
    parent.layers = layers
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in load().named_parameters()]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.cpu(), doubled[name]), name


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
    (run,) = stack[:3]
    output = run(nn.functional.dropout(hidden, 0.5))
    output.sum().backward()
    output, gradient, drawn = xla.fetch([output, hidden.grad, stack.stacked["weight"].grad])
    # Each layer and the input keep a half, and double it: what is left is 16, and so is its gradient.
    assert torch.equal(output, gradient)
    assert set(output.unique().tolist()) == {0.0, 16.0}
    assert 0.03 < (output > 0).float().mean() < 0.1
    assert torch.equal(drawn, output.sum(0).expand(3, -1))


def test_what_differs_is_named(load):
    layers = load().model.layers
    assert why_layers_differ(layers) is None
    layers[1].self_attn.scaling = 3.0
    assert why_layers_differ(layers) == "self_attn of layer 1 differs from that of layer 0"
    layers = load().model.layers
    layers[2].mlp.down_proj.weight.requires_grad_(False)
    assert why_layers_differ(layers) == "mlp.down_proj of layer 2 differs from that of layer 0"
    layers = load().model.layers
    layers[1].register_forward_hook(print)
    assert why_layers_differ(layers) == "a hook is registered on the whole of layer 1"
