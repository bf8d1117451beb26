"""What a trainer refuses with torch_tpu is accepted as the message says. Nothing here needs torch_tpu."""

from types import SimpleNamespace

import pytest
import torch
from fixes import assert_fixes, refusal

from hf_tpu_ext import TPUSFTConfig
from hf_tpu_ext.trainers.checks.field_answers import Place
from hf_tpu_ext.trainers.checks.fields import adapt
from hf_tpu_ext.trainers.run.batches import BatchesMixin
from hf_tpu_ext.trainers.run.eager_steps import check_split
from hf_tpu_ext.trainers.sft.distillation import DistillationMixin


LEAVE_OUT = "eave it out"


def test_fsdp_of_upstream_with_torch_tpu(runs):
    def check(**config):
        adapt(runs.config(TPUSFTConfig, **config), Place("tpu", traces_steps=False))

    assert_fixes(check, dict(fsdp="full_shard"), "Leave it out, and set mesh='fsdp'")


@pytest.mark.parametrize(
    "setting", [dict(even_batches=False), dict(dispatch_batches=True), dict(split_batches=True)], ids=str
)
def test_loader_with_torch_tpu(runs, setting):
    place = Place("tpu", traces_steps=False, processes=2)
    assert_fixes(lambda **config: adapt(runs.config(accelerator_config=config), place), setting, LEAVE_OUT)


@pytest.mark.parametrize(
    ("settings", "given", "fixes"),
    [
        (dict(optim="sgd"), {}, ["Set optim='adamw_torch_fused'", "set mesh='data'"]),
        ({}, dict(optimizer_cls_and_kwargs=("a class", {})), ["Leave it out", "set mesh='data'"]),
        ({}, dict(optimizers=("an optimizer", None)), ["Leave it out", "set mesh='data'"]),
        (dict(ema_decay=0.9), {}, ["Leave it out", "set mesh='data'"]),
        (dict(show_samples=2), {}, ["Leave it out", "set mesh='data'"]),
        (dict(predict_with_generate=True), {}, ["Leave it out", "set mesh='data'"]),
        (dict(kd_teacher="teacher"), {}, ["Leave it out", "set mesh='data'"]),
        (dict(kd_cache="cache"), {}, ["Leave it out", "set mesh='data'"]),
        (dict(qat_weight_dtype="int4"), {}, ["Leave it out", "set mesh='data'"]),
        (dict(save_on_each_node=True), {}, ["Leave it out", "set mesh='data'"]),
    ],
    ids=str,
)
def test_weights_in_parts_with_torch_tpu(runs, settings, given, fixes):
    def check(**config):
        given_left = {name: config.pop(name) for name in given if name in config}
        place = Place("tpu", traces_steps=False, processes=2, splits_weights=config["mesh"] == "fsdp")
        adapt(runs.config(TPUSFTConfig, **config), place, given_left)

    assert_fixes(check, {"mesh": "fsdp", **settings, **given}, *fixes)


@pytest.mark.parametrize("compile_step", ["layers", "off"])
def test_a_step_that_is_not_compiled_whole_is_not_replayed(runs, compile_step):
    place = Place("tpu", traces_steps=False)
    (line,) = adapt(runs.config(TPUSFTConfig, step_replay=True, compile_step=compile_step), place).changes
    assert (
        line == f"step_replay has no effect on training steps: compile_step='{compile_step}' compiles none as a whole"
    )
    assert not adapt(runs.config(TPUSFTConfig, step_replay=True), place).changes


def test_weights_in_parts_are_not_replayed(runs):
    place = Place("tpu", traces_steps=False, processes=2, splits_weights=True)
    run = adapt(runs.config(TPUSFTConfig, step_replay=True, mesh="fsdp"), place)
    assert run.step_replay is False
    assert "step_replay has no effect: weights in parts are put together between programs" in run.changes
    assert not any("step_replay" in line for line in adapt(runs.config(TPUSFTConfig, mesh="fsdp"), place).changes)


def test_values_are_shown_as_they_are_typed(runs):
    place = Place("tpu", traces_steps=False, processes=2, splits_weights=True)
    with pytest.raises(ValueError, match="^optim='sgd' does not work with mesh='fsdp'"):
        adapt(runs.config(TPUSFTConfig, mesh="fsdp", optim="sgd"), place)


def test_text_that_is_generated_by_weights_in_parts(runs):
    def check(mesh):
        if mesh == "fsdp":
            check_split(mesh, True, False)

    assert_fixes(check, {"mesh": "fsdp"}, "Set mesh='data'")


def test_a_teachers_cache_in_several_processes(runs):
    def check(num_chips, **settings):
        trainer = SimpleNamespace(
            args=runs.config(TPUSFTConfig, **settings),
            backend=SimpleNamespace(
                unknown_upstream=True, processes=SimpleNamespace(count=num_chips, own_rows=num_chips > 1)
            ),
            _check_loss=lambda: None,
            _open_cache=lambda: None,
        )
        DistillationMixin._prepare_teacher(trainer)

    settings = {"num_chips": 2, "kd_cache": "directory"}
    assert_fixes(check, settings, "Set num_chips=1")
    assert "or set kd_teacher=MODEL and leave kd_cache out" in refusal(check, settings)


def test_processes_with_batches_of_different_sizes():
    """The other of two processes has 4 rows, and this one what is left of its data."""

    def check(rows):
        trainer = SimpleNamespace(
            lengths=[],
            backend=SimpleNamespace(
                processes=SimpleNamespace(row_shards=2, most=lambda own: list(map(max, own, [4, -4, 0])))
            ),
        )
        return BatchesMixin._agree_on_shape(trainer, {"input_ids": torch.zeros(rows, 8)})

    message = refusal(check, {"rows": 3})
    assert "Processes have batches of 3 to 4 rows for the same step, and this one of 3" in message
    assert "Set dataloader_drop_last=True to drop last batches" in message
    # Without the last one.
    assert len(check(4)["input_ids"]) == 4
