"""What people write around a trainer: code of their own in every place that takes some, each a function of a [`Run`]."""

import copy
import random
from collections.abc import Callable
from functools import partial
from unittest import mock

import differential_models
import torch
from differential_models import FAMILIES, PREFERENCES, ROWS, Net, head_of, is_in_layer, layers_of
from torch import nn


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
ALL = (*FAMILIES, *PREFERENCES)
#: What users' code may do, by name, and the families of models that it is for.
EDITS: dict[str, tuple[Callable, tuple[str, ...]]] = {}
# With these, rows have one length: they count tokens that are masked.
COUNT_TOKENS: set[str] = set()


def edit(*families: str, counts_tokens: bool = False) -> Callable:
    """Add a function to [`EDITS`]."""

    def add(function):
        EDITS[function.__name__] = (function, families or ALL)
        if counts_tokens:
            COUNT_TOKENS.add(function.__name__)
        return function

    return add


# ---- Attributes and modules ----


@edit("module")
def attribute(run):
    module = run.model
    undo = run.undo
    changes = {
        "number": lambda: setattr(module.blocks[1], "scale", 2.0),
        "of an object": lambda: setattr(module.settings, "scale", 0.5),
        "nested": lambda: module.nested["a"][0].update(b=0.5),
        "of numpy": lambda: setattr(module, "factor", module.factor * 2),
        "of the class": lambda: undo.enter_context(mock.patch.object(Net, "gain", 2.0)),
        "global": lambda: undo.enter_context(mock.patch.object(differential_models, "GAIN", 0.5)),
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


@edit("causal", "sft", *PREFERENCES, counts_tokens=True)
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
        weights = [value for value in run.model.parameters() if value.requires_grad]
        (weights[-1] if run.case.lora else head_of(run.model).weight).register_hook(halve)

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


def _add(mixin: type, run) -> None:
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
    EDITS[_name] = (partial(_add, _mixin), ALL)


# ---- Preferences ----


@edit(*PREFERENCES)
def attribute_of_the_trainer(run):
    names = {"dpo": ("beta", "label_smoothing"), "kto": ("beta", "desirable_weight"), "reward": ("coefficient",)}
    name, value = run.draw(*names[run.case.family]), run.draw(0.05, 0.3)

    def change(trainer):
        if name == "coefficient":
            trainer.args.center_rewards_coefficient = value
        else:
            setattr(trainer, name, value)

    run.later(change)


@edit("dpo", "kto")
def reference_changed(run):
    def change(trainer):
        # With an adapter, and where its log-probs are known ahead, there is none of its own.
        model = run.model if trainer.ref_model is None else trainer.ref_model
        with torch.no_grad():
            layers_of(model)[0].input_layernorm.weight.mul_(0.9)

    run.later(change)


class OwnMetric:
    def compute_loss(self, *args, **kwargs):
        result = super().compute_loss(*args, **kwargs)
        loss = result[0] if isinstance(result, tuple) else result
        self._metrics["train" if self.model.training else "eval"]["own"].append(2 * loss.item())
        return result


@edit(*PREFERENCES)
def metric(run):
    run.mixins.append(OwnMetric)
