"""Compiling the programs of a run before the run, by training on made batches and keeping nothing."""

from collections.abc import Callable, Hashable

from tqdm.auto import tqdm
from transformers import TrainerCallback

from ...backends import select_backend
from ...backends.base import Backend
from ...backends.compile_cache import CacheUse, cache_root
from ...backends.counters import Counters
from ...callbacks.samples import ShowSamples
from ...errors import UserError
from ...step.train_step import MICRO_STEP, OPTIMIZER_STEP
from ..configs import ExtensionArguments
from .every_length import EveryLengthMixin


class WarmedUp(Exception):
    """
    Ends a warm-up, in place of a return into a script that would save what was not trained. `programs` is what was
    spent on each kind of step and shape of its batch.
    """

    def __init__(self, programs: dict[tuple[str, tuple[int, ...]], Counters], cache: CacheUse):
        super().__init__()
        self.programs = programs
        self.cache = cache


def open_compile_cache(args: ExtensionArguments) -> list[str]:
    """
    Open the compilation cache that a warm-up is to fill. Returns one line for each thing that a person should know.
    Nothing to compile, or nowhere to keep it, is a `ValueError`.
    """
    backend = select_backend("cpu" if args.use_cpu else args.backend, args.num_chips)
    if not backend.static_shapes:
        raise UserError(
            f"There is nothing to warm up: nothing is compiled on {backend.name} ({backend.reason}). Run this command on "
            "the TPU machine."
        )
    lines = backend.use_compile_cache(args.compile_cache_dir)
    cache = backend.cache_use()
    if cache is None and lines:
        raise UserError(f"{lines[0]}.")
    if cache_root(args.compile_cache_dir)[0] is None:
        raise UserError(
            "There is no compilation cache: compile_cache_dir (or HF_TPU_EXT_COMPILE_CACHE) is off. Leave it out."
        )
    if cache is None:
        raise UserError(
            f"There is no compilation cache: this device ({backend.device_name}) cannot load stored executables, so none "
            "are stored. Run this command on the TPU machine. To store them anyway, to compare their keys, name a "
            "directory: --compile_cache_dir DIR"
        )
    if cache.problem is not None:
        raise UserError(f"{lines[0]}. Set compile_cache_dir to a directory that can be written.")
    return lines


class WarmUpMixin(EveryLengthMixin):
    """
    Makes `train` of a trainer compile the programs of training and evaluation, for every length that they need.

    They are compiled by running them: a few optimizer steps for each length, and one evaluation, over rows of the data
    that have that length. Nothing is saved, logged or reported, and the recipe's `output_dir` is not touched. `args`
    are changed. Nothing to compile, or nowhere to keep it, is a `ValueError`.
    """

    # A step may be run otherwise once it was seen, and otherwise again once the two were compared.
    steps_per_length = 3

    def __init__(self, *, args: ExtensionArguments, **kwargs):
        for line in open_compile_cache(args):
            tqdm.write(line)
        super().__init__(args=args, **kwargs)

    def train(self, *args, **kwargs) -> None:
        """Compile the programs instead of training, and raise [`WarmedUp`]. Rows without tokens are a `ValueError`."""
        num_programs = len(self.train_rows) * (2 if self.args.gradient_accumulation_steps > 1 else 1)
        if self.eval_dataset is not None:
            num_programs += len(self.eval_rows)
        quiet = self.args.disable_tqdm or not self.is_world_process_zero()
        with tqdm(total=num_programs, desc="compiling", unit="graph", disable=quiet) as bar:
            compiling = _Compiling(self.backend, lambda: self.batch_shape, self.pop_callback(ShowSamples), bar)
            self.train_every_length([compiling])
        raise WarmedUp(compiling.programs, self.backend.cache_use())


class _Compiling(TrainerCallback):
    """Notes what is spent on each program, and keeps the progress."""

    def __init__(
        self, backend: Backend, find_shape: Callable[[], tuple[int, ...]], samples: ShowSamples | None, bar: tqdm
    ):
        self.programs: dict[Hashable, Counters] = {}
        self._backend, self._find_shape = backend, find_shape
        self._samples = samples
        self._bar = bar
        self._before = backend.counters()

    def _note(self, kind: str, shape: tuple[int, ...] = ()) -> None:
        now = self._backend.counters()
        spent, self._before = now - self._before, now
        if (kind, shape) in self.programs:
            spent = self.programs[kind, shape] + spent
        elif shape:
            self._bar.update()
        self.programs[kind, shape] = spent

    def on_train_begin(self, args, state, control, model, **kwargs):
        self._note("start of training")
        if self._samples is not None:
            self._samples.answer()
            self._note("samples")

    def on_substep_end(self, args, state, control, **kwargs):
        self._note(MICRO_STEP, self._find_shape())

    def on_step_end(self, args, state, control, **kwargs):
        self._note(OPTIMIZER_STEP, self._find_shape())

    def on_prediction_step(self, args, state, control, **kwargs):
        self._note("evaluation step", self._find_shape())

    def on_train_end(self, args, state, control, **kwargs):
        self._note("logs")
