"""The layers of a model, and the pattern in which they repeat: layers that are the same but for the values of their parameters."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .static_kernels import find_transformers_model


_PLAIN = (bool, int, float, str, type(None))
# transformers' hooks that stay after hidden states were asked for once, and do nothing unless they are again.
_CAPTURES = "transformers.utils.output_capturing"


class Pattern(NamedTuple):
    """
    How layers repeat: `num_periods` times a period, from layer `first` on. A period is several runs of layers that
    are the same; `runs` has the number of layers of each.
    """

    first: int
    runs: tuple[int, ...]
    num_periods: int

    @property
    def period(self) -> int:
        """Layers of a period."""
        return sum(self.runs)

    @property
    def end(self) -> int:
        """The first layer after the last period."""
        return self.first + self.period * self.num_periods

    @property
    def numbers(self) -> list[list[int]]:
        """The layers of each run, in all periods."""
        firsts = accumulate(self.runs[:-1], initial=self.first)
        return [
            [number + place for number in range(first, self.end, self.period) for place in range(length)]
            for first, length in zip(firsts, self.runs, strict=True)
        ]


class CalledLayers(nn.ModuleList):
    """To a model its list of layers: what it calls for each of them is `call_layer`, which a subclass has, with its number."""

    def __init__(self, layers: Sequence[nn.Module]):
        super().__init__()
        self._layers = list(layers)

    def call_layer(self, number: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run a layer of the model."""
        raise NotImplementedError

    @property
    def layers(self) -> list[nn.Module]:
        """The layers themselves."""
        return self._layers

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator["_Call"]:
        return (_Call(self, number) for number in range(len(self)))

    def __getitem__(self, index: int | slice) -> "_Call | list[_Call]":
        return list(self)[index]


class _Call:
    """A layer, whose calls go to the list of layers."""

    def __init__(self, owner: CalledLayers, number: int):
        self._owner, self._number = owner, number

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._owner.call_layer(self._number, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Some models ask a layer which of the masks it is to be called with.
        return getattr(self._owner.layers[self._number], name)


def find_layers(model: nn.Module) -> tuple[nn.Module, str] | None:
    """
    Find the module that has the layers of a model, and under which name, if there is one list of layers. Of a model of text and
    images, it is that of the text.
    """
    whole = find_transformers_model(model)
    if (
        whole is not None
        and whole.config.get_text_config() is not whole.config
        and not whole.config.is_encoder_decoder
    ):
        model = whole.get_decoder()
    lists = [
        (module, name)
        for module in model.modules()
        for name, child in module.named_children()
        if isinstance(child, nn.ModuleList) and len(child) and isinstance(child[0], GradientCheckpointingLayer)
    ]
    return lists[0] if len(lists) == 1 else None


def find_patterns(length: int, differ: Callable[[int, int], str | None]) -> list[Pattern]:
    """
    Find the patterns of so many layers that leave the fewest to be compiled: those of a period that repeats, and
    runs of the same layer before and after. None where nothing repeats. `differ` says how a layer differs from an
    earlier one, given the numbers of both.
    """
    first_of_kind: list[int] = []
    kinds: list[int] = []
    for number in range(length):
        kind = next((kind for kind, first in enumerate(first_of_kind) if differ(first, number) is None), None)
        if kind is None:
            kind = len(first_of_kind)
            first_of_kind.append(number)
        kinds.append(kind)
    candidates = [
        [*_runs(kinds[:first], 0), pattern_of_period, *_runs(kinds[pattern_of_period.end :], pattern_of_period.end)]
        for period in range(1, length // 2 + 1)
        for first in range(length - 2 * period + 1)
        if (num_periods := _count_periods(kinds[first:], period)) > 1
        and (pattern_of_period := Pattern(first, _lengths(kinds[first : first + period]), num_periods))
    ]
    fewest = min(candidates, key=lambda patterns: sum(len(pattern.runs) for pattern in patterns), default=[])
    return [pattern for pattern in fewest if pattern.end > pattern.first + 1]


def _lengths(kinds: list[int]) -> tuple[int, ...]:
    """How often each kind comes before the next one."""
    return tuple(len(list(same)) for _, same in groupby(kinds))


def _runs(kinds: list[int], first: int) -> Iterator[Pattern]:
    """Each run by itself."""
    for length in _lengths(kinds):
        yield Pattern(first, (length,), 1)
        first += length


def _count_periods(kinds: list[int], period: int) -> int:
    num_periods = 1
    while kinds[num_periods * period : (num_periods + 1) * period] == kinds[:period]:
        num_periods += 1
    return num_periods


def why_no_loop(layers: Sequence[nn.Module], hook: Callable | None = None) -> str | None:
    """Why layers cannot run as a loop, whatever repeats. The forward `hook` may be on all of them."""
    owners: dict[int, str] = {}
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters(remove_duplicate=False):
            place = f"{name} of layer {index}"
            if owners.setdefault(id(parameter), place) is not place:
                return f"{place} is also {owners[id(parameter)]}"
        for name, module in layer.named_modules():
            hooks = [
                *module._forward_hooks.values(),
                *module._forward_pre_hooks.values(),
                *module._backward_hooks.values(),
                *module._backward_pre_hooks.values(),
            ]
            if any(other != hook and other.__module__ != _CAPTURES for other in hooks):
                return f"a hook is registered on {name or 'the whole'} of layer {index}"
            if any(buffer.dtype == torch.bool for buffer in module.buffers(recurse=False)):
                # In a loop of torch_xla, they become int64.
                return f"{name or 'the whole'} of layer {index} has buffers of bool"
            if any(isinstance(value, Tensor) for value in vars(module).values()):
                return f"{name or 'the whole'} of layer {index} has tensors that are neither parameters nor buffers"
    return None


def why_layers_differ(layers: Sequence[nn.Module], patterns: Sequence[Pattern]) -> str | None:
    """Why layers of patterns cannot run as loops any more: what differs."""
    for pattern in patterns:
        for first, *others in pattern.numbers:
            for number in others:
                if (reason := why_layer_differs(layers, first, number)) is not None:
                    return reason
    return None


def why_layer_differs(layers: Sequence[nn.Module], earlier: int, index: int) -> str | None:
    """How a layer differs from an earlier one, by their modules, settings and parameters."""
    first, traits = _traits(layers[earlier]), _traits(layers[index])
    if traits.keys() != first.keys():
        return f"layer {index} has other modules than layer {earlier}"
    for name, trait in traits.items():
        if trait != first[name]:
            return f"{name or 'the whole'} of layer {index} differs from that of layer {earlier}"
    return None


def _traits(layer: nn.Module) -> dict[str, tuple]:
    """What has to be the same of each module."""
    return {
        name: (
            type(module),
            {key: value for key, value in vars(module).items() if _is_setting(value) and key != "layer_idx"},
            [
                (key, weight.shape, weight.dtype, weight.requires_grad)
                for key, weight in (
                    *module.named_parameters(recurse=False),
                    *module.named_buffers(recurse=False, remove_duplicate=False),
                )
            ],
        )
        for name, module in layer.named_modules()
    }


def _is_setting(value: Any) -> bool:
    """Whether an attribute is a number, a string or a collection of them. Deeper ones name the place of their module."""
    if isinstance(value, (dict, list, tuple, set)):
        return all(isinstance(item, _PLAIN) for item in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, _PLAIN)
