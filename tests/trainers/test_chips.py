"""Eight devices train as one does at the same global batch, and the work is really shared between them."""

import math

import pytest
import torch
from safetensors.torch import load_file

from hf_tpu_ext import TPUSFTConfig


TWENTY = dict(per_device_train_batch_size=2, max_steps=20, warmup_steps=5)
EVALUATED = dict(TWENTY, per_device_eval_batch_size=1, eval_strategy="steps", eval_steps=10)
RUNS = {
    "data": dict(EVALUATED),
    "data-lora": dict(TWENTY, lora={}),
    "data-accumulated": dict(TWENTY, gradient_accumulation_steps=4),
    "data-lora-accumulated": dict(TWENTY, lora={}, gradient_accumulation_steps=2),
    "fsdp": dict(TWENTY, fsdp="full_shard"),
    "fsdp-lora": dict(EVALUATED, lora={}, mesh="fsdp"),
    "fsdp-accumulated": dict(TWENTY, mesh="fsdp", gradient_accumulation_steps=4),
    "both": dict(TWENTY, mesh="data=2,fsdp=4"),
    "both-lora-accumulated": dict(EVALUATED, lora={}, mesh="data=2,fsdp", gradient_accumulation_steps=2),
    "data-scanned-accumulated": dict(TWENTY, scan_layers="on", gradient_accumulation_steps=2),
    "fsdp-lora-scanned": dict(EVALUATED, lora={}, mesh="fsdp", scan_layers="on"),
}
DROPPING = {
    "dropping-data": dict(TWENTY, scan_layers="on", lora={"lora_dropout": 0.1}),
    "dropping-fsdp": dict(TWENTY, scan_layers="on", lora={"lora_dropout": 0.1}, mesh="fsdp"),
}
SILENT = {
    "silent-data": dict(TWENTY, max_steps=6, logging_steps=100, gradient_accumulation_steps=2),
    "silent-dropout": dict(
        TWENTY, max_steps=6, logging_steps=100, gradient_accumulation_steps=2, lora={"lora_dropout": 0.1}
    ),
    "silent-neftune": dict(
        TWENTY, max_steps=6, logging_steps=100, gradient_accumulation_steps=2, neftune_noise_alpha=5.0
    ),
    "silent-fsdp": dict(TWENTY, max_steps=6, logging_steps=100, mesh="fsdp"),
}


@pytest.fixture(scope="module")
def eight(tiny_model, on_devices, tmp_path_factory):
    return on_devices(8, tiny_model, {**RUNS, **SILENT, **DROPPING}, tmp_path_factory.mktemp("eight"))


def of_one_device(config):
    """The same run for a device that takes the rows of all."""
    rest = {key: value for key, value in config.items() if key not in ("mesh", "fsdp", "lora", "scan_layers")}
    return {key: value * 8 if key.startswith("per_device") else value for key, value in rest.items()}


@pytest.mark.parametrize("name", RUNS)
def test_twenty_steps_are_those_of_stock_on_one_device(eight, runs, rows, same_logs, as_trainer, name):
    stock = runs.stock(lora=RUNS[name].get("lora"), kwargs={"train_dataset": rows(120)}, **of_one_device(RUNS[name]))
    same_logs(as_trainer(eight[0][name]["log"]), stock)


@pytest.mark.parametrize("name", DROPPING)
def test_layers_in_a_loop_drop_what_one_device_drops(eight, runs, rows, same_logs, as_trainer, name):
    one = runs.ours(
        lora={"lora_dropout": 0.1},
        config_cls=TPUSFTConfig,
        scan_layers="on",
        kwargs={"train_dataset": rows(120)},
        **of_one_device(DROPPING[name]),
    )
    same_logs(as_trainer(eight[0][name]["log"]), one)


@pytest.mark.parametrize("name", [name for name in [*RUNS, *SILENT] if "eval_steps" not in {**RUNS, **SILENT}[name]])
def test_a_micro_step_is_one_execution_and_only_the_first_compiles(eight, name):
    accumulation = {**RUNS, **SILENT}[name].get("gradient_accumulation_steps", 1)
    executions, _, compiles, fallbacks = zip(*eight[0][name]["steps"], strict=True)
    assert set(executions) == {accumulation}
    # None at all where an earlier run of the process had the same program.
    assert compiles[0] <= (2 if accumulation > 1 else 1) and sum(compiles[1:]) == 0
    assert sum(fallbacks) == 0
    assert eight[0][name]["recompiles"] == 0


@pytest.mark.parametrize("name", SILENT)
def test_nothing_is_read_between_logs(eight, name):
    # The first step is when the driver looks at the shards, the last one when the run's own log is read.
    assert [reads for _, reads, _, _ in eight[0][name]["steps"][1:-1]] == [0] * 4


@pytest.mark.parametrize("name", RUNS)
def test_no_chip_has_the_rows_of_another(eight, name):
    assert eight[0][name]["batch_shard"] == [2, 40]


def test_weights_and_moments_are_split_as_the_mesh_says(eight):
    for name, parts in {"data": 1, "data-lora-accumulated": 1, "fsdp": 8, "fsdp-lora": 8, "both": 4}.items():
        result = eight[0][name]
        for parameter, shape in result["shapes"].items():
            expected = math.prod(shape) // (parts if len(shape) > 1 else 1)
            assert math.prod(result["weight_shards"][parameter]) == expected, (name, parameter)
            if parameter in result["moment_shards"]:
                assert result["moment_shards"][parameter] == result["weight_shards"][parameter]


def test_gradients_wait_on_their_chip_where_that_is_the_same_step(eight):
    results, output = eight
    local = {name for name, result in results.items() if result["local_gradients"]}
    data_parallel = {name for name, result in results.items() if result["mesh"]["fsdp"] == 1}
    assert local == data_parallel - {"silent-neftune"} and len(local) > 4
    assert "neftune_noise_alpha draws random numbers" in output and "not once per optimizer step" in output


def test_the_start_says_how_chips_share_the_work(eight):
    _, output = eight
    assert "8 chips" in output
    assert "global batch size 64 (2 per chip x 4 gradient accumulation steps x 8 chips)" in output
    assert "data parallel (mesh data=8); effective batch 2 per chip x 4 accumulated x 8 chips = 64 rows" in output
    assert "fully sharded (mesh fsdp=8); effective batch 2 per chip x 1 accumulated x 8 chips = 16 rows" in output
    assert "fully sharded in 2 groups (mesh data=2 x fsdp=4)" in output


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
    assert "16 rows per optimizer step on 8 chips" in output and "2 rows per chip x 8 accumulated" in output
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
