"""Slices of two and of four hosts train what one process with as many devices does, and runs move between them."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from pretended_slice import FOUR, HERE, TWO, assert_same_log
from safetensors.torch import load_file

from hf_tpu_ext.examples.tiny import make_arithmetic, make_model
from hf_tpu_ext.trainers.checkpoint.directories import checkpoints_by_step


pytestmark = pytest.mark.slow

STEPS = dict(max_steps=5, eval_strategy="steps", eval_steps=5, save_strategy="steps", save_steps=5, warmup_steps=2)
LORA = {"lora": {"lora_dropout": 0.0}}
WAYS = {
    "full": {},
    "lora": LORA,
    "distilled": {"kd_teacher": "TEACHER"},
    # Far enough from its base for the difference not to be rounding.
    "distilled-lora": {"kd_teacher": "base", "kd_top_k": 8, "learning_rate": 0.1, **LORA},
    "dpo": {"kind": "dpo"},
    "dpo-lora": {"kind": "dpo", **LORA},
    "ema": {"ema_decay": 0.9},
    "scanned": {"scan_layers": "on", "rematerialization": "full"},
}


def runs_of(ways, meshes, accumulations=(1, 2)):
    return {
        f"{way}-{mesh}-{accumulation}": {
            **STEPS,
            **WAYS[way],
            "mesh": mesh,
            "gradient_accumulation_steps": accumulation,
        }
        for way in ways
        for mesh in meshes
        for accumulation in accumulations
    }


SLICES = {
    # Two at a time: programs of a process stay in its memory.
    **{f"two-{way}": (TWO, runs_of([way], ["data", "fsdp", "data=2,fsdp=2"])) for way in WAYS},
    **{f"four-{way}": (FOUR, runs_of([way], ["data=4,fsdp=4"], [1])) for way in ("full", "lora", "distilled", "dpo")},
    "four-fsdp": (FOUR, runs_of(["full"], ["fsdp"], [2])),
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    directory = tmp_path_factory.mktemp("teacher")
    return str(make_model(directory, hidden_size=48, intermediate_size=64, num_hidden_layers=1, seed=5))


def with_places(spec, directory, teacher):
    placed = {}
    for name, settings in spec.items():
        placed[name] = {**settings, "output_dir": str(directory / name)}
        if settings.get("kd_teacher") == "TEACHER":
            placed[name]["kd_teacher"] = teacher
    return placed


@pytest.mark.parametrize("name", SLICES)
def test_hosts_train_what_one_process_does(name, start_slice, teacher, tmp_path):
    host_of_device, spec = SLICES[name]
    devices = ",".join("0" for _ in host_of_device.split(","))
    of_hosts = start_slice(host_of_device, with_places(spec, tmp_path / "slice", teacher), "slice").run()
    (alone,) = start_slice(devices, with_places(spec, tmp_path / "alone", teacher), "alone").run()
    for run in spec:
        for host in of_hosts:
            assert_same_log(host[run]["log"], alone[run]["log"])
            assert host[run]["recompiles"] == 0
            assert host[run]["replays"] == alone[run]["replays"], run
        same_checkpoints(tmp_path / "slice" / run / "checkpoint-5", tmp_path / "alone" / run / "checkpoint-5")


def test_the_inner_axis_stays_within_a_host(start_slice, tmp_path):
    spec = {"grouped": dict(mesh="data=2,fsdp=2", max_steps=1, output_dir=str(tmp_path))}
    slice_ = start_slice(TWO, spec, "grouped")
    for of_host in slice_.run():
        assert of_host["grouped"]["mesh"] == [[0, 2], [1, 3]]
    assert "2 hosts of 2 chips: data crosses hosts, fsdp stays within one" in slice_.output(0)


def same_checkpoints(mine, other):
    assert sorted(path.name for path in mine.iterdir()) == sorted(path.name for path in other.iterdir())
    for path in mine.glob("*.safetensors"):
        torch.testing.assert_close(load_file(path), load_file(other / path.name), rtol=1e-4, atol=1e-5)
    states, others = (torch.load(path / "optimizer.pt")["state"] for path in (mine, other))
    torch.testing.assert_close(states, others, rtol=1e-4, atol=1e-5)


def test_the_command_is_the_same_on_every_host(start_slice, tiny_model, tmp_path):
    data = make_arithmetic(tmp_path / "data", num_rows=64)
    words = (
        f"sft --model_name_or_path {tiny_model} --dataset_name {data} --output_dir {tmp_path / 'run'} --max_length 64"
    )
    words += " --max_steps 4 --save_steps 2 --mesh data=2,fsdp=2 --report_to none --bf16 false"
    driver = HERE / "command_driver.py"
    first = start_slice(TWO, {}, "command", driver, [*words.split()])
    assert first.wait() == [0, 0], first.output(0)[-2000:] + first.output(1)[-2000:]
    assert "4 chips on 2 hosts" in first.output(0) and "Model saved to" in first.output(0)
    again = start_slice(
        TWO, {}, "command", driver, [*words.split(), "--max_steps", "6", "--resume_from_checkpoint", "true"]
    )
    assert again.wait() == [0, 0]
    assert [*checkpoints_by_step(tmp_path / "run")] == [2, 4, 6]
    assert (tmp_path / "run/model.safetensors").is_file()
    # What cannot be is told by each, as on one host.
    refused = start_slice(TWO, {}, "command", driver, [*words.split(), "--num_chips", "2"])
    assert refused.wait() == [2, 2]
    assert "hf-tpu: error: num_chips=2, but this machine is one of 2 hosts" in refused.output(1)


def test_the_stock_command_is_the_same_on_every_host(start_slice, tiny_model, tmp_path):
    """`trl sft`, from the first step to the end, as on one process of as many devices."""
    data = make_arithmetic(tmp_path / "data", num_rows=64)
    trl = Path(sys.executable).with_name("trl")
    module_path = os.pathsep.join(filter(None, [str(HERE / "joined"), os.environ.get("PYTHONPATH")]))

    def command(output_dir):
        words = (
            f"sft --model_name_or_path {tiny_model} --dataset_name {data} --output_dir {output_dir} --max_length 64"
        )
        words += " --max_steps 4 --save_steps 2 --logging_steps 1 --per_device_train_batch_size 1 --report_to none --bf16 false"
        return words.split()

    environment = {"HF_TPU_EXT": "1", "PYTHONPATH": module_path}
    hosts = start_slice(TWO, {}, "trl", trl, command(tmp_path / "run"), **environment)
    assert hosts.wait() == [0, 0], hosts.output(0)[-2000:] + hosts.output(1)[-2000:]
    for host in range(2):
        assert "`trl sft` is run by hf_tpu_ext, because HF_TPU_EXT=1 is set" in hosts.output(host)
    assert "4 chips on 2 hosts" in hosts.output(0) and "4 chips on 2 hosts" not in hosts.output(1)
    alone = start_slice("0,0,0,0", {}, "alone", trl, command(tmp_path / "alone"), HF_TPU_EXT="1")
    assert alone.wait() == [0], alone.output(0)[-2000:]
    assert [*checkpoints_by_step(tmp_path / "run")] == [2, 4]
    same_checkpoints(tmp_path / "run/checkpoint-4", tmp_path / "alone/checkpoint-4")
    mine, other = (
        json.loads((tmp_path / run / "checkpoint-4/trainer_state.json").read_text())["log_history"]
        for run in ("run", "alone")
    )
    assert [entry["loss"] for entry in mine] == pytest.approx([entry["loss"] for entry in other], rel=1e-5)
    assert (tmp_path / "run/model.safetensors").is_file()


def test_completions_and_their_rewards_are_those_of_the_first_host(start_slice, tmp_path):
    """Which are those of one process, though reward functions give another number on each host."""
    run = dict(kind="grpo", mesh="data=2,fsdp=2", max_steps=4, per_device_train_batch_size=4, beta=0.1)
    run |= {"save_strategy": "steps", "save_steps": 4}
    first, second = start_slice(TWO, {"grpo": {**run, "output_dir": str(tmp_path / "slice")}}, "grpo").run()
    (alone,) = start_slice("0,0,0,0", {"grpo": {**run, "output_dir": str(tmp_path / "alone")}}, "alone").run()
    assert_same_log(first["grpo"]["log"], alone["grpo"]["log"], rel=1e-4)
    assert [entry.get("loss") for entry in second["grpo"]["log"]] == [
        entry.get("loss") for entry in first["grpo"]["log"]
    ]
    same_checkpoints(tmp_path / "slice/checkpoint-4", tmp_path / "alone/checkpoint-4")


def test_mesh_of_four_hosts(start_slice):
    """The inner axis within each host, which has the chips that libtpu gives it."""
    slice_ = start_slice(FOUR, {"mesh": dict(mesh="data=4,fsdp=4", max_steps=1)}, "mesh")
    for host in slice_.run():
        assert host["mesh"]["mesh"] == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert "4 hosts of 4 chips: data crosses hosts, fsdp stays within one" in slice_.output(0)


def test_a_run_moves_from_four_hosts_to_one_process_and_on_to_two_hosts(start_slice, tmp_path):
    """With the losses of the run that never moved."""
    recipe = dict(warmup_steps=3, save_strategy="steps", save_steps=4, gradient_accumulation_steps=1)
    moved = {**recipe, "output_dir": str(tmp_path / "moved")}
    start_slice(FOUR, {"first": {**moved, "mesh": "data=4,fsdp=4", "max_steps": 12, "stop_after": 4}}, "first").run()
    start_slice("0", {"second": {**moved, "max_steps": 12, "stop_after": 8, "resume": True}}, "second").run()
    third = start_slice(TWO, {"third": {**moved, "mesh": "fsdp", "max_steps": 12, "resume": True}}, "third")
    last, _ = third.run()
    (whole,) = start_slice(
        "0", {"whole": {**recipe, "max_steps": 12, "per_device_train_batch_size": 16}}, "whole"
    ).run()
    losses, others = ([entry for entry in run["log"] if "loss" in entry] for run in (last["third"], whole["whole"]))
    assert len(losses) == len(others) == 12
    for mine, other in zip(losses, others, strict=True):
        for key in ("loss", "grad_norm"):
            assert mine[key] == pytest.approx(other[key], rel=1e-4), mine["step"]
    assert json.loads((tmp_path / "moved/checkpoint-12/trainer_state.json").read_text())["global_step"] == 12
