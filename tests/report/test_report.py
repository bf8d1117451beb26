import base64
import json
import re
import shlex
import subprocess
import sys
from html import unescape

import pyarrow.parquet
import pytest
from full_disk import largest_file

from hf_tpu_ext.cli.main import main
from hf_tpu_ext.errors import UserError
from hf_tpu_ext.formatting import format_number, format_seconds
from hf_tpu_ext.hardware.prices import read_prices
from hf_tpu_ext.report.figures import HOW_TO_DRAW, draw_curves
from hf_tpu_ext.report.make import _TEMPLATES, make_report
from hf_tpu_ext.report.record import RECORD_NAME, RecordWriter, read_run
from hf_tpu_ext.report.sections import headline


def pictures(page):
    """The SVG files in a page."""
    found = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]*)"', page.read_text())
    return [base64.b64decode(data).decode() for data in found]


def test_headline(write_run, tmp_path):
    run = read_run(write_run(tmp_path / "run", logs={"mfu": 0.4}))
    assert headline(run, read_prices()) == {
        "loss": "2.75 → 1 (steps 5 → 40)",
        "evaluation loss": "2 (step 40)",
        "steps": "40 of 40",
        "time": "1 h 0 min",
        "median tokens / s": "5,000",
        "median time of a step": "20 ms",
        "median MFU": "40 %",
        "padding": "29.0 %",
        "compilations": "1 in 2 s",
        "peak memory": "2.50 GB",
        # 8 chips for an hour.
        "cost so far": "$9.60",
    }


def test_both_forms_say_the_same(write_run, tmp_path):
    page = make_report([write_run(tmp_path / "run")])
    assert page == tmp_path / "run" / "report.html"
    html, markdown = page.read_text(), page.with_suffix(".md").read_text()
    for said in (
        "tiny",
        "$9.60 so far",
        "fsdp has no effect",
        "training step",
        "4 x 16",
        "2.9.1",
        "31.6 %",
        "replayed",
    ):
        assert said in html and said in markdown
    assert len(pictures(page)) == 7 and "<img" not in markdown
    assert not any("mathdefault" in svg for svg in pictures(page)), "ticks are numbers"
    assert not list(page.parent.glob("*.tmp"))
    # Every row of a table has as many cells as its head.
    for table in re.findall(r"(?:^\|.*\n)+", markdown, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1


DPO = {"rewards/chosen": 0.25, "rewards/rejected": -0.5, "rewards/margins": 0.75, "rewards/accuracies": 0.875}
DPO |= {"logps/chosen": -40.5, "logps/rejected": -41.5}
KTO = {"rewards/chosen": 0.25, "rewards/rejected": -0.5, "kl": 0.125}
REWARD = {"max_reward": 1.5, "mean_reward": 0.25, "min_reward": -1.25, "margin": 0.75, "accuracy": 0.875}


@pytest.mark.parametrize(
    ("logs", "titles", "legend", "columns", "results"),
    [
        (
            DPO,
            {"Rewards", "Accuracy", "Log-probs of completions"},
            {"chosen", "rejected", "margin", "margin, evaluation"},
            "rewards chosen | rewards rejected | rewards margins | rewards accuracies | logps chosen | logps rejected",
            {"evaluation accuracy": "0.875 (step 40)", "evaluation margin": "0.75 (step 40)"},
        ),
        (
            KTO,
            {"Rewards", "KL to the reference"},
            {"chosen", "rejected, evaluation", "KL", "KL, evaluation"},
            "rewards chosen | rewards rejected | kl",
            {},
        ),
        (
            REWARD,
            {"Rewards", "Margin", "Accuracy"},
            {"max", "mean", "min", "min, evaluation"},
            "max reward | mean reward | min reward | margin | accuracy",
            {"evaluation accuracy": "0.875 (step 40)", "evaluation margin": "0.75 (step 40)"},
        ),
    ],
    ids=["dpo", "kto", "reward"],
)
def test_preferences_are_shown(write_run, tmp_path, logs, titles, legend, columns, results):
    held_out = {f"eval_{name}": value for name, value in logs.items()}
    run = write_run(tmp_path / "run", logs=logs, held_out=held_out)
    page = make_report([run])
    html, markdown = page.read_text(), page.with_suffix(".md").read_text()
    assert len(pictures(page)) == 7 + len(titles)
    for text in titles | legend:
        assert any(re.search(rf"<text[^>]*>{text}</text>", svg) for svg in pictures(page)), text
    assert titles <= set(re.findall(r'alt="([^"]*)"', html))
    assert f"| step | loss | {columns} | learning rate | gradient norm |" in markdown
    assert f"| step | loss | {columns} |\n" in markdown
    row = " | ".join(format_number(value) for value in logs.values())
    assert f"| 40 | 1 | {row} |" in markdown and f"| 40 | 2 | {row} |" in markdown
    shown = headline(read_run(run), read_prices())
    assert {name: shown[name] for name in shown if "accuracy" in name or "margin" in name} == results
    # Beside a run that has none of it.
    page = make_report([run, write_run(tmp_path / "sft")], tmp_path)
    assert len(pictures(page)) == 7 + len(results)
    for name, value in results.items():
        assert f"| {name} | {value} |  |" in page.with_suffix(".md").read_text()


def add_logs(run, *logs):
    """Write more logs, as callbacks do, each with its step."""
    last = json.loads((run / RECORD_NAME).read_text().splitlines()[-1])
    for step, values in logs:
        RecordWriter(run, anew=False).write(**{**last, "event": "log", "step": step, "logs": values})


def test_metrics_of_ones_own_are_shown(write_run, tmp_path):
    """Those that a callback logs by itself, also beside a log of training, and those that it adds to logs."""
    run = write_run(tmp_path / "run", logs={"added": 0.25}, held_out={"eval_f1": 0.5, "eval_samples_per_second": 9.0})
    add_logs(run, (3, {"my_metric": 7.0}), (40, {"my_metric": 5.0, "said": "so"}), (42, {"bleu": 12.5}))
    page = make_report([run])
    markdown = page.with_suffix(".md").read_text()
    own = "".join(markdown.partition("## Other metrics\n\n")[2].partition("\n\n")[0])
    assert own.splitlines()[2:] == [
        "| my_metric | 40 | 5 |",
        "| added | 40 | 0.25 |",
        "| said | 40 | so |",
        "| eval_f1 | 40 | 0.5 |",
        "| bleu | 42 | 12.5 |",
    ]
    for curve in (
        {"my_metric": [(3, 7.0), (40, 5.0)]},
        {"added": [(step, 0.25) for step in range(5, 41, 5)]},
    ):
        assert draw_curves(*curve, curve).svg in pictures(page)
    assert len(pictures(page)) == 7 + 2, "one value is no curve"
    # What is known of training is as it was.
    assert "| 40 | 1 | 2.439e-05 | 1 |" in markdown and "| 3 |" not in markdown and "| 42 |  |" not in markdown
    assert "| loss | 2.75 → 1 (steps 5 → 40) |" in markdown and "| 40 | 2 |\n" in markdown


@pytest.mark.ci
def test_a_metric_that_some_logs_do_not_have(write_run, tmp_path):
    run = write_run(tmp_path / "run", steps=10, end=False, logs={"rewards/chosen": 0.5})
    more = dict(loss=1.0, learning_rate=1e-3, grad_norm=1.0)
    add_logs(run, (15, more), (20, {**more, "rewards/chosen": float("nan")}), (25, {**more, "rewards/chosen": 0.75}))
    page = make_report([run])
    assert draw_curves("Rewards", {"chosen": [(5, 0.5), (10, 0.5), (25, 0.75)]}).svg in pictures(page)
    markdown = page.with_suffix(".md").read_text()
    assert "| 15 | 1 |  | 0.001 | 1 |" in markdown and "| 20 | 1 | nan | 0.001 | 1 |" in markdown


@pytest.mark.ci
def test_what_a_person_typed_stays_text(write_run, tmp_path):
    typed = "<script>alert(1)</script> | `a` \n# & $x_{$"
    run = write_run(
        tmp_path / "run", arguments={"output_dir": typed}, model={"name": typed, "parameters": 10, "trained": 1}
    )
    for page in (make_report([run]), make_report([run, write_run(tmp_path / "<b>$x_{$")], tmp_path)):
        html = page.read_text()
        # Without the mark of this package, a comment.
        _, _, markdown = page.with_suffix(".md").read_text().partition("\n")
        assert "<script" not in html and "<b>" not in html and "&lt;script&gt;" in html
        assert not re.search(r"(?<!\\)[<`]", markdown)


def test_nothing_is_loaded_from_anywhere(write_run, tmp_path):
    html = make_report([write_run(tmp_path / "run")]).read_text()
    assert "default-src 'none'" in html
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"|url\((?!#)[^)]*\)|@import', html)


def test_what_is_not_known_is_left_out(write_run, tmp_path):
    device = {"name": "cpu", "device": "x86_64 CPU", "reason": "asked for", "chips": 1, "memory_per_chip": None}
    page = make_report([write_run(tmp_path / "run", backend=device)])
    numbers = headline(read_run(page.parent), read_prices())
    assert "cost so far" not in numbers and "median MFU" not in numbers
    assert "No price of x86_64 CPU is known" in page.read_text()
    # And in the words of the line at start.
    assert "on 1 device of x86_64 CPU" in page.read_text()


def test_a_run_without_logs(write_run, tmp_path):
    page = make_report([write_run(tmp_path / "run", steps=4, end=False)])
    html = page.read_text()
    assert "Nothing was logged" in html and "did not end, or is still going on" in html


def test_a_loss_that_is_not_finite(write_run, tmp_path):
    html = make_report(
        [write_run(tmp_path / "run", logs={"loss": float("nan"), "grad_norm": float("inf")})]
    ).read_text()
    assert "The loss was not finite in 8 logs." in html and "nan" in html


def test_a_resumed_run_shows_its_sessions(write_run, tmp_path):
    write_run(tmp_path / "run", steps=30, end=False)
    run = write_run(tmp_path / "run", first_step=20, anew=False, max_steps=80)
    markdown = make_report([run]).with_suffix(".md").read_text()
    assert "killed after step 30 or later, and resumed after step 20: the steps between were run again." in markdown
    assert "| 0 | 30 of 40 | 63 s | 1 | 29 | 28 | did not end |" in markdown
    assert "| 20 | 40 of 80 | 1 h 0 min | 1 | 40 | 38 | stopped by a callback or a signal |" in markdown
    # What is counted is of both parts.
    assert "69 executions, 66 of them replayed" in markdown and "| compilations | 2 in 4 s |" in markdown


def test_a_run_that_was_told_to_stop_repeats_nothing(write_run, tmp_path):
    write_run(tmp_path / "run", steps=20)
    markdown = make_report([write_run(tmp_path / "run", first_step=20, anew=False)]).with_suffix(".md").read_text()
    assert "were run again" not in markdown.partition("## Parts")[0] and "| 0 | 20 of 40 | 1 h 0 min |" in markdown
    assert "Training stopped after" not in markdown
    assert (
        "The run ended after step 20, and was resumed: the first log since may be the mean of fewer steps" in markdown
    )
    write_run(tmp_path / "all")
    finished = write_run(tmp_path / "all", steps=40, first_step=40, anew=False)
    assert "was resumed" not in make_report([finished]).with_suffix(".md").read_text()
    markdown = make_report([write_run(tmp_path / "early", steps=20)]).with_suffix(".md").read_text()
    assert "Training stopped after step 20 of 40, by a callback (early stopping is one) or a signal." in markdown


def test_a_run_that_was_killed_after_a_checkpoint(write_run, tmp_path):
    """Its last log was at step 15."""
    run = write_run(tmp_path / "run", steps=15, end=False)
    last = json.loads((run / RECORD_NAME).read_text().splitlines()[-1])
    counters = {**last["counters"], "executions": 17, "replays": 16}
    RecordWriter(run, anew=False).write(**{**last, "event": "save", "step": 18, "at": 40.0, "counters": counters})
    markdown = make_report([write_run(run, first_step=18, anew=False)]).with_suffix(".md").read_text()
    assert "killed after step 18 or later, and resumed after step 18" in markdown
    assert "| 0 | 18 of 40 | 40 s | 1 | 17 | 16 | did not end |" in markdown and "unreadable" not in markdown


def test_what_an_adapter_of_a_run_has_by_default(write_run, tmp_path):
    settings = [{"peft_config.lora_alpha": 16, "peft_config.r": 8}, {"peft_config.r": 8}, {}]
    runs = [write_run(tmp_path / name, arguments=arguments) for name, arguments in zip("abc", settings, strict=True)]
    markdown = make_report(runs, tmp_path).with_suffix(".md").read_text()
    assert "| peft_config.lora_alpha | 16 | default |  |" in markdown and "| peft_config.r | 8 | 8 |  |" in markdown


def test_numbers_that_are_written_otherwise_are_no_difference(write_run, tmp_path):
    """Upstream's default of `save_steps` is a float."""
    runs = [write_run(tmp_path / name, arguments={"save_steps": steps}) for name, steps in (("a", 20.0), ("b", 20))]
    assert "save_steps" not in make_report(runs, tmp_path).with_suffix(".md").read_text()


@pytest.mark.ci
def test_several_runs(write_run, tmp_path):
    arguments = {"output_dir": "runs/a", "learning_rate": 1e-3, "max_length": 64}
    runs = [
        write_run(tmp_path / "a", arguments=arguments),
        write_run(tmp_path / "b", arguments={**arguments, "learning_rate": 5e-4}, logs={"loss": 1.5}),
        write_run(tmp_path / "c", arguments=arguments, end=False),
    ]
    page = make_report(runs, tmp_path)
    assert page.name == "comparison.html"
    markdown = page.with_suffix(".md").read_text()
    assert "| learning_rate | 0.001 | 0.0005 | 0.001 |" in markdown and "max_length" not in markdown
    assert "| loss | 2.75 → 1 (steps 5 → 40) | 1.5 → 1.5 (steps 5 → 40) | 2.75 → 1 (steps 5 → 40) |" in markdown
    assert f"- {runs[2]}: The run did not end" in markdown
    # Figures are in the page alone.
    losses = markdown.partition("## Training\n\n### Loss at some steps\n\n")[2].partition("\n\n")[0]
    assert "| 5 | 2.75 | 1.5 | 2.75 |\n| 10 | 2.5 | 1.5 | 2.5 |" in losses and "| 40 | 1 | 1.5 | 1 |" in losses
    # What the runs have in common is said, too.
    for row in ("begun | 2026-11-20 10:00:00 UTC", "model | tiny", "train_dataset | chat, 20 rows", "torch | 2.9.1"):
        name, _, value = row.partition(" | ")
        assert f"| {name} | {' | '.join([value] * 3)} |" in markdown
    html = page.read_text()
    assert len(pictures(page)) == 7 and all(str(run) in html for run in runs)


@pytest.mark.ci
def test_why_runs_compiled_more(write_run, tmp_path):
    """Causes of recompilations and why steps were traced are side by side, and in the report of each."""
    causes = ["labels was (4, 16), is (4, 9)"] * 2 + [*"wxyz"]
    runs = [
        write_run(tmp_path / "a"),
        write_run(tmp_path / "b", end=False, causes=causes, why_traced="Mine, a callback"),
    ]
    markdown = make_report(runs, tmp_path).with_suffix(".md").read_text()
    said = "6 in 12 s: labels was (4, 16), is (4, 9) (2x); w (1x); x (1x); others (2x)"
    assert f"| recompilations |  | {said} |" in markdown
    assert "| executions | 40, 38 of them replayed | 39, 0 of them replayed |" in markdown
    assert "| first compilations | training step (1x) | training step (1x) |" in markdown
    assert "| step replay |  | off: Mine, a callback |" in markdown
    read = r"\`.item()\` syncs device to host [mine.py:9]"
    assert f"| device-to-host syncs |  | {read} |" in markdown
    alone = make_report(runs[1:]).with_suffix(".md").read_text()
    assert "Step replay is off: Mine, a callback." in alone
    assert alone.count("Advice on labels was (4, 16), is (4, 9).") == alone.count("Advice on w.") == 1
    assert f"Device-to-host syncs outside this package: {read}." in alone


def test_steps_far_apart_are_readable(write_run, tmp_path):
    """Runs of 40 and of 4,000,000 steps; steps of 10 ms, one of which took 20 minutes."""
    long = write_run(tmp_path / "long")
    lines = [json.loads(line) for line in (long / RECORD_NAME).read_text().splitlines()]
    for line in lines:
        if "step_times" in line:
            line["step"] *= 100_000
            line["step_times"] = {"total": {"-40": 400_000, "61": 1}}
    (long / RECORD_NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
    labels = re.findall(r">([^<>]*)</text>", pictures(make_report([long]))[-2])
    assert {"10 ms", "16 min 40 s", "1", "100,000", "steps"} <= set(labels)
    page = make_report([write_run(tmp_path / "short"), long], tmp_path)
    labels = re.findall(r">([^<>]*)</text>", pictures(page)[0])
    assert {"10", "1,000", "100,000", "optimizer step"} <= set(labels)
    # One large norm leaves the others readable.
    curve = [(1, 40_000.0), *((step, 1.0 + step / 100) for step in range(2, 50))]
    svg = draw_curves("norm", {"": curve}).svg
    heights = [float(y) for y in re.findall(r"[ML] [\d.]+ ([\d.]+)", svg)]
    assert {"1", "100", "10,000"} <= set(re.findall(r">([^<>]*)</text>", svg))
    assert max(heights) - min(heights) > 50


def test_time_by_phase(write_run, tmp_path):
    runs = [write_run(tmp_path / name) for name in "ab"]
    markdown = make_report(runs, tmp_path).with_suffix(".md").read_text()
    assert (
        "## Mean time of a step" in markdown and "| data | 20 ms | 20 ms |" in markdown and "| eval |" not in markdown
    )
    page = make_report(runs[:1])
    assert 'alt="Where the time went"' in page.read_text()
    # Means over the same steps, which can be compared and add up.
    _, _, speed = page.with_suffix(".md").read_text().partition("## Speed")
    rows = re.findall(r"(?m)^\| ([^|]+) \|[^|]*\|[^|]*\|[^|]*\| (\d+) ms \|$", speed)
    assert rows == [("data", "20"), ("replay", "60"), ("whole step (mean)", "80")]
    (svg,) = (svg for svg in pictures(page) if ">Mean time of a step by phase</text>" in svg)
    labels = re.findall(r">([^<>]*)</text>", svg)
    assert {"data", "20 ms", "replay", "60 ms", "whole step (mean)", "80 ms"} <= set(labels)


def test_the_phase_step_is_told_from_whole_steps(write_run, tmp_path):
    """On CUDA and CPU a phase is called `step`, too."""
    run = write_run(tmp_path / "run", end=False)
    last = json.loads((run / RECORD_NAME).read_text().splitlines()[-1])
    last["phases"]["step"] = last["phases"].pop("replay")
    RecordWriter(run, anew=False).write(**last)
    markdown = make_report([run, run], tmp_path).with_suffix(".md").read_text()
    assert "| step | 60 ms | 60 ms |" in markdown and "| whole step (mean) | 80 ms | 80 ms |" in markdown


@pytest.mark.ci
def test_the_whole_step_comes_last_where_runs_have_other_phases(write_run, tmp_path):
    runs = [write_run(tmp_path / name) for name in "ab"]
    last = json.loads((runs[0] / RECORD_NAME).read_text().splitlines()[-2])
    assert last["phases"].pop("replay")
    RecordWriter(runs[0], anew=False).write(**last)
    _, _, times = make_report(runs, tmp_path).with_suffix(".md").read_text().partition("## Mean time of a step")
    assert re.findall(r"(?m)^\| (data|replay|whole step \(mean\)) \|", times) == [
        "data",
        "replay",
        "whole step (mean)",
    ]


def test_a_legend_covers_no_data():
    curves = {f"run {number}" * 9: [(step, number) for step in (1, 2)] for number in range(5)}
    svg = draw_curves("A", curves).svg
    texts = {text: float(y) for y, text in re.findall(r'<text [^>]* y="([\d.]+)"[^>]*>([^<>]*)</text>', svg)}
    assert all(texts[name] > texts["optimizer step"] for name in curves)


def test_commands_can_be_copied_from_markdown():
    plain = _TEMPLATES.filters["plain"]
    for command in ("pip install 'hf-tpu-ext[report]'", "hf-tpu report runs/my_run --output_dir /tmp/a-b.c"):
        assert plain(command) == command
    assert plain("_a_ [b](c) [d]: e") == r"\_a\_ [b\](c) [d\]: e"


SAMPLES = [{"prompt": "3+4=", "reference": "7", "before": "3", "after": "7"}]


def test_samples_are_shown(write_run, tmp_path):
    runs = [write_run(tmp_path / name, end=False) for name in "ab"]
    for run, after in zip(runs, ("7", "8"), strict=True):
        RecordWriter(run, anew=False).write("samples", at=90.0, step=None, rows=[{**SAMPLES[0], "after": after}])
    markdown = make_report(runs[:1]).with_suffix(".md").read_text()
    assert "| prompt | reference | before | after |" in markdown and "| 3+4= | 7 | 3 | 7 |" in markdown
    assert "unreadable" not in markdown
    assert "| 3+4= | 7 | 8 |" in make_report(runs, tmp_path).with_suffix(".md").read_text()


def test_completions_are_shown(write_run, tmp_path):
    """The files are TRL's, see `log_completions`."""
    run = write_run(tmp_path / "run", logs={"reward": 0.5, "reward_std": 0.25})
    (run / "completions").mkdir()
    for step in (5, 10, 40, 80):
        messages = [[{"role": "user", "content": "3+4="}], [{"role": "assistant", "content": f"{step}"}]]
        table = {"step": step, "prompt": messages[0], "completion": messages[1], "is_right": 0.0, "words": [1, 2]}
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist([table] * 9), run / "completions" / f"completions_{step:05d}.parquet"
        )
    markdown = make_report([run]).with_suffix(".md").read_text()
    # A reward function may log a list of anything.
    assert "| step | prompt | completion | is_right | words |" in markdown
    assert markdown.count("| 5 | user: 3+4= | assistant: 5 | 0 | [1, 2] |") == 4 and "assistant: 10" not in markdown
    assert markdown.count("| 40 | user: 3+4= | assistant: 40 | 0 | [1, 2] |") == 4
    assert headline(read_run(run), read_prices())["reward"] == "0.5 → 0.5 (steps 5 → 40)"


def test_without_matplotlib(write_run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = write_run(tmp_path / "run")
    html = make_report([run]).read_text()
    assert "<img" not in html and HOW_TO_DRAW in unescape(html) and "31.6 %" in html
    assert "pip install" in make_report([run, write_run(tmp_path / "other")], tmp_path).read_text()


def test_a_report_that_cannot_be_written(write_run, tmp_path):
    run = write_run(tmp_path / "run")
    (run / "report.html").mkdir()
    with pytest.raises(ValueError, match=r"report.html cannot be written .*--output_dir"):
        make_report([run])
    assert sorted(path.name for path in run.iterdir()) == ["report.html", RECORD_NAME]
    assert make_report([run], tmp_path) == tmp_path / "report.html"


@pytest.mark.parametrize("suffix", [".html", pytest.param(".md", marks=pytest.mark.slow)])
def test_a_file_that_is_no_report_is_kept(write_run, tmp_path, suffix):
    runs = [write_run(tmp_path / name) for name in "ab"]
    for directories, output_dir, name in ((runs[:1], runs[0], "report"), (runs, tmp_path, "comparison")):
        own = (output_dir / name).with_suffix(suffix)
        own.write_text("# What I think of these runs\n")
        before = sorted(output_dir.iterdir())
        with pytest.raises(
            UserError, match="is not a report that hf-tpu has written, and is kept. Rename it, or"
        ) as refusal:
            make_report(directories, None if len(directories) == 1 else output_dir)
        assert own.read_text() == "# What I think of these runs\n" and sorted(output_dir.iterdir()) == before
        # What the message says.
        _, *words = shlex.split(str(refusal.value).partition("directory: ")[2])
        assert main(words) == 0 and (output_dir / "reports" / f"{name}.html").is_file()
        own.rename(output_dir / "mine")
        # The second time, both take the place of our own.
        for _ in range(2):
            make_report(directories, output_dir)


def test_a_full_disk_leaves_the_former_report(write_run, tmp_path):
    page = make_report([write_run(tmp_path / "run")])
    before = page.read_text()
    with largest_file(2048), pytest.raises(ValueError, match="report.html cannot be written"):
        make_report([page.parent])
    assert page.read_text() == before and not list(page.parent.glob("*.tmp"))


@pytest.mark.ci
def test_torch_is_not_imported(write_run, tmp_path):
    """A report is made beside a process that holds the TPU, and in a second."""
    code = "import sys, hf_tpu_ext.report.make as m; m.make_report(sys.argv[1:]); print([n for n in ('torch', 'transformers') if n in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code, str(write_run(tmp_path / "run"))], capture_output=True, text=True
    )
    assert result.stdout.strip() == "[]", result.stderr


def test_long_curves_keep_their_peaks():
    points = [(step, 100.0 if step == 77_777 else step % 7) for step in range(200_000)]
    svg = draw_curves("A", {"a": points}).svg
    assert len(svg) < 100_000
    long, short = (draw_curves("A", {"a": values}).svg for values in (points, [(0, 0), (77_777, 100.0), (199_999, 1)]))
    heights = [min(float(y) for y in re.findall(r"[ML] [\d.]+ ([\d.]+)", svg)) for svg in (long, short)]
    assert heights[0] == pytest.approx(heights[1], abs=0.5)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00123, "1.23 ms"),
        (0.25, "250 ms"),
        (12.04, "12 s"),
        (185, "3 min 5 s"),
        (7800, "2 h 10 min"),
        (3599.9, "1 h 0 min"),
    ],
)
def test_durations(seconds, text):
    assert format_seconds(seconds) == text


def test_numbers():
    assert [format_number(value) for value in (12345.6, 3, 2e-5, 1.23456, float("nan"))] == [
        "12,346",
        "3",
        "2e-05",
        "1.235",
        "nan",
    ]
