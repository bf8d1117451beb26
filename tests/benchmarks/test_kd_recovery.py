import math
from functools import partial

import kd_recovery
import kd_recovery_tables
import kd_texts
import pytest
import torch
from kd_recovery import METHODS
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_tpu_ext.examples.tiny import make_arithmetic, make_model, make_tokenizer


def test_layout_is_left_out():
    text = "\r\n   A  Title\r\n\r\n\r\n  It was a long\r\nday.\r\n"
    assert kd_texts.tidy(text, wrapped=True) == "A Title\n\nIt was a long day."
    assert kd_texts.tidy(text, wrapped=False) == "A Title\n\nIt was a long\nday."


def test_texts_that_are_there_are_not_downloaded(tmp_path):
    for name in kd_texts.FILES.values():
        (tmp_path / name).write_text(f"{name}\nis here", encoding="ascii")
    kd_texts.download(tmp_path)
    texts = kd_texts.read_texts(tmp_path)
    assert texts["proceedings"] == "lcet10.txt is here"
    assert texts["verse"] == "plrabn12.txt\nis here"
    assert "statement" in texts["reference"]


def test_passages_do_not_overlap(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(make_tokenizer(tmp_path))
    text = "".join(chr(0x4E00 + number) for number in range(100))
    ids = tokenizer(text)["input_ids"]
    assert len(set(zip(ids[::3], ids[1::3], ids[2::3], strict=True))) == 100
    train = kd_texts.passages(tokenizer, text, 30, 5, (0, 0.75))
    test = kd_texts.passages(tokenizer, text, 30, 2, (0.75, 1))
    assert (train.shape, test.shape) == ((5, 30), (2, 30))
    found = tokenizer.batch_decode([*train, *test])
    assert all(passage in text for passage in found)
    assert len(set("".join(found))) == 70
    assert found[-2] == text[75:85]


def test_passages_need_a_text_that_is_long_enough(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(make_tokenizer(tmp_path))
    with pytest.raises(ValueError, match="holds 3 passages of 3 tokens, not 4"):
        kd_texts.passages(tokenizer, "0123456789", 3, 4)


@pytest.fixture
def batches():
    batches = []
    for ids, prompt in (([5, 6, 7, 8, 9], 2), ([11, 12, 13], 0)):
        labels = torch.tensor([[-100] * prompt + ids[prompt:]])
        batches.append({"input_ids": torch.tensor([ids]), "labels": labels})
    return batches


@torch.no_grad()
def test_scores_are_means_over_labels(tmp_path, batches):
    model = AutoModelForCausalLM.from_pretrained(make_model(tmp_path / "model"))
    teacher = AutoModelForCausalLM.from_pretrained(make_model(tmp_path / "teacher", seed=1))
    losses = [model(**batch).loss.item() for batch in batches]
    theirs = [kd_recovery.log_probs(teacher, batch) for batch in batches]
    found = kd_recovery.score(model, batches, theirs)
    assert found["loss"] == pytest.approx((3 * losses[0] + 2 * losses[1]) / 5, rel=1e-5)
    own = [kd_recovery.log_probs(model, batch) for batch in batches]
    divergences = [
        torch.nn.functional.kl_div(q[:, first:], p[:, first:], reduction="sum", log_target=True).item()
        for q, p, first in zip(own, theirs, (1, 0), strict=True)
    ]
    assert found["kl"] == pytest.approx(sum(divergences) / 5, rel=1e-5)
    assert kd_recovery.score(model, batches, own)["kl"] == 0


@pytest.fixture
def results():
    def result(loss):
        return {"a": {"loss": loss, "kl": 0.1}, "b": {"loss": loss + 1, "kl": 0.3}}

    results = {"teacher": [result(1.0)], "student": [result(3.0)]}
    return results | {method: [result(loss) for loss in (1.5, 2.5)] for method in METHODS}


def test_share_recovered(results):
    assert kd_recovery_tables.recovered(results, "teacher", ["a"]) == [1]
    assert kd_recovery_tables.recovered(results, "student", ["a", "b"]) == [0]
    assert kd_recovery_tables.recovered(results, "cached teacher", ["a", "b"]) == [0.75, 0.25]


def test_tables_show_all_seeds(results):
    tables = kd_recovery_tables.make_tables(results, {"both": ["a", "b"]})
    assert f"| teacher | {math.exp(1.5):.4g} | 100.0% | 100.0% | 0.200 |" in tables
    assert "| rounded student, before training | 33.12 | 0.0% | 0.0% | 0.200 |" in tables
    mean, spread = (math.exp(2) + math.exp(3)) / 2, (math.exp(3) - math.exp(2)) / 2**0.5
    lost = math.exp(3.5) - math.exp(1.5)
    of_it = f"{(math.exp(3.5) - mean) / lost:.1%} ± {spread / lost:.1%}"
    assert f"| online teacher | {mean:.4g} ± {spread:.2g} | {of_it} | 50.0% ± 35.4% | 0.200 ± 0.000 |" in tables
    assert "| both, recovered of the logarithm | a | b |" in tables


def test_cached_and_online_are_compared_within_a_seed(results):
    for result in results["cached teacher"]:
        result["a"]["loss"] += 0.02
    line = kd_recovery_tables.cached_against_online(results, ["a", "b"])
    assert "at most 0.01 nats per token apart in a seed; the standard deviation over the seeds is 0.7" in line


@pytest.mark.slow
def test_whole_comparison_in_small(tmp_path, monkeypatch, xla):
    monkeypatch.setattr(kd_recovery, "make_arithmetic", partial(make_arithmetic, num_rows=64))
    options = ["--tiny", "--teacher_steps=40", "--steps=4", "--seeds=1", "--backend=cpu", "--learning_rate=1e-3"]
    arguments = kd_recovery.parse_arguments([*options, "--work_dir", str(tmp_path)])
    task = kd_recovery.prepare_tiny(arguments, tmp_path)
    kd_recovery.save_damaged(task)
    kd_recovery.make_cache(task)
    results = kd_recovery.compare(task)
    losses = {name: [result["additions"]["loss"] for result in by_seed] for name, by_seed in results.items()}
    assert list(losses) == ["teacher", "student", *METHODS]
    assert results["teacher"][0]["additions"]["kl"] == 0
    assert losses["teacher"] < losses["student"]
    # Of 259 tokens the cache leaves out those that the teacher holds for next to impossible.
    assert losses["cached teacher"] == pytest.approx(losses["online teacher"], abs=2e-3)
    assert losses["cached teacher"] != pytest.approx(losses["labels alone"], abs=1e-5)
