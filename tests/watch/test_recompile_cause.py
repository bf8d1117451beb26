"""Which difference between two steps is named, and which line of a call."""

import os

import pytest
import torch
import transformers

from hf_tpu_ext.backends.compiled_function import ShapeAndDtype
from hf_tpu_ext.backends.insight import Operation, SourceLine
from hf_tpu_ext.backends.xla import tensors
from hf_tpu_ext.watch.recompile_cause import compare_dependencies, compare_operations, count_differences
from hf_tpu_ext.watch.source_lines import describe_line, library_line, own_line


LABELS = ShapeAndDtype((4, 8), torch.int64)


def dependencies(batch=None, optimizer=None, change=None):
    return {"batch": batch or {}, "optimizer": optimizer or {}, "change": {"last": change}}


@pytest.mark.parametrize(
    "before, after, what",
    [
        (
            {"batch": {"labels": LABELS}},
            {"batch": {}},
            "`labels` was in the batch, and is missing (the data collator)",
        ),
        (
            {"batch": {"labels": "3"}},
            {"batch": {"labels": LABELS}},
            "`labels` was the value 3, is int64 (the data collator)",
        ),
        ({"optimizer": {"class": "SGD"}}, {"optimizer": {"class": "AdamW"}}, "the optimizer was SGD, is AdamW"),
        ({}, {"change": "`model.norm.eps` was removed"}, "`model.norm.eps` was removed"),
    ],
)
def test_what_has_changed(before, after, what):
    assert compare_dependencies(dependencies(**before), dependencies(**after), "the data collator").what == what
    assert compare_dependencies(dependencies(**after), dependencies(**after), "the data collator") is None


def test_a_dtype_weighs_more_than_a_value_and_than_the_optimizer():
    before = dependencies({"n": "1", "labels": LABELS}, {"class": "SGD"})
    after = dependencies({"n": "2", "labels": LABELS._replace(dtype=torch.int32)}, {"class": "AdamW"})
    assert compare_dependencies(before, after, "me").what.startswith("`labels` was int64, is int32 (me)")
    assert count_differences(before, after) == 3


LINE = SourceLine("/home/somebody/my_loss.py", 12)


def program(*numbers, name="constant", shape="f32[]", place=None):
    return [Operation(name, shape, number, "", place) for number in numbers]


def test_the_first_operation_that_differs():
    before, after = program("1", "2", "3"), program("1", "5", "4", place=LINE)
    assert compare_operations(before, after).what == "a scalar of the graph was 2, is 5 [my_loss.py:12]"
    # The lines are not noted at every step.
    assert compare_operations(before, program("1", "2", "3", place=LINE)) is None


@pytest.mark.parametrize("file", [torch._tensor.__file__, tensors.__file__], ids=["pytorch", "a mode of this package"])
def test_a_line_that_hands_an_operator_on_is_not_named(file):
    line = SourceLine(file, 45)
    before, after = (
        [*program(number, place=line), Operation("power", "f32[]", "", "aten::pow", line, structure=index)]
        for index, number in enumerate(("1", "1.05"), start=1)
    )
    words = "a scalar of the graph was 1, is 1.05 (an argument of `aten::pow`)"
    assert compare_operations(before, after).what == words


def test_an_operation_more_and_one_less():
    before, more = program("1"), program("1", "2", place=LINE)
    assert (
        compare_operations(before, more).what == "the step computes `constant` of f32[], and did not [my_loss.py:12]"
    )
    assert compare_operations(more, before).what.startswith("the step computed `constant` of f32[], and does not")


OURS = SourceLine(os.path.join(os.path.dirname(transformers.__file__), "trainer.py"), 5, "train")
TORCH = SourceLine(os.path.join(os.path.dirname(torch.__file__), "_tensor.py"), 7, "item")
SCRIPT = SourceLine("/home/somebody/train.py", 3, "<module>")


def test_the_line_of_the_script_that_starts_the_run_is_not_the_one():
    assert own_line([TORCH, LINE, OURS, SCRIPT]) == LINE
    assert own_line([TORCH, OURS, SCRIPT]) is None
    assert own_line([TORCH, SCRIPT]) == SCRIPT
    assert library_line([TORCH, OURS, SCRIPT]) == OURS


@pytest.mark.parametrize(
    "file, words",
    [
        (LINE.file, "my_loss.py:12"),
        (OURS.file, "transformers/trainer.py:12"),
        ("/tmp/ipykernel_81/2713.py", "notebook cell:12"),
        ("<ipython-input-3-fe12>", "notebook cell:12"),
    ],
)
def test_lines_are_written_short(file, words):
    assert describe_line(SourceLine(file, 12)) == words
    assert own_line([SourceLine(file, 12)]) is not None or file == OURS.file
