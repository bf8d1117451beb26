"""The `hf-tpu` command."""

import argparse
import errno
import io
import logging
import os
import re
import select
import signal
import sys
import traceback
import warnings
from contextlib import suppress
from pathlib import Path

from tqdm.contrib.logging import logging_redirect_tqdm

from .. import __version__
from ..errors import SaveError, UserError
from ..temporarily import temporarily
from . import cache_teacher, doctor, export, init, plan, prepare, report, warmup
from .launch import LAUNCHER_TELLS, stop_with_launcher, tell_mistake
from .recipe import with_underscores
from .trl_scripts import SCRIPTS


DESCRIPTION = """\
Run Hugging Face recipes on the TPU, GPU or CPU of this machine.

first steps:
  hf-tpu init sft                                            write recipes/sft_lora_qwen3.yaml
  hf-tpu sft recipes/sft_lora_qwen3.yaml --smoke             try it on a tiny model and synthetic data
  hf-tpu sft recipes/sft_lora_qwen3.yaml                     run it
"""

#: Sub-commands that read a recipe; their arguments are its keys.
_TRAINING = {
    **{name: command.run for name, command in SCRIPTS.items()},
    "cache-teacher": cache_teacher.run,
    "warmup": warmup.run,
    "plan": plan.run,
}
#: Libraries whose `ValueError`s are messages to the person who wrote the recipe.
_SPEAK_TO_USERS = {"trl", "transformers", "datasets", "peft", "accelerate", "huggingface_hub"}
# A disk that is full, over its quota or read-only.
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


def main(argv: list[str] | None = None) -> int:
    """
    Run a sub-command.

    A mistake in what was asked for is told in one message, without a traceback unless `HF_TPU_EXT_TRACEBACK=1` is set.
    Any other error keeps its traceback.

    Args:
        argv (`list[str]`, *optional*): Arguments after `hf-tpu`. By default those of the process.

    Returns:
        `int`: Exit status: `0`, or `2` for a mistake in what was asked for. `1` says of a plan that the
        recipe does not fit (`3`: that it is unknown whether it does), of an export that it differs much, of the doctor that
        something failed.

    Raises:
        [`~hf_tpu_ext.TrainingPreempted`]: A run was told to stop, and is saved: exit status `75`.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    try:
        if argv[:1] and argv[0] in _TRAINING:
            if LAUNCHER_TELLS in os.environ:
                stop_with_launcher()
            return _TRAINING[argv[0]](argv[1:])
        args = _parser().parse_args([with_underscores(word) for word in argv or ["--help"]])
        return args.func(args)
    except (OSError, ValueError, ImportError) as error:
        if os.environ.get("HF_TPU_EXT_TRACEBACK") == "1" or not _is_for_users(error, argv):
            raise
        _note_error(error)
        if LAUNCHER_TELLS in os.environ and "TORCHELASTIC_ERROR_FILE" in os.environ:
            # Other processes find the same mistake. The one that has started them tells it once.
            from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

            ErrorHandler().record_exception(error)
        else:
            tell_mistake(str(error))
        return 2


def command() -> int:
    """The `hf-tpu` of the shell: [`main`], where an unexpected error has an exit status that no answer has, `70` (`EX_SOFTWARE`)."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A file or a pipe has each line when it is written, also those of a run that is killed.
        sys.stdout.reconfigure(line_buffering=True)
        if sys.stdout.encoding != "utf-8":
            # A screen that does not have a character shows a question mark.
            sys.stdout.reconfigure(errors="replace")
    # TRL, and upstream's own defaults, use the names that transformers has deprecated. No recipe can change that.
    warnings.filterwarnings(
        "ignore", ".*gradient_checkpointing.*is deprecated and will be removed in v6", FutureWarning
    )
    # They warn of kernels that they could have, when peft imports them: in every run, whether it has to do with them or not.
    for library in ("torchao", "bitsandbytes.backends.cpu.ops"):
        logging.getLogger(library).setLevel(logging.ERROR)
    if sys.argv[1:2] in (["prepare"], ["export"]):
        # They compute on the host. torch_xla warns, when it is imported, that it chooses by itself.
        os.environ.setdefault("PJRT_DEVICE", "CPU")
    logger = logging.getLogger("hf_tpu_ext")
    try:
        # Lines stand above a progress bar, and without the prefix that they have once a library configures logging.
        with temporarily(logger, handlers=[logging.StreamHandler()], propagate=False), logging_redirect_tqdm([logger]):
            return main()
    except Exception as error:
        _note_error(error)
        unread = list(filter(_is_unread, (1, 2))) if isinstance(error, BrokenPipeError) else []
        if not unread:
            traceback.print_exc()
            return os.EX_SOFTWARE
        # Who reads the output has enough of it, as `head`. Python would write what is left when it ends.
        for number in unread:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        return 128 + signal.SIGPIPE


def _note_error(error: Exception) -> None:
    """Note what ends this process, as the interpreter does of an error that nobody handles: it is told to the other hosts of a slice."""
    sys.last_value = error


def _is_unread(number: int) -> bool:
    """Whether nobody reads from a pipe that this process writes to, by its file descriptor."""
    poll = select.poll()
    poll.register(number, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-tpu",
        description=DESCRIPTION,
        epilog="`hf-tpu COMMAND --help` lists the options of a command, and the keys of its recipes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hf_tpu_ext {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for command, script in SCRIPTS.items():
        purpose = script.purpose[0].lower() + script.purpose[1:]
        commands.add_parser(command, help=purpose)
    commands.add_parser("cache-teacher", help="precompute a teacher's top-k log-probs")
    commands.add_parser("warmup", help="fill the compilation cache before a run")
    commands.add_parser("plan", help="compile a recipe ahead of time, without a TPU: HBM, FLOPs, cost")
    init.add_parsers(commands)
    prepare.add_parser(commands)
    report.add_parser(commands)
    export.add_parser(commands)
    doctor.add_parser(commands)
    return parser


def _is_for_users(error: Exception, argv: list[str]) -> bool:
    """Whether an error is a message to a person, and no bug: by its class, or by whose code raised it."""
    if isinstance(error, UserError | SaveError):
        return True
    if isinstance(error, ImportError) and error.name is not None:
        # It is Python's own, and no message about a package to install.
        return False
    raised_in = [frame.f_globals["__name__"].partition(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not isinstance(error, OSError):
        return raised_in[-1] in _SPEAK_TO_USERS
    if isinstance(error, BrokenPipeError):
        return False
    # They come from the standard library, so what counts is who called it.
    caller = next(name for name in reversed(raised_in) if name in _SPEAK_TO_USERS or name == "hf_tpu_ext")
    return caller in _SPEAK_TO_USERS or error.errno in _NO_ROOM or str(error.filename) in _words(argv)


def _words(argv: list[str]) -> set[str]:
    """The words of a command line and of the files that it names."""
    texts = [word for argument in argv for word in (argument, *argument.split("=", 1))]
    for path in [Path(word) for word in texts if word.endswith((".yaml", ".yml"))]:
        with suppress(OSError):
            texts += re.split(r"[\s:,'\"\[\]{}]+", path.read_text(encoding="utf-8", errors="replace"))
    return {*texts}


if __name__ == "__main__":
    sys.exit(command())
