"""Training on several chips: what of the run goes where."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from ...backends.base import Backend
from ...errors import UserError
from ...formatting import count, kind_of_device, number_setting
from ...sharding import ShardingPlan, advise_sharding, describe_hosts, describe_mesh, resolve_mesh
from ...sharding.per_chip import LocalGradients, score_tokens_per_chip
from ...step.selected_rows import select
from ...step.train_step import GradientSums
from ...temporarily import temporarily


logger = logging.get_logger(__name__)


# The chips of a trainer's process, by its arguments. As an attribute, copies of these and saved ones would have it, too.
_chips_of = WeakIdKeyDictionary()


def count_all_chips(args: TrainingArguments, num_chips: int) -> None:
    """
    Make the batch of arguments that of all chips of this process, in `train_batch_size` and `eval_batch_size`.

    To upstream, which sees one device, the chips are one. It reads these two for samplers, dataloaders and speeds; it
    shows and saves the fields, which stay as the caller gave them.
    """
    _chips_of[args] = num_chips


def _times_chips(rows: property) -> property:
    return property(lambda args: rows.fget(args) * _chips_of.get(args, 1), doc=rows.__doc__)


# Upstream's count `n_gpu`, but with several of these it wraps the model in `DataParallel`.
TrainingArguments.train_batch_size = _times_chips(TrainingArguments.train_batch_size)
TrainingArguments.eval_batch_size = _times_chips(TrainingArguments.eval_batch_size)


class Chips:
    """
    Spreads the runs of a trainer over chips. On one chip, and on CUDA and CPU, it does nothing. It is made before
    upstream's `__init__`, which places the model.

    `per_device_train_batch_size` is what each chip gets, and stays as it was given. `train_batch_size` is what this
    process takes at once, the rows of all chips: sampling, `max_steps` and epochs, token counts and evaluation follow
    from that. `mesh` is as in [`~hf_tpu_ext.sharding.resolve_mesh`].
    """

    def __init__(self, backend: Backend, args: TrainingArguments, mesh: str):
        self._backend, self._args = backend, args
        # Elsewhere upstream shares the rows out, and knows no mesh.
        processes = backend.processes.row_shards if backend.unknown_upstream else 1
        #: Size of each axis.
        self.mesh = resolve_mesh(mesh, backend.num_chips * processes)
        backend.use_mesh(self.mesh)
        #: How the model is placed.
        self.sharding_plan: ShardingPlan | None = None
        #: The gradients of chips that run by themselves, in a run where they do.
        self.local_gradients: LocalGradients | None = None
        # Why they cannot, as the steps so far have shown.
        self._why_not_local: str | None = None
        self._splits_activations = False
        # Not a method: a copy of the model would come with one of the trainer.
        self.split_output = partial(_split_output, backend)
        #: Rows per device and accumulation, as the recipe has them.
        self.recipe_rows = [args.per_device_train_batch_size, args.gradient_accumulation_steps]
        count_all_chips(args, backend.num_chips)

    def shard_training_state(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        gradients: GradientSums,
        averages: Mapping[nn.Parameter, torch.Tensor],
    ) -> None:
        """
        Put what a run trains with on its chips, so that the first step is like every later one: the model on the
        device, with gradients if they persist between steps, its optimizer, whose state may come from a checkpoint, and
        the averages of its parameters.
        """
        if self._backend.num_chips == 1:
            return
        self.sharding_plan = ShardingPlan(model, self.mesh)
        self.sharding_plan.apply(model, self._backend)
        specs, sums = self.sharding_plan.specs, gradients.sums
        for name, parameter in model.named_parameters():
            for value in (sums.get(parameter), averages.get(parameter), *optimizer.state.get(parameter, {}).values()):
                # Counters stay on the host, and factored moments where the partitioner has them.
                place = parameter.device, parameter.shape
                if isinstance(value, torch.Tensor) and (value.device, value.shape) == place:
                    self._backend.shard(value, specs[name])

    # ---- Fully sharded: keep the partitioner to the scheme ----

    @contextmanager
    def split_activations(self, model: nn.Module) -> Iterator[None]:
        """
        Within this context, keep the activations between the layers of a model split by rows, as FSDP has them.

        Without it the partitioner may exchange activations instead of weights (torch_xla's own FSDPv2,
        `torch_xla/experimental/spmd_fully_sharded_data_parallel.py`, marks the outputs of layers for the same reason).
        """
        if self.mesh["fsdp"] == 1 or self._splits_activations:
            yield
            return
        self._splits_activations = True
        hooks = [
            module.register_forward_hook(self.split_output)
            for module in model.modules()
            if isinstance(module, (GradientCheckpointingLayer, nn.Embedding))
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._splits_activations = False

    # ---- Data parallel: each chip by itself, one reduction per optimizer step ----

    def gradients_of(
        self, model: nn.Module, earlier: GradientSums | None, why_not_local: Callable[[nn.Module], str | None]
    ) -> GradientSums:
        """
        The gradients of the steps of a run: on each chip by itself, unless `why_not_local` says why that does not give the same
        step. Sums of `earlier` ones go on.
        """
        self.local_gradients = None
        accumulates = self._args.gradient_accumulation_steps > 1
        if self._backend.num_chips > 1 and self.mesh["fsdp"] == 1:
            reason = self._why_not_local or why_not_local(model)
            if reason is None:
                self.local_gradients = LocalGradients(model, self._backend, accumulates)
                return self.local_gradients
            if accumulates:
                logger.warning_once(
                    f"Gradients are all-reduced at every micro-step, not once per optimizer step: {reason}."
                )
        return GradientSums(model, accumulates, earlier, self._backend.processes)

    def leave_regions(self) -> None:
        """Leave the gradients of later steps to the partitioner: a forward or backward pass reads a value on the host."""
        self.local_gradients.add_up()
        self._why_not_local = "a step reads values on the host, or has operators that run there"

    def tokens_stay_on_chips(self) -> AbstractContextManager:
        """Context in which TRL's fused language model head scores each token on the chip that has it."""
        is_alone = self._backend.num_chips == 1 or self._backend.manual_sharding.active
        return nullcontext() if is_alone else score_tokens_per_chip(self._backend)

    def over_chips(self, value: torch.Tensor) -> torch.Tensor:
        """Sum a number over chips, where they run by themselves; elsewhere it is the sum already."""
        return value if self.local_gradients is None else self.local_gradients.over_chips(value)

    def gather_over_chips(self, accelerator: Accelerator) -> AbstractContextManager[None]:
        """Within this context, what upstream gathers from all processes is gathered from chips that run by themselves."""
        gathers = {}
        if self.local_gradients is not None:
            gathers = {"gather_for_metrics": self.over_chips}
        elif self._backend.unknown_upstream and self._backend.processes.own_rows:
            # This gathers all rows, on the device: upstream leaves values of a last batch out by their number.
            gather = partial(recursively_apply, self._backend.processes.gather)
            gathers = {"gather_for_metrics": gather, "gather": gather, "reduce": self._reduce}
        return temporarily(accelerator, **gathers) if gathers else nullcontext()

    def _reduce(self, value: torch.Tensor, reduction: str) -> torch.Tensor:
        values = self._backend.processes.gather(value[None])
        return values.mean(0) if reduction == "mean" else values.sum(0)

    # ---- Rows of an optimizer step ----

    @property
    def _num_workers(self) -> int:
        return self._backend.num_chips * self._args.world_size

    @property
    def rows_per_step(self) -> int:
        """Global batch size."""
        args = self._args
        return args.train_batch_size * args.world_size * args.gradient_accumulation_steps

    def rows_at_once(self, most: int) -> int:
        """
        The rows that the chips of this process take together, of which each has as many: `most` or fewer. Fewer than
        chips are a `ValueError`.
        """
        chips = self._backend.num_chips
        if most < chips:
            raise UserError(
                f"auto_find_batch_size=True has come down to {count(most, 'row')} for {count(chips, 'chip')}, each of "
                "which takes one at least. Set mesh='fsdp', gradient_checkpointing=True or a lower max_length, by which a "
                "row takes less memory; where a checkpoint of fewer chips has so few rows, leave auto_find_batch_size out."
            )
        return most - most % chips

    def rows_of_process(self) -> AbstractContextManager[None]:
        """Within this context, `per_device_train_batch_size` is the rows of all chips of this process, as upstream takes it."""
        rows = self._args.per_device_train_batch_size * self._backend.num_chips
        return temporarily(self._args, per_device_train_batch_size=rows)

    def batch_state(self) -> dict[str, Any]:
        """What a checkpoint keeps about its rows, for a run on another number of chips."""
        return {
            "num_workers": self._num_workers,
            "rows_per_step": self.rows_per_step,
            "recipe_rows": self.recipe_rows,
            "rows_at_once": self._args.train_batch_size * self._args.world_size,
        }

    def keep_rows_per_step(self, state: dict[str, Any], keeps_accumulation: bool = False) -> None:
        """
        Change the arguments so that a run that resumes keeps the global batch size of its checkpoint, whose `state` is what
        `batch_state` gave.

        On another number of chips the same recipe means another batch, and so another trajectory. If that is all that
        has changed, accumulation makes up for it, or else the rows of a chip, or both; where it `keeps_accumulation`, the rows of
        a chip alone. If the recipe asks for other rows, it gets them.
        """
        args, workers = self._args, self._num_workers
        rows = state.get("rows_per_step")
        if rows is None or rows == self.rows_per_step:
            _warn_of_epochs(args, state)
            return
        before = f"The checkpoint was written with a global batch size of {rows}"
        if state["recipe_rows"] != self.recipe_rows or state["num_workers"] == workers:
            logger.warning(f"{before}; this run takes {self.rows_per_step}, as the recipe says.")
            return
        kind = kind_of_device(self._backend.name)
        rows_at_once = args.train_batch_size * args.world_size
        accumulation = args.gradient_accumulation_steps
        rows_of_process = args.train_batch_size * accumulation
        if rows % rows_at_once == 0 and not keeps_accumulation:
            args.gradient_accumulation_steps = rows // rows_at_once
        elif rows % (workers * args.gradient_accumulation_steps) == 0:
            args.per_device_train_batch_size = rows // (workers * args.gradient_accumulation_steps)
        elif rows % workers == 0 and not keeps_accumulation:
            rows_of_chip = rows // workers
            # As many at once as divide them, and not more than the recipe has, which fit into the memory.
            at_once = next(n for n in range(args.per_device_train_batch_size, 0, -1) if rows_of_chip % n == 0)
            args.per_device_train_batch_size, args.gradient_accumulation_steps = at_once, rows_of_chip // at_once
        else:
            divided = rows // accumulation if keeps_accumulation else rows
            raise UserError(
                f"{before} on {count(state['num_workers'], kind)}, which {count(workers, kind)} cannot keep with this recipe. "
                f"Set {number_setting(self._backend.name)} to a number that divides {divided}, or set another "
                "per_device_train_batch_size or gradient_accumulation_steps, by which the run goes on with another global batch size."
            )
        logger.warning(
            f"{before} on {count(state['num_workers'], kind)}. To keep it on {workers}: {args.per_device_train_batch_size} per {kind} x "
            f"{count(args.gradient_accumulation_steps, 'gradient accumulation step')}."
        )
        _warn_of_epochs(args, state)
        is_grouped = args.train_sampling_strategy == "group_by_length"
        if is_grouped and args.train_batch_size * args.gradient_accumulation_steps != rows_of_process:
            # Upstream makes groups of the rows that a process takes in a step.
            logger.warning(
                "train_sampling_strategy='group_by_length' makes other groups on another number of processes: in this epoch some rows are "
                f"trained on twice, and others are not. To go on as before, resume on {count(state['num_workers'], kind)}."
            )

    # ---- Words ----

    def lines(self, model: nn.Module, has_average: bool) -> list[str]:
        """What a person is told about chips at start, for a model whose weights may be averaged."""
        lines = []
        if self._backend.num_chips > 1 or self._backend.splits_weights:
            lines.append(describe_mesh(self.mesh))
        if self._backend.unknown_upstream and self._backend.processes.hosts > 1:
            lines.append(describe_hosts(self.mesh, self._backend.processes.hosts))
        memory = self._backend.memory_per_chip
        if memory is not None:
            advice = advise_sharding(model, self.mesh, memory, has_average)
            lines += [] if advice is None else [advice]
        return lines


def _warn_of_epochs(args: TrainingArguments, state: dict[str, Any]) -> None:
    """Of a run that goes on from the `state` of [`Chips.batch_state`]: say where its epochs may be others."""
    if args.dataloader_drop_last and state.get("rows_at_once") not in (None, args.train_batch_size * args.world_size):
        # It leaves out what does not fill a micro-step, of which the rows are others now.
        logger.warning(
            "dataloader_drop_last=True: an epoch may have another number of steps than before, after which the rows of a "
            "step are others. Without it, epochs are as before."
        )


def rows_gathered(accelerator: Accelerator, rows: torch.Tensor) -> AbstractContextManager:
    """Context in which what upstream gathers for metrics are the first rows of a batch, so many as a number on the device says."""

    def cut(value: torch.Tensor) -> torch.Tensor:
        # Numbers have no rows.
        return select(value, torch.arange(len(value), device=value.device) < rows) if value.ndim else value

    return temporarily(accelerator, gather_for_metrics=partial(recursively_apply, cut))


def _split_output(backend: Backend, module: nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return backend.constrain_rows(output)
    return (backend.constrain_rows(output[0]), *output[1:])
