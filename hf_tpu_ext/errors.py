"""Errors whose message is for the person who wrote the recipe."""


class UserError(ValueError):
    """
    What was asked for cannot be done. The message says what was given, what is allowed and what to type.

    `hf-tpu` shows it without a traceback. A `ValueError` of another class, raised by this package, is a bug.
    """


class SaveError(OSError):
    """A model, a checkpoint or an export could not be written. The message says where, how much room is there and what to do."""
