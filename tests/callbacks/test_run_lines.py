"""What is printed when a run ends."""

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from hf_tpu_ext.backends.cpu import CPUBackend
from hf_tpu_ext.backends.insight import Counters
from hf_tpu_ext.callbacks.run_lines import RunFacts, RunLines


@pytest.mark.parametrize(("begin", "says"), [(0, True), (2, True), (4, False)])
def test_losses_of_evaluations_are_those_of_a_run_that_trained(tmp_path, capsys, begin, says):
    """Not where a run that had ended is resumed, of which it is said that no step is left."""
    lines = RunLines(CPUBackend("a test"), lambda: RunFacts("float32 weights", 2, [], None, []))
    args = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    history = [{"step": step, "eval_loss": 5.0 - step} for step in (2, 4)]
    state = TrainerState(global_step=begin, max_steps=4, log_history=history)
    lines.on_train_begin(args, state, TrainerControl())
    state.global_step = 4
    lines.on_train_end(args, state, TrainerControl())
    printed = capsys.readouterr().out
    assert ("Evaluation loss: 3.0000 -> 1.0000 (steps 2 to 4)" in printed) == says
    assert ("so that no step is left" in printed) == (not says)


@pytest.mark.parametrize(("metric", "says"), [("eval_loss", ""), ("accuracy", ", the best by accuracy")])
@pytest.mark.parametrize(("is_there", "best_global_step"), [(True, 2), (True, 4), (False, 2)])
def test_what_is_loaded_is_the_best_of_a_metric(tmp_path, capsys, metric, says, is_there, best_global_step):
    """Its loss may be the greater one. A run that is resumed may not find it, and then it is not said to be loaded."""
    lines = RunLines(CPUBackend("a test"), lambda: RunFacts("float32 weights", 2, [], None, []))
    best = dict(
        load_best_model_at_end=True, metric_for_best_model=metric, eval_strategy="steps", save_strategy="steps"
    )
    args = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, eval_steps=2, save_steps=2, **best)
    history = [{"step": step, "eval_loss": 5.0 - step} for step in (2, 4)]
    # Where not each evaluation has a checkpoint, the best one may have none.
    state = TrainerState(global_step=0, max_steps=4, log_history=history, best_global_step=best_global_step)
    state.best_model_checkpoint = str(tmp_path / "checkpoint-2") if is_there else None
    lines.on_train_begin(args, state, TrainerControl())
    state.global_step = 4
    lines.on_train_end(args, state, TrainerControl())
    of_best = f"Evaluation loss: 3.0000 -> 3.0000 at step 2{says}, whose weights are loaded (at the last step 1.0000)"
    assert (of_best if is_there else "Evaluation loss: 3.0000 -> 1.0000 (steps 2 to 4)") in capsys.readouterr().out


class _Traces(CPUBackend):
    """Has run five programs when a run begins, and those of the run when it ends."""

    traces_steps = True

    def __init__(self, of_run):
        super().__init__("a test")
        before = Counters(executions=5)
        # The first is asked for when the lines are made.
        self._counted = iter((before, before, before + of_run))

    def counters(self):
        return next(self._counted)


@pytest.mark.parametrize(
    ("of_run", "words"),
    [
        (
            Counters(compiles=2, compile_seconds=3.0, executions=4),
            "4 steps: 2 graphs compiled in 3.0 s, 4 executions (0 replayed), 0 device-to-host transfers (0 outside this package)",
        ),
        (
            Counters(loads=2, compile_seconds=0.5, executions=4),
            "0 graphs compiled and 2 loaded in 0.5 s, 4 executions",
        ),
    ],
)
def test_graphs_of_a_run(tmp_path, capsys, of_run, words):
    lines = RunLines(_Traces(of_run), lambda: RunFacts("float32 weights", 2, [], None, []))
    args = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    state = TrainerState(global_step=0, max_steps=4)
    lines.on_train_begin(args, state, TrainerControl())
    state.global_step = 4
    lines.on_train_end(args, state, TrainerControl())
    assert words in capsys.readouterr().out and lines.spent == of_run
