"""The compiled path, as a mixin over a live upstream trainer class."""

import inspect
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_utils import unwrap_peft_model
from transformers.utils import logging

from ..backends import select_backend
from ..backends.host import let_forks_tokenize
from ..callbacks.run_lines import RunFacts, RunLines
from ..data import TokenWaste
from ..sharding.placement import place_model
from ..step.attention import static_masks
from ..step.loss_log import LossLog
from ..step.optimizer import LazyAdamW, check_optimizer
from ..step.users_model import save_from_host
from .arguments import (
    ADAMW_NAMES,
    CompiledArguments,
    bind_device,
    check_weights,
    compile_arguments,
    copy_arguments,
    set_gradient_checkpointing,
)
from .batches import BatchesMixin
from .checkpoints import leaving_no_empty_dir
from .chips import ChipsMixin, unused_settings
from .configs import ExtensionArguments
from .copies import RealCopiesMixin
from .evaluation import CompiledEvaluation
from .followed_arguments import FollowedArgumentsMixin
from .frozen import FrozenWeightsMixin
from .layers import LayerScanMixin
from .lengths import row_lengths
from .own_code import is_known, owner_of
from .replay import ReplayMixin
from .saving import SavingMixin
from .setting_checks import check_settings
from .status import StatusMixin
from .step_boundary import StepBoundary
from .watching import WatchMixin


logger = logging.get_logger(__name__)


class TPUTrainerMixin(
    FollowedArgumentsMixin,
    RealCopiesMixin,
    FrozenWeightsMixin,
    LayerScanMixin,
    BatchesMixin,
    ReplayMixin,
    WatchMixin,
    ChipsMixin,
    StatusMixin,
    SavingMixin,
    CompiledEvaluation,
):
    """
    Makes a [`~transformers.Trainer`] subclass train on a device whose steps are compiled programs.

    Mix it into a live upstream class, before it: `class TPUSFTTrainer(TPUTrainerMixin, SFTTrainer)`. On CUDA and CPU every
    method is upstream's. On XLA it overrides upstream's hooks so that

    - every batch has one of a few declared shapes;
    - the forward pass, the backward pass, clipping and the update of one optimizer step are one program (with gradient
      accumulation: one program for a micro-step, one for the closing step);
    - nothing is read from the device between two logs, and a log is one transfer;
    - all chips of the machine share the work, in this one process.

    Args:
        model ([`~transformers.PreTrainedModel`] or `str`):
            As upstream.
        args ([`~transformers.TrainingArguments`], *optional*):
            As upstream, or a config of this package. It is not changed. What the caller changes in it later is taken up when
            training or an evaluation begins.
        *rest:
            Upstream's other positional arguments.
        **kwargs:
            Upstream's other keyword arguments.

    Raises:
        `ValueError`: A setting does not work on the chosen device; the message says what to set instead.
    """

    def __init__(self, model=None, args: TrainingArguments | None = None, *rest, **kwargs):
        args = self._default_args(model) if args is None else args
        with leaving_no_empty_dir(args.output_dir):
            self._set_up(model, args, *rest, **kwargs)

    def _set_up(self, model, args: TrainingArguments, *rest, **kwargs) -> None:
        # The class holds the defaults.
        extension = args if isinstance(args, ExtensionArguments) else ExtensionArguments
        self.backend = select_backend("cpu" if args.use_cpu else extension.backend, extension.num_chips)
        self._max_recompiles = extension.max_recompiles
        given = inspect.signature(super().__init__).bind(model, args, *rest, **kwargs).arguments
        check_settings(args, self.backend.static_shapes, given)
        if self.backend.unknown_upstream:
            check_weights(model, kwargs.get("quantization_config"))
            if isinstance(model, PreTrainedModel):
                # A move by hand has untied its weights. Not later: PEFT's copies of tied layers are not to be tied.
                model.tie_weights()
        of_host = self.backend.prepare_host()
        self.compiled = (
            compile_arguments(args, loads_model=isinstance(model, str), num_chips=self.backend.num_chips)
            if self.backend.unknown_upstream
            else CompiledArguments(copy_arguments(args), changes=unused_settings(extension, self.backend))
        )
        self.compiled.changes += of_host + self.backend.use_compile_cache(extension.compile_cache_dir)
        bind_device(self.compiled.args, self.backend)
        self._arrange_batches()
        self._arrange_chips()
        self._arrange_saving()
        super().__init__(model, self.compiled.args, *rest, **kwargs)
        if self.backend.traces_steps:
            # The trainer has tokenized the data by now, with all threads. The second is not there in transformers 5.18.
            self.compiled.changes += let_forks_tokenize(
                self.args.dataloader_num_workers, vars(self.args).get("dataloader_multiprocessing_context")
            )
            self._prepare_compiled_path()
        lines = RunLines(self.backend, self._run_facts)
        self.add_callback(lines)
        self.start_status(extension.step_status)
        if extension.run_report:
            self.keep_record(args, lines)
        self._add_saving_callbacks()
        self.follow_arguments(args)

    def _prepare_compiled_path(self) -> None:
        # Batches stay on the host until the step takes them: token counts, missing rows and shapes are known there
        # without a read. The backend places the model.
        self.accelerator.device_placement = False
        save_from_host(self.backend)
        if self.optimizer is not None:
            check_optimizer(self.optimizer, self.model)
            self._save_from_host(self.optimizer)
        self._checkpoint_activations()
        self.backend.set_rng_state(self.args.seed)
        self._train_lengths = row_lengths(self.train_dataset)
        self.lengths = self._declare_lengths()
        self.start_watch()
        self._make_batches_static()
        for mode in ("train", "eval"):
            self.expect_batches(mode)
        #: What `_step_data` gave for the step under way, on the device.
        self.step_data: dict[str, torch.Tensor] = {}
        self._flos_per_token: float | None = None
        self.loss_log = LossLog(self.backend)
        self._override_returns_loss = not is_known(owner_of(type(self), "training_step").__module__)
        if self._override_returns_loss:
            # What is logged is what it returns to upstream's loop.
            vars(self)["training_step"] = self._overridden_step
        self._boundary = StepBoundary(self)
        self.add_callback(self._boundary)
        self._copies = self.backend.programs.real_copies()

    def _checkpoint_activations(self) -> None:
        model = unwrap_peft_model(self.model)
        if not isinstance(model, PreTrainedModel) or self.compiled.rematerialization == "none":
            return
        if vars(model.config.get_text_config()).get("output_router_logits"):
            # XLA's checkpoint runs the layers without a graph first, and that is when the router's logits are collected.
            self.compiled.rematerialization = "none"
            set_gradient_checkpointing(self.args, False)
            self.compiled.changes.append(
                "gradient_checkpointing is off: the load-balancing loss would have no gradient through it on XLA; "
                "router_aux_loss_coef=0 allows it"
            )

    def _run_facts(self) -> RunFacts:
        dtypes = {
            str(parameter.dtype).removeprefix("torch.")
            for name, parameter in self.model.named_parameters()
            if parameter.is_floating_point() and name not in self._frozen_names
        }
        compute = (
            "bfloat16" if self.compiled.compute_dtype or self.args.bf16 else "float16" if self.args.fp16 else None
        )
        precision = f"{'/'.join(sorted(dtypes))} weights" + (f", {compute} compute" if compute else "")
        lines = [*self._chip_lines(), *self._frozen_lines(), *self.compiled.changes]
        facts = RunFacts(precision, self._train_batch_size, [], None, lines)
        if self.backend.static_shapes and self.lengths:
            facts.lengths = self.lengths
            if self._train_lengths is not None:
                waste = TokenWaste(
                    self._train_lengths,
                    self.lengths,
                    self._train_batch_size,
                    self.args.train_sampling_strategy,
                    packing=self._packs_rows,
                )
                facts.lengths = list(waste.pad_share_per_length)
                facts.token_waste = waste.describe()
                facts.token_share = 1 - waste.pad_share
            facts.programs = len(facts.lengths) * (2 if self.args.gradient_accumulation_steps > 1 else 1)
        return facts

    # ---- What a subclass says ----

    def _default_args(self, model) -> TrainingArguments:
        """The arguments to use where none are given, as upstream makes them."""
        raise NotImplementedError

    def _declare_lengths(self) -> list[int]:
        """The lengths that batches are padded to, ascending."""
        raise NotImplementedError

    def _make_batches_static(self) -> None:
        """Replace `self.data_collator` by one that pads to `self.lengths`."""
        raise NotImplementedError

    @property
    def _pad_token_id(self) -> int:
        raise NotImplementedError

    @property
    def _config_name(self) -> str | None:
        """Class of the arguments that have `max_length`, for messages."""
        return None

    @property
    def _packs_rows(self) -> bool:
        """Whether rows of the training data hold several documents."""
        return False

    def _metric_sums(self, mode: str) -> dict[str, torch.Tensor]:
        """Device tensors of further metrics that a log of `mode` (`"train"` or `"eval"`) reads."""
        return {}

    def _take_metrics(self, mode: str, fetched: dict[str, torch.Tensor]) -> None:
        """Record what `_metric_sums` gave, read to the host, so that the next `log` shows it; and start anew."""

    def _drop_metrics(self, mode: str) -> None:
        """Forget what the next log of `mode` would show."""

    def _run_state(self) -> dict[str, Any]:
        """What else a checkpoint keeps, as JSON."""
        return {}

    def _load_run_state(self, state: dict[str, Any]) -> None:
        """Take up what `_run_state` gave when the checkpoint was written; empty for one of another trainer."""

    # ---- Placement, precision, optimizer ----

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if self.backend.unknown_upstream:
            self.sharding_plan = place_model(model, self.backend, self.mesh)
        else:
            super()._move_model_to_device(model, device)

    def compute_loss_context_manager(self):
        contexts = super().compute_loss_context_manager()
        if self.backend.unknown_upstream:
            contexts.enter_context(self.backend.autocast(self.compiled.compute_dtype))
        return contexts

    def get_optimizer_cls_and_kwargs(self, args, model=None) -> tuple[Any, dict[str, Any]]:
        optimizer_cls, kwargs = super().get_optimizer_cls_and_kwargs(args, model)
        if self.backend.own_optimizer and args.optim in ADAMW_NAMES:
            return LazyAdamW, {**kwargs, "backend": self.backend}
        return optimizer_cls, kwargs

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        created = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if self.backend.traces_steps and created:
            self._save_from_host(optimizer)
        if self.backend.traces_steps:
            self.scan_layers(optimizer)
        return optimizer

    def _save_from_host(self, optimizer: torch.optim.Optimizer) -> None:
        # Checkpoints hold CPU tensors, fetched in one transfer.
        optimizer.register_state_dict_post_hook(lambda _, state_dict: self.backend.fetch(state_dict))

    # ---- Steps ----

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not self.backend.static_shapes:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        with static_masks(inputs.pop("segment_ids", None)):
            return self._compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _compute_loss(self, model, inputs, return_outputs, num_items_in_batch):
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        if not self.backend.static_shapes or "input_ids" not in inputs:
            return super().floating_point_ops(inputs)
        # Upstream counts the model's parameters anew at every micro-step.
        tokens = inputs["input_ids"].numel()
        if self._flos_per_token is None:
            self._flos_per_token = super().floating_point_ops(inputs) / tokens
        return self._flos_per_token * tokens

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        self.step_data = self.backend.send(self._step_data())
        if self.replay is None:
            with self._copies_as_ever():
                return self._traced_step(model, inputs, num_items_in_batch)
        return self._replayed_step(model, inputs, num_items_in_batch)

    def _traced_step(self, model, inputs, num_items_in_batch) -> torch.Tensor:
        if self.local_gradients is not None and not self.local_gradients.are_of(model):
            self.local_gradients = None
            self.keep_gradients_local(model)
        if self.local_gradients is None:
            loss = super().training_step(model, inputs, num_items_in_batch)
        else:
            with self.local_gradients.micro_step(closing=self.accelerator.sync_gradients):
                loss = self.over_chips(super().training_step(model, inputs, num_items_in_batch))
        if self.backend.metrics_on_device and (self.replay is not None or not self._override_returns_loss):
            self._log_step_loss(loss)
        return loss

    def _overridden_step(self, *args, **kwargs) -> torch.Tensor:
        loss = type(self).training_step(self, *args, **kwargs)
        if self.replay is None:
            self._log_step_loss(loss)
        return loss

    def _log_step_loss(self, loss: torch.Tensor) -> None:
        self.loss_log.add(
            loss,
            closing=self.accelerator.sync_gradients,
            accumulating=self.args.gradient_accumulation_steps > 1,
        )

    # ---- Logs ----

    def _maybe_log_save_evaluate(
        self, tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=None
    ) -> None:
        if (
            self.backend.metrics_on_device
            and self.control.should_log
            and self.state.global_step > self._globalstep_last_logged
        ):
            # Upstream's own log reads the loss, the gradient norm and every metric one by one. It logs nothing more
            # afterwards, since this one is noted as the last.
            logs = self._read_train_metrics(grad_norm)
            logs["learning_rate"] = self._get_learning_rate() if learning_rate is None else learning_rate
            self._globalstep_last_logged = self.state.global_step
            self.store_flos()
            self.log(logs, start_time)
        super()._maybe_log_save_evaluate(
            tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=learning_rate
        )

    def _read_train_metrics(self, grad_norm: torch.Tensor | float | None = None) -> dict[str, float]:
        """Read the loss, the gradient norm if there is one, and the metrics, all in one transfer."""
        with self.phase("device"):
            fetched = self.backend.fetch(
                {"grad_norm": grad_norm, "loss": self.loss_log.tensors, "metrics": self._metric_sums("train")},
                self.begin_read,
            )
        window = self.loss_log.read(fetched["loss"])
        self._take_metrics("train", fetched["metrics"])
        # One NaN would stay in upstream's own sum for good.
        self.reset_upstream_loss()
        self._total_loss_scalar += window.total
        if window.finite_steps < window.steps:
            step = self.state.global_step - window.steps + window.first_nonfinite
            logger.warning(
                f"The loss was NaN or infinite at step {step} ({window.steps - window.finite_steps} of the "
                f"{window.steps} steps since the last log); the logged loss is the mean of the others."
            )
        read = {"loss": window.mean}
        if grad_norm is not None:
            value = fetched["grad_norm"]
            read["grad_norm"] = value.item() if isinstance(value, torch.Tensor) else value
        return read

    def _finalize_training(self, trial, num_train_samples, start_time):
        if self.backend.metrics_on_device:
            self._read_train_metrics()
            self._tr_loss = torch.zeros(())
        return super()._finalize_training(trial, num_train_samples, start_time)

    # ---- Checkpoints ----

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        self.take_up_changes()
        checkpoint = self._find_checkpoint(resume_from_checkpoint)
        if self.backend.static_shapes:
            self.expect_batches("train")
        with (
            self.stopping_when_told(),
            self.frozen_weights_in_bfloat16(),
            self.split_activations(),
            self.copies_are_real(),
        ):
            try:
                return super().train(checkpoint, *args, **kwargs)
            finally:
                self._end_run()

    def _end_run(self) -> None:
        """Leave the model and the trainer for another run, however this one ended."""
        self.end_replay()
        self.end_watch()
        self.unscan_layers()
        if self.backend.traces_steps:
            self._boundary.end()
            # Of a run that failed, no log has shown them.
            self.loss_log.drop()
            self._drop_metrics("train")
            self._drop_metrics("eval")

    def _save(self, output_dir=None, state_dict=None) -> None:
        if self.backend.traces_steps and state_dict is None:
            # Parameters rather than detached copies, for tied weights to be seen as one and stored once.
            state_dict = self._in_float32(self.backend.fetch(dict(self.model.state_dict(keep_vars=True))))
        with self.layers_in_place():
            super()._save(output_dir, state_dict)

    def _load_best_model(self) -> None:
        # Training is over.
        self.unscan_layers()
        super()._load_best_model()
