"""A saved model: its files take their places when all of them are written. Beside it may be the average of its weights (EMA)."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers.utils import ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME, logging

from ...atomic_write import sync_directory
from ...errors import UserError
from ...formatting import format_bytes
from ...quantization.fake_quantized import QUANTIZATION_FILE
from .base_record import BASE_FILE
from .directories import move_aside
from .run_lock import lock


logger = logging.get_logger(__name__)

#: Beside the weights of a model or an adapter: the averages of those that are trained, by their names in the model.
EMA_FILE = "ema.safetensors"
#: In its metadata: how many updates it averages.
UPDATES = "updates"
# Upstream does not push `_*` to the Hub.
_TEMPORARY = "_tmp-model"
# Upstream's code loads the first of these that it finds, so it would take one that an earlier save left for the new one.
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
# What a run with an adapter leaves.
_OF_ADAPTER = (ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME, BASE_FILE)
# What is saved beside them, to load them with.
_BESIDE = re.compile(
    r"(config|generation_config|tokenizer\w*|special_tokens_map|added_tokens|vocab|merges|spiece|chat_template|\w*processor_config"
    r"|training_args|README)\.(json|jinja|txt|model|bin|md)"
)
# What safetensors, tokenizers and PyTorch make of an `OSError` in their own code.
_DISK_ERRORS = ("os error", "I/O error", "PytorchStreamWriter", "inline_container")


@contextmanager
def whole_model(directory: Path) -> Iterator[Path]:
    """
    Context that yields a directory to save a model to. At its end, the files in it take their places in `directory`; if
    it is not reached, what is there stays as it is. Another process that saves to `directory` now is waited for.
    """
    partial = directory / _TEMPORARY
    with lock(directory / f"{_TEMPORARY}.lock"):
        if partial.exists():
            # A process that was killed has left it.
            shutil.rmtree(partial)
        try:
            partial.mkdir(parents=True)
            card = directory / "README.md"
            if card.is_file():
                # PEFT adds to the card that is there.
                shutil.copyfile(card, partial / card.name)
            yield partial
            _move(partial, directory)
        finally:
            # The disk may be gone altogether.
            with suppress(OSError):
                shutil.rmtree(partial)


def _move(source: Path, directory: Path) -> None:
    files = [path for path in sorted(source.rglob("*")) if path.is_file()]
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    for path in files:
        target = directory / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, target)
    names = {path.name for path in files if path.parent == source}
    if any(map(_WEIGHTS.fullmatch, names)):
        for path in directory.iterdir():
            if _WEIGHTS.fullmatch(path.name) and path.name not in names:
                path.unlink()
    # Files of an earlier model would be taken for those of the new one: upstream loads an adapter first.
    is_model_over_adapter = ADAPTER_CONFIG_NAME not in names and (directory / ADAPTER_CONFIG_NAME).is_file()
    of_earlier = {EMA_FILE, QUANTIZATION_FILE, *(_OF_ADAPTER if is_model_over_adapter else ())} - names
    if stale := [directory / name for name in sorted(of_earlier) if (directory / name).is_file()]:
        aside = move_aside(directory, stale)
        logger.warning(
            f"{directory} holds {', '.join(path.name for path in stale)} of an earlier model, not of the one that is saved there "
            f"now. They are moved to {aside}, where nothing deletes them."
        )
    sync_directory(directory)


def files_of_model(directory: Path) -> list[Path]:
    """The files of the model or the adapter that is saved in a directory, with those that it is loaded with; none where there are no weights."""
    names = [path.name for path in directory.iterdir() if path.is_file()] if directory.is_dir() else []
    own = {*_OF_ADAPTER, EMA_FILE, QUANTIZATION_FILE}
    weights = [name for name in names if name in own or _WEIGHTS.fullmatch(name)]
    beside = [name for name in names if _BESIDE.fullmatch(name)] if weights else []
    return [directory / name for name in sorted({*weights, *beside})]


def is_of_disk(error: Exception) -> bool:
    """Whether a file could not be written, by whatever library."""
    return isinstance(error, OSError | SafetensorError) or any(words in str(error) for words in _DISK_ERRORS)


def free_space(directory: Path) -> str:
    """A sentence on the free space of the disk that a directory is on, or is to be."""
    place = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.is_dir())
    return f"The disk of {place} has {format_bytes(shutil.disk_usage(place).free)} left. "


def load_average(model: nn.Module, directory: Path) -> None:
    """
    Load the average that a run has kept beside its weights into the model that it has trained. Raises `ValueError` where
    there is none, or that of another model.
    """
    path = directory / EMA_FILE
    if not path.is_file():
        raise UserError(
            f"{directory} has no {EMA_FILE}: the run kept no average of its weights, for which it needs ema_decay, for example "
            "ema_decay=0.999. Leave out --ema, or give a checkpoint that has one."
        )
    try:
        averages = load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} cannot be read ({error}). Take another checkpoint.") from error
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, average in averages.items():
        if name not in parameters or parameters[name].shape != average.shape:
            raise UserError(
                f"{path} is not of the model beside it, which has no {name} of shape {tuple(average.shape)}. Take another "
                "checkpoint."
            )
        parameters[name].data.copy_(average)
