"""Saving a run whole, stopping it when it is told to, and going on from there."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import ModelCard
from torch import nn
from torch.utils.serialization import config as serialization_config
from tqdm.auto import tqdm
from transformers import TrainerControl
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy, has_length, unwrap_peft_model
from transformers.training_args import OptimizerNames
from transformers.utils import logging

from ... import __version__
from ...atomic_write import move_into_place, remove_temporary
from ...backends.detect import TPU_BACKENDS, tpu_chips
from ...backends.hosts import HostsDisagree
from ...backends.streamed import read_all
from ...callbacks.preemption import METADATA_URL, EvaluationCut, Preemption, TrainingPreempted
from ...callbacks.samples import ShowSamples
from ...errors import SaveError, UserError
from ...formatting import count
from ...quantization.bitsandbytes import find_config
from ...redaction import redact
from ...step.optimizer import LazyAdamW
from ...step.running_code import is_known
from .base_record import find_frozen, write_base
from .files import (
    check_all_see,
    check_shared,
    checkpoints_by_step,
    delete_all_but,
    delete_old,
    find_damage,
    find_on_hosts,
    read_run_state,
    remove_leftovers,
    seal,
    temporary_dir,
    write_run_state,
)
from .renamed_weights import load_other_weights, saves_other_weights
from .resumption import Resumption, compare_rows, refusing_other_sizes
from .saved_model import free_space, is_of_disk, whole_model


logger = logging.get_logger(__name__)

#: What an evaluation of upstream's trainer gives.
UPSTREAM_METRICS = ("loss", "runtime", "samples_per_second", "steps_per_second", "model_preparation_time")


class SavingMixin:
    """
    The part of [`TPUTrainerMixin`] that saves and resumes, on every backend.

    A checkpoint gets its name when all of it is on the disk. A run that is told to stop ends its step, saves, and raises
    [`TrainingPreempted`]. An evaluation that was due then is made up for when the run is resumed.
    """

    #: Metrics of an evaluation without `compute_metrics`: those that upstream's trainer gives for each dataset, and those
    #: of this class. Of a class that does not name them itself they are not known before the first evaluation.
    evaluation_metrics: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    # Weights of the base under an adapter, as they are named where layers do not run as one loop.
    _names_of_base: list[str] | None = None
    # Whether the state dict of the optimizer is for a file.
    _writes_optimizer = False
    #: Whether `train` saves and stops when it is told to by a signal.
    stops_when_told = True

    def _arrange_saving(self) -> None:
        """Before upstream's `__init__`."""
        on_tpu = self.backend.name in TPU_BACKENDS and tpu_chips() > 0
        ranks = self.backend.ranks
        asked = ranks.stops if ranks.count > 1 else self.backend.hosts
        self.preemption = Preemption(METADATA_URL if on_tpu else None, asked)
        self._resumption = Resumption(self._begin_resumed)
        # Where a checkpoint is written before it has its place.
        self._unfinished: Path | None = None
        self._evaluation_due = False
        # The last checkpoint of this run: its step, and whether an evaluation was due.
        self._saved: tuple[int, bool] | None = None
        self._resumed_from: str | None = None
        # The step after which an evaluation was made up for, and the random state after that.
        self._made_up_at: int | None = None
        self._random_state: tempfile.TemporaryDirectory | None = None

    def _add_saving_callbacks(self) -> None:
        for callback in (self.preemption, self._resumption):
            self.add_callback(callback)

    # ---- Resuming ----

    @property
    def _writes_run(self) -> bool:
        """Whether this process, of all that train together, has the output directory in its keeping."""
        return self.backend.hosts.index == 0 and self.is_world_process_zero()

    def _find_checkpoint(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """The checkpoint to resume from, and what it keeps besides upstream's taken up."""
        self._check_best_metric()
        if self._writes_run:
            remove_leftovers(self.args.output_dir)
        hosts = self.backend.hosts
        if self.args.load_best_model_at_end:
            check_shared(self.args.output_dir, hosts)
        find = partial(find_on_hosts, resume_from_checkpoint, self.args.output_dir, hosts)
        self._resumed_from = self.averaging.resumed_from = checkpoint = self.backend.ranks.by_first(find)
        self._saved, self._evaluation_due = None, False
        self._names_of_base = find_frozen(self.model)
        self._made_up_at = self._random_state = None
        if checkpoint is not None:
            state = read_run_state(checkpoint)
            evaluates = self.args.eval_strategy != IntervalStrategy.NO
            self._evaluation_due = evaluates and state.get("evaluation_due", False)
            rows = self.args.per_device_train_batch_size
            self.chips.keep_rows_per_step(state)
            if self.args.per_device_train_batch_size != rows:
                self._train_batch_size = self.args.train_batch_size
            self.load_metrics_state(state)
            if self._writes_run:
                compare_rows(self.train_dataset, checkpoint, state.get("train_rows"))
        return checkpoint

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        # Upstream has each of several processes load all of it to its device.
        loads_on = {"_setup_devices": torch.device("cpu")} if self.backend.splits_weights else {}
        # Where its tensors go to a device one by one, the file need not be in memory.
        with serialization_config.patch("load.mmap", self.backend.unknown_upstream), self._settings(**loads_on):
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
        with self._loading_weights(), refusing_other_sizes(resume_from_checkpoint):
            if self._loads_other_weights:
                load_other_weights(self.model, resume_from_checkpoint)
            else:
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        check_all_see(self.state.best_model_checkpoint, self.backend.hosts)
        with self._loading_weights():
            if self._loads_other_weights:
                load_other_weights(self.model, self.state.best_model_checkpoint)
            else:
                super()._load_best_model()

    @property
    def _loads_other_weights(self) -> bool:
        # Files of weights in parts have the names of the model.
        return not (self.is_deepspeed_enabled or self.is_fsdp_enabled) and saves_other_weights(self.model)

    @contextmanager
    def _loading_weights(self) -> Iterator[None]:
        """Within this context, weights are loaded: each chip gets its part alone, and dtypes stay as they are."""
        if not self.backend.unknown_upstream:
            yield
            return
        dtypes = {name: parameter.dtype for name, parameter in self.model.named_parameters()}
        hook = self.model.register_load_state_dict_pre_hook(self._place_loaded)
        try:
            yield
        finally:
            hook.remove()
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                # One that the model has put in the place of its own.
                if buffer is not None and buffer.device.type != self.backend.device.type:
                    module._buffers[name] = self.backend.send(buffer)
        # PEFT turns adapters that TRL has made bfloat16 into float32.
        for name, parameter in self.model.named_parameters():
            if parameter.dtype != dtypes[name]:
                parameter.data = parameter.data.to(dtypes[name])

    def _place_loaded(self, model: nn.Module, state_dict: dict[str, torch.Tensor], prefix: str, *_) -> None:
        # Copied from the host, a weight would be whole on every chip first.
        for name, parameter in model.named_parameters(remove_duplicate=False):
            loaded = state_dict.get(prefix + name)
            if loaded is not None and loaded.device.type == "cpu" and loaded.shape == parameter.shape:
                state_dict[prefix + name] = self.backend.place_as(loaded.to(parameter.dtype), parameter)

    def _check_best_metric(self) -> None:
        """Refuse a `metric_for_best_model` that no evaluation will have, where that is known."""
        known = vars(type(self)).get("evaluation_metrics")
        if (
            known is None
            or self.compute_metrics is not None
            or self.args.eval_strategy == IntervalStrategy.NO
            # One of the caller's may add to the metrics.
            or not all(is_known(type(callback).__module__) for callback in self.callback_handler.callbacks)
        ):
            return
        of_dataset, of_class = known
        datasets = [f"{name}_" for name in self.eval_dataset] if isinstance(self.eval_dataset, dict) else [""]
        names = [f"{dataset}{metric}" for dataset in datasets for metric in of_dataset]
        self._find_best_metric([f"eval_{name}" for name in (*names, *of_class)])

    def _find_best_metric(self, names: Iterable[str]) -> None:
        wanted = self.args.metric_for_best_model
        if wanted is not None and f"eval_{wanted.removeprefix('eval_')}" not in names:
            raise UserError(
                f"metric_for_best_model={wanted!r} is not among the metrics of an evaluation: {', '.join(names)}. Set it to "
                "one of these, or return it from compute_metrics."
            )

    def _determine_best_metric(self, metrics, trial) -> bool:
        self._find_best_metric(metrics)
        # Some are of a host's own clock, or of code that draws random numbers.
        metrics = self.backend.hosts.of_first("the metrics of an evaluation", metrics)
        return super()._determine_best_metric(metrics, trial)

    def _run_epoch(self, *args, **kwargs) -> None:
        # Upstream asks after a step only, and takes one more in a run that had ended.
        if not self.control.should_training_stop:
            super()._run_epoch(*args, **kwargs)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        checkpoint = checkpoint if self._random_state is None else self._random_state.name
        super()._load_rng_state(checkpoint)
        state = {} if checkpoint is None else read_run_state(checkpoint)
        self.seeds.count = state.get("seeds", 0)
        if self.backend.name in state.get("rng_state", {}):
            self.backend.set_rng_state(state["rng_state"][self.backend.name])

    def _begin_resumed(self, control: TrainerControl) -> str | None:
        """Begin a run where the one that it resumes was left, inside an epoch perhaps: returns the random state that this began with."""
        if self._resumed_from is None:
            return None
        control.should_training_stop = self.state.global_step >= self.state.max_steps
        # An epoch that begins now draws its order from it. One that goes on has drawn its order.
        self._load_rng_state(self._resumed_from)
        if self._evaluation_due:
            self._make_up_for_evaluation()
        return read_run_state(self._resumed_from).get("epoch_rng_state") if self.state.epoch % 1 else None

    def _make_up_for_evaluation(self) -> None:
        """Evaluate now what was due when the run was stopped."""
        try:
            with self.preemption.cutting_evaluation():
                metrics = self._evaluate(None, None)
        except EvaluationCut:
            self.drop_metrics("eval")
            raise self._preempted(self._resumed_from) from None
        self._evaluation_due, self._made_up_at = False, self.state.global_step
        if self._determine_best_metric(metrics, None):
            self.state.best_model_checkpoint = self._resumed_from
        self._random_state = tempfile.TemporaryDirectory()
        self._save_rng_state(self._random_state.name)

    # ---- Stopping ----

    def stopping_when_told(self) -> AbstractContextManager:
        """Context in which a signal stops the run."""
        if not self.stops_when_told:
            return nullcontext()
        if (upstreams := self.pop_callback(JITCheckpointCallback)) is not None:
            # It puts back the handler of signals that it has replaced, which a second signal is for. Left where it is, it would
            # run between the backward pass and the update of each step.
            upstreams.on_train_end(self.args, self.state, self.control)
        return self.preemption.listen()

    def _maybe_log_save_evaluate(self, *args, **kwargs) -> None:
        if self.preemption.reason is not None:
            self._evaluation_due |= self.control.should_evaluate
            self.control.should_evaluate = False
        if self.preemption.listening and self.control.should_evaluate:
            self._evaluate_or_stop(*args, **kwargs)
        else:
            super()._maybe_log_save_evaluate(*args, **kwargs)
        if self.preemption.reason is not None:
            self.control.should_training_stop = True

    def _evaluate_or_stop(self, *args, **kwargs) -> None:
        with tempfile.TemporaryDirectory() as before:
            super()._save_rng_state(before)
            try:
                with self.preemption.cutting_evaluation():
                    super()._maybe_log_save_evaluate(*args, **kwargs)
            except EvaluationCut:
                # As if it had not begun: the resumed run draws the same numbers for it, and after it.
                super()._load_rng_state(before)
                self.drop_metrics("eval")
                self.model.train()
                self._evaluation_due, self.control.should_evaluate = True, False

    def _finalize_training(self, trial, num_train_samples, start_time):
        if self.preemption.reason is None:
            if self._made_up_at == self.state.global_step:
                # The run had ended but for this.
                self._save_checkpoint(self.model, trial)
            # Upstream takes every directory `checkpoint-3...` for a checkpoint of the run, a user's own too.
            with self._settings(save_total_limit=None):
                output = super()._finalize_training(trial, num_train_samples, start_time)
            best, checkpoint = self.state.best_model_checkpoint, Path(self._checkpoint(trial))
            if self.args.should_save and best is not None and self.args.save_total_limit == 1:
                delete_all_but(checkpoint.parent, checkpoint, best)
            return output
        if self._saved != (self.state.global_step, self._evaluation_due):
            # Resuming takes the optimizer.
            with self._settings(save_only_model=False):
                self._save_checkpoint(self.model, trial)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        # Answering takes longer than there may be time.
        samples = self.pop_callback(ShowSamples)
        # Nor is this the end, where the best weights are loaded and other checkpoints are deleted.
        with self._settings(load_best_model_at_end=False, save_total_limit=None):
            super()._finalize_training(trial, num_train_samples, start_time)
        if samples is not None:
            self.add_callback(samples)
        raise self._preempted(self._checkpoint(trial))

    @contextmanager
    def _settings(self, **settings) -> Iterator[None]:
        kept = {name: vars(self.args)[name] for name in settings}
        vars(self.args).update(settings)
        try:
            yield
        finally:
            vars(self.args).update(kept)

    def _preempted(self, checkpoint: str) -> TrainingPreempted:
        # As soon as one process ends, its launcher ends the others, of which the first still writes.
        self.accelerator.wait_for_everyone()
        stopped = TrainingPreempted(self.preemption.reason, checkpoint, self.state.global_step)
        if self.is_world_process_zero():
            tqdm.write(str(stopped))
        return stopped

    # ---- Saving ----

    @property
    def _gives_parts(self) -> bool:
        """Whether another host or process writes what is saved, to which this one gives its parts of split tensors."""
        return self.backend.hosts.index > 0 or (self.backend.splits_weights and self.backend.ranks.index > 0)

    @property
    def _is_for_first_host(self) -> bool:
        """Whether another host writes the checkpoint under way."""
        return self._unfinished is not None and self.backend.hosts.index > 0

    def save_model(self, output_dir=None, _internal_call=False) -> None:
        with self.backend.fetching_for_first():
            if self._gives_parts:
                # What the first fetches when it saves, in the same order.
                self.fetch_weights()
                self.averaging.read()
            super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._writes_optimizer = True
        try:
            if self._gives_parts:
                read_all(self.optimizer.state_dict())
            else:
                super()._save_optimizer_and_scheduler(output_dir)
        finally:
            self._writes_optimizer = False

    def _get_output_dir(self, trial) -> str:
        # Where upstream writes a checkpoint to.
        return super()._get_output_dir(trial) if self._unfinished is None else str(self._unfinished)

    def _checkpoint(self, trial) -> str:
        return os.path.join(super()._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")

    def _save_checkpoint(self, model: nn.Module, trial) -> None:
        checkpoint = Path(self._checkpoint(trial))
        failed = None
        try:
            with self.backend.fetching_for_first():
                self._write_checkpoint(model, trial, checkpoint)
        except HostsDisagree:
            raise
        except Exception as error:
            failed = self._not_saved(str(checkpoint), checkpoint.parent, error) if is_of_disk(error) else error
        self.backend.hosts.raise_together("the end of a checkpoint", failed)
        self.accelerator.wait_for_everyone()
        if not self.args.save_only_model:
            self._saved = (self.state.global_step, self._evaluation_due)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(checkpoint))
        if self.args.should_save:
            delete_old(checkpoint.parent, checkpoint, self.args.save_total_limit, self.state.best_model_checkpoint)

    def _write_checkpoint(self, model: nn.Module, trial, checkpoint: Path) -> None:
        self._unfinished = temporary_dir(checkpoint)
        written = self._unfinished / checkpoint.name
        try:
            super()._save_checkpoint(model, trial)
            self._note_best(checkpoint)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                self.state.save_to_json(str(written / TRAINER_STATE_NAME))
                seal(written)
                move_into_place(written, checkpoint)
        finally:
            if self.args.should_save:
                # The disk may be gone altogether.
                with suppress(OSError):
                    remove_temporary(self._unfinished, checkpoint)
            self._unfinished = None

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # Files are read while training goes on, so they have to be in their place.
        if self._unfinished is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def create_model_card(self, *args, **kwargs) -> None:
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            path = Path(self.args.output_dir) / "README.md"
            card = ModelCard.load(path)
            card.data.tags = [*(card.data.tags or ()), "hf_tpu_ext"]
            figures = ": [report](report.md)" if path.with_name("report.md").is_file() else ""
            on = f"{self.backend.device_name}, {count(self.backend.num_chips, 'chip')}"
            card.text += f"\n\nTrained with hf_tpu_ext {__version__} on {on}{figures}.\n"
            card.save(path)

    def _note_best(self, checkpoint: Path) -> None:
        # Upstream looks for it beside the one that it writes.
        if self.state.best_global_step:
            best = checkpoint.with_name(f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}")
            # On the disk of the first host there may be what others do not see.
            first = self.backend.hosts.index == 0
            if self.backend.hosts.of_first("the best checkpoint", first and (best == checkpoint or best.exists())):
                self.state.best_model_checkpoint = str(best)

    def _not_saved(self, what: str, run_dir: Path, error: Exception) -> SaveError:
        whole = next(
            (path for path in reversed(checkpoints_by_step(run_dir).values()) if find_damage(path) is None), None
        )
        left = "There is no checkpoint to resume from" if whole is None else f"{whole} is complete"
        failed = SaveError(
            f"{what} could not be saved ({error}). {left}. {free_space(run_dir)}Make room or lower save_total_limit, or set "
            "output_dir to a directory that can be written to, and start again with resume_from_checkpoint=True or the "
            "path of a checkpoint."
        )
        failed.__cause__ = error
        return failed

    def _save(self, output_dir=None, state_dict=None) -> None:
        if self._gives_parts:
            return
        if self._unfinished is not None or not self.args.should_save:
            self.write_model(output_dir, state_dict)
            return
        directory = Path(self.args.output_dir if output_dir is None else output_dir)
        try:
            with whole_model(directory) as written:
                self.write_model(str(written), state_dict)
        except Exception as error:
            if not is_of_disk(error):
                raise
            last = Path(self.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
            again = (
                f" Or use {last}, which is complete: the same command with --resume_from_checkpoint true saves the model again."
                if last.is_dir()
                else ""
            )
            raise SaveError(
                f"The model could not be saved in {directory} ({error}). What was there is left as it was. "
                f"{free_space(directory)}Make room there, or save to another disk: trainer.save_model('/path/on/it').{again}"
            ) from error

    def write_model(self, output_dir: str, state_dict) -> None:
        # Upstream pickles the arguments as they are, hub_token too.
        texts = {name: value for name, value in vars(self.args).items() if isinstance(value, str | dict | list)}
        with self._settings(**redact(texts)):
            super()._save(output_dir, state_dict)
        if self.args.should_save:
            self.averaging.save(output_dir)
        names = find_frozen(self.model) if self._names_of_base is None else self._names_of_base
        if names and self.args.should_save:
            weights = self.model.state_dict() if state_dict is None else state_dict
            quantization = find_config(self.model)
            write_base(
                output_dir,
                unwrap_peft_model(self.model).name_or_path,
                {name: weights[name] for name in names if name in weights},
                None if quantization is None else quantization.to_dict(),
            )

    def _save_rng_state(self, output_dir: str) -> None:
        if self._is_for_first_host:
            return
        super()._save_rng_state(output_dir)
        if self._unfinished is not None and self.backend.ranks.index > 0:
            return
        rows = {"train_rows": len(self.train_dataset)} if has_length(self.train_dataset) else {}
        state = {
            "epoch_rng_state": self._resumption.epoch_rng_state,
            **rows,
            "seeds": self.seeds.count,
            **self.chips.batch_state(),
            **self.metrics_state(),
        }
        if (rng_state := self.backend.rng_state()) is not None:
            state["rng_state"] = {self.backend.name: rng_state}
        if self._evaluation_due:
            state["evaluation_due"] = True
        write_run_state(output_dir, state)
