"""A data collator around another one."""

from typing import Any


class WrappedCollator:
    """
    What wraps a data collator in `collator`: what it does not have itself is read and set there.

    Upstream saves the tokenizer of a collator, and callbacks change its settings, for instance `mlm_probability`. A subclass sets
    `collator` last of all: what is set from then on and is not here is the collator's.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.collator, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "collator" not in vars(self) or name in vars(self):
            super().__setattr__(name, value)
        else:
            setattr(self.collator, name, value)
