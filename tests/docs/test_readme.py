"""README.md is one screen, and its figures are those of the pages that the benchmarks write."""

import re
from pathlib import Path


ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
#: As `wc -w README.md` counts.
MOST_WORDS = 900


def test_is_short():
    assert len(README.split()) <= MOST_WORDS


def test_says_its_status_before_anything_is_installed():
    assert README.index("Nothing was run on a TPU yet") < README.index("## Install")


def test_cycles_are_those_of_the_benchmark():
    plan = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (Qwen\S+), (LoRA|full), (\S+ x \S+), (v5e-\d) \| (\d+) \| (\d+) \|$", README, re.MULTILINE)
    assert len(rows) == 3
    for model, kind, batch, chips, ours, jax in rows:
        run = rf"\| {model} \| {kind}, {batch}, full rematerialization \| {chips} \|"
        assert re.search(rf"{run} this package \| {ours} M \|", plan) and re.search(rf"{run} JAX \| {jax} M \|", plan)


def test_seconds_are_those_of_the_benchmark():
    grpo = (ROOT / "docs" / "grpo.md").read_text(encoding="utf-8")
    ours, stock = re.search(r"two CPU cores: (\S+ s) a step, where stock TRL takes (\S+ s)", README).groups()
    assert re.search(rf"\| hf_tpu_ext, XLA \|.*\| {ours} \(", grpo) and re.search(
        rf"\| TRL, eager \|.*\| {stock} \(", grpo
    )


def test_speed_is_that_of_the_benchmark():
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    ours, theirs = (
        re.search("<!-- smollm2:start -->\n(.*?)\n(?:\n.*)?<!-- smollm2:end -->", text, re.DOTALL)[1]
        for text in (README, page)
    )
    assert "XLA | stock TRL" in ours and ours == theirs
