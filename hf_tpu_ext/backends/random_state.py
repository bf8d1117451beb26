"""The random numbers of the host: those of Python, NumPy and PyTorch."""

import random

import numpy as np
import torch


def read_random_state() -> dict[str, list]:
    """The state of each generator by its name, to be compared, or sent to another host as JSON."""
    kind, keys, *rest = np.random.get_state()
    pytorch = torch.get_rng_state().tolist()
    return {"Python": [*random.getstate()], "NumPy": [kind, keys.tolist(), *rest], "PyTorch": pytorch}


def set_random_state(state: dict[str, list]) -> None:
    """Go on from a state that was read, here or on another host."""
    version, python, gauss = state["Python"]
    random.setstate((version, tuple(python), gauss))
    np.random.set_state(tuple(state["NumPy"]))
    torch.set_rng_state(torch.tensor(state["PyTorch"], dtype=torch.uint8))
