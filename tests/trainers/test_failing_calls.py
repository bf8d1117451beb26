"""Private calls of torch_xla that fail in a run: it goes on with traced steps, or ends with its cause and a checkpoint."""

import pytest
import torch_xla

from hf_tpu_ext import TPUSFTConfig
from hf_tpu_ext.backends.compiled_function import StateLost


CONFIG = {"max_steps": 6, "logging_steps": 2, "gradient_accumulation_steps": 2, "gradient_checkpointing": False}


def plant(monkeypatch, name, time, before=True):
    """Have a call fail from the time on that it is made for so many times: before it does anything, or after."""
    call, times = getattr(torch_xla._XLAC, name), []

    def fail(*args):
        times.append(name)
        if len(times) >= time and before:
            raise RuntimeError("INTERNAL: on purpose")
        result = call(*args)
        if len(times) >= time:
            raise RuntimeError("INTERNAL: on purpose")
        return result

    monkeypatch.setattr(torch_xla._XLAC, name, fail)
    return times


@pytest.fixture(scope="module")
def whole():
    return []


@pytest.mark.parametrize(
    "time", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(10, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "name",
    [
        *(
            pytest.param(name, marks=pytest.mark.ci)
            for name in ("_set_buffer_donation", "_get_graph_hash", "_xla_warm_up_cache")
        ),
        "_run_cached_graph",
    ],
)
def test_a_run_goes_on_with_traced_steps(runs, whole, same_logs, monkeypatch, caplog, name, time):
    if not whole:
        whole.append(runs.ours(config_cls=TPUSFTConfig, **CONFIG))
    caplog.clear()
    trainer = runs.ours(train=False, config_cls=TPUSFTConfig, **CONFIG)
    times = plant(monkeypatch, name, time)
    trainer.train()
    same_logs(trainer, whole[0])
    assert times
    said = [record.message for record in caplog.records if "Step replay is off" in record.message]
    assert len(said) == (len(times) >= time)
    assert all("INTERNAL: on purpose" in line and "please report this line" in line for line in said)


@pytest.mark.parametrize("saves", [False, pytest.param(True, marks=pytest.mark.ci)])
def test_a_step_that_lost_its_weights_names_the_checkpoint(runs, monkeypatch, saves):
    trainer = runs.ours(
        train=False, config_cls=TPUSFTConfig, **CONFIG, save_strategy="steps" if saves else "no", save_steps=2
    )
    plant(monkeypatch, "_run_cached_graph", 7, before=False)
    with pytest.raises(StateLost, match="INTERNAL: on purpose") as error:
        trainer.train()
    (note,) = error.value.__notes__
    if not saves:
        assert note.startswith("There is no checkpoint to resume from")
        return
    newest = runs.output_dir / "checkpoint-2"
    assert f"Resume from {newest}: trainer.train(resume_from_checkpoint={str(newest)!r})" in note
    monkeypatch.undo()
    # As the note says, in the process that failed.
    again = runs.ours(train=False, config_cls=TPUSFTConfig, **CONFIG, save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=str(newest))
    assert again.state.global_step == 6


@pytest.mark.parametrize("time", [pytest.param(2, marks=pytest.mark.ci), 7], ids=["traced", "replayed"])
def test_layers_that_run_as_a_loop_are_taken_apart_where_their_weights_are_lost(runs, two_layers, monkeypatch, time):
    """Each gets its part of weights that are gone; the cause is told, and the process can train on."""
    config = {**CONFIG, "gradient_checkpointing": True, "scan_layers": "on"}
    trainer = runs.ours(train=False, config_cls=TPUSFTConfig, **config)
    with monkeypatch.context() as patch:
        plant(patch, "_run_cached_graph", time, before=False)
        with pytest.raises(StateLost, match="INTERNAL: on purpose"):
            trainer.train()
    weight = trainer.model.model.layers[0].self_attn.q_proj.weight
    assert trainer.backend.fetch(weight).shape == (64, 32)
    assert runs.ours(config_cls=TPUSFTConfig, **config).state.global_step == 6
