"""Two hosts train as one process with as many devices does: in a minute, what `test_slices.py` looks at in all ways."""

import json

import pytest
import torch
from pretended_slice import TWO, assert_same_log
from safetensors.torch import load_file


pytestmark = pytest.mark.ci


SAVED = dict(
    # No host has the whole of a weight.
    mesh="fsdp",
    max_steps=4,
    save_strategy="steps",
    save_steps=2,
    eval_strategy="steps",
    eval_steps=2,
    save_only_model=False,
    gradient_accumulation_steps=2,
    ema_decay=0.9,
    gradient_checkpointing=False,
    # What is made whole for a read is counted by lines of the driver, which are taken for ones of the user's.
    counts=True,
)


@pytest.fixture(scope="module")
def two(start_slice):
    slice_ = start_slice(TWO, {"saved": dict(SAVED, run_report=True)}, "two")
    return slice_.run(), slice_


@pytest.fixture(scope="module")
def one(start_slice):
    slice_ = start_slice("0,0,0,0", {"saved": dict(SAVED)}, "one")
    return slice_.run()[0], slice_


def test_all_log_what_one_process_logs(two, one):
    for of_host in two[0]:
        assert_same_log(of_host["saved"]["log"], one[0]["saved"]["log"])
        assert of_host["saved"]["why_not"] is None
        # Those that are replayed are the same steps.
        assert of_host["saved"]["replays"] == two[0][0]["saved"]["replays"] > 0


def test_chips_of_a_host_are_neighbours(two):
    for of_host in two[0]:
        assert of_host["saved"]["mesh"] == [[0, 2, 1, 3]]
    output = two[1].output(0)
    assert "4 chips on 2 hosts" in output and "global batch size 8 (1 per chip x 2" in output
    assert "2 hosts of 2 chips: fsdp crosses hosts" in output


def test_one_writes_and_speaks(two):
    output = two[1].output(1)
    for words in ("Training on", "Trained 4 steps", "'loss'", "Output:"):
        assert words in two[1].output(0) and words not in output
    assert (two[1].directory / "out/report.html").is_file()
    events = (two[1].directory / "out/run.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in events].count("begin") == 1


def test_a_checkpoint_is_that_of_one_process(two, one):
    mine, theirs = (slice_.directory / "out/checkpoint-4" for _, slice_ in (two, one))
    assert sorted(path.name for path in mine.iterdir()) == sorted(path.name for path in theirs.iterdir())
    weights, others = (load_file(path / "model.safetensors") for path in (mine, theirs))
    torch.testing.assert_close(weights, others, rtol=1e-4, atol=1e-5)
    averages = [load_file(path / "ema.safetensors") for path in (mine, theirs)]
    torch.testing.assert_close(*averages, rtol=1e-4, atol=1e-5)
    assert averages[0].keys() == weights.keys()
    states = [torch.load(path / "optimizer.pt") for path in (mine, theirs)]
    torch.testing.assert_close(states[0]["state"], states[1]["state"], rtol=1e-4, atol=1e-5)
    arguments = [json.loads((path / "trainer_state.json").read_text())["train_batch_size"] for path in (mine, theirs)]
    assert arguments == [4, 4]


def test_no_chip_nor_host_holds_more_than_one_tensor_to_save(two):
    of_first, of_second = (of_host["saved"]["gathered"] for of_host in two[0])
    whole = (two[1].directory / "out/checkpoint-4/optimizer.pt").stat().st_size
    assert 0 < of_first["largest"] == of_second["largest"] < whole / 4
    # The first reads what it writes, and no other keeps any of it.
    assert of_first["read"] > whole and of_first["dropped"] == of_second["read"] == 0
    assert of_second["dropped"] == of_first["read"]
    # Which is the weights, and then one average or moment after the other.
    weights = (two[1].directory / "out/checkpoint-4/model.safetensors").stat().st_size
    assert of_first["at_once"] <= weights + 2 * of_first["largest"]
