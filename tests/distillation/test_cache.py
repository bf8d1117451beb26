"""What is read from a cache is what the teacher says; and what is no cache of this run is refused."""

import json
import pickle
import shutil

import numpy as np
import pytest
import torch
from cache_driver import make_writer
from datasets import Dataset
from transformers import AutoTokenizer

from hf_tpu_ext.backends import select_backend
from hf_tpu_ext.distillation.cache import TeacherCache
from hf_tpu_ext.distillation.cache_builder import TeacherRows
from hf_tpu_ext.distillation.cache_format import FORMAT, sequence_key, shard_name, shard_number


VOCAB_SIZE = 259


@pytest.fixture(scope="module")
def cache_dir(make_cache, tmp_path_factory):
    directory = tmp_path_factory.mktemp("cache")
    make_cache(directory)
    return directory


@pytest.fixture
def own_cache_dir(cache_dir, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(cache_dir, tmp_path / "cache")


@pytest.fixture
def tokenizer(tiny_teacher):
    return AutoTokenizer.from_pretrained(tiny_teacher)


def assert_is_teacher(cache, input_ids, logits, temperature, top_k):
    """What the cache holds of a sequence is the teacher's top K, to rounding."""
    ids, log_probs, log_tail = cache.lookup(input_ids, temperature, top_k)
    reference = (logits / temperature).log_softmax(-1)
    assert ids.dtype == torch.int32 and ids.shape == log_probs.shape == (len(input_ids), top_k)
    # Entries that are closer than float32 can tell may change places.
    torch.testing.assert_close(reference.gather(-1, ids.long()), reference.topk(top_k).values, rtol=0, atol=1e-5)
    # What is rounded to 16 bits is the log-probability at temperature 1.
    rounding = logits.log_softmax(-1).abs() * 2**-11 / temperature
    assert ((log_probs - reference.gather(-1, ids.long())).abs() <= rounding.gather(-1, ids.long()) + 1e-5).all()
    others = reference.scatter(-1, ids.long(), -torch.inf).logsumexp(-1)
    torch.testing.assert_close(log_tail.double(), others, rtol=2**-10, atol=rounding.max().item())


@pytest.mark.parametrize("backend", ["xla", "cpu"])
@pytest.mark.parametrize("cached", [1, 16, VOCAB_SIZE])
def test_round_trip(make_cache, teacher_logits, rows, tmp_path, cached, backend):
    make_cache(tmp_path, backend=select_backend(backend), top_k=cached, temperatures=(0.5, 1.0, 4.0))
    cache = TeacherCache(tmp_path)
    assert cache.manifest.sequences == 25
    for input_ids in rows["input_ids"]:
        logits = teacher_logits(input_ids)
        for temperature in (0.5, 1.0, 4.0):
            for top_k in {1, cached}:
                assert_is_teacher(cache, input_ids, logits, temperature, top_k)


def test_manifest_tells_coverage_and_size(make_cache, teacher_logits, rows, tmp_path):
    manifest = make_cache(tmp_path)
    expected = []
    for temperature in manifest.temperatures:
        different = {tuple(input_ids) for input_ids in rows["input_ids"]}
        mass = [(teacher_logits(ids) / temperature).softmax(-1).topk(16).values.sum(-1) for ids in different]
        expected.append(torch.cat(mass).mean().item())
    assert manifest.coverage == pytest.approx(expected, rel=1e-3)
    files = [path.stat().st_size for path in tmp_path.glob("*.arrow")]
    assert manifest.bytes_per_token == sum(files) / manifest.tokens
    assert [shard.sequences for shard in manifest.shards] == [8, 8, 8, 1]


def test_preloaded_is_mapped(cache_dir, rows):
    mapped, preloaded = TeacherCache(cache_dir), TeacherCache(cache_dir, preload=True)
    # Workers of a dataloader get a copy.
    copied = pickle.loads(pickle.dumps(mapped))
    for input_ids in rows["input_ids"]:
        for cache in (preloaded, copied):
            for ours, other in zip(cache.lookup(input_ids, 2.0, 8), mapped.lookup(input_ids, 2.0, 8), strict=True):
                assert torch.equal(ours, other)


def test_order_and_duplicates_of_rows_do_not_matter(make_cache, cache_dir, rows, tmp_path):
    shuffled = rows.shuffle(seed=1)
    make_cache(tmp_path, dataset=shuffled)
    first, second = TeacherCache(cache_dir), TeacherCache(tmp_path)
    first.check_dataset(shuffled, "train_dataset")
    second.check_dataset(rows, "train_dataset")
    for input_ids in rows["input_ids"]:
        for ours, other in zip(first.lookup(input_ids, 1.0, 16), second.lookup(input_ids, 1.0, 16), strict=True):
            # The batches had other neighbours and other padding.
            torch.testing.assert_close(ours, other, rtol=0, atol=2**-8)


def test_key_is_of_the_token_ids_alone():
    assert sequence_key([1, 2, 3]) == sequence_key(np.array([1, 2, 3], dtype=np.int64))
    assert len({sequence_key(ids) for ids in ([1, 2, 3], [1, 2], [1, 3, 2], [1, 2, 3, 0])}) == 4


# ---- Missing sequences ----


def test_missing_sequences_are_counted_and_named(cache_dir, rows):
    cache = TeacherCache(cache_dir)
    more = Dataset.from_dict({"input_ids": [*rows["input_ids"][:3], [5, 6, 7], *rows["input_ids"][3:], [8]]})
    with pytest.raises(
        ValueError,
        match=r"2 of 28 sequences of train_dataset are not in .* first row 3\. .*cache-teacher .* --kd_teacher \S+$",
    ):
        cache.check_dataset(more, "train_dataset")
    cache.check_dataset(rows, "train_dataset")
    with pytest.raises(ValueError, match=r"or by a recipe without eval_strategy.* --eval_strategy steps --overwrite"):
        cache.check_dataset(more, "eval_dataset")
    with pytest.raises(ValueError, match=r"A sequence of 3 tokens that begins with \[5, 6, 7\] is not in"):
        cache.lookup([5, 6, 7], 1.0, 4)


# ---- Not a whole cache ----


def test_no_cache(tmp_path):
    with pytest.raises(ValueError, match="holds no teacher's cache. Build it: hf-tpu cache-teacher"):
        TeacherCache(tmp_path)


def test_partial_cache(tiny_teacher, rows, cache_dir, tmp_path):
    make_writer(tmp_path, tiny_teacher, rows)
    with pytest.raises(ValueError, match=r"is not complete: 0 of 25 sequences are there\. Finish it with the command"):
        TeacherCache(tmp_path)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-3])


def flip_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "is missing"),
        (truncate, r"has \d+ bytes, not the \d+ that were written"),
        (flip_bit, "was changed: its checksum is not the one in the manifest"),
    ],
)
def test_damaged_file_is_named_and_rebuilt(make_cache, own_cache_dir, cache_dir, caplog, damage, message):
    damage(own_cache_dir / "shard-00001.arrow")
    with pytest.raises(ValueError, match=rf"shard-00001\.arrow {message}\. Rebuild it"):
        TeacherCache(own_cache_dir)
    make_cache(own_cache_dir)
    for path in cache_dir.iterdir():
        assert (own_cache_dir / path.name).read_bytes() == path.read_bytes()
    assert {path.name for path in own_cache_dir.iterdir()} == {path.name for path in cache_dir.iterdir()}


OF_ANOTHER_VERSION = '{"format": "hf_tpu_ext teacher cache 1"}'
COMPACT = f'{{"format": "{FORMAT}", "compact": true}}'


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format": 2}', OF_ANOTHER_VERSION, COMPACT])
def test_manifest_of_something_else(own_cache_dir, content):
    (own_cache_dir / "manifest.json").write_text(content)
    message = (
        r"manifest\.json is not of a teacher's cache that this version can read .*, and is left as it is\. "
        r"Give another directory \(hf-tpu cache-teacher .* --kd_cache DIR\), or move the file away\."
    )
    with pytest.raises(ValueError, match=message):
        TeacherCache(own_cache_dir)


def test_a_cache_of_an_earlier_version_that_is_not_compact(own_cache_dir, make_cache):
    path = own_cache_dir / "manifest.json"
    # What is computed from the files now was written, too.
    more = {"compact": False, "coverage": [0.5, 0.4], "bytes_per_token": 1.0, "largest_id": 7}
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    before = path.read_bytes()
    manifest = TeacherCache(own_cache_dir).manifest
    assert make_cache(own_cache_dir) == manifest and path.read_bytes() == before
    assert manifest.largest_id == max(shard.largest_id for shard in manifest.shards) != 7


# ---- A cache of another run ----


def test_check_of_what_fits(cache_dir, tokenizer):
    cache = TeacherCache(cache_dir)
    assert cache.check(1.0, 16, tokenizer, 24, VOCAB_SIZE) == cache.check(1.0, None, tokenizer, 24, 512)
    # The tiny teacher's weights are random, so its distributions are flat.
    (warning,) = cache.check(2.0, 16, tokenizer, 24, VOCAB_SIZE)
    assert warning.startswith(
        f"The top 16 tokens hold {cache.manifest.coverage[1]:.0%} of the teacher's mass at temperature 2"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, r"kd_temperature=0.0 is not above 0\. Set it to one of \[1.0, 2.0\]"),
        ({"temperature": -1.0}, "kd_temperature=-1.0 is not above 0"),
        (
            {"temperature": 3.0},
            r"kd_temperature=3.0 is not among .* Set it to one of \[1.0, 2.0\], .* --temperatures 1.0 2.0 3.0",
        ),
        (
            {"top_k": 17},
            "kd_top_k=17, but .* holds 16 tokens of each position. Set kd_top_k to 1...16, .* --kd_top_k 17",
        ),
        ({"top_k": 0}, "kd_top_k=0, but"),
        ({"max_length": 32}, "max_length=32, but .* was built with max_length=24.* --kd_teacher .* --max_length 32"),
        (
            {"vocab_size": 100},
            r"The teacher's cache .* has the token id \d+, but the student's vocabulary has 100 tokens",
        ),
    ],
)
def test_check_of_what_does_not_fit(cache_dir, tokenizer, changes, message):
    fits = {"temperature": 1.0, "top_k": 16, "tokenizer": tokenizer, "max_length": 24, "vocab_size": VOCAB_SIZE}
    with pytest.raises(ValueError, match=message):
        TeacherCache(cache_dir).check(**{**fits, **changes})


def test_check_of_another_tokenizer(cache_dir, tokenizer):
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(ValueError, match="The tokenizer has another vocabulary than the one that the teacher's cache"):
        TeacherCache(cache_dir).check(1.0, 16, tokenizer, 24, VOCAB_SIZE)


def test_check_of_another_chat_template(cache_dir, tokenizer):
    tokenizer.chat_template += " "
    with pytest.raises(ValueError, match="The chat template is not the one that the teacher's cache"):
        TeacherCache(cache_dir).check(1.0, 16, tokenizer, 24, VOCAB_SIZE)


# ---- Another build in the same directory ----


@pytest.mark.parametrize("complete", [True, False])
def test_build_with_other_settings_is_refused(own_cache_dir, tiny_teacher, rows, complete, tmp_path):
    directory = own_cache_dir if complete else tmp_path / "partial"
    make_writer(directory, tiny_teacher, rows)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    message = r"built with other settings: teacher is 'new' and was 'tiny'; top_k is 8 and was 16\. .*--output_dir DIR.*--overwrite"
    with pytest.raises(ValueError, match=message):
        make_writer(directory, tiny_teacher, rows, teacher="new", top_k=8)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before


def test_overwriting(own_cache_dir, make_cache, rows):
    manifest = make_cache(own_cache_dir, dataset=rows.select(range(5)), overwrite=True, top_k=8)
    assert manifest.top_k == 8 and manifest.sequences == 5
    assert sorted(path.name for path in own_cache_dir.iterdir()) == ["manifest.json", "shard-00000.arrow"]


def test_overwriting_takes_the_manifest_first(own_cache_dir, tiny_teacher, rows):
    make_writer(own_cache_dir, tiny_teacher, rows, overwrite=True, top_k=8)
    with pytest.raises(ValueError, match="is not complete: 0 of 25 sequences"):
        TeacherCache(own_cache_dir)


def test_overwriting_that_was_stopped_continues(own_cache_dir, tiny_teacher, rows):
    lost = own_cache_dir / "shard-00003.arrow"
    lost.unlink()
    _, writer = make_writer(own_cache_dir, tiny_teacher, rows, overwrite=True)
    assert writer.pending == [range(24, 25)]


def test_a_cache_of_an_earlier_version_is_left_as_it_is(make_cache, rows, tiny_teacher, tmp_path):
    files = {"manifest.json": OF_ANOTHER_VERSION, "shard-00000.safetensors": "earlier"}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=r"manifest\.json is not of .*, or move the file away"):
        make_writer(tmp_path, tiny_teacher, rows, overwrite=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files
    (tmp_path / "manifest.json").rename(tmp_path / "earlier.json")
    assert make_cache(tmp_path).sequences == 25
    assert (tmp_path / "shard-00000.safetensors").read_text() == "earlier"


def test_a_build_that_an_earlier_version_has_begun_starts_over(make_cache, own_cache_dir, rows, tiny_teacher):
    """It noted its files in `progress.json`, which is not read any more."""
    (own_cache_dir / "manifest.json").rename(own_cache_dir / "progress.json")
    before = {path.name: path.read_bytes() for path in own_cache_dir.iterdir()}
    message = "move the file away: a build that an earlier version has begun starts over"
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=message):
            make_writer(own_cache_dir, tiny_teacher, rows, overwrite=overwrite)
        with pytest.raises(ValueError, match="holds no teacher's cache"):
            TeacherCache(own_cache_dir)
    assert {path.name: path.read_bytes() for path in own_cache_dir.iterdir()} == before
    for path in own_cache_dir.glob("*.arrow"):
        path.rename(path.with_suffix(".old"))
    assert make_cache(own_cache_dir).is_complete
    for path in own_cache_dir.glob("*.old"):
        assert path.read_bytes() == before[path.with_suffix(".arrow").name]


# ---- Files of somebody else ----

FOREIGN = ["shard-00000-of-00003.parquet", "shard-00000.parquet", "shard-00099.arrow", ".draft.tmp", ".x.0123abcd.tmp"]
FOREIGN += ["progress.json", ".progress.json.0123abcd.tmp"]


def _write(directory, names):
    directory.mkdir(exist_ok=True)
    for name in names:
        (directory / name).write_text("mine")


def _assert_kept(directory, names):
    assert {name: (directory / name).read_text() for name in names} == dict.fromkeys(names, "mine")


def test_files_of_somebody_else_are_left_as_they_are(make_cache, rows, tiny_teacher, tmp_path):
    _write(tmp_path, FOREIGN)
    make_writer(tmp_path, tiny_teacher, rows)
    assert make_cache(tmp_path).sequences == 25
    # A build that goes on, and one that starts over.
    (tmp_path / "shard-00001.arrow").unlink()
    make_cache(tmp_path)
    make_cache(tmp_path, overwrite=True, top_k=8)
    _assert_kept(tmp_path, FOREIGN)
    assert {path.name for path in tmp_path.iterdir()} == {
        *FOREIGN,
        "manifest.json",
        *(f"shard-{n:05d}.arrow" for n in range(4)),
    }


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["shard-00002.arrow", "manifest.json"])
def test_file_of_somebody_else_with_a_name_of_the_cache_is_refused(rows, tiny_teacher, tmp_path, name, overwrite):
    names = [name, *FOREIGN]
    _write(tmp_path, names)
    with pytest.raises(ValueError, match=f"{name} is not .* and is left as it is. Give another directory"):
        make_writer(tmp_path, tiny_teacher, rows, overwrite=overwrite)
    _assert_kept(tmp_path, names)
    assert {path.name for path in tmp_path.iterdir()} == set(names)


def test_file_of_somebody_else_that_a_larger_cache_would_overwrite_is_refused(
    make_cache, rows, tiny_teacher, tmp_path
):
    make_cache(tmp_path, dataset=rows.select(range(5)))
    _write(tmp_path, ["shard-00003.arrow"])
    before = (tmp_path / "manifest.json").read_bytes()
    with pytest.raises(ValueError, match="shard-00003.arrow is not of a teacher's cache"):
        make_writer(tmp_path, tiny_teacher, rows, overwrite=True)
    _assert_kept(tmp_path, ["shard-00003.arrow"])
    assert (tmp_path / "manifest.json").read_bytes() == before and (tmp_path / "shard-00000.arrow").exists()


def test_what_a_killed_build_has_left_is_removed(rows, tiny_teacher, make_cache, tmp_path):
    make_writer(tmp_path, tiny_teacher, rows)
    # Not noted yet, and not renamed yet.
    left = ["shard-00001.arrow", ".shard-00002.arrow.0123abcd.tmp", ".manifest.json.89abcdef.tmp"]
    _write(tmp_path, left)
    make_writer(tmp_path, tiny_teacher, rows)
    assert {path.name for path in tmp_path.iterdir()} == {"manifest.json"}


@pytest.mark.parametrize(
    ("ids", "value", "message"),
    [
        ([3, 300], -1.0, "token id 300 in sequence 0, but its config.json has a vocab_size of 261"),
        ([-1, 3], -1.0, "token id -1 in sequence 0"),
        ([3, 4], float("nan"), "log-probs at position 0 of sequence 0 are not numbers"),
    ],
)
def test_answers_that_no_teacher_can_mean_are_not_kept(rows, tiny_teacher, tmp_path, ids, value, message):
    _, writer = make_writer(tmp_path, tiny_teacher, rows, top_k=2, vocab_size=261, sequences_per_shard=1)
    length = len(rows[0]["input_ids"])
    answer = TeacherRows(
        torch.tensor([ids] * length, dtype=torch.int32),
        torch.full((length, 2), value, dtype=torch.float16),
        torch.zeros(length, 2),
        torch.zeros(length, 2, dtype=torch.float16),
    )
    with pytest.raises(ValueError, match=message):
        writer.write(range(1), [answer])
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_complete_cache_is_left_alone(own_cache_dir, make_cache):
    before = {path: path.stat().st_mtime_ns for path in own_cache_dir.iterdir()}
    make_cache(own_cache_dir, sequences_per_shard=100)
    assert {path: path.stat().st_mtime_ns for path in own_cache_dir.iterdir()} == before


def test_manifest_is_readable(cache_dir):
    manifest = json.loads((cache_dir / "manifest.json").read_text())
    assert manifest["teacher"] == "tiny" and manifest["temperatures"] == [1.0, 2.0]


@pytest.mark.parametrize("number", [7, 99_999, 100_000])
def test_a_file_is_known_by_its_number(number):
    assert shard_number(shard_name(number)) == number
