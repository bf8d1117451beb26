"""One object begins and ends each step, and everybody else finds it ended."""

import pytest
from transformers import TrainerCallback


class ReadsAtTheEnd(TrainerCallback):
    """Reads a weight at the end of each step. Of a step that had not ended, that would execute a graph of its own."""

    def __init__(self, backend):
        self.backend = backend
        self.executions = []
        self.moved = []
        self._before = None

    def on_step_begin(self, args, state, control, model, **kwargs):
        self._count()
        self._weight = next(model.parameters()).detach().cpu()

    def on_step_end(self, args, state, control, model, **kwargs):
        self.moved.append(not next(model.parameters()).detach().cpu().equal(self._weight))

    def on_train_end(self, args, state, control, **kwargs):
        self._count()

    def _count(self):
        self.backend.wait()
        before, self._before = self._before, self.backend.counters().executions
        if before is not None:
            self.executions.append(self._before - before)


@pytest.mark.parametrize("first", [False, True], ids=["added", "put first"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_callbacks_find_a_step_that_has_ended(runs, accumulation, first):
    """Traced and replayed, with the update done."""
    trainer = runs.ours(train=False, gradient_accumulation_steps=accumulation, max_steps=6, warmup_steps=0)
    callback = ReadsAtTheEnd(trainer.backend)
    trainer.add_callback(callback)
    if first:
        callbacks = trainer.callback_handler.callbacks
        callbacks.insert(1, callbacks.pop())
    before = trainer.backend.counters().replays
    trainer.train()
    assert callback.executions == [accumulation] * 6
    assert callback.moved == [True] * 6
    assert trainer.backend.counters().replays > before
    # And nothing of it is left on the model.
    assert trainer.steps.compiled is None and all(parameter.grad is None for parameter in trainer.model.parameters())


def test_a_run_that_fails_in_a_step_leaves_nothing(runs):
    class Fails(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise RuntimeError("on purpose")

    trainer = runs.ours(train=False, gradient_accumulation_steps=2, max_steps=6)
    trainer.add_callback(Fails())
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.train()
    assert trainer.steps.compiled is None and all(parameter.grad is None for parameter in trainer.model.parameters())
    trainer.pop_callback(Fails)
    assert trainer.train().global_step == 6
