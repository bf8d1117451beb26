"""`hf-tpu plan`: what fits, what does not, and what could not be told."""

import json
import os
import re
import signal
import subprocess
import sys

import forked
import pytest
from datasets import Dataset
from transformers import AutoConfig

from hf_tpu_ext import TPUSFTConfig
from hf_tpu_ext.cli import plan as plan_command
from hf_tpu_ext.cli.plan import _with_synthetic_rows
from hf_tpu_ext.cli.recipe import Recipe
from hf_tpu_ext.examples.tiny import make_arithmetic, make_model, make_tokenizer
from hf_tpu_ext.installing import install_command
from hf_tpu_ext.trainers.checks.datasets import check_dataset


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """
    Directory with data and models without weights: a tiny one, one that is too large for a chip, one whose
    configuration does not name its class, and one without a tokenizer.
    """
    directory = tmp_path_factory.mktemp("planned")
    make_arithmetic(directory / "data")
    make_model(directory / "model")
    (directory / "model" / "model.safetensors").unlink()
    make_tokenizer(directory / "large")
    sizes = {
        "hidden_size": 8192,
        "intermediate_size": 8192,
        "num_hidden_layers": 1,
        "vocab_size": 2**19,
        "head_dim": 128,
    }
    config = AutoConfig.for_model("qwen3", **sizes, architectures=["Qwen3ForCausalLM"], tie_word_embeddings=False)
    config.save_pretrained(directory / "large")
    make_tokenizer(directory / "nameless")
    AutoConfig.for_model("qwen3").save_pretrained(directory / "nameless")
    AutoConfig.for_model("llama", architectures=["LlamaForCausalLM"]).save_pretrained(directory / "tokenless")
    return directory


@pytest.fixture
def plan(prepared, tmp_path):
    """Gives the exit status of a plan, what it prints, and its JSON if it wrote one."""

    def run(*argv, model="model", **env):
        output = tmp_path / "plan.json"
        output.unlink(missing_ok=True)
        done = forked.run(
            [sys.executable, "-m", "hf_tpu_ext.cli.main", "plan", "--model_name_or_path", prepared / model]
            + ["--output_dir", tmp_path / "run", "--max_length", "64", "--json", output, *argv],
            env=os.environ | env,
            capture_output=True,
            text=True,
        )
        assert not (tmp_path / "run").exists()
        planned = json.loads(output.read_text()) if output.exists() else None
        return done.returncode, done.stderr + done.stdout, planned

    return run


@pytest.mark.ci
def test_fits(plan, prepared):
    status, page, planned = plan(
        "--dataset_name", prepared / "data", "--topology", "v5e-8", "--gradient_accumulation_steps", "2", "--jobs", "2"
    )
    assert status == 0, page
    assert "FITS" in page and planned["title"] == str(prepared / "model")
    micro, closing = planned["programs"]
    assert (micro["kind"], closing["kind"]) == ("micro-step", "training step")
    assert micro["batch_shape"] == closing["batch_shape"] == [64, 64]
    # Whatever a step updates takes the place of what it was.
    assert closing["memory"]["alias"] > 0.99 * closing["memory"]["output"]
    parameters = 107264
    assert closing["arguments"]["weights"] == 4 * parameters
    assert closing["arguments"]["optimizer state"] == 8 * parameters
    # Gradients are added up over the chips once.
    assert [exchange["kind"] for exchange in closing["cost"]["exchanges"]] == ["all-reduce"]
    assert micro["cost"]["exchanges"] == [] or sum(item["num_bytes"] for item in micro["cost"]["exchanges"]) < 1000
    # What may be changed, besides what a search tries: how the rows are padded. A chip has room for float32.
    assert "1,792 rows, 107,449 tokens: 6% of the tokens computed are padding" in planned["facts"]["data"]
    assert not any(line.startswith("dtype: bfloat16") for line in planned["advice"])
    # 1,792 rows, 8 rows a chip, 8 chips, 2 accumulated, 3 epochs.
    assert planned["optimizer_steps"] == 14 * 3
    assert planned["derived"]["run_dollars"][0] > 0


# PyTorch's autograd counts the devices of a process with 8 bits.
@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp", "data=64,fsdp=4"])
def test_a_slice_of_more_chips_than_autograd_counts(plan, mesh):
    status, page, planned = plan("--seq_lengths", "64", "--topology", "v5e-256", "--mesh", mesh)
    assert status == 0, page
    assert "64 hosts of 4 chips" in page
    (program,) = planned["programs"]
    assert program["batch_shape"] == [8 * 256, 64]
    # Every dimension of the matrices divides by 4, and none by 256: those stay whole.
    parameters, split = 107264, 4 if mesh != "fsdp" else 1
    assert abs(program["arguments"]["weights"] - 4 * parameters / split) < 4096
    assert abs(program["arguments"]["optimizer state"] - 8 * parameters / split) < 8192
    exchanged = {item["kind"] for item in program["cost"]["exchanges"]}
    assert ("all-gather" in exchanged) == (split > 1) and "all-reduce" in exchanged


@pytest.mark.slow
def test_programs_that_generate(prepared, tmp_path):
    output = tmp_path / "plan.json"
    settings = {
        "model_name_or_path": prepared / "model",
        "output_dir": tmp_path / "run",
        "beta": "0.1",
        "max_steps": "10",
    }
    settings |= {"reward_funcs": "recipes.rewards.same_number", "num_generations": "4", "max_completion_length": "24"}
    done = forked.run(
        [sys.executable, "-m", "hf_tpu_ext.cli.main", "plan", "grpo", "--topology", "v5e-8", "--json", output]
        + ["--seq_lengths", "16", "32", "--length_buckets", "16", "32"]
        + [word for name, value in settings.items() for word in (f"--{name}", value)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    planned = json.loads(output.read_text())
    # 8 rows of a chip in a generation, by steps of as many.
    assert {(program["kind"], *program["batch_shape"]) for program in planned["programs"]} == {
        # A prompt is read once for its 4 completions.
        *(("prefill", 16, length) for length in (16, 32)),
        ("decode", 64, 24),
        *((kind, 64, length + 24) for kind in ("reference pass", "training step") for length in (16, 32)),
    }
    decode = next(program for program in planned["programs"] if program["kind"] == "decode")
    # Keys and values of 2 layers with 2 heads of 16, in bfloat16, of the 8 rows of a chip.
    assert 2 * 2 * 2 * 16 * 2 * 8 * (32 + 24) <= decode["arguments"]["key-value cache"] < 2**18
    # Chips tell one another whether all rows have ended, and nothing else.
    assert sum(item["num_bytes"] for item in decode["cost"]["exchanges"]) < 24 * 256
    assert planned["derived"]["tokens_generated"] == 64 * 24
    assert "generation" in done.stdout


@pytest.mark.slow
def test_search(plan):
    status, page, planned = plan(
        *("--seq_lengths", "64", "--topology", "v5e-1", "--search", "rematerialization", "--ema_decay", "0.99")
    )
    assert status == 0, page
    # Two moments and an average.
    assert planned["programs"][-1]["arguments"]["optimizer state"] == 12 * 107264
    assert "Pareto front of the variants tried" in page
    for policy in ("none", "dots", "full"):
        assert f"rematerialization: {policy}, per_device_train_batch_size: 8: fits, " in page
    assert {trial["settings"]["per_device_train_batch_size"] for trial in planned["trials"]} == {"8"}
    assert all(trial["fits"] for trial in planned["trials"])


@pytest.mark.slow
def test_search_of_several_at_once_finds_the_same(plan):
    words = ("--seq_lengths", "64", "--topology", "v5e-1", "--search", "rematerialization")
    found = []
    for jobs in ("1", "3"):
        status, page, planned = plan(*words, "--jobs", jobs)
        assert status == 0, page
        found.append((planned["trials"], planned["advice"]))
    assert len(found[0][0]) > 0
    assert found[0] == found[1]


@pytest.mark.parametrize("setting", ["completion_only_loss", "assistant_only_loss"])
def test_synthetic_rows_of_a_loss_on_answers(tmp_path, setting):
    """They are tokens, with a mask of the answers."""
    recipe = _with_synthetic_rows(Recipe(file={setting: "true"}), "sft", tmp_path, [4])
    rows = Dataset.from_json(str(tmp_path / "train.jsonl"), cache_dir=str(tmp_path / "cache"))
    assert len(rows.column_names) == 2
    args = TPUSFTConfig(str(tmp_path), use_cpu=True, **{setting: recipe.says_yes(setting)})
    check_dataset(rows, "train_dataset", args, has_formatting_func=False)


def test_synthetic_rows_take_the_place_of_a_mixture(tmp_path):
    mixture = {"datasets": [{"path": "json", "data_files": "chats.jsonl"}], "test_split_size": 0.1}
    recipe = _with_synthetic_rows(Recipe(file=mixture), "sft", tmp_path, [4])
    assert recipe.get("dataset_name") == str(tmp_path) and not mixture.keys() & recipe.file.keys()


@pytest.mark.slow
def test_does_not_fit(plan):
    status, page, planned = plan("--seq_lengths", "64", "--topology", "v5e-1", model="large")
    assert status == 1, page
    # That the weights alone are too many is known before.
    assert 0 <= page.index("Before anything is computed, weights") < page.index("compiling for v5e-1")
    assert "DOES NOT FIT" in page
    assert (
        planned["advice"][0] == "Try in this order:"
        and "use_peft: true (LoRA), which trains adapters alone" in planned["advice"]
    )
    assert "RESOURCE_EXHAUSTED" in planned["programs"][-1]["error"]
    assert planned["derived"]["fits"] is False


BAD_INPUT = {
    "few_bits": (["--load_in_4bit", "true"], ["weights that load_in_4bit quantizes", "Add use_peft: true"]),
    "topology": (["--topology", "v5e-17", "--seq_lengths", "64"], ["v5e-16", "v5e-8", "v5e-1"]),
    "no_tokens": (["--seq_lengths", "0"], ["--seq_lengths 0", "at least one token"]),
    "no_shapes": ([], ["names no data", "--seq_lengths"]),
    "chips": (["--seq_lengths", "64", "--num_chips", "4"], ["num_chips=4", "8"]),
    "json": (
        ["--seq_lengths", "64", "--json", "/dev/null/plan.json"],
        ["--json /dev/null/plan.json cannot be written (/dev/null: Not a directory)"],
    ),
    "json_directory": (["--seq_lengths", "64", "--json", "{prepared}"], ["cannot be written (Is a directory)"]),
    "hlo": (["--seq_lengths", "64", "--hlo", "/dev/null/graphs"], ["--hlo /dev/null/graphs cannot be written"]),
    "optimizer": (["--seq_lengths", "64", "--optim", "sgd"], ["not replayed"]),
    "jobs": (["--seq_lengths", "64", "--jobs", "0"], ["--jobs 0", "--jobs 2"]),
    "prices": (["--seq_lengths", "64", "--prices", "/nowhere/prices.json"], ["/nowhere/prices.json cannot be read"]),
    "cut": (["--seq_lengths", "64", "2048"], ["max_length=64. To plan for longer ones: --max_length 2048"]),
    "search": (["--seq_lengths", "64", "--search", "batch"], ["'batch'", "'rematerialization', 'mesh'"]),
    "data": (["--dataset_name", "/nowhere/rows.jsonl"], ["/nowhere", "--seq_lengths", "no such file or directory"]),
    "no_data": (["--dataset_name", "no-such/rows"], ["no-such/rows", "--seq_lengths"]),
    "typo": (
        ["--seq_lengths", "64", "--model_name_or_path", "{prepared}/modle"],
        ["no such file or directory", "model'?\n(HF_TPU_EXT_TRACEBACK=1"],
    ),
    "architectures": (
        ["--seq_lengths", "64", "--model_name_or_path", "{prepared}/nameless"],
        ['"architectures": ["', "config.json"],
    ),
    "tokenizer": (
        ["--seq_lengths", "64", "--model_name_or_path", "{prepared}/tokenless"],
        ["tokenless", "hf-tpu prepare tiny --output_dir tiny; cp tiny/model/tok* tiny/model/chat* DIRECTORY"],
    ),
}
# A plan changes what its process trains on, so that this is another one; and one for all, since it takes seconds to start.
PLAN_ALL = """
import contextlib, io, json, sys
from hf_tpu_ext.cli.main import main

told = []
for argv in json.load(sys.stdin):
    # The last case is without the compiler.
    if argv[-1].startswith(sys.argv[1]):
        sys.path.insert(0, sys.argv[1])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            status = main(["plan", *argv])
        except SystemExit as stop:
            status = stop.code
    told.append((status, printed.getvalue()))
json.dump(told, sys.__stdout__)
"""


@pytest.fixture(scope="module")
def refused(prepared, tmp_path_factory):
    """Exit status and output of each case, and the directory where a plan or a run would be."""
    directory = tmp_path_factory.mktemp("refused")
    common = ["--model_name_or_path", str(prepared / "model"), "--max_length", "64"]
    common += ["--output_dir", str(directory / "run"), "--json", str(directory / "not/there/plan.json")]
    common += ["--hlo", str(directory / "graphs")]
    # As if another jax were installed.
    other = tmp_path_factory.mktemp("other")
    (other / "jax-0.4.1.dist-info").mkdir()
    (other / "jax-0.4.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: jax\nVersion: 0.4.1\n")
    cases = {name: [word.format(prepared=prepared) for word in argv] for name, (argv, _) in BAD_INPUT.items()}
    cases["help"] = ["--help"]
    cases["without the compiler"] = ["--seq_lengths", "64", "--json", str(other / "plan.json")]
    done = forked.run(
        [sys.executable, "-c", PLAN_ALL, str(other)],
        input=json.dumps([[*common, *argv] for argv in cases.values()]),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(cases, json.loads(done.stdout), strict=True)), directory, other / "plan.json"


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input(refused, case):
    told, directory, _ = refused
    status, printed = told[case]
    assert status == 2
    assert not list(directory.iterdir())
    assert "Traceback" not in printed
    for words in BAD_INPUT[case][1]:
        assert words in printed


def test_help_needs_no_recipe(refused):
    status, printed = refused[0]["help"]
    assert status == 0
    assert "usage: hf-tpu plan" in printed and "--topology" in printed and "\n  --length_buckets" in printed


def test_help_needs_no_torch_xla(monkeypatch, capsys):
    for name in plan_command._OF_THE_MACHINE:
        # A plan removes them, and here they are to come back.
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr("hf_tpu_ext.backends.selection.has_torch_xla", lambda: False)
    with pytest.raises(SystemExit) as ended:
        plan_command.run(["--help"])
    assert ended.value.code == 0 and "--topology" in capsys.readouterr().out


def test_without_the_compiler(refused):
    told, _, planned = refused
    status, page = told["without the compiler"]
    assert status == 3
    assert "UNKNOWN whether it fits" in page
    assert "jax is 0.4.1, not 0.7.1" in page
    assert install_command("tpu") in " ".join(page.split())
    assert json.loads(planned.read_text())["programs"] == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_search_that_is_stopped_leaves_what_is_known(prepared, tmp_path, number):
    command = [sys.executable, "-m", "hf_tpu_ext.cli.main", "plan", "--model_name_or_path", prepared / "model"]
    command += ["--output_dir", tmp_path / "run", "--seq_lengths", "64", "--topology", "v5e-1", "--jobs", "1"]
    command += ["--search", "rematerialization", "--json", "-"]
    with (
        open(tmp_path / "json", "w") as stdout,
        forked.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True) as search,
    ):
        printed = ""
        # The page and the first variant are there before the second is compiled.
        while not re.search(r"^variant 1 \(1 of 3 combinations done\): .*: fits", printed, re.MULTILINE):
            line = search.stderr.readline()
            assert line, printed
            printed += line
        assert "FITS: peak HBM" in printed
        search.send_signal(number)
        printed += search.stderr.read()
        assert search.wait() == 128 + number
    stopped_by = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    assert f"The search was stopped by {stopped_by}." in printed and "Traceback" not in printed
    assert "Pareto front of the variants tried" in printed
    planned = json.loads((tmp_path / "json").read_text())
    assert [trial["settings"]["rematerialization"] for trial in planned["trials"]] == ["full"]


def test_a_plan_that_is_stopped_says_what_it_did(prepared, tmp_path):
    command = [sys.executable, "-m", "hf_tpu_ext.cli.main", "plan", "--model_name_or_path", prepared / "model"]
    command += ["--output_dir", tmp_path / "run", "--seq_lengths", "64", "--json", tmp_path / "plan.json"]
    with forked.Popen(command, stderr=subprocess.PIPE, text=True) as plan:
        printed = ""
        while "compiling for" not in printed:
            letter = plan.stderr.read(1)
            assert letter, printed
            printed += letter
        plan.terminate()
        printed += plan.stderr.read()
        assert plan.wait() == 128 + signal.SIGTERM
    last = "The plan was stopped by SIGTERM while its graphs were compiled for v5e-8. No plan was written.\n"
    assert printed.endswith(last) and "Traceback" not in printed
    assert not list(tmp_path.iterdir())
