"""
Kinds of code that people write around a trainer: each a function that adds it to a [`Setup`].

`REPLAYED`, `TRACED` and `STAGES` say what a run does with it: its last step runs no Python of the model, each step is traced as one
program, or each step is traced and its stages run one by one. `python tests/trainers/kinds_of_user_code.py` prints the table in
docs/recompilation.md.
"""

import copy
import functools
import io
import random
from collections.abc import Callable
from contextlib import ExitStack, nullcontext

import numpy as np
import torch
from differential_edits import ChangesGradients, OwnGroups
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, TrainerCallback
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.qwen3 import modeling_qwen3


REPLAYED, TRACED, STAGES = "replayed", "traced", "stage by stage"
STEPS = 8
#: By the name of a function: what a run does with it, how people are told, the function.
KINDS: dict[str, tuple[str, str, Callable]] = {}


class Setup:
    """What a run is made of besides the model and the data. `trainer` and `model` are there once the run begins."""

    def __init__(self):
        self.config, self.kwargs, self.mixins, self.callbacks = {}, {}, [], []
        self.lora = False
        #: What code has seen, as numbers, which are those of stock.
        self.seen: list[float] = []
        #: Left after the run, and entered around `train()`.
        self.around, self.around_run = ExitStack(), nullcontext
        #: Called with the model before the trainer is made, and with the trainer before the run.
        self.prepare_model: Callable = lambda model: None
        self.prepare: list[Callable] = []
        self.trainer = None

    @property
    def model(self):
        return self.trainer.model

    def weight(self, of: str = "mlp.up_proj.weight") -> nn.Parameter:
        return next(value for name, value in self.model.named_parameters() if of in name)

    def at(self, event: str, function: Callable[["Setup"], None], step: int | None = None) -> None:
        """Call a function at each event, or at the event after so many steps."""
        setup = self

        def call(callback, args, state, control, **kwargs):
            if step is None or state.global_step == step:
                function(setup)

        self.callbacks.append(type(f"At{event}", (TrainerCallback,), {event: call})())

    def look(self, tensor: torch.Tensor) -> None:
        self.seen.append(tensor.detach().double().norm().item())


def kind(does: str, text: str) -> Callable:
    def add(function):
        KINDS[function.__name__] = does, text, function
        return function

    return add


# ---- Code between steps that reads ----


@kind(REPLAYED, "`on_step_end` that reads a weight")
def reads_a_weight(setup):
    setup.at("on_step_end", lambda s: s.look(s.weight()))


@kind(REPLAYED, "`on_step_end` that reads the optimizer's moments")
def reads_moments(setup):
    def read(setup):
        state = setup.trainer.optimizer.state
        if len(state) and setup.weight() in state:
            setup.look(state[setup.weight()]["exp_avg"])

    setup.at("on_step_end", read)


@kind(REPLAYED, "`on_step_end` that reads the learning rate")
def reads_the_learning_rate(setup):
    setup.at("on_step_end", lambda s: s.seen.append(s.trainer.optimizer.param_groups[0]["lr"]))


@kind(REPLAYED, "a `state_dict()` that is held on to")
def holds_a_state_dict(setup):
    held = {}
    setup.at("on_step_end", lambda s: held.update(s.model.state_dict()), step=2)
    setup.at("on_train_end", lambda s: s.look(next(v for k, v in held.items() if "up_proj" in k)))


@kind(REPLAYED, "`parameter.data` that is held on to")
def holds_data(setup):
    held = []
    setup.at("on_step_end", lambda s: held.append(s.weight().data), step=4)
    setup.at("on_train_end", lambda s: s.look(held[0]))


@kind(REPLAYED, "clones of weights")
def keeps_clones(setup):
    held = []
    setup.at("on_step_end", lambda s: held.append(s.weight().detach().clone()))
    setup.at("on_train_end", lambda s: [s.look(each) for each in held])


@kind(REPLAYED, "`copy.deepcopy` of the model")
def copies_the_model(setup):
    held = []
    setup.at("on_step_end", lambda s: held.append(copy.deepcopy(s.model)), step=4)
    setup.at("on_train_end", lambda s: s.look(held[0].get_input_embeddings().weight))


@kind(REPLAYED, "`torch.save` of the weights")
def saves_with_torch(setup):
    def save(setup):
        file = io.BytesIO()
        torch.save(setup.model.state_dict(), file)
        file.seek(0)
        state = torch.load(file, map_location="cpu")
        setup.look(next(value for name, value in state.items() if "up_proj" in name))

    setup.at("on_step_end", save, step=5)


@kind(REPLAYED, "`save_pretrained` in a callback")
def saves_pretrained(setup):
    setup.at("on_step_end", lambda s: s.model.save_pretrained(s.trainer.args.output_dir + "/own"), step=5)


@kind(REPLAYED, "a forward pass of the model in a callback")
def runs_the_model(setup):
    def run(setup):
        ids = torch.arange(12, device=setup.weight().device).reshape(2, 6)
        setup.model.eval()
        with torch.no_grad():
            setup.look(setup.model(input_ids=ids).logits)
        setup.model.train()

    setup.at("on_step_end", run)


@kind(REPLAYED, "`generate` in a callback")
def generates(setup):
    def write(setup):
        ids = torch.arange(4, device=setup.weight().device).reshape(1, 4)
        with torch.no_grad():
            ids = setup.model.generate(ids, max_new_tokens=3, do_sample=False, attention_mask=torch.ones_like(ids))
        setup.seen += ids.flatten().tolist()

    setup.at("on_step_end", write, step=4)


@kind(REPLAYED, "gradients with `torch.autograd.grad` in a callback")
def differentiates(setup):
    def differentiate(setup):
        weight = setup.weight()
        setup.look(torch.autograd.grad(weight.square().sum(), weight)[0])

    setup.at("on_step_end", differentiate)


@kind(REPLAYED, "names and number of the parameters")
def counts_parameters(setup):
    setup.at("on_step_begin", lambda s: s.seen.append(len("".join(name for name, _ in s.model.named_parameters()))))


@kind(REPLAYED, "`on_log` that changes the logs")
def changes_logs(setup):
    class Adds(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            logs["own"] = state.global_step * 2.0

    setup.callbacks.append(Adds())


@kind(REPLAYED, "`trainer.log` in a callback")
def logs_more(setup):
    setup.at("on_step_end", lambda s: s.trainer.log({"own": 1.0}), step=5)


@kind(REPLAYED, "a callback that asks for an evaluation")
def asks_for_an_evaluation(setup):
    class Asks(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_evaluate = state.global_step in (3, 6)

    setup.callbacks.append(Asks())


@kind(REPLAYED, "`trainer.evaluate()` in a callback")
def evaluates(setup):
    def evaluate(setup):
        setup.seen.append(setup.trainer.evaluate()["eval_loss"])

    setup.at("on_step_end", evaluate, step=4)


@kind(REPLAYED, "a callback that stops training")
def stops(setup):
    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 6

    setup.callbacks.append(Stops())


@kind(REPLAYED, "`on_substep_end` that reads a weight, with accumulation")
def reads_between_micro_steps(setup):
    setup.config["gradient_accumulation_steps"] = 2
    setup.at("on_substep_end", lambda s: s.look(s.weight()))


@kind(REPLAYED, "random numbers of the host between steps")
def draws_on_the_host(setup):
    def draw(setup):
        setup.seen += [random.random(), np.random.rand(), torch.rand(()).item()]

    setup.at("on_step_end", draw)


@kind(REPLAYED, "`torch.manual_seed` between steps")
def seeds(setup):
    setup.at("on_step_end", lambda s: torch.manual_seed(3), step=4)


@kind(REPLAYED, "a callback that adds another")
def adds_a_callback(setup):
    setup.at("on_step_end", lambda s: s.trainer.add_callback(TrainerCallback), step=4)


@kind(REPLAYED, "a callback that is removed")
def removes_a_callback(setup):
    callback = TrainerCallback()
    setup.callbacks.append(callback)
    setup.at("on_step_end", lambda s: s.trainer.remove_callback(callback), step=4)


@kind(REPLAYED, "`compute_metrics`")
def computes_metrics(setup):
    setup.config |= {"eval_strategy": "steps", "eval_steps": 3}
    setup.kwargs["compute_metrics"] = lambda prediction: {"mean": float(np.abs(prediction.predictions).mean())}


# ---- Code between steps that writes ----


def _without_gradient(function):
    def call(setup):
        with torch.no_grad():
            function(setup)

    return call


@kind(REPLAYED, "a weight scaled in place")
def scales_a_weight(setup):
    setup.at("on_step_end", _without_gradient(lambda s: s.weight().mul_(0.9)))


@kind(REPLAYED, "`parameter.data.clamp_`")
def clamps_data(setup):
    setup.at("on_step_end", lambda s: s.weight().data.clamp_(-0.02, 0.02))


@kind(REPLAYED, "`parameter.data = ...`")
def replaces_data(setup):
    def replace(setup):
        setup.weight().data = setup.weight().data * 0.9

    setup.at("on_step_end", replace, step=4)


@kind(REPLAYED, "a row of a weight, by its index")
def writes_a_row(setup):
    def write(setup):
        setup.weight()[3] = 0.5

    setup.at("on_step_end", _without_gradient(write))


@kind(REPLAYED, "a weight copied from the host")
def copies_from_the_host(setup):
    setup.at("on_step_end", _without_gradient(lambda s: s.weight().copy_(torch.full(s.weight().shape, 0.01))), step=4)


@kind(REPLAYED, "`load_state_dict`")
def loads_a_state(setup):
    held = {}

    def keep(setup):
        held.update({name: value.detach().cpu().clone() for name, value in setup.model.state_dict().items()})

    setup.at("on_step_end", keep, step=2)
    setup.at("on_step_end", lambda s: s.model.load_state_dict(held), step=5)


@kind(REPLAYED, "another adapter's weights loaded into LoRA")
def loads_an_adapter(setup):
    def load(setup):
        state = {name: value.cpu() * 0.5 for name, value in get_peft_model_state_dict(setup.model).items()}
        set_peft_model_state_dict(setup.model, state)

    setup.lora = True
    setup.at("on_step_end", load, step=4)


@kind(REPLAYED, "weights swapped with an average of one's own, and back")
def swaps_an_average(setup):
    average = {}

    def follow(setup):
        for name, value in setup.model.named_parameters():
            known = average.setdefault(name, value.detach().clone())
            known.lerp_(value.detach(), 0.5)

    def swap(setup):
        for name, value in setup.model.named_parameters():
            kept = value.detach().clone()
            value.data.copy_(average[name])
            average[name].copy_(kept)

    setup.at("on_step_end", _without_gradient(follow))
    setup.at("on_step_end", _without_gradient(swap), step=5)


@kind(REPLAYED, "the optimizer's moments set to zero")
def clears_moments(setup):
    setup.at(
        "on_step_end", lambda s: [state["exp_avg"].zero_() for state in s.trainer.optimizer.state.values()], step=4
    )


@kind(REPLAYED, "the optimizer's state cleared")
def clears_the_optimizer(setup):
    setup.at("on_step_end", lambda s: s.trainer.optimizer.state.clear(), step=4)


@kind(REPLAYED, "the learning rate of a group set")
def sets_the_learning_rate(setup):
    def set_rate(setup):
        for group in setup.trainer.optimizer.param_groups:
            group["lr"] = 2e-3

    setup.config["lr_scheduler_type"] = "constant"
    setup.at("on_step_begin", set_rate, step=4)


@kind(REPLAYED, "weight decay and betas set")
def sets_betas(setup):
    def set_betas(setup):
        for group in setup.trainer.optimizer.param_groups:
            group.update(betas=(0.5, 0.7), weight_decay=0.3)

    setup.at("on_step_begin", set_betas, step=4)


@kind(REPLAYED, "another scheduler")
def replaces_the_scheduler(setup):
    def replace(setup):
        optimizer = setup.trainer.optimizer.optimizer
        setup.trainer.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    setup.at("on_step_begin", replace, step=3)


@kind(REPLAYED, "a layer that is frozen")
def freezes(setup):
    setup.at("on_step_begin", lambda s: s.weight().requires_grad_(False), step=4)


@kind(REPLAYED, "a layer that is unfrozen")
def unfreezes(setup):
    def unfreeze(setup):
        weight = setup.weight()
        weight.requires_grad_(True)

    # It is among what the optimizer updates, as upstream makes it before the run.
    setup.at("on_train_begin", lambda s: s.weight().requires_grad_(False))
    setup.at("on_step_begin", unfreeze, step=4)


@kind(REPLAYED, "a number of a layer")
def sets_a_number(setup):
    setup.at("on_step_begin", lambda s: setattr(s.model.model.layers[0].input_layernorm, "variance_epsilon", 0.1), 4)


@kind(REPLAYED, "a setting of the model's config")
def sets_the_config(setup):
    setup.at("on_step_begin", lambda s: setattr(s.model.config, "num_hidden_layers", 0), step=4)


@kind(REPLAYED, "a module replaced by one of PyTorch's")
def replaces_a_module(setup):
    setup.at("on_step_begin", lambda s: setattr(s.model.model, "norm", nn.Identity()), step=4)


@kind(REPLAYED, "`args.max_grad_norm` set")
def sets_the_clip(setup):
    setup.at("on_step_begin", lambda s: setattr(s.trainer.args, "max_grad_norm", 0.05), step=4)


@kind(REPLAYED, "`state.logging_steps` set")
def sets_logging_steps(setup):
    setup.at("on_step_begin", lambda s: setattr(s.trainer.state, "logging_steps", 2), step=2)


@kind(REPLAYED, "the model in evaluation mode, which upstream's step undoes")
def leaves_evaluation_mode(setup):
    setup.at("on_step_end", lambda s: s.model.eval(), step=4)


# ---- Code around steps ----


@kind(REPLAYED, "a data collator")
def collates(setup):
    def wrap(trainer):
        collator = trainer.data_collator
        trainer.data_collator = lambda rows: collator(rows[::-1])

    setup.prepare.append(wrap)


@kind(REPLAYED, "`get_train_dataloader` overridden")
def loads_by_itself(setup):
    class OwnLoader:
        def get_train_dataloader(self):
            loader = torch.utils.data.DataLoader(self.train_dataset, batch_size=4, collate_fn=self.data_collator)
            return self.accelerator.prepare(loader)

    setup.mixins.append(OwnLoader)


@kind(REPLAYED, "`log` overridden")
def overrides_log(setup):
    class OwnLog:
        def log(self, logs, *args, **kwargs):
            super().log({**logs, "own": 1.0}, *args, **kwargs)

    setup.mixins.append(OwnLog)


@kind(REPLAYED, "`create_optimizer` overridden, with groups of one's own")
def makes_groups(setup):
    setup.mixins.append(OwnGroups)


@kind(REPLAYED, "a schedule of one's own")
def schedules(setup):
    class OwnSchedule:
        def create_scheduler(self, num_training_steps, optimizer=None):
            optimizer = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            return self.lr_scheduler

    setup.mixins.append(OwnSchedule)


# ---- Code inside a step ----


@kind(TRACED, "`compute_loss` overridden")
def overrides_the_loss(setup):
    class OwnLoss:
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            # Not what a program could do again.
            return loss * (1 + self.state.global_step // 5) if not isinstance(loss, tuple) else loss

    setup.mixins.append(OwnLoss)


@kind(TRACED, "`compute_loss` that keeps the outputs of the model")
def keeps_outputs(setup):
    class Keeps:
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, self.kept = super().compute_loss(model, inputs, True, num_items_in_batch)
            return (loss, self.kept) if return_outputs else loss

    setup.mixins.append(Keeps)


@kind(TRACED, "`compute_loss_func`")
def loss_function(setup):
    def own_loss(outputs, labels, num_items_in_batch=None):
        return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) * 2

    setup.config["loss_type"] = "nll"
    setup.kwargs["compute_loss_func"] = own_loss


@kind(TRACED, "a method of the trainer, set on the object")
def sets_a_method(setup):
    def set_method(trainer):
        upstream = trainer.compute_loss

        def compute_loss(*args, **kwargs):
            result = upstream(*args, **kwargs)
            return result if isinstance(result, tuple) else result * 2

        trainer.compute_loss = compute_loss

    setup.prepare.append(set_method)


def _layer(trainer) -> nn.Module:
    return trainer.model.model.layers[0].mlp


@kind(TRACED, "a forward hook that keeps activations")
def keeps_activations(setup):
    held = {}

    def keep(module, args, output):
        held["output"] = output.detach()

    setup.prepare.append(lambda trainer: _layer(trainer).register_forward_hook(keep))


@kind(TRACED, "a forward hook that changes outputs")
def changes_outputs(setup):
    calls = []

    def change(module, args, output):
        calls.append(True)
        return output * (1.5 if len(calls) > 5 else 1)

    setup.prepare.append(lambda trainer: _layer(trainer).register_forward_hook(change))


@kind(TRACED, "a hook of the backward pass of a module")
def hooks_the_backward_pass(setup):
    calls = []

    def change(module, given, taken):
        calls.append(True)
        return tuple(None if each is None else each * (0.5 if len(calls) > 5 else 2) for each in given)

    setup.prepare.append(lambda trainer: _layer(trainer).register_full_backward_hook(change))


@kind(TRACED, "a hook of a parameter")
def hooks_a_parameter(setup):
    calls = []

    def change(gradient):
        calls.append(True)
        return gradient * (0.5 if len(calls) > 5 else 2)

    setup.prepare.append(lambda trainer: _layer(trainer).up_proj.weight.register_hook(change))


@kind(TRACED, "a hook after a gradient was accumulated")
def hooks_accumulation(setup):
    calls = []

    def change(parameter):
        calls.append(True)
        parameter.grad.mul_(0.5 if len(calls) > 5 else 2)

    setup.prepare.append(lambda trainer: _layer(trainer).up_proj.weight.register_post_accumulate_grad_hook(change))


@kind(TRACED, "a hook of all modules")
def hooks_all_modules(setup):
    def scale(module, args, output):
        return output * 1.2 if isinstance(module, nn.Linear) else None

    setup.around.callback(nn.modules.module.register_module_forward_hook(scale).remove)


@kind(TRACED, "a hook registered in the middle of a run")
def hooks_later(setup):
    setup.at("on_step_begin", lambda s: _layer(s.trainer).register_forward_hook(lambda m, a, output: output * 2), 5)


@kind(TRACED, "the `forward` of a module, patched")
def patches_forward(setup):
    def patch(trainer):
        module = _layer(trainer)
        forward = module.forward
        module.forward = lambda *args: forward(*args) * 1.3

    setup.prepare.append(patch)


@kind(TRACED, "a function of transformers, patched in its module")
def patches_a_function(setup):
    before = modeling_qwen3.apply_rotary_pos_emb

    @functools.wraps(before)
    def rotate(query, key, *args, **kwargs):
        query, key = before(query, key, *args, **kwargs)
        return query * 1.1, key

    modeling_qwen3.apply_rotary_pos_emb = rotate
    setup.around.callback(setattr, modeling_qwen3, "apply_rotary_pos_emb", before)


@kind(TRACED, "an attention registered with transformers")
def registers_attention(setup):
    calls = []

    def attend(*args, **kwargs):
        calls.append(True)
        output, weights = sdpa_attention_forward(*args, **kwargs)
        return output * (1.5 if len(calls) > 9 else 1), weights

    AttentionInterface.register("own", attend)
    setup.prepare_model = lambda model: model.set_attn_implementation("own")


@kind(TRACED, "the loss of a model, set on it")
def sets_the_loss_of_a_model(setup):
    calls = []

    def own_loss(logits, labels, vocab_size, **kwargs):
        calls.append(True)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return loss * (1.5 if len(calls) > 5 else 1)

    setup.config["loss_type"] = "nll"
    setup.prepare_model = lambda model: setattr(model, "loss_function", own_loss)


@kind(TRACED, "a module of one's own")
def own_module(setup):
    class Scaled(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return self.inner(x) * (1.5 if self.calls > 5 else 1)

    setup.prepare_model = lambda model: setattr(model.model, "norm", Scaled(model.model.norm))


@kind(TRACED, "an autograd function of one's own, in a hook")
def own_autograd(setup):
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 3

    setup.prepare.append(lambda trainer: _layer(trainer).register_forward_hook(lambda m, a, out: Doubled.apply(out)))


@kind(TRACED, "a `TorchFunctionMode` around the run")
def function_mode(setup):
    class Scales(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            return result * 1.1 if func is nn.functional.silu else result

    setup.around_run = Scales


@kind(TRACED, "hooks of saved tensors around the run")
def saved_tensors(setup):
    setup.around_run = lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


@kind(TRACED, "a loss that branches on a number of the device")
def branches(setup):
    class Branches:
        def compute_loss(self, *args, **kwargs):
            result = super().compute_loss(*args, **kwargs)
            if isinstance(result, tuple):
                return result
            return result * 2 if result.item() > 5.2 else result

    setup.mixins.append(Branches)


@kind(TRACED, "random numbers of the host in a loss")
def draws_in_a_loss(setup):
    class Draws:
        def compute_loss(self, *args, **kwargs):
            result = super().compute_loss(*args, **kwargs)
            return result if isinstance(result, tuple) else result * (1 + random.random())

    setup.at("on_train_begin", lambda s: random.seed(0))
    setup.mixins.append(Draws)


# ---- Code between the backward pass and the update ----


@kind(STAGES, "`on_pre_optimizer_step` that reads gradients")
def reads_gradients(setup):
    setup.at("on_pre_optimizer_step", lambda s: s.look(s.weight().grad))


@kind(STAGES, "`on_pre_optimizer_step` that changes gradients")
def changes_gradients(setup):
    setup.at("on_pre_optimizer_step", lambda s: s.weight().grad.mul_(0.5))


@kind(STAGES, "`on_optimizer_step`")
def after_the_update(setup):
    setup.at("on_optimizer_step", lambda s: s.look(s.weight()))


@kind(STAGES, "a hook of the optimizer")
def hooks_the_optimizer(setup):
    def halve(*_):
        setup.weight().grad.mul_(0.5)

    def register(setup):
        setup.trainer.optimizer.optimizer.register_step_pre_hook(halve)

    setup.at("on_train_begin", register)


@kind(STAGES, "`training_step` overridden")
def overrides_the_step(setup):
    setup.mixins.append(ChangesGradients)


@kind(STAGES, "another optimizer")
def another_optimizer(setup):
    setup.config["optim"] = "sgd"
    setup.config["learning_rate"] = 0.1


@kind(STAGES, "an optimizer that a callback puts in the place of the run's")
def replaces_the_optimizer(setup):
    def replace(setup):
        groups = [{"params": group["params"]} for group in setup.trainer.optimizer.optimizer.param_groups]
        setup.trainer.optimizer.optimizer = torch.optim.SGD(groups, lr=0.05)

    setup.config["lr_scheduler_type"] = "constant"
    setup.at("on_step_begin", replace, step=4)


def describe() -> str:
    """The table of the docs."""
    kinds = sorted(KINDS.values(), key=lambda kind: (REPLAYED, TRACED, STAGES).index(kind[0]))
    rows = [f"| {text} | {does} |" for does, text, _ in kinds]
    return "\n".join(["| Your code | Steps are |", "|---|---|", *rows])


if __name__ == "__main__":
    print(describe())
