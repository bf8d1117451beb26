import pytest
from collectives import Traffic, make_table, needed_gathers, needed_reductions
from schemes import CHIPS, LENGTH, ROWS_PER_CHIP, SCHEMES, SIZES, make_inputs, run_schemes

from hf_tpu_ext.step.train_step import MICRO_STEP, OPTIMIZER_STEP


PROGRAMS = [
    ("data", OPTIMIZER_STEP),
    ("data_accumulated", MICRO_STEP),
    ("data_accumulated", OPTIMIZER_STEP),
    ("fsdp_accumulated", MICRO_STEP),
    ("fsdp_accumulated", OPTIMIZER_STEP),
]


def train(schemes, directory):
    make_inputs(directory, **SIZES, num_hidden_layers=1)
    return run_schemes(schemes, directory)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return train(list(dict(PROGRAMS)), tmp_path_factory.mktemp("collectives"))


def check_data_parallel(run):
    for kind in run.dumps:
        program = run.program(kind)
        # A compiler may put several gradients into one operation, and transpose them.
        reduced = [tensor.num_bytes for item in program.reductions for tensor in item.tensors]
        gradients = run.trainable if kind == OPTIMIZER_STEP else []
        assert sorted(reduced) == sorted(parameter.num_bytes for parameter in gradients)
        assert not program.gathers and not program.scatters
        # Sums of metrics.
        assert sum(item.num_bytes for item in (*program.numbers, *program.others)) < 100


def check_table(runs, programs, data_parallel):
    rows = make_table(runs).splitlines()[2:]
    assert [tuple(row.split(" | ")[:2]) for row in rows] == [
        (f"| {SCHEMES[scheme].title}", kind) for scheme, kind in programs
    ]
    cells = rows[data_parallel].split(" | ")
    assert cells[6] == cells[7]  # all-reduces of gradients: measured, needed


@pytest.mark.slow
def test_one_scheme_and_its_row(tmp_path):
    run = train(["data"], tmp_path)
    check_data_parallel(run["data"])
    check_table(run, PROGRAMS[:1], data_parallel=0)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["data", "data_accumulated"])
def test_data_parallel_reduces_each_gradient_once_per_optimizer_step(runs, scheme):
    check_data_parallel(runs[scheme])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [MICRO_STEP, OPTIMIZER_STEP])
def test_fully_sharded_holds_an_eighth(runs, kind):
    whole, split = (runs[scheme].program(kind).argument_bytes for scheme in ("data_accumulated", "fsdp_accumulated"))
    assert 1 / 8 <= split / whole < 1 / 7


@pytest.mark.slow
@pytest.mark.parametrize("kind", [MICRO_STEP, OPTIMIZER_STEP])
def test_fully_sharded_gathers_weights_for_each_pass_and_reduces_gradients(runs, kind):
    run = runs["fsdp_accumulated"]
    program = run.program(kind)
    assert Traffic.of(program.gathers) == needed_gathers(run)
    assert Traffic.of([*program.reductions, *program.scatters]) == needed_reductions(run, kind)
    # What the tokens of all look up in the split embedding, and the gradient of that.
    activations = [item for item in program.others if any("f" in tensor.dtype for tensor in item.tensors)]
    assert sorted(item.kind for item in activations) == ["all-gather", "all-reduce"]
    shape = (CHIPS * ROWS_PER_CHIP * LENGTH, SIZES["hidden_size"])
    assert [tensor.dims for item in activations for tensor in item.tensors] == [shape, shape]
    # And who looks up what; the mask.
    rest = sum(item.num_bytes for item in program.others if item not in activations)
    assert rest < 0.01 * sum(parameter.num_bytes for parameter in run.parameters)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "kind"), PROGRAMS)
def test_no_slices_of_activations_move_between_chips(runs, scheme, kind):
    assert not {item.kind for item in runs[scheme].program(kind).others} & {"all-to-all", "collective-permute"}


@pytest.mark.slow
def test_table_has_a_row_for_each_program(runs):
    check_table(runs, PROGRAMS, data_parallel=2)
