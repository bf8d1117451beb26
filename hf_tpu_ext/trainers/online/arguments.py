"""Settings of the trainers that generate their own data; rows of a generation of GRPO and RLOO, which are those of all chips."""

import math
from dataclasses import dataclass, field

from transformers import TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from ...backends import select_backend
from ...errors import UserError
from ...temporarily import temporarily
from ..configs import ExtensionArguments


@dataclass
class RolloutArguments(ExtensionArguments):
    """What the trainers that generate their own data take besides [`ExtensionArguments`]."""

    max_prompt_length: int | None = field(
        default=None,
        metadata={
            "help": "Length that prompts are padded to on XLA; a longer prompt is an error. Default: that of the longest prompt "
            "of the datasets, rounded up unless all are as long. A streaming dataset needs it."
        },
    )


@dataclass
class RewardedArguments(RolloutArguments):
    """
    What the trainers that compare completions take besides [`RolloutArguments`].

    Upstream checks, and completes, the rows of a generation when the arguments are made, by the number of processes. On TPU chips
    count, which are known when the trainer is made: [`count_rows_of_chips`] does it then.
    """

    share_prompts: str = field(
        default="auto",
        metadata={
            "help": "Have layers read a prompt once for all of its completions in a batch on XLA. 'auto': where upstream leaves them "
            "together, with steps_per_generation=1. 'on': with more, too; a generation is then shuffled by prompts, not by "
            "completions, so that other rows meet in a batch than upstream's. 'off': never.",
            "choices": ["auto", "on", "off"],
        },
    )

    def __post_init__(self):
        backend = select_backend(self.backend, self.num_chips, self.use_cpu)
        generation_rows, steps = self.generation_batch_size, self.steps_per_generation
        # Both are refused by upstream.
        self._own_generation_rows = generation_rows if steps is None else None
        if not backend.static_shapes or None not in (generation_rows, steps):
            super().__post_init__()
            return
        self.generation_batch_size = None
        # As many as there might be for rows that are whole groups.
        with temporarily(self, _processes=max(1, math.lcm(self.num_generations, self.num_generations_eval or 1))):
            super().__post_init__()
        rows = self.per_device_train_batch_size
        self.generation_batch_size = rows * self.steps_per_generation
        if generation_rows is not None:
            self.generation_batch_size, self.steps_per_generation = generation_rows, max(1, generation_rows // rows)

    # What `world_size` is while upstream makes the arguments.
    _processes = None

    @property
    def world_size(self) -> int:
        return self._processes or super().world_size


def count_rows_of_chips(args: TrainingArguments, chips: int) -> None:
    """
    Make the rows of a generation, of GRPO and RLOO, those of all chips, and check that they are whole groups. The arguments are
    changed. Of upstream's own, a `generation_batch_size` is not told from one that was left out. `chips` are those of all processes.

    Raises:
        `ValueError`: A number is not divisible by another. The message says which to set.
    """
    on_chips = f"{chips} chip{'s' * (chips > 1)}"
    rows = args.per_device_train_batch_size * chips
    of_step = f"per_device_train_batch_size={args.per_device_train_batch_size} on {on_chips}"
    own_rows = args._own_generation_rows if isinstance(args, RewardedArguments) else None
    if own_rows is not None:
        if own_rows % rows:
            raise UserError(
                f"generation_batch_size={own_rows} must be divisible by the {rows} rows of a step ({of_step}). Set it to a multiple, "
                f"for example generation_batch_size={math.lcm(rows, args.num_generations)}, or leave it out and set steps_per_generation."
            )
        args.steps_per_generation = own_rows // rows
    args.generation_batch_size = rows * args.steps_per_generation
    if args.generation_batch_size % args.num_generations:
        steps = math.lcm(rows, args.num_generations) // rows
        raise UserError(
            f"generation_batch_size={args.generation_batch_size} ({of_step}, steps_per_generation={args.steps_per_generation}) must be "
            f"divisible by num_generations={args.num_generations}: a generation has all completions of each prompt. Set "
            f"steps_per_generation={steps}, or change per_device_train_batch_size."
        )
    rows, group = args.per_device_eval_batch_size * chips, args.num_generations_eval or args.num_generations
    if args.eval_strategy != IntervalStrategy.NO and rows % group:
        raise UserError(
            f"A batch of an evaluation has {rows} rows (per_device_eval_batch_size={args.per_device_eval_batch_size} on {on_chips}), "
            f"and must be divisible by the {group} completions of each prompt. Set "
            f"per_device_eval_batch_size={math.lcm(chips, group) // chips}, or num_generations_eval."
        )
