"""What a model calls its layers with and what each computes, found by a forward pass that is recorded and not run."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves
from transformers import PreTrainedModel

from ..backends.base import Backend
from .attention import static_masks, without_kernels
from .layer_list import CalledLayers
from .random_numbers import RandomNumbers


# Tokens of a row. Nothing is computed with them.
_LENGTH = 16
# Elements of a tensor on the host whose values are compared.
_MOST_ELEMENTS = 64


class LayerTraces:
    """
    The functions that the layers of a model are, as one forward pass has recorded them on a device that records
    operators. `refusal` says why there is nothing to compare.

    `place` is the module that has the layers, and under which name; `dtype` what autocast computes in. `is_routed`
    says that the model will be asked for the logits of its routers, whatever its configuration is.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        place: tuple[nn.Module, str],
        backend: Backend,
        dtype: torch.dtype | None,
        is_routed: bool = False,
    ):
        parent, name = place
        self._recorder = recorder = _Recorder(parent._modules[name], backend)
        takes = inspect.signature(model.forward).parameters
        if "input_ids" not in takes:
            self.refusal: str | None = f"{type(model).__name__} takes other inputs than text"
            return
        rows = torch.zeros((backend.num_chips, _LENGTH), dtype=torch.int64, device=backend.device)
        settings = {"use_cache": False, **({"output_router_logits": True} if is_routed else {})}
        inputs = {"input_ids": rows, **{name: value for name, value in settings.items() if name in takes}}
        layers, parent._modules[name] = parent._modules[name], recorder
        try:
            with (
                # For what layers are called with to say whether it gets a gradient.
                torch.enable_grad(),
                # Nothing that is drawn here changes what is drawn later.
                torch.random.fork_rng(devices=[]),
                RandomNumbers(recorder.seed),
                without_kernels(backend),
                static_masks(),
                backend.autocast(dtype),
            ):
                model(**inputs)
            self.refusal = recorder.refusal or "the model does not call all of its layers, one after the other"
        except _LayersDone:
            self.refusal = recorder.refusal
        except Exception as error:
            # Code of any family, which may need more inputs than these: layers are unrolled then, and the run goes on.
            self.refusal = f"{type(model).__name__} cannot be traced with text alone ({type(error).__name__}: {error})"
        finally:
            parent._modules[name] = layers

    def why_differs(self, earlier: int, number: int) -> str | None:
        """How the function that a layer is differs from that of an earlier one, its parameters aside."""
        functions = self._recorder.functions
        (arguments, operators), (earlier_arguments, earlier_operators) = functions[number], functions[earlier]
        for name in {**earlier_arguments, **arguments}:
            if name not in arguments or name not in earlier_arguments or arguments[name] != earlier_arguments[name]:
                return f"layer {number} is called with another {name} than layer {earlier}"
        if operators != earlier_operators:
            return f"layer {number} computes something else than layer {earlier}"
        return None


class _LayersDone(Exception):
    """The last layer has run: what a model computes after it is of no interest."""


class _Recorder(CalledLayers):
    """Layers that run as they do, and whose operators are recorded."""

    def __init__(self, layers: nn.ModuleList, backend: Backend):
        super().__init__(layers)
        # transformers registers its hooks when a model first collects something.
        for number, layer in enumerate(layers):
            self.add_module(str(number), layer)
        #: Of the random numbers.
        self.seed = torch.zeros((), dtype=torch.int32, device=backend.device)
        self.refusal: str | None = None
        # For each layer what it is called with, and what it computes.
        self.functions: list[tuple[dict[str, Any], list]] = []
        # Tensors are known by their identity, which holds as long as they live.
        self._alive: list[Tensor] = []
        self._output: Tensor | None = None

    def call_layer(self, number: int, *args: Any, **kwargs: Any) -> Tensor:
        self.refusal = self._why_refused(number, args)
        if self.refusal is not None:
            raise _LayersDone
        hidden, *rest = args
        leaves, structure = tree_flatten_with_path((rest, kwargs))
        arguments: dict[str, Any] = {"structure of arguments": structure}
        operators = _Operators(self.seed.device)
        operators.name(hidden, "hidden")
        layer = self._layers[number]
        for name, parameter in (*layer.named_parameters(), *layer.named_buffers()):
            operators.name(parameter, name)
        buffers = _versions(layer)
        for path, leaf in leaves:
            name = keystr(path[1:]).strip("[]'").replace("']", "").replace("[", ".")
            arguments[name] = (Tensor, id(leaf)) if isinstance(leaf, Tensor) else leaf
            if isinstance(leaf, Tensor):
                # It is kept with its name, so that no other gets its id.
                operators.name(leaf, f"argument {name}")
                if leaf.requires_grad:
                    self.refusal = f"layers are called with {name}, which gets a gradient"
                    raise _LayersDone
        # Each layer draws the same.
        with torch.no_grad(), RandomNumbers(self.seed), operators:
            # Not its own `__call__`, which checkpoints activations.
            self._output = nn.Module.__call__(layer, *args, **kwargs)
        self.functions.append((arguments, operators.operators))
        self._alive += operators.alive
        if not isinstance(self._output, Tensor):
            self.refusal = f"layers return a {type(self._output).__name__}, not hidden states alone"
        elif buffer := next((name for name, was in _versions(layer).items() if was != buffers.get(name)), None):
            self.refusal = f"layer {number} changes its buffer {buffer}"
        if self.refusal is not None or number == len(self) - 1:
            raise _LayersDone
        return self._output

    def _why_refused(self, number: int, args: Sequence[Any]) -> str | None:
        if not (args and isinstance(args[0], Tensor)):
            return "the model passes hidden states to its layers by their name"
        if number != len(self.functions):
            return "the model does not call all of its layers, one after the other"
        if number and args[0] is not self._output:
            return f"the model computes something between layers {number - 1} and {number}"
        return None


def _versions(layer: nn.Module) -> dict[str, tuple[int, int]]:
    """Which tensors the buffers of a layer are, and how often they were written."""
    return {name: (id(buffer), buffer._version) for name, buffer in layer.named_buffers()}


class _Operators(TorchFunctionMode):
    """Records calls of PyTorch on a device with their numbers, and with names in place of tensors."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device
        self.operators: list[tuple] = []
        self.alive: list[Tensor] = []
        self._names: dict[int, Any] = {}

    def name(self, tensor: Tensor, name: Any) -> None:
        """Record a tensor under a name, unless it has one."""
        self.alive.append(tensor)
        self._names.setdefault(id(tensor), name)

    def __torch_function__(self, function: Callable, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        results = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        tensors = [*results, *(value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor))]
        # Operators of this package are built on the host when they are first used.
        if any(tensor.device == self._device for tensor in tensors):
            self.operators.append((function, self._describe(args), self._describe(kwargs or {})))
            for place, tensor in enumerate(results):
                self.name(tensor, (len(self.operators), place))
        return result

    def _describe(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() <= _MOST_ELEMENTS:
            return ("host", value.dtype, str(value.tolist()))
        if isinstance(value, Tensor):
            # One that no function of PyTorch returns: what kernels and autograd's functions of this package do.
            self.name(value, ("other", len(self._names), value.shape, value.dtype))
            return self._names[id(value)]
        if isinstance(value, (tuple, list)):
            return tuple(map(self._describe, value))
        if isinstance(value, dict):
            return tuple((key, self._describe(item)) for key, item in value.items())
        if isinstance(value, (bool, int, float, complex, str, type(None), slice, torch.dtype, torch.device)):
            return value
        return type(value)
