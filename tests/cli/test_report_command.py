import json
import sys

import forked
import pytest

from hf_tpu_ext.cli.main import main
from hf_tpu_ext.examples.tiny import make_arithmetic, make_model


# Two runs by the command line; `tests/report` has the pages.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs on the eager CPU, by the command line."""
    directory = tmp_path_factory.mktemp("runs")
    model = make_model(directory / "model", hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    data = make_arithmetic(directory / "data", num_rows=16)
    words = (
        f"--model_name_or_path {model} --dataset_name {data} --max_steps 3 --max_length 32 --bf16 false --backend cpu"
    )
    words += " --report_to none --save_strategy no --logging_steps 1 --disable_tqdm true"
    runs = [
        ["sft", *words.split(), "--output_dir", str(directory / name), "--learning_rate", rate]
        for name, rate in (("a", "1e-3"), ("b", "2e-3"))
    ]
    # A process keeps the device that its first run had.
    code = "import json, sys; from hf_tpu_ext.cli.main import main; sys.exit(any(map(main, json.loads(sys.argv[1]))))"
    result = forked.run([sys.executable, "-c", code, json.dumps(runs)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return directory


def test_a_run_is_shown_again(runs, capsys):
    (runs / "a" / "report.html").unlink()
    assert main(["report", str(runs / "a")]) == 0
    assert capsys.readouterr().out.split() == [str(runs / "a" / "report.html"), str(runs / "a" / "report.md")]
    assert "data:image/svg+xml;base64," in (runs / "a" / "report.html").read_text()


def test_runs_are_compared(runs, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(runs / "a"), str(runs / "b")]) == 0
    page = (tmp_path / "comparison.md").read_text()
    assert "| learning_rate | 0.001 | 0.002 |" in page and "| output_dir |" not in page
    assert capsys.readouterr().out.split() == ["comparison.html", "comparison.md"]


def test_prices_of_ones_own(runs, capsys, tmp_path):
    assert (
        main(["report", str(runs / "a"), "--output_dir", str(tmp_path), "--prices", str(tmp_path / "none.json")]) == 2
    )
    assert "prices" in capsys.readouterr().err
    price = {"dollars_per_chip_hour": 1.0, "region": "here", "date": "2026", "source": "me"}
    (tmp_path / "mine.json").write_text(json.dumps({"v5e": price}))
    assert (
        main(["report", str(runs / "a"), "--output_dir", str(tmp_path), "--prices", str(tmp_path / "mine.json")]) == 0
    )
    assert (tmp_path / "report.html").is_file()


@pytest.mark.parametrize("where", ["", "none"])
def test_what_is_no_run(runs, capsys, where):
    assert main(["report", str(runs / where)]) == 2
    error = capsys.readouterr().err
    assert "is not the directory of a run" in error and "output_dir" in error and "Traceback" not in error
    assert (str(runs / "a") in error) == (where == "")


def test_a_directory_that_is_not_there_is_made(runs, capsys, tmp_path):
    assert main(["report", str(runs / "a"), "--output_dir", str(tmp_path / "new" / "reports")]) == 0
    assert (tmp_path / "new" / "reports" / "report.md").is_file()
    # Not for what is no run.
    assert main(["report", str(runs / "none"), "--output_dir", str(tmp_path / "other")]) == 2
    assert not (tmp_path / "other").exists()


def test_a_place_that_cannot_be_written(runs, capsys):
    assert main(["report", str(runs / "a"), "--output_dir", str(runs / "a" / "run.jsonl")]) == 2
    assert "cannot be written" in capsys.readouterr().err
