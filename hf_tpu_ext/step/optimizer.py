"""AdamW whose step is one program for the whole run, with state that exists before the first step, and its gradients."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence, Set
from functools import partial
from itertools import chain, count
from operator import is_, itemgetter
from typing import Any

import torch

from ..backends.base import Backend
from ..backends.compiled_function import CompiledFunction, end_unwatched
from ..errors import UserError
from .ema import WeightAverage
from .fingerprint import Fingerprint


# Of PyTorch's AdamW. The first two are other updates, and with the others state is on the device.
_OTHER_OPTIONS = ("amsgrad", "maximize", "capturable", "differentiable", "fused")


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
        #: Parameters that some steps leave as they are. They have rows of numbers of their own from the first step on: once they have
        #: taken fewer steps than others, the program would be another.
        self.sometimes_unused: Set[torch.nn.Parameter] = frozenset()
        #: Whether the program of the step under way has updated the weights: [`~LazyAdamW.step`] then counts that only.
        self.is_done = False
        #: The states of the parameters that were updated last.
        self.updated_states: Sequence[dict[str, torch.Tensor]] = ()
        #: What the program of the next update depends on besides tensors. Not left to what compares attributes, to which groups
        #: change at each step: their learning rates are data.
        self.program_key: Hashable = None
        # The numbers of steps that parameters have taken, a row each among those of a group in the numbers of the next update; and the
        # row by the identity of a parameter's state.
        self._by_count: list[float] = []
        self._row_of: dict[int, int] = {}
        # The state of each parameter as it was known last, and how often it was another.
        self._states: list[dict[str, torch.Tensor]] = []
        self._others = 0
        # Their step counters: views of one tensor, so that counting is one operator, and reading them another.
        self._counters: list[torch.Tensor] = []
        self._counts = torch.zeros(0)
        # Updates, where these are no part of a larger program.
        self._program: CompiledFunction | None = None
        # While stacked parameters are trained: the single ones of each group, and for each of all in their order which one trains it,
        # by its number, and which part of that.
        self._singles: list[list[torch.nn.Parameter]] | None = None
        self._places: list[tuple[int, int | None]] = []
        self.register_load_state_dict_pre_hook(partial(place_loaded, backend))

    @classmethod
    def in_place_of(cls, optimizer: torch.optim.Optimizer, backend: Backend) -> torch.optim.Optimizer:
        """
        An optimizer of this class with the groups and the state of a plain [`torch.optim.AdamW`], or that optimizer itself where it
        is another one, has options that this class lacks, or hooks.
        """
        if (
            type(optimizer) is not torch.optim.AdamW
            or any(group[option] for group in optimizer.param_groups for option in _OTHER_OPTIONS)
            or any(isinstance(group["lr"], torch.Tensor) for group in optimizer.param_groups)
            or optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
        ):
            return optimizer
        defaults = {name: optimizer.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
        own = cls(optimizer.param_groups, backend, **defaults)
        # Whoever made the other one may go on to change them there.
        own.param_groups, own.state = optimizer.param_groups, optimizer.state
        return own

    def create_state(self) -> None:
        """
        Create the moments and step counters that are missing, so that the first step is like every other, and note what the program
        of the next one depends on. Somebody may have cleared or replaced the state.
        """
        for parameter in self._parameters():
            if not self.state[parameter]:
                self.state[parameter] = {
                    # On the CPU, as `torch.optim.AdamW` keeps it: counting there costs no device work.
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        self._follow_state()
        count_of = dict(zip(map(id, self._states), self._counts.tolist(), strict=True))
        unused = [id(self.state[each]) for each in self.sometimes_unused if each in self.state]
        count_of_unused = {state: count_of.pop(state) for state in unused}
        self._by_count, self._row_of = [], {}
        for count_by_state in filter(None, (count_of, count_of_unused)):
            counts = sorted({*count_by_state.values()}, reverse=True)
            # There may be some that no step uses, and those that were frozen. The first step has as many rows, to be the same program.
            counts += [0.0] * (2 - len(counts))
            row_of = {count: row for row, count in reversed([*enumerate(counts, len(self._by_count))])}
            self._row_of |= {state: row_of[count] for state, count in count_by_state.items()}
            self._by_count += counts
        groups = (
            (group["betas"], group["eps"], bool(group["weight_decay"]), tuple(map(id, group["params"])))
            for group in self.param_groups
        )
        self.program_key = self._others, (*groups,), (*self._row_of.values(),)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of [`torch.optim.AdamW`]."""
        # A checkpoint of the fused AdamW says so in its groups, and PyTorch then puts every step counter on the device,
        # where counting would be one read per parameter and step.
        groups = [{**group, "fused": None, "capturable": False} for group in state_dict["param_groups"]]
        state_dict = {**state_dict, "param_groups": groups}
        super().load_state_dict(state_dict if self._singles is None else self._stack(state_dict))

    def step(self, closure: Callable | None = None) -> torch.Tensor | None:
        """Update every parameter that has a gradient. Where the program of a step has done it (`is_done`), count it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.is_done:
            self.update_by_itself(self._backend.send(self.numbers()))
        self.is_done = False
        self._count()
        return loss

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    # ---- Parameters that are stacked, of layers that run as a loop ----

    def train_stacked(self, parts_of: Mapping[torch.Tensor, Sequence[torch.nn.Parameter]]) -> None:
        """
        Train stacked parameters in the place of their parts, while there is no state. State dicts stay those of the parts: a
        checkpoint is read by upstream, and by a run whose layers are no loop.
        """
        place_of = {part: (whole, index) for whole, parts in parts_of.items() for index, part in enumerate(parts)}
        self._singles = [group["params"] for group in self.param_groups]
        places = [[place_of.get(single, (single, None)) for single in singles] for singles in self._singles]
        for group, of_group in zip(self.param_groups, places, strict=True):
            group["params"] = list(dict.fromkeys(whole for whole, _ in of_group))
        number_of = {parameter: number for number, parameter in enumerate(self._parameters())}
        self._places = [(number_of[whole], index) for whole, index in chain.from_iterable(places)]

    def train_parts(self) -> None:
        """Train the parts of stacked parameters again, each with its part of the state."""
        states = [self.state.pop(parameter, {}) for parameter in self._parameters()]
        for group, singles in zip(self.param_groups, self._singles, strict=True):
            group["params"] = singles
        for parameter, (number, index) in zip(self._parameters(), self._places, strict=True):
            self.state[parameter] = _part_of(states[number], index)
        self._singles = None

    def state_dict(self) -> dict[str, Any]:
        """The state dict, as that of [`torch.optim.AdamW`]."""
        state_dict = super().state_dict()
        if self._singles is None:
            return state_dict
        states = state_dict["state"]
        parts = {
            single: _part_of(states[number], index)
            for single, (number, index) in enumerate(self._places)
            if number in states
        }
        return {"state": parts, "param_groups": _number_groups(state_dict["param_groups"], self._singles)}

    def _stack(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        parameters, parts = self._parameters(), {}
        for single, (number, _) in enumerate(self._places):
            if single in state_dict["state"]:
                parts.setdefault(number, []).append(state_dict["state"][single])

        def stack(tensors: list[torch.Tensor], parameter: torch.nn.Parameter) -> torch.Tensor:
            is_part = tensors[0].ndim and tensors[0].shape == parameter.shape[1:]
            # The host holds one at a time.
            return place_moment(self._backend, torch.stack(tensors), parameter) if is_part else tensors[0]

        states = {
            number: {name: stack([part[name] for part in of_one], parameters[number]) for name in of_one[0]}
            for number, of_one in parts.items()
        }
        stacked = [group["params"] for group in self.param_groups]
        return {"state": states, "param_groups": _number_groups(state_dict["param_groups"], stacked)}

    # ---- An update: its numbers on the host, its operators, its counters ----

    def numbers(self) -> torch.Tensor:
        """
        What the next update takes besides tensors, on the host: `(1, rows, numbers)`, float32. Parameters of a group that have taken
        equally many steps share a row.
        """
        self.create_state()
        shares = [] if self.average is None else [1 - self.average.next_decay()]
        rows = []
        for group in self.param_groups:
            (beta1, beta2), learning_rate, decay = group["betas"], group["lr"], group["weight_decay"]
            for step in (number + 1 for number in self._by_count):
                corrections = learning_rate / (1 - beta1**step), (1 - beta2**step) ** 0.5
                rows.append([1 - learning_rate * decay, *corrections, *shares])
        # Beside a batch, what has as many rows as the batch would be split over the chips.
        return torch.tensor([rows], dtype=torch.float32)

    @torch.no_grad()
    def update(self, numbers: torch.Tensor) -> None:
        """Update every parameter that has a gradient, and the average of the weights, by [`~LazyAdamW.numbers`] on the device."""
        rows = [row.unbind() for row in numbers[0].unbind()]
        self.updated_states = []
        for number, group in enumerate(self.param_groups):
            first = number * len(rows) // len(self.param_groups)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    self.updated_states.append(state)
                    row = rows[first + self._row_of[id(state)]]
                    update_adamw(group, parameter, parameter.grad, state, row)
        if self.updated_states and self.average is not None:
            # All weights: those without a gradient stay as they are, and their average comes closer.
            self.average.update(rows[0][-1])

    def update_by_itself(self, numbers: torch.Tensor) -> None:
        """As [`~LazyAdamW.update`], outside of a program: a program of its own, where operators would be one each."""
        if not self._backend.compiles_functions:
            self.update(numbers)
            return
        if self._program is None:
            # It depends on its arguments alone.
            self._program = self._backend.programs.compile(
                lambda data, **_: self.update(data["numbers"]), self._tensors, Fingerprint(trusts_code=True), None
            )
        used = tuple(parameter.grad is not None for parameter in self._parameters())
        self._program({"numbers": numbers}, end_unwatched, used=used, key=self.program_key)
        # A program that is run by its handle says nothing of them.
        self.updated_states = [
            self.state[each] for each, is_used in zip(self._parameters(), used, strict=True) if is_used
        ]

    def _tensors(self) -> list[torch.Tensor]:
        """What an update reads and writes."""
        parameters = self._parameters()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return [*parameters, *gradients, *self.state_tensors]

    @property
    def state_tensors(self) -> list[torch.Tensor]:
        """What an update reads and writes besides parameters and gradients: moments, and the average of the weights."""
        moments = [state[name] for state in self.state.values() for name in ("exp_avg", "exp_avg_sq")]
        return moments if self.average is None else [*moments, *self.average.values.values()]

    def _count(self) -> None:
        """Count an update of what was updated last."""
        self._follow_state()
        if are_same(self.updated_states, self._states):
            self._counts += 1
        elif self.updated_states:
            torch._foreach_add_([state["step"] for state in self.updated_states], 1)

    def _follow_state(self) -> None:
        """Keep all step counters in one tensor, also where the state is another than before."""
        states = self.state.values()
        is_known = are_same(self._states, states)
        if is_known and all(map(is_, self._counters, map(itemgetter("step"), states))):
            return
        if not is_known:
            self._states = list(states)
            self._others += 1
        self._counts = torch.stack([state["step"] for state in self._states]) if self._states else torch.zeros(0)
        self._counters = list(self._counts.unbind())
        for state, counter in zip(self._states, self._counters, strict=True):
            state["step"] = counter


def _part_of(state: dict[str, torch.Tensor], index: int | None) -> dict[str, torch.Tensor]:
    """The state of a single parameter, a copy of its part of a stacked one's."""
    return {
        name: value.clone() if index is None or not value.ndim else value[index].clone()
        for name, value in state.items()
    }


def _number_groups(groups: list[dict[str, Any]], parameters: list[list[Any]]) -> list[dict[str, Any]]:
    """Groups of a state dict, which has numbers for parameters: those of an optimizer that trains others."""
    numbers = count()
    return [
        {**group, "params": [next(numbers) for _ in of_group]}
        for group, of_group in zip(groups, parameters, strict=True)
    ]


def are_same(states: Collection[Any], others: Collection[Any]) -> bool:
    """Whether two collections hold the same objects in the same order."""
    return len(states) == len(others) and all(map(is_, states, others))


def update_adamw(
    group: dict[str, Any],
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    moments: dict[str, torch.Tensor],
    numbers: Sequence[torch.Tensor],
) -> None:
    """
    Update a parameter of a group and its moments, in place. The first three `numbers` are the factor of weight decay, the learning
    rate over the first bias correction, and the square root of the second.
    """
    decay, step_size, correction2_sqrt, *_ = numbers
    beta1, beta2 = group["betas"]
    # Of bfloat16 weights, too, in float32, as in PyTorch's fused AdamW: what is stored is rounded once.
    grad, value, first, second = map(_precise, (gradient, parameter, moments["exp_avg"], moments["exp_avg_sq"]))
    # `copy_` is the one in-place operator that torch_xla does not check in Python first, at 20 to 90 microseconds
    # each: with hundreds of parameters, a good part of the host's time for a step.
    exp_avg = torch.lerp(first, grad, 1 - beta1)
    exp_avg_sq = torch.addcmul(second * beta2, grad, grad, value=1 - beta2)
    step = exp_avg / (exp_avg_sq.sqrt() / correction2_sqrt + group["eps"]) * step_size
    decayed_value = value * decay if group["weight_decay"] else value
    parameter.copy_(decayed_value - step)
    moments["exp_avg"].copy_(exp_avg)
    moments["exp_avg_sq"].copy_(exp_avg_sq)


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
        for saved_group, group in groups
        for number, parameter in zip(saved_group["params"], group["params"], strict=False)
    }
    state = {
        number: {name: place_moment(backend, value, of_number[number]) for name, value in values.items()}
        if number in of_number
        else values
        for number, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _precise(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float32, if its own dtype is shorter."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def clip_gradients(model: torch.nn.Module, max_norm: float | None) -> torch.Tensor:
    """
    As [`torch.nn.utils.clip_grad_norm_`]: returns the norm of the gradients before they are scaled, float32 at least. Without a
    `max_norm`, or with 0, they are not.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    # XLA sums bfloat16 in bfloat16.
    norm = torch.nn.utils.get_total_norm([_precise(parameter.grad) for parameter in parameters], foreach=False)
    if not max_norm:
        return norm
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        # By `copy_`, see [`update_adamw`]. A gradient that persists stays the same tensor, on the same chips.
        parameter.grad.copy_(parameter.grad * scale)
    return norm


def follow_placed(
    optimizer: torch.optim.Optimizer, before: Mapping[str, torch.nn.Parameter], model: torch.nn.Module
) -> None:
    """
    Have an optimizer, with its groups and state, update the parameters that a model has where it is now, in the place of those by
    the same names that it had `before`: to move a model to XLA makes other parameters.
    """
    new_parameters = dict(model.named_parameters())
    new_of = {parameter: new_parameters[name] for name, parameter in before.items() if name in new_parameters}
    for group in optimizer.param_groups:
        group["params"] = [new_of.get(parameter, parameter) for parameter in group["params"]]
    for parameter in [*optimizer.state]:
        if parameter in new_of:
            state = optimizer.state.pop(parameter)
            optimizer.state[new_of[parameter]] = {
                # Numbers of steps stay on the host.
                name: value.to(new_of[parameter].device) if isinstance(value, torch.Tensor) and value.ndim else value
                for name, value in state.items()
            }


def check_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Refuse (`ValueError`) an optimizer that updates other parameters than those of the model."""
    placed_ids = {id(parameter) for parameter in model.parameters()}
    if all(id(parameter) in placed_ids for group in optimizer.param_groups for parameter in group["params"]):
        return
    in_trainer = (
        "make the optimizer from self.model in an override of create_optimizer, and its schedule from self.optimizer in one of "
        "create_scheduler."
    )
    if optimizer.defaults.get("lr") is not None:
        settings = {name: value for name, value in optimizer.defaults.items() if value is not None}
        in_trainer = (
            f"optimizer_cls_and_kwargs=({type(optimizer).__name__}, {settings}). For groups or a schedule of your own, "
            f"{in_trainer}"
        )
    raise UserError(
        "optimizers=(optimizer, ...) was made for weights that are not those of the model that is trained, so it would train "
        f"nothing. Make it of the parameters of the model that is given to the trainer, or let the trainer make it: {in_trainer}"
    )
