"""What a program depends on besides the tensors that it is given: noted once, then compared before each run of the program."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from itertools import compress
from operator import attrgetter, eq, is_, ne
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import dict_version

from ..backends.base import Backend
from ..backends.compiled_function import CompiledFunction
from ..formatting import dtype_name, format_value
from .running_code import RunningCode


_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, Enum, torch.dtype, torch.device)
# Compared by identity alone: [`RunningCode`] finds what the user's code does.
_CODE = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType)
_OF_MODULES = ("_modules", "_parameters", "_buffers")
# PyTorch's own attributes of every module, which stay the same dicts. Most modules have little else.
_FIXED = set(vars(nn.Module())) - {"training", *_OF_MODULES}
#: Where a module keeps its hooks.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_PARAMETERS = attrgetter("requires_grad", "dtype", "_backward_hooks", "_post_accumulate_grad_hooks")
# Objects of this package know by themselves what a step depends on, except settings.
_OURS = "hf_tpu_ext."
_COLLECTIONS = (dict, list, tuple, set, frozenset)
# How an entry is named.
_ATTRIBUTE, _ENTRY = "{}.{}", "{}[{!r}]"
_ABSENT = object()


def _counts_attributes() -> bool:
    """Whether an attribute that is set counts as a write to the dict of its object. In CPython 3.13.0 it does not."""
    module = nn.Module()
    before = dict_version(vars(module))
    module.training = False
    return dict_version(vars(module)) != before


COUNTS_ATTRIBUTES = _counts_attributes()


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a string or the like, or a collection of them."""
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    if isinstance(value, _COLLECTIONS):
        return all(map(is_plain, value))
    return isinstance(value, _PLAIN)


class Reach(NamedTuple):
    """
    What Python may read in a program.

    Args:
        roots (`Mapping[str, Any]`, *optional*):
            Objects to begin at, by the names that people are shown. All that can be reached from them through attributes and
            containers is compared.
        attributes (`Mapping[str, tuple[Any, Iterable[str]]]`, *optional*):
            Further objects, of which only the attributes that are named are looked at.
        namespaces (`Mapping[str, Mapping[str, Any]]`, *optional*):
            Names of classes and modules. What they stand for is compared, and not looked into.
    """

    roots: Mapping[str, Any] = {}
    attributes: Mapping[str, tuple[Any, Iterable[str]]] = {}
    namespaces: Mapping[str, Mapping[str, Any]] = {}


class Fingerprint:
    """
    What a program depends on besides tensors: all that Python may read in it, and settings.

    CPython counts the writes to a dict, and PyTorch's compiler reads the count for guards of its own. Nearly everything is in
    dicts: only what is in those that were written to is compared, and where a value is another object, whether it is equal.
    A Python that does not count attributes has all of them compared.

    Args:
        find_reach (`Callable[[], Reach]`, *optional*):
            Finds what Python may read, whenever it is noted. By default nothing.
        models (`Sequence[torch.nn.Module]`, *optional*):
            The model that a program trains or evaluates, then those that it runs beside it. It is given their tensors.
        memory_of (`Callable[[list[torch.Tensor]], Any]`, *optional*):
            Tells the memory of other tensors apart. Without it, all tensors are given to the program.
        settings (`Callable[[], dict[str, Any]]`, *optional*):
            What else it depends on, to be compared, by the names that people are shown.
        why_not (`Callable[[], str | None]`, *optional*):
            Says, after a change, why code has to run at each step, as a clause.
        training (`bool`, *optional*, defaults to `False`):
            Whether the first model is in training.
        trusts_code (`bool`, *optional*, defaults to `False`):
            Whether code of the user's does the same at every step.
    """

    def __init__(
        self,
        find_reach: Callable[[], Reach] = Reach,
        models: Sequence[nn.Module] = (),
        memory_of: Callable[[list[Tensor]], Any] | None = None,
        settings: Callable[[], dict[str, Any]] = dict,
        why_not: Callable[[], str | None] = lambda: None,
        training: bool = False,
        trusts_code: bool = False,
    ):
        self._find_reach, self._models, self._memory_of = find_reach, models, memory_of
        self._settings, self._training = settings, training
        self.why_not, self._trusts_code = why_not, trusts_code
        #: Code of the user's that ran in a trace, as a clause.
        self.code: str | None = None
        #: The parameters and buffers of the models, as they were noted.
        self.tensors: list[Tensor] = []

    @contextmanager
    def trace(self) -> Iterator[None]:
        """Context of a trace, in which code of the user's is noted."""
        if self._trusts_code:
            yield
            return
        running = RunningCode()
        with running:
            yield
        if running.user_code is not None:
            self.code = f"{running.user_code}; step_replay=True if it does the same at every step"

    # ---- Noting ----

    def note(self) -> None:
        """Note everything as it is now."""
        self._set_mode()
        self._reach = self._find_reach()
        tensors = (tensor for model in self._models for tensor in (*model.parameters(), *model.buffers()))
        self.tensors = [*dict.fromkeys(tensors)]
        self._tensor_ids = set(map(id, self.tensors))
        self._note_python()
        self._settings_before = self._settings()

    def _set_mode(self) -> None:
        for model in self._models[:1]:
            model.train(self._training)

    def _note_python(self) -> None:
        # By identity: the name that people are shown, and how an entry's is made of it.
        self._names: dict[int, tuple[str, str]] = {}
        # Collections without entries, which are compared by that alone.
        self._empty: list[dict | list] = []
        # Of the dicts with the attributes of a module, whether it is a module of this package.
        self._of_modules: dict[int, bool] = {}
        self._dicts: list[dict] = []
        # Where writes are not counted: what people are shown, and what reads the entries.
        self._readers: list[tuple[str, str, Callable[[], dict | tuple]]] = []
        self._sets: list[tuple[str, set, frozenset]] = []
        self._arrays: list[tuple[str, np.ndarray, np.ndarray]] = []
        self._modules: list[nn.Module] = []
        self._parameters: dict[int, nn.Parameter] = {}
        self._tensors: dict[int, tuple[str, Tensor]] = {}
        for name, root in self._reach.roots.items():
            self._visit(root, name)
        for owner, (value, names) in self._reach.attributes.items():
            entries = vars(value)
            self._readers.append((owner, _ATTRIBUTE, partial(_pick, entries, names)))
            for name in names:
                self._visit(entries.get(name), f"{owner}.{name}")
        for name, namespace in self._reach.namespaces.items():
            # The dict whose writes are counted: that of a class is shown through a proxy.
            is_proxy = isinstance(namespace, MappingProxyType)
            entries = gc.get_referents(namespace)[0] if is_proxy else namespace
            self._names[id(entries)] = name, _ATTRIBUTE
            self._dicts.append(entries)
        for parameter in self._parameters.values():
            for hooks in _OF_PARAMETERS(parameter)[2:]:
                self._visit(hooks, "the hooks of a parameter")
        # Whether a collection was replaced by one that is equal to it, and that is to be watched from now on.
        self._is_outdated = False
        self._writes = list(map(dict_version, self._dicts))
        self._entries = list(map(self._select_entries, self._dicts))
        self._reader_entries = [read() for _, _, read in self._readers]
        self._classes = list(map(type, self._modules))
        self._of_parameters = list(map(_OF_PARAMETERS, self._parameters.values()))
        self._of_tensors = self._of_tensors_now()

    def _visit(self, value: Any, name: str) -> None:
        if isinstance(value, _PLAIN) or isinstance(value, _CODE):
            return
        if isinstance(value, Tensor):
            if isinstance(value, nn.Parameter):
                self._parameters[id(value)] = value
                self._names.setdefault(id(value), (name, ""))
            if self._memory_of is not None and id(value) not in self._tensor_ids:
                self._tensors.setdefault(id(value), (name, value))
        elif isinstance(value, (tuple, frozenset)):
            for item in value:
                self._visit(item, name)
        elif id(value) not in self._names:
            self._names[id(value)] = name, ""
            self._visit_inside(value, name)

    def _visit_inside(self, value: Any, name: str) -> None:
        if isinstance(value, dict):
            self._visit_entries(value, name, _ENTRY)
        elif isinstance(value, list):
            self._names[id(value)] = name, _ENTRY
            if value:
                self._readers.append((name, _ENTRY, partial(tuple, value)))
            else:
                self._empty.append(value)
            for index, item in enumerate(value):
                self._visit(item, f"{name}[{index}]")
        elif isinstance(value, set):
            self._sets.append((name, value, frozenset(value)))
        elif isinstance(value, np.ndarray):
            self._arrays.append((name, value, value.copy()))
        elif isinstance(value, partial):
            self._visit((value.args, value.keywords), name)
        elif isinstance(value, nn.Module):
            self._visit_module(value, name)
        elif type(value).__dictoffset__ and (is_dataclass(value) or not type(value).__module__.startswith(_OURS)):
            self._visit_entries(vars(value), name, _ATTRIBUTE)

    def _visit_module(self, module: nn.Module, name: str) -> None:
        attributes = vars(module)
        self._modules.append(module)
        self._of_modules[id(attributes)] = type(module).__module__.startswith(_OURS)
        self._dicts.append(attributes)
        self._visit_items(attributes, name, _ATTRIBUTE, [*self._select_entries(attributes), *HOOKS])

    def _select_entries(self, entries: dict[Any, Any]) -> dict[Any, Any]:
        """The entries of a dict that matter. Of the modules of this package, attributes that are their own do not."""
        ours = self._of_modules.get(id(entries))
        if ours is None:
            return dict(entries)
        return {
            name: value
            for name, value in entries.items()
            if name in _OF_MODULES or not (name in _FIXED or (ours and name.startswith("_")))
        }

    def _visit_entries(self, entries: dict, name: str, form: str) -> None:
        if not entries:
            self._empty.append(entries)
        elif type(entries) is dict:
            self._dicts.append(entries)
        else:
            # One that keeps an order of its own may be reordered without a write.
            self._readers.append((name, form, partial(dict, entries)))
        self._visit_items(entries, name, form, entries)

    def _visit_items(self, entries: dict, name: str, form: str, keys: Iterable[Any]) -> None:
        self._names[id(entries)] = name, form
        for key in keys:
            if key in _OF_MODULES and isinstance(entries[key], dict):
                # An attribute of the module, to people.
                self._visit_entries(entries[key], name, form)
            else:
                self._visit(entries[key], form.format(name, key))

    # ---- Comparing ----

    def _of_tensors_now(self) -> tuple[list[int], Any]:
        tensors = [tensor for _, tensor in self._tensors.values()]
        return [tensor._version for tensor in tensors], self._memory_of(tensors) if tensors else None

    def change(self) -> str | None:
        """What has changed since it was noted, as a clause."""
        change = self._change_of_python()
        if change is not None:
            # Upstream calls `model.train()` at each step, which may undo the change.
            self._set_mode()
            change = self._change_of_python()
        if change is None and (now := self._settings()) != self._settings_before:
            change = (
                " and ".join(name for name, value in now.items() if value != self._settings_before[name]) + " changed"
            )
        return change

    def _change_of_python(self) -> str | None:
        change = self._changed_entry() or self._changed_set_or_tensor()
        if change is None and self._is_outdated:
            # Not before: sets and tensors are compared with what was noted.
            self._note_python()
        return change

    def _changed_entry(self) -> str | None:
        for entries in filter(None, self._empty):
            return _compare(*self._names[id(entries)], _by_key(entries), {})
        writes = list(map(dict_version, self._dicts))
        places: Iterable[int] = range(len(writes))
        if COUNTS_ATTRIBUTES:
            places = [] if writes == self._writes else compress(places, map(ne, writes, self._writes))
        changes = []
        for place in places:
            if (change := self._changed_dict(place)) is None:
                self._writes[place] = writes[place]
            else:
                changes.append(change)
        if changes:
            return _first_of(changes)
        for place, (name, form, read) in enumerate(self._readers):
            now, before = read(), self._reader_entries[place]
            if _is_same(now, before):
                continue
            entries, earlier = _by_key(now), _by_key(before)
            if (change := _compare(name, form, entries, earlier)) is not None:
                return change
            self._reader_entries[place] = now
            self._is_outdated |= _has_other_collections(entries, earlier)
        classes = list(map(type, self._modules))
        if classes != self._classes:
            changes = zip(self._modules, classes, self._classes, strict=True)
            module, now, earlier = next(change for change in changes if change[1] is not change[2])
            return f"`{self._names[id(module)][0]}` was a {earlier.__name__}, is a {now.__name__}"
        return None

    def _changed_dict(self, place: int) -> str | None:
        """Compare a dict that was written to."""
        entries, earlier = self._select_entries(self._dicts[place]), self._entries[place]
        change = _compare(*self._names[id(self._dicts[place])], entries, earlier)
        if change is None:
            self._entries[place] = entries
            self._is_outdated |= _has_other_collections(entries, earlier)
        return change

    def _changed_set_or_tensor(self) -> str | None:
        for name, members, earlier in self._sets:
            if members != earlier:
                return f"`{name}` was {format_value(earlier)}, is {format_value(members)}"
        for name, array, earlier in self._arrays:
            if not np.array_equal(array, earlier):
                return f"`{name}` has other numbers"
        # One at a time: many new tuples would have the garbage collector run.
        if not all(map(eq, map(_OF_PARAMETERS, self._parameters.values()), self._of_parameters)):
            changes = [
                f"`{self._names[id(parameter)][0]}` {_describe_change(*earlier[:2], *now[:2])}"
                for parameter, earlier in zip(self._parameters.values(), self._of_parameters, strict=True)
                if (now := _OF_PARAMETERS(parameter))[:2] != earlier[:2]
            ]
            if changes:
                return _first_of(changes)
            return "a hook of a parameter was registered"
        versions, memory = self._of_tensors_now()
        if (versions, memory) == self._of_tensors:
            return None
        names = [name for name, _ in self._tensors.values()]
        changed_names = [
            name for name, now, earlier in zip(names, versions, self._of_tensors[0], strict=True) if now != earlier
        ]
        return f"the tensor `{changed_names[0] if changed_names else '` or `'.join(names)}` has other numbers"


def compile_alone(
    backend: Backend, model: nn.Module, function: Callable[..., Any], state: Callable[[], list[Tensor]] = list
) -> CompiledFunction:
    """Compile a function that depends on a model in evaluation mode and on `state`, outside of a trainer."""
    fingerprint = Fingerprint(lambda: Reach({"model": model}), [model], backend.programs.memory_of)
    return backend.programs.compile(function, state, fingerprint, backend.programs.real_copies())


def _by_key(entries: dict[Any, Any] | list | tuple) -> dict[Any, Any]:
    """Entries by what they are found with: those of a list by their number."""
    return entries if isinstance(entries, dict) else dict(enumerate(entries))


def _pick(entries: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: entries.get(name, _ABSENT) for name in names}


def _is_same(entries: dict[Any, Any] | tuple, earlier: dict[Any, Any] | tuple) -> bool:
    """Whether the entries, and their keys, are the same objects. There may be hundreds, and mostly they are."""
    if len(entries) != len(earlier):
        return False
    if isinstance(entries, tuple):
        return all(map(is_, entries, earlier))
    return all(map(is_, entries, earlier)) and all(map(is_, entries.values(), earlier.values()))


def _first_of(changes: list[str]) -> str:
    return changes[0] + (f" (and {len(changes) - 1} more)" if len(changes) > 1 else "")


def _describe_change(was_trained: bool, dtype: torch.dtype, is_trained: bool, other: torch.dtype) -> str:
    if was_trained != is_trained:
        return "was frozen, is trained" if is_trained else "was trained, is frozen"
    return f"was {dtype_name(dtype)}, is {dtype_name(other)}"


def _has_other_collections(entries: Mapping[Any, Any], earlier: Mapping[Any, Any]) -> bool:
    return any(value is not earlier[key] and isinstance(value, _COLLECTIONS) for key, value in entries.items())


def _compare(owner: str, form: str, entries: Mapping[Any, Any], earlier: Mapping[Any, Any]) -> str | None:
    for key, before in earlier.items():
        now = entries.get(key, _ABSENT)
        if now is before:
            continue
        are_plain = is_plain(now) and is_plain(before)
        # The text tells `[1, 2]` from `[1.0, 2]`, which are equal.
        if are_plain and type(now) is type(before) and now == before and repr(now) == repr(before):
            continue
        name = f"`{form.format(owner, key)}`"
        if now is _ABSENT or before is _ABSENT:
            return f"{name} was {'removed' if now is _ABSENT else 'added'}"
        if are_plain:
            return f"{name} was {format_value(before)}, is {format_value(now)}"
        return f"{name} was replaced"
    for key in entries:
        if key not in earlier:
            return f"`{form.format(owner, key)}` was added"
    return None
