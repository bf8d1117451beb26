import pytest
from collectives import CLOSING_STEP, MICRO_STEP, SCHEMES, Traffic, make_inputs, make_table, run_scheme


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("collectives")
    make_inputs(directory, num_hidden_layers=1)
    return {name: run_scheme(name, directory) for name in ("data_accumulated", "fsdp_accumulated")}


def test_data_parallel_reduces_each_gradient_once_per_optimizer_step(runs):
    run = runs["data_accumulated"]
    micro, closing = run.program(MICRO_STEP), run.program(CLOSING_STEP)
    # What is left are sums of metrics.
    assert not micro.gathers and not micro.scatters and not micro.reductions
    assert sum(item.num_bytes for item in (*micro.numbers, *micro.others)) < 1000
    # A compiler may put several gradients into one operation, and transpose them.
    reduced = [tensor.num_bytes for item in closing.reductions for tensor in item.tensors]
    assert sorted(reduced) == sorted(parameter.num_bytes for parameter in run.trainable)
    everything = sum(item.num_bytes for item in (*closing.reductions, *closing.numbers, *closing.others))
    assert everything == pytest.approx(sum(parameter.num_bytes for parameter in run.trainable), rel=0.01)


@pytest.mark.parametrize("kind", [MICRO_STEP, CLOSING_STEP])
def test_fully_sharded_holds_an_eighth(runs, kind):
    whole, split = (run.program(kind).argument_bytes for run in runs.values())
    assert 1 / 8 <= split / whole < 1 / 6


@pytest.mark.parametrize("kind", [MICRO_STEP, CLOSING_STEP])
def test_fully_sharded_gathers_weights_for_each_pass_and_reduces_gradients(runs, kind):
    run = runs["fsdp_accumulated"]
    program = run.program(kind)
    assert Traffic.of(program.gathers) == run.needed_gathers()
    # That of the embedding comes another way.
    reduced = sum(item.num_bytes for item in (*program.reductions, *program.scatters))
    assert sum(p.num_bytes for p in run.trainable if "embed" not in p.name) == reduced


def test_table_has_a_row_for_each_program(runs):
    rows = make_table(runs).splitlines()[2:]
    assert [row.split(" | ")[:2] for row in rows] == [
        [f"| {SCHEMES[name].title}", kind] for name in runs for kind in (MICRO_STEP, CLOSING_STEP)
    ]
    assert rows[1].split(" | ")[6] == rows[1].split(" | ")[7]  # all-reduces of gradients: measured, needed
