from pathlib import Path

import pytest

from hf_tpu_ext.plan.hlo import parse_module
from hf_tpu_ext.plan.hlo_loops import MAX_TRIPS, count_trips


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
  %zero = s32[] constant(0)
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
        ("constant(27)", "ROOT %go = pred[] compare(%i, %zero), direction=GE", "%next = s32[] subtract(%j, %one)", 28),
        ("constant(0)", "ROOT %go = pred[] compare(%i, %n), direction=NE", UP, 28),
        # Ended by data, or after 28 turns.
        ("constant(0)", ENDED, UP, 28),
        ("copy(%y)", ENDED, UP, None),
        ("copy(%y)", BELOW, UP, None),
        ("constant(0)", BELOW, "%next = s32[] custom-call(%j)", None),
        ("constant(0)", BELOW, "%next = s32[] copy(%j)", None),
    ],
)
def test_counted_from_its_condition(start, condition, body, expected):
    assert loop(start, condition, body) == [expected]


def test_what_the_compiler_says_counts():
    assert loop("copy(%y)", BELOW, UP, ', backend_config={"known_trip_count":{"n":"36"}}') == [36]


@pytest.mark.parametrize(("name", "expected"), [("loop_v5e_1", [3, 3]), ("loop_fsdp_v5e_8", [3, 3])])
def test_loops_of_the_compiler_for_tpu(name, expected):
    assert turns((DATA / f"{name}.hlo").read_text(encoding="utf-8")) == expected


def test_a_counter_of_64_bits_in_two_halves():
    """Chips have no integers of 64 bits; the compiler splits the counter, and the carry decides about the upper half."""
    text = """\
HloModule m

%condition (t: (u32[], u32[], f32[4])) -> pred[] {
  %zero.s = s32[]{:T(128)} constant(0)
  %zero.u = u32[]{:T(128)} constant(0)
  %four = u32[]{:T(128)} constant(4)
  %t = (u32[]{:T(128)}, u32[]{:T(128)}, f32[4]{0:T(128)}) parameter(0)
  %high = u32[]{:T(128)} get-tuple-element(%t), index=1
  %signed = s32[]{:T(128)S(6)} bitcast-convert(%high)
  %negative = pred[]{:T(512)S(6)} compare(%signed, %zero.s), direction=LT
  %none = pred[]{:T(512)S(6)} compare(%high, %zero.u), direction=EQ
  %low = u32[]{:T(128)} get-tuple-element(%t), index=0
  %below = pred[]{:T(512)S(6)} compare(%low, %four), direction=LT
  %and.80 = pred[]{:T(512)S(6)} and(%none, %below)
  ROOT %or.51 = pred[]{:T(512)} or(%negative, %and.80)
}

%body (b: (u32[], u32[], f32[4])) -> (u32[], u32[], f32[4]) {
  %b = (u32[]{:T(128)}, u32[]{:T(128)}, f32[4]{0:T(128)}) parameter(0)
  %low.1 = u32[]{:T(128)} get-tuple-element(%b), index=0
  %high.1 = u32[]{:T(128)} get-tuple-element(%b), index=1
  %data = f32[4]{0:T(128)} get-tuple-element(%b), index=2
  %one = u32[]{:T(128)} constant(1)
  %sum = u32[]{:T(128)S(6)} add(%low.1, %one)
  %carry = pred[]{:T(512)S(6)} compare(%sum, %one), direction=LT
  %higher = u32[]{:T(128)S(6)} add(%high.1, %one)
  %select.112 = u32[]{:T(128)} select(%carry, %higher, %high.1)
  %copy.270 = u32[]{:T(128)} copy(%sum)
  ROOT %r = (u32[]{:T(128)}, u32[]{:T(128)}, f32[4]{0:T(128)}) tuple(%copy.270, %select.112, %data)
}

ENTRY %main (x: f32[4]) -> (u32[], u32[], f32[4]) {
  %x = f32[4]{0:T(128)} parameter(0)
  %start.low = u32[]{:T(128)} constant(START)
  %start.high = u32[]{:T(128)} constant(HIGH)
  %init = (u32[]{:T(128)}, u32[]{:T(128)}, f32[4]{0:T(128)}) tuple(%start.low, %start.high, %x)
  ROOT %w = (u32[]{:T(128)}, u32[]{:T(128)}, f32[4]{0:T(128)}) while(%init), condition=%condition, body=%body
}
"""
    assert turns(text.replace("START", "0").replace("HIGH", "0")) == [4]
    # -2, with its upper half all ones: two turns more.
    assert turns(text.replace("START", str(2**32 - 2)).replace("HIGH", str(2**32 - 1))) == [6]


def test_too_many_turns_are_not_counted():
    condition = f"%m = s32[] constant({MAX_TRIPS * 2})\n  ROOT %go = pred[] compare(%i, %m), direction=LT"
    assert loop("constant(0)", condition, UP) == [None]
