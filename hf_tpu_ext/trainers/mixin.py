"""The compiled path, as a mixin over a live upstream trainer class."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_utils import unwrap_peft_model

from ..backends.compiled_function import StateLost
from ..data.static_shapes import StaticShapeCollator
from ..layers.activation_checkpointing import recompute
from ..layers.adapters import adapters_scaled_inside
from ..layers.frozen_weights import FrozenWeights, bfloat16_holds
from ..sharding import ShardingPlan
from .checkpoint.directories import leaving_no_empty_dir, newest_checkpoint
from .checkpoint.earlier_run import find_best, set_aside
from .checkpoint.run_lock import only_run_in
from .checkpoint.saving import SavingMixin
from .checks.datasets import check_has_rows, check_rows_left, named_datasets
from .checks.upstream import default_arguments, signature_of
from .run.batches import BatchesMixin
from .run.evaluation import CompiledEvaluation
from .run.images import naming_broken_images
from .run.index_ranges import IndexRanges
from .run.lengths import lengths_for
from .run.metrics import MetricsMixin
from .run.status import StatusMixin
from .run.steps import StepsMixin
from .run.watch import WatchMixin
from .set_up import SetUpMixin


class _TrainerType(type):
    """
    Leaves out a base that another base derives from. With `HF_TPU_EXT=1` TRL's trainers are those of this package, so that
    `class T(TPUTrainerMixin, SFTTrainer)`, which is right without it, would have no order of bases.
    """

    def __new__(mcls, name, bases, namespace, **kwargs):
        bases = tuple(base for base in bases if not any(base in other.__mro__[1:] for other in bases))
        return super().__new__(mcls, name, bases, namespace, **kwargs)


class TPUTrainerMixin(
    StepsMixin,
    SetUpMixin,
    BatchesMixin,
    MetricsMixin,
    StatusMixin,
    SavingMixin,
    WatchMixin,
    CompiledEvaluation,
    metaclass=_TrainerType,
):
    """
    Makes a [`~transformers.Trainer`] subclass train on a device whose steps are compiled graphs.

    Mix it into a live upstream class, before it: `class TPUSFTTrainer(TPUTrainerMixin, SFTTrainer)`. It fits every trainer whose
    loss is a function of a batch. On CUDA and CPU every method calls upstream's. On XLA these are overridden, here or in the
    parts that this class is made of:

    | Method | Why |
    |---|---|
    | `training_step` | begins a step: traced, or replayed by the handle of its executable |
    | `compute_loss` | masks of static shape, a fused head as a loop, metrics left on the device |
    | `_prepare_inputs`, `_get_num_items_in_batch`, `_track_num_input_tokens` | the batch is sent once, and counted on the host |
    | `_clip_grad_norm`, `_get_grad_norm` | the norm stays on the device, and is the program's where a step is replayed |
    | `create_optimizer` | AdamW whose numbers are tensors; the scan over layers |
    | `_move_model_to_device`, `_init_training_state` | the model is placed over all chips, whose rows are one batch |
    | `compute_loss_context_manager` | autocast of XLA, with float32 weights |
    | `floating_point_ops` | upstream counts the parameters at every micro-step |
    | `_maybe_log_save_evaluate`, `_finalize_training`, `log` | a log is one transfer; phases of a step; preemption; hosts decide together |
    | `prediction_step`, `evaluation_loop`, `evaluate`, `predict` | losses are summed, predictions fetched together |
    | `get_batch_samples`, `_run_epoch`, `_load_rng_state`, `_save_rng_state` | phases of a step; bit-exact resume |
    | `_load_optimizer_and_scheduler` | the state goes from the file to the chips one tensor at a time |
    | `_load_from_checkpoint` | adapters keep the dtype that TRL gave them; experts and vision towers are loaded by the names that they are saved under |
    | `_save`, `save_model`, `_save_optimizer_and_scheduler`, `_save_checkpoint`, `_get_output_dir`, `_push_from_checkpoint`, `create_model_card`, `_determine_best_metric`, `_load_best_model` | fetched in one transfer or by all hosts, written atomically; the card names this package |
    | `train`, `_prepare_for_training`, `_inner_training_loop`, `_hp_search_setup` | takes up changed arguments, finds a complete checkpoint, says that memory has run out, leaves nothing to the next run or trial |

    Args:
        *args:
            Upstream's positional arguments.
        **kwargs:
            Upstream's keyword arguments. `args` may also be a config of this package. It is not changed. What the caller
            changes in it later is taken up when training or an evaluation begins.

    Raises:
        `ValueError`: A setting does not work on the chosen device; the message says what to set instead.
    """

    #: Whether this package has what a trainer needs that writes its own data.
    generates = False
    #: Methods of upstream that run between programs, on the host: code of the user's in them is in no step.
    methods_on_host: tuple[str, ...] = ()
    #: Whether upstream leaves NaN out of the means that it logs.
    drops_nan_metrics = False
    # Moves what the run does not go on from out of its way, until that is done.
    _set_aside: Callable[..., Path | None] | None = None
    # Where it has moved that, if anything.
    _aside: Path | None = None
    # The batch size that `auto_find_batch_size` has tried last in the run under way.
    _rows_tried: int | None = None

    def __init__(self, *args, **kwargs):
        arguments = signature_of(type(self)).bind(*args, **kwargs)
        args = self._complete_arguments(arguments.arguments.get("args"), arguments.arguments.get("model"))
        arguments.arguments["args"] = args
        self._check_data(arguments.arguments)
        with leaving_no_empty_dir(args.output_dir):
            self._set_up(arguments)
            for name, dataset in named_datasets(vars(self)).items():
                check_rows_left(dataset, name, self.args)
            self._finish_set_up()
            self.note_data()

    # ---- What a subclass may say otherwise ----

    def _complete_arguments(self, args: TrainingArguments | None, model) -> TrainingArguments:
        """The arguments of a run, where they are left out or of another class than upstream's."""
        return default_arguments(type(self), model) if args is None else args

    def _check_data(self, arguments: Mapping[str, Any]) -> None:
        """Refuse datasets that cannot work (`ValueError`), before anything is loaded. `arguments` has all arguments by name."""
        for name, dataset in named_datasets(arguments).items():
            check_has_rows(dataset, name)

    def _finish_set_up(self) -> None:
        """Prepare what needs the trainer as it is when all else is set up."""

    def _declare_lengths(self) -> list[int]:
        """The lengths that batches are padded to, ascending; none if they are not known."""
        if vars(self.args).get("packing"):
            if vars(self.args).get("length_buckets"):
                self.adapted.changes.append(
                    f"length_buckets={self.args.length_buckets} has no effect with packing=True: all rows are of max_length"
                )
            return [self.args.max_length]
        positions = IndexRanges(self.model, labels=False).learned_positions
        return lengths_for(
            self.args,
            self._train_lengths,
            self.train_dataset,
            self.eval_dataset,
            self._train_batch_size,
            None if positions is None else positions.size,
        )

    def _make_batches_static(self) -> None:
        """Replace `self.data_collator` by one that pads to `self.lengths`."""
        if self.lengths or self._adds_mask:
            model = unwrap_peft_model(self.model)
            self.data_collator = StaticShapeCollator(
                self.data_collator,
                self.lengths,
                self._pad_token_id if self.lengths else 0,
                self._config_name,
                self._count_tokens,
                self._adds_mask,
                decodes=isinstance(model, PreTrainedModel) and model.config.is_encoder_decoder,
            )
        # Upstream's trainers say so that have a collator for images.
        if vars(self).get("_is_vision_dataset"):
            self.lay_out_images()

    @property
    def _adds_mask(self) -> bool:
        """Whether batches get the attention mask that upstream's collator leaves out."""
        return False

    @property
    def _config_name(self) -> str | None:
        """Class of the arguments that have `max_length`, for messages."""
        return type(self.args).__name__ if "max_length" in vars(self.args) else None

    @property
    def step_lengths(self) -> list[int]:
        """The lengths of the rows that a step is compiled for."""
        return self.lengths

    def _bfloat16_holds(self, weights: Sequence[torch.Tensor]) -> list[bool]:
        """Say of each frozen weight whether bfloat16 holds it exactly."""
        return bfloat16_holds(weights, self.backend)

    def _more_metrics(self) -> tuple[str, ...]:
        """Names of metrics that are appended to `self._metrics` by other code than upstream's."""
        return ()

    # ---- Checkpoints ----

    def train(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None):
        if self.model is None:
            # `hyperparameter_search` lets go of a trial's model. Upstream makes that of this one within the run.
            self.model = self.call_model_init(trial)
        self.take_up_changes()
        with only_run_in(self.args.output_dir, self.backend.processes):
            checkpoint = self._find_checkpoint(resume_from_checkpoint)
            self.agreement.check_beginning(named_datasets(vars(self)))
            record = self.run_record
            self._aside = None
            run_dir = self._get_output_dir(trial)
            if record is not None:
                record.directory = run_dir
            if self.args.should_save:
                took_newest = checkpoint is not None and resume_from_checkpoint is True
                models = map(unwrap_peft_model, (self.model, *self.other_models()))
                names = [model.name_or_path for model in models if isinstance(model, PreTrainedModel)]
                self._set_aside = partial(set_aside, run_dir, checkpoint, record is not None, took_newest, names)
            with (
                self.backend.processes.together("training"),
                self.stopping_when_told(),
                self.models_as_run(),
                self.layers.forward_loops(self.other_models()),
                self.copies.real(
                    [self, *self.callback_handler.callbacks],
                    [self.compute_metrics, self.preprocess_logits_for_metrics, self.compute_loss_func],
                ),
            ):
                try:
                    return super().train(checkpoint, trial, ignore_keys_for_eval)
                except Exception as error:
                    if record is not None:
                        record.note_error(error, self.state.global_step)
                    raise
                finally:
                    self._rows_tried = None
                    self._end_run()

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        # Only now, and once in a run: one that cannot be prepared leaves an earlier one in its place.
        if self._set_aside is not None:
            self._aside = self._set_aside(max_steps=max_steps)
            self._set_aside = None
        # Each time: a run that begins again with a smaller batch reads its state again.
        if self._resumed_from is not None and self.state.best_global_step:
            find = partial(find_best, self.state, self._resumed_from, self._aside)
            self.state.best_model_checkpoint = self.backend.processes.by_first("the best checkpoint so far", find)
        return prepared

    def _inner_training_loop(
        self, batch_size=None, args=None, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None
    ):
        if self.args.auto_find_batch_size:
            rows = self.chips.rows_at_once(batch_size)
            if rows == self._rows_tried:
                # They have failed: accelerate takes a tenth away at a time, which may be less than a row of each chip.
                raise RuntimeError("XLA has run out of memory.")
            batch_size = self._rows_tried = rows
            # An attempt that failed leaves gradients and losses, which upstream's loop begins anew.
            self._end_run()
        try:
            with naming_broken_images(named_datasets(vars(self))):
                return super()._inner_training_loop(
                    batch_size, args, resume_from_checkpoint, trial, ignore_keys_for_eval
                )
        except StateLost as error:
            newest = newest_checkpoint(self._get_output_dir(trial))
            error.add_note(
                "There is no checkpoint to resume from: begin anew, with save_steps below the steps that a failure may cost."
                if newest is None
                else f"Resume from {newest}: trainer.train(resume_from_checkpoint={newest!r}), or `resume_from_checkpoint: true` in the recipe."
            )
            raise
        except RuntimeError as error:
            if self.args.auto_find_batch_size and "RESOURCE_EXHAUSTED" in str(error):
                # Accelerate goes on with a smaller batch where it knows the words.
                raise RuntimeError("XLA has run out of memory.") from error
            raise

    def take_up_changes(self) -> None:
        """Take up what the caller has changed or replaced since the trainer was made: arguments, models, data, the collator."""
        self.followed_arguments.take_up()
        self.take_up_models()
        self.take_up_data()

    @contextmanager
    def models_as_run(self) -> Iterator[None]:
        """Within this context models compute as they do in programs: what training, evaluation and predictions share."""
        models = [self.model] if self.backend.traces_steps else []
        rope = self.by_length.override_rope() if self.backend.static_shapes else nullcontext()
        with (
            rope,
            self.frozen_in_bfloat16(),
            self.chips.split_activations(self.model),
            adapters_scaled_inside(models),
            self.backend.replace_checkpoint(partial(recompute, self.model, self.backend, False)),
        ):
            yield

    @contextmanager
    def frozen_in_bfloat16(self) -> Iterator[None]:
        """
        Within this context frozen weights take half the memory, where that changes no number. Whoever takes the model out of the
        trainer, to merge adapters or to save it, has the dtypes that it came with.
        """
        # FSDP2 keeps the parts of a weight by their memory.
        stays = self.adapted.compute_dtype != torch.bfloat16 or self.backend.splits_weights
        if stays or self.frozen:
            yield
            return
        # A reference that follows the policy changes, whatever its parameters say.
        others = [] if vars(self.args).get("sync_ref_model") else self.other_models()
        self.frozen = [
            FrozenWeights(model, self.backend, ShardingPlan(model, self.chips.mesh).specs)
            for model in (self.model, *others)
        ]
        try:
            for frozen in self.frozen:
                frozen.shorten(self._bfloat16_holds)
            yield
        finally:
            for frozen in self.frozen:
                frozen.restore()
            self.frozen = []

    def _end_run(self) -> None:
        """Leave the model and the trainer for another run, however this one ended."""
        if self.backend.static_shapes:
            self.sync_monitor.close()
            self.by_length.end_run()
            self.layers.end()
            self.steps.end_run()
            self.programs.of_run.clear()
            # No log has shown what a run that failed left here.
            self.loss_log.drop()
            self.drop_metrics("train")
            self.drop_metrics("eval")
