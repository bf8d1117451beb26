"""What `trl` and `hf-tpu` start from a recipe: upstream's launcher on GPUs and the CPU, with upstream's options."""

import argparse
import importlib
import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import forked
import pytest
import torch
from accelerate.commands import launch as accelerate_launch
from accelerate.utils import str_to_bool
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from trl.cli import accelerate_launcher
from trl.cli.commands.base import CommandContext
from trl.cli.commands.training import TrainingCommand

from hf_tpu_ext.backends import selection
from hf_tpu_ext.cli.launch import start_processes
from hf_tpu_ext.cli.recipe import read_recipe
from hf_tpu_ext.cli.trl_scripts import SCRIPTS


# How the script is started, and what is kept beside the options.
_OF_THE_SCRIPT = {"training_script", "training_script_args", "no_python", "nondefault"}
_ACTIONS = [
    action
    for action in accelerate_launch.launch_command_parser()._actions
    if action.option_strings and action.dest != "help"
]
_VALUES = {int: "2", bool: "true", float: "0.5", str_to_bool: "true"}


def _value(action: argparse.Action) -> str:
    if action.dest == "fp8_override_linear_precision":
        return "true,false,true"
    return str(action.choices[-1]) if action.choices else _VALUES.get(action.type, "some")


def _options(args: argparse.Namespace) -> dict:
    return {key: value for key, value in vars(args).items() if key not in _OF_THE_SCRIPT}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """As outside of any launcher, with what is set in it taken back."""
    for variable in ("WORLD_SIZE", "RANK", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(variable, raising=False)
    kept = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(kept)


@pytest.fixture
def launched(monkeypatch):
    """Calls of `accelerate launch`, none of which starts anything."""
    calls = []
    monkeypatch.setattr(accelerate_launch, "launch_command", calls.append)
    return calls


@pytest.fixture
def start(launched, tmp_path):
    """Starts the processes of `hf-tpu sft` for a recipe: returns the exit status, and what accelerate was called with."""

    def start(text, *argv):
        path = tmp_path / "recipe.yaml"
        path.write_text(f"use_cpu: true\n{text}\n")
        recipe = read_recipe(["--config", str(path), *argv])
        status = start_processes("sft", recipe, SCRIPTS["sft"].parser)
        return status, launched.pop() if launched else None

    return start


def test_status_where_all_processes_were_killed(monkeypatch, start, capfd):
    """No answer of a command has it."""

    def killed(args):
        raise ChildFailedError("a launcher", {1: ProcessFailure(1, 1, -signal.SIGKILL, "no file")})

    monkeypatch.setattr(accelerate_launch, "launch_command", killed)
    assert start("multi_gpu: true\nnum_processes: 2")[0] == os.EX_SOFTWARE
    assert "Process 1 was killed by SIGKILL." in capfd.readouterr().err


def test_processes_that_were_killed(monkeypatch, start, tmp_path, capfd):
    """The newest checkpoint is named, since who is killed says nothing; not where there is none, or the run has said what to do."""

    def killed(args):
        raise subprocess.CalledProcessError(status, "a launcher")

    monkeypatch.setattr(accelerate_launch, "launch_command", killed)
    for status, steps, says in ((-9, (), False), (-9, (2, 10), True), (os.EX_TEMPFAIL, (), False)):
        for step in steps:
            (tmp_path / "out" / f"checkpoint-{step}").mkdir(parents=True)
        assert start(f"multi_gpu: true\nnum_processes: 2\noutput_dir: {tmp_path / 'out'}")[0] == status
        said = capfd.readouterr().err
        assert (f"The newest checkpoint is {tmp_path / 'out' / 'checkpoint-10'}. To resume" in said) == says
        assert ("checkpoint" in said) == says


@pytest.fixture
def stock(monkeypatch, tmp_path):
    """What stock `trl sft` calls accelerate with."""

    def stock(text, *argv):
        path = tmp_path / "recipe.yaml"
        path.write_text(f"output_dir: {tmp_path}/out\nuse_cpu: true\n{text}\n")
        calls = []
        monkeypatch.setattr(
            accelerate_launcher,
            "launch_training_script",
            lambda script_name, launch_args, training_script_args: calls.append(
                accelerate_launch.launch_command_parser().parse_args([*launch_args, script_name])
            ),
        )
        TrainingCommand("sft").run(None, CommandContext(argv=["sft", "--config", str(path), *argv]))
        return calls[0]

    return stock


@pytest.fixture
def made_once(monkeypatch):
    """Parsers are, for tests that read hundreds of commands."""
    script = type(SCRIPTS["sft"])
    monkeypatch.setattr(script, "parser", cache(script.parser))
    monkeypatch.setattr(accelerate_launch, "launch_command_parser", cache(accelerate_launch.launch_command_parser))


def _spellings(action: argparse.Action) -> list[list[str]]:
    if action.nargs == 0:
        return [[option] for option in action.option_strings]
    value = _value(action)
    with_equals = [[f"{option}={value}"] for option in action.option_strings if option.startswith("--")]
    return [[option, value] for option in action.option_strings] + with_equals


def test_options_on_the_command_line_reach_accelerate_as_with_trl(made_once, start, stock):
    """Each of them, in each of its spellings."""
    # Stock gives these to the training script. `tpu` is refused: there is none.
    of_the_script = {"debug", "gradient_accumulation_steps"}
    assert {action.dest for action in _ACTIONS} & {*SCRIPTS["sft"].parser()._fields} == of_the_script
    for action in _ACTIONS:
        if action.dest in of_the_script | {"tpu"}:
            continue
        # There is no GPU to count processes by.
        recipe = "num_processes: 2" if action.dest == "multi_gpu" else "max_steps: 1"
        first, *others = _spellings(action)
        expected = _options(stock(recipe, *first))
        for words in (first, *others):
            status, args = start(recipe, *words)
            assert status == 0
            assert _options(args) == expected, words


def test_options_in_the_file_reach_accelerate_as_with_trl(made_once, start, stock):
    checked = 0
    for action in _ACTIONS:
        key = action.option_strings[0].lstrip("-")
        if action.nargs == 0 or len(key) == 1 or key == "env":
            # `env` in a file has environment variables.
            continue
        text = f"{key}: {_value(action)}"
        (_, ours), theirs = start(text), stock(text)
        if ours is not None:
            assert _options(ours) == _options(theirs), text
            checked += 1
    assert checked > 80


@pytest.mark.parametrize(
    ("text", "argv", "options"),
    [
        ("multi_gpu: true\nnum_processes: 2", [], {"multi_gpu": True, "num_processes": 2}),
        ("multi_gpu: false\nnum_processes: 2", [], {"multi_gpu": False, "num_processes": 2}),
        ("mixed_precision: no", [], {"mixed_precision": "no"}),
        ("num_processes: 2", ["--num_processes", "3"], {"num_processes": 3}),
        ("num_processes: 2", ["--num-processes=3"], {"num_processes": 3}),
    ],
)
def test_options_that_trl_reads_less_well(start, text, argv, options):
    _, args = start(text, *argv)
    assert options.items() <= vars(args).items()


@pytest.mark.parametrize("name", ["zero3", "fsdp2", "multi_gpu"])
@pytest.mark.parametrize("in_file", [True, False])
def test_configs_of_accelerate_that_trl_ships(start, stock, name, in_file):
    text, argv = (f"accelerate_config: {name}", []) if in_file else ("max_steps: 1", ["--accelerate_config", name])
    (_, ours), theirs = start(text, *argv), stock(text, *argv)
    assert _options(ours) == _options(theirs)
    assert Path(ours.config_file).name == f"{name}.yaml"


def test_a_command_of_two_words(launched, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("use_cpu: true\nnum_processes: 2\n")
    start_processes("warmup dpo", read_recipe(["--config", str(path)]), SCRIPTS["dpo"].parser, resumes=False)
    (args,) = launched
    assert args.training_script_args[2:5] == ["hf_tpu_ext.cli.main", "warmup", "dpo"]


def test_a_command_that_is_not_resumed_names_no_checkpoint(monkeypatch, tmp_path, capfd):
    def killed(args):
        raise subprocess.CalledProcessError(-9, "a launcher")

    monkeypatch.setattr(accelerate_launch, "launch_command", killed)
    (tmp_path / "out" / "checkpoint-2").mkdir(parents=True)
    path = tmp_path / "recipe.yaml"
    path.write_text(f"use_cpu: true\nmulti_gpu: true\nnum_processes: 2\noutput_dir: {tmp_path / 'out'}\n")
    assert (
        start_processes("cache-teacher", read_recipe(["--config", str(path)]), SCRIPTS["sft"].parser, resumes=False)
        == -9
    )
    assert "checkpoint" not in capfd.readouterr().err


def test_processes_run_the_same_command(start, tmp_path):
    _, args = start("num_processes: 2", "--max_steps", "3", "--kd_teacher", "base")
    assert args.no_python
    command = [args.training_script, *args.training_script_args]
    recipe = ["--config", str(tmp_path / "recipe.yaml"), "--max_steps", "3", "--kd_teacher", "base"]
    assert command == [sys.executable, "-P", "-m", "hf_tpu_ext.cli.main", "sft", *recipe]


def test_one_process_is_this_one(start):
    assert start("max_steps: 1") == (None, None)


def test_one_process_has_one_gpu(monkeypatch):
    """Upstream's trainer would spread a batch over all that it sees."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(selection, "_backends", {})
    for before, after in ((None, "0"), ("2,3", "2")):
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
        recipe = read_recipe(["--backend", "cuda", "--num_processes", "1"])
        assert start_processes("sft", recipe, SCRIPTS["sft"].parser) is None
        assert os.environ["CUDA_VISIBLE_DEVICES"] == after


def test_every_gpu_has_a_process(start, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    status, args = start("max_steps: 1")
    assert status == 0
    assert args.num_processes is None


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_processes_of_a_launcher_start_no_others(start, variable, monkeypatch):
    monkeypatch.setenv(variable, "2")
    assert start("num_processes: 2") == (None, None)


@pytest.mark.parametrize(
    ("text", "argv", "message"),
    [
        ("multi_gpu: some", [], "multi_gpu is 'some', expected true or false."),
        ("num_processes: [1, 2]", [], "num_processes is [1, 2], expected one value: num_processes: VALUE"),
        ("max_steps: 1", ["--num_processes"], "command line: num_processes has no value, expected one value"),
        ("num_processes: many", [], "options of `accelerate launch`: argument --num_processes"),
        ("tpu: true", [], "--tpu: this run is not on a TPU. Leave it out"),
        ("accelerate_config: zero9", [], "zero9 is neither a file nor a valid config"),
        ("num_proceses: 2", [], "unknown key 'num_proceses' in"),
    ],
)
def test_mistakes(start, text, argv, message):
    with pytest.raises(ValueError) as error:
        start(text, *argv)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("argv", "variables"),
    [
        (["--mixed_precision", "no"], {"ACCELERATE_MIXED_PRECISION": "no"}),
        (["--cpu"], {"ACCELERATE_USE_CPU": "True"}),
        (["--num_processes", "1"], {"ACCELERATE_USE_CPU": "False"}),
    ],
)
def test_this_process_gets_the_environment_of_the_one_that_accelerate_would_start(argv, variables):
    recipe = read_recipe(["--use_cpu", *argv])
    threads = os.environ.get("OMP_NUM_THREADS")
    assert start_processes("sft", recipe, SCRIPTS["sft"].parser) is None
    assert variables.items() <= os.environ.items()
    assert os.environ.get("OMP_NUM_THREADS") == threads
    assert recipe.launcher_applies


def test_threads_that_are_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    recipe = read_recipe(["--use_cpu", "--num_cpu_threads_per_process", "3"])
    assert start_processes("sft", recipe, SCRIPTS["sft"].parser) is None
    assert asked == [3]


@pytest.mark.parametrize("command", SCRIPTS)
def test_what_is_the_scripts_own_with_trl_is_so_here(command):
    theirs = importlib.import_module(f"trl.scripts.{command}").make_parser()
    ours = SCRIPTS[command].parser()
    assert {action.dest for action in theirs._actions} <= {action.dest for action in ours._actions}
    # And none of our own settings is an option of accelerate.
    own = {action.dest for action in ours._actions} - {action.dest for action in theirs._actions}
    assert own and not own & {action.dest for action in _ACTIONS}


@pytest.mark.parametrize(
    ("when_told", "status"),
    [
        ("sys.exit(75)", 75),
        # The checkpoint could not be saved.
        pytest.param("sys.exit(2)", 2, marks=pytest.mark.slow),
        # It had not begun to train, so nothing is saved.
        (None, 128 + signal.SIGTERM),
        pytest.param("(time.sleep(33), sys.exit(75))", 75, marks=pytest.mark.slow),
    ],
)
def test_a_command_that_is_told_to_stop_has_the_status_of_its_processes(when_told, status, tmp_path):
    """Status 75 says that the run is saved. PyTorch kills processes that take longer than half a minute."""
    handler = "signal.SIG_DFL" if when_told is None else f"lambda *_: {when_told}"
    (tmp_path / "process.py").write_text(
        "import os, pathlib, signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, {handler})\n"
        f"pathlib.Path({str(tmp_path)!r}, 'ready-' + os.environ['RANK']).touch()\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, str(tmp_path / "process.py")]
    start = (
        "import sys; from torch.distributed.run import parse_args, run; from hf_tpu_ext.cli.launch import _status_of; "
        f"words = ['--standalone', '--nproc_per_node=2', '--no_python', *{command!r}]; "
        "sys.exit(_status_of(lambda: run(parse_args(words))))"
    )
    with forked.Popen([sys.executable, "-c", start], stderr=subprocess.DEVNULL) as process:
        while len(list(tmp_path.glob("ready-*"))) < 2:
            assert process.poll() is None
            time.sleep(0.1)
        process.terminate()
        assert process.wait(timeout=60) == status


def test_a_process_whose_launcher_is_killed_is_told_to_stop(tmp_path):
    process = (
        "import pathlib, signal, sys, time; from hf_tpu_ext.cli.launch import stop_with_launcher; "
        f"signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path({str(tmp_path)!r}, 'told').touch(), sys.exit(75))); "
        f"stop_with_launcher(); pathlib.Path({str(tmp_path)!r}, 'ready').touch(); time.sleep(60)"
    )
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {process!r}])"
    with subprocess.Popen([sys.executable, "-c", launcher]) as command:
        while not (tmp_path / "ready").exists():
            assert command.poll() is None
            time.sleep(0.05)
        command.kill()
    deadline = time.monotonic() + 30
    while not (tmp_path / "told").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
