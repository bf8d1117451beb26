"""Where a run that is resumed begins."""

import json
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from torch.utils.serialization import config as serialization_config
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState
from transformers.core_model_loading import revert_weight_conversion
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import IntervalStrategy, has_length
from transformers.training_args import OptimizerNames
from transformers.utils import (
    ADAPTER_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    logging,
)

from ...atomic_write import write_atomically
from ...callbacks.preemption import EvaluationCut
from ...errors import UserError
from ...step.optimizer import LazyAdamW
from ...temporarily import temporarily
from .base_record import find_frozen
from .directories import remove_leftovers
from .lookup import check_all_see, check_shared, find_checkpoint


logger = logging.get_logger(__name__)

# What upstream's checkpoint leaves out of the state of a run.
_STATE_FILE = "run_state.json"
# Files of a whole model: its weights, or where each of them is.
_OF_MODEL = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
# How PyTorch says that a weight of a file has another shape than the model's, for PEFT's adapters, too.
_OTHER_SHAPE = re.compile(r"size mismatch for (\S+): .*?torch\.Size\((.*?)\).*?torch\.Size\((.*?)\)")


def write_run_state(checkpoint: str, state: dict[str, Any]) -> None:
    """Write, as JSON, what upstream's checkpoint leaves out. The file is whole or not there."""
    write_atomically(Path(checkpoint) / _STATE_FILE, json.dumps(state))


def read_run_state(checkpoint: str) -> dict[str, Any]:
    """Read what [`write_run_state`] wrote; of a checkpoint of upstream's trainer, nothing."""
    path = Path(checkpoint) / _STATE_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def saves_other_weights(model: nn.Module) -> bool:
    """
    Whether a model saves its weights under other names than its own: `save_pretrained` writes those of the Hub, and experts one by
    one. Upstream's trainer loads a checkpoint by the names of the model, and would go on from weights that the checkpoint does not have.
    """
    if not isinstance(model, PreTrainedModel):
        return False
    own = {name: torch.empty_like(value, device="meta") for name, value in model.state_dict(keep_vars=True).items()}
    return revert_weight_conversion(model, dict(own)).keys() != own.keys()


def check_kind(checkpoint: str, model: nn.Module) -> None:
    """
    Refuse (`ValueError`) to go on from a checkpoint of an adapter without one, for which upstream misses a file, and from one of a
    whole model with an adapter, of which upstream would load nothing.
    """
    files = {path.name for path in Path(checkpoint).iterdir()}
    of_model = next((name for name in _OF_MODEL if name in files), None)
    if isinstance(model, PeftModel) and ADAPTER_CONFIG_NAME not in files and of_model is not None:
        raise UserError(
            f"{checkpoint} is of a whole model (it has {of_model}), and this run trains an adapter. Set use_peft: false (in Python, leave "
            "peft_config out), or leave resume_from_checkpoint out to begin a new run. To train an adapter on these weights, begin one "
            f"with model_name_or_path={checkpoint}"
        )
    if not isinstance(model, PeftModel) and ADAPTER_CONFIG_NAME in files and of_model is None:
        raise UserError(
            f"{checkpoint} is of an adapter (it has {ADAPTER_CONFIG_NAME}), and this run trains a whole model. Add use_peft: true (in "
            "Python peft_config=...) and the lora_* of the run that wrote it, or leave resume_from_checkpoint out to begin a new run."
        )


class Resumption(TrainerCallback):
    """Has `begin` begin a run that is resumed, when others have begun it."""

    def __init__(self, begin: Callable[[TrainerControl], None]):
        self._begin = begin

    def on_train_begin(self, args, state, control, **kwargs):
        self._begin(control)


class ResumptionMixin:
    """
    The part of [`TPUTrainerMixin`] that resumes a run, on every backend. An evaluation that was due when it was stopped is made up for.

    A sampler without a seed of its own (`train_sampling_strategy="group_by_length"`) draws the order of an epoch from the host's random
    state. A run that is resumed inside the epoch draws the same order: a checkpoint keeps the state that the epoch began with.
    """

    # The host's random state that the epoch under way began with.
    _state_of_epoch: str | None = None

    def _find_checkpoint(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """The checkpoint to resume from, and what it keeps besides upstream's taken up."""
        self._check_best_metric()
        if self.args.should_save:
            remove_leftovers(self.args.output_dir)
        processes = self.backend.processes
        if self.args.load_best_model_at_end and self.backend.unknown_upstream and not self.args.save_on_each_node:
            check_shared(self.args.output_dir, processes)
        find = partial(find_checkpoint, resume_from_checkpoint, self.args.output_dir)
        checkpoint = processes.by_first("the search for a checkpoint", find)
        if checkpoint is not None and self.backend.unknown_upstream:
            check_all_see(checkpoint, processes, self.args.save_on_each_node)
        if checkpoint is not None:
            check_kind(checkpoint, self.model)
        self._resumed_from = self.averaging.resumed_from = checkpoint
        self._resumed_state = state = {} if checkpoint is None else read_run_state(checkpoint)
        # The last checkpoint of this run: its step, and whether an evaluation was due.
        self._last_save, self._evaluation_due = None, False
        self._names_of_base = find_frozen(self.model)
        # The step after which an evaluation was made up for, and the random state after that.
        self._made_up_at = self._random_state = None
        # What the next epoch is to begin with.
        self._state_of_next_epoch: str | None = None
        if checkpoint is not None:
            evaluates = self.args.eval_strategy != IntervalStrategy.NO
            self._evaluation_due = evaluates and state.get("evaluation_due", False)
            rows = self.args.per_device_train_batch_size
            self.chips.keep_rows_per_step(state, keeps_accumulation=self.loss_grows_with_micro_steps)
            if self.args.per_device_train_batch_size != rows:
                self._train_batch_size = self.args.train_batch_size
            self.load_metrics_state(state)
            before, dataset = state.get("train_rows"), self.train_dataset
            if self.args.should_save and before is not None and has_length(dataset) and len(dataset) != before:
                logger.warning(
                    f"train_dataset had {before} rows when {checkpoint} was written, and has {len(dataset)} now. The run goes on at "
                    "the same step, in another order of the rows: some may be trained on twice in this epoch, and others not at "
                    "all. To go on as before, pass the same rows; to train on all of the new ones, begin a new run from the "
                    "weights, without resume_from_checkpoint."
                )
        return checkpoint

    def _init_training_state(self, *args, **kwargs) -> tuple[int, int]:
        # Upstream compares the rows of a device with those that were taken at once when the checkpoint was written, and warns where
        # they differ. The global batch size of a checkpoint of this package has been compared already.
        if "rows_per_step" in self._resumed_state:
            path = Path(self._resumed_from) / TRAINER_STATE_NAME
            rows = TrainerState.load_from_json(path).train_batch_size // max(1, self.args.n_gpu)
            as_compared = temporarily(self.args, per_device_train_batch_size=rows)
        else:
            as_compared = self.chips.rows_of_process()
        with as_compared:
            return super()._init_training_state(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        # Upstream has each of several processes load all of it to its device.
        loads_on = {"_setup_devices": torch.device("cpu")} if self.backend.splits_weights else {}
        # Where its tensors go to a device one by one, the file need not be in memory.
        with (
            serialization_config.patch("load.mmap", self.backend.unknown_upstream),
            temporarily(self.args, **loads_on),
        ):
            try:
                super()._load_optimizer_and_scheduler(checkpoint)
            except ValueError as error:
                # PyTorch counts the parameters of each group.
                if "parameter group" not in str(error):
                    raise
                raise UserError(
                    f"{checkpoint} has the optimizer's state of other parameters than this run trains ({error}). Set the model, "
                    "the adapter (use_peft, lora_*) and what is frozen as the run had them that wrote it, or begin a new run "
                    "from its weights, without resume_from_checkpoint."
                ) from error
        if checkpoint is None or self.is_deepspeed_enabled or self.is_fsdp_enabled:
            return
        if (Path(checkpoint) / OPTIMIZER_NAME).is_file():
            self._check_optimizer(checkpoint)
            if self.backend.traces_steps and not isinstance(self.plain_optimizer, LazyAdamW):
                for group in self.optimizer.param_groups:
                    # Adafactor's own schedule has learning rates on the device. A file has them on the host.
                    rates = {name: value for name, value in group.items() if isinstance(value, torch.Tensor)}
                    group.update(self.backend.send(rates))
        else:
            logger.warning(
                f"{checkpoint} has no {OPTIMIZER_NAME}, as with save_only_model: the optimizer and the learning rate begin anew, "
                "and the run is not the one that was never stopped."
            )

    def _check_optimizer(self, checkpoint: str) -> None:
        """Refuse the state of another optimizer, whose first step would end in a `KeyError`."""
        # To load a state adds `differentiable` to the defaults of any optimizer, also of those that have none, as Adafactor.
        defaults = self.optimizer.defaults.keys() - {"differentiable"}
        missing = {name for group in self.optimizer.param_groups for name in defaults - group.keys()}
        if missing:
            raise UserError(
                f"{checkpoint} has the state of another optimizer than optim={OptimizerNames(self.args.optim).value}: "
                f"{', '.join(sorted(missing))} is not in it. Set optim to that of the run that wrote it, or begin a new run from "
                f"its weights: model_name_or_path={checkpoint} without resume_from_checkpoint."
            )

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None) -> None:
        try:
            load = partial(super()._load_from_checkpoint, resume_from_checkpoint, model)
            self._load_weights(resume_from_checkpoint, load)
        except RuntimeError as error:
            if (match := _OTHER_SHAPE.search(str(error))) is None:
                raise
            name, saved_shape, own_shape = match.groups()
            raise UserError(
                f"{resume_from_checkpoint} is of another model than this run trains: {name} has the shape {saved_shape} there and "
                f"{own_shape} here. Load the model of the run that wrote it, with the same adapter (lora_*), or leave "
                "resume_from_checkpoint out to begin a new run, best with another output_dir."
            ) from error

    def _load_best_model(self) -> None:
        # Training is over.
        self.layers.end()
        checkpoint = self.state.best_model_checkpoint
        if self.backend.unknown_upstream:
            check_all_see(checkpoint, self.backend.processes, self.args.save_on_each_node)
        self._load_weights(checkpoint, super()._load_best_model)
        self.averaging.load_best(checkpoint)

    def _load_weights(self, checkpoint: str, load: Callable[[], None]) -> None:
        """Load the weights of a checkpoint, by upstream's `load` if it can. Each chip gets its part alone, and dtypes stay as they are."""
        # Files of weights in parts have the names of the model.
        are_split = self.is_deepspeed_enabled or self.is_fsdp_enabled
        if not are_split and saves_other_weights(self.model):
            load = partial(self._load_by_other_names, checkpoint)
        if not self.backend.unknown_upstream:
            load()
            return

        def place(model: nn.Module, state_dict: dict[str, torch.Tensor], prefix: str, *_) -> None:
            # PyTorch would copy the whole weight from the host to every chip first.
            for name, parameter in model.named_parameters(remove_duplicate=False):
                value = state_dict.get(prefix + name)
                if value is not None and value.device.type == "cpu" and value.shape == parameter.shape:
                    state_dict[prefix + name] = self.backend.place_as(value.to(parameter.dtype), parameter)

        dtypes = {name: parameter.dtype for name, parameter in self.model.named_parameters()}
        hook = self.model.register_load_state_dict_pre_hook(place)
        try:
            load()
        finally:
            hook.remove()
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                # The model has put another buffer in the place of its own.
                if buffer is not None and buffer.device.type != self.backend.device.type:
                    module._buffers[name] = self.backend.send(buffer)
        # PEFT turns adapters that TRL has made bfloat16 into float32.
        for name, parameter in self.model.named_parameters():
            if parameter.dtype != dtypes[name]:
                parameter.data = parameter.data.to(dtypes[name])

    def _load_by_other_names(self, checkpoint: str) -> None:
        """Load a checkpoint of a model that [`saves_other_weights`], as `from_pretrained` does. float32 holds what any file has."""
        other = type(self.model).from_pretrained(checkpoint, dtype=torch.float32)
        self.model.load_state_dict(other.state_dict())

    def _run_epoch(self, *args, **kwargs) -> None:
        # Upstream asks after a step only, and takes one more in a run that had ended.
        if self.control.should_training_stop:
            return
        if self._state_of_next_epoch is not None:
            torch.set_rng_state(torch.frombuffer(bytearray.fromhex(self._state_of_next_epoch), dtype=torch.uint8))
            self._state_of_next_epoch = None
        self._state_of_epoch = torch.get_rng_state().numpy().tobytes().hex()
        super()._run_epoch(*args, **kwargs)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        checkpoint = checkpoint if self._random_state is None else self._random_state.name
        super()._load_rng_state(checkpoint)
        state = {} if checkpoint is None else read_run_state(checkpoint)
        self.seeds.count = state.get("seeds", 0)
        if self.backend.name in state.get("rng_state", {}):
            self.backend.set_rng_state(state["rng_state"][self.backend.name])

    def _begin_resumed(self, control: TrainerControl) -> None:
        """Begin a run where the one that it resumes was left, inside an epoch perhaps."""
        if self._resumed_from is None:
            return
        control.should_training_stop = self.state.global_step >= self.state.max_steps
        if control.should_training_stop and self.args.should_save:
            logger.warning(
                f"{self._resumed_from} is of step {self.state.global_step}, and this run has {self.state.max_steps}: nothing is left to "
                "train. To train on, raise max_steps, or num_train_epochs where max_steps is not set."
            )
        # An epoch that begins now draws its order from it. One that goes on has drawn its order.
        self._load_rng_state(self._resumed_from)
        if self._evaluation_due:
            self._make_up_for_evaluation()
        if self.state.epoch % 1:
            self._state_of_next_epoch = self._resumed_state.get("epoch_rng_state")

    def _make_up_for_evaluation(self) -> None:
        """Evaluate now what was due when the run was stopped."""
        try:
            with self.preemption.cutting_evaluation():
                metrics = self._evaluate(None, None)
        except EvaluationCut:
            self.drop_metrics("eval")
            raise self._preemption_error(self._resumed_from) from None
        self._evaluation_due, self._made_up_at = False, self.state.global_step
        if self._determine_best_metric(metrics, None):
            self.state.best_model_checkpoint = self._resumed_from
        self._random_state = tempfile.TemporaryDirectory()
        self._save_rng_state(self._random_state.name)
