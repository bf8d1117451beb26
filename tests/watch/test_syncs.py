"""What reads the device between two logs, or runs on the host, is named by its line."""

import re

import pytest
import torch
from planted import causes, collate_then, line_of
from transformers import TrainerCallback, YolosConfig, YolosForObjectDetection

from hf_tpu_ext import TPUTrainer


class ReadsInStep(TPUTrainer):
    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        if loss > 100:
            raise ValueError
        return loss


class ReadsAfterStep(TrainerCallback):
    def on_step_end(self, args, state, control, model, **kwargs):
        self.norm = model.head.weight.norm().item()


class PrintsAfterStep(TrainerCallback):
    def on_step_end(self, args, state, control, model, **kwargs):
        self.text = repr(model.head.weight)


@pytest.mark.parametrize(
    "callback, text, what",
    [(ReadsAfterStep, ".item()", ".item()"), (PrintsAfterStep, "repr(", "print(tensor)")],
    ids=["item", "print"],
)
def test_a_callback_that_reads(train, lines, capsys, callback, text, what):
    trainer = train(callbacks=[callback()])
    named = f"`{what}` syncs device to host [{line_of(callback, text)}]"
    (line,) = lines()
    # Counted at the first log, found in the two steps after it.
    assert line.startswith(f"Steps 3 to 4: {named}, 2 times in 2 steps. ") and "trainer.backend.fetch" in line
    assert f"Device-to-host syncs outside this package: 8 until step 8. {named}" in capsys.readouterr().out
    assert trainer.watch.recompiles == 0
    assert trainer.sync_monitor.syncs and trainer.steps.compiled is None


class ReadsInOnLog(TrainerCallback):
    def on_log(self, args, state, control, model, **kwargs):
        self.norms = [model.head.weight.norm(order).item() for order in (2, 2)]


class ReadsInLog(TPUTrainer):
    def log(self, logs, *args):
        self.norms = [self.model.head.weight.norm(order).item() for order in (2, 2)]
        super().log(logs, *args)


@pytest.mark.parametrize(
    "code, settings", [(ReadsInOnLog, {"callbacks": [ReadsInOnLog()]}), (ReadsInLog, {"cls": ReadsInLog})]
)
def test_code_that_reads_in_a_log_is_told_to_do_it_once(train, lines, code, settings):
    train(**settings, logging_steps=1)
    (line,) = lines()
    assert f"[{line_of(code, '.item()')}]" in line and "fetch all that you log in one transfer" in line


def test_a_library_that_reads_is_named_with_the_line_that_calls_it(train, lines):
    class Compares(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            torch.testing.assert_close(model.head.bias, model.head.bias.clone())

    train(callbacks=[Compares()])
    (line,) = lines()
    place = rf"\[torch/testing/_comparison.py:\d+, called at {line_of(Compares, 'assert_close')}\], 2 times"
    assert re.search(rf"`bool\(tensor\)` syncs device to host {place}", line)


def test_a_loss_that_reads(train, lines):
    train(ReadsInStep)
    assert f"`bool(tensor)` syncs device to host within the step [{line_of(ReadsInStep, 'loss > 100')}]" in lines()[0]


def test_a_read_in_every_tenth_step_is_found(train, lines):
    class Reads(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            if state.global_step % 10 == 0:
                self.norm = model.head.weight.norm().item()

    train(callbacks=[Reads()], max_steps=24, logging_steps=24)
    (line,) = lines()
    assert f"`.item()` syncs device to host [{line_of(Reads, '.item()')}], once in" in line


def test_a_step_that_is_cut_in_two(train):
    class Cuts(TPUTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            if self.state.global_step >= 4:
                self.backend.end_step()
            return loss

    ((step, cause),) = causes(train(Cuts))
    assert step == 5 and cause.startswith(f"{line_of(Cuts, 'end_step')} cuts the graph within the step")


def test_the_batch_explains_a_step_that_is_cut_in_two_as_well(train):
    trainer = train(ReadsInStep, collator=collate_then(5, lambda batch: batch.update(labels=batch["labels"].int())))
    assert (5, "`labels` was int64, is int32") in [(step, cause.partition(" (")[0]) for step, cause in causes(trainer)]


def test_an_operator_on_the_host(train, lines):
    class Falls(TPUTrainer):
        def compute_loss(self, model, *args, **kwargs):
            loss = super().compute_loss(model, *args, **kwargs)
            return loss + 0 * torch.histc(model.head.weight.detach()).sum()

    train(Falls)
    (line,) = lines()
    assert f"CPU fallback of `aten::histc` [{line_of(Falls, 'histc')}], 2 times in 2 steps" in line


def test_an_operator_on_the_host_in_the_backward_pass(train, lines):
    """It has no line: that of the call is accelerate's, for all of them."""

    class Falls(TPUTrainer):
        def compute_loss(self, model, *args, **kwargs):
            loss = super().compute_loss(model, *args, **kwargs)
            image = model.head.weight[:8, :8][None, None]
            return loss + torch.nn.functional.interpolate(image, size=(16, 16), mode="bilinear").mean()

    train(Falls)
    (line,) = lines()
    operator = "aten::upsample_bilinear2d"
    assert f"CPU fallback of `{operator}_backward` in the backward pass, 2 times in 2 steps" in line
    assert line.endswith(f"It is the gradient of `{operator}`, wherever the model computes that.")


@pytest.mark.ci
def test_a_model_of_a_library_that_reads(train, lines):
    """YOLOS matches boxes with labels on the host, and their numbers are those of the images."""
    sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=3)
    sizes |= dict(image_size=[16, 16], patch_size=8, num_detection_tokens=4)
    model = YolosForObjectDetection(YolosConfig(**sizes))
    rows = [
        {
            "pixel_values": torch.ones(3, 16, 16),
            "class_labels": torch.ones(n, dtype=torch.int64),
            "boxes": torch.ones(n, 4) / 2,
        }
        for n in (1, 2, 3) * 8
    ]

    def collate(rows):
        labels = [{key: row[key] for key in ("class_labels", "boxes")} for row in rows]
        return {"pixel_values": torch.stack([row["pixel_values"] for row in rows]), "labels": labels}

    train(collator=collate, model=model, train_dataset=rows, remove_unused_columns=False, max_steps=4, logging_steps=2)
    place, explained = (
        r"transformers/loss/loss_for_object_detection.py:\d+",
        "It is code of transformers that needs values on the host",
    )
    again = [line for line in lines() if "recompilation of the training step" in line]
    cause = rf": tensors in `labels` have other shapes, and {place} reads within the step\. {explained}"
    assert again and all(re.search(cause, line) for line in again)
    (copied,) = (line for line in lines() if "`.cpu()`" in line)
    assert re.search(rf"`.cpu\(\)` syncs device to host within the step \[{place}\].* {explained}", copied)


def test_nothing_is_watched_after_an_error(train):
    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            model.head.weight.sum().item()
            if state.global_step == 4:
                raise RuntimeError("planted")

    trainer = train(callbacks=[Fails()], start=False)
    with pytest.raises(RuntimeError, match="planted"):
        trainer.train()
    assert torch.overrides._get_current_function_mode() is None
    assert trainer.watch.step is None
