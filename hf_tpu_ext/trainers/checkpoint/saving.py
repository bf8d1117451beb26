"""Saving a run whole."""

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from copy import copy
from pathlib import Path

from huggingface_hub import ModelCard
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy, has_length, unwrap_peft_model
from transformers.utils import logging

from ... import __version__
from ...atomic_write import move_into_place, remove_temporary
from ...backends.detect import TPU_BACKENDS, tpu_chips
from ...backends.processes import HostsDisagree
from ...backends.streamed import read_all
from ...callbacks.preemption import METADATA_URL, Preemption
from ...errors import SaveError, UserError
from ...formatting import count, kind_of_device
from ...quantization.bitsandbytes import find_config
from ...redaction import redact
from ...report.make import in_card
from ...step.running_code import is_known
from ...temporarily import temporarily
from .base_record import find_frozen, write_base
from .directories import checkpoints_by_step, delete_old, temporary_dir
from .resumption import Resumption, ResumptionMixin, write_run_state
from .saved_model import free_space, is_of_disk, whole_model
from .stopping import StoppingMixin
from .verification import find_damage, seal


logger = logging.get_logger(__name__)

# The tag of models that were trained with this package.
_TAG = "hf_tpu_ext"

#: What an evaluation of upstream's trainer gives.
UPSTREAM_METRICS = ("loss", "runtime", "samples_per_second", "steps_per_second", "model_preparation_time")


class SavingMixin(ResumptionMixin, StoppingMixin):
    """The part of [`TPUTrainerMixin`] that saves, on every backend. A checkpoint gets its name when all of it is on the disk."""

    #: Metrics of an evaluation without `compute_metrics`: those that upstream's trainer gives for each dataset, and those
    #: of this class. Of a class that does not name them itself they are not known before the first evaluation.
    evaluation_metrics: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    # Weights of the base under an adapter, as they are named where layers do not run as one loop.
    _names_of_base: list[str] | None = None
    # Whether the state dict of the optimizer is for a file.
    _writes_optimizer = False

    def _arrange_saving(self) -> None:
        """Before upstream's `__init__`."""
        on_tpu = self.backend.name in TPU_BACKENDS and tpu_chips() > 0
        self.preemption = Preemption(METADATA_URL if on_tpu else None, self.backend.processes)
        # Where a checkpoint is written before it has its place.
        self._partial_dir: Path | None = None
        # Whether an evaluation is to be made up for when this run is resumed.
        self._evaluation_due = False

    def _add_saving_callbacks(self) -> None:
        for callback in (self.preemption, Resumption(self._begin_resumed)):
            self.add_callback(callback)
        if isinstance(base := unwrap_peft_model(self.model), PreTrainedModel):
            # PEFT writes a card of its own, with these.
            base.add_model_tags([_TAG])

    # ---- The best checkpoint ----

    def _check_best_metric(self) -> None:
        """Refuse a `metric_for_best_model` that no evaluation will have, where that is known."""
        metrics = vars(type(self)).get("evaluation_metrics")
        if (
            metrics is None
            or self.compute_metrics is not None
            or self.args.eval_strategy == IntervalStrategy.NO
            # A callback of the caller's may add to the metrics.
            or not all(is_known(type(callback).__module__) for callback in self.callback_handler.callbacks)
        ):
            return
        of_dataset, of_class = metrics
        datasets = [f"{name}_" for name in self.eval_dataset] if isinstance(self.eval_dataset, dict) else [""]
        names = [f"{dataset}{metric}" for dataset in datasets for metric in of_dataset]
        self._check_best_metric_among([f"eval_{name}" for name in (*names, *of_class)])

    def _check_best_metric_among(self, names: Iterable[str]) -> None:
        metric = self.args.metric_for_best_model
        if metric is not None and f"eval_{metric.removeprefix('eval_')}" not in names:
            raise UserError(
                f"metric_for_best_model={metric!r} is not among the metrics that an evaluation may have: {', '.join(names)}. Set it to "
                "one of these, or return it from compute_metrics."
            )

    def _determine_best_metric(self, metrics, trial) -> bool:
        self._check_best_metric_among(metrics)
        # Some metrics are of a host's own clock, or of code that draws random numbers.
        metrics = self.backend.processes.of_first("the metrics of an evaluation", metrics)
        return super()._determine_best_metric(metrics, trial)

    # ---- Saving ----

    @property
    def _gives_parts(self) -> bool:
        """Whether another host or process writes what is saved, to which this one gives its parts of split tensors."""
        processes = self.backend.processes
        return processes.index > 0 and (processes.one_program or self.backend.splits_weights)

    @property
    def _is_for_first_host(self) -> bool:
        """Whether another host writes the checkpoint under way."""
        processes = self.backend.processes
        return self._partial_dir is not None and processes.one_program and processes.index > 0

    def save_model(self, output_dir=None, _internal_call=False) -> None:
        with self.backend.fetching_for_first():
            if self._gives_parts:
                # What the first fetches when it saves, in the same order.
                self.fetch_weights()
                self.averaging.read()
            super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with temporarily(self, _writes_optimizer=True):
            if self._gives_parts:
                read_all(self.optimizer.state_dict())
            else:
                super()._save_optimizer_and_scheduler(output_dir)

    def _get_output_dir(self, trial) -> str:
        # Where upstream writes a checkpoint to.
        return super()._get_output_dir(trial) if self._partial_dir is None else str(self._partial_dir)

    def _checkpoint(self, trial) -> str:
        return os.path.join(super()._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")

    def _save_checkpoint(self, model: nn.Module, trial) -> None:
        checkpoint = Path(self._checkpoint(trial))
        failure = None
        try:
            with self.backend.fetching_for_first():
                self._write_checkpoint(model, trial, checkpoint)
        except HostsDisagree:
            raise
        except Exception as error:
            failure = self._not_saved(str(checkpoint), checkpoint.parent, error) if is_of_disk(error) else error
        self.backend.processes.raise_together("the end of a checkpoint", failure)
        self.accelerator.wait_for_everyone()
        if not self.args.save_only_model:
            self._last_save = (self.state.global_step, self._evaluation_due)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(checkpoint))
        if self.args.should_save:
            delete_old(checkpoint.parent, checkpoint, self.args.save_total_limit, self.state.best_model_checkpoint)

    def _write_checkpoint(self, model: nn.Module, trial, checkpoint: Path) -> None:
        self._partial_dir = temporary_dir(checkpoint)
        partial = self._partial_dir / checkpoint.name
        try:
            super()._save_checkpoint(model, trial)
            # Upstream looks for the best beside the one that it writes.
            if self.state.best_global_step:
                best = checkpoint.with_name(f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}")
                # The disk of the first host may have what others do not see.
                processes = self.backend.processes
                is_there = processes.index == 0 and (best == checkpoint or best.exists())
                if processes.of_first("the best checkpoint", is_there):
                    self.state.best_model_checkpoint = str(best)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                self.state.save_to_json(str(partial / TRAINER_STATE_NAME))
                seal(partial)
                move_into_place(partial, checkpoint)
        finally:
            if self.args.should_save:
                # The disk may be gone altogether.
                with suppress(OSError):
                    remove_temporary(self._partial_dir, checkpoint)
            self._partial_dir = None

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # Files are read while training goes on, so they have to be in their place.
        if self._partial_dir is None:
            with self._pickled_without_secrets():
                super()._push_from_checkpoint(checkpoint_folder)

    def _pickled_without_secrets(self) -> AbstractContextManager[None]:
        """Context in which upstream pickles the arguments without their secrets, and has them all the same: it uploads with the token."""
        texts = {name: value for name, value in vars(self.args).items() if isinstance(value, str | dict | list)}
        without = copy(self.args)
        vars(without).update(redact(texts))
        return temporarily(self.args, __reduce_ex__=without.__reduce_ex__)

    def create_model_card(self, *args, **kwargs) -> None:
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            path = Path(self.args.output_dir) / "README.md"
            card = ModelCard.load(path)
            card.data.tags = list(dict.fromkeys([*(card.data.tags or ()), _TAG]))
            if isinstance(self.model.config, PreTrainedConfig):
                # Upstream has no name for a model of this machine.
                base = Path(self.model.config.name_or_path).name
                card.text = card.text.replace("[None](https://huggingface.co/None)", f"`{base}`, a local model")
            card.text = card.text.replace('model="None"', f'model="{path.parent}"')
            # It is written when training ends, after the last checkpoint.
            report = (
                ": [report](report.md)" if self.run_record is not None or path.with_name("report.md").is_file() else ""
            )
            chips = self.backend.num_chips * self.args.world_size
            on = f"{self.backend.device_name}, {count(chips, kind_of_device(self.backend.name))}"
            card.text += f"\n\nTrained with hf_tpu_ext {__version__} on {on}{report}.\n{in_card(path.parent)}"
            card.save(path)

    def _not_saved(self, what: str, run_dir: Path, error: Exception) -> SaveError:
        whole = next(
            (path for path in reversed(checkpoints_by_step(run_dir).values()) if find_damage(path) is None), None
        )
        last_whole = "There is no checkpoint to resume from" if whole is None else f"{whole} is complete"
        failure = SaveError(
            f"{what} could not be saved ({error}). {last_whole}. {free_space(run_dir)}Make room or lower save_total_limit, or set "
            "output_dir to a directory that can be written to, and start again with resume_from_checkpoint=True or the "
            "path of a checkpoint."
        )
        failure.__cause__ = error
        return failure

    def _save(self, output_dir=None, state_dict=None) -> None:
        if self._gives_parts:
            return
        if state_dict is None and (self.backend.traces_steps or self.backend.splits_weights):
            state_dict = self.fetch_weights()
        if self._partial_dir is not None or not self.args.should_save:
            self.write_model(output_dir, state_dict)
            return
        directory = Path(self.args.output_dir if output_dir is None else output_dir)
        try:
            with whole_model(directory) as partial:
                self.write_model(str(partial), state_dict)
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

    def fetch_weights(self) -> dict[str, Tensor]:
        """The weights of the model on the host, by name, in the dtype that they are trained in."""
        # Parameters rather than detached copies, for tied weights to be seen as one and stored once.
        weights = self.backend.fetch(dict(self.model.state_dict(keep_vars=True)))
        return self.frozen[0].in_float32(weights) if self.frozen else weights

    def write_model(self, output_dir: str, state_dict) -> None:
        of_model = {}
        if self.args.save_on_each_node:
            # Upstream's model is written by the first process of all, whatever it is told.
            of_model["should_save_on_this_rank"] = lambda is_main_process: is_main_process
        with (
            self.layers.in_place(),
            self._pickled_without_secrets(),
            temporarily(unwrap_peft_model(self.model), **of_model),
        ):
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
        if self._partial_dir is not None and not self.args.should_save:
            return
        rows = {"train_rows": len(self.train_dataset)} if has_length(self.train_dataset) else {}
        state = {
            "epoch_rng_state": self._state_of_epoch,
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
