"""Placing a model, sending and fetching on the XLA backend, and the defaults that eager devices have."""

import gc

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hf_tpu_ext.backends.cpu import CPUBackend
from hf_tpu_ext.backends.insight import Counters
from hf_tpu_ext.backends.xla.tensors import live_tensors
from hf_tpu_ext.examples.tiny import make_model


@pytest.fixture(scope="module")
def tied_model_dir(tmp_path_factory):
    return make_model(
        tmp_path_factory.mktemp("tied"),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        tie_word_embeddings=True,
    )


@pytest.fixture(params=["xla", "cpu"])
def backend(request, xla):
    return xla if request.param == "xla" else CPUBackend("for the test")


class Tied(nn.Module):
    """Ties that no config declares: between siblings, into a container, and a bias."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.inner = nn.ModuleDict({"third": nn.Linear(4, 4)})
        self.free = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.inner["third"].weight = self.first.weight
        self.inner["third"].bias = self.second.bias

    def forward(self, x):
        return self.free(self.inner["third"](self.second(self.first(x).tanh()).tanh()).tanh())


# ---- place ----


def test_ties_of_a_plain_module_survive(backend):
    model, reference = Tied(), Tied()
    reference.load_state_dict(model.state_dict())
    assert backend.place(model) is model
    assert {parameter.device.type for parameter in model.parameters()} == {backend.device.type}
    assert model.first.weight is model.second.weight is model.inner["third"].weight
    assert model.second.bias is model.inner["third"].bias
    assert model.free.weight is not model.first.weight
    assert len(list(model.parameters())) == len(list(reference.parameters())) == 5
    # The gradient of a tied weight sums over its uses.
    x = torch.randn(3, 4)
    model(backend.send(x)).square().sum().backward()
    reference(x).square().sum().backward()
    torch.testing.assert_close(backend.fetch(model.first.weight.grad), reference.first.weight.grad)


def test_ties_of_a_transformers_model_survive(backend, tied_model_dir):
    model = AutoModelForCausalLM.from_pretrained(tied_model_dir)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    expected = model.lm_head.weight.detach().clone()
    backend.place(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.device.type == backend.device.type
    torch.testing.assert_close(backend.fetch(model.lm_head.weight), expected)


def test_placing_twice_changes_nothing(backend):
    model = backend.place(Tied())
    parameters = list(model.parameters())
    backend.place(model)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


def test_a_frozen_weight_stays_frozen(backend):
    model = Tied()
    model.first.weight.requires_grad_(False)
    backend.place(model)
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == ["first.weight"]


# ---- send ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_special_values_are_data(xla, dtype):
    """Moved by `.to`, each of 0, 1 and -1 is a constant of the program: one more to compile."""
    data = xla.send(torch.arange(6.0))

    def compiles(move):
        xla.wait()
        before = xla.counters()
        results = []
        for value in (3, 0, 1, -1, 7):
            results.append(xla.fetch(data * move(torch.tensor(value, dtype=dtype))).tolist())
        assert results == [[value * x for x in range(6)] for value in (3.0, 0.0, 1.0, -1.0, 7.0)]
        return (xla.counters() - before).compiles

    assert compiles(xla.send) <= 1
    assert compiles(lambda tensor: tensor.to(xla.device)) >= 2


def test_structures_are_kept(backend):
    structure = {
        "a": torch.tensor([1, 2]),
        "b": [torch.tensor(0.0), {"c": torch.tensor([[True]])}],
        "d": "text",
        "e": None,
    }
    sent = backend.send(structure)
    assert sent["a"].device.type == sent["b"][0].device.type == sent["b"][1]["c"].device.type == backend.device.type
    assert (sent["d"], sent["e"]) == ("text", None)
    assert sent["b"][0].shape == () and sent["b"][1]["c"].dtype == torch.bool
    fetched = backend.fetch(sent)
    assert fetched["a"].tolist() == [1, 2] and fetched["b"][1]["c"].tolist() == [[True]]
    assert {type(sent["b"]), type(fetched["b"])} == {list}


# ---- fetch ----


def test_fetching_a_structure_is_one_read(xla):
    tensors = xla.send({"loss": torch.tensor(2.0), "sums": [torch.arange(3), torch.ones(2, 2)]})
    computed = {"loss": tensors["loss"] * 3, "sums": [value + 1 for value in tensors["sums"]], "name": "train"}
    before = xla.counters()
    fetched = xla.fetch({**computed, "tuple": (computed["loss"], 5), "none": None})
    xla.wait()
    spent = xla.counters() - before
    assert (spent.reads, spent.executions) == (1, 1)
    assert fetched["loss"].item() == 6 and fetched["tuple"][0] is fetched["loss"]
    assert fetched["sums"][0].tolist() == [1, 2, 3] and fetched["sums"][1].tolist() == [[2, 2], [2, 2]]
    assert fetched["name"] == "train" and fetched["none"] is None and fetched["tuple"][1] == 5


def test_fetching_what_is_on_the_host_reads_nothing(xla):
    tensor = torch.ones(3)
    before = xla.counters()
    assert xla.fetch([tensor, 1])[0] is tensor
    assert xla.fetch({}) == {}
    assert (xla.counters() - before).reads == 0


def test_fetched_parameters_are_tensors_without_a_graph(backend):
    model = backend.place(nn.Linear(2, 2))
    fetched = backend.fetch(dict(model.named_parameters()))
    assert {type(value) for value in fetched.values()} == {torch.Tensor}
    assert not any(value.requires_grad for value in fetched.values())


def test_shared_memory_stays_shared(backend):
    model = backend.place(Tied())
    fetched = backend.fetch(dict(model.state_dict(keep_vars=True)))
    pointers = {name: value.data_ptr() for name, value in fetched.items()}
    assert pointers["first.weight"] == pointers["second.weight"] == pointers["inner.third.weight"]
    assert pointers["second.bias"] == pointers["inner.third.bias"]
    assert len(set(pointers.values())) == 5


# ---- The rest ----


def test_counters_subtract_every_field():
    assert Counters(5, 4.0, 9, 3, 1) - Counters(1, 1.5, 2, 3, 1) == Counters(4, 2.5, 7, 0, 0)
    assert CPUBackend("for the test").counters() == Counters() and CPUBackend("for the test").compiles() == 0


def test_counters_count(xla):
    data = xla.send(torch.arange(7.0))
    xla.wait()
    # A compilation that failed, on purpose in other tests, has a time in one of the two only.
    start, compiles = xla.counters(), xla.compiles()
    results = []
    for _ in range(3):
        results.append((data * 1.2345).sin())
        xla.end_step()
    xla.wait()
    computed = xla.counters() - start
    assert (computed.compiles, computed.executions, computed.reads, computed.fallbacks) == (1, 3, 0, 0)
    assert computed.compile_seconds > 0
    assert xla.compiles() - compiles == computed.compiles
    results[0].cpu()
    # Its length is in the data, so the host finds it.
    data.nonzero().cpu()
    read = xla.counters() - start
    assert read.reads >= 2
    torch.unique_consecutive(data.new_zeros(3))
    assert (xla.counters() - start).fallbacks > 0


def test_autocast_computes_in_the_dtype_and_keeps_the_weights(backend):
    layer = backend.place(nn.Linear(4, 4))
    inputs = backend.send(torch.ones(2, 4))
    with backend.autocast(torch.bfloat16):
        assert layer(inputs).dtype == torch.bfloat16
    with backend.autocast(None):
        assert layer(inputs).dtype == torch.float32
    assert layer.weight.dtype == torch.float32


def test_autocast_does_not_remember_weights_that_were_cast_without_a_graph(backend):
    layer = backend.place(nn.Linear(4, 4))
    inputs = backend.send(torch.ones(2, 4))
    with backend.autocast(torch.bfloat16):
        with torch.no_grad():
            layer(inputs)
        loss = layer(inputs).sum()
    loss.backward()
    assert backend.fetch(layer.weight.grad).abs().max() > 0


def test_random_state_is_repeatable(xla):
    xla.set_rng_state(1234)
    assert xla.rng_state() == 1234
    first = xla.fetch(torch.rand(8, device=xla.device))
    second = xla.fetch(torch.rand(8, device=xla.device))
    xla.set_rng_state(1234)
    again = xla.fetch(torch.rand(8, device=xla.device))
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert CPUBackend("for the test").rng_state() is None


def test_device_is_named(xla):
    assert xla.device_name == "CPU, compiled by XLA"
    assert xla.num_chips == 1
    assert "CPU" in CPUBackend("for the test").device_name


def test_a_parameter_whose_tensor_is_gone_is_passed_over(xla):
    """The loss of a deleted model is held, as in a notebook whose cell is run again."""
    model = torch.nn.Linear(2, 2)
    # A cycle, as models have it by their hooks.
    model.itself = [model]
    loss = model.to(xla.device)(torch.ones(1, 2, device=xla.device)).sum()
    del model
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    assert any(not tensor.is_xla and not tensor.is_cpu for tensor in tensors)
    assert any(tensor is loss for tensor in live_tensors())
