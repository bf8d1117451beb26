"""Causes of recompilation: what has changed since a graph was compiled before."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from operator import attrgetter

from ..backends.compiled_function import ShapeAndDtype
from ..backends.insight import FOLDED_NUMBERS, Operation, SourceLine
from ..formatting import dtype_name
from .source_lines import describe_line, package_of


@dataclass(frozen=True)
class Cause:
    """
    Cause of a recompilation: what has changed, from what to what, and a sentence on what to do about it. `of_list` is the key of a batch
    whose value is a list with a tensor of another shape, which models of detection do not take padded.
    """

    what: str
    advice: str
    of_list: str = ""


# Operations that compute nothing.
_TAKEN = {"constant", "parameter"}

#: What a program depends on besides what Python may read: `"batch"` is what [`~hf_tpu_ext.backends.compiled_function.describe_batch`] says,
#: `"optimizer"` has its class, whether its state was there, and the numbers that matter; what changed last of all else, as half a
#: sentence or `None`, is the one entry of `"change"`.
Dependencies = Mapping[str, Mapping[Hashable, Hashable]]


def count_differences(before: Dependencies, after: Dependencies) -> int:
    """In how many entries the dependencies of a program differ from those of another."""
    return sum(len(_changed_keys(before[name], after[name])) for name in before)


def compare_dependencies(before: Dependencies, after: Dependencies, source: str) -> Cause | None:
    """
    The difference that weighs most between a program and one that was compiled again; `None` where none is known. `source` says in
    words who made the batch.
    """
    cause = _compare_batches(before["batch"], after["batch"], source)
    cause = cause or _compare_optimizers(before["optimizer"], after["optimizer"])
    (change,) = after["change"].values()
    return cause_of(change) if cause is None and change is not None and before["change"] != after["change"] else cause


def cause_of(change: str) -> Cause:
    """The cause that a change of what Python may read is."""
    return Cause(
        change,
        f"Such a change may make another graph: make it before training, or rarely. torch_xla folds {FOLDED_NUMBERS} into the graph, "
        "and sends equal numbers as one: a number that changes at each step belongs into a buffer of the model.",
    )


def _changed_keys(before: Mapping, after: Mapping) -> list[str]:
    return [key for key in {**before, **after} if before.get(key) != after.get(key)]


def _compare_batches(before: Mapping[str, Hashable], after: Mapping[str, Hashable], source: str) -> Cause | None:
    changed_keys = _changed_keys(before, after)
    if not changed_keys:
        return None
    # Values matter least: a program may not use them.
    key = min(
        changed_keys, key=lambda key: key in before and key in after and not isinstance(after[key], ShapeAndDtype)
    )
    if key not in before or key not in after:
        words = "was in the batch, and is missing" if key in before else "is in the batch, and was not"
        return Cause(f"`{key}` {words} ({source})", "Yield the same keys in every batch.")
    old, new = before[key], after[key]
    if isinstance(old, ShapeAndDtype) and isinstance(new, ShapeAndDtype) and old.dtype == new.dtype:
        words = f"`{key}` was {tuple(old.shape)}, is {tuple(new.shape)} ({source})"
        name, bracket, _ = key.partition("[")
        return Cause(words, f"Pad `{key}` to one shape in the data collator.", name if bracket else "")
    if isinstance(old, ShapeAndDtype) or isinstance(new, ShapeAndDtype):
        words = [dtype_name(one.dtype) if isinstance(one, ShapeAndDtype) else f"the value {one}" for one in (old, new)]
        return Cause(f"`{key}` was {words[0]}, is {words[1]} ({source})", "Yield one dtype in every batch.")
    return Cause(
        f"`{key}` was {old}, is {new} ({source})",
        f"A Python value is a constant of the graph: yield `{key}` as a tensor, or leave it out of the batch.",
    )


def _compare_optimizers(before: Mapping[str, str], after: Mapping[str, str]) -> Cause | None:
    changed_keys = _changed_keys(before, after)
    if not changed_keys:
        return None
    name, old, new = changed_keys[0], before.get(changed_keys[0]), after.get(changed_keys[0])
    if name == "class":
        return Cause(f"the optimizer was {old}, is {new}", "Choose the optimizer before training.")
    if name == "state":
        return Cause(
            f"{after['class']} creates its state in the first step, which is another graph",
            "This happens once; optim=adamw_torch creates it before.",
        )
    advice = (
        f"The optimizer takes it as a Python number, and torch_xla folds {FOLDED_NUMBERS} into the graph: avoid these, or use "
        "optim=adamw_torch, which takes it as a tensor."
    )
    if "not 0" in (old, new):
        advice = (
            "Zero and nonzero are different graphs: set it before training. Changes between nonzero values do not "
            "recompile."
        )
    return Cause(f"`{name}` of {after['class']} was {old}, is {new}", advice)


def compare_operations(
    before: Sequence[Operation],
    after: Sequence[Operation],
    when: str = "",
    find_own_code: Callable[[], str] = str,
) -> Cause | None:
    """
    The first operation in which a program, which ran `when`, e.g. `" at step 2"`, and one that was compiled again differ; `None` if none
    does. Where its line is not known, `find_own_code` names code of the user's.
    """
    # The order is that in which results need one another, so what follows from a difference comes after it.
    pairs = list(zip_longest(before, after))
    index = next((index for index, (old, new) in enumerate(pairs) if old != new), None)
    if index is None:
        return None
    if (equal_numbers := _compare_numbers(before, after, when)) is not None:
        return equal_numbers
    old, new = pairs[index]
    is_number = old is not None and new is not None and {old.name, new.name} <= _TAKEN and old.shape == new.shape
    is_new = len(after) >= len(before)
    operation = _operation_at(index, *((after, before) if is_new else (before, after)))
    if not is_number and (of_numbers := _other_number(before, after)) is not None:
        is_number, (old, new, operation) = True, of_numbers
    elif is_number and (found := _operator_of_one(before, after)) is not None:
        # A branch may take other numbers, too.
        is_number, (is_new, operation) = False, found
    operator = _operator(operation)
    involved = (new, old, operation) if is_number else (operation, new, old)
    places = [one.place for one in involved if one is not None and one.place is not None]
    # Where a mode of this package has handed an operator on, torch_xla records the line of the mode; of `tensor ** number`, a line of
    # PyTorch.
    places = [place for place in places if package_of(place.file) not in ("hf_tpu_ext", "torch", "torch_xla")]
    where = f" [{describe_line(places[0])}]" if places else ""
    if not places and (own_code := find_own_code()):
        where = f", in {own_code}"
    if is_number:
        numbers = [_number(each) for each in (old, new)]
        return Cause(
            f"a scalar of the graph was {numbers[0]}{when}, is {numbers[1]}"
            f"{'' if places else f' (an argument of `{operator}`)'}{where}",
            f"torch_xla folds {FOLDED_NUMBERS} and non-tensor arguments into the graph: send the value as a tensor, "
            "trainer.backend.send(torch.tensor(value)), or keep it constant.",
        )
    if old is not None and new is not None and old.name == new.name and old.name not in _TAKEN:
        return Cause(
            f"`{old.name}` was {_describe(old)}{when}, is {_describe(new)}{where}",
            "Keep shapes and slice bounds the same at every step: mask instead of slicing.",
        )
    what = f"`{operator}` of {operation.shape}"
    words = (
        f"the step computes {what}, and did not{when}" if is_new else f"the step computed {what}{when}, and does not"
    )
    return Cause(
        f"{words}{where}",
        "Run the same operators at every step: instead of branching, multiply by a 0 or 1 sent as a tensor.",
    )


def _operation_at(index: int, program: Sequence[Operation], other: Sequence[Operation]) -> Operation:
    """The first operation of a program from a place on that computes something which another program does not."""
    # Arguments of an operator come before it.
    found = program[index]
    if found.name in _TAKEN:
        known = {operation.structure for operation in other}
        later = (each for each in program[index:] if each.name not in _TAKEN and each.structure not in known)
        found = next(later, found)
    return found


def _other_number(
    before: Sequence[Operation], after: Sequence[Operation]
) -> tuple[Operation | None, Operation | None, Operation] | None:
    """
    Where two programs compute the same but for a number: what it is in each, `None` where it is a parameter, and the first operation
    that takes it. An operator more may stand between them where they differ first, as another takes numbers, too.
    """
    old, new = _computed(before), _computed(after)
    takes_it = next(
        (later for earlier, later in zip(old, new, strict=False) if earlier.structure != later.structure), None
    )
    if takes_it is None or [each.form for each in old] != [each.form for each in new]:
        return None
    constants = [Counter(each for each in program if each.name == "constant") for program in (before, after)]
    # An equal one may stand elsewhere, whose line would mislead.
    only_here = [next((replace(each, place=None) for each in constants[i] - constants[1 - i]), None) for i in (0, 1)]
    return (*only_here, takes_it) if any(only_here) else None


def _computed(program: Sequence[Operation]) -> list[Operation]:
    return [operation for operation in program if operation.name not in _TAKEN]


def _operator_of_one(before: Sequence[Operation], after: Sequence[Operation]) -> tuple[bool, Operation] | None:
    """
    The first operation that only one of two programs has, whatever numbers it takes, and whether that is the later program; an operator
    that only one has comes first. `None` where the same operation takes another number.
    """
    old, new = _computed(before), _computed(after)
    if (found := _only_in_one(old, new, _operator)) is not None:
        return found
    # What follows from another number, as the gradient of a power, is no branch.
    forms = [{each.structure: each.form for each in program if each.form} for program in (old, new)]
    gone, came = ({form for key, form in forms[i].items() if key not in forms[1 - i]} for i in (0, 1))
    return None if gone & came else _only_in_one(old, new, attrgetter("form"))


def _only_in_one(
    old: Sequence[Operation], new: Sequence[Operation], key: Callable[[Operation], Hashable]
) -> tuple[bool, Operation] | None:
    for is_new, program, other in ((True, new, old), (False, old, new)):
        known = set(map(key, other))
        if (found := next((each for each in program if key(each) not in known), None)) is not None:
            return is_new, found
    return None


def _operator(operation: Operation) -> str:
    return operation.operator or operation.name


def _compare_numbers(before: Sequence[Operation], after: Sequence[Operation], when: str) -> Cause | None:
    """The cause where two programs differ only in which of their operations take the same number."""
    uses = [_uses_of_numbers(program) for program in (before, after)]
    structures = [{operation.structure for operation in program} for program in (before, after)]
    old, new = (Counter(key for key, _ in each) for each in uses)
    if structures[0] != structures[1] or old == new:
        return None
    words = ("is", "was") if len(uses[0]) > len(uses[1]) else ("was", "is")
    changed = (old - new) | (new - old)
    places = [place for each in uses for key, of_number in each if key in changed for place in of_number]
    # The other number may be of a library, whose line would mislead.
    lines = sorted({describe_line(place) for place in places if package_of(place.file) is None})
    return Cause(
        f"a Python number {words[0]} equal to another number of the graph{when}, and {words[1]} not"
        + (f" [{', '.join(lines)}]" if lines else ""),
        "torch_xla gives equal numbers one parameter of the graph: send the value as a tensor, "
        "trainer.backend.send(torch.tensor(value)), or keep it constant.",
    )


def _uses_of_numbers(program: Sequence[Operation]) -> list[tuple[frozenset[int], list[SourceLine]]]:
    """For each number of a program, the operations that take it, and their lines, where they are known."""
    users = defaultdict(list)
    for operation in program:
        for number in operation.numbers:
            users[number].append(operation)
    return [
        (
            frozenset(one.structure for one in operations),
            [one.place for one in operations if one.place is not None],
        )
        for operations in users.values()
    ]


def _number(operation: Operation | None) -> str:
    return operation.details if operation is not None and operation.name == "constant" else "another value"


def _describe(operation: Operation) -> str:
    return f"{operation.shape} {operation.details}".strip()
