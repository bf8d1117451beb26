import time

import pytest
import torch

from hf_tpu_ext.backends.cpu import CPUBackend
from hf_tpu_ext.callbacks.step_status import PhaseClock, StepStatus, class_of
from hf_tpu_ext.report.metrics import CLASSES_PER_DECADE


def test_phases_add_up_to_the_time_that_passed(monkeypatch):
    times = iter([0, 1, 3, 7, 15, 31, 63, 127])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    clock = PhaseClock()
    clock.enter("data")
    with clock.phase("save"), clock.phase("read"):
        pass
    assert clock.copy_seconds() == {"data": 1 + 16, "save": 2 + 8, "read": 4}
    clock.enter("step")
    clock.enter(None)
    assert clock.seconds == {"data": 1 + 16 + 32, "save": 2 + 8, "read": 4, "step": 64}


def test_a_phase_that_fails_ends():
    clock = PhaseClock()
    clock.enter("other")
    with pytest.raises(KeyError), clock.phase("eval"):
        raise KeyError
    assert clock.enter(None) == "other"


def test_a_clock_that_stands_takes_nothing():
    compiled = iter((1.0, 3.0, 4.0))
    marks = iter((1, 2, 3, 3, 3, 3))
    clock = PhaseClock(lambda: next(marks), lambda: next(compiled))
    clock.enter(None)
    clock.enter(None)
    assert clock.seconds.total() == 0
    with clock.phase("eval"):
        pass
    assert clock.enter("step") is None


def test_time_is_counted_as_another_phase():
    """What compiles, here 2 seconds, may be code of the user's in whatever phase is under way."""
    compiled, marks = iter((5.0, 7.0)), iter((1, 1, 2))
    clock = PhaseClock(lambda: next(marks), lambda: next(compiled))
    clock.enter("step")
    clock.enter(None)
    assert clock.seconds["compile"] == 2.0 and clock.seconds["step"] == pytest.approx(-2.0, abs=0.5)
    for to in ("replay", "replay", "step"):
        total = clock.seconds.total()
        clock.rename("step", to)
        assert clock.seconds.total() == pytest.approx(total)
    assert "step" not in clock.seconds or clock.seconds["step"] == 0
    assert clock.seconds["replay"] < -1


@pytest.mark.parametrize("seconds", [1e-6, 0.0123, 0.99, 1.0, 3.7, 4000.0])
def test_class_of_a_time(seconds):
    number = class_of(seconds)
    assert 10 ** (number / CLASSES_PER_DECADE) <= seconds * (1 + 1e-9)
    assert seconds < 10 ** ((number + 1) / CLASSES_PER_DECADE)


IDS = torch.ones(2, 3, dtype=torch.long)
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


@pytest.mark.parametrize(
    ("batch", "tokens", "padded"),
    [
        ({"input_ids": IDS, "attention_mask": MASK}, 3, 6),
        ({"input_ids": IDS}, 6, 6),
        # Not one entry for each token.
        ({"input_ids": IDS, "attention_mask": torch.zeros(2, 1, 3, 3)}, 6, 6),
    ],
)
def test_tokens_of_a_batch(batch, tokens, padded):
    status = StepStatus(CPUBackend("a test"), lambda: "step")
    status.on_train_begin(None, None, None)
    for _ in range(2):
        status.on_step_begin(None, None, None)
        status.count(batch)
        time.sleep(0.01)
        status.on_step_end(None, None, None)
        # The log has all batches since the one before, whatever was saved.
        status.on_save(None, None, None)
    logs = status.take_speed()
    (count,) = status.batches.values()
    assert (count.batches, count.tokens, count.padded_tokens) == (2, 2 * tokens, 2 * padded)
    assert logs["padded_tokens_per_second"] / logs["tokens_per_second"] == pytest.approx(padded / tokens, rel=1e-3)
    assert logs["padded_tokens_per_second"] * logs["step_time"] == pytest.approx(padded, rel=1e-3)
    assert status.take_speed() == {}, "no step since"
    # What comes after the last log is of the run as well.
    status.count(batch)
    status.on_train_end(None, None, None)
    assert list(status.batches.values()) == [(3, 3 * tokens, 3 * padded)]


def test_batches_without_tokens_are_timed_only():
    status = StepStatus(CPUBackend("a test"), lambda: "step")
    status.on_train_begin(None, None, None)
    status.on_step_begin(None, None, None)
    status.count({"pixel_values": torch.ones(2, 3, 4, 4)})
    status.on_step_end(None, None, None)
    logs = status.take_speed()
    assert logs["step_time"] > 0 and not any("tokens" in name for name in logs)


def test_memory_of_the_process():
    held = torch.ones(64 * 2**20 // 4)
    assert CPUBackend("a test").peak_memory() >= held.nbytes
