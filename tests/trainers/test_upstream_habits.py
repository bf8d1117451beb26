"""What upstream's trainer takes of a user's code: loaders of other libraries, smaller batches after a failure, own loading."""

import ast
import math
import re
import sys
from functools import partial
from types import SimpleNamespace

import optuna
import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from transformers.optimization import Adafactor, AdafactorSchedule

from hf_tpu_ext import TPUTrainer
from hf_tpu_ext.errors import UserError
from hf_tpu_ext.step.optimizer import LazyAdamW
from hf_tpu_ext.trainers import ExtensionArguments, TPUTrainerMixin
from hf_tpu_ext.trainers.run.chips import Chips


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


def make(cls, directory, callbacks=(), model_init=None, **config):
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
    model = None if model_init is not None else Line(LineConfig())
    return cls(
        model, args, train_dataset=rows(), eval_dataset=rows(10), callbacks=list(callbacks), model_init=model_init
    )


class PassesOn(Trainer):
    """A class of the user's that names none of upstream's arguments."""

    def __init__(self, *args, scale=1, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale = scale


class PassesOnCompiled(TPUTrainerMixin, PassesOn): ...


def test_a_class_that_passes_its_arguments_on(xla, tmp_path):
    args = TrainingArguments(str(tmp_path), max_steps=1, report_to="none", save_strategy="no", disable_tqdm=True)
    trainer = PassesOnCompiled(Line(LineConfig()), args, None, rows(), scale=2)
    trainer.train()
    assert trainer.state.global_step == 1 and trainer.scale == 2
    with pytest.raises(TypeError, match="unexpected keyword argument 'scala'"):
        PassesOnCompiled(Line(LineConfig()), args, scala=2)


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


def test_loaders_of_training_and_prediction_without_a_dataset(xla, tmp_path):
    def predict(cls):
        loaders = {
            "get_train_dataloader": lambda self: Batches(self.train_dataset),
            "get_test_dataloader": lambda self, dataset: Batches(dataset),
        }
        trainer = make(type("Own", (cls,), loaders), tmp_path, max_steps=3)
        trainer.train()
        return trainer.predict(rows(12)).predictions

    mine, other = predict(TPUTrainer), predict(Trainer)
    assert mine.shape == (12,) and mine == pytest.approx(other, rel=1e-4)


def test_a_batch_has_its_values_as_attributes(runs):
    """As `BatchEncoding`, which upstream's collators make."""

    class Own:
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            assert not hasattr(inputs, "pixel_values")
            outputs = model(inputs.input_ids, attention_mask=inputs.attention_mask, labels=inputs["input_ids"])
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    def losses(cls):
        config = dict(
            max_steps=2, per_device_train_batch_size=4, logging_steps=1, report_to="none", save_strategy="no"
        )
        args = TrainingArguments(str(runs.output_dir), use_cpu=cls is Trainer, **config)
        data = [dict(runs.tokenizer(text)) for text in ("abcd", "efgh", "abgh", "dcba")]
        model = AutoModelForCausalLM.from_pretrained(runs.model_dir, dtype=torch.float32)
        trainer = type("Mine", (Own, cls), {})(model, args, DataCollatorWithPadding(runs.tokenizer), data)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    mine, other = losses(TPUTrainer), losses(Trainer)
    assert len(mine) == 2 and mine == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("filters", [True, False])
def test_losses_that_are_nan_are_logged_as_upstream_does(xla, tmp_path, caplog, filters, accumulation):
    def train(cls):
        trainer = make(
            cls,
            tmp_path,
            max_steps=4 // accumulation,
            logging_steps=2 // accumulation,
            gradient_accumulation_steps=accumulation,
            logging_nan_inf_filter=filters,
            train_sampling_strategy="sequential",
        )
        for row in trainer.train_dataset[4:8]:
            row["labels"] = torch.tensor(math.nan)
        trainer.train()
        return [log.get("loss", log.get("train_loss")) for log in trainer.state.log_history]

    ours, upstreams = train(TPUTrainer), train(Trainer)
    # The gradient of the second batch has made the weights NaN.
    assert ours == pytest.approx(upstreams, rel=1e-5, nan_ok=True) and math.isnan(ours[-1]) is not filters
    assert "The loss was NaN or infinite at step" in caplog.text
    assert ("has the mean of those before in its place" in caplog.text) is filters


class Full(TrainerCallback):
    """Has no memory for more than 4 rows."""

    def __init__(self, words):
        self.words = words

    def on_step_end(self, args, state, control, **kwargs):
        if state.train_batch_size > 4:
            raise RuntimeError(self.words)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("CUDA out of memory.", marks=pytest.mark.slow),
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.75G of 15.75G hbm.",
    ],
)
def test_a_smaller_batch_after_memory_has_run_out(xla, tmp_path, words):
    trainer = make(TPUTrainer, tmp_path, [Full(words)], per_device_train_batch_size=8, auto_find_batch_size=True)
    trainer.train()
    assert trainer.state.global_step == 2 and trainer._train_batch_size == 4


def test_no_batch_size_is_tried_twice_where_chips_do_not_divide_it(xla, tmp_path):
    tried = []

    class FullAtOnce(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            tried.append(state.train_batch_size)
            raise RuntimeError("CUDA out of memory.")

    trainer = make(TPUTrainer, tmp_path, [FullAtOnce()], per_device_train_batch_size=16, auto_find_batch_size=True)
    of_four_chips = SimpleNamespace(_backend=SimpleNamespace(num_chips=4))
    trainer.chips.rows_at_once = partial(Chips.rows_at_once, of_four_chips)
    for _ in range(2):
        trainer._train_batch_size = 16
        with pytest.raises(UserError, match="has come down to 3 rows for 4 chips"):
            trainer.train()
    assert tried == [16, 12, 8, 4] * 2


def test_a_smaller_batch_begins_with_no_gradients_and_no_losses(xla, tmp_path):
    class FullAmidAStep(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            if state.train_batch_size > 4:
                raise RuntimeError("CUDA out of memory.")

    def train(cls):
        config = dict(gradient_accumulation_steps=2, train_sampling_strategy="sequential", logging_steps=1)
        config |= dict(per_device_train_batch_size=5, auto_find_batch_size=True)
        trainer = make(cls, tmp_path, [FullAmidAStep()], **config)
        trainer.train()
        assert trainer.state.train_batch_size == 4
        return [
            value
            for log in trainer.state.log_history
            for name, value in log.items()
            if name in ("loss", "grad_norm", "train_loss")
        ]

    ours, upstreams = on_both_sides(train)
    assert ours == upstreams


def test_a_buffer_that_a_model_replaces_when_it_is_loaded_is_on_the_device(xla, tmp_path):
    make(TPUTrainer, tmp_path, save_strategy="steps", save_steps=1).train()
    trainer = make(TPUTrainer, tmp_path / "resumed")
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert trainer.state.global_step == 2 and trainer.model.scale.device.type == "xla"


def on_both_sides(measure):
    """What a function measures of our trainer, and what it measures of upstream's."""
    return measure(TPUTrainer), pytest.approx(measure(Trainer), rel=1e-5, abs=1e-7)


def test_an_override_of_create_optimizer_asks_the_class_for_the_optimizer(xla, tmp_path):
    def train(cls):
        def create_optimizer(self, model=None):
            optimizer, kwargs = cls.get_optimizer_cls_and_kwargs(self.args)
            linear = self.model.linear
            self.optimizer = optimizer([{"params": [linear.weight], "lr": 1e-2}, {"params": [linear.bias]}], **kwargs)
            return self.optimizer

        own = type("TwoRates", (cls,), {"create_optimizer": create_optimizer})
        trainer = make(own, tmp_path, max_steps=3, logging_steps=1)
        trainer.train()
        # Not only the trainer's own is a part of the program of a step.
        assert isinstance(trainer.optimizer.optimizer, LazyAdamW if cls is TPUTrainer else torch.optim.AdamW)
        return [log["loss"] for log in trainer.state.log_history if "loss" in log]

    ours, upstreams = on_both_sides(train)
    assert ours == upstreams


@pytest.mark.parametrize(
    ("name", "instead", "cls_name"),
    [
        *(
            (name, "adamw_torch", "AdamW")
            for name in ("paged_adamw_8bit", "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_32bit", "adamw_torch_8bit")
        ),
        ("rmsprop_bnb_8bit", "rmsprop", "RMSprop"),
    ],
)
def test_optimizers_of_few_bits_have_a_full_state_with_a_line(
    xla, tmp_path, monkeypatch, capsys, name, instead, cls_name
):
    # Nothing of it is imported.
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    losses = []
    for cls, optim in ((TPUTrainer, name), (Trainer, instead)):
        trainer = make(
            cls,
            tmp_path,
            max_steps=3,
            logging_steps=1,
            optim=optim,
            optim_args="momentum=0.9" * (instead == "rmsprop"),
        )
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
        assert trainer.args.optim == optim
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert (
        f"optim={name} is replaced by {cls_name}, whose state has the dtype of the weights" in capsys.readouterr().out
    )


@pytest.mark.parametrize("has_mask", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_blocks_of_a_tokenizer_without_a_pad_token(xla, tiny_model, tmp_path, has_mask):
    """GPT-2 has none, and `run_clm.py` trains it on blocks of one length. The last batch is not full."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.pad_token = None
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 60, (6, 12), generator=generator).tolist()
    columns = {"input_ids": ids, "labels": ids} | ({"attention_mask": [[1] * 12] * 6} if has_mask else {})

    def train(cls):
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        args = TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=4,
            num_train_epochs=2,
            logging_steps=1,
            learning_rate=1e-3,
            report_to="none",
            save_strategy="no",
        )
        dataset = Dataset.from_dict(columns)
        trainer = cls(model, args, default_data_collator, dataset, processing_class=tokenizer)
        trainer.train()
        return [log["loss"] for log in trainer.state.log_history if "loss" in log]

    ours, upstreams = on_both_sides(train)
    assert ours == upstreams


@pytest.mark.parametrize("has_optimizer", [False, True])
def test_a_training_step_without_a_run(xla, tmp_path, has_optimizer):
    def step(cls):
        trainer = make(cls, tmp_path)
        # Upstream's loop sets it.
        trainer.current_gradient_accumulation_steps = 1
        if has_optimizer:
            trainer.create_optimizer_and_scheduler(3)
        batch = trainer.data_collator(rows(4))
        values = [trainer.training_step(trainer.model, dict(batch)) for _ in range(2)]
        return [*(value.item() for value in values), *trainer.model.linear.weight.grad.flatten().tolist()]

    ours, upstreams = on_both_sides(step)
    assert ours == upstreams


@pytest.mark.ci
def test_a_search_of_hyperparameters(xla, tmp_path, monkeypatch):
    monkeypatch.setattr(ExtensionArguments, "run_report", True)

    def search(cls):
        trainer = make(cls, tmp_path, model_init=lambda: Line(LineConfig()), eval_strategy="steps", eval_steps=2)
        objectives = []
        trainer.hyperparameter_search(
            hp_space=lambda trial: {
                "learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-1),
                "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [2, 4]),
                "seed": trial.suggest_int("seed", 1, 3),
            },
            compute_objective=lambda metrics: objectives.append(metrics["eval_loss"]) or objectives[-1],
            n_trials=3,
            backend="optuna",
            sampler=optuna.samplers.RandomSampler(seed=1),
        )
        return objectives

    ours, upstreams = on_both_sides(search)
    assert ours == upstreams
    # Each trial has a record of its own, and nobody else's is replaced.
    assert {path.parent.name for path in tmp_path.rglob("run.jsonl")} == {"run-0", "run-1", "run-2"}


def adafactor_with_its_schedule(model):
    optimizer = Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=True, lr=None)
    return optimizer, AdafactorSchedule(optimizer)


def sgd_in_groups(model):
    groups = [{"params": [model.linear.weight], "lr": 0.02}, {"params": [model.linear.bias], "lr": 0.1}]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def adamw_that_has_trained(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.linear(torch.ones(1, model.linear.in_features)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer, None


@pytest.mark.parametrize(
    "make_optimizers",
    [pytest.param(adafactor_with_its_schedule, marks=pytest.mark.slow), sgd_in_groups, adamw_that_has_trained],
)
def test_an_optimizer_made_before_the_model_was_placed_trains_what_was_placed(xla, tmp_path, make_optimizers):
    """With its groups, its state and its schedule."""

    def train(cls):
        torch.manual_seed(0)
        model = Line(LineConfig())
        args = TrainingArguments(
            str(tmp_path / cls.__name__),
            use_cpu=cls is Trainer,
            max_steps=4,
            report_to="none",
            save_strategy="steps",
            save_steps=2,
            disable_tqdm=True,
            per_device_train_batch_size=4,
        )
        trainer = cls(model, args, train_dataset=rows(), optimizers=make_optimizers(model))
        trainer.train()
        trained = trainer.model.linear.weight.tolist()[0]
        # And takes up a checkpoint.
        torch.manual_seed(0)
        model = Line(LineConfig())
        trainer = cls(model, args, train_dataset=rows(), optimizers=make_optimizers(model))
        trainer.train(resume_from_checkpoint=str(tmp_path / cls.__name__ / "checkpoint-2"))
        assert trainer.model.linear.weight.tolist()[0] == trained
        return trained

    assert train(TPUTrainer) == pytest.approx(train(Trainer), rel=1e-4, abs=1e-6)


def test_the_settings_of_a_refused_optimizer_are_those_that_make_it_in_the_trainer(xla, tmp_path):
    model = Line(LineConfig())
    args = TrainingArguments(str(tmp_path), report_to="none")
    sgd = torch.optim.SGD(Line(LineConfig()).parameters(), lr=0.1, momentum=0.9, nesterov=True)
    with pytest.raises(
        ValueError, match="not those of the model that is trained.*optimizer_cls_and_kwargs"
    ) as refusal:
        TPUTrainer(model, args, optimizers=(sgd, None))
    settings = ast.literal_eval(re.search(r"\(SGD, ({.*?})\)", str(refusal.value)).group(1))
    trainer = TPUTrainer(model, args, optimizer_cls_and_kwargs=(torch.optim.SGD, settings))
    assert trainer.create_optimizer().defaults == sgd.defaults


def test_hooks_and_attributes_that_parameters_have_before_the_trainer(xla, tmp_path):
    """A mask of gradients is how rows of an embedding are frozen; on XLA the model gets other parameters."""

    def train(cls):
        updated = []

        def model_init():
            torch.manual_seed(0)
            model = Line(LineConfig())
            weight, mask = model.linear.weight, torch.tensor([[1.0, 0.0, 0.0, 1.0]])
            weight.register_hook(lambda gradient: gradient * mask.to(gradient.device))
            removed = weight.register_hook(lambda gradient: gradient * 0)
            weight.register_post_accumulate_grad_hook(lambda parameter: updated.append(parameter.shape))
            weight.scale = 10.0
            model.removed = removed
            return model

        class Own(cls):
            def create_optimizer(self, model=None):
                self.model.removed.remove()
                rates = [getattr(parameter, "scale", 1.0) for parameter in self.model.parameters()]
                groups = zip(self.model.parameters(), rates, strict=True)
                self.optimizer = torch.optim.SGD([{"params": [one], "lr": 0.01 * rate} for one, rate in groups])
                return self.optimizer

        trainer = make(Own, tmp_path, model_init=model_init, max_steps=3, logging_steps=1)
        trainer.train()
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        return norms, len(updated), *(parameter.detach().cpu() for parameter in trainer.model.parameters())

    mine, other = train(TPUTrainer), train(Trainer)
    assert mine[0] == pytest.approx(other[0], rel=1e-5) and mine[1] >= other[1] == 3
    for found, right in zip(mine[2:], other[2:], strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)
