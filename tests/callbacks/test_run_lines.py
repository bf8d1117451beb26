"""What is printed when a run ends."""

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from hf_tpu_ext.backends.cpu import CPUBackend
from hf_tpu_ext.callbacks.run_lines import RunFacts, RunLines


@pytest.mark.parametrize(("begin", "says"), [(0, True), (2, True), (4, False)])
def test_losses_of_evaluations_are_those_of_a_run_that_trained(tmp_path, capsys, begin, says):
    """Not where a run that had ended is resumed."""
    lines = RunLines(CPUBackend("a test"), lambda: RunFacts("float32 weights", 2, [], None, []))
    args = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    history = [{"step": step, "eval_loss": 5.0 - step} for step in (2, 4)]
    state = TrainerState(global_step=begin, max_steps=4, log_history=history)
    lines.on_train_begin(args, state, TrainerControl())
    state.global_step = 4
    lines.on_train_end(args, state, TrainerControl())
    assert ("Evaluation loss: 3.0000 -> 1.0000" in capsys.readouterr().out) == says
