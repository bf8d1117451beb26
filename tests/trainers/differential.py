"""
A grammar of what people write around a trainer: models, losses, data, and code of their own in every place that takes some.

A case is drawn from a seed. It is put together anew for each run, so that nothing is shared between runs but the seed.
"""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from datasets import Dataset
from differential_edits import COUNT_TOKENS, EDITS, EVENTS
from differential_models import LENGTH, LOSSES, PREFERENCES, ROWS, Case, make_model, make_rows
from peft import LoraConfig
from preference import moved
from transformers import TrainerCallback


def draw_case(seed: int) -> Case:
    """The case of a seed; every third is supervised fine-tuning, of layers that are a loop by default."""
    rng = random.Random(seed)
    return _draw(rng, seed, "sft" if seed % 3 == 2 else rng.choice(("module", "module", "causal")))


def draw_preferences(seed: int) -> Case:
    """The case of a seed, of training with preferences, where each setting that is left out has its default."""
    rng = random.Random(f"preferences {seed}")
    case = _draw(rng, seed, ("dpo", "kto", "dpo", "reward")[seed % 4])
    lora = rng.random() < 0.5
    settings: dict[str, Any] = {
        "logging_steps": rng.choice((1, 1, 2, 3)),
        "gradient_checkpointing": rng.random() < 0.7,
        "dataloader_drop_last": rng.random() < 0.3,
    }
    if case.family == "dpo":
        settings |= rng.choice(DPO_LOSSES)
        settings |= rng.choice(({}, {}, {"ld_alpha": 0.3}, {"max_length": 8, "truncation_mode": "keep_end"}))
    elif case.family == "kto":
        settings |= rng.choice(({}, {}, {"loss_type": "apo_zero_unpaired"}, {"undesirable_weight": 0.6}))
    else:
        settings |= rng.choice(({}, {"center_rewards_coefficient": 0.1}))
    if case.family != "reward":
        ways = [{}, {}, {"precompute_ref_log_probs": True}]
        # Upstream pairs the parameters of both models, of which an edit may leave some out.
        if not lora and "attribute_of_a_layer" not in case.edits:
            ways += 2 * [{"sync_ref_model": True, "ref_model_sync_steps": 3, "ref_model_mixup_alpha": 0.5}]
        settings |= rng.choice(ways)
    if case.ragged and "max_length" not in settings and rng.random() < 0.5:
        settings["length_buckets"] = [11, 16]
    # What is for these trainers alone is rarely among so many.
    own = [
        name for name, (_, families) in EDITS.items() if case.family in families and not {*families} - {*PREFERENCES}
    ]
    edits = tuple(dict.fromkeys((*case.edits, *rng.sample(own, rng.choice((0, 1))))))
    return replace(case, lora=lora, settings=settings, edits=edits)


def _draw(rng: random.Random, seed: int, family: str) -> Case:
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
        ragged=family in RAGGED and not COUNT_TOKENS & {*edits} and rng.random() < RAGGED[family],
    )


RAGGED = {"sft": 0.3, **dict.fromkeys(PREFERENCES, 0.7)}
DPO_LOSSES: list[dict[str, Any]] = [
    {},
    *({"loss_type": name} for name in ("hinge", "ipo", "apo_zero", "sppo_hard", "nca_pair", "aot", "bco_pair")),
    {"loss_type": "robust", "label_smoothing": 0.1},
    {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    {"use_weighting": True},
    {"f_divergence_type": "js_divergence"},
]


class Run:
    """
    What one training of a case is put together from: edits add to it, and change the trainer once it is made.

    Args:
        case ([`Case`]):
            The case.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
            Dtype of the weights, and of all that is computed.
    """

    def __init__(self, case: Case, dtype: torch.dtype = torch.float32):
        self.case = case
        self.model = make_model(case).to(dtype)
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
                args=args,
                train_dataset=self.as_dataset(make_rows(self.case, ROWS, 0)),
                eval_dataset=self.as_dataset(make_rows(self.case, 7, 1)),
                callbacks=self.callbacks,
                **kwargs,
            )
            for action in self._made:
                action(self.trainer)
            self.trainer.train()

    def as_dataset(self, rows: list[dict[str, Any]]):
        return Dataset.from_list(rows) if self.case.family in ("sft", *PREFERENCES) else rows

    def more(self) -> dict[str, Any]:
        """What a trainer of preferences is made of besides: an adapter, or a reference."""
        if self.case.lora:
            task = "SEQ_CLS" if self.case.family == "reward" else "CAUSAL_LM"
            targets = ["k_proj", "v_proj"]
            return {"peft_config": LoraConfig(task, r=4, target_modules=targets, init_lora_weights=False)}
        return {} if self.case.family == "reward" else {"ref_model": moved(copy.deepcopy(self.model))}

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
            **(dict(max_length=16) if case.family in PREFERENCES else {}),
        )
        return {**given, **self.config, **case.settings}


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


def difference(run: Run, reference: Run, exact: Run | None = None) -> str | None:
    """
    The first number that is not that of the reference, to 1e-5 of it; of preferences, whose are differences, to 1e-5. Nor, where
    an `exact` run is given, in float64, one that is nearer to it than the reference's.
    """
    least = 1e-5 if run.case.family in PREFERENCES else 1e-7
    ours, theirs = list(numbers_of(run)), list(numbers_of(reference))
    true = theirs if exact is None else list(numbers_of(exact))
    if [name for name, _ in ours] != [name for name, _ in theirs]:
        return f"other numbers: {sorted({*dict(ours)} ^ {*dict(theirs)})}"
    for (name, mine), (_, other), (_, best) in zip(ours, theirs, true, strict=True):
        nearer = exact is not None and abs(mine - best) <= abs(other - best)
        if not (nearer or abs(mine - other) <= max(1e-5 * abs(other), least)):
            return f"{name} is {mine}, and {other} with upstream's trainer"
    return None


@contextmanager
def as_before() -> Iterator[None]:
    """Leaves the random numbers of Python as they are."""
    state = random.getstate()
    yield
    random.setstate(state)
