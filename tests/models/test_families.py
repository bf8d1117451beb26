"""Tiny models of families whose layers are unlike those of Llama: equal to upstream's trainer, and replayed."""

import pytest
from families import ACCUMULATION, difference, read_results, run_part, train, verdict


# State over the row and a system for each chunk of it; a mixer and attention; numbers of two modules that are equal; a mean of what
# an embedding has made.
@pytest.mark.parametrize("model_type", ["qwen3_next", "bamba", "apertus", "cohere"])
def test_family_is_replayed_and_equal(xla, tmp_path, model_type):
    run = ["causal", model_type, False, "sft"]
    ours = train(*run, ours=True, output_dir=str(tmp_path / "ours"))
    stock = train(*run, ours=False, output_dir=str(tmp_path / "stock"))
    assert difference(ours, stock) < 1e-5
    assert ours["why_traced"] is None
    assert [step["compiles"] for step in ours["steps"]] == [2, 0, 0, 0]
    expected = dict(compiles=0, executions=ACCUMULATION, reads=0, fallbacks=0, replays=ACCUMULATION)
    assert ours["steps"][-1] == expected


_RUNS = sorted(read_results())
_PART = 24


@pytest.mark.slow
@pytest.mark.parametrize("begin", range(0, len(_RUNS), _PART))
def test_families_train_as_the_table_says(tmp_path, begin):
    """Some at a time: a new version of transformers may change any of them."""
    names = [key.split("/") for key in _RUNS[begin : begin + _PART]]
    known, found = read_results(), run_part([[task, name, kind == "lora"] for task, name, kind in names], tmp_path)

    def said(result):
        # Not how far apart, nor in how many seconds.
        return verdict(result).partition(" (")[0].partition(":")[0]

    changed = {key: verdict(result) for key, result in found.items() if said(result) != said(known[key])}
    assert not changed
