"""Replay follows Python: what a step could have read is compared at each step, and code of the user's is found and named."""

import inspect
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, TrainerCallback
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.qwen3 import modeling_qwen3
from transformers.trainer_pt_utils import LabelSmoother
from trl import SFTTrainer

from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer, TPUTrainer, TPUTrainingArguments
from hf_tpu_ext.step.fingerprint import COUNTS_ATTRIBUTES, Fingerprint
from hf_tpu_ext.trainers.run.programs import reach_of_trainer
from hf_tpu_ext.trainers.run.user_code import find_own_code, names_of_a_step


@pytest.fixture(scope="module")
def made(xla, tiny_model, tmp_path_factory, runs_class):
    """A trainer with its optimizer, whose model has a label smoother and adapters, before training."""
    runs = runs_class(tiny_model, tmp_path_factory.mktemp("run"))
    trainer = runs.ours(
        train=False, lora={}, config_cls=TPUSFTConfig, label_smoothing_factor=0.1, gradient_checkpointing=False
    )
    trainer.optimizer = trainer.accelerator.prepare_optimizer(trainer.create_optimizer(), device_placement=False)
    return trainer


def note(trainer):
    models = [trainer.model]
    noted = Fingerprint(
        lambda: reach_of_trainer(trainer, models),
        models,
        trainer.backend.programs.memory_of,
        training=trainer.model.training,
    )
    noted.note()
    # A step would set it back.
    noted._set_mode = lambda: None
    return noted


@contextmanager
def attribute(owner, name, value):
    """An attribute that is set and, at the end, as it was. What the class of `owner` has stays there."""
    before = (owner._modules if isinstance(owner, nn.Module) and name in owner._modules else vars(owner)).get(
        name, owner
    )
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if before is owner else setattr(owner, name, before)


@contextmanager
def hook(handle):
    try:
        yield
    finally:
        handle.remove()


def base(trainer):
    return trainer.model.base_model.model


def own(*args, **kwargs):
    """Code of the user's."""


# ---- What is compared ----


@contextmanager
def other_list_of_layers(trainer):
    with attribute(base(trainer).model, "layers", base(trainer).model.layers[:]):
        yield


@contextmanager
def other_class(module, cls):
    before = type(module)
    module.__class__ = cls
    try:
        yield
    finally:
        module.__class__ = before


@contextmanager
def in_dict(entries, key, value):
    before = entries[key]
    entries[key] = value
    try:
        yield
    finally:
        entries[key] = before


@pytest.mark.parametrize(
    "changed, says",
    [
        (lambda t: attribute(base(t).config, "num_hidden_layers", 2), "config.num_hidden_layers` was 1, is 2"),
        (other_list_of_layers, "model.model.layers` was replaced"),
        (lambda t: attribute(base(t).model, "norm", nn.Identity()), "model.model.norm` was replaced"),
        (lambda t: attribute(base(t).model, "added", None), "model.model.added` was added"),
        (lambda t: attribute(base(t).model.rotary_emb, "attention_scaling", np.float32(2)), "attention_scaling"),
        (lambda t: attribute(base(t).model, "training", False), "training` was True, is False"),
        (lambda t: other_class(base(t).model.norm, nn.LayerNorm), ", is a LayerNorm"),
        (lambda t: in_dict(t.model.peft_config["default"].__dict__, "lora_alpha", 99), ", is 99"),
        (lambda t: attribute(t.label_smoother, "epsilon", 0.3), "trainer.label_smoother.epsilon` was 0.1, is 0.3"),
        (lambda t: attribute(t, "router_aux_loss_coef", 0.5), "trainer.router_aux_loss_coef`"),
        (lambda t: attribute(t, "compute_loss_func", own), "trainer.compute_loss_func"),
        (lambda t: attribute(t, "compute_loss", own), "trainer.compute_loss` was added"),
        (lambda t: attribute(t, "label_smoother", LabelSmoother(0.2)), "trainer.label_smoother"),
        (lambda t: attribute(t.args, "max_grad_norm", 0.5), "trainer.args.max_grad_norm` was 1.0, is 0.5"),
        (lambda t: attribute(SFTTrainer, "compute_loss", own), "SFTTrainer.compute_loss` was replaced"),
        (lambda t: attribute(modeling_qwen3.Qwen3MLP, "forward", own), "Qwen3MLP.forward` was replaced"),
        (lambda t: attribute(modeling_qwen3, "rotate_half", own), "modeling_qwen3.rotate_half` was replaced"),
        (lambda t: attribute(nn.functional, "silu", own), "torch.nn.functional.silu` was replaced"),
        (lambda t: hook(base(t).lm_head.register_forward_hook(own)), "_forward_hooks"),
        (lambda t: hook(nn.modules.module.register_module_forward_hook(own)), "_global_forward_hooks"),
        (lambda t: hook(t.optimizer.optimizer.register_step_pre_hook(own)), "_optimizer_step_pre_hooks"),
    ],
)
def test_what_a_step_could_have_read_is_compared(made, changed, says):
    made.model.train()
    noted = note(made)
    assert noted.change() is None
    with changed(made):
        change = noted.change()
        assert change is not None and says in change
    note(made)


def test_hooks_of_parameters_are_compared(made):
    parameter = next(parameter for parameter in made.model.parameters() if parameter.requires_grad)
    noted = note(made)
    with hook(parameter.register_hook(own)):
        assert noted.change() == "a hook of a parameter was registered"
    with hook(parameter.register_hook(own)):
        noted = note(made)
        with hook(parameter.register_hook(partial(own))):
            assert "hooks of a parameter" in noted.change()


# ---- Code of the user's ----


class OwnNorm(nn.LayerNorm):
    pass


class InStep(TrainerCallback):
    pass


@pytest.mark.parametrize(
    "changed, says",
    [
        (lambda t: attribute(t, "compute_loss", own), "trainer.compute_loss is user code"),
        (lambda t: attribute(t, "compute_loss_func", own), "compute_loss_func is user code"),
        (lambda t: attribute(SFTTrainer, "compute_loss", own), "compute_loss of SFTTrainer is patched by user code"),
        (lambda t: attribute(base(t).model, "forward", own), "forward of base_model.model.model is user code"),
        (lambda t: attribute(base(t).model, "norm", OwnNorm(4)), "norm is a OwnNorm, a custom module"),
        (lambda t: attribute(base(t), "_loss_function", own), "_loss_function of base_model.model is user code"),
        (lambda t: attribute(modeling_qwen3.Qwen3MLP, "forward", own), "forward of transformers"),
        (lambda t: attribute(modeling_qwen3, "rotate_half", own), "rotate_half of transformers.models.qwen3"),
        (lambda t: hook(base(t).lm_head.register_forward_hook(own)), "a user hook on base_model"),
        (lambda t: hook(base(t).lm_head.register_full_backward_hook(own)), "a user hook"),
        (
            lambda t: hook(nn.modules.module.register_module_forward_hook(own)),
            "a user hook on all modules or optimizers",
        ),
        (lambda t: hook(t.optimizer.optimizer.register_step_pre_hook(own)), "a user hook on the optimizer"),
        (lambda t: attribute(t.optimizer.optimizer, "step", own), "a method of the optimizer"),
        (lambda t: in_dict(vars(t.callback_handler), "callbacks", [InStep()]), None),
    ],
)
def test_code_of_the_users_is_found(made, changed, says):
    assert find_own_code(made, [made.model]) is None
    with changed(made):
        found = find_own_code(made, [made.model])
        assert found is None if says is None else says in found
    assert find_own_code(made, [made.model]) is None


class AtEveryStep(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        pass


@pytest.mark.ci
@pytest.mark.skipif(not COUNTS_ATTRIBUTES, reason="this Python does not count attributes: all are compared")
@pytest.mark.parametrize(
    "config",
    [
        {},
        pytest.param({"lora": {}}, marks=pytest.mark.ci),
        pytest.param({"label_smoothing_factor": 0.1}, marks=pytest.mark.slow),
        pytest.param({"packing": True}, marks=pytest.mark.slow),
    ],
)
def test_what_is_compared_does_not_change_by_itself(runs, monkeypatch, config):
    """With logs and evaluations in between: what is written to, and looked at again, is whether modules train."""
    looked = []
    changed_dict = Fingerprint._changed_dict

    def look(self, place):
        looked.append(self._names[id(self._dicts[place])][0])
        return changed_dict(self, place)

    monkeypatch.setattr(Fingerprint, "_changed_dict", look)
    trainer = runs.ours(
        max_steps=6,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=3,
        gradient_checkpointing=False,
        kwargs={"callbacks": [AtEveryStep()]},
        **config,
    )
    assert trainer.steps.compiled is None
    # accelerate's state, which each object of its class writes to, at every step.
    # And PyTorch's namespaces, in which other random operators are put while a step is traced.
    of_modules = [name for name in looked if name != "trainer.args.distributed_state" and not name.startswith("torch")]
    assert {name.partition(".")[0] for name in of_modules} == {"model"}
    # When the run began, after one evaluation (the other is followed by no step), and once for the line about a recompilation.
    assert len(of_modules) <= 3 * len([*trainer.model.modules()])


def test_what_upstream_reads_within_a_step_is_found_in_its_code():
    names = names_of_a_step(TPUSFTTrainer)
    assert {"compute_loss", "label_smoother", "router_aux_loss_coef", "compute_loss_func", "args"} <= names
    assert not {"evaluate", "log", "train", "save_model", "get_train_dataloader"} & names


# ---- Runs ----


class Scaled(nn.Module):
    """Computes with attributes that a callback changes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.scale = None
        self.reads = False

    def forward(self, x, labels):
        x = self.linear(x)
        if self.scale is not None:
            x = x * self.scale
        if self.reads and x.mean().item() > 100:
            x = x * 2
        return {"loss": nn.functional.cross_entropy(x, labels), "logits": x}


class ScaleAtStep6(TrainerCallback):
    def on_step_begin(self, args, state, control, model, **kwargs):
        if state.global_step == 5:
            model.scale = 3.0


def train_scaled(tmp_path, cls=TPUTrainer, model=None, **config):
    rows = [{"x": torch.randn(4, generator=torch.Generator().manual_seed(i)), "labels": i % 4} for i in range(40)]
    arguments = TPUTrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        max_steps=9,
        logging_steps=1,
        learning_rate=0.1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        run_report=False,
        **config,
    )
    trainer = cls(model or Scaled(), arguments, train_dataset=rows, callbacks=[ScaleAtStep6()])
    before = trainer.backend.counters()
    trainer.train()
    return trainer, trainer.backend.counters() - before


def test_a_module_of_the_users_is_traced_and_named_once(xla, tmp_path, caplog, same_logs):
    ours, spent = train_scaled(tmp_path)
    assert spent.replays == 0
    said = [record.message for record in caplog.records if "Step replay is off" in record.message]
    assert len(said) == 1 and "the model is a Scaled, a custom module; step_replay=True if" in said[0]
    same_logs(ours, train_scaled(tmp_path, use_cpu=True)[0])


@pytest.mark.ci
def test_an_attention_of_the_users_is_used_and_traced(runs, tiny_model, caplog, same_logs):
    """It computes something else from its fourth call on: a trace cannot know."""
    calls = []

    def attend(module, query, key, value, mask, **kwargs):
        calls.append(module)
        output, weights = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        return output * (1.5 if len(calls) > 3 else 1), weights

    AttentionInterface.register("of_a_test", attend)
    trainers = []
    for run in (runs.ours, runs.stock):
        calls.clear()
        model = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="of_a_test")
        trainers.append(run(model=model, max_steps=5, logging_steps=1, gradient_checkpointing=False))
        assert len(calls) == 5 * model.config.num_hidden_layers
    same_logs(*trainers)
    assert "attend (test_user_code.py, line" in caplog.text.replace("<locals>.", "")


def test_a_step_that_reads_the_device_is_not_replayed_whatever_was_said(xla, tmp_path, caplog):
    model = Scaled()
    model.reads = True
    _, spent = train_scaled(tmp_path, model=model, step_replay=True)
    assert spent.replays == 0
    assert "a device-to-host sync in the step" in caplog.text


class BagOfWords(nn.Module):
    def __init__(self, words):
        super().__init__()
        self.words, self.out = words, nn.Linear(8, 4)

    def forward(self, x, labels):
        words = self.words((x * 10).long() % 20)
        logits = self.out(words if words.ndim == 2 else words.mean(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize(
    "words, says", [(nn.Embedding, None), (nn.EmbeddingBag, "CPU fallback of an operator in the step")]
)
def test_a_first_step_unlike_the_others_and_an_operator_that_xla_lacks(xla, tmp_path, caplog, words, says):
    _, spent = train_scaled(tmp_path, model=BagOfWords(words(20, 8)), step_replay=True)
    assert (spent.replays > 0) == (says is None)
    assert ("Step replay is off" in caplog.text) == (says is not None)
    assert says is None or says in caplog.text


@pytest.mark.slow
def test_a_loss_set_in_the_middle_of_a_run_is_used(runs, same_logs, caplog):
    """And the optimizer's state, cleared in the middle of a run, is made anew."""

    class Change(TrainerCallback):
        trainer = None

        def on_step_begin(self, args, state, control, optimizer, **kwargs):
            if state.global_step == 4:
                optimizer.state.clear()
            if state.global_step == 6:
                self.trainer.label_smoother.epsilon = 0.4

    trainers = []
    for replay in (None, False):
        change = Change()
        trainer = runs.ours(
            train=False,
            config_cls=TPUSFTConfig,
            step_replay=replay,
            max_steps=7,
            label_smoothing_factor=0.1,
            kwargs={"callbacks": [change]},
        )
        change.trainer = trainer
        before = trainer.backend.counters()
        trainer.train()
        trainers.append((trainer, (trainer.backend.counters() - before).replays))
    (ours, replays), (traced, _) = trainers
    assert replays > 0
    same_logs(ours, traced, rel=0)


@pytest.mark.ci
def test_a_branch_in_a_hook_is_named_by_its_operator_and_module(runs):
    trainer = runs.ours(train=False, config_cls=TPUSFTConfig, max_steps=7, dataloader_drop_last=True)

    def scale(module, args, output):
        return output * 1.01 if trainer.state.global_step % 3 == 2 else output

    trainer.model.model.layers[0].mlp.register_forward_hook(scale)
    trainer.train()
    (event,) = (event for event in trainer.watch.events if event.cause is not None)
    assert event.step == 3 and event.cause.startswith("the step computes `aten::mul` of f32[")
    place = f"(test_user_code.py, line {scale.__code__.co_firstlineno})"
    assert event.cause.endswith(f", in code of yours: a user hook on model.layers.0.mlp {place}")


def test_a_hook_that_reads_in_a_checkpointed_layer_is_no_recompilation(runs):
    """It runs twice in a step, the second time in the thread of the backward pass."""
    trainer = runs.ours(train=False, config_cls=TPUSFTConfig, gradient_checkpointing=True, max_steps=2)
    largest = []

    def read(module, args, output):
        largest.append(output.detach().abs().max().item())

    trainer.model.model.layers[0].mlp.register_forward_hook(read)
    trainer.train()
    assert len(largest) == 4 and trainer.watch.recompiles == 0


@pytest.mark.ci
def test_lines_of_a_loss_of_ones_own_are_named(runs):
    """Upstream's loss runs with its reads deferred, which has a line of Python in each call of an operator."""
    calls = count()

    def own_loss(outputs, labels, num_items_in_batch=None):
        length = 8 if next(calls) < 2 else 7
        logits = outputs.logits[:, :length]
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels[:, :length].flatten())

    settings = dict(max_steps=4, logging_steps=4, gradient_checkpointing=False)
    trainer = runs.ours(config_cls=TPUSFTConfig, kwargs={"compute_loss_func": own_loss}, **settings)
    causes = [event.cause for event in trainer.watch.events_of_run if event.cause is not None]
    lines, first = inspect.getsourcelines(own_loss)
    named = [f"[test_user_code.py:{first + index}]" for index in (2, 3)]
    assert causes and all(any(line in cause for line in named) for cause in causes), causes


class Weighs(TPUSFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        return (self.weigh(loss), outputs) if return_outputs else self.weigh(loss)

    def weigh(self, loss):
        return loss * self.own.weight


class SetsWeight(TrainerCallback):
    def __init__(self, trainer, kind):
        self.trainer, self.kind = trainer, kind

    def on_step_end(self, args, state, control, **kwargs):
        own = self.trainer.own
        if state.global_step == 4 and self.kind == "in place":
            own.weight.fill_(0.5)
        elif state.global_step == 4:
            own.weight = self.trainer.backend.send(torch.tensor(0.5)) if self.kind == "tensor" else 0.5


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("number", marks=pytest.mark.ci),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("tensor", "in place")),
    ],
)
def test_attributes_that_a_loss_of_ones_own_reads_are_compared(runs, kind):
    """With `step_replay=True`, too, of which the code does the same at every step but for them."""
    logs = []
    for step_replay in (True, False):
        settings = {"step_replay": step_replay, "max_steps": 6, "eval_strategy": "steps", "eval_steps": 3}
        settings["gradient_checkpointing"] = False
        few = {"eval_dataset": runs.eval_dataset.select(range(4))}
        trainer = runs.ours(cls=Weighs, config_cls=TPUSFTConfig, train=False, kwargs=few, **settings)
        one = 1.0 if kind == "number" else trainer.backend.send(torch.tensor(1.0))
        trainer.own = SimpleNamespace(weight=one)
        trainer.add_callback(SetsWeight(trainer, kind))
        trainer.train()
        logs.append(
            [
                {key: entry.get(key) for key in ("loss", "grad_norm", "eval_loss")}
                for entry in trainer.state.log_history
            ]
        )
    assert logs[0] == logs[1]


def test_a_setting_that_goes_back_and_forth_is_named_each_time(runs):
    """Also where steps are traced for good: without code of the user's in a step, an operator of a library says less."""

    class Alternates(TrainerCallback):
        def on_step_begin(self, args, state, control, model, **kwargs):
            for layer in model.model.layers:
                layer.self_attn.attention_dropout = 0.1 * (state.global_step % 2)

    trainer = runs.ours(train=False, config_cls=TPUSFTConfig, max_steps=8)
    trainer.add_callback(Alternates())
    trainer.train()
    causes = [event.cause for event in trainer.watch.events if event.kind == "training step" and event.cause]
    assert len(causes) == 3 and "replay is off from here on" in causes[1]
    assert all("`model.model.layers.0.self_attn.attention_dropout` was" in cause for cause in causes)
