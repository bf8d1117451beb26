"""Training on completions that the model writes itself: GRPO, RLOO, distillation on-policy."""

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import datasets
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import ProcessorMixin, Trainer
from transformers.trainer_utils import unwrap_peft_model

from ...data.buckets import round_up_length, validate_buckets
from ...errors import UserError
from ...temporarily import temporarily
from ..checks.datasets import known_columns, named_datasets
from ..checks.messages import ROWS_AT_ONCE
from ..checks.rows import naming_rows
from ..checks.upstream import checkpointing_left_on, upstream_behind, upstream_of
from ..run.index_ranges import IndexRanges
from ..run.lengths import declare_lengths
from ..run.text import TextGeneration
from .checkpoints import OF_PROMPTS, RolloutCheckpoints


class RolloutMixin(RolloutCheckpoints):
    """
    The part of a trainer that writes the completions which it is trained on.

    Upstream's own code generates and compares completions, on the host and with tensors of the host: none of it is
    compiled, and nothing of it is read from the device. What it needs of the device are programs of static shape, that of the
    completions above all. Then the batch is padded, prompts on the left and completions on the right, and sent. Upstream's loss
    is the step's program, as it is written.

    On CUDA and CPU every method is upstream's.
    """

    generates = True
    drops_nan_metrics = True
    timed_upstream = ("step_time",)
    # Upstream prepares a batch on the host, before the program of the step begins.
    methods_on_host = ("_prepare_inputs",)

    # ---- Setting up ----

    @classmethod
    def check_trainer_kwargs(cls, trainer_kwargs: Mapping[str, Any]) -> None:
        """Refuse (`ValueError`) what does not work in programs of static shape, before a model is loaded."""
        upstream = upstream_of(cls).__name__
        if isinstance(processor := trainer_kwargs.get("processing_class"), ProcessorMixin):
            raise UserError(
                f"processing_class is a {type(processor).__name__}, which prepares images. {upstream} trains on text on XLA. Pass its "
                "tokenizer: processing_class=processor.tokenizer."
            )
        for name, dataset in named_datasets(trainer_kwargs).items():
            columns = known_columns(dataset)
            if columns and "prompt" not in columns:
                raise UserError(
                    f"{name} has the columns {columns}, and {upstream} needs 'prompt': a text, or messages that end with the user's. "
                    f"Rename a column: dataset.rename_column({columns[0]!r}, 'prompt')."
                )

    def _declare_lengths(self) -> list[int]:
        most = vars(self.args).get("max_prompt_length")
        sets = named_datasets(vars(self))
        lengths = {
            name: list(self._prompt_lengths(dataset))
            for name, dataset in sets.items()
            if isinstance(dataset, datasets.Dataset)
        }
        streams = [name for name in sets if name not in lengths]
        if streams and most is None:
            raise UserError(
                f"The lengths of the prompts of {streams[0]} are not known (a streaming dataset). Give the longest in tokens: "
                f"{self._config_name}(max_prompt_length=256)."
            )
        for name, of_rows in lengths.items():
            if most is not None and (longest := max(of_rows)) > most:
                raise UserError(
                    f"Row {of_rows.index(longest)} of {name} (the first is row 0) has a prompt of {longest} tokens, which is longer than "
                    f"max_prompt_length={most}. Set max_prompt_length={round_up_length(longest, longest + 128)}, or remove "
                    "such rows from the file (in Python: dataset.filter)."
                )
        longest = max(map(max, lengths.values()), default=0)
        if streams or (most is not None and vars(self).get("rollout_func") is not None):
            # The prompts are not known, or may become others.
            longest = most
        is_one_length = not self.pad_to_multiple_of and all(min(of_rows) == longest for of_rows in lengths.values())
        # A prompt that is not in the data may be shorter.
        self._pads_prompts = bool(streams) or vars(self).get("rollout_func") is not None or not is_one_length
        if is_one_length:
            # Prompts of one length need no pads at all.
            declared_length = longest
        else:
            multiple = self.pad_to_multiple_of or 1
            declared_length = -(-round_up_length(longest, most or longest + 128) // multiple) * multiple
        return self._prompt_buckets(longest, declared_length, lengths.get("train_dataset"))

    def _prompt_buckets(self, longest: int, declared_length: int, of_rows: list[int] | None) -> list[int]:
        """The lengths that prompts are padded to, of which the longest has `longest` tokens."""
        buckets = vars(self.args).get("length_buckets")
        if not buckets:
            return [declared_length]
        if len(buckets) == 1:
            return declare_lengths(buckets, declared_length, of_rows, self._train_batch_size, "random")
        buckets = validate_buckets(buckets, max(*buckets, declared_length))
        declared_length = next((bucket for bucket in buckets if bucket >= longest), declared_length)
        return [*(bucket for bucket in buckets if bucket < declared_length), declared_length]

    def _prompt_lengths(self, dataset: datasets.Dataset) -> Iterator[int]:
        for batch in dataset.with_format(None).select_columns(["prompt"]).iter(ROWS_AT_ONCE):
            # Images are refused.
            tokens, _, _ = self._tokenize_prompts(batch["prompt"])
            yield from map(len, tokens)

    def _tokenize_prompts(self, prompts: list):
        tokenize = super()._tokenize_prompts
        datasets_by_name = named_datasets(vars(self))
        with naming_rows(datasets_by_name, ("prompt",), lambda dataset: tokenize(list(dataset["prompt"]))):
            return tokenize(prompts)

    def lengths_of_rows(self, dataset) -> list[int] | None:
        return list(self._prompt_lengths(dataset)) if isinstance(dataset, datasets.Dataset) else None

    @property
    def generation_rows(self) -> int:
        """Completions that are generated together, on all chips."""
        return self.args.generation_batch_size

    @property
    def generation_batches(self) -> int:
        """Batches that they are trained on in."""
        return self.args.steps_per_generation

    def get_train_dataloader(self):
        prompts = self.generation_rows // self.num_generations
        if isinstance(self.train_dataset, datasets.Dataset) and len(self.train_dataset) < prompts:
            # Upstream would leave all of them out.
            raise UserError(
                f"train_dataset has {len(self.train_dataset)} rows, and a generation takes {prompts}, so there would be no step. Add "
                "rows, or lower per_device_train_batch_size, or the number of steps of a generation (steps_per_generation)."
            )
        return self._make_train_dataloader()

    def _make_train_dataloader(self):
        return super().get_train_dataloader()

    def rows_of_a_step(self) -> tuple[int, int]:
        # Each generation is trained on in so many micro-steps.
        micro_steps = self.generation_batches * self.num_iterations
        generations = -(-self.args.gradient_accumulation_steps // micro_steps)
        prompts = self.generation_rows // self.num_generations
        return prompts * generations, generations * micro_steps // self.args.gradient_accumulation_steps

    def _make_batches_static(self) -> None:
        """The collator yields rows as they are: what is padded is made of them later."""

    def _finish_set_up(self) -> None:
        super()._finish_set_up()
        if not self.backend.static_shapes:
            return
        if self._is_vlm:
            raise UserError(
                "The model comes with a processor for images, which do not work with training on completions on XLA. Pass a "
                "tokenizer: processing_class=AutoTokenizer.from_pretrained(...)."
            )
        prompts = self.generation_rows // self.num_generations
        times = "once" if self.num_iterations == 1 else f"{self.num_iterations} times"
        self.adapted.changes.append(
            f"a generation is {prompts} prompt{'s' * (prompts > 1)} (padded to {' or '.join(map(str, self.lengths))} tokens) x {self.num_generations} "
            f"completion{'s' * (self.num_generations > 1)} of up to {self.max_completion_length} tokens, in "
            f"{self.generation_batches} batch{'es, each' * (self.generation_batches > 1)} trained on {times}"
        )
        for model in (self.model, *self.other_models()):
            self._check_positions(model)
        self._text = TextGeneration(self, self.generation_config, self.lengths)
        self._text.check()

    def _check_positions(self, model: nn.Module) -> None:
        """Refuse (`ValueError`) a model with learned positions of which rows of static shape take others than upstream's, or none."""
        positions, name = IndexRanges(model, labels=False).learned_positions, type(unwrap_peft_model(model)).__name__
        if positions is None:
            return
        prompt, completion = self.lengths[-1], self.max_completion_length
        if prompt + completion > positions.size:
            raise UserError(
                f"A prompt has up to {prompt} tokens, and a completion {completion}, but {name} has positions for {positions.size} "
                f"tokens ({positions.name}). Set a max_completion_length by which the sum is {positions.size} at most, or leave "
                "long prompts out of the dataset."
            )
        if positions.counts_columns and self._pads_prompts:
            raise UserError(
                f"{name} takes the column of a token for its position ({positions.name}), and prompts are padded on the left, on XLA to "
                f"{' or '.join(map(str, self.lengths))} tokens: the numbers would not be upstream's. Take a model with rotary "
                "embeddings, keep to prompts of one length, or train on a GPU, or on the CPU with use_cpu=True."
            )

    @property
    def step_lengths(self) -> list[int]:
        return [length + self.max_completion_length for length in self.lengths]

    @property
    def _runs_other_passes(self) -> bool:
        return True

    def _loss_sums_tokens(self, model: nn.Module) -> bool:
        return False

    # ---- A batch ----

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        batch = super()._prepare_inputs(generation_batch)
        if not self.backend.static_shapes:
            self._count_batch(batch)
        return batch

    def _count_batch(self, batch: dict[str, Tensor]) -> None:
        if self.status is not None and self.model.training:
            ids, mask = join_completions(batch)
            self.status.count({"input_ids": ids, "attention_mask": mask})

    def send_batch(
        self, inputs: list[dict[str, Any]], numbers: Mapping[str, Any] | None = None
    ) -> dict[str, dict[Hashable, Any]]:
        phase = "rollout" if self.model.training else "eval"
        with self.phase(phase), self._on_host():
            batch = upstream_behind(type(self))._prepare_inputs(self, inputs)
        self.check_ranges(batch)
        columns = batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1]
        by_length = self.by_length.data(columns)
        # All processes need prompts of the same length.
        (width,) = self.backend.processes.most([self._width_of(batch)])
        batch = self._pad_batch(self._arrange_rows(batch), width)
        self._count_batch(batch)
        rows = len(batch["prompt_ids"])
        return self._send_rows({**batch, **by_length}, rows, numbers, whole=rows % self.backend.num_chips != 0)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        batch = self.batch_under_way
        if "prompt_ids" not in batch:
            # This is a batch of a pass.
            return super().batch_shape
        rows, prompt = batch["prompt_ids"].shape
        return rows, prompt + batch["completion_ids"].shape[1]

    def _arrange_rows(self, batch: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """A batch on the host as it is trained on, the same on all hosts of a slice."""
        return batch

    @contextmanager
    def _on_host(self) -> Iterator[None]:
        """Within this context, upstream's code has its tensors on the host."""
        # Hosts of a slice have the rows of all chips each, and take what the first process takes.
        place = {"device": torch.device("cpu"), "process_index": self.backend.processes.row_shard}
        with (
            temporarily(self.accelerator.state, **place),
            temporarily(self.args.distributed_state, **place),
            # `args.device` reads this.
            temporarily(self.args, _setup_devices=place["device"]),
            checkpointing_left_on(type(self)),
        ):
            yield

    def _width_of(self, batch: Mapping[str, Tensor | None]) -> int:
        """The length that the prompts of a batch are padded to."""
        return self._declared_for(int(batch["prompt_mask"].sum(1).max()), "A prompt")

    def _pad_batch(self, batch: Mapping[str, Tensor | None], width: int) -> dict[str, Tensor]:
        """Pad what upstream has padded to the longest of a batch, on the host: prompts to `width`."""
        room, longest = self.max_completion_length, int(batch["completion_mask"].sum(1).max())
        if longest > room:
            raise UserError(
                f"A completion has {longest} tokens, which is longer than max_completion_length={room}. Set "
                f"max_completion_length={longest}, or have the rollout_func return no more."
            )
        return {
            key: self._pad_tokens(key, value, width if key in OF_PROMPTS else room)
            for key, value in batch.items()
            if value is not None
        }

    def _pad_tokens(self, key: str, value: Tensor, length: int) -> Tensor:
        if value.ndim != 2 or value.shape[1] == 1 != length and not key.endswith(("_ids", "_mask", "logps")):
            # The value is one for each row, or one for all of them.
            return value
        missing = length - value.shape[1]
        fill = self._pad_token_id if key.endswith("_ids") else 0
        # Upstream's padding to a multiple may be cut off.
        return pad(value, (missing, 0) if key in OF_PROMPTS else (0, missing), value=fill)

    # ---- On the device, beside the step ----

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        if not self.backend.static_shapes:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        # A prompt is there as often as completions of it are wanted.
        for row, prompt in enumerate(prompt_ids):
            self._declared_for(len(prompt), f"The prompt of row {row} of a generation")
        of_process = self.generation_rows // self.backend.processes.row_shards
        rows = of_process if self.model.training else self.args.eval_batch_size
        # The last batch of an evaluation is the same program.
        copies = self.num_generations if self.model.training else 1
        return self._text.generate(prompt_ids, rows=rows, copies=copies).token_ids

    def _declared_for(self, tokens: int, what: str) -> int:
        """The length that prompts of so many tokens are padded to."""
        width = next((length for length in self.lengths if length >= tokens), None)
        if width is None:
            raise UserError(
                f"{what} has {tokens} tokens, and prompts are padded to {self.lengths[-1]} on XLA. Set "
                f"{self._config_name}(max_prompt_length={round_up_length(tokens, tokens + 128)}), or leave such rows out."
            )
        return width

    # ---- Steps ----

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.backend.static_shapes:
            # Upstream's `training_step` would count so, which a step that is replayed or compiled whole does not come by. It
            # would log its own time as `step_time`, too: that of a step is known where its program has run.
            self._step += 1
        return loss

    def _step_of_upstream(self, model, inputs, num_items_in_batch) -> Tensor:
        # TRL's counts micro-steps, whose number is on the device here.
        return Trainer.training_step(self, model, inputs, num_items_in_batch)

    def _get_num_items_in_batch(self, batch_samples, device) -> None:
        # Rows that have no completion yet.
        return None

    def floating_point_ops(self, inputs) -> float:
        # Upstream counts the tokens of `input_ids`, which there are none of, times the parameters.
        return 0.0 if self.backend.static_shapes else super().floating_point_ops(inputs)

    def evaluation_loop(self, dataloader, description, prediction_loss_only=None, *args, **kwargs):
        # There is no other prediction than a loss.
        loss_only = True if self.backend.static_shapes else prediction_loss_only
        return super().evaluation_loop(dataloader, description, loss_only, *args, **kwargs)


def join_completions(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Prompts and completions one after the other: their tokens, and which of them are no padding."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    return ids, torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
