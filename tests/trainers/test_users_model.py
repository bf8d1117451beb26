"""What people do with the model of a trainer, during runs and after them, is what it is on an eager device."""

import copy
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from trl import SFTTrainer

from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer, TPUTrainer
from hf_tpu_ext.errors import UserError
from hf_tpu_ext.examples.tiny import make_model


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory):
    return str(
        make_model(
            tmp_path_factory.mktemp("tied"),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            tie_word_embeddings=True,
        )
    )


@pytest.fixture
def tied_runs(runs, tied_model):
    runs.model_dir = tied_model
    return runs


class CopyAll(TrainerCallback):
    """Copies, holds and saves weights in all ways, and goes back to earlier ones in the middle of the run."""

    def __init__(self, directory):
        self.directory = directory
        self.kept = {}

    def on_train_begin(self, args, state, control, model, **kwargs):
        trained = self.trained(model)
        self.kept["begin"] = [parameter.clone() for parameter in model.parameters()]
        self.kept["ema"] = [parameter.detach().clone() for parameter in trained]
        self.kept["held state dict"] = [*model.state_dict().values()]
        self.kept["held data"] = [parameter.data for parameter in trained]
        self.kept["held parameters"] = [*model.parameters()]

    def trained(self, model):
        return [parameter for parameter in model.parameters() if parameter.requires_grad]

    @torch.no_grad()
    def on_step_end(self, args, state, control, model, optimizer, **kwargs):
        trained, kept, step = self.trained(model), self.kept, state.global_step
        for average, parameter in zip(kept["ema"], trained, strict=True):
            average.mul_(0.9).add_(parameter, alpha=0.1)
        if step in (1, 3, 5):
            kept[f"clones {step}"] = [parameter.clone() for parameter in trained]
            kept[f"data {step}"] = [parameter.data.clone() for parameter in trained]
            kept[f"state dict {step}"] = [*copy.deepcopy(model.state_dict()).values()]
            kept[f"model {step}"] = [*copy.deepcopy(model).parameters()]
            kept[f"views {step}"] = [value.clone() for value in kept["held state dict"]]
        if step == 4:
            self.averaged = AveragedModel(model)
            kept["copied"] = [torch.empty_like(parameter).copy_(parameter) for parameter in trained]
            kept["copied at once"] = [torch.empty_like(parameter) for parameter in trained]
            torch._foreach_copy_(kept["copied at once"], trained)
            kept["moments"] = [
                value.clone() for moments in optimizer.state.values() for value in moments.values() if value.ndim
            ]
            kept["held later"] = [*model.state_dict().values()]
            model.save_pretrained(self.directory)
        if step >= 4:
            self.averaged.update_parameters(model)
        if step == 6:
            # "The best weights", which are kept all the same.
            for parameter, best in zip(trained, kept["clones 3"], strict=True):
                parameter.copy_(best)

    def on_train_end(self, args, state, control, model, **kwargs):
        self.kept["averaged"] = [*self.averaged.parameters()]
        self.kept["end"] = [parameter.clone() for parameter in model.parameters()]


def assert_same(ours, theirs, where=""):
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine.detach().cpu(), other.detach(), rtol=0, atol=1e-5), where


def weights_of(directory):
    return load_file(next(directory.glob("*model.safetensors")))


def assert_same_files(ours, theirs):
    mine, other = weights_of(ours), weights_of(theirs)
    assert sorted(mine) == sorted(other)
    assert_same([mine[name] for name in sorted(mine)], [other[name] for name in sorted(mine)], ours)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {}], ids=["full", "lora"])
def test_weights_are_copied_held_saved_and_used(tied_runs, tmp_path, lora):
    callbacks = {name: CopyAll(tmp_path / f"{name} in run") for name in ("stock", "ours")}
    trainers = {
        name: getattr(tied_runs, name)(lora=lora, kwargs={"callbacks": [callback]}, gradient_checkpointing=False)
        for name, callback in callbacks.items()
    }
    ours, stock = trainers["ours"], trainers["stock"]
    assert ours.backend.counters().replays >= 6 and ours.watch.recompiles == 0
    for what, kept in callbacks["stock"].kept.items():
        assert_same(callbacks["ours"].kept[what], kept, what)
    assert_same_files(tmp_path / "ours in run", tmp_path / "stock in run")

    # Called with what a tokenizer makes, as on the CPU.
    batch = tied_runs.tokenizer("hello", return_tensors="pt")
    logits = stock.model.eval()(**batch).logits
    assert_same([ours.model.eval()(**batch).logits], [logits])
    assert_same([copy.deepcopy(ours.model)(batch["input_ids"]).logits], [logits])
    if lora is None:
        told = {"max_new_tokens": 2, "do_sample": False}
        assert torch.equal(ours.model.generate(**batch, **told), stock.model.generate(**batch, **told))

    plain = {}
    for name, trainer in trainers.items():
        assert isinstance(trainer.model, PeftModel) == (lora is not None)
        trainer.model.save_pretrained(tmp_path / f"{name} after")
        plain[name] = trainer.model if lora is None else trainer.model.merge_and_unload()
        plain[name].save_pretrained(tmp_path / f"{name} plain")
    assert_same_files(tmp_path / "ours after", tmp_path / "stock after")
    assert_same_files(tmp_path / "ours plain", tmp_path / "stock plain")
    assert_same([AutoModelForCausalLM.from_pretrained(tmp_path / "ours plain").eval()(**batch).logits], [logits])
    assert_same([plain["ours"](**batch).logits], [logits])

    torch.save(plain["ours"].state_dict(), tmp_path / "weights.pt")
    torch.save(plain["ours"], tmp_path / "model.pt")
    assert (tmp_path / "weights.pt").stat().st_size < 1.3 * (tmp_path / "ours plain/model.safetensors").stat().st_size
    program = (
        "import sys, torch; loaded = torch.load(sys.argv[1]); "
        "assert {value.device.type for value in loaded.values()} == {'cpu'}; "
        "assert loaded['lm_head.weight'].data_ptr() == loaded['model.embed_tokens.weight'].data_ptr(); "
        "assert 'torch_xla' not in sys.modules; torch.save(list(loaded.values()), sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path / "weights.pt", tmp_path / "values.pt"], check=True)
    assert_same(torch.load(tmp_path / "values.pt"), plain["stock"].state_dict().values())


def make_trainer(runs, name, callbacks=(), **config):
    if name == "stock":
        config = runs.config(use_cpu=True, gradient_checkpointing=False, **config)
        return runs.trainer(SFTTrainer, config, callbacks=list(callbacks)), config
    config = runs.config(TPUSFTConfig, gradient_checkpointing=False, **config)
    return runs.trainer(TPUSFTTrainer, config, callbacks=list(callbacks)), config


@pytest.mark.parametrize(
    "step_replay", [pytest.param(None, id="replayed"), pytest.param(False, id="traced", marks=pytest.mark.slow)]
)
def test_copies_between_runs_keep_their_values(runs, step_replay):
    """Without any code of one's own in the runs."""

    def keep(trainer):
        model, kept = trainer.model, {}
        kept["clones"] = [parameter.clone() for parameter in model.parameters()]
        kept["model"] = [*copy.deepcopy(model).parameters()]
        kept["held"] = [*model.state_dict().values()]
        trainer.train()
        kept["clones between"] = [parameter.data.clone() for parameter in model.parameters()]
        kept["held between"] = [value.clone() for value in kept["held"]]
        trainer.train()
        return kept

    # The programs that it compiles are those of the other test.
    ours = keep(make_trainer(runs, "ours", max_steps=3, step_replay=step_replay)[0])
    for what, values in keep(make_trainer(runs, "stock", max_steps=3)[0]).items():
        assert_same(ours[what], values, what)


class Fails(TrainerCallback):
    def __init__(self, *errors):
        self.errors = list(errors)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2 and self.errors:
            raise self.errors.pop(0)


def left_on(model):
    """Whatever a run can leave on the modules of a model. Upstream leaves a hook of activation checkpointing."""
    return [
        (
            name,
            "forward" in vars(module),
            "zero_grad" in vars(module),
            sum(not hook.__module__.startswith("transformers.") for hook in module._forward_hooks.values()),
        )
        for name, module in model.named_modules()
    ]


@pytest.mark.slow
def test_a_run_that_failed_leaves_nothing_to_the_next(runs, same_logs):
    logs = []
    for name, config in {"ours": {"rematerialization": "dots"}, "stock": {}}.items():
        failing = Fails(RuntimeError("mine"), KeyboardInterrupt())
        config |= {"max_steps": 4, "logging_steps": 3, "gradient_accumulation_steps": 2}
        trainer, _ = make_trainer(runs, name, [failing], **config)
        before = left_on(trainer.model)
        for error in [*failing.errors]:
            with pytest.raises(type(error)):
                trainer.train()
            assert left_on(trainer.model) == before
            assert torch.overrides._get_current_function_mode() is None
        trainer.train()
        # Upstream's own list of metrics has those of the runs that failed.
        shown = ("loss", "grad_norm", "num_tokens", "learning_rate", "step")
        log = [
            {key: value for key, value in entry.items() if key in shown} for entry in trainer.state.log_history[:-1]
        ]
        logs.append(SimpleNamespace(state=SimpleNamespace(log_history=log)))
    same_logs(*logs)


@pytest.mark.ci
def test_changes_of_the_callers_arguments_are_taken_up(runs, same_logs, caplog):
    trainers = {}
    for name in ("ours", "stock"):
        trainer, config = make_trainer(runs, name, max_steps=8)
        config.max_steps, config.learning_rate, config.logging_steps, config.seed = 3, 5e-3, 2, 7
        config.lr_scheduler_type = "constant"
        if name == "ours":
            config.bf16, config.max_length = True, 24
        trainer.train()
        first = trainer.state.log_history
        # Those of the trainer itself, and a change that comes before an evaluation.
        trainer.args.max_steps, trainer.args.logging_steps = 2, 1
        trainer.train()
        config.per_device_eval_batch_size = 2
        trainer.evaluate()
        trainer.state.log_history = first + trainer.state.log_history
        trainers[name] = trainer
    same_logs(trainers["ours"], trainers["stock"])
    lines = [record.message for record in caplog.records if "after the trainer was made" in record.message]
    assert lines == [
        "bf16=True, max_length=24: changed after the trainer was made, which has no effect. Make another trainer with it."
    ]


@pytest.mark.ci
def test_changes_of_the_callers_arguments_are_answered_by_the_table(runs, same_logs, caplog):
    trainers = []
    for name in ("ours", "stock"):
        trainer, config = make_trainer(runs, name, max_steps=3)
        config.optim, config.ddp_find_unused_parameters = "sgd", False
        trainer.train()
        trainers.append(trainer)
    same_logs(*trainers)
    ours, lines = trainers[0], [record.message for record in caplog.records]
    assert type(ours.optimizer.optimizer).__name__ == "SGD"
    assert any(line.startswith("optim=sgd passes its learning rate as a Python number") for line in lines)
    assert any(line.startswith("ddp_find_unused_parameters=False has no effect: ") for line in lines)
    assert not any("after the trainer was made" in line for line in lines)
    trainer, config = make_trainer(runs, "ours", max_steps=3)
    config.fp16 = True
    with pytest.raises(UserError, match="fp16=True does not work on XLA.*Set bf16=True and fp16=False"):
        trainer.train()


class Changes(TrainerCallback):
    """Changes arguments, and the data of the next run, in the middle of a run."""

    def __init__(self, **changes):
        self.changes = changes

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            for name, value in self.changes.items():
                setattr(args, name, value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        dict(max_grad_norm=0.01),
        dict(max_grad_norm=0.0),
        dict(learning_rate=1.0, weight_decay=1.0),
        dict(per_device_train_batch_size=2, per_device_eval_batch_size=2),
        dict(gradient_accumulation_steps=2, logging_steps=2),
        dict(max_steps=6, eval_steps=1, seed=3),
    ],
    ids=str,
)
def test_changes_within_a_run_are_upstreams(runs, same_logs, changes):
    logs = []
    for train in (runs.ours, runs.stock):
        more = {"callbacks": [Changes(**changes)]}
        trainer = train(kwargs=more, max_steps=8, eval_strategy="steps", eval_steps=3)
        history = trainer.state.log_history
        trainer.train_dataset, trainer.eval_dataset = (
            trainer.train_dataset.select(range(9)),
            trainer.eval_dataset.select(range(5)),
        )
        trainer.train()
        logs.append(SimpleNamespace(state=SimpleNamespace(log_history=history + trainer.state.log_history)))
    same_logs(*logs)


# ---- Activation checkpointing by a model itself ----


class Checkpointed(nn.Module):
    """A weight of 1 before dropout: the gradient of the sum is the sum, if both are of the same elements."""

    def __init__(self, dropout, by):
        super().__init__()
        self.weight, self.dropout, self.by = nn.Parameter(torch.ones(())), nn.Dropout(dropout), by

    def forward(self, x):
        x = x.clone().requires_grad_()
        return {"loss": self.by(lambda value: self.dropout(value * self.weight).square(), x).sum()}


def by_torch_xla(function, *args):
    import torch_xla.utils.checkpoint

    on_xla = args[0].device.type == "xla"
    return torch_xla.utils.checkpoint.checkpoint(function, *args) if on_xla else function(*args)


def with_keyword(function, x):
    return checkpoint(lambda value, other: function(value), x, other=1, use_reentrant=False)


@pytest.mark.parametrize(
    "by",
    [by_torch_xla, partial(checkpoint, use_reentrant=True), partial(checkpoint, use_reentrant=False), with_keyword],
    ids=["torch_xla", "reentrant", "not reentrant", "keyword"],
)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_model_that_checkpoints_its_activations(xla, tmp_path, by, dropout):
    rows = [{"x": torch.arange(6.0) + row} for row in range(16)]
    settings = dict(max_steps=3, logging_steps=1, report_to="none", learning_rate=0.0, max_grad_norm=1e9, optim="sgd")
    settings |= dict(save_strategy="no", remove_unused_columns=False, per_device_train_batch_size=4)
    logs = []
    for cls in (TPUTrainer, Trainer) if dropout == 0 else (TPUTrainer,):
        args = TrainingArguments(str(tmp_path), **{**settings, "use_cpu": cls is Trainer})
        trainer = cls(Checkpointed(dropout, by), args, train_dataset=rows)
        trainer.train()
        logs.append([(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log])
    assert len(logs[0]) == 3 and all(norm == pytest.approx(2 * loss) for loss, norm in logs[0])
    assert logs[-1] == [pytest.approx(each) for each in logs[0]]
    # Outside of runs, they are as before.
    assert torch.utils.checkpoint.CheckpointFunction.__module__ == "torch.utils.checkpoint"
