"""Tiny models of all families write on XLA what upstream's `generate` writes on eager CPU, or are refused: none ends the process."""

import os
import sys
from pathlib import Path

import forked
import pytest
from tasks import names_of


DRIVER = Path(__file__).with_name("generation_driver.py")


def text_of(model_type):
    words = [sys.executable, DRIVER, model_type]
    done = forked.run(words, capture_output=True, text=True, env=os.environ | {"PJRT_DEVICE": "CPU"}, timeout=300)
    return done.stdout.splitlines()[-1] if done.returncode == 0 else f"exit status {done.returncode}"


# Rotary embeddings, learned positions with and without an argument for them, a cache of another form.
@pytest.mark.parametrize(
    ("model_type", "text"), [("llama", "equal"), ("gpt2", "equal"), ("bart", "refused"), ("trocr", "refused")]
)
@pytest.mark.ci
def test_text_of_a_family(model_type, text):
    assert text_of(model_type) == text


@pytest.mark.slow
def test_text_of_all_families():
    texts = {name: text_of(name) for name in names_of("causal")}
    told = {name: text for name, text in texts.items() if text not in ("equal", "refused")}
    assert not {name for name, text in told.items() if not text.startswith("upstream fails")}, told
    assert list(texts.values()).count("equal") > 100 and len(told) < 15, texts
