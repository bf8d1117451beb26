"""AdamW whose step is one program for the whole run, with state that exists before the first step, and its gradients."""

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch

from ..backends.base import Backend
from ..errors import UserError
from .ema import WeightAverage, at_least_float32


@dataclass(frozen=True, eq=False)
class _Update:
    group: dict[str, Any]
    parameter: torch.nn.Parameter
    state: dict[str, torch.Tensor]

    def __eq__(self, other: "_Update") -> bool:
        return self.group is other.group and self.parameter is other.parameter and self.state is other.state


class LazyAdamW(torch.optim.AdamW):
    """
    [`torch.optim.AdamW`] for lazily compiled devices.

    The update and the state dict are those of [`torch.optim.AdamW`] (decoupled weight decay,
    https://huggingface.co/papers/1711.05101), so checkpoints move between the two. What differs is how the numbers
    that change at each step reach the device: the learning rate, the weight decay factor and the two bias corrections
    travel as one small data tensor. As Python numbers they would be constants of the program whenever they equal 0 or
    1: at the first step of a warm-up, at the end of a decay to 0, and once `1 - beta2**step` rounds to 1.
    """

    def __init__(self, params, backend: Backend, **kwargs):
        super().__init__(params, **kwargs)
        self._backend = backend
        #: An average of the weights, which a step updates as well.
        self.average: WeightAverage | None = None
        #: What the program of a replayed step updates: [`~LazyAdamW.step`] runs no operator then. `None` where it does.
        self.in_program: Sequence[_Update] | None = None
        #: Parameters that a step does not update although they have a gradient.
        self.left_out: Collection[torch.nn.Parameter] = ()
        #: What the last step has updated, and the numbers that it has sent for that.
        self.updated: Sequence[_Update] = ()
        self.sent: torch.Tensor | None = None
        # The parameters for which there was state when it was looked at last, and for how many.
        self._complete: tuple[list[int], int] = [], 0
        # The state of each parameter as it was known last, and how often it was another.
        self._known: list[dict[str, torch.Tensor]] = []
        self._others = 0
        # Their step counters: views of one tensor, so that counting is one operator, and reading them another.
        self._counters: list[torch.Tensor] = []
        self._counts = torch.zeros(0)
        self.register_load_state_dict_pre_hook(partial(place_loaded, backend))

    def create_state(self) -> None:
        """Create the moments and step counters that are missing, so that the first step is like every other."""
        parameters = [id(parameter) for group in self.param_groups for parameter in group["params"]]
        if (parameters, len(self.state)) == self._complete and all(self.state.values()):
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.state[parameter] = {
                        # On the CPU, as `torch.optim.AdamW` keeps it: counting there costs no device work.
                        "step": torch.zeros((), dtype=torch.float32),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
        self._complete = parameters, len(self.state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of [`torch.optim.AdamW`]."""
        # A checkpoint of the fused AdamW says so in its groups, and PyTorch then puts every step counter on the device,
        # where counting would be one read per parameter and step.
        groups = [{**group, "fused": None, "capturable": False} for group in state_dict["param_groups"]]
        super().load_state_dict({**state_dict, "param_groups": groups})

    def place(self, value: Any, parameter: torch.nn.Parameter) -> Any:
        """As [`place_moment`]."""
        return place_moment(self._backend, value, parameter)

    def step(self, closure: Callable | None = None) -> torch.Tensor | None:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.create_state()
        if self.in_program is not None:
            self.updated = self.in_program
            self.sent, _ = self._count_and_send(self.updated)
        else:
            self._step()
        return loss

    @torch.no_grad()
    def _step(self) -> None:
        left_out = set(self.left_out)
        self.sent = None
        self.updated = [
            _Update(group, parameter, self.state[parameter])
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and parameter not in left_out
        ]
        if self.updated:
            self.sent, keys = self._count_and_send(self.updated)
            rows = {key: row for row, key in enumerate(dict.fromkeys(keys))}
            self._update(self.updated, self.sent, [rows[key] for key in keys])

    def settings(self) -> Hashable:
        """What the program of a step depends on besides tensors: equal where the program is."""
        groups = tuple(
            (group["betas"], group["eps"], bool(group["weight_decay"]), tuple(map(id, group["params"])))
            for group in self.param_groups
        )
        # Somebody may have cleared it.
        self.create_state()
        self._follow_state()
        steps = self._counts.tolist()
        # Which parameters have taken equally many steps.
        seen: dict[float, int] = {}
        pattern = tuple(seen.setdefault(step, len(seen)) for step in steps) if len(set(steps)) > 1 else None
        return self._others, groups, pattern

    def _follow_state(self) -> None:
        """Keep all step counters in one tensor, also where the state is another than before."""
        states = self.state.values()
        is_known = len(self._known) == len(states) and all(map(is_, self._known, states))
        if is_known and all(map(is_, self._counters, map(itemgetter("step"), states))):
            return
        if not is_known:
            self._known = list(states)
            self._others += 1
            self._complete = [], 0
        self._counts = torch.stack([state["step"] for state in self._known]) if self._known else torch.zeros(0)
        self._counters = list(self._counts.unbind())
        for state, counter in zip(self._known, self._counters, strict=True):
            state["step"] = counter

    def _count(self, updates: Sequence[_Update]) -> list[float]:
        """Count a step of the parameters that are updated. Returns how many each of them has taken."""
        self._follow_state()
        if len(updates) == len(self._known) and all(map(is_, map(attrgetter("state"), updates), self._known)):
            self._counts += 1
            return self._counts.tolist()
        counters = [update.state["step"] for update in updates]
        torch._foreach_add_(counters, 1)
        return torch.stack(counters).tolist()

    def _count_and_send(self, updates: Sequence[_Update]) -> tuple[torch.Tensor, list[tuple[int, float]]]:
        """Count a step, and send the numbers that it needs: a row each, by group and count, in the order returned."""
        groups = {id(update.group): update.group for update in updates}
        keys = list(zip((id(update.group) for update in updates), self._count(updates), strict=True))
        values = []
        # Parameters that have taken equally many steps share a row: usually one row per group.
        for number, step in dict.fromkeys(keys):
            group = groups[number]
            beta1, beta2 = group["betas"]
            learning_rate, decay = group["lr"], group["weight_decay"]
            values.append((1 - learning_rate * decay, learning_rate / (1 - beta1**step), (1 - beta2**step) ** 0.5))
        if self.average is not None:
            share = 1 - self.average.next_decay()
            values = [(*row, share) for row in values]
        return self._backend.send(torch.tensor(values, dtype=torch.float32)), keys

    def _update(self, updates: list["_Update"], coefficients: torch.Tensor, row_of: list[int]) -> None:
        numbers = [row.unbind() for row in coefficients.unbind()]
        for update, row in zip(updates, row_of, strict=True):
            group, parameter, state = update.group, update.parameter, update.state
            decay, step_size, correction2_sqrt, *_ = numbers[row]
            beta1, beta2 = group["betas"]
            # Of bfloat16 weights, too, in float32, as in PyTorch's fused AdamW: what is stored is rounded once.
            grad, value, first, second = map(
                _precise, (parameter.grad, parameter, state["exp_avg"], state["exp_avg_sq"])
            )
            # `copy_` is the one in-place operator that torch_xla does not check in Python first, at 20 to 90 microseconds
            # each: with hundreds of parameters, a good part of the host's time for a step.
            exp_avg = torch.lerp(first, grad, 1 - beta1)
            exp_avg_sq = torch.addcmul(second * beta2, grad, grad, value=1 - beta2)
            step = exp_avg / (exp_avg_sq.sqrt() / correction2_sqrt + group["eps"]) * step_size
            decayed = value * decay if group["weight_decay"] else value
            parameter.copy_(decayed - step)
            state["exp_avg"].copy_(exp_avg)
            state["exp_avg_sq"].copy_(exp_avg_sq)
        if self.average is not None:
            # All weights: those without a gradient stay as they are, and their average comes closer.
            self.average.update(numbers[0][-1])


def place_moment(backend: Backend, value: Any, parameter: torch.nn.Parameter) -> Any:
    """Put a moment of a parameter, which is on the CPU, on its chips. A step counter stays."""
    is_moment = isinstance(value, torch.Tensor) and value.ndim and value.shape == parameter.shape
    if not is_moment or value.device == parameter.device:
        return value
    return backend.place_as(value.to(parameter.dtype), parameter)


def place_loaded(backend: Backend, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Put the moments of a state dict, which an optimizer is to load, on their chips: it may be as large as all of them."""
    groups = zip(state_dict["param_groups"], optimizer.param_groups, strict=False)
    of_number = {
        number: parameter
        for saved, group in groups
        for number, parameter in zip(saved["params"], group["params"], strict=False)
    }
    state = {
        number: {name: place_moment(backend, value, of_number[number]) for name, value in values.items()}
        if number in of_number
        else values
        for number, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


class StepGradients:
    """
    Zeroes the gradients of a model, in place of its `zero_grad`.

    With gradient accumulation (`keep`) gradients are there from the start of a run and are zeroed in place, so that
    the first micro-step adds to them like every other and is the same program. Without it they live inside the one
    program of a step and need no memory between steps.
    """

    def __init__(self, model: torch.nn.Module, keep: bool):
        self._parameters = list(model.parameters())
        self._kept: list[torch.nn.Parameter] = []
        self._received: set[torch.nn.Parameter] = set()
        self._hooks = []
        #: Whether the program of the step under way zeroes them.
        self.in_program = False
        if keep:
            self._kept = [parameter for parameter in self._parameters if parameter.requires_grad]
        for parameter in self._kept:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._received.add))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or zero those that are kept, whatever `set_to_none` says."""
        if self.in_program:
            return
        kept = set(self._kept)
        for parameter in self._parameters:
            if parameter.grad is None:
                continue
            if set_to_none and parameter not in kept:
                parameter.grad = None
            else:
                parameter.grad.detach_().zero_()
        self._received.clear()

    @property
    def unused(self) -> Collection[torch.nn.Parameter]:
        """Parameters that no micro-step has used since gradients were zeroed. Without this they would have no gradient."""
        return [parameter for parameter in self._kept if parameter not in self._received]

    def close(self) -> None:
        """Follow the gradients no longer."""
        for hook in self._hooks:
            hook.remove()


def _precise(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float32, if its own dtype is shorter."""
    return tensor.to(at_least_float32(tensor.dtype))


def clip_gradients(model: torch.nn.Module, max_norm: float) -> torch.Tensor:
    """As [`torch.nn.utils.clip_grad_norm_`]: returns the norm of the gradients before they are scaled, float32 at least."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    # XLA sums bfloat16 in bfloat16.
    norm = torch.nn.utils.get_total_norm([_precise(parameter.grad) for parameter in parameters], foreach=False)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        # By `copy_`, see [`LazyAdamW.step`]. A gradient that persists stays the same tensor, on the same chips.
        parameter.grad.copy_(parameter.grad * scale)
    return norm


def check_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Refuse (`ValueError`) an optimizer made before the model was placed: it has other parameters."""
    placed = {id(parameter) for parameter in model.parameters()}
    if all(id(parameter) in placed for group in optimizer.param_groups for parameter in group["params"]):
        return
    in_trainer = (
        "make the optimizer from self.model in an override of create_optimizer, and its schedule from self.optimizer in one of "
        "create_scheduler."
    )
    if optimizer.defaults["lr"] is not None:
        settings = {name: value for name, value in optimizer.defaults.items() if value is not None}
        in_trainer = (
            f"optimizer_cls_and_kwargs=({type(optimizer).__name__}, {settings}). For groups or a schedule of your own, "
            f"{in_trainer}"
        )
    raise UserError(
        "optimizers=(optimizer, ...) was made for weights that are not those on the XLA device, so it would train "
        f"nothing. Let the trainer make it there: {in_trainer}"
    )
