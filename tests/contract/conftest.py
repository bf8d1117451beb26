"""A stock run on eager CPU, to see what upstream's trainers do and in which order."""

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from hf_tpu_ext.examples.tiny import make_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), hidden_size=32, intermediate_size=48, num_hidden_layers=1)


class Stock:
    """Makes [`~trl.SFTTrainer`]s on eager CPU."""

    def __init__(self, model_dir, output_dir):
        self.model_dir, self.output_dir = model_dir, output_dir
        self.dataset = Dataset.from_list([{"text": "abcd"[: 1 + index % 4]} for index in range(8)])

    def config(self, cls=SFTConfig, **config):
        defaults = dict(
            output_dir=str(self.output_dir),
            per_device_train_batch_size=2,
            max_steps=2,
            max_length=16,
            bf16=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        )
        return cls(**{**defaults, **config})

    def trainer(self, cls=SFTTrainer, callbacks=None, **config):
        return cls(
            str(self.model_dir),
            self.config(**config),
            train_dataset=self.dataset,
            eval_dataset=self.dataset.select(range(3)),
            callbacks=callbacks,
        )


@pytest.fixture
def stock(model_dir, tmp_path):
    return Stock(model_dir, tmp_path / "run")


class Recorder(TrainerCallback):
    """Writes down the events that the package's callbacks act on."""

    def __init__(self, events):
        self.events = events

    def on_train_begin(self, args, state, control, model, optimizer, **kwargs):
        self.events.append(f"on_train_begin {type(optimizer.optimizer).__name__}")
        zero_grad = model.zero_grad

        def recorded(*args, **kwargs):
            self.events.append("model.zero_grad")
            zero_grad(*args, **kwargs)

        model.zero_grad = recorded

    def on_substep_end(self, args, state, control, **kwargs):
        self.events.append("on_substep_end")

    def on_step_end(self, args, state, control, **kwargs):
        self.events.append("on_step_end")

    def on_prediction_step(self, args, state, control, **kwargs):
        self.events.append("on_prediction_step")

    def on_train_end(self, args, state, control, **kwargs):
        self.events.append("on_train_end")


class Recorded(SFTTrainer):
    """Writes down the order in which the hooks that the package overrides are called."""

    events: list[str]

    def _move_model_to_device(self, model, device):
        self.events.append("_move_model_to_device")
        super()._move_model_to_device(model, device)

    def get_optimizer_cls_and_kwargs(self, args, model=None):
        self.events.append("get_optimizer_cls_and_kwargs")
        return super().get_optimizer_cls_and_kwargs(args, model)

    def create_optimizer(self, model=None):
        self.events.append("create_optimizer")
        return super().create_optimizer(model)

    def _get_num_items_in_batch(self, batch_samples, device):
        devices = {value.device.type for batch in batch_samples for value in batch.values()}
        self.events.append(f"_get_num_items_in_batch of {len(batch_samples)} on {devices.pop()}")
        return super()._get_num_items_in_batch(batch_samples, device)

    def training_step(self, *args, **kwargs):
        closes = "closing" if self.accelerator.sync_gradients else "not closing"
        self.events.append(f"training_step, {closes}, one of {self.current_gradient_accumulation_steps}")
        loss = super().training_step(*args, **kwargs)
        assert isinstance(loss, torch.Tensor) and not loss.requires_grad
        return loss

    def _prepare_inputs(self, inputs):
        self.events.append("_prepare_inputs")
        return super()._prepare_inputs(inputs)

    def compute_loss_context_manager(self):
        self.events.append("compute_loss_context_manager")
        return super().compute_loss_context_manager()

    def compute_loss(self, *args, **kwargs):
        self.events.append("compute_loss")
        return super().compute_loss(*args, **kwargs)

    def _clip_grad_norm(self, model):
        self.events.append("_clip_grad_norm")
        return super()._clip_grad_norm(model)

    def prediction_step(self, *args, **kwargs):
        self.events.append("prediction_step")
        return super().prediction_step(*args, **kwargs)

    def evaluation_loop(self, *args, **kwargs):
        self.events.append("evaluation_loop")
        return super().evaluation_loop(*args, **kwargs)

    def _maybe_log_save_evaluate(self, *args, **kwargs):
        self.events.append("_maybe_log_save_evaluate")
        return super()._maybe_log_save_evaluate(*args, **kwargs)

    def log(self, *args, **kwargs):
        self.events.append("log")
        return super().log(*args, **kwargs)

    def _save_checkpoint(self, model, trial):
        self.events.append("_save_checkpoint")
        return super()._save_checkpoint(model, trial)

    def _save(self, output_dir=None, state_dict=None):
        self.events.append(f"_save, {'no' if state_dict is None else 'a'} state dict")
        return super()._save(output_dir, state_dict)

    def _save_rng_state(self, output_dir):
        self.events.append("_save_rng_state")
        return super()._save_rng_state(output_dir)

    def _load_rng_state(self, checkpoint):
        self.events.append("_load_rng_state")
        return super()._load_rng_state(checkpoint)

    def _finalize_training(self, trial, num_train_samples, start_time):
        self.events.append("_finalize_training")
        return super()._finalize_training(trial, num_train_samples, start_time)


@pytest.fixture
def record(stock):
    """Makes a trainer that writes down its events, and gives both."""

    def make(**config):
        events = []
        trainer = stock.trainer(type("Recorded", (Recorded,), {"events": events}), [Recorder(events)], **config)
        return trainer, events

    return make


@pytest.fixture(scope="session", autouse=True)
def started(xla):
    """XLA is started before the first backward pass of the process."""
