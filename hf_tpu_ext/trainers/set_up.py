"""Setting a trainer up: its device, its models on it, what owns its steps."""

import inspect
import logging
from collections.abc import Callable
from contextlib import ExitStack
from copy import copy
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from torch import nn
from transformers import DefaultFlowCallback, GenerationConfig, PreTrainedModel, TrainingArguments
from transformers.training_args import OptimizerNames

from ..backends import select_backend
from ..backends.base import Backend
from ..backends.host import let_forks_tokenize
from ..callbacks.run_lines import RunLines
from ..errors import UserError
from ..layers.attention import static_masks
from ..layers.frozen_weights import FrozenWeights
from ..layers.random_numbers import RandomSeeds
from ..quantization.bitsandbytes import check_method, find_config, keep_gradients_on_cpu
from ..sharding.plan import place_model
from ..step.host_io import save_from_host
from ..step.metrics import LossLog
from ..step.optimizer import LazyAdamW, check_optimizer, follow_placed, place_loaded
from ..step.running_code import is_known
from ..temporarily import temporarily
from .checks.adaptations import ADAMW_NAMES, FULL_STATE_NAMES
from .checks.field_answers import Place
from .checks.fields import adapt
from .checks.followed import FollowedArguments
from .checks.settings import (
    absent_modules_of_adapter,
    check_adapter,
    check_architecture,
    check_model_names,
    check_numbers,
    check_processes,
    naming_layers,
)
from .checks.upstream import check_trainer, loads_model, overrides_loss
from .configs import ExtensionArguments, PredictedTextArguments
from .run.chips import Chips
from .run.eager_steps import EagerSteps, check_split
from .run.ema import Averaging
from .run.hosts import HostAgreement, check_same_settings
from .run.layers import LayerScan
from .run.lengths import longest_kept, row_lengths
from .run.predictions import check_predicted_text
from .run.programs import TrainerPrograms, WeightCopies
from .run.text import ModelGenerate, TextGeneration
from .run.training_steps import TrainingSteps
from .run.user_code import owner_of


# The name of its loggers begins so.
_PACKAGE = __name__.partition(".")[0]


class SetUpMixin:
    """
    The part of [`TPUTrainerMixin`] that chooses the device and makes what a trainer consists of, around upstream's `__init__`.

    In this order: the backend, upstream's arguments adapted to it, all that upstream's `__init__` asks for, that `__init__`, and then
    what owns the steps, watches programs, and reports.
    """

    def _set_up(self, arguments: inspect.BoundArguments) -> None:
        args, model = arguments.arguments["args"], arguments.arguments.get("model")
        # The class holds the defaults.
        extension = args if isinstance(args, ExtensionArguments) else ExtensionArguments
        self.backend = select_backend(extension.backend, extension.num_chips, args.use_cpu)
        #: As in [`ExtensionArguments`].
        self.compile_step = extension.compile_step
        check_trainer(type(self), arguments.arguments, self.backend.unknown_upstream)
        if self.backend.static_shapes:
            check_adapter(arguments.arguments)
        # What the caller changes in its arguments later is adapted in the same way.
        adapt_arguments = partial(
            adapt,
            place=Place.of(self.backend, args),
            trainer_kwargs={name: value for name, value in arguments.arguments.items() if name != "args"},
            loads_model=loads_model(args, arguments),
            overrides_loss=overrides_loss(type(self)),
        )
        check_numbers(args)
        #: The arguments as the device takes them, with a line for each change.
        self.adapted = adapt_arguments(args)
        quantization = None
        if self.backend.unknown_upstream:
            if isinstance(model, nn.Module):
                quantization = find_config(model)
            elif isinstance(model, str):
                # Upstream ignores the argument unless it loads the model.
                quantization = arguments.arguments.get("quantization_config")
            if quantization is not None:
                check_method(quantization)
            if isinstance(model, PreTrainedModel):
                # A move by hand has untied its weights. Not later: PEFT's copies of tied layers are not to be tied.
                model.tie_weights()
        else:
            check_processes(args)
        self.adapted.changes += self.backend.prepare_host()
        self.adapted.changes += self.backend.use_compile_cache(extension.compile_cache_dir)
        bind_device(self.adapted.args, self.backend)
        if self.backend.processes.index > 0:
            # The first warns of what is the same in all.
            logging.getLogger(_PACKAGE).setLevel(logging.ERROR)
        check_same_settings(self.backend, args)
        #: What all hosts of a slice have to have in common.
        self.agreement = HostAgreement(self.backend)
        #: Compiles what runs as programs.
        self.programs = TrainerPrograms(self)
        self._arrange_batches()
        self.chips = Chips(self.backend, self.adapted.args, self.adapted.mesh)
        #: Whether a training step is one program, where nothing stands in its way.
        self.compiles_steps = self.backend.traces_steps or (
            self.backend.compiles_functions
            and self.compile_step in ("auto", "step")
            and not self.backend.splits_weights
        )
        if self.backend.splits_weights:
            check_split(args.mesh, self.generates, quantization is not None)
        self._arrange_saving()
        #: What random numbers of programs follow from.
        self.seeds = RandomSeeds(args.seed)
        self.layers = LayerScan(self)
        self.copies = WeightCopies(self.backend)
        #: Frozen weights that are bfloat16 for the time being: those of the trained model, then of further ones.
        self.frozen: list[FrozenWeights] = []
        self.averaging = Averaging(self.backend, self.layers, lambda: self.plain_optimizer, extension)
        check_model_names(arguments.arguments)
        check_architecture(args, arguments.arguments)
        arguments.arguments["args"] = self.adapted.args
        # The parameters on the host, by name, where an optimizer is given that has them. Otherwise nothing holds on to them.
        self._parameters_before: dict[str, nn.Parameter] = {}
        # The models that are on the device.
        self._models_on_device: WeakSet[nn.Module] = WeakSet()
        self._follows_optimizer = arguments.arguments.get("optimizers", (None,))[0] is not None
        with naming_layers():
            super().__init__(**arguments.arguments)
        self.adapted.changes += absent_modules_of_adapter(self.model)
        if not self.backend.unknown_upstream:
            self.adapted.changes += keep_gradients_on_cpu(self.model)
        self.agreement.take_random_state()
        self._arrange_metrics()
        if self.backend.traces_steps:
            # The trainer has tokenized the data by now, with all threads. The second is not there in transformers 5.18.
            self.adapted.changes += let_forks_tokenize(
                self.args.dataloader_num_workers, vars(self.args).get("dataloader_multiprocessing_context")
            )
        self.start_watch(extension.max_recompiles)
        if self.backend.static_shapes:
            self._prepare_steps()
            self._prepare_static_shapes()
            self._replace_generate()
        elif self.averaging.average is not None:
            # Before all other callbacks, one of which may evaluate.
            self.callback_handler.callbacks.insert(0, self.averaging)
        if self.backend.metrics_on_device:
            self.loss_log = LossLog(self.backend, args.logging_nan_inf_filter)
        if isinstance(self.args, PredictedTextArguments) and self.args.predict_with_generate:
            check_predicted_text(self.args, self.model, self.compute_metrics is not None)
            config = GenerationConfig(
                max_new_tokens=self.args.generation_max_new_tokens, pad_token_id=self._pad_token_id
            )
            self.predicted_text = TextGeneration(self, config, self.lengths if self.backend.static_shapes else ())
            self.predicted_text.check()
        if self.backend.static_shapes:
            self.find_lengths_asked_for()
        lines = RunLines(self.backend, self.find_facts)
        self.add_callback(lines)
        if extension.step_status:
            self.start_status()
        if extension.run_report:
            self.keep_record(args, lines)
        self._add_saving_callbacks()
        self.followed_arguments = FollowedArguments(
            args, self.adapted, adapt_arguments, not self.backend.unknown_upstream, self.chips.recipe_rows
        )

    def _place_beside(self, model: nn.Module) -> None:
        if isinstance(model, PreTrainedModel):
            # Upstream has moved it to the device.
            model.tie_weights()
        place_model(model, self.backend, self.chips.mesh, self.adapted.attention)
        self._models_on_device.add(model)

    def take_up_models(self) -> None:
        """Place models that the caller has put in the place of the trainer's, as `trainer.model`, since it was made."""
        if not self.backend.unknown_upstream:
            return
        others = [model for model in self.other_models() if model not in self._models_on_device]
        for model in others:
            self._place_beside(model)
        is_other_model = self.model not in self._models_on_device
        if is_other_model:
            self._move_model_to_device(self.model, self.args.device)
        if (others or is_other_model) and self.backend.static_shapes:
            self.find_lengths_asked_for()
            self._replace_generate()

    def _arrange_accelerator(self) -> None:
        # Batches stay on the host until the step takes them: token counts, missing rows and shapes are known there
        # without a read. The backend places the model.
        self.accelerator.device_placement = False
        if self.backend.traces_steps and self.accelerator.dispatch_batches:
            self.accelerator.prepare_data_loader = partial(
                _prepare_undispatched, self.accelerator, self.accelerator.prepare_data_loader
            )
        if self.compiles_steps and not self._follows_optimizer:
            self.accelerator.prepare_optimizer = partial(self._prepare_optimizer, self.accelerator.prepare_optimizer)
        if self.backend.processes.own_rows:
            # Gradients are averaged by the steps. Left to itself, accelerate would wrap the model for that.
            self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)

    def _hp_search_setup(self, trial) -> None:
        accelerator = self.accelerator
        super()._hp_search_setup(trial)
        if self.backend.static_shapes and self.accelerator is not accelerator:
            self._arrange_accelerator()

    def _replace_generate(self) -> None:
        self.model_generate = ModelGenerate(
            self.model, self.backend, partial(TextGeneration, self, is_complete=True), self.fetch_weights
        )

    def _prepare_steps(self) -> None:
        self._arrange_accelerator()
        if self.chips.sharding_plan is None:
            # Quantized weights are on their device, to upstream.
            self._move_model_to_device(self.model, self.args.device)
        for model in self.other_models():
            self._place_beside(model)
        if self.backend.traces_steps:
            save_from_host(self.backend)
            if self.optimizer is not None:
                follow_placed(self.optimizer, self._parameters_before, self.model)
                check_optimizer(self.optimizer, self.model)
                self._save_from_host(self.optimizer)
            self.backend.set_rng_state(self.args.seed)
        self._parameters_before = {}
        callbacks = self.callback_handler.callbacks
        # After upstream's own, which says whether a step is logged, and before all that may evaluate.
        assert isinstance(callbacks[0], DefaultFlowCallback)
        if self.compiles_steps:
            self._override_returns_loss = not is_known(owner_of(type(self), "training_step").__module__)
            if self._override_returns_loss:
                # What is logged is what it returns to upstream's loop.
                vars(self)["training_step"] = self._overridden_step
            #: Begins and ends each step. Before all other callbacks, for them to find a step that has ended.
            self.steps = TrainingSteps(self)
            callbacks.insert(1, self.steps)
        else:
            self.steps = self._make_eager_steps()
            callbacks[1:1] = [self.steps] if self.averaging.average is None else [self.steps, self.averaging]

    def _make_eager_steps(self) -> EagerSteps:
        if self.compile_step == "off" or not self.backend.compiles_functions:
            return EagerSteps(self)
        reason = "compile_step='layers'"
        if self.backend.splits_weights:
            reason = "weights are split over processes, which gather those of a layer where it runs"
        if self.compile_step == "step":
            raise UserError(f"compile_step='step' is not possible: {reason}. Leave it out, or set it to 'layers'.")
        return EagerSteps(self, reason)

    def _prepare_static_shapes(self) -> None:
        if vars(self).get("_is_vision_dataset") and self.args.max_length is None:
            self.find_longest_row()
        self._train_lengths = row_lengths(self.train_dataset, longest_kept(self.args))
        self.lengths = self._declare_lengths()
        self._make_batches_static()
        for mode in ("train", "eval"):
            self.expect_batches(mode)
        self._flos_per_token: float | None = None

    # ---- Placement, precision, optimizer ----

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if self.backend.unknown_upstream:
            self.agreement.note_weights(model)
            self.backend.processes.take_from_first(model)
            if self._follows_optimizer and self.chips.sharding_plan is None:
                self._parameters_before = dict(model.named_parameters())
            self.chips.sharding_plan = place_model(model, self.backend, self.chips.mesh, self.adapted.attention)
            self._models_on_device.add(model)
        else:
            super()._move_model_to_device(model, device)

    def autocast(self) -> ExitStack:
        """The context of models that run beside the loss."""
        contexts = super().compute_loss_context_manager()
        if self.backend.unknown_upstream:
            contexts.enter_context(self.backend.autocast(self.adapted.compute_dtype))
        return contexts

    def compute_loss_context_manager(self):
        contexts = self.autocast()
        if self.backend.static_shapes:
            # Also for an override of `compute_loss` that calls the model itself.
            contexts.enter_context(static_masks(self.segment_ids, sdpa=not self.backend.traces_steps))
        return contexts

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        is_new, cls_and_kwargs = self.optimizer is None, self.optimizer_cls_and_kwargs
        if is_new and cls_and_kwargs is None and self.backend.unknown_upstream:
            cls_and_kwargs = self._choose_optimizer(self.model if model is None else model)
        with temporarily(self, optimizer_cls_and_kwargs=cls_and_kwargs):
            optimizer = super().create_optimizer(model)
        if is_new and self.backend.unknown_upstream:
            self._save_from_host(optimizer)
        if is_new and self.backend.splits_weights:
            optimizer.register_load_state_dict_pre_hook(partial(place_loaded, self.backend))
        self.averaging.note_names(self.model)
        if self.backend.traces_steps:
            self.layers.begin(optimizer)
        return optimizer

    def _choose_optimizer(self, model: nn.Module) -> tuple[Any, dict[str, Any]]:
        """The class of the optimizer and its settings: upstream's, or this package's in the place of PyTorch's AdamW."""
        args = self.args
        trained_by = dict(FULL_STATE_NAMES)
        if self.compiles_steps:
            trained_by |= dict.fromkeys(ADAMW_NAMES, OptimizerNames.ADAMW_TORCH)
        if args.optim in trained_by:
            args = copy(args)
            args.optim = trained_by[args.optim]
        optimizer_cls, kwargs = self.get_optimizer_cls_and_kwargs(args, model)
        if optimizer_cls is torch.optim.AdamW and self.compiles_steps:
            return LazyAdamW, {**kwargs, "backend": self.backend}
        return optimizer_cls, kwargs

    def _prepare_optimizer(self, prepare: Callable, optimizer: torch.optim.Optimizer, *args, **kwargs) -> Any:
        """Accelerate's `prepare_optimizer`, of an AdamW that somebody's `create_optimizer` made."""
        own = LazyAdamW.in_place_of(optimizer, self.backend)
        if own is not optimizer:
            self._save_from_host(own)
        return prepare(own, *args, **kwargs)

    def _save_from_host(self, optimizer: torch.optim.Optimizer) -> None:
        # Checkpoints hold CPU tensors. A state dict of somebody's own may do anything with them.
        streams = is_known(type(optimizer).__module__)
        optimizer.register_state_dict_post_hook(
            lambda _, state_dict: (
                self.backend.stream(state_dict)
                if streams and self._writes_optimizer
                else self.backend.fetch(state_dict)
            )
        )


def _prepare_undispatched(accelerator: Accelerator, prepare: Callable, *args, **kwargs) -> Any:
    """Accelerate's `prepare_data_loader`. With `dispatch_batches` it would send a batch to the device before it has its shape."""
    with temporarily(accelerator.dataloader_config, dispatch_batches=None):
        return prepare(*args, **kwargs)


def bind_device(args: TrainingArguments, backend: Backend) -> None:
    """
    Point arguments, and the accelerate state that goes with them, to the backend's device.

    Upstream fixes the device when the arguments are made, which may have been before the backend was chosen, and has
    no name for an XLA device other than its own XLA branches, which are switched off.
    """
    if backend.unknown_upstream:
        AcceleratorState._reset_state(reset_partial_state=True)
        # Before, for accelerate to find those that have met. It exchanges on the host what the trainers do not.
        several = backend.processes.own_rows
        args.distributed_state = PartialState(cpu=True)
        args.distributed_state.device = backend.device
        if several:
            # Accelerate names the device by the process's number on its machine, and each of these has but the first.
            vars(args.distributed_state)["wait_for_everyone"] = torch.distributed.barrier
        else:
            # One host logs and saves. Batches are not divided between hosts: each has the batch of all chips.
            args.distributed_state.process_index = args.distributed_state.local_process_index = backend.processes.index
        args._n_gpu = 0
        # `TrainingArguments.device` is a cached property of this name.
        vars(args)["_setup_devices"] = backend.device
    elif args.device.type != backend.device.type:
        args.use_cpu = backend.device.type == "cpu"
        del vars(args)["_setup_devices"]
        assert args.device.type == backend.device.type
    if backend.device.type == "cpu":
        # As upstream does with `use_cpu`: PyTorch warns of it at each loader.
        args.dataloader_pin_memory = False
