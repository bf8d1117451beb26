"""Errors whose message is for the person who wrote the recipe."""

from pathlib import Path


class UserError(ValueError):
    """
    What was asked for cannot be done. The message says what was given, what is allowed and what to type.

    `hf-tpu` shows it without a traceback. A `ValueError` of another class, raised by this package, is a bug.
    """


def damage_of(path: Path) -> UserError:
    """The error of a file beside weights which cannot be read, and without which they can."""
    # PyTorch imports this file in every process of the environment.
    import shlex

    return UserError(
        f"{path} is damaged. Take another checkpoint, or remove the file to go without it: rm {shlex.quote(str(path))}"
    )


class SaveError(OSError):
    """A model, a checkpoint or an export could not be written. The message says where, how much room is there and what to do."""
