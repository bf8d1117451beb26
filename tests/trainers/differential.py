"""
A grammar of what people write around a trainer: models, losses, data, and code of their own in every place that takes some.

A case is drawn from a seed. It is put together anew for each run, so that nothing is shared between runs but the seed.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from differential_edits import COUNT_TOKENS, EDITS, EVENTS
from differential_models import LENGTH, LOSSES, ROWS, Case, make_model, make_rows
from transformers import TrainerCallback


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
