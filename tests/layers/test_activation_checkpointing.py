"""Activation checkpointing on XLA changes no number, and really recomputes."""

from collections import UserDict
from functools import partial

import pytest
import torch
import torch_xla
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_tpu_ext.examples.tiny import make_model
from hf_tpu_ext.layers.activation_checkpointing import recompute, rematerialize
from hf_tpu_ext.layers.attention import static_masks
from hf_tpu_ext.layers.random_numbers import RandomNumbers
from hf_tpu_ext.layers.static_kernels import use_static_kernels


LAYERS = 2
# transformers marks the layers and the module that holds them.
MARKED = LAYERS + 1


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS)


def forward_and_backward(xla, model_dir, policy, dropout=0.0, lora=False, dtype=None):
    """The loss, the gradients and the program that computes them, before XLA's own passes."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, attention_dropout=dropout)
    if lora:
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    use_static_kernels(model)
    xla.place(model).train()
    if policy != "none":
        model.gradient_checkpointing_enable()
    rematerialize(model, policy, xla)
    ids = xla.send(torch.arange(24).reshape(2, 12) + 7)
    mask = xla.send(torch.ones(2, 12, dtype=torch.int64))
    seed = xla.send(torch.tensor(5, dtype=torch.int32))
    xla.wait()
    before = xla.counters()
    with static_masks(), xla.autocast(dtype), RandomNumbers(seed):
        loss = model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
    # As a trainer does it: autocast remembers weights that it has cast, also those cast without gradients.
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    program = torch_xla._XLAC._get_xla_tensors_hlo([loss, *gradients.values()])
    fetched = xla.fetch({"loss": loss, "gradients": gradients})
    xla.wait()
    assert (xla.counters() - before).executions == 1, "the step is cut in two"
    return fetched["loss"], fetched["gradients"], program


def count(operation, program):
    return program.count(f" {operation}(")


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_no_number_changes_and_each_layer_is_recomputed_behind_a_barrier(xla, model_dir, lora):
    loss, gradients, program = forward_and_backward(xla, model_dir, "none", lora=lora)
    again_loss, again_gradients, again = forward_and_backward(xla, model_dir, "full", lora=lora)
    assert torch.equal(loss, again_loss)
    assert gradients.keys() == again_gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, again_gradients[name]), name
        assert gradient.abs().max() > 0, name
    # The barrier is what keeps XLA from seeing that the recomputation is a duplicate.
    assert count("opt-barrier", program) == 0
    assert count("opt-barrier", again) == LAYERS
    # Each layer: four projections, two products of attention, two of the feed-forward network (what the third one gives
    # is not needed again); and two of LoRA.
    assert count("dot", again) - count("dot", program) == LAYERS * (8 + 2 * lora)


@pytest.mark.ci
def test_dropout_is_drawn_the_same_way_twice(xla, model_dir):
    loss, gradients, _ = forward_and_backward(xla, model_dir, "none", dropout=0.3)
    again_loss, again_gradients, _ = forward_and_backward(xla, model_dir, "full", dropout=0.3)
    plain_loss, _, _ = forward_and_backward(xla, model_dir, "none")
    assert torch.equal(loss, again_loss) and not torch.equal(loss, plain_loss)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, again_gradients[name]), name


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_dots_recomputes_all_but_the_products_with_weights_and_changes_no_number(xla, model_dir, lora, monkeypatch):
    monkeypatch.setattr("hf_tpu_ext.layers.activation_checkpointing._LEAST_SUMMED", 8)
    loss, gradients, program = forward_and_backward(xla, model_dir, "none", lora=lora)
    again_loss, again_gradients, again = forward_and_backward(xla, model_dir, "dots", lora=lora)
    assert torch.equal(loss, again_loss)
    assert gradients.keys() == again_gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, again_gradients[name]), name
    assert count("opt-barrier", again) == LAYERS
    if not lora:
        # The scores of attention, and what they are multiplied with.
        assert count("dot", again) - count("dot", program) == LAYERS * 2
    # The softmax of attention.
    assert count("exponential", again) - count("exponential", program) == LAYERS


@pytest.mark.ci
def test_dots_keeps_dropout_and_autocast(xla, model_dir):
    both = {"dropout": 0.3, "dtype": torch.bfloat16}
    loss, gradients, _ = forward_and_backward(xla, model_dir, "none", **both)
    again_loss, again_gradients, _ = forward_and_backward(xla, model_dir, "dots", **both)
    assert torch.equal(loss, again_loss)
    for name, gradient in gradients.items():
        # XLA leaves out roundings to bfloat16 within what it fuses, which is not the same in both programs.
        error = (gradient - again_gradients[name]).norm() / gradient.norm()
        assert error < 2**-7, name


def test_pytorchs_own_function_would_not_do(xla, model_dir):
    """Why there is one of this package: without `torch.xla` it fails, and it has no barrier."""
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    xla.place(model).train().gradient_checkpointing_enable()
    ids = xla.send(torch.arange(24).reshape(2, 12) + 7)
    with pytest.raises(AttributeError, match="xla"):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


def test_only_layers_that_checkpoint_are_changed(xla, model_dir):
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    rematerialize(model, "full", xla)
    assert not any(vars(module).get("_gradient_checkpointing_func") for module in model.modules())
    rematerialize(nn.Linear(2, 2), "full", xla)
    model.gradient_checkpointing_enable()
    before = [layer._gradient_checkpointing_func for layer in model.model.layers]
    rematerialize(model, "full", xla)
    functions = [vars(module).get("_gradient_checkpointing_func") for module in model.modules()]
    assert sum(isinstance(function, partial) and function.func is recompute for function in functions) == MARKED
    assert all(layer._gradient_checkpointing_func not in before for layer in model.model.layers)


def test_checkpointing_again_keeps_the_functions_of_the_same_policy(xla, model_dir):
    """Another object would be another step. Another policy is another function."""
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    model.gradient_checkpointing_enable()

    def functions():
        return [vars(module).get("_gradient_checkpointing_func") for module in model.modules()]

    rematerialize(model, "full", xla)
    full = functions()
    rematerialize(model, "full", xla)
    assert all(one is other for one, other in zip(functions(), full, strict=True))
    rematerialize(model, "dots", xla)
    assert sum(one is not other for one, other in zip(functions(), full, strict=True)) == MARKED


class Sharing(GradientCheckpointingLayer):
    """One of such layers leaves its keys for the others, as in Gemma 3n."""

    def __init__(self, index):
        super().__init__()
        self.index, self.keys, self.queries = index, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, hidden, shared):
        if self.index == 1:
            shared["keys"] = (self.keys(hidden),)
        if self.index == 0:
            return hidden + self.keys(hidden)
        return hidden + torch.tanh(self.queries(hidden)) * shared["keys"][0]


@pytest.mark.parametrize("make", [dict, UserDict])
@pytest.mark.parametrize("by_keyword", [False, True])
def test_what_a_layer_leaves_for_others_has_its_gradient(xla, make, by_keyword):
    def gradients(device, backend):
        torch.manual_seed(0)
        layers = nn.ModuleList([Sharing(index) for index in range(3)]).to(device).train()
        for layer in layers if backend is not None else []:
            layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, None
        if backend is not None:
            rematerialize(layers, "full", backend)
            assert all(layer._gradient_checkpointing_func is not None for layer in layers)
        hidden, shared = torch.linspace(-1, 1, 12).reshape(3, 4).to(device), make()
        with RandomNumbers(torch.tensor(5, dtype=torch.int32, device=device)):
            for layer in layers:
                hidden = layer(hidden, shared=shared) if by_keyword else layer(hidden, shared)
            hidden.square().sum().backward()
        return {
            name: parameter.grad.cpu() for name, parameter in layers.named_parameters() if parameter.grad is not None
        }

    ours, right = gradients(xla.device, xla), gradients("cpu", None)
    assert ours.keys() == right.keys() and "1.keys.weight" in right
    for name, gradient in right.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-6, msg=name)
