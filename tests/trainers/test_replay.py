"""A run whose steps are replayed is, bit for bit, the run whose steps are traced."""

import json
import random

import pytest
import torch
from peft.tuners.lora import LoraLayer
from transformers import TrainerCallback
from transformers.trainer_utils import unwrap_peft_model

from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer
from hf_tpu_ext.step.optimizer import LazyAdamW


#: With the programs of other tests, which are compiled once.
AS_OTHERS = dict(config_cls=TPUSFTConfig, gradient_checkpointing=False)


class CountTraces(TrainerCallback):
    """Counts how often the model of a trainer is run in Python while it trains: in steps that are not replayed."""

    def __init__(self, backend):
        self.backend = backend
        self.traces = 0
        self._replays = backend.counters().replays

    def on_step_begin(self, args, state, control, **kwargs):
        # Batches of an evaluation are replayed, too.
        self._replays = self.backend.counters().replays

    def on_substep_end(self, args, state, control, **kwargs):
        replays = self.backend.counters().replays
        self.traces += 1 - (replays - self._replays)
        self._replays = replays

    def on_step_end(self, args, state, control, **kwargs):
        self.on_substep_end(args, state, control)


def weights_of(trainer):
    return {name: value.cpu().clone() for name, value in trainer.model.state_dict().items()}


def same_bits(mine, theirs):
    assert list(mine) == list(theirs)
    for name, value in theirs.items():
        assert torch.equal(mine[name], value), name


@pytest.fixture
def both(runs, same_logs):
    """Trains with and without replay; equal logs, weights and moments, and how many steps were traced."""

    def train(callbacks=list, expect_replays=True, **config):
        trainers = []
        kwargs = config.pop("kwargs", {})
        cls = config.pop("cls", None)
        config.setdefault("gradient_checkpointing", False)
        for replay in (False, config.pop("step_replay", None)):
            torch.manual_seed(0)
            trainer = runs.ours(
                train=False,
                config_cls=TPUSFTConfig,
                step_replay=replay,
                cls=cls,
                kwargs={**kwargs, "callbacks": callbacks()},
                **config,
            )
            trainer.counted = CountTraces(trainer.backend)
            trainer.add_callback(trainer.counted)
            before = trainer.backend.counters()
            trainer.train()
            trainer.spent = trainer.backend.counters() - before
            trainers.append(trainer)
        traced, replayed = trainers
        assert traced.spent.replays == 0
        assert (replayed.spent.replays > 0) == expect_replays
        same_logs(replayed, traced, rel=0)
        same_bits(weights_of(replayed), weights_of(traced))
        if isinstance(traced.optimizer.optimizer, LazyAdamW):
            states = [trainer.optimizer.optimizer.state_dict()["state"] for trainer in (replayed, traced)]
            for index, state in states[1].items():
                same_bits(states[0][index], state)
        return replayed

    return train


@pytest.mark.ci
@pytest.mark.parametrize("lora", [pytest.param(None, id="full", marks=pytest.mark.slow), pytest.param({}, id="lora")])
def test_steps_over_buckets_are_the_same_bits(both, lora, rows):
    """Another batch and learning rate at each step, lengths in turn."""
    trainer = both(
        lora=lora, max_steps=24, logging_steps=7, length_buckets=[16, 32, 48], kwargs={"train_dataset": rows(40)}
    )
    shapes = {shape for _, shape in trainer.watch.programs}
    assert len(shapes) > 1
    # Each shape is traced twice, and never again.
    assert trainer.counted.traces == 2 * len(shapes)
    assert trainer.spent.replays == 24 - 2 * len(shapes)
    assert trainer.spent.executions <= 24 + 2
    assert trainer.watch.recompiles == 0


@pytest.mark.ci
@pytest.mark.parametrize(
    "lora", [pytest.param(None, id="full", marks=pytest.mark.slow), pytest.param({"lora_dropout": 0.3}, id="lora")]
)
def test_accumulation_evaluation_and_dropout(both, lora):
    trainer = both(
        lora=lora,
        gradient_accumulation_steps=2,
        max_steps=8,
        logging_steps=3,
        eval_strategy="steps",
        eval_steps=3,
        gradient_checkpointing=True,
    )
    assert trainer.counted.traces == 4
    # And of three evaluations of three batches.
    shapes = {shape for kind, shape in trainer.watch.programs if kind == "evaluation step"}
    assert trainer.spent.replays == 16 - 4 + 9 - 2 * len(shapes)


@pytest.mark.ci
def test_dropout_in_the_model_draws_as_when_traced(both, runs):
    from transformers import AutoModelForCausalLM

    def cls(model, *args, **kwargs):
        model = AutoModelForCausalLM.from_pretrained(runs.model_dir, attention_dropout=0.2, dtype=torch.float32)
        return TPUSFTTrainer(model, *args, **kwargs)

    trainer = both(cls=cls, max_steps=5)
    assert trainer.spent.replays == 3


@pytest.mark.slow
def test_no_clipping_logs_the_norm_all_the_same(both):
    both(max_grad_norm=0.0, max_steps=6, logging_steps=2)


@pytest.mark.ci
def test_resuming_replays_too(runs, same_logs):
    """Stopped after step 4 and resumed, with and without replay."""
    config = dict(AS_OTHERS, max_steps=8, save_strategy="steps", save_steps=4)
    straight = runs.ours(step_replay=False, **config)
    resumed = runs.ours(train=False, **config)
    before = resumed.backend.counters()
    resumed.train(resume_from_checkpoint=str(runs.output_dir / "checkpoint-4"))
    assert (resumed.backend.counters() - before).replays == 2
    same_bits(weights_of(resumed), weights_of(straight))


def test_a_save_leaves_steps_replayed(runs):
    """Upstream writes its dtype into the config of the model, as a string."""
    trainer = runs.ours(**AS_OTHERS, max_steps=8, save_strategy="steps", save_steps=3, train=False)
    trainer.model.config.architectures = None
    before = trainer.backend.counters()
    trainer.train()
    assert (trainer.backend.counters() - before).replays == 8 - 2
    saved = json.loads((runs.output_dir / "checkpoint-6/config.json").read_text())
    assert saved["dtype"] == "float32" and len(saved["architectures"]) == 1


# ---- What changes a program ----


class AtStep(TrainerCallback):
    """Does something to the trainer before a step."""

    def __init__(self, step, action):
        self.step = step
        self.action = action

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.action(args=args, **kwargs)


def freeze(model, **kwargs):
    model.get_submodule("model.layers.0.mlp.up_proj").weight.requires_grad_(False)


def other_betas(optimizer, **kwargs):
    for group in optimizer.param_groups:
        group["betas"] = (0.8, 0.99)


def clip_harder(args, **kwargs):
    args.max_grad_norm = 1e-3


def halve_weights(model, **kwargs):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def replace_parameter(model, **kwargs):
    norm = model.get_submodule("model.norm")
    norm.weight = torch.nn.Parameter(norm.weight.detach().clone() * 2, requires_grad=False)


def scale_lora(model, **kwargs):
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.scaling["default"] = 0.25


def start_dropout(model, **kwargs):
    for module in model.modules():
        if "attention_dropout" in vars(module):
            module.attention_dropout = 0.3


@pytest.mark.parametrize(
    "action, lora, says",
    [
        # The counter of a frozen weight stands still from its first step on.
        (freeze, None, ["was trained, is frozen", "optimizer"]),
        pytest.param(other_betas, None, ["optimizer"], marks=pytest.mark.slow),
        pytest.param(clip_harder, None, ["args.max_grad_norm` was 1.0, is 0.001"], marks=pytest.mark.slow),
        pytest.param(replace_parameter, None, ["replaced", "optimizer"], marks=pytest.mark.slow),
        pytest.param(scale_lora, {}, ["scaling"], marks=pytest.mark.ci),
        pytest.param(
            start_dropout, None, ["layers.0.self_attn.attention_dropout` was 0.0, is 0.3"], marks=pytest.mark.slow
        ),
    ],
    ids=["freeze", "betas", "clipping", "replaced", "lora", "dropout"],
)
def test_a_change_of_the_program_is_followed(both, caplog, action, lora, says):
    with caplog.at_level("INFO", logger="hf_tpu_ext.backends.compiled_function"):
        both(callbacks=lambda: [AtStep(3, action)], lora=lora, max_steps=7)
    said = [record.message for record in caplog.records if "The step is traced again" in record.message]
    assert len(said) == len(says)
    assert all(words in line for words, line in zip(says, said, strict=True))


@pytest.mark.slow
def test_weights_changed_in_a_callback_are_taken_up(runs, same_logs):
    """Traced, halving is part of the step's program and rounds otherwise."""
    traced, replayed = (
        runs.ours(config_cls=TPUSFTConfig, step_replay=replay, kwargs={"callbacks": [AtStep(5, halve_weights)]})
        for replay in (False, None)
    )
    same_logs(replayed, traced)


@pytest.mark.slow
def test_an_optimizer_swapped_in_a_callback_is_used(both, runs):
    class Swap(TrainerCallback):
        trainer = None

        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 5:
                old = self.trainer.optimizer
                old.optimizer.param_groups[0]["weight_decay"] = 0.0
                new = LazyAdamW(old.optimizer.param_groups, self.trainer.backend, lr=1e-3)
                self.trainer.optimizer = self.trainer.accelerator.prepare_optimizer(new, device_placement=False)

    class Swapping(TPUSFTTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            swap = Swap()
            swap.trainer = self
            self.add_callback(swap)

    both(cls=Swapping, max_steps=10)


@pytest.mark.ci
def test_too_many_changes_end_in_tracing(both, caplog):
    class Toggle(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            args.max_grad_norm = 1.0 + state.global_step

    both(callbacks=lambda: [Toggle()], max_steps=12, expect_replays=False)
    assert sum("Step replay is off" in record.message for record in caplog.records) == 1


@pytest.mark.ci
def test_rare_changes_leave_steps_replayed(both, caplog):
    class Alternate(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            args.max_grad_norm = 1.0 + state.global_step // 3 % 2

    trainer = both(callbacks=lambda: [Alternate()], max_steps=30)
    assert trainer.spent.replays == 10 and "Step replay is off" not in caplog.text


# ---- What is not replayed ----


class OwnLoss(TPUSFTTrainer):
    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return loss * 0.5


class ScaleGradients(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class KeepLoss(TPUSFTTrainer):
    """Keeps a device tensor of each step."""

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.kept = loss.detach() * 2
        return loss


class SendsNumber(TPUSFTTrainer):
    def compute_loss(self, *args, **kwargs):
        factor = self.backend.send(torch.tensor(1.0 + self.state.global_step))
        return super().compute_loss(*args, **kwargs) * factor


class ChangesNumber(TPUSFTTrainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) * (1.5 + self.state.global_step)


@pytest.mark.ci
@pytest.mark.parametrize(
    "config, says",
    [
        ({"cls": OwnLoss}, "OwnLoss overrides compute_loss"),
        pytest.param({"callbacks": lambda: [ScaleGradients()]}, "on_pre_optimizer_step", marks=pytest.mark.slow),
        pytest.param({"optim": "sgd"}, "SGD takes its learning rate", marks=pytest.mark.slow),
        pytest.param({"cls": KeepLoss, "step_replay": True}, "not part of the training state", marks=pytest.mark.slow),
        pytest.param(
            {"cls": SendsNumber, "step_replay": True},
            "a host-to-device transfer within a step (what changes from step to step belongs into a buffer",
            marks=pytest.mark.slow,
        ),
        ({"cls": ChangesNumber, "step_replay": True}, "has changed"),
    ],
    ids=["subclass", "callback", "sgd", "keeps a tensor", "sends a number", "changes a number"],
)
def test_code_that_replay_would_leave_out_is_traced_and_said_once(both, caplog, config, says):
    # The third step would be replayed, and so would the fourth.
    both(max_steps=4, expect_replays=False, **config)
    said = [record.message for record in caplog.records if "Step replay is off" in record.message]
    assert len(said) == 1 and says in said[0]


@pytest.mark.ci
def test_steps_that_are_traced_for_good_are_no_recompilation(runs):
    trainer = runs.ours(config_cls=TPUSFTConfig, cls=ChangesNumber, step_replay=True, max_recompiles=0, max_steps=5)
    assert trainer.steps.why_traced.startswith("a constant of the graph has changed")
    assert len([event for event in trainer.watch.events if event.kind == "training step"]) == 2


@pytest.mark.ci
def test_a_pure_subclass_is_replayed_when_asked(both, caplog):
    both(cls=OwnLoss, step_replay=True, max_steps=6)
    assert "Code of yours within a step" not in caplog.text


class FallsLate(TPUSFTTrainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) * self._factor()

    def _factor(self):
        return 1.0 if self.state.global_step < 5 else 0.5


@pytest.mark.ci
def test_a_counter_that_a_replayed_step_reads_is_said(runs, caplog):
    trainer = runs.ours(config_cls=TPUSFTConfig, cls=FallsLate, step_replay=True, max_steps=3)
    (line,) = [record.message for record in caplog.records if "within a step has the name" in record.message]
    assert trainer.steps.why_traced is None and "`global_step`" in line


class LossByBuffer(TPUSFTTrainer):
    def __init__(self, model, *args, **kwargs):
        model.register_buffer("factor", torch.zeros(()), persistent=False)
        super().__init__(model, *args, **kwargs)

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) * self.model.factor


class FillBuffer(TrainerCallback):
    """Fills it from the host. torch_xla makes of a 1 no transfer, but a constant of the next program."""

    def on_step_begin(self, args, state, control, model, **kwargs):
        model.factor.copy_(torch.tensor(0.5 if state.global_step < 3 else 1.0))


def test_a_buffer_filled_in_a_callback_is_read_by_replayed_steps(both, caplog):
    trainer = both(cls=LossByBuffer, step_replay=True, callbacks=lambda: [FillBuffer()], max_steps=6)
    # Those filled with 1 among them.
    assert trainer.spent.replays >= 3 and "Step replay is off" not in caplog.text


class LossByLateBuffer(TPUSFTTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.model.register_buffer("factor", torch.ones(()), persistent=False)

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) * self.model.factor


def test_a_buffer_that_is_left_on_the_host_is_told_with_the_fix(runs):
    trainer = runs.ours(config_cls=TPUSFTConfig, cls=LossByLateBuffer, step_replay=True, max_steps=2)
    assert (
        "on the host" in trainer.steps.why_traced
        and "register it with device=model.device" in trainer.steps.why_traced
    )


@pytest.mark.ci
def test_a_hook_is_not_left_out(both, caplog):
    class Hook(TrainerCallback):
        def on_train_begin(self, args, state, control, model, **kwargs):
            model.get_submodule("model.norm").register_forward_hook(lambda module, args, output: output * 1.5)

    both(callbacks=lambda: [Hook()], max_steps=6, expect_replays=False)
    assert "a user hook on model.norm" in caplog.text


# ---- Many configurations ----


def draw_configuration(seed):
    """A configuration out of the many that users combine."""
    rng = random.Random(seed)
    rows_at_once = rng.choice([1, 2, 4])
    return dict(
        lora=rng.choice([None, {}, {"lora_dropout": 0.2}, {"use_dora": True}]),
        per_device_train_batch_size=rows_at_once,
        gradient_accumulation_steps=rng.choice([1, 1, 2, 3]),
        length_buckets=rng.choice([None, [24, 48], [16, 32, 48]]),
        lr_scheduler_type=rng.choice(["linear", "cosine", "constant", "constant_with_warmup"]),
        warmup_steps=rng.choice([0, 3]),
        max_grad_norm=rng.choice([0.0, 0.1, 1.0]),
        weight_decay=rng.choice([0.0, 0.1]),
        max_steps=rng.randint(8, 14),
        logging_steps=rng.choice([1, 3, 100]),
        gradient_checkpointing=rng.choice([True, False]),
        loss_type=rng.choice(["nll", "nll", "dft"]),
        completion_only_loss=rng.choice([None, False]),
        seed=rng.randint(0, 99),
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_drawn_configurations_are_the_same_bits(both, seed):
    both(**draw_configuration(seed))


def test_the_model_is_left_as_it_was(runs):
    trainer = runs.ours(**AS_OTHERS, max_steps=4)
    model = unwrap_peft_model(trainer.model)
    assert trainer.steps.compiled is None and all(parameter.grad is None for parameter in model.parameters())
    assert not trainer.optimizer.optimizer.is_done
