"""How many bytes a cache takes, and what happens where there is no room."""

import errno
import shutil

import pytest
from cache_driver import make_writer
from full_disk import largest_file

from hf_tpu_ext.distillation import cache_writer
from hf_tpu_ext.distillation.cache import TeacherCache
from hf_tpu_ext.distillation.cache_format import CacheSettings
from hf_tpu_ext.distillation.cache_writer import CacheWriter


def test_files_are_bounded(tmp_path):
    """Whatever K is, the rows of a file fit into memory."""
    tokens = [100_000, 50_000, 200_000]
    settings = CacheSettings("t", "", "", "", 2**18, 128, (1.0,), None, "float32", "", 3, sum(tokens))
    keys = [bytes([number] * 16) for number in range(3)]
    writer = CacheWriter(tmp_path, settings, keys, tokens)
    assert writer.pending == [range(0, 1), range(1, 2), range(2, 3)]


# ---- No room ----


def test_too_large_is_refused_before_the_start(tiny_teacher, rows, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(cache_writer.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    message = r"Not enough disk space: .* needs 43\.\d\d kB more, and 1\.00 kB are free there.*--output_dir.*a smaller --kd_top_k"
    with pytest.raises(ValueError, match=message):
        make_writer(tmp_path / "cache", tiny_teacher, rows)
    assert list((tmp_path / "cache").iterdir()) == []


def test_estimate_is_what_is_written(make_cache, tiny_teacher, rows, tmp_path):
    _, writer = make_writer(tmp_path, tiny_teacher, rows)
    estimate = writer.bytes_to_write
    manifest = make_cache(tmp_path)
    written = sum(shard.bytes for shard in manifest.shards)
    assert written <= estimate <= written + 1024 * len(manifest.shards)


def test_full_disk_is_told_and_the_build_continues(make_cache, tmp_path):
    make_cache(tmp_path / "undisturbed")
    sizes = sorted(path.stat().st_size for path in (tmp_path / "undisturbed").glob("*.arrow"))
    with (
        largest_file(sizes[-1] - 1),
        pytest.raises(ValueError, match=r"Writing failed \(File too large\); what is done is kept"),
    ):
        make_cache(tmp_path / "full")
    assert not [path.name for path in (tmp_path / "full").iterdir() if path.name.endswith(".tmp")]
    with pytest.raises(ValueError, match="is not complete"):
        TeacherCache(tmp_path / "full")
    make_cache(tmp_path / "full")
    for path in (tmp_path / "undisturbed").iterdir():
        assert (tmp_path / "full" / path.name).read_bytes() == path.read_bytes()


def test_other_errors_of_the_disk_stay_what_they_are(make_cache, tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(cache_writer, "write_atomically", broken)
    with pytest.raises(OSError, match="Input/output error"):
        make_cache(tmp_path)
