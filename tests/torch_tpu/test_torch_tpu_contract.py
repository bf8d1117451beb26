"""Names of torch_tpu that this package uses and that are private or experimental, at the version that the extra asks for."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.fx.experimental.proxy_tensor import make_fx

from hf_tpu_ext.backends.collectives import cut_at_collectives
from hf_tpu_ext.backends.torch_tpu.fully_sharded import is_split, whole


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


def test_what_a_launcher_sets_up_has_a_name(tpu):
    from torch_tpu._internal.distributed import distributed

    assert callable(torch.tpu.distributed.set_tpu_launch_env)
    # Where it is not set, processes cannot connect their chips.
    assert b"TORCH_TPU_SLICEBUILDER_ADDRESSES" in Path(distributed.__file__).read_bytes()


def test_collectives_of_the_device_have_a_name(tpu):
    assert "tpu" in torch.distributed.Backend.backend_capability["tpu_dist"]


def test_asking_whether_there_is_a_device_does_not_take_it(tpu):
    """So a process that starts one for each chip may ask."""
    script = """
import os, sys
sys.path.insert(0, sys.argv[1])
import cpu_plugin
cpu_plugin.start()
import torch
threads = lambda: len(os.listdir("/proc/self/task"))
before = threads()
assert torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == "tpu"
assert threads() == before
torch.zeros((), device="tpu:0")
assert threads() > before
"""
    subprocess.run([sys.executable, "-c", script, str(Path(__file__).parent)], check=True, timeout=60)


def test_a_module_whose_weights_are_split_is_of_a_class_of_its_own(tpu):
    """Which gets the name of the one that it was of."""
    dist = torch.distributed
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        split = fully_shard(torch.nn.Linear(2, 2), mesh=mesh)
        assert type(split).__bases__ == (FSDPModule, torch.nn.Linear)
        assert all(map(is_split, split.parameters())) and not is_split(whole(split.weight))
        split(torch.ones(1, 2))
        # As at the end of a backward pass.
        assert not any(map(is_split, split.parameters()))
        split.reshard()
        assert all(map(is_split, split.parameters()))
    finally:
        dist.destroy_process_group()


def test_exchanges_are_cut_out_of_a_graph(tpu):
    """What was written to a view is before them, as it was, and state that is changed in place is after them."""

    def step(data, state):
        rows = data.new_zeros(4, 2)
        rows[:2].copy_(data)
        state.mul_(0.5)
        total = torch.ops.hf_tpu_ext.sum_over_ranks(rows.sum().reshape(1), True)
        state.add_(total)
        return state * 2, rows

    given = [torch.arange(4.0, device="tpu:0").reshape(2, 2), torch.ones(1, device="tpu:0")]
    graphs = []

    def keep(graph, arguments):
        graphs.append(graph)
        return lambda *given: graph(*given)

    graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
    cut = cut_at_collectives(graph, given, keep)
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        doubled, rows = cut(*given)
        # Parts of one result each.
        small = make_fx(lambda data: (torch.ops.hf_tpu_ext.sum_over_ranks(data * 3, True) * 2,), tracing_mode="fake")
        (six,) = cut_at_collectives(small(given[1]), given[1:], tpu._compile_graph)(torch.ones(1, device="tpu:0"))
    finally:
        torch.distributed.destroy_process_group()
    assert six.item() == 6.0
    assert (doubled.item(), given[1].item(), rows.sum().item()) == (13.0, 6.5, 6.0)
    before, after = ([node.target for node in graph.graph.nodes] for graph in graphs)
    assert torch.ops.aten.mul.Tensor not in before and torch.ops.aten.mul.Tensor in after


def test_a_compiled_function_changes_its_arguments_where_they_are(tpu):
    """And nothing else that shared memory with them: copies made before, which torch_tpu makes when one of the two changes."""
    from torch_tpu._internal.compile.compiler import StaticCompiler

    def step(state, data):
        state["moment"].mul_(0.5).add_(data)
        state["weight"].sub_(state["moment"])
        return {"sum": state["weight"].sum(), "kept": state["kept"]}

    state = {name: tpu.send(torch.full((64, 64), 2.0)) for name in ("moment", "weight", "kept")}
    data = tpu.send(torch.ones(64, 64))
    clone, copied = state["weight"].clone(), torch.empty_like(state["moment"]).copy_(state["moment"])
    detached, viewed = state["weight"].detach(), state["moment"].view(-1)
    donated = []
    with pytest.MonkeyPatch.context() as patch:
        compile_graph = StaticCompiler.__call__

        def noted(self, *args, **kwargs):
            donated.append(kwargs["donated_inputs"])
            return compile_graph(self, *args, **kwargs)

        patch.setattr(StaticCompiler, "__call__", noted)
        run = tpu.compile_function(step, [state, data])
    for moment, weight in ((2.0, 0.0), (2.0, -2.0)):
        made = run(state, data)
        assert made["kept"] is state["kept"] or torch.equal(made["kept"].cpu(), state["kept"].cpu())
        found = [tensor.cpu().unique().tolist() for tensor in (state["moment"], state["weight"], viewed, detached)]
        assert found == [[moment], [weight], [moment], [weight]] and made["sum"].item() == weight * 64 * 64
    assert [tensor.cpu().unique().tolist() for tensor in (clone, copied, data)] == [[2.0], [2.0], [1.0]]
    assert donated == [[0, 1]]


def test_what_is_behind_a_barrier_is_computed_again(tpu):
    """As activation checkpointing does: without it, a compiler would find that both products are one."""
    from torch_tpu._internal.compile.compiler import StaticCompiler

    def twice(data):
        (again,) = tpu.separate([data])
        return [data @ data, again @ again]

    data = tpu.send(torch.arange(9.0).reshape(3, 3))
    graph = make_fx(twice, tracing_mode="fake", _allow_non_fake_inputs=True)(data)
    compiled = StaticCompiler(debug=True)(graph, [data])
    first, second = compiled(data)
    text = compiled.mlir_text
    assert text.count("stablehlo.optimization_barrier") == 1 and text.count("stablehlo.dot_general") == 2
    assert torch.equal(first.cpu(), second.cpu()) and first.cpu()[2, 2].item() == 111.0


def test_memory_that_was_given_to_a_program_is_gone(tpu):
    """So weights are in memory once, and who reads a copy of them that was made between two steps is told."""
    state = [tpu.send(torch.ones(8))]
    run = tpu.compile_function(lambda state: [state[0].add_(1.0).sum()], [state])
    run(state)
    between = state[0].clone()
    run(state)
    assert state[0].cpu().tolist() == [3.0] * 8
    with pytest.raises(RuntimeError, match="deleted or donated"):
        (between + 1).cpu()
