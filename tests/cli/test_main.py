"""The `hf-tpu` command: help, exit status and what a person sees of an error."""

import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import hf_tpu_ext
from hf_tpu_ext.backends import detect, selection
from hf_tpu_ext.cli import main as cli
from hf_tpu_ext.cli.json_output import json_output
from hf_tpu_ext.cli.main import main


@pytest.fixture(autouse=True)
def no_traceback_variable(monkeypatch):
    monkeypatch.delenv("HF_TPU_EXT_TRACEBACK", raising=False)


@pytest.mark.parametrize("argv", [[], ["--help"], ["help"]])
def test_help_names_the_commands(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 0
    help_text = capsys.readouterr().out
    for command in ("sft", "dpo", "warmup", "prepare"):
        assert f"\n    {command} " in help_text


def test_help_imports_no_heavy_library():
    script = (
        "import sys\n"
        "from hf_tpu_ext.cli.main import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit:\n    print(sorted({'torch', 'transformers', 'datasets', 'accelerate'} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.stdout.splitlines()[-1] == "[]", result.stderr


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"hf_tpu_ext {hf_tpu_ext.__version__}\n"


OF_A_RUN = ["sft", "--use_cpu", "--model_name_or_path", "absent", "--dataset_name", "absent"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["sft", "--config", "absent.yaml"], "--config absent.yaml: there is no such file."),
        (["dpo", "--config", "absent.yaml"], "--config absent.yaml: there is no such file."),
        (["dpo", "absent.yaml", "--max_steps", "2"], "--config absent.yaml: there is no such file."),
        (["sft", "--backend", "gpu"], "Unknown backend='gpu'. Allowed: auto, tpu, xla, cuda, cpu."),
        (["sft", "--use_cpu"], "model_name_or_path is missing."),
        (["sft", "--use_cpu", "--model_name_or_path", "m"], "dataset_name is missing."),
        (
            ["grpo", "--use_cpu", "--model_name_or_path", "m", "--dataset_name", "d"],
            "reward_funcs, the functions that score completions, is missing",
        ),
        ([*OF_A_RUN, "--per_device_train_batch_size", "0"], "per_device_train_batch_size=0 is not positive."),
        ([*OF_A_RUN, "--report_to", "wandb"], "pip install wandb"),
        ([*OF_A_RUN, "--deepspeed", "zero3.json"], "pip install deepspeed"),
        (["reward", *OF_A_RUN[1:], "--use_peft"], "Set lora_task_type: SEQ_CLS"),
        ([*OF_A_RUN, "--max_length", "0"], "max_length=0 is not positive."),
        (["sft", "--smoke", "absent"], "hf-tpu prepare tiny --output_dir absent"),
    ],
)
def test_mistakes_are_told_in_one_message(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "PJRT_DEVICE=TPU is set but this machine has no TPU"),
        (["--backend", "xla"], "PJRT_DEVICE=TPU is set but this machine has no TPU"),
        (["--use_cpu"], "model_name_or_path is missing."),
    ],
)
def test_a_device_that_there_is_not(argv, message, capsys, monkeypatch):
    monkeypatch.setattr(selection, "_backends", {})
    monkeypatch.setattr(detect, "_pjrt_device_before_torch_xla", ["TPU"])
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    assert main(["sft", *argv]) == 2
    assert message in capsys.readouterr().err


def test_traceback_on_request(monkeypatch):
    monkeypatch.setenv("HF_TPU_EXT_TRACEBACK", "1")
    with pytest.raises(ValueError, match="there is no such file"):
        main(["sft", "--config", "absent.yaml"])


def in_our_code(statement):
    """A sub-command with a bug, in a module of this package."""
    names = {"__name__": "hf_tpu_ext.trainers.example"}
    exec(f"def run(argv):\n    {statement}", names)
    return names["run"]


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("return int('not a number')", ValueError),
        ("return list(zip([1], [1, 2], strict=True))", ValueError),
        ("a, b = [1, 2, 3]", ValueError),
        ("return max([])", ValueError),
        ("import json; json.loads('{')", ValueError),
        ("raise ValueError('not said to anybody')", ValueError),
        ("open('/absent/file')", FileNotFoundError),
        ("import os; os.rename('/absent/a', '/absent/b')", FileNotFoundError),
        ("import os; os.read(10**6, 1)", OSError),
        ("from pathlib import Path; Path('/').read_text()", IsADirectoryError),
        ("import not_there", ImportError),
        ("from json import not_there", ImportError),
    ],
)
def test_bugs_keep_their_traceback(monkeypatch, statement, error):
    monkeypatch.setitem(cli._TRAINING, "sft", in_our_code(statement))
    with pytest.raises(error):
        main(["sft", "--output_dir", "runs/absent"])


def test_a_bug_has_an_exit_status_of_its_own(monkeypatch, capsys):
    monkeypatch.setitem(cli._TRAINING, "sft", in_our_code("raise RuntimeError('a bug')"))
    monkeypatch.setattr(sys, "argv", ["hf-tpu", "sft"])
    assert cli.command() == 70
    # What the other hosts of a slice are told.
    assert isinstance(sys.last_value, RuntimeError)
    assert "RuntimeError: a bug" in capsys.readouterr().err


def test_a_package_that_upstream_asks_for_is_no_bug(monkeypatch, capsys):
    names = {"__name__": "transformers.example"}
    exec("def load():\n    raise ImportError('You need to install galore_torch')", names)
    monkeypatch.setitem(cli._TRAINING, "sft", lambda argv: names["load"]())
    assert main(["sft"]) == 2
    assert "You need to install galore_torch" in capsys.readouterr().err


def test_a_pipe_that_is_closed_in_code_of_upstream_is_no_mistake(monkeypatch):
    """A log of a run, for example. `command` asks whether it is the output."""
    names = {"__name__": "transformers.example"}
    exec("def log():\n    raise BrokenPipeError(32, 'Broken pipe')", names)
    monkeypatch.setitem(cli._TRAINING, "sft", lambda argv: names["log"]())
    with pytest.raises(BrokenPipeError):
        main(["sft"])


def test_who_reads_the_output_may_stop():
    process = subprocess.Popen(
        [sys.executable, "-m", "hf_tpu_ext.cli.main", "recipes"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 128 + signal.SIGPIPE


def test_json_has_the_screen_alone(capsys, tmp_path):
    for path in (Path("-"), tmp_path / "not/there/found.json", None):
        with json_output(path) as write_json:
            print("a page")
            write_json("[]")
            # What is known by now takes its place.
            write_json("{}")
    told = capsys.readouterr()
    assert (told.out, told.err) == ("{}\na page\na page\n", "a page\n")
    assert (tmp_path / "not/there/found.json").read_text() == "{}"


@pytest.mark.parametrize("option", ["--group-size", "--group_size"])
def test_options_have_hyphens_or_underscores(option, capsys):
    with pytest.raises(SystemExit):
        main(["export", "run", option, "many"])
    assert "argument --group_size: invalid int value: 'many'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("statement", "argv"),
    [
        ("from hf_tpu_ext import UserError; raise UserError('a message')", []),
        ("from hf_tpu_ext import SaveError; raise SaveError('a message')", []),
        ("open('/absent/file')", ["--train_file=/absent/file"]),
        ("open('/absent/file')", ["--config", "{recipe}"]),
        ("import os; raise OSError(28, os.strerror(28), '/somewhere')", []),
        ("from transformers import AutoConfig; AutoConfig.from_pretrained('/absent/model')", []),
        (
            "from transformers import TrainingArguments; TrainingArguments('x', load_best_model_at_end=True)",
            [],
        ),
        ("from datasets import load_dataset; load_dataset('json', data_files='/absent/file')", []),
    ],
)
def test_messages_for_people_have_no_traceback(monkeypatch, capsys, tmp_path, statement, argv):
    monkeypatch.setitem(cli._TRAINING, "sft", in_our_code(statement))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("train_file: '/absent/file'\n")
    assert main(["sft", *(word.format(recipe=recipe) for word in argv)]) == 2
    assert "hf-tpu: error: " in capsys.readouterr().err


def test_only_a_class_of_its_own_speaks_to_people():
    """A bare `ValueError` of this package is shown as a bug."""
    package = Path(hf_tpu_ext.__file__).parent
    bare = [path.name for path in package.rglob("*.py") if "raise ValueError(" in path.read_text(encoding="utf-8")]
    # Where a line of a record is damaged, which is counted.
    assert bare == ["record.py"]
    assert issubclass(hf_tpu_ext.UserError, ValueError) and issubclass(hf_tpu_ext.SaveError, OSError)


@pytest.mark.parametrize("command", ["sft", "dpo"])
def test_help_of_a_training_command(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["help", command] if command == "dpo" else [command, "--help"])
    assert stop.value.code == 0
    help_text = capsys.readouterr().out
    assert help_text.startswith(f"usage: hf-tpu {command}")
    # The keys that only this package has come first.
    assert help_text.index("examples:") < help_text.index("\n  --length_buckets") < help_text.index("\n  --max_steps")
    assert "--max-steps" not in help_text


def test_a_file_has_each_line_when_it_is_written():
    program = "import sys; from hf_tpu_ext.cli import main as cli; cli.main = lambda: sys.stdout.line_buffering; print(cli.command())"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "True\n", result.stderr


def test_lines_of_the_package_have_no_prefix(monkeypatch, capfd):
    """A library has configured logging, as torch_xla does with its first warning."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler()])
    logging.getLogger().handlers[0].setFormatter(logging.Formatter("WARNING:%(message)s"))
    monkeypatch.setattr(cli, "main", lambda: logging.getLogger("hf_tpu_ext.watch").warning("a line"))
    cli.command()
    assert capfd.readouterr().err.strip() == "a line"
    assert logging.getLogger("hf_tpu_ext").propagate


@pytest.mark.parametrize("library", ["torchao", "bitsandbytes.backends.cpu.ops"])
def test_libraries_that_are_not_used_do_not_warn(monkeypatch, library):
    monkeypatch.setattr(logging.getLogger(library), "level", logging.NOTSET)
    monkeypatch.setattr(cli, "main", lambda: logging.getLogger(library).isEnabledFor(logging.WARNING))
    assert cli.command() is False
