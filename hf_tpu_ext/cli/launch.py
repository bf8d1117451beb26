"""One process for each chip, where a process drives one (torch_tpu): started by torchrun's own launcher."""

import os
import sys

from ..importing import without_garbage_collection
from .recipe import OptionParser, read_recipe


_SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
# Seconds that processes have to save, when they are told to stop.
_SHUTDOWN = "600"


def start_processes(argv: list[str]) -> int | None:
    """
    Run a training command, with the arguments `argv` after `hf-tpu`, in a process for each chip. Returns its exit status, or
    `None` where this process is to run it.
    """
    if "WORLD_SIZE" in os.environ or {"-h", "--help"} & set(argv):
        return None
    recipe = read_recipe(argv[1:])
    if recipe.values.get("use_cpu") is True or "--use_cpu" in recipe.argv:
        return None
    os.environ.update(recipe.env)
    parser = OptionParser()
    parser.add_argument("--num_chips", type=int, default=recipe.values.get("num_chips"))
    asked, _ = parser.parse_known_args(recipe.argv)
    with without_garbage_collection():
        # Imported here: PyTorch comes with it, and reads the environment.
        from ..backends.selection import prepare_processes

        count = prepare_processes(recipe.values.get("backend"), asked.num_chips)
    return None if count == 1 else _run(count, argv)


def _run(count: int, argv: list[str]) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    os.environ.setdefault(_SHUTDOWN_VARIABLE, _SHUTDOWN)
    print(f"One process for each of {count} chips.", file=sys.stderr, flush=True)
    # Without -P, `-m` would put the working directory on the module path.
    command = [sys.executable, "-P", "-m", "hf_tpu_ext.cli.main", *argv]
    try:
        run(parse_args(["--standalone", f"--nproc_per_node={count}", "--no_python", *command]))
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        # Each has said why it has ended. Those that were ended for another's sake have not chosen their status.
        return next((code for code in (os.EX_TEMPFAIL, *sorted(codes, reverse=True)) if code in codes and code > 0), 1)
    except SignalException:
        # They have been told as well.
        return os.EX_TEMPFAIL
    return 0
