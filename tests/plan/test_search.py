"""Which variants a search compiles, and which it shows."""

from dataclasses import replace

import pytest

from hf_tpu_ext.hardware.topologies import find_topology
from hf_tpu_ext.plan.hlo_cost import Cost
from hf_tpu_ext.plan.result import Plan, PlannedProgram
from hf_tpu_ext.plan.search import search


GB = 10**9
# Bytes of activations of a row, and operations on it, by what is computed again.
ROW = {"none": (3 * GB, 1e12), "dots": (GB, 1.1e12), "full": (GB // 4, 1.3e12)}
STATE = {None: 2 * GB, "data": 12 * GB, "fsdp": 2 * GB}


def make(topology, settings):
    """A plan whose memory grows with its rows, and whose arithmetic does, too."""
    rows, mesh = int(settings["per_device_train_batch_size"]), settings.get("mesh")
    chip = find_topology(topology)
    row_bytes, flops = ROW[settings["rematerialization"]]
    temp = rows * row_bytes
    program = PlannedProgram("training step", (rows * chip.num_chips, 1024), 1.0)
    if STATE[mesh] + temp > chip.chip.memory_bytes:
        program = replace(program, error="RESOURCE_EXHAUSTED: Exceeded hbm capacity by 1.00G.")
    else:
        memory = {"argument": STATE[mesh], "output": 0, "alias": 0, "temp": temp, "generated_code": 0}
        # Weights are read once, whatever the batch is.
        cost = Cost(int(rows * flops), int(rows * flops), STATE[mesh] + rows * 10**8, [], [])
        program = replace(program, memory=memory, arguments={"weights": STATE[mesh]}, cost=cost)
    return Plan("recipe", {}, chip, [program], {})


@pytest.mark.parametrize(("topology", "start"), [("v5e-1", 4), ("v5e-8", 4), ("v5e-1", 64), ("v5e-1", 1)])
def test_finds_the_largest_batch_of_each_variant_in_few_compilations(topology, start):
    tried = []

    def noted(settings):
        tried.append(settings)
        return make(topology, settings)

    meshes = [None] if topology == "v5e-1" else ["data", "fsdp"]
    first = {"rematerialization": "full", "per_device_train_batch_size": str(start)} | (
        {} if meshes == [None] else {"mesh": "fsdp"}
    )
    found = search(make(topology, first), start, noted)
    limit = found.topology.chip.memory_bytes
    assert len(tried) <= 7 * len(ROW) * len(meshes)
    assert len(tried) == len({tuple(settings.items()) for settings in tried})
    for mesh in meshes:
        for policy, (row_bytes, _) in ROW.items():
            rows = [
                int(settings["per_device_train_batch_size"])
                for settings in tried
                if settings["rematerialization"] == policy and settings.get("mesh") == mesh
            ]
            largest = max((row for row in rows if STATE[mesh] + row * row_bytes <= limit), default=0)
            assert largest >= 0.85 * ((limit - STATE[mesh]) // row_bytes)


def test_shows_what_nothing_is_better_than():
    first = {"rematerialization": "full", "per_device_train_batch_size": "4"}
    found = search(make("v5e-1", first), 4, lambda settings: make("v5e-1", settings))
    assert found.trials
    speeds = [trial.tokens_per_second for trial in found.trials]
    peaks = [trial.peak_bytes for trial in found.trials]
    assert speeds == sorted(speeds, reverse=True)
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)
    # With few rows nothing has to be computed again.
    assert found.trials[0].settings["rematerialization"] == "none"
    largest = next(line for line in found.advice if "largest batch" in line)
    assert "rematerialization: full" in largest


def test_says_that_nothing_fits():
    first = {"rematerialization": "full", "per_device_train_batch_size": "4", "mesh": "data"}

    def too_large(settings):
        return make("v5e-8", settings | {"mesh": "data", "per_device_train_batch_size": "1000"})

    found = search(make("v5e-8", first), 4, too_large)
    assert found.trials == []
    assert "Nothing that was tried fits" in found.advice[0]


def test_gives_up_where_it_cannot_be_told():
    first = {"rematerialization": "full", "per_device_train_batch_size": "4"}
    tried = []

    def failing(settings):
        tried.append(settings)
        return replace(make("v5e-1", settings), programs=[], unknown=["the compiler for TPU is not there"])

    found = search(make("v5e-1", first), 4, failing)
    assert len(tried) == len(ROW)
    assert found.trials == []
    assert found.advice == []
