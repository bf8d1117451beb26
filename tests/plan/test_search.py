"""Which variants a search compiles, and which it shows."""

import math
import re
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest

from hf_tpu_ext.errors import UserError
from hf_tpu_ext.formatting import count
from hf_tpu_ext.hardware.topologies import find_topology
from hf_tpu_ext.plan.hlo_cost import Cost
from hf_tpu_ext.plan.programs import CompiledProgram
from hf_tpu_ext.plan.result import Plan, Trial
from hf_tpu_ext.plan.search import find_largest_batch
from hf_tpu_ext.plan.search import search as search_step_by_step


GB = 10**9
NAMES = ("rematerialization", "mesh", "per_device_train_batch_size")
# Bytes of activations of a row, and cycles of it, by what is computed again.
ROW = {"none": (3 * GB, 76 * 10**5), "dots": (GB, 84 * 10**5), "full": (GB // 4, 99 * 10**5)}
STATE = {None: 2 * GB, "data": 12 * GB, "fsdp": 2 * GB}


def traced(topology, tried=None):
    """What a search is given: it traces a variant, and what it returns compiles it. Settings are added to `tried`."""

    def trace(settings):
        if tried is not None:
            tried.append(settings)
        return lambda jobs: make(topology, settings)

    return trace


def search(*args):
    """What a search has found at its end."""
    *_, found = search_step_by_step(*args)
    return found


def make(topology, settings):
    """A plan whose memory grows with its rows, and whose arithmetic does, too."""
    rows, mesh = int(settings["per_device_train_batch_size"]), settings.get("mesh")
    chip = find_topology(topology)
    row_bytes, cycles = ROW[settings["rematerialization"]]
    temp = rows * row_bytes
    program = CompiledProgram("training step", (rows * chip.num_chips, 1024), 1.0)
    if (excess := STATE[mesh] + temp - chip.chip.memory_bytes) > 0:
        error = f"RESOURCE_EXHAUSTED: Exceeded hbm capacity by {excess / 2**30:.2f}G."
        program = replace(program, error=error, arguments={"weights": STATE[mesh]})
    else:
        memory = {"argument": STATE[mesh], "output": 0, "alias": 0, "temp": temp, "generated_code": 0}
        # Weights are read once, whatever the batch is.
        cost = Cost(rows * cycles, STATE[mesh] + rows * 10**8, [], [])
        program = replace(program, memory=memory, arguments={"weights": STATE[mesh]}, cost=cost)
    return Plan("recipe", {}, chip, [program], {})


@pytest.mark.parametrize(("topology", "start"), [("v5e-1", 4), ("v5e-8", 4), ("v5e-1", 64), ("v5e-1", 1)])
def test_finds_the_largest_batch_of_each_variant_in_few_compilations(topology, start):
    tried = []
    meshes = [None] if topology == "v5e-1" else ["data", "fsdp"]
    first = {"rematerialization": "full", "per_device_train_batch_size": str(start)} | (
        {} if meshes == [None] else {"mesh": "fsdp"}
    )
    found = search(make(topology, first), first, NAMES, traced(topology, tried))
    limit = found.topology.chip.memory_bytes
    assert len(tried) <= 5 * len(ROW) * len(meshes)
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


def try_all(batches, attempt):
    """The batches that are tried, where `attempt` tells what comes of each."""
    tried = [next(batches)]
    while True:
        try:
            tried.append(batches.send(attempt(tried[-1])))
        except StopIteration:
            return tried


GROWTH = {
    "along a line": lambda rows: GB + rows * GB // 9,
    "slower from 16 rows on": lambda rows: GB + min(rows, 16) * GB // 2 + max(0, rows - 16) * GB // 50,
    "faster from 16 rows on": lambda rows: GB + min(rows, 16) * GB // 50 + max(0, rows - 16) * GB // 2,
    "at once at 48 rows": lambda rows: GB + rows * GB // 30 + (8 * GB if rows >= 48 else 0),
    "in steps": lambda rows: 15 * GB + rows // 40 * GB,
    "hardly": lambda rows: GB + rows * 10**6,
}


@pytest.mark.parametrize("is_told", [True, False], ids=["told by how much", "not told"])
@pytest.mark.parametrize("start", [1, 4, 50, 3000])
@pytest.mark.parametrize("growth", GROWTH)
def test_finds_the_largest_batch_however_memory_grows(growth, start, is_told):
    """What the compiler makes of programs of other sizes is not quite along a line."""
    needs, limit = GROWTH[growth], find_topology("v5e-1").chip.memory_bytes

    def attempt(rows):
        needed = needs(rows)
        return Trial({}, needed <= limit, needed if is_told or needed <= limit else None)

    tried = try_all(find_largest_batch(start, limit), attempt)
    largest = max(rows for rows in range(1, 20000) if needs(rows) <= limit)
    assert max(rows for rows in tried if needs(rows) <= limit) >= largest / 1.1 - 1
    assert len(tried) == len(set(tried))
    assert len(tried) <= 5 + math.ceil(math.log2(max(start, largest)))


def test_a_search_needs_few_compilations_along_a_line():
    batches = find_largest_batch(4, 137 * 10**8)
    assert try_all(batches, lambda rows: Trial({}, rows <= 137, rows * 10**8)) == [4, 8, 128]


def test_shows_what_nothing_is_better_than():
    first = {"rematerialization": "full", "per_device_train_batch_size": "4"}
    found = search(make("v5e-1", first), first, NAMES, traced("v5e-1"))
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


def test_the_present_settings_are_not_advised_as_a_change():
    first = {"rematerialization": "none", "per_device_train_batch_size": "4"}
    found = search(make("v5e-1", first), first, NAMES, traced("v5e-1"))
    same = next(line for line in found.advice if "present global batch size" in line)
    assert same.startswith("the fastest with the present global batch size: the present settings (expected step ")


def test_what_is_known_is_there_after_each_variant(capsys):
    """Somebody may stop before the end."""
    first = {"rematerialization": "dots", "mesh": "fsdp", "per_device_train_batch_size": "4"}
    tried = []
    steps = search_step_by_step(make("v5e-8", first), first, NAMES, traced("v5e-8", tried))
    for number in range(1, 8):
        found = next(steps)
        assert tried[0] == first and len(tried) == number
        assert all(trial.settings in tried for trial in found.trials)
        assert found.advice[0].startswith(
            f"the largest batch of {count(len(tried), 'variant')} that was found to fit: "
        )
        told = capsys.readouterr().out.splitlines()
        # A line of what was kept before.
        if number > 1:
            assert re.match(rf"variant {number - 1} \(\d of 6 combinations done\): rematerialization: ", told[-1])
    steps.close()
    assert len(tried) == 7


@pytest.mark.parametrize(("state", "batches"), [(17.5, ["8"]), (16.8, ["8"]), (16.6, ["8", "4", "1", "2"])])
def test_smaller_batches_are_not_tried_where_none_can_fit(monkeypatch, capsys, state, batches):
    """Of 16.91 GB, weights and state leave less than the share of one row, which is 0.25 GB."""
    monkeypatch.setitem(STATE, "data", round(state * GB))
    settings = {"rematerialization": "full", "mesh": "data", "per_device_train_batch_size": "8"}
    variants = []
    found = search(make("v5e-8", settings), settings, ["per_device_train_batch_size"], traced("v5e-8", variants))
    tried = [variant["per_device_train_batch_size"] for variant in variants]
    assert tried[: len(batches)] == batches
    if len(batches) == 1:
        assert tried == batches and found.trials == []
        assert " too much, nor does a smaller batch\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_varies_what_it_is_told_to(name):
    settings = {"rematerialization": "full", "mesh": "fsdp", "per_device_train_batch_size": "4"}
    tried = []
    search(make("v5e-8", settings), settings, [name], traced("v5e-8", tried))
    assert len(tried) > 1
    for variant in tried:
        assert variant.keys() == settings.keys()
        assert {key for key, value in variant.items() if value != settings[key]} <= {name}


def test_says_what_came_of_each(capsys):
    settings = {"rematerialization": "full", "mesh": "data", "per_device_train_batch_size": "40"}
    search(make("v5e-8", settings), settings, ["mesh"], traced("v5e-8"))
    told = capsys.readouterr().out
    assert "Search: 2 combinations. The first was compiled in 1 s; at this rate all take 2 s, 1 at once." in told
    assert "variant 1 (1 of 2 combinations done): rematerialization: full, mesh: data, " in told
    assert "mesh: data, per_device_train_batch_size: 40: does not fit, 5.09 GB too much\n" in told
    assert "mesh: fsdp, per_device_train_batch_size: 40: fits, 12.00 GB, " in told


def test_says_that_nothing_fits():
    first = {"rematerialization": "full", "per_device_train_batch_size": "4", "mesh": "data"}

    def too_large(settings):
        return traced("v5e-8")(settings | {"mesh": "data", "per_device_train_batch_size": "1000"})

    found = search(make("v5e-8", first), first, NAMES, too_large)
    assert found.trials == []
    assert "No variant that was tried fits" in found.advice[0]


def test_gives_up_where_it_cannot_be_told():
    first = {"rematerialization": "full", "per_device_train_batch_size": "4"}
    tried = []

    def failing(settings):
        tried.append(settings)
        failed = replace(make("v5e-1", settings), programs=[], unknown=["the TPU compiler is not installed"])
        return lambda jobs: failed

    found = search(make("v5e-1", first), first, NAMES, failing)
    assert len(tried) == len(ROW)
    assert found.trials == []
    assert found.advice == []


def test_a_compiler_without_memory_ends_no_search():
    """Of this host: the variants that it has compiled are worth hours."""
    first = {"rematerialization": "full", "per_device_train_batch_size": "4"}

    def trace(settings):
        def compile(jobs):
            if settings["rematerialization"] == "none":
                raise UserError("The compiler was killed.\nTake a machine with more memory.")
            return make("v5e-1", settings)

        return compile

    found = search(make("v5e-1", first), first, NAMES, trace)
    assert {trial.settings["rematerialization"] for trial in found.trials} == {"dots", "full"}


def test_on_several_hosts_weights_are_also_split_over_some_of_them():
    tried = []

    def noted(settings):
        tried.append(settings["mesh"])
        return traced("v5e-16")({**settings, "mesh": "fsdp"})

    first = {"rematerialization": "full", "mesh": "fsdp", "per_device_train_batch_size": "1"}
    search(make("v5e-16", first), first, ["mesh"], noted)
    # First what is compiled already.
    assert tried == ["fsdp", "data", "data=4,fsdp=4", "data=2,fsdp=8"]


@pytest.mark.parametrize("jobs", [2, 3, 100])
def test_several_at_once_find_the_same(jobs):
    first = {"rematerialization": "full", "mesh": "fsdp", "per_device_train_batch_size": "4"}
    own, alone, together = make("v5e-8", first), [], []
    variants = len(ROW) * 2
    # So many do wait for each other.
    at_once = min(jobs, variants)
    barrier, lock = threading.Barrier(at_once), threading.Lock()
    under_way = Counter()

    def one_at_a_time(settings):
        alone.append(settings)
        return traced("v5e-8")(settings)

    def several(settings):
        assert threading.current_thread() is threading.main_thread()
        together.append(settings)
        place = len(together)

        def compile_it(programs_at_once):
            with lock:
                under_way["now"] += programs_at_once
                under_way["most"] = max(under_way["most"], under_way["now"])
            if place <= at_once:
                barrier.wait(timeout=60)
            # Those that began later end first.
            time.sleep(0.001 * (variants - place % variants))
            with lock:
                under_way["now"] -= programs_at_once
            return make("v5e-8", settings)

        return compile_it

    expected = search(own, first, NAMES, one_at_a_time)
    assert search(own, first, NAMES, several, jobs) == expected
    assert sorted(map(str, together)) == sorted(map(str, alone))
    assert at_once <= under_way["most"] <= jobs
