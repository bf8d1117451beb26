"""Eight devices train as one does at the same global batch, and the work is really shared between them."""

import copy
import io
import json
import math

import pytest
import torch
from peft import PEFT_TYPE_TO_CONFIG_MAPPING
from safetensors.torch import load_file
from trl import SFTConfig

from hf_tpu_ext import TPUSFTConfig
from hf_tpu_ext.trainers.run.chips import count_all_chips


pytestmark = pytest.mark.ci


#: An epoch of three batches and a half.
ROWS = 56
SIX = dict(per_device_train_batch_size=2, max_steps=6, warmup_steps=3, rows=ROWS)
EVALUATED = dict(SIX, per_device_eval_batch_size=1, eval_strategy="steps", eval_steps=3)
#: Shows its arguments to callbacks, and writes a checkpoint.
SAVED = dict(EVALUATED, shows=True, save_strategy="steps", save_steps=6, save_only_model=False)
RUNS = {
    "data": dict(EVALUATED),
    "data-lora": dict(SIX, lora={}),
    "data-accumulated": dict(SAVED, gradient_accumulation_steps=2),
    "data-lora-accumulated": dict(SIX, lora={}, gradient_accumulation_steps=2),
    "fsdp": dict(SIX, fsdp="full_shard"),
    "fsdp-lora": dict(EVALUATED, lora={}, mesh="fsdp"),
    "fsdp-accumulated": dict(SIX, mesh="fsdp", gradient_accumulation_steps=4),
    "both": dict(SIX, mesh="data=2,fsdp=4"),
    "both-lora-accumulated": dict(EVALUATED, lora={}, mesh="data=2,fsdp", gradient_accumulation_steps=2),
    "data-scanned-accumulated": dict(SIX, scan_layers="on", gradient_accumulation_steps=2),
    "fsdp-lora-scanned": dict(EVALUATED, lora={}, mesh="fsdp", scan_layers="on"),
    "data-stacked": dict(SIX, scan_layers="on", rematerialization="none"),
    "fsdp-stacked": dict(EVALUATED, scan_layers="on", rematerialization="none", mesh="fsdp"),
}
DROPPING = {
    "dropping-data": dict(SIX, scan_layers="on", lora={"lora_dropout": 0.1}),
    "dropping-fsdp": dict(SIX, scan_layers="on", lora={"lora_dropout": 0.1}, mesh="fsdp"),
    "dropping-unrolled": dict(SIX, lora={"lora_dropout": 0.1}, gradient_accumulation_steps=2),
    "dropping-neftune": dict(SIX, neftune_noise_alpha=5.0, gradient_accumulation_steps=2),
}
SILENT = {
    "silent-data": dict(SIX, logging_steps=100, gradient_accumulation_steps=2),
    "silent-dropout": dict(SIX, logging_steps=100, gradient_accumulation_steps=2, lora={"lora_dropout": 0.1}),
    "silent-neftune": dict(SIX, logging_steps=100, gradient_accumulation_steps=2, neftune_noise_alpha=5.0),
    "silent-fsdp": dict(SIX, logging_steps=100, mesh="fsdp"),
}


MOVED = {
    "moved-data": dict(SIX, moves=True),
    "moved-fsdp": dict(SIX, moves=True, mesh="fsdp"),
}
ALL = {**RUNS, **SILENT, **DROPPING, **MOVED}
BY_DEFAULT = {
    "data-accumulated",
    "both-lora-accumulated",
    "dropping-fsdp",
    "dropping-neftune",
    "moved-fsdp",
}


def for_each(names):
    """Runs a test with the run of each name, the rest of which are slow."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=[] if name in BY_DEFAULT else [pytest.mark.slow]) for name in names]
    )


@pytest.fixture(scope="module")
def model_for(tiny_model, two_layer_model):
    """Directory of a model of one layer, or of two where they run as a loop."""
    return lambda config: str(two_layer_model if "scan_layers" in config else tiny_model)


@pytest.fixture(scope="module")
def train_on_eight(model_for, on_devices, tmp_path_factory):
    def train(spec):
        spec = {name: {"model_dir": model_for(config), **config} for name, config in spec.items()}
        return on_devices(8, model_for({}), spec, tmp_path_factory.mktemp("eight"))

    return train


@pytest.fixture(scope="module")
def eight(train_on_eight, tmp_path_factory):
    """The runs by default, and one that takes up the first, each with its name; what they printed; and the first one's checkpoint."""
    directory = tmp_path_factory.mktemp("saved")
    spec = {name: config for name, config in ALL.items() if name in BY_DEFAULT}
    spec["data-accumulated"] = first = {**spec["data-accumulated"], "output_dir": str(directory)}
    spec["resumed"] = {**first, "resume": True, "max_steps": 8}
    return *train_on_eight(spec), directory / "checkpoint-6"


@pytest.fixture(scope="module")
def all_eight(eight, train_on_eight):
    return eight[0] | train_on_eight({name: config for name, config in ALL.items() if name not in BY_DEFAULT})[0]


@pytest.fixture
def result(request, name):
    """What the run of a name told."""
    return (
        request.getfixturevalue("eight")[0][name] if name in BY_DEFAULT else request.getfixturevalue("all_eight")[name]
    )


def of_one_device(config, chips=8):
    """The same run for a device that takes the rows of all."""
    of_chips = {"mesh", "fsdp", "lora", "scan_layers", "rematerialization", "moves", "rows", "shows"}
    rest = {key: value for key, value in config.items() if key not in of_chips and not key.startswith("save_")}
    return {key: value * chips if key.startswith("per_device") else value for key, value in rest.items()}


@pytest.fixture(scope="module")
def trained():
    return {}


@pytest.fixture
def on_one_device(trained, rows, runs, model_for):
    """Trains with the rows of all: once for each configuration, whatever the mesh."""

    def train(config, how, **more):
        runs.model_dir = model_for(config)
        more = {"lora": config.get("lora"), **more, **of_one_device(config)}
        key = repr((runs.model_dir, how.__name__, sorted(more.items(), key=str)))
        if key not in trained:
            trained[key] = how(kwargs={"train_dataset": rows(ROWS)}, **more)
        return trained[key]

    return train


@for_each(RUNS)
def test_steps_are_those_of_stock_on_one_device(result, runs, on_one_device, same_logs, as_trainer, name):
    same_logs(as_trainer(result["log"]), on_one_device(RUNS[name], runs.stock))


@for_each(DROPPING)
def test_random_numbers_are_those_of_one_device(result, runs, on_one_device, same_logs, as_trainer, name):
    scan = DROPPING[name].get("scan_layers", "off")
    one = on_one_device(DROPPING[name], runs.ours, config_cls=TPUSFTConfig, scan_layers=scan)
    same_logs(as_trainer(result["log"]), one)


@for_each(MOVED)
def test_a_weight_that_a_callback_places_otherwise(result, runs, on_one_device, same_logs, as_trainer, name):
    same_logs(as_trainer(result["log"]), on_one_device(MOVED[name], runs.stock))
    assert result["causes"][0] == "weights or moments are placed otherwise on the chips"


def without_evaluations(result, name):
    """What the runtime did in each step but those before an evaluation. That of the last step is not counted."""
    every = ALL[name].get("eval_steps", 100)
    return [step for number, step in enumerate(result["steps"], 1) if number % every or number == 6]


@for_each([*RUNS, *SILENT, *DROPPING])
def test_a_micro_step_is_one_execution_and_only_the_first_compiles(result, name):
    accumulation = ALL[name].get("gradient_accumulation_steps", 1)
    executions, _, compiles, fallbacks = zip(*without_evaluations(result, name), strict=True)
    assert set(executions) == {accumulation}
    # None at all where an earlier run of the process had the same program.
    assert compiles[0] <= (2 if accumulation > 1 else 1) and sum(compiles[1:]) == 0
    assert sum(fallbacks) == 0
    assert result["recompiles"] == 0


@for_each([*RUNS, *SILENT, *DROPPING])
def test_a_log_is_one_read_and_nothing_else_is_read(result, name):
    # The first step is when the driver looks at the shards, the last one when the run's own log is read.
    reads = {reads for _, reads, _, _ in without_evaluations(result, name)[1:-1]}
    assert reads == ({0} if name in SILENT else {1})


@for_each(RUNS)
def test_no_chip_has_the_rows_of_another(result, name):
    assert result["batch_shard"] == [2, 40]


@for_each(RUNS)
def test_each_chip_scores_its_own_tokens(result, name):
    """Not the partitioner's way: each turn of the head's loop would gather the whole head."""
    _, length = result["batch_shard"]
    # Evaluation takes fewer.
    assert max(result["head_tokens"]) == 2 * (length - 1)


PARTS = {
    "data": 1,
    "data-accumulated": 1,
    "data-lora-accumulated": 1,
    "fsdp": 8,
    "fsdp-accumulated": 8,
    "fsdp-lora": 8,
    "both": 4,
    "both-lora-accumulated": 4,
    "dropping-fsdp": 8,
}


@for_each(PARTS)
def test_weights_and_moments_are_split_as_the_mesh_says(result, name):
    for parameter, shape in result["shapes"].items():
        expected = math.prod(shape) // (PARTS[name] if len(shape) > 1 else 1)
        assert math.prod(result["weight_shards"][parameter]) == expected, parameter
        if parameter in result["moment_shards"]:
            assert result["moment_shards"][parameter] == result["weight_shards"][parameter]


@for_each(ALL)
def test_gradients_wait_on_their_chip_where_that_is_the_same_step(result, name):
    data_parallel = not {"fsdp", "mesh"} & ALL[name].keys()
    assert (result["mesh"]["fsdp"] == 1) == data_parallel
    assert result["local_gradients"] == data_parallel


def test_the_start_says_how_chips_share_the_work(eight):
    _, output, _ = eight
    assert "8 chips" in output
    assert "global batch size 32 (2 per chip x 2 gradient accumulation steps x 8 chips)" in output
    assert "  data parallel (mesh data=8)\n" in output
    assert "  fully sharded (mesh fsdp=8)\n" in output
    assert "fully sharded in 2 groups (mesh data=2 x fsdp=4)" in output


@pytest.mark.parametrize("name", ["data-accumulated", "resumed"])
def test_arguments_stay_as_they_were_given(eight, name):
    """In every callback and after the run, and in what a tracker records. What a process takes at once is upstream's word for all."""
    results, output, _ = eight
    assert results[name]["sizes"] == [[2, 1]]
    reported = results[name]["reported"]
    assert (reported["per_device_train_batch_size"], reported["per_device_eval_batch_size"]) == (2, 1)
    assert (reported["train_batch_size"], reported["eval_batch_size"]) == (16, 8)
    assert results[name]["train_batch_size"] == 16
    evaluations = [entry for entry in results[name]["log"] if "eval_loss" in entry]
    assert evaluations
    # Upstream compares rows of a device with rows of a process.
    assert "do not match" not in output


def test_what_is_saved_has_the_arguments_as_they_were_given(eight):
    *_, checkpoint = eight
    arguments = torch.load(checkpoint / "training_args.bin", weights_only=False)
    assert type(arguments) is TPUSFTConfig
    assert (arguments.per_device_train_batch_size, arguments.per_device_eval_batch_size) == (2, 1)
    assert (arguments.train_batch_size, arguments.eval_batch_size) == (2, 1)
    assert json.loads((checkpoint / "trainer_state.json").read_text())["train_batch_size"] == 16


def test_the_batch_of_a_process_is_that_of_its_chips(tmp_path):
    args = SFTConfig(str(tmp_path), per_device_train_batch_size=3, per_device_eval_batch_size=2, use_cpu=True)
    given = args.to_dict()
    count_all_chips(args, 1)
    assert type(args) is SFTConfig and args.train_batch_size == 3
    count_all_chips(args, 4)
    assert isinstance(args, SFTConfig) and (args.train_batch_size, args.eval_batch_size) == (12, 8)
    assert args.to_dict() == given
    args.per_device_train_batch_size = 5
    assert args.train_batch_size == 20
    # For another trainer, which counts its own chips.
    saved = io.BytesIO()
    torch.save(args, saved)
    saved.seek(0)
    for other in (copy.copy(args), copy.deepcopy(args), torch.load(saved, weights_only=False)):
        assert type(other) is SFTConfig and (other.train_batch_size, other.per_device_train_batch_size) == (5, 5)


def test_a_smaller_batch_is_found_of_which_each_chip_has_as_many_rows(tiny_model, runs, rows, on_devices, tmp_path):
    """Of the 7 rows that accelerate goes on to, four chips take 4, and train as if these had been the first."""
    config = dict(max_steps=2, warmup_steps=0, gradient_accumulation_steps=2, train_sampling_strategy="sequential")
    finds = dict(config, per_device_train_batch_size=2, auto_find_batch_size=True, most_rows=7, rows=ROWS)
    results, _ = on_devices(4, tiny_model, {"data": dict(finds), "fsdp": dict(finds, mesh="fsdp")}, tmp_path)
    one = runs.stock(per_device_train_batch_size=4, kwargs={"train_dataset": rows(ROWS)}, **config)
    expected = [(entry["loss"], entry["grad_norm"]) for entry in one.state.log_history if "loss" in entry]
    for result in results.values():
        assert result["train_batch_size"] == 4
        found = [(entry["loss"], entry["grad_norm"]) for entry in result["log"] if "loss" in entry]
        assert found == [pytest.approx(numbers, rel=1e-5) for numbers in expected] and len(found) == 2


def test_a_library_that_reads_values_on_the_host(model_for, rows, runs, on_devices, same_logs, as_trainer, tmp_path):
    """Chips that compute gradients by themselves cannot. From then on they do not: in the first step, or behind sums that wait."""
    config = dict(SIX, lora={}, step_replay=False)
    accumulated = dict(config, gradient_accumulation_steps=2)
    spec = {
        "at once": dict(config, calls_without_reading=0),
        "between micro-steps": dict(accumulated, calls_without_reading=5),
    }
    results, _ = on_devices(4, model_for({}), copy.deepcopy(spec), tmp_path)
    for result, of_chips in zip(results.values(), (config, accumulated), strict=True):
        one = of_one_device({key: value for key, value in of_chips.items() if key != "step_replay"}, chips=4)
        same_logs(as_trainer(result["log"]), runs.stock(lora={}, kwargs={"train_dataset": rows(ROWS)}, **one))
        assert result["local_gradients"]


def test_adapters_that_look_at_the_global_batch(model_for, rows, runs, on_devices, same_logs, as_trainer, tmp_path):
    """A hook that takes the part of a gradient out, and a mean over all tokens."""
    adapters = [kind for kind in ("OSF", "LILY") if kind in PEFT_TYPE_TO_CONFIG_MAPPING]
    # Means over tokens are also over padding.
    config = dict(SIX, learning_rate=1e-2, pad_to_multiple_of=48)
    spec = {kind: {**config, "lora": {"peft_type": kind, "target_modules": ["q_proj", "v_proj"]}} for kind in adapters}
    results, _ = on_devices(4, model_for({}), copy.deepcopy(spec), tmp_path)
    for kind, config in spec.items():
        one = runs.stock(lora=config["lora"], kwargs={"train_dataset": rows(ROWS)}, **of_one_device(config, chips=4))
        same_logs(as_trainer(results[kind]["log"]), one)


@pytest.mark.slow
def test_a_run_moves_between_topologies(tiny_model, on_devices, tmp_path):
    """8 chips, then 1, then 4 with split weights, then 8 in two groups, with one recipe; and 8 again, bit for bit."""
    recipe = dict(
        per_device_train_batch_size=2,
        max_steps=16,
        warmup_steps=5,
        save_strategy="steps",
        save_steps=4,
        save_only_model=False,
    )

    def train(name, count, output_dir, **config):
        spec = {name: {**recipe, "output_dir": str(tmp_path / output_dir), **config}}
        results, output = on_devices(count, tiny_model, spec, tmp_path)
        return results[name], output

    undisturbed, _ = train("undisturbed", 8, "undisturbed")
    train("first", 8, "moved", stop_after=4)
    _, output = train("second", 1, "moved", stop_after=8, resume=True)
    assert "a global batch size of 16 on 8 chips" in output and "2 per chip x 8 gradient accumulation steps" in output
    train("third", 4, "moved", stop_after=12, resume=True, mesh="fsdp")
    moved, _ = train("fourth", 8, "moved", resume=True, mesh="data=2,fsdp=4")
    losses, others = (
        [(entry["loss"], entry["grad_norm"]) for entry in run["log"] if "loss" in entry]
        for run in (moved, undisturbed)
    )
    assert len(losses) == 16
    for mine, other in zip(losses, others, strict=True):
        assert mine == pytest.approx(other, rel=1e-5)

    again, _ = train("again", 8, "undisturbed", resume=str(tmp_path / "undisturbed/checkpoint-8"))
    assert [entry for entry in again["log"] if "loss" in entry] == [
        entry for entry in undisturbed["log"] if "loss" in entry
    ]
    # What is written is for one chip and whole, whatever the mesh.
    saved = load_file(tmp_path / "moved/checkpoint-16/model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in saved.items()} == moved["shapes"]
    arguments = torch.load(tmp_path / "moved/checkpoint-16/training_args.bin", weights_only=False)
    assert arguments.per_device_train_batch_size == 2
