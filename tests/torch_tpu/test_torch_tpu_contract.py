"""Names of torch_tpu that this package uses and that are private or experimental, at the version that the extra asks for."""

import importlib.metadata

import pytest
import torch


def test_version():
    assert importlib.metadata.version("torch_tpu").startswith("0.2.")


def test_cache_statistics_count_what_operators_ask_for_and_compile(tpu):
    def counts():
        torch.accelerator.synchronize()
        stats = torch.tpu._get_cache_stats()
        return stats.num_cache_reqs, stats.num_cache_hits, stats.num_compilations

    ones = torch.ones(3, 11, 5, device="tpu:0")
    counts_before = counts()
    ones.tanh()
    first = counts()
    ones.tanh()
    second = counts()
    assert first[2] > counts_before[2]
    assert second[2] == first[2] and second[0] > first[0]
    assert second[0] - second[1] == second[2]
    durations = [entry.compilation_duration.total_seconds() for entry in torch.tpu._get_cache_stats().per_entry_stats]
    assert sum(durations) > 0


def test_the_generator_of_random_numbers_has_a_state_on_the_host(tpu):
    generator = torch.tpu.default_generators[0]
    state = generator.get_state()
    assert (state.dtype, state.device.type) == (torch.uint8, "cpu")
    torch.manual_seed(3)
    torch.rand(4, device="tpu:0")
    noted = tpu.rng_state()
    drawn = torch.rand(4, device="tpu:0").cpu()
    tpu.set_rng_state(noted)
    assert torch.equal(torch.rand(4, device="tpu:0").cpu(), drawn)


def test_public_device_functions_refuse_callers_outside_of_pytorch(tpu):
    """So `torch.accelerator` is asked."""
    with pytest.raises(RuntimeError, match="torch.accelerator"):
        torch.tpu.is_available()
    assert torch.accelerator.current_accelerator().type == "tpu"


def test_moving_a_model_unties_its_weights(tpu):
    """Which `place` undoes."""
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    assert tpu.place(model)["a"].weight is model["b"].weight
    fetched = tpu.fetch(dict(model.state_dict(keep_vars=True)))
    assert fetched["a.weight"] is fetched["b.weight"]
