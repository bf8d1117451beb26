"""What Python code could read while a step is traced, besides the tensors that a step is given: noted once, then compared."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from itertools import chain, islice
from operator import attrgetter, eq, is_, itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic, Enum, torch.dtype, torch.device)
# What they do is asked elsewhere; here it matters which one it is.
_CODE = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType)
_OF_MODULES = ("_modules", "_parameters", "_buffers")
# PyTorch's own attributes of every module, which stay the same dicts. Most modules have little else.
_FIXED = set(vars(nn.Module())) - {"training", *_OF_MODULES}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_PARAMETERS = attrgetter("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
# Objects of this package know by themselves what a step depends on, except settings.
_OURS = "hf_tpu_ext."
_COLLECTIONS = (dict, list, tuple, set, frozenset)
# How an entry is named.
_ATTRIBUTE, _ENTRY = "{}.{}", "{}[{!r}]"
_ABSENT = object()
_LONGEST = 80


def host_random_state() -> tuple:
    """State of the random number generators of Python, NumPy and PyTorch on the host, to be compared."""
    _, keys, *rest = np.random.get_state()
    return random.getstate(), keys.tobytes(), rest, torch.get_rng_state().numpy().tobytes()


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a string or the like, or a collection of them."""
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(is_plain, value))
    return isinstance(value, _PLAIN)


class PythonState:
    """
    Everything that can be reached from some objects through attributes and containers.

    The identity of every value is compared, in loops that run in C. Only where one is another object are values looked at.

    Args:
        roots (`Mapping[str, Any]`):
            Objects to begin at, by the names that people are shown.
        attributes (`Mapping[str, tuple[Any, Iterable[str]]]`):
            Further objects, of which only the attributes that are named are looked at.
        namespaces (`Mapping[str, Mapping[str, Any]]`):
            Names of classes and modules. What they stand for is compared, and not looked into.
        given (`Iterable[torch.Tensor]`):
            Tensors whose values a step is given, and that may change.
        memory_of (`Callable[[list[torch.Tensor]], Any]`):
            Tells the memory of tensors apart.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        attributes: Mapping[str, tuple[Any, Iterable[str]]],
        namespaces: Mapping[str, Mapping[str, Any]],
        given: Iterable[Tensor],
        memory_of: Callable[[list[Tensor]], Any],
    ):
        self._roots = dict(roots)
        self._attributes = [(name, vars(value), tuple(names)) for name, (value, names) in attributes.items()]
        self._namespaces = list(namespaces.values())
        self._of_namespaces = {id(entries): (name, _ATTRIBUTE) for name, entries in namespaces.items()}
        self._given = {id(tensor) for tensor in given}
        self._memory_of = memory_of
        self._note()

    # ---- Noting ----

    def _note(self) -> None:
        # By identity: the name that people are shown, and how an entry's is made of it.
        self._names: dict[int, tuple[str, str]] = dict(self._of_namespaces)
        self._empty: list[dict | list] = []
        # Attributes of modules, by the names of those that may be replaced.
        self._attributes_of_modules: dict[tuple[str, ...], list[dict]] = {}
        self._ours: set[int] = set()
        self._dicts: list[dict] = []
        # Those of the dicts whose keys are not names of attributes: a value may go to another key.
        self._keyed: list[dict] = []
        self._lists: list[list] = []
        self._sets: list[tuple[str, set, frozenset]] = []
        self._arrays: list[tuple[str, np.ndarray, np.ndarray]] = []
        self._modules: list[nn.Module] = []
        self._parameters: dict[int, nn.Parameter] = {}
        self._tensors: dict[int, tuple[str, Tensor]] = {}
        for name, root in self._roots.items():
            self._visit(root, name)
        for owner, entries, names in self._attributes:
            for name in names:
                self._visit(entries.get(name), f"{owner}.{name}")
        for parameter in self._parameters.values():
            _, *hooks = _OF_PARAMETERS(parameter)
            self._visit(hooks, "the hooks of a parameter")
        self._note_values()
        self._of_parameters = list(map(_OF_PARAMETERS, self._parameters.values()))
        self._of_tensors = self._of_tensors_now()

    def _note_values(self) -> None:
        self._sizes = list(map(len, self._containers()))
        self._keys = list(self._keys_now())
        self._keys_of_keyed = list(chain.from_iterable(self._keyed))
        self._values = list(self._values_now())
        self._identities = _identities(self._values)

    def _visit(self, value: Any, name: str) -> None:
        if isinstance(value, _PLAIN) or isinstance(value, _CODE):
            return
        if isinstance(value, Tensor):
            if isinstance(value, nn.Parameter):
                self._parameters[id(value)] = value
            if id(value) not in self._given:
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
            (self._lists if value else self._empty).append(value)
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
        if type(module).__module__.startswith(_OURS):
            self._ours.add(id(attributes))
        watched = self._watched(attributes)
        self._attributes_of_modules.setdefault(tuple(watched), []).append(attributes)
        self._visit_items(attributes, name, _ATTRIBUTE, [*watched, *_HOOKS])

    def _watched(self, attributes: dict[str, Any]) -> dict[str, Any]:
        """The attributes of a module that may be replaced. Of this package's modules, those that are their own are left out."""
        ours = id(attributes) in self._ours
        return {
            name: value
            for name, value in attributes.items()
            if name in _OF_MODULES or not (name in _FIXED or (ours and name.startswith("_")))
        }

    def _visit_entries(self, entries: dict, name: str, form: str) -> None:
        (self._dicts if entries else self._empty).append(entries)
        if entries and form is _ENTRY:
            self._keyed.append(entries)
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

    def _containers(self) -> Iterator[Any]:
        return chain(
            chain.from_iterable(self._attributes_of_modules.values()), self._dicts, self._namespaces, self._lists
        )

    def _keys_now(self) -> Iterator[Any]:
        return chain.from_iterable(chain(self._dicts, self._namespaces))

    def _values_now(self) -> Iterator[Any]:
        # A single chain over all of them: each takes some nanoseconds for every value.
        return chain.from_iterable(
            chain(
                chain.from_iterable(
                    map(itemgetter(*names), group) for names, group in self._attributes_of_modules.items()
                ),
                map(dict.values, self._dicts),
                # Those of classes are no dicts.
                (entries.values() for entries in self._namespaces),
                self._lists,
                ([entries.get(name, _ABSENT) for name in names] for _, entries, names in self._attributes),
                (map(type, self._modules),),
            )
        )

    def _of_tensors_now(self) -> tuple[list[int], Any]:
        tensors = [tensor for _, tensor in self._tensors.values()]
        return [tensor._version for tensor in tensors], self._memory_of(tensors) if tensors else None

    def change(self) -> str | None:
        """Compare with what was noted. Returns what has changed, as half a sentence."""
        if self._is_as_noted():
            return self._changed_trait()
        change = self._changed_entry() or self._changed_trait()
        if change is None:
            # Something was replaced by what is equal to it.
            replaced = [now for now, noted in zip(self._values_now(), self._values, strict=True) if now is not noted]
            if any(isinstance(value, _COLLECTIONS) for value in replaced):
                self._note()
            else:
                self._note_values()
        return change

    def _is_as_noted(self) -> bool:
        if any(self._empty) or list(map(len, self._containers())) != self._sizes:
            return False
        try:
            same_values = np.array_equal(_identities(self._values_now(), len(self._values)), self._identities)
        except KeyError:
            # An attribute of a module has another name.
            return False
        return same_values and all(map(is_, chain.from_iterable(self._keyed), self._keys_of_keyed))

    def _changed_entry(self) -> str | None:
        for entries in filter(None, self._empty):
            return _compare(*self._names[id(entries)], entries, {})
        keys, values, sizes = iter(self._keys), iter(self._values), iter(self._sizes)
        for names, group in self._attributes_of_modules.items():
            for entries in group:
                noted = dict(zip(names, islice(values, len(names)), strict=True))
                change = _compare(*self._names[id(entries)], self._watched(entries), noted)
                if change is not None:
                    return change
                next(sizes)
        for entries, size in zip(chain(self._dicts, self._namespaces, self._lists), sizes, strict=True):
            if isinstance(entries, list):
                now, noted = dict(enumerate(entries)), dict(enumerate(islice(values, size)))
            else:
                now, noted = entries, dict(zip(islice(keys, size), islice(values, size), strict=True))
            change = _compare(*self._names[id(entries)], now, noted)
            if change is not None:
                return change
        for owner, entries, names in self._attributes:
            noted = dict(zip(names, islice(values, len(names)), strict=True))
            change = _compare(owner, _ATTRIBUTE, {name: entries.get(name, _ABSENT) for name in names}, noted)
            if change is not None:
                return change
        for module, cls in zip(self._modules, values, strict=True):
            if type(module) is not cls:
                return f"{self._names[id(module)][0]} is a {type(module).__name__}, and was a {cls.__name__}"
        return None

    def _changed_trait(self) -> str | None:
        for name, members, noted in self._sets:
            if members != noted:
                return f"{name} is {_show(members)}, and was {_show(noted)}"
        for name, array, noted in self._arrays:
            if not np.array_equal(array, noted):
                return f"{name} has other numbers"
        # One at a time: many new tuples would have the garbage collector run.
        if not all(map(eq, map(_OF_PARAMETERS, self._parameters.values()), self._of_parameters)):
            trained = [parameter.requires_grad for parameter in self._parameters.values()]
            if trained != [noted for noted, *_ in self._of_parameters]:
                return "a parameter was frozen or unfrozen"
            return "a hook of a parameter was registered"
        versions, memory = self._of_tensors_now()
        if (versions, memory) == self._of_tensors:
            return None
        names = [name for name, _ in self._tensors.values()]
        changed = [name for name, now, noted in zip(names, versions, self._of_tensors[0], strict=True) if now != noted]
        return f"the tensor {changed[0] if changed else ' or '.join(names)} has other numbers"


def _identities(values: Iterable[Any], count: int = -1) -> np.ndarray:
    """The addresses of values, in order: half the time of comparing them one by one."""
    return np.frombuffer(np.fromiter(values, dtype=object, count=count), dtype=np.intp)


def _compare(owner: str, form: str, entries: Mapping[Any, Any], noted: Mapping[Any, Any]) -> str | None:
    for key, before in noted.items():
        now = entries.get(key, _ABSENT)
        if now is before or _is_equal(now, before):
            continue
        name = form.format(owner, key)
        if now is _ABSENT or before is _ABSENT:
            return f"{name} was {'removed' if now is _ABSENT else 'added'}"
        if is_plain(now) and is_plain(before):
            return f"{name} is {_show(now)}, and was {_show(before)}"
        return f"{name} was replaced"
    for key in entries:
        if key not in noted:
            return f"{form.format(owner, key)} was added"
    return None


def _is_equal(now: Any, noted: Any) -> bool:
    return type(now) is type(noted) and is_plain(now) and is_plain(noted) and now == noted


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
