"""How many bytes a cache takes, what the compact form loses, and what happens where there is no room."""

import errno
import resource
import shutil

import numpy as np
import pytest
import torch
from cache_driver import make_writer

from hf_tpu_ext.distillation import cache_writer
from hf_tpu_ext.distillation.cache import TeacherCache
from hf_tpu_ext.distillation.cache_format import CacheSettings, write_shard
from hf_tpu_ext.distillation.cache_writer import CacheWriter
from hf_tpu_ext.distillation.compact import CompactTokens, compact_bytes_per_token
from hf_tpu_ext.distillation.top_k import TeacherRows


def made_up_rows(tokens, vocab_size, top_k, temperatures, seed=0):
    """Distributions with a few likely tokens and a long tail, as language models have them, from sure to unsure."""
    generator = torch.Generator().manual_seed(seed)
    sharpness = torch.linspace(1.0, 5.0, tokens)[:, None]
    logits = torch.randn(tokens, vocab_size, generator=generator) * sharpness
    return logits, TeacherRows.of(logits, top_k, temperatures)


def write_made_up(directory, vocab_size=2**15, top_k=128, compact=False, tokens=512):
    temperatures = (1.0, 2.0)
    logits, rows = made_up_rows(tokens, vocab_size, top_k, temperatures)
    settings = CacheSettings("t", "", "", "", vocab_size, top_k, temperatures, None, "float32", compact, "", 2, tokens)
    half = tokens // 2
    writer = CacheWriter(directory, settings, [bytes(16), bytes(range(16))], [half, half])
    (numbers,) = writer.pending
    writer.write(
        numbers, [TeacherRows(*(tensor[part] for tensor in rows)) for part in (slice(half), slice(half, None))]
    )
    return logits, rows, writer.finish()


@pytest.mark.slow
def test_bytes_per_token(tmp_path):
    _, _, manifest = write_made_up(tmp_path / "plain", tokens=2048)
    assert manifest.bytes_per_token <= 780
    _, _, manifest = write_made_up(tmp_path / "compact", tokens=2048, compact=True)
    assert manifest.bytes_per_token < 400


@pytest.mark.parametrize("vocab_size", [32_768, 49_152, 151_936, 2**18])
def test_compact_bytes_of_real_vocabularies(vocab_size):
    """Token ids that are spread evenly compress worst."""
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(vocab_size)[:128] for _ in range(256)]).astype(np.int32)
    values = -np.sort(rng.exponential(5, ids.shape).astype(np.float16), axis=1)
    others = {"normalisers": np.ones((256, 1), np.float32), "log_tails": values[:, :2]}
    size = len(write_shard([{**CompactTokens.pack(ids, values)._asdict(), **others}], [bytes(16)], "zstd"))
    assert size / 256 < compact_bytes_per_token(128, vocab_size) + 4 + 2 * 2 < 400


@pytest.mark.parametrize(
    ("top_k", "vocab_size"), [(1, 1), (1, 259), (16, 259), (259, 259), (128, 151_936), (128, 2**18)]
)
def test_compact_ids_are_exact(top_k, vocab_size):
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(vocab_size)[:top_k] for _ in range(20)]).astype(np.int32)
    ids[0] = np.arange(top_k)
    ids[1] = np.arange(vocab_size - top_k, vocab_size)
    values = -np.sort(rng.exponential(5, ids.shape).astype(np.float16), axis=1)
    packed = CompactTokens.pack(ids, values)
    unpacked, log_probs = packed.unpack()
    assert np.array_equal(np.sort(unpacked), np.sort(ids))
    # Most likely first, and each where it belongs but for rounding.
    assert (np.diff(log_probs) <= 0).all()
    order = np.argsort(ids, axis=1)
    place = np.take_along_axis(order, np.argsort(np.argsort(unpacked, axis=1), axis=1), axis=1)
    assert np.abs(np.take_along_axis(values, place, axis=1) - log_probs).max() < 0.2


def test_compact_error():
    """A log-probability is off by at most half a step, beside the rounding to 16 bits."""
    logits, rows = made_up_rows(512, 2**15, 128, (1.0,))
    packed = CompactTokens.pack(rows.ids.numpy(), rows.values.numpy())
    ids, log_probs = map(torch.from_numpy, packed.unpack())
    exact = logits.double().log_softmax(-1).gather(-1, ids.long())
    spans = exact[:, :1] - exact.amin(-1, keepdim=True)
    assert ((log_probs - exact).abs() <= spans / 510 + exact.abs().amax(-1, keepdim=True) / 1024).all()
    mass = exact.exp().sum(-1)
    assert ((log_probs.exp().sum(-1) - mass).abs() / mass).mean() < 5e-3


@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize("allowed", [1, 2, 40])
def test_compact_form_keeps_tokens_that_are_never_said(allowed, temperature):
    """As of a teacher whose logits are masked: fewer tokens than K have any probability."""
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(0)) * 3
    logits[:32, allowed:] = -torch.inf
    rows = TeacherRows.of(logits, 128, (1.0, temperature))
    ids, log_probs = map(torch.from_numpy, CompactTokens.pack(rows.ids.numpy(), rows.values.numpy()).unpack())
    found = log_probs / temperature - rows.normalisers[:, 1:]
    exact = (logits.double() / temperature).log_softmax(-1).gather(-1, ids.long())
    said = torch.isfinite(exact)
    assert torch.equal(ids.sort(-1).values, rows.ids.sort(-1).values) and (said.sum(-1)[:32] == allowed).all()
    assert (found.exp()[~said] == 0).all()
    assert (log_probs[~said] == torch.finfo(torch.float16).min).all()
    # Half a step, and the rounding to 16 bits.
    kept = torch.where(said, exact, exact[:, :1])
    spans = (exact[:, :1] - kept.amin(-1, keepdim=True)).expand_as(exact)
    bound = spans / 508 + (kept.abs().amax(-1, keepdim=True) * temperature + 20) / 1024 / temperature
    assert ((found - exact).abs() <= bound)[said].all()
    assert (found.exp().sum(-1) - exact.exp().sum(-1)).abs().max() < 0.02


def test_compact_form_refuses_what_it_would_blur():
    ids = np.arange(3, dtype=np.int32)[None]
    with pytest.raises(ValueError, match="lie 10000 apart, .*Leave out --compact"):
        CompactTokens.pack(ids, np.array([[-0.5, -1.0, -1e4]], np.float16))


def test_compact_cache_is_read_as_the_plain_one(make_cache, rows, tmp_path):
    make_cache(tmp_path / "plain")
    make_cache(tmp_path / "compact", compact=True)
    plain, compact = TeacherCache(tmp_path / "plain"), TeacherCache(tmp_path / "compact")
    for input_ids in rows["input_ids"]:
        expected, found = plain.lookup(input_ids, 2.0, 16), compact.lookup(input_ids, 2.0, 16)
        assert torch.equal(found.ids.sort().values, expected.ids.sort().values)
        torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=0, atol=0.02)
        assert torch.equal(found.log_tail, expected.log_tail)


def test_files_are_bounded(tmp_path):
    """Whatever K is, the rows of a file fit into memory."""
    tokens = [100_000, 50_000, 200_000]
    settings = CacheSettings("t", "", "", "", 2**18, 128, (1.0,), None, "float32", False, "", 3, sum(tokens))
    keys = [bytes([number] * 16) for number in range(3)]
    writer = CacheWriter(tmp_path, settings, keys, tokens)
    assert writer.pending == [range(0, 1), range(1, 2), range(2, 3)]


# ---- No room ----


def test_too_large_is_refused_before_the_start(tiny_teacher, rows, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(cache_writer.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    message = r"Not enough disk space: .* needs 43\.\d\d kB more, and 1\.00 kB are free there.*--output_dir.*--compact \(\d+ "
    with pytest.raises(ValueError, match=message):
        make_writer(tmp_path / "cache", tiny_teacher, rows)
    assert list((tmp_path / "cache").iterdir()) == []


def test_estimate_is_what_is_written(make_cache, tiny_teacher, rows, tmp_path):
    _, writer = make_writer(tmp_path, tiny_teacher, rows)
    estimate = writer.bytes_to_write
    manifest = make_cache(tmp_path)
    written = sum(shard.bytes for shard in manifest.shards)
    assert written <= estimate <= written + 1024 * len(manifest.shards)


@pytest.fixture
def limit_file_size():
    """Limits the size of files of this process, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_is_told_and_the_build_continues(make_cache, limit_file_size, tmp_path):
    make_cache(tmp_path / "undisturbed")
    sizes = sorted(path.stat().st_size for path in (tmp_path / "undisturbed").glob("*.arrow"))
    limit_file_size(sizes[-1] - 1)
    with pytest.raises(ValueError, match=r"Writing failed \(File too large\); what is done is kept"):
        make_cache(tmp_path / "full")
    limit_file_size(resource.RLIM_INFINITY)
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
