"""
A grammar of what people write around a trainer: models, losses, data, and code of their own in every place that takes some.

A case is drawn from a seed. It is put together anew for each run, so that nothing is shared between runs but the seed.
"""

import copy
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback


ROWS, LENGTH, WORDS = 13, 10, 30
# Of the tokenizer, whose last token is the one that rows are padded with.
TOKENS = 259
FAMILIES = ("module", "causal", "sft")
#: Where callbacks change something. At the first four, layers are compiled as a loop all the same.
EVENTS = ("on_log", "on_epoch_end", "on_epoch_begin", "on_evaluate", "on_step_begin", "on_step_end")
EVERY_EVENT = (
    *EVENTS,
    "on_train_begin",
    "on_substep_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_train_end",
)
#: What users' code may do, by name, and the families of models that it is for.
EDITS: dict[str, tuple[Callable, tuple[str, ...]]] = {}
# With these, rows have one length: they count tokens that are masked.
COUNT_TOKENS: set[str] = set()


@dataclass(frozen=True)
class Case:
    """One training, with code of the user's."""

    seed: int
    family: str
    edits: tuple[str, ...]
    target: str
    loss: str
    tokens: bool
    batch_size: int
    accumulation: int
    weight_decay: float
    steps: int
    evaluates: bool
    ragged: bool
    #: What the edits drew, for the message of a failure.
    drawn: list[str] = field(default_factory=list, compare=False)

    def __str__(self) -> str:
        kind = f"{self.loss} on {self.target!r}, {'tokens' if self.tokens else 'features'}"
        return (
            f"seed {self.seed}: {self.family}{f' ({kind})' if self.family == 'module' else ''}, batches of "
            f"{self.batch_size} x {self.accumulation}, {self.steps} steps, weight_decay={self.weight_decay}"
            f"{', evaluates' if self.evaluates else ''}{', ragged' if self.ragged else ''}: {'; '.join(self.drawn)}"
        )


def draw_case(seed: int) -> Case:
    """The case of a seed; every third is supervised fine-tuning, of layers that are a loop by default."""
    rng = random.Random(seed)
    family = "sft" if seed % 3 == 2 else rng.choice(("module", "module", "causal"))
    names = [name for name, (_, families) in EDITS.items() if family in families]
    edits = tuple(rng.sample(names, rng.choice((1, 1, 2, 3))))
    evaluates = "prediction_step" in edits or rng.random() < 0.3
    return Case(
        seed=seed,
        family=family,
        edits=edits,
        target=rng.choice(("labels", "y", "target")),
        loss=rng.choice(list(LOSSES)),
        tokens=rng.random() < 0.5,
        batch_size=rng.choice((3, 4, 5)),
        accumulation=rng.choice((1, 1, 2)),
        weight_decay=0.1 if "decay_names" in edits else rng.choice((0.0, 0.1)),
        # Steps of a shape are replayed from the third on.
        steps=rng.choice((8, 9)),
        evaluates=evaluates,
        ragged=family == "sft" and not COUNT_TOKENS & {*edits} and rng.random() < 0.3,
    )


# ---- Models and data ----


GAIN = 1.0
LOSSES = {
    "cross-entropy": lambda x, y: nn.functional.cross_entropy(x, y),
    "mean of rows": lambda x, y: nn.functional.cross_entropy(x, y, reduction="none").mean(),
    "squared error": lambda x, y: nn.functional.mse_loss(x, nn.functional.one_hot(y, x.shape[1]).float()),
    "binary": lambda x, y: nn.functional.binary_cross_entropy_with_logits(
        x, nn.functional.one_hot(y, x.shape[1]).float()
    ),
    "contrastive": lambda x, y: nn.functional.cross_entropy(
        x @ x.roll(1, dims=1).T, torch.arange(len(x), device=x.device)
    ),
    "with penalty": lambda x, y: nn.functional.cross_entropy(x, y) + 0.1 * x.square().mean(),
}


class Settings:
    """Something that a module keeps."""

    def __init__(self):
        self.scale = None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = None

    def forward(self, x):
        x = torch.tanh(self.linear(x)) + x
        return x if self.scale is None else x * self.scale


class Net(nn.Module):
    """A classifier that computes with attributes of every kind."""

    gain = 1.0

    def __init__(self, loss, tokens):
        super().__init__()
        self.first = nn.Embedding(WORDS, 8) if tokens else nn.Linear(LENGTH, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(8, 4)
        self.loss = LOSSES[loss]
        self.settings = Settings()
        self.nested = {"a": [{"b": 1.0}]}
        self.factor = torch.ones(()).numpy()[()]
        self.shift = self.drops = self.branch = None

    def forward(self, x, labels=None, y=None, target=None):
        x = self.first(x)
        if isinstance(self.first, nn.Embedding):
            x = x.mean(1)
        for block in self.blocks:
            if self.drops is None or random.random() > self.drops:
                x = block(x)
        if self.branch is not None and self.branch(x):
            x = x * 1.5
        x = self.head(x) * (self.gain * GAIN * float(self.factor) * self.nested["a"][0]["b"])
        if self.shift is not None:
            x = x + self.shift
        if self.settings.scale is not None:
            x = x * self.settings.scale
        targets = next((value for value in (labels, y, target) if value is not None), None)
        return {"logits": x} if targets is None else {"loss": self.loss(x, targets), "logits": x}


@cache
def _causal() -> nn.Module:
    sizes = dict(hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=TOKENS, num_hidden_layers=2, max_position_embeddings=32, pad_token_id=0, **sizes
    )
    # The usual 0.02 suits widths of a thousand and more.
    config.initializer_range = 0.1
    config.bos_token_id = config.eos_token_id = None
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def make_model(case: Case) -> nn.Module:
    if case.family == "module":
        torch.manual_seed(case.seed)
        return Net(case.loss, case.tokens)
    return copy.deepcopy(_causal())


def make_rows(case: Case, count: int, seed: int) -> list[dict[str, Any]]:
    rng = torch.Generator().manual_seed(1000 * case.seed + seed)

    def ids(length):
        return torch.randint(3, WORDS, (length,), generator=rng)

    if case.family == "module":
        return [
            {
                "x": ids(LENGTH) if case.tokens else torch.randn(LENGTH, generator=rng),
                case.target: torch.randint(4, (), generator=rng),
            }
            for _ in range(count)
        ]
    rows = [ids(LENGTH - index % 3 if case.ragged else LENGTH) for index in range(count)]
    if case.family == "sft":
        return [{"input_ids": row.tolist()} for row in rows]
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


# ---- A run ----


class Run:
    """
    What one training of a case is put together from: edits add to it, and change the trainer once it is made.

    Args:
        case ([`Case`]):
            The case.
    """

    def __init__(self, case: Case):
        self.case = case
        self.model = make_model(case)
        self.mixins: list[type] = []
        self.callbacks: list[TrainerCallback] = []
        self.config: dict[str, Any] = {}
        self.trainer = None
        #: Numbers that user code sees, which are compared as logged numbers are.
        self.seen: list[float] = []
        #: What is undone after the run, for the next one to find things as they were.
        self.undo = ExitStack()
        self._made: list[Callable] = []
        case.drawn.clear()
        for name in case.edits:
            self._rng = random.Random(f"{case.seed} {name}")
            case.drawn.append(name)
            EDITS[name][0](self)

    def draw(self, *options):
        drawn = self._rng.choice(options)
        self.case.drawn[-1] += f" {drawn}"
        return drawn

    def once_made(self, action: Callable[[Any], None]) -> None:
        """Do something with the trainer before it trains."""
        self._made.append(action)

    def at(self, event: str, action: Callable[[Any], None], step: int = 0, once: bool = True) -> None:
        """Do something with the trainer in a callback, from a step on."""
        done = []

        def run_action(callback, args, state, control, **kwargs):
            if state.global_step >= step and not (once and done):
                done.append(True)
                action(self.trainer)

        self.callbacks.append(type("OwnCallback", (TrainerCallback,), {event: run_action})())

    def later(self, action: Callable[[Any], None]) -> None:
        """Do something with the trainer at a drawn event in the middle of the run."""
        event = self.draw(*(event for event in EVENTS if event != "on_evaluate" or self.case.evaluates))
        self.at(event, action, step=self.draw(4, 5, 6))

    def train(self, cls: type, args: Any, **kwargs) -> None:
        """Train with a trainer class and its arguments."""
        cls = type("OwnTrainer", (*self.mixins, cls), {}) if self.mixins else cls
        with self.undo:
            self.trainer = cls(
                self.model,
                args,
                train_dataset=self.as_dataset(make_rows(self.case, ROWS, 0)),
                eval_dataset=self.as_dataset(make_rows(self.case, 7, 1)),
                callbacks=self.callbacks,
                **kwargs,
            )
            for action in self._made:
                action(self.trainer)
            self.trainer.train()

    def as_dataset(self, rows: list[dict[str, Any]]):
        if self.case.family != "sft":
            return rows
        from datasets import Dataset

        return Dataset.from_list(rows)

    def arguments(self) -> dict[str, Any]:
        """Arguments of the run that are the same for all trainers."""
        case = self.case
        given = dict(
            per_device_train_batch_size=case.batch_size,
            per_device_eval_batch_size=case.batch_size,
            gradient_accumulation_steps=case.accumulation,
            weight_decay=case.weight_decay,
            max_steps=case.steps,
            logging_steps=1,
            learning_rate=1e-2,
            # With the usual one, gradients of 0 but for rounding move weights as much as others do.
            adam_epsilon=1e-3,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            gradient_checkpointing=case.family == "sft",
            **(dict(eval_strategy="steps", eval_steps=3) if case.evaluates else {}),
            **(dict(label_names=[case.target]) if case.family == "module" else {}),
            **(dict(max_length=LENGTH) if case.family == "sft" else {}),
        )
        return {**given, **self.config}


def edit(*families: str, counts_tokens: bool = False) -> Callable:
    """Add a function to [`EDITS`]."""

    def add(function):
        EDITS[function.__name__] = (function, families or FAMILIES)
        if counts_tokens:
            COUNT_TOKENS.add(function.__name__)
        return function

    return add


def layers_of(model: nn.Module) -> nn.ModuleList:
    return model.blocks if isinstance(model, Net) else model.model.layers


def head_of(model: nn.Module) -> nn.Module:
    return model.head if isinstance(model, Net) else model.lm_head


def is_in_layer(name: str, index: int) -> bool:
    return f"blocks.{index}." in name or f"layers.{index}." in name


# ---- Attributes and modules ----


@edit("module")
def attribute(run):
    module, here = run.model, sys.modules[__name__]
    undo = run.undo
    changes = {
        "number": lambda: setattr(module.blocks[1], "scale", 2.0),
        "of an object": lambda: setattr(module.settings, "scale", 0.5),
        "nested": lambda: module.nested["a"][0].update(b=0.5),
        "of numpy": lambda: setattr(module, "factor", module.factor * 2),
        "of the class": lambda: undo.enter_context(mock.patch.object(Net, "gain", 2.0)),
        "global": lambda: undo.enter_context(mock.patch.object(here, "GAIN", 0.5)),
        "tensor replaced": lambda: place_shift(torch.arange(4) * 0.3),
        "tensor filled": lambda: module.shift[1:].fill_(0.7),
        "loss swapped": lambda: setattr(module, "loss", lambda x, y: 0.5 * x.square().mean()),
        "submodule replaced": lambda: module.blocks.__setitem__(1, nn.Identity()),
        "list shortened": lambda: setattr(module, "blocks", module.blocks[:2]),
    }

    def place_shift(shift):
        # A tensor that a step sends to the device keeps it from being replayed.
        module.shift = shift.to(module.head.weight.device)

    what = run.draw(*changes)
    if what.startswith("tensor"):
        run.once_made(lambda trainer: place_shift(torch.zeros(4)))
    change = changes[what]
    run.later(lambda trainer: change())


@edit("causal", "sft", counts_tokens=True)
def attribute_of_a_layer(run):
    def change(model, what):
        match what:
            case "scaling":
                layers_of(model)[1].self_attn.scaling *= 3
            case "epsilon":
                layers_of(model)[-1].input_layernorm.variance_epsilon = 0.3
            case "depth":
                model.config.num_hidden_layers = 1
            case "list":
                model.model.layers = layers_of(model)[:-1]
            case "rotary":
                model.model.rotary_emb.attention_scaling = 1.5
            case "norm":
                model.model.norm = nn.Identity()

    what = run.draw("scaling", "epsilon", "depth", "list", "rotary", "norm")
    run.later(lambda trainer: change(run.model, what))


@edit()
def forward_patched(run):
    def patch(trainer):
        module = layers_of(run.model)[1] if place == "layer" else head_of(run.model)
        forward = module.forward
        module.forward = lambda *args, **kwargs: forward(*args, **kwargs) * 1.3

    place = run.draw("layer", "head")
    run.later(patch)


@edit("module")
def stochastic_depth(run):
    run.model.drops = run.draw(0.1, 0.3)
    run.at("on_train_begin", lambda trainer: random.seed(run.case.seed))


@edit("module")
def branch_on_numbers(run):
    limit = run.draw(-0.1, 0.0, 0.1)
    if run.draw("item", "tensor") == "item":
        run.model.branch = lambda x: x.mean().item() > limit
    else:
        run.model.branch = lambda x: x.mean() > limit


# ---- Losses ----


@edit(counts_tokens=True)
def compute_loss_on_the_instance(run):
    def set_loss(trainer):
        upstream = trainer.compute_loss

        def compute_loss(model, inputs, return_outputs=False, num_items_in_batch=None):
            result = upstream(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
            loss = 2 * result[0] + head_of(model).weight.square().sum()
            return (loss, result[1]) if return_outputs else loss

        trainer.compute_loss = compute_loss

    run.once_made(set_loss) if run.draw(True, False) else run.later(set_loss)


@edit()
def compute_loss_func(run):
    def own_loss(outputs, labels, num_items_in_batch=None):
        logits = outputs["logits"]
        if labels is None or logits.ndim == 2:
            return logits.square().mean()
        logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        mean = nn.functional.cross_entropy(logits, labels, reduction="sum") / (labels != -100).sum()
        return mean * 2

    run.later(lambda trainer: setattr(trainer, "compute_loss_func", own_loss))


class PenalisesLayers:
    """Looks at parameters by name within the loss."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        result = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        penalty = sum(value.square().sum() for name, value in model.named_parameters() if is_in_layer(name, 1))
        loss = result[0] + 0.01 * penalty + 1e-3 * len(list(model.named_parameters()))
        return (loss, result[1]) if return_outputs else loss


@edit()
def penalty_over_parameters(run):
    run.mixins.append(PenalisesLayers)


class ScalesLoss:
    def compute_loss(self, *args, **kwargs):
        result = super().compute_loss(*args, **kwargs)
        factor = 1 + self.state.global_step // 5
        return (result[0] * factor, *result[1:]) if isinstance(result, tuple) else result * factor


@edit()
def compute_loss_overridden(run):
    run.mixins.append(ScalesLoss)


class UsesHiddenStates:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, output_hidden_states=True)
        loss = outputs.loss + 0.01 * sum(state.square().mean() for state in outputs.hidden_states)
        return (loss, outputs) if return_outputs else loss


@edit("causal", "sft", counts_tokens=True)
def hidden_states(run):
    run.mixins.append(UsesHiddenStates)


# ---- Hooks ----


@edit()
def hook_of_a_parameter(run):
    calls = []

    def halve(gradient):
        calls.append(True)
        return gradient * (0.5 if len(calls) > 5 else 2)

    def register(trainer):
        head_of(run.model).weight.register_hook(halve)

    run.once_made(register) if run.draw(True, False) else run.later(register)


@edit()
def hook_of_the_optimizer(run):
    def halve(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)

    run.later(lambda trainer: trainer.optimizer.optimizer.register_step_pre_hook(halve))


@edit(counts_tokens=True)
def hook_of_all_modules(run):
    def scale(module, args, output):
        return output * 1.2 if isinstance(module, nn.Linear) else None

    run.later(lambda trainer: run.undo.callback(nn.modules.module.register_module_forward_hook(scale).remove))


@edit(counts_tokens=True)
def hook_of_a_module(run):
    calls = []

    def scale(module, args, output):
        calls.append(True)
        return output * (1.2 if len(calls) > 5 else 0.9)

    def register(trainer):
        module = head_of(run.model) if place == "head" else layers_of(run.model)[0]
        if place == "backward":
            head_of(run.model).register_full_backward_hook(lambda module, given, taken: (given[0] * 0.5,))
        else:
            module.register_forward_hook(scale)

    place = run.draw("head", "layer", "backward") if run.case.family != "sft" else run.draw("head", "backward")
    run.once_made(register) if run.draw(True, False) else run.later(register)


# ---- Callbacks that change weights and the optimizer, and that look at the model ----


@edit()
def freezes_a_layer(run):
    def freeze(trainer):
        for name, parameter in run.model.named_parameters():
            if is_in_layer(name, 1):
                parameter.requires_grad_(False)

    run.later(freeze)


@edit()
def parameter_groups(run):
    what, value = run.draw(("weight_decay", 0.5), ("betas", (0.5, 0.7)), ("eps", 0.1))

    def change(trainer):
        for group in trainer.optimizer.param_groups:
            group[what] = value

    run.later(change)


@edit()
def weights_changed(run):
    def change(trainer):
        with torch.no_grad():
            for name, parameter in run.model.named_parameters():
                if is_in_layer(name, 1) or "head" in name:
                    parameter.mul_(0.8)

    run.later(change)


@edit()
def copies_kept(run):
    kept: dict[str, torch.Tensor] = {}

    def keep(trainer):
        if how == "clone":
            kept.update({name: value.detach().clone() for name, value in run.model.named_parameters()})
        else:
            kept.update(copy.deepcopy(run.model.state_dict()))

    how = run.draw("clone", "deepcopy")
    run.later(keep)

    def compare(trainer):
        run.seen += [value.detach().cpu().double().square().sum().item() for value in kept.values()]

    run.at("on_train_end", compare)


@edit()
def counts_weights(run):
    def count(trainer):
        names = [name for name, _ in run.model.named_parameters()]
        run.seen += [len(run.model.state_dict()), len(names), len("".join(names)), len(layers_of(run.model))]
        run.seen.append(layers_of(run.model)[1].get_parameter(names_in_layer[0]).detach().cpu().norm().item())

    names_in_layer = [name for name, _ in layers_of(run.model)[1].named_parameters()]
    run.at(run.draw(*EVERY_EVENT), count, once=False)


# ---- Subclasses ----


class ChangesGradients:
    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.7)
        return loss


class ChangesLoss:
    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs) * 2


@edit()
def training_step(run):
    run.mixins.append(ChangesGradients if run.draw("gradients", "loss") == "gradients" else ChangesLoss)


class OwnLoader:
    def get_train_dataloader(self):
        loader = torch.utils.data.DataLoader(
            self.train_dataset, batch_size=self.args.train_batch_size, collate_fn=self.data_collator
        )
        return self.accelerator.prepare(loader)


class OwnSampler:
    def _get_train_sampler(self, train_dataset=None):
        return torch.utils.data.SubsetRandomSampler(
            range(1, ROWS), generator=torch.Generator().manual_seed(self.args.seed)
        )


class OwnLog:
    def log(self, logs, *args, **kwargs):
        logs["own"] = 1.0 + len(self.model.state_dict())
        return super().log(logs, *args, **kwargs)


class OwnOptimizer:
    def create_optimizer(self, *args):
        weights = [value for value in self.model.parameters() if value.requires_grad]
        self.optimizer = torch.optim.SGD(weights, lr=self.args.learning_rate, momentum=0.9)
        return self.optimizer


class OwnGroups:
    def create_optimizer(self, *args):
        optimizer = super().create_optimizer(*args)
        optimizer.param_groups[0]["weight_decay"] = 0.3
        return optimizer


class DecaysALayer:
    def get_decay_parameter_names(self, model):
        return [name for name, _ in model.named_parameters() if is_in_layer(name, 1)]


class OwnPrediction:
    def prediction_step(self, *args, **kwargs):
        loss, logits, labels = super().prediction_step(*args, **kwargs)
        return None if loss is None else loss * 2, logits, labels


def _add(mixin: type, run: Run) -> None:
    run.mixins.append(mixin)


for _name, _mixin in {
    "loader": OwnLoader,
    "sampler": OwnSampler,
    "log": OwnLog,
    "optimizer": OwnOptimizer,
    "groups": OwnGroups,
    "decay_names": DecaysALayer,
    "prediction_step": OwnPrediction,
}.items():
    EDITS[_name] = (partial(_add, _mixin), FAMILIES)


# ---- Comparison ----


TIMED = ("runtime", "per_second", "flos", "preparation_time", "step_time", "phase/", "mfu", "memory")


def numbers_of(run: Run) -> Iterator[tuple[str, float]]:
    """What a run logged, but times, and what code of the user's saw, each with a name."""
    for entry in run.trainer.state.log_history:
        for key, value in sorted(entry.items()):
            if not any(word in key for word in TIMED):
                yield f"{key} at step {entry['step']}", value
    for index, value in enumerate(run.seen):
        yield f"number {index} that the user's code saw", value


def difference(run: Run, reference: Run) -> str | None:
    """The first number that is not that of the reference, to 1e-5 of it."""
    ours, theirs = list(numbers_of(run)), list(numbers_of(reference))
    if [name for name, _ in ours] != [name for name, _ in theirs]:
        return f"other numbers: {sorted({*dict(ours)} ^ {*dict(theirs)})}"
    for (name, mine), (_, other) in zip(ours, theirs, strict=True):
        if not abs(mine - other) <= max(1e-5 * abs(other), 1e-7):
            return f"{name} is {mine}, and {other} with upstream's trainer"
    return None


@contextmanager
def as_before() -> Iterator[None]:
    """Leaves the random numbers of Python as they are."""
    state = random.getstate()
    yield
    random.setstate(state)
