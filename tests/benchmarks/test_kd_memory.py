import kd_memory
import pytest


def test_temporary_buffers_of_a_report():
    report = """\
BufferAssignment:
allocation 0: size 16777216, parameter 0, shape |f32[8192,512]| at ShapeIndex {}:
 value: <629 p0.1 @0> (size=16777216,offset=0): f32[8192,512]{1,0}
allocation 1: size 4194304, maybe-live-out:
allocation 212: size 4, constant:
allocation 213: size 170398008, preallocated-temp:
 value: <425 fusion @0> (size=33554432,offset=0): f32[1024,8192]{1,0}
"""
    assert kd_memory.temp_bytes(report) == 170398008
    assert kd_memory.temp_bytes("BufferAssignment:\nallocation 0: size 4, parameter 0:\n") == 0


@pytest.mark.slow
def test_written_out_is_the_same_loss(tmp_path, xla):
    kd_memory.prepare(tmp_path, 64, 4, vocab_size=512)
    losses = []
    for name in kd_memory.TRAINERS:
        trainer = kd_memory.make_trainer(tmp_path, 64, 2, name, cached=True, lora=False)
        losses.append(trainer.train().training_loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.fixture
def seconds():
    return {"plain": [(1.0, 2.0), (2.0, 4.0), (3.0, 6.0)], "cached": [(1.1, 2.0), (2.0, 4.4), (3.6, 7.2)]}


@pytest.fixture
def memory():
    rows = {"LoRA": (20, 100), "full fine-tuning": (30, 110)}
    by_row = {
        f"{form}: {name}": size * 2**20
        for form, sizes in rows.items()
        for name, size in zip(kd_memory.TRAINERS, sizes, strict=True)
    }
    return {8192: by_row, 32768: by_row}


def test_ratios_are_taken_within_a_round(seconds):
    assert kd_memory.ratios(seconds) == pytest.approx((1.1, 1.1))


def test_tables(memory, seconds):
    tables = kd_memory.make_tables(memory, seconds)
    assert "| LoRA: written out | 100 MiB | 100 MiB |\n| LoRA: ratio | 0.200 | 0.200 |" in tables
    assert "| with a cached teacher | 2.000 | 4.400 |\n| ratio | 1.10 | 1.10 |" in tables


def test_promises_are_checked(memory, seconds):
    kd_memory.check(memory, seconds)
    with pytest.raises(SystemExit, match="1.30 of the time of the plain one"):
        kd_memory.check(memory, {**seconds, "cached": [(1.3, 2.0), (2.6, 4.4), (3.9, 7.2)]})
    memory[32768]["LoRA: written out"] = 70 * 2**20
    with pytest.raises(SystemExit, match="0.286 of the written-out memory"):
        kd_memory.check(memory, seconds)
