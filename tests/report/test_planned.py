"""What a plan said, beside what the run measured."""

import json

import pytest

from hf_tpu_ext.cli.main import main
from hf_tpu_ext.hardware.topologies import find_topology
from hf_tpu_ext.plan.hlo_cost import Cost
from hf_tpu_ext.plan.programs import CompiledProgram
from hf_tpu_ext.plan.result import Plan, Trial
from hf_tpu_ext.report.make import describe_ended_run, make_report


GB = 10**9
MEASURED = {"step_time": 0.25, "padded_tokens_per_second": 131072.0, "mfu": 0.4, "peak_memory_gb": 2.6}


@pytest.fixture
def write_plan():
    """Writes the plan of a run: at 1.5 GHz its step takes 0.2 s."""

    def write(path, topology="v5e-8", programs=None, parameters=(1000, 10), trials=()):
        program = CompiledProgram(
            "training step",
            (32, 1024),
            21.5,
            memory={"argument": 2 * GB, "output": GB, "alias": GB, "temp": GB // 2, "generated_code": 0},
            arguments={"weights": 2 * GB},
            cost=Cost(3 * 10**8, GB, [], []),
            model_flops=8 * 197e11,
        )
        chosen = [program] if programs is None else programs
        plan = Plan(
            "recipe.yaml",
            {"model": "qwen3, 606 M parameters"},
            find_topology(topology),
            chosen,
            {},
            parameters,
            optimizer_steps=40,
            token_share=0.5,
            trials=list(trials),
        )
        path.write_text(plan.to_json())
        return path

    return write


def rows(page):
    lines = page.with_suffix(".md").read_text().split("## Planned and measured")[1].split("\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if line.startswith("| ")]
    return {name: (planned, measured) for name, planned, measured in cells[1:]}


def test_the_plan_in_the_directory_of_the_run(write_run, write_plan, tmp_path):
    run = write_run(tmp_path / "run", logs=MEASURED)
    write_plan(run / "plan.json")
    page = make_report([run])
    shown = rows(page)
    assert shown["peak HBM per chip"] == ("2.50 GB", "2.60 GB")
    assert shown["optimizer step"] == ("200 ms", "250 ms")
    # Eight chips.
    assert shown["tokens/s/chip, with padding"] == ("20,480", "16,384")
    assert shown["MFU, with padding"] == ("50 %", "40 %")
    # Of the made batches, 1000 of 1408 tokens are no padding; the plan knows of half.
    assert shown["MFU, without padding"] == ("25 %", "28.4 %")
    assert shown["graphs"] == ("1", "1")
    assert "Planned: qwen3, 606 M parameters, for v5e-8 (8 of TPU v5e). Run: " in page.read_text()


def test_what_a_trainer_prints(write_run, write_plan, tmp_path):
    run = write_run(tmp_path / "run", logs=MEASURED)
    assert describe_ended_run(run) == f"Report: {run / 'report.html'}"
    write_plan(run / "plan.json")
    printed = describe_ended_run(run)
    assert "Planned and measured:\n  Planned: qwen3, 606 M parameters, for v5e-8 (8 of TPU v5e). Run: " in printed
    assert " on 8 of TPU v5e.\n  peak HBM per chip: 2.60 GB measured; planned 2.50 GB\n" in printed


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"topology": "v6e-4"}, "other chips"),
        ({"parameters": (596_000_000, 10)}, "another model"),
        # The same model with an adapter, and with all of it trained.
        ({"parameters": (1000, 1000)}, "another model"),
        ({"topology": "v5e-4", "parameters": (500, 10)}, "another model and other chips"),
    ],
)
def test_a_plan_of_something_else_is_not_compared(write_run, write_plan, tmp_path, facts, words):
    run = write_run(tmp_path / "run", logs=MEASURED)
    page = make_report([run], plan=write_plan(tmp_path / "other.json", **facts))
    text = page.with_suffix(".md").read_text().split("## Planned and measured")[1].split("\n## ")[0]
    assert f"They are not compared: the plan's memory and times are those of {words}. Plan what was run" in text
    assert "Run: tiny, 1,000 parameters, 10 trained, on 8 of TPU v5e." in text and "|" not in text


@pytest.mark.parametrize("parameters", [None, (1005, 10)])
def test_a_plan_without_numbers_or_before_a_few_more_tokens_is_compared(write_run, write_plan, tmp_path, parameters):
    run = write_run(tmp_path / "run", logs=MEASURED)
    write_plan(run / "plan.json", parameters=parameters)
    assert rows(make_report([run]))["graphs"] == ("1", "1")


def test_a_plan_that_the_compiler_refused(write_run, write_plan, tmp_path):
    run = write_run(tmp_path / "run")
    refused = CompiledProgram("training step", (32, 1024), 1.0, error="RESOURCE_EXHAUSTED")
    write_plan(run / "plan.json", programs=[refused])
    assert rows(make_report([run]))["peak HBM per chip"] == ("", "2.50 GB")


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"derived": {}, "programs": [], "topology": {}})])
def test_a_file_that_is_no_plan(write_run, tmp_path, capsys, text):
    run = write_run(tmp_path / "run")
    plan = run / "plan.json"
    plan.write_text(text)
    # A report does not depend on it; who asks for it is told.
    assert "Give a file that" in make_report([run]).with_suffix(".md").read_text()
    assert main(["report", str(run), "--plan", str(plan)]) == 2
    assert "hf-tpu plan --json" in capsys.readouterr().err


def test_plans_beside_each_other(write_plan, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused = CompiledProgram("training step", (32, 1024), 1.0, error="RESOURCE_EXHAUSTED")
    rows = "per_device_train_batch_size"
    trials = [
        Trial({rows: "2"}, True, 2 * GB, 1.0, 700.0),
        Trial({rows: "8"}, False, 20 * GB, 1.5, 900.0),
        Trial({"mesh": "fsdp", rows: "4"}, True, 3 * GB, 1.2, 800.0),
    ]
    first = write_plan(tmp_path / "a.json")
    second = write_plan(tmp_path / "b.json", "v6e-4", [refused], trials=trials)
    assert main(["report", first.name, second.name]) == 0
    assert capsys.readouterr().out.split() == ["plans.html", "plans.md"]
    text = (tmp_path / "plans.md").read_text()
    for row in (
        "|  | a.json | b.json |",
        "| on | v5e-8 | v6e-4 |",
        "| fits | yes | no |",
        "| peak HBM per chip | 2.50 GB |  |",
        "| optimizer step | 200 ms |  |",
        "| time of the run | 8 s |  |",
        "| fastest of the search |  | 800 tokens/s/chip, 3.00 GB: mesh: fsdp, per_device_train_batch_size: 4 |",
        "| weights | 2.00 GB |  |",
        "| model | qwen3, 606 M parameters | qwen3, 606 M parameters |",
    ):
        assert row in text, text


def test_a_plan_where_a_run_is_expected(write_run, write_plan, tmp_path, capsys):
    run, plan = write_run(tmp_path / "run"), write_plan(tmp_path / "a.json")
    for paths in ([plan], [run, plan]):
        assert main(["report", *map(str, paths)]) == 2
        assert f"hf-tpu report RUN_DIR --plan {plan}, or hf-tpu report FILE FILE" in capsys.readouterr().err


def test_bad_questions(write_run, tmp_path, capsys):
    first, second = (str(write_run(tmp_path / name)) for name in ("a", "b"))
    assert main(["report", first, second, "--plan", "plan.json"]) == 2
    assert "belongs to one run, but 2 runs are compared" in capsys.readouterr().err
    assert main(["report", first, "--plan", str(tmp_path / "none.json")]) == 2
    assert "none.json cannot be read (No such file" in capsys.readouterr().err
