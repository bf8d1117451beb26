"""Two hosts with a process each, by the variables that torchrun sets on them: what one process trains with the rows of both."""

import json
import shutil
import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parent))

from ranks_data import on_ranks  # noqa: E402


TRAINED = dict(
    max_steps=4,
    length_buckets=[48],
    per_device_eval_batch_size=4,
    gradient_checkpointing=False,
    eval_strategy="steps",
    eval_steps=2,
)
SAVED = dict(TRAINED, save_strategy="steps", save_steps=2, load_best_model_at_end=True)
STARTS = {
    # Storage that both see, and disks of their own.
    "shared": dict(SAVED, mesh="data=2"),
    "own": dict(SAVED, own_disk=True, save_on_each_node=True),
    "split": dict(TRAINED, own_disk=True, mesh="fsdp", save_on_each_node=True, refused=True),
}


@pytest.fixture(scope="module")
def noted(tpu, tiny_model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("hosts")
    return directory, *on_ranks(STARTS, tiny_model, directory, hosts=2)


@pytest.mark.parametrize("name", ["shared", "own"])
def test_two_hosts_train_as_one_process_with_the_rows_of_both(noted, ours, stock_of_ranks, same_logs, name):
    _, found, printed = noted
    assert found[0][name]["weights"] == found[1][name]["weights"]
    same_logs(ours(name), stock_of_ranks(**TRAINED))
    assert "2 chips in 2 processes on 2 hosts" in printed and "2 hosts of 1 chip: data crosses hosts" in printed


def test_the_first_writes_for_all_or_each_host_for_itself(noted):
    directory, *_ = noted
    names = {path.name for path in (directory / "shared" / "checkpoint-4").iterdir()}
    assert {"model.safetensors", "optimizer.pt", "run_state.json", "rng_state_0.pth", "rng_state_1.pth"} <= names
    for host in range(2):
        disk = directory / f"host_{host}"
        written = {path.name for path in (disk / "own" / "checkpoint-4").iterdir()}
        # Random states are those of its processes.
        assert written == names - {f"rng_state_{1 - host}.pth"}
        files = json.loads((disk / "own" / "checkpoint-4" / "manifest.json").read_text())["files"]
        assert {*files} == written - {"manifest.json"}
        assert not (disk / "shared").exists()


def test_what_is_refused_says_what_to_do(noted):
    for rank in noted[1]:
        assert "save_on_each_node=True does not work with mesh='fsdp'" in rank["split"]["refused"]
        assert "or set mesh='data'" in rank["split"]["refused"]


def test_a_run_goes_on_where_each_host_has_its_checkpoint(noted, tiny_model, same_logs, as_trainer):
    directory, found, _ = noted
    for host in range(2):
        shutil.copytree(directory / f"host_{host}" / "own", directory / f"host_{host}" / "lost")
    (directory / "host_1" / "lost" / "checkpoint-2" / "optimizer.pt").unlink()
    config = {name: value for name, value in STARTS["own"].items() if name != "mesh"}
    again, _ = on_ranks(
        {
            "own": dict(config, resume="own/checkpoint-2"),
            "lost": dict(config, resume="lost/checkpoint-2", refused=True),
        },
        tiny_model,
        directory,
        hosts=2,
    )
    assert again[0]["own"]["weights"] == found[0]["own"]["weights"] == again[1]["own"]["weights"]
    # The last entry is of the run that ends: the mean loss of its own steps.
    same_logs(as_trainer(again[0]["own"]["log"][:-1]), as_trainer(found[0]["own"]["log"][:-1]))
    for rank in again:
        assert (
            "is not the same on all hosts: process 1 has another checkpoint: optimizer.pt" in rank["lost"]["refused"]
        )
