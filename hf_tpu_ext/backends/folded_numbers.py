"""
Python numbers that become part of a program.

Where steps are traced, torch_xla sends a Python number to the device as data, except for these, which it folds into the
program as constants. So a number that moves to one of them, or away from it, is another program.
"""

_FOLDED = (0, 1, -1)
#: For messages.
FOLDED_NUMBERS = "0, 1 and -1"


def describe_number(value: float) -> str:
    """Say which values of a Python number are different programs: those that are folded, and one for all others."""
    return f"{value:g}" if value in _FOLDED else "neither 0, 1 nor -1"
