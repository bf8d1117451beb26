"""Causes of recompilation: what has changed since a graph was compiled before."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from ..backends.folded_numbers import FOLDED_NUMBERS
from ..backends.insight import Operation
from .source_lines import describe_line


@dataclass(frozen=True)
class Cause:
    """Cause of a recompilation: what has changed, from what to what, and a sentence on what to do about it."""

    what: str
    advice: str


@dataclass(frozen=True)
class BatchEntry:
    """
    An entry of a batch: dtype and shape of a tensor; of another value an empty dtype, and the value as its shape.
    """

    dtype: str
    shape: str


@dataclass(frozen=True)
class ParameterFacts:
    """What a program depends on about a parameter."""

    trained: bool
    dtype: str
    shape: str


@dataclass(frozen=True)
class StepFacts:
    """
    What the program of a step depends on, as the host knows it: the batch by key and who made it, in words; the
    parameters by name; plain attributes of modules and arguments; the optimizer, the numbers that it takes as Python
    numbers and whether it had its state before the step; code of the user's that runs within a step, in words, empty where
    there is none; and what else has changed that programs depend on, as half a sentence.
    """

    batch: Mapping[str, BatchEntry] = field(default_factory=dict)
    batch_source: str = "the data collator"
    parameters: Mapping[str, ParameterFacts] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    optimizer: str = ""
    numbers: Mapping[str, str] = field(default_factory=dict)
    state_made: bool = True
    own_code: str = ""
    change: str | None = None

    def count_differences(self, other: "StepFacts") -> int:
        """In how many entries these facts are not those of another step."""
        groups = [(vars(self)[name], vars(other)[name]) for name in ("batch", "parameters", "settings", "numbers")]
        optimizers = (self.state_made != other.state_made) + (self.optimizer != other.optimizer)
        return optimizers + sum(len(_changed(mine, theirs)) for mine, theirs in groups)


def compare_facts(before: StepFacts, after: StepFacts) -> Cause | None:
    """The difference that weighs most between a step and one that was compiled again; `None` where none is known."""
    return (
        _compare_batches(before, after)
        or _compare_parameters(before.parameters, after.parameters)
        or _compare_optimizers(before, after)
        or _compare_settings(before.settings, after.settings)
        or _compare_changes(before.change, after.change)
    )


def _changed(before: Mapping, after: Mapping) -> list[str]:
    return [key for key in {**before, **after} if before.get(key) != after.get(key)]


def _first_of(changed: list[str]) -> tuple[str, str]:
    return changed[0], f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""


def _compare_batches(before: StepFacts, after: StepFacts) -> Cause | None:
    changed = _changed(before.batch, after.batch)
    if not changed:
        return None
    # Values matter least: a program may not use them.
    key = min(changed, key=lambda key: key in before.batch and key in after.batch and not after.batch[key].dtype)
    source = f" ({after.batch_source})"
    if key not in before.batch or key not in after.batch:
        words = "was in the batch, and is missing" if key in before.batch else "is in the batch, and was not"
        return Cause(f"`{key}` {words}{source}", "Yield the same keys in every batch.")
    was, now = before.batch[key], after.batch[key]
    if was.dtype != now.dtype:
        words = [entry.dtype or f"the value {entry.shape}" for entry in (was, now)]
        return Cause(f"`{key}` was {words[0]}, is {words[1]}{source}", "Yield one dtype in every batch.")
    advice = f"A Python value is a constant of the graph: yield `{key}` as a tensor, or leave it out of the batch."
    if was.dtype:
        advice = f"Pad `{key}` to one shape in the data collator."
    return Cause(f"`{key}` was {was.shape}, is {now.shape}{source}", advice)


def _compare_parameters(before: Mapping[str, ParameterFacts], after: Mapping[str, ParameterFacts]) -> Cause | None:
    changed = _changed(before, after)
    if not changed:
        return None
    name, more = _first_of(changed)
    was, now = before.get(name), after.get(name)
    if was is None or now is None:
        verb = "is gone" if now is None else "is new"
        return Cause(f"the parameter `{name}` {verb}{more}", "Change the model before training.")
    if was.trained != now.trained:
        words = ["trained" if facts.trained else "frozen" for facts in (was, now)]
        return Cause(
            f"`{name}` was {words[0]}, is {words[1]}{more}",
            "Each set of trainable parameters is another graph: freeze before training, or in as few stages as possible.",
        )
    if was.dtype != now.dtype:
        return Cause(f"`{name}` was {was.dtype}, is {now.dtype}{more}", "Convert the model before training.")
    return Cause(f"`{name}` was {was.shape}, is {now.shape}{more}", "Change the model before training.")


def _compare_optimizers(before: StepFacts, after: StepFacts) -> Cause | None:
    if before.optimizer != after.optimizer:
        return Cause(
            f"the optimizer was {before.optimizer}, is {after.optimizer}", "Choose the optimizer before training."
        )
    if before.state_made != after.state_made:
        return Cause(
            f"{after.optimizer} creates its state in the first step, which is another graph",
            "This happens once; optim=adamw_torch creates it before.",
        )
    changed = _changed(before.numbers, after.numbers)
    if not changed:
        return None
    was, now = before.numbers.get(changed[0]), after.numbers.get(changed[0])
    advice = (
        f"The optimizer takes it as a Python number, and torch_xla folds {FOLDED_NUMBERS} into the graph: avoid these, or use "
        "optim=adamw_torch, which takes it as a tensor."
    )
    if "not 0" in (was, now):
        advice = (
            "Zero and nonzero are different graphs: set it before training. Changes between nonzero values do not "
            "recompile."
        )
    return Cause(f"`{changed[0]}` of {after.optimizer} was {was}, is {now}", advice)


def _compare_settings(before: Mapping[str, str], after: Mapping[str, str]) -> Cause | None:
    changed = _changed(before, after)
    if not changed:
        return None
    name, more = _first_of(changed)
    return Cause(
        f"`{name}` was {before.get(name, 'absent')}, is {after.get(name, 'absent')}{more}",
        "Each value is another graph: set it before training, or change it rarely.",
    )


def _compare_changes(before: str | None, after: str | None) -> Cause | None:
    if after is None or after == before:
        return None
    return Cause(after, "Each is another graph: change it before training, or rarely.")


def compare_operations(before: Sequence[Operation], after: Sequence[Operation]) -> Cause | None:
    """The first operation in which a program and one that was compiled again differ; `None` if none does."""
    # The order is that in which results need one another, so what follows from a difference comes after it.
    pairs = list(zip_longest(before, after))
    index = next((i for i, pair in enumerate(pairs) if None in pair or _differ(*pair)), None)
    if index is None:
        return None
    was, now = pairs[index]
    places = [operation.place for operation in (now, was) if operation is not None and operation.place is not None]
    where = f" [{describe_line(places[0])}]" if places else ""
    if was is not None and now is not None:
        if {was.name, now.name} <= {"constant", "parameter"} and was.shape == now.shape:
            numbers = [_number(operation) for operation in (was, now)]
            return Cause(
                f"a scalar of the graph was {numbers[0]}, is {numbers[1]}{where}",
                f"torch_xla folds {FOLDED_NUMBERS} and non-tensor arguments into the graph: send the value as a tensor, "
                "trainer.backend.send(torch.tensor(value)), or keep it constant.",
            )
        if was.name == now.name:
            return Cause(
                f"`{was.name}` was {_describe(was)}, is {_describe(now)}{where}",
                "Keep shapes and slice bounds the same at every step: mask instead of slicing.",
            )
    is_new = was is None or (now is not None and len(after) >= len(before))
    # Its arguments come first.
    program = after if is_new else before
    at_once = (later for later in program[index:] if later.place == program[index].place)
    operation = next((later for later in at_once if later.name not in ("constant", "parameter")), program[index])
    what = f"`{operation.operator or operation.name}` of {operation.shape}"
    words = f"the step computes {what}, and did not" if is_new else f"the step computed {what}, and does not"
    return Cause(
        f"{words}{where}",
        "Run the same operators at every step: instead of branching, multiply by a 0 or 1 sent as a tensor.",
    )


def _differ(operation: Operation, other: Operation) -> bool:
    # Not by line and operator, which are not noted at every step.
    return (operation.name, operation.shape, operation.details) != (other.name, other.shape, other.details)


def _number(operation: Operation) -> str:
    return operation.details if operation.name == "constant" else "a tensor"


def _describe(operation: Operation) -> str:
    return f"{operation.shape} {operation.details}".strip()
