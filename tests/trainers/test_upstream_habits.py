"""What upstream's trainer takes of a user's code: loaders of other libraries, smaller batches after a failure, own loading."""

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from hf_tpu_ext import TPUTrainer


class LineConfig(PreTrainedConfig):
    model_type = "line"


class Line(PreTrainedModel):
    """Takes its scale from the checkpoint, in the place of its own."""

    config_class = LineConfig
    main_input_name = "x"

    def __init__(self, config):
        super().__init__(config)
        self.linear = nn.Linear(4, 1)
        self.register_buffer("scale", torch.ones(()))
        self.post_init()

    def load_state_dict(self, state_dict, *args, **kwargs):
        self.scale = torch.as_tensor(state_dict["scale"]).clone()
        return super().load_state_dict(state_dict, *args, **kwargs)

    def forward(self, x, labels=None):
        y = self.linear(x).squeeze(-1) * self.scale
        return {"loss": nn.functional.mse_loss(y, labels), "logits": y}


def rows(count=32):
    generator = torch.Generator().manual_seed(0)
    return [
        {"x": torch.randn(4, generator=generator), "labels": torch.randn((), generator=generator)}
        for _ in range(count)
    ]


def make(cls, directory, callbacks=(), **config):
    torch.manual_seed(0)
    defaults = {
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": not issubclass(cls, TPUTrainer),
    }
    args = TrainingArguments(str(directory), **{**defaults, **config})
    return cls(Line(LineConfig()), args, train_dataset=rows(), eval_dataset=rows(10), callbacks=list(callbacks))


class Batches:
    """A loader of another library: without a dataset."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data) // 4

    def __iter__(self):
        for first in range(0, len(self) * 4, 4):
            yield {key: torch.stack([row[key] for row in self.data[first : first + 4]]) for key in self.data[0]}


@pytest.mark.parametrize("loss_only", [True, False])
def test_a_loader_without_a_dataset(xla, tmp_path, loss_only):
    def evaluate(cls):
        own = type("Own", (cls,), {"get_eval_dataloader": lambda self, dataset=None: Batches(self.eval_dataset)})
        return make(own, tmp_path, prediction_loss_only=loss_only).evaluate()

    assert evaluate(TPUTrainer)["eval_loss"] == pytest.approx(evaluate(Trainer)["eval_loss"], rel=1e-5)


class Full(TrainerCallback):
    """Has no memory for more than 4 rows."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.train_batch_size > 4:
            raise RuntimeError("CUDA out of memory.")


def test_a_smaller_batch_after_memory_has_run_out(xla, tmp_path):
    trainer = make(TPUTrainer, tmp_path, [Full()], per_device_train_batch_size=8, auto_find_batch_size=True)
    trainer.train()
    assert trainer.state.global_step == 2 and trainer._train_batch_size == 4


def test_a_buffer_that_a_model_replaces_when_it_is_loaded_is_on_the_device(xla, tmp_path):
    make(TPUTrainer, tmp_path, save_strategy="steps", save_steps=1).train()
    trainer = make(TPUTrainer, tmp_path / "resumed")
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert trainer.state.global_step == 2 and trainer.model.scale.device.type == "xla"
