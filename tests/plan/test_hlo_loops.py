from pathlib import Path

import pytest

from hf_tpu_ext.plan.hlo import parse_module
from hf_tpu_ext.plan.hlo_loops import count_trips


DATA = Path(__file__).parent / "data"


def turns(text):
    module = parse_module(text)
    return [
        count_trips(module, name, line)
        for name, lines in module.computations.items()
        for line in lines.values()
        if line.opcode == "while"
    ]


def loop(start, condition, body, attributes=""):
    """A loop over `(counter, data)`."""
    return turns(
        f"""\
HloModule m

%condition (t: (s32[], f32[8])) -> pred[] {{
  %t = (s32[], f32[8]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %n = s32[] constant(28)
  {condition}
}}

%body (b: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %b = (s32[], f32[8]{{0}}) parameter(0)
  %j = s32[] get-tuple-element(%b), index=0
  %d = f32[8]{{0}} get-tuple-element(%b), index=1
  %one = s32[] constant(1)
  {body}
  ROOT %r = (s32[], f32[8]{{0}}) tuple(%next, %d)
}}

ENTRY %main (x: f32[8], y: s32[]) -> (s32[], f32[8]) {{
  %x = f32[8]{{0}} parameter(0)
  %y = s32[] parameter(1)
  %s = s32[] {start}
  %c = s32[] copy(%s)
  %init = (s32[], f32[8]{{0}}) tuple(%c, %x)
  ROOT %w = (s32[], f32[8]{{0}}) while(%init), condition=%condition, body=%body{attributes}
}}
"""
    )


UP, BELOW = "%next = s32[] add(%j, %one)", "ROOT %go = pred[] compare(%i, %n), direction=LT"

ENDED = f"""{BELOW.removeprefix("ROOT ")}
  %x = f32[8]{{0}} get-tuple-element(%t), index=1
  %done = pred[] custom-call(%x)
  %not = pred[] not(%done)
  ROOT %both = pred[] and(%go, %not)"""


@pytest.mark.parametrize(
    ("start", "condition", "body", "expected"),
    [
        ("constant(0)", BELOW, UP, 28),
        ("constant(3)", BELOW, UP, 25),
        ("constant(30)", BELOW, UP, 0),
        ("constant(0)", BELOW, "%two = s32[] constant(3)\n  %next = s32[] add(%j, %two)", 10),
        # Ended by data, or after 28 turns.
        ("constant(0)", ENDED, UP, 28),
        ("copy(%y)", ENDED, UP, None),
        ("copy(%y)", BELOW, UP, None),
        ("constant(0)", BELOW, "%next = s32[] custom-call(%j)", None),
        ("constant(0)", BELOW, "%next = s32[] copy(%j)", None),
        # Other forms.
        ("constant(0)", "ROOT %go = pred[] compare(%i, %n), direction=NE", UP, None),
        ("constant(0)", "ROOT %go = pred[] custom-call(%i, %n)", UP, None),
        ("constant(0)", BELOW, "%next = s32[] add(%one, %one)", None),
        ("constant(0)", BELOW, "%down = s32[] constant(-1)\n  %next = s32[] add(%j, %down)", None),
        ("constant(0)", BELOW, "%next = s32[] subtract(%j, %one)", None),
    ],
)
def test_counted_from_its_condition(start, condition, body, expected):
    assert loop(start, condition, body) == [expected]


def test_what_the_compiler_says_counts():
    assert loop("copy(%y)", BELOW, UP, ', backend_config={"known_trip_count":{"n":"36"}}') == [36]


@pytest.mark.parametrize(("name", "expected"), [("loop_v5e_1", [3, 3]), ("loop_fsdp_v5e_8", [3, 3])])
def test_loops_of_the_compiler_for_tpu(name, expected):
    assert turns((DATA / f"{name}.hlo").read_text(encoding="utf-8")) == expected
