"""The file that the average of the weights (EMA) of a run is kept in."""

from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from ...errors import UserError


#: Beside the weights of a model or an adapter: the averages of those that are trained, by their names in the model.
EMA_FILE = "ema.safetensors"
#: In its metadata: how many updates it averages.
UPDATES = "updates"


def is_average(path: Path) -> bool:
    """Whether a file is an average that a run wrote."""
    try:
        with safe_open(path, "pt") as file:
            return UPDATES in (file.metadata() or {})
    except SafetensorError:
        return False


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
