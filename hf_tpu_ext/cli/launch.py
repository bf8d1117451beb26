"""The processes that a recipe is run in: by upstream's launcher on GPUs and the CPU, one for each chip with torch_tpu."""

import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from subprocess import TimeoutExpired

from ..errors import UserError
from ..importing import without_garbage_collection
from ..temporarily import temporarily
from .recipe import Recipe
from .recipe_parser import FOR_PROCESSES_ON_THE_CPU, RecipeParser


# What launchers set in the processes that they start, as accelerate reads it.
_OF_LAUNCHERS = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
#: Set in processes whose mistakes the one that has started them tells.
LAUNCHER_TELLS = "HF_TPU_LAUNCHER_TELLS"
# How long processes may take to save when they are told to stop.
_SECONDS_TO_SAVE = 600
# In Linux's `prctl.h`.
_PR_SET_PDEATHSIG = 1


def start_processes(
    command: str, recipe: Recipe, make_parser: Callable[[], RecipeParser], resumes: bool = True
) -> int | None:
    """
    Run a recipe, whose environment variables are set, in the processes that its device and its launcher's options ask for.

    - On GPUs and the CPU these are the processes that `trl` would start, by `accelerate launch` with the recipe's options.
    - With torch_tpu there is one for each chip. With torch_xla there is this one, which drives all chips.

    They run the sub-command `command`, whose parser `make_parser` makes, and which `resumes` a run from its checkpoints. Returns their
    exit status, or `None` where this process is to run the recipe.
    """
    with without_garbage_collection():
        # Imported here: PyTorch comes with it, and reads the environment.
        from ..backends.selection import find_backend, prepare_processes, select_backend

        name = "cpu" if recipe.uses_cpu else recipe.get("backend")
        backend = find_backend(name)
    recipe.launcher_applies = not backend.unknown_upstream
    # Without -P, `-m` would put the working directory on the module path.
    own_command = [sys.executable, "-P", "-m", "hf_tpu_ext.cli.main", *command.split(), *recipe.argv]
    status = None
    if not recipe.asks_for_help and {*_OF_LAUNCHERS}.isdisjoint(os.environ):
        if recipe.launcher_applies:
            select_backend(name)
            status = _launch_as_upstream(own_command, recipe, make_parser(), backend)
        elif (count := prepare_processes(backend, recipe.number("num_chips"))) > 1:
            from torch.distributed import run as torchrun

            print(f"One process for each of {count} chips.", file=sys.stderr, flush=True)
            words = ["--standalone", f"--nproc_per_node={count}", "--no_python", *own_command]
            status = _status_of(lambda: torchrun.run(torchrun.parse_args(words)))
    if status is None:
        select_backend(name)
    elif resumes:
        _tell_how_to_go_on(status, recipe)
    return status


def _tell_how_to_go_on(status: int, recipe: Recipe) -> None:
    """Name the newest checkpoint of processes that have failed, which may have been killed and said nothing."""
    from ..trainers.checkpoint.directories import newest_checkpoint

    if status in (0, 2, os.EX_TEMPFAIL):
        return
    checkpoint = newest_checkpoint(recipe.get("output_dir", "trainer_output"))
    if checkpoint is not None:
        print(
            f"The newest checkpoint is {checkpoint}. To resume, run the same command with --resume_from_checkpoint true.",
            file=sys.stderr,
        )


def _launch_as_upstream(own_command: list[str], recipe: Recipe, parser: RecipeParser, backend) -> int | None:
    """Start what `accelerate launch` starts; where that would be one process, make this one as that would be."""
    import torch
    from accelerate.commands import launch
    from accelerate.commands.config import default_config_file
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    words = parser.launcher_words(recipe)
    if not words and torch.cuda.device_count() <= 1 and not os.path.isfile(default_config_file):
        return None
    launcher = launch.launch_command_parser()
    launcher.error = _refuse
    # It would list its defaults, of which the trainer's arguments replace some: `mixed_precision` is `bf16`'s.
    logging.getLogger(launch.__name__).setLevel(logging.ERROR)
    args = launcher.parse_args([*resolve_accelerate_config_argument(words), *own_command])
    if args.tpu:
        raise UserError("--tpu: this run is not on a TPU. Leave it out: a TPU is used where there is one.")
    if args.num_processes is not None and args.num_processes < 1:
        raise UserError(
            f"--num_processes {args.num_processes} is not positive. Give the number of processes, for example --num_processes 2"
        )
    if args.multi_gpu and torch.cuda.device_count() == 0:
        if not recipe.uses_cpu:
            raise UserError(
                f"--multi_gpu: this machine has no GPU. Leave it and num_processes out; or {FOR_PROCESSES_ON_THE_CPU}"
            )
        if args.num_processes is None:
            raise UserError("--multi_gpu on the CPU needs the number of processes, for example --num_processes 2")
    if args.multi_gpu and (args.num_processes or 2) < 2:
        raise UserError(
            f"--num_processes {args.num_processes}: multi_gpu is for 2 processes or more. For one process add --multi_gpu false."
        )
    args.no_python = True
    stays_here = False

    def run_one(args) -> None:
        nonlocal stays_here
        command, environment = prepare_simple_launcher_cmd_env(args)
        stays_here = command[0] == sys.executable
        if not stays_here:
            # It is mpirun that is to start processes.
            start_one(args)
            return
        if (args.num_processes or 1) > 1:
            raise UserError(
                f"--num_processes {args.num_processes}: accelerate would start one process on this machine, which has "
                f"{torch.cuda.device_count()} GPUs. Leave it out; or {FOR_PROCESSES_ON_THE_CPU}"
            )
        # PyTorch has read how many threads it is to use, and without a wish they are as many as there are cores.
        environment.pop("OMP_NUM_THREADS", None)
        if (threads := recipe.number("num_cpu_threads_per_process")) is not None:
            torch.set_num_threads(threads)
        os.environ.update(environment)

    # Accelerate decides what to start from the options, its own configuration and the machine. The one process that it would
    # start, after this one has imported all that it needs, is this one.
    start_one = launch.simple_launcher
    with temporarily(launch, simple_launcher=run_one):
        status = _status_of(lambda: launch.launch_command(args))
    if not stays_here:
        return status
    # Upstream's trainer would spread each batch over all GPUs that it sees, by `nn.DataParallel`.
    backend.prepare_processes(1, "num_processes")
    return None


def _refuse(message: str) -> None:
    raise UserError(f"options of `accelerate launch`: {message}")


def _status_of(run: Callable[[], None]) -> int:
    """Run processes to their end, and return their exit status."""
    from subprocess import CalledProcessError

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # PyTorch would log in its words what is said here.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    os.environ[LAUNCHER_TELLS] = "1"
    try:
        with _time_to_save() as ended_with:
            run()
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(f"Process {failure.local_rank} was killed by {failure.signal_name()}.", file=sys.stderr)
        elif isinstance(failure.message, dict):
            # The process has not told it. As PyTorch writes it, after the name of the error's class.
            tell_mistake(failure.message["message"].partition(": ")[2])
        return _choose_status({each.exitcode for each in error.failures.values()}, os.EX_SOFTWARE)
    except CalledProcessError as error:
        return error.returncode
    except SignalException as error:
        # The processes have been told as well. One that had not begun to train has saved nothing.
        return _choose_status(ended_with, 128 + error.sigval)
    return 0


def stop_with_launcher() -> None:
    """
    Have Linux send this process SIGTERM, on which it saves and ends, once the one that has started it is gone. A launcher that is killed
    cannot tell it, and it would train on with nobody to know.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def tell_mistake(message: str) -> None:
    """Print what a person has to change."""
    print(f"hf-tpu: error: {message}\n(HF_TPU_EXT_TRACEBACK=1 shows where)", file=sys.stderr)


def _choose_status(codes: set[int], otherwise: int) -> int:
    """Choose the exit status that says a run is saved, or else the highest that a process has chosen itself."""
    # A process that was ended for another's sake has a negative status.
    return os.EX_TEMPFAIL if os.EX_TEMPFAIL in codes else max((code for code in codes if code > 0), default=otherwise)


@contextmanager
def _time_to_save() -> Iterator[set[int]]:
    """
    Within this context, processes that are told to stop have the time to save. Yields the set of what they have ended
    with then.
    """
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.api import SignalException

    ended_with: set[int] = set()
    shut_down = LocalElasticAgent._shutdown

    def wait_and_shut_down(agent, *args, **kwargs) -> None:
        exception = sys.exception()
        if not isinstance(exception, SignalException) or agent._pcontext is None:
            shut_down(agent, *args, **kwargs)
            return
        workers = [handler.proc for handler in agent._pcontext.subprocess_handlers.values()]
        for worker in workers:
            if worker.poll() is None:
                os.killpg(worker.pid, exception.sigval)
        deadline = time.monotonic() + _SECONDS_TO_SAVE
        with suppress(TimeoutExpired):
            for worker in workers:
                worker.wait(max(0, deadline - time.monotonic()))
        shut_down(agent, *args, **kwargs)
        ended_with.update(worker.returncode for worker in workers)

    # PyTorch kills processes 30 seconds after it has told them, without a setting for it in all versions, and does not say
    # what they have ended with.
    with temporarily(LocalElasticAgent, _shutdown=wait_and_shut_down):
        yield ended_with
