"""Damage of a checkpoint is seen, by its manifest and by the formats of its files."""

import json
import logging
import random
import shutil

import pytest
import torch
from safetensors.torch import save_file
from written_checkpoints import contents, write_checkpoint

from hf_tpu_ext.trainers.checkpoint.lookup import find_checkpoint
from hf_tpu_ext.trainers.checkpoint.verification import MANIFEST_NAME, find_damage, how_to_accept, seal


def without_manifest(checkpoint):
    return {path: data for path, data in contents(checkpoint).items() if path.name != MANIFEST_NAME}


def damage(checkpoint, rng):
    """One thing that goes wrong with a file; what it was."""
    file = rng.choice(sorted(path for path in checkpoint.rglob("*") if path.is_file()))
    data = bytearray(file.read_bytes())
    kind = rng.choice(["cut", "flipped", "zeroed", "grown", "deleted", "edited"])
    if kind == "cut":
        file.write_bytes(data[: rng.randrange(len(data))])
    elif kind == "flipped":
        for _ in range(rng.choice([1, 1, 10])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
    elif kind == "zeroed":
        # What a file system that lost power may leave.
        begin = rng.randrange(len(data))
        file.write_bytes(data[:begin] + bytes(len(data) - begin))
    elif kind == "grown":
        file.write_bytes(data + rng.randbytes(rng.randint(1, 100)))
    elif kind == "deleted":
        file.unlink()
    else:
        places = [place for place, byte in enumerate(data) if chr(byte).isdigit()]
        data[rng.choice(places)] = ord(rng.choice("0123456789"))
        file.write_bytes(data)
    return f"{file.relative_to(checkpoint)} {kind}"


@pytest.mark.parametrize("change", ["missing", "cut", "other", "manifest"])
def test_only_a_whole_checkpoint_may_be_accepted_as_it_is(tmp_path, change):
    checkpoint, weights = tmp_path, tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(3)}, weights)
    (checkpoint / "trainer_state.json").write_text("{}")
    seal(checkpoint)
    if change == "missing":
        weights.unlink()
    elif change == "cut":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif change == "other":
        save_file({"weight": torch.ones(3)}, weights)
    else:
        (checkpoint / MANIFEST_NAME).write_text("{}")
    assert find_damage(checkpoint) is not None
    expected = f"removing its manifest: rm {checkpoint / MANIFEST_NAME}" if change in ("other", "manifest") else ""
    assert how_to_accept(checkpoint).endswith(expected) and bool(how_to_accept(checkpoint)) == bool(expected)


@pytest.mark.ci
def test_random_damage_is_seen_or_harmless(tmp_path, caplog):
    """The newest checkpoint is taken only if all that a run reads of it is what was written."""
    rng = random.Random(7)
    older, newest = write_checkpoint(tmp_path, 8), write_checkpoint(tmp_path, 10)
    whole = without_manifest(newest)
    shutil.copytree(newest, tmp_path / "copy")
    seen = harmless = 0
    for _ in range(300):
        shutil.rmtree(newest)
        shutil.copytree(tmp_path / "copy", newest)
        caplog.clear()
        what = damage(newest, rng)
        taken = find_checkpoint(True, str(tmp_path))
        lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        if taken == str(newest):
            assert without_manifest(newest) == whole, what
            harmless += 1
        else:
            assert taken == str(older), what
            assert len(lines) == 1 and lines[0].startswith(f"{newest} is skipped: "), lines
            assert what.split()[0] in lines[0] or what.startswith(MANIFEST_NAME), (what, lines[0])
            with pytest.raises(ValueError, match="resume_from_checkpoint=True for the newest complete one"):
                find_checkpoint(str(newest), str(tmp_path))
            seen += 1
    print(f"{seen} seen and skipped, {harmless} harmless")
    assert seen >= 200


def test_damage_is_named(tmp_path):
    checkpoint = write_checkpoint(tmp_path, 4)
    assert find_damage(checkpoint) is None
    optimizer = checkpoint / "optimizer.pt"
    data = optimizer.read_bytes()
    optimizer.write_bytes(data[:-1])
    assert find_damage(checkpoint) == "optimizer.pt has 2999 bytes instead of 3000"
    optimizer.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert find_damage(checkpoint) == "optimizer.pt does not match its SHA-256"
    optimizer.unlink()
    assert find_damage(checkpoint) == "optimizer.pt is missing"
    optimizer.mkdir()
    assert find_damage(checkpoint) == "optimizer.pt is missing"
    optimizer.rmdir()
    optimizer.write_bytes(data)
    (checkpoint / "notes.txt").write_text("mine")
    assert find_damage(checkpoint) is None
    for manifest in ("", "[]", "{}", '{"files": 1}', '{"files": {"a": 1}}', '{"files": {"a": {"size": 1}}}', "\udcff"):
        (checkpoint / MANIFEST_NAME).write_bytes(manifest.encode("utf-8", "surrogateescape"))
        assert find_damage(checkpoint) == "manifest.json is damaged"


def test_file_that_cannot_be_read_is_damage(tmp_path, monkeypatch):
    checkpoint = write_checkpoint(tmp_path, 4)
    optimizer = checkpoint / "optimizer.pt"
    optimizer.unlink()
    # Reading a process's own memory from address 0 is an input/output error.
    optimizer.symlink_to("/proc/self/mem")
    manifest = json.loads((checkpoint / MANIFEST_NAME).read_text())
    manifest["files"]["optimizer.pt"]["size"] = 0
    (checkpoint / MANIFEST_NAME).write_text(json.dumps(manifest))
    assert find_damage(checkpoint) == "checkpoint-4 cannot be read (Input/output error)"


@pytest.mark.parametrize("name", ["rng_state.pth", "model.safetensors", "optimizer.pt", "training_args.bin"])
def test_a_file_that_was_cut_short_is_found_without_a_manifest(tmp_path, name):
    """As of a checkpoint of stock TRL."""
    checkpoint = tmp_path / "checkpoint-4"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text("{}")
    tensors = {"a": torch.ones(300)}
    save_file(tensors, checkpoint / "model.safetensors")
    for file in ("rng_state.pth", "optimizer.pt", "training_args.bin"):
        torch.save(tensors, checkpoint / file)
    torch.save(tensors, checkpoint / "scheduler.pt", _use_new_zipfile_serialization=False)
    assert find_damage(checkpoint) is None
    path = checkpoint / name
    whole = path.read_bytes()
    for length in (0, 3, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        damage = find_damage(checkpoint)
        # Three bytes of a file by PyTorch are no format at all.
        assert (length == 3 and name != "model.safetensors") or damage.startswith(f"{name} is ")
