import subprocess
import sys
from pathlib import Path

import pytest
from parts import cycles_by_part

from hf_tpu_ext.examples.tiny import make_model


def program(*lines, before=""):
    return cycles_by_part(
        "HloModule m\n\n"
        + before
        + "ENTRY %main (p: f32[8]) -> f32[8] {\n"
        + "".join(f"  {line}\n" for line in lines)
        + "}\n"
    )


def estimate(cycles):
    return f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}","iteration_bounds":["1"]}}}}'


def test_cycles_are_the_compilers_by_kind_and_for_each_turn_of_a_loop():
    fusions = {
        "products": ("%made = f32[8] dot(%x, %x), lhs_contracting_dims={}, rhs_contracting_dims={}", "%products"),
        "layout": ("%made = f32[8] transpose(%x), dimensions={0}", "%layout"),
        "norms": ("%made = f32[8] reduce(%x, %x), dimensions={0}, to_apply=%add", "%norms"),
        "zeros": ("%made = f32[8] broadcast(%x), dimensions={}", "%zeros"),
    }
    before = "".join(
        f"{name} (x: f32[8]) -> f32[8] {{\n  %x = f32[8] parameter(0)\n  ROOT {line}\n}}\n\n"
        for line, name in fusions.values()
    )
    before += (
        "%body (y: f32[8]) -> f32[8] {\n  %y = f32[8] parameter(0)\n"
        f"  ROOT %turn = f32[8] fusion(%y), kind=kLoop, calls=%products, {estimate(1000)}\n}}\n\n"
        "%goes_on (z: f32[8]) -> pred[] {\n  %z = f32[8] parameter(0)\n  ROOT %yes = pred[] constant(true)\n}\n\n"
    )
    cycles = program(
        "%p = f32[8] parameter(0)",
        '%loop = f32[8] while(%p), condition=%goes_on, body=%body, backend_config={"known_trip_count":{"n":"3"}}',
        *(
            f"%{name}.1 = f32[8] fusion(%loop), kind=kLoop, calls={called}, {estimate(cycles)}"
            for cycles, (name, (_, called)) in zip((7, 20, 300, 4), fusions.items(), strict=True)
        ),
        f"ROOT %sum = f32[8] add(%loop, %zeros.1), {estimate(50)}",
        before=before,
    )
    assert cycles == {
        "matrix products": 3 * 1000 + 7,
        "reductions": 300,
        "elementwise": 50,
        "copies and layout": 20,
        "broadcasts": 4,
    }


def named(*scopes):
    return f'metadata={{op_type="aten__mm" op_name="{"/".join(scopes)}" source_file="m.py" source_line=1}}'


def test_cycles_are_by_part_of_the_model_where_the_program_names_it():
    dot = "dot(%x, %x), lhs_contracting_dims={}, rhs_contracting_dims={}"
    fused = {
        # A product of 8 x 8, to which one of 8 is added.
        "base": [
            f"%large = f32[8,8] {dot}, {named('[layer].1', 'aten__mm')}",
            f"ROOT %small = f32[8] {dot}, {named('[layer].1', '[adapters].2', 'aten__mm')}",
        ],
        "adapter": [f"ROOT %small.1 = f32[8] {dot}, {named('[layer].1', '[adapters].2', 'aten__mm')}"],
        "norm": [
            f"%one = f32[8] add(%x, %x), {named('[layer].1', 'aten__add')}",
            f"%two = f32[8] rsqrt(%x), {named('[rope and norms].3', 'aten__rsqrt')}",
            f"ROOT %three = f32[8] multiply(%two, %x), {named('[rope and norms].3', 'aten__mul')}",
        ],
        "layout": [f"ROOT %turned = f32[8] transpose(%x), dimensions={{0}}, {named('[attention].4', 'aten__t')}"],
    }
    before = "".join(
        f"%{name} (x: f32[8]) -> f32[8] {{\n  %x = f32[8] parameter(0)\n"
        + "".join(f"  {line}\n" for line in lines)
        + "}\n\n"
        for name, lines in fused.items()
    )
    cycles = program(
        "%p = f32[8] parameter(0)",
        *(
            f"%{name}.1 = f32[8] fusion(%p), kind=kLoop, calls=%{name}, {estimate(cycles)}"
            for name, cycles in zip(fused, (1000, 200, 30, 4), strict=True)
        ),
        f"%soft = f32[8] exponential(%p), {named('jit(step)', 'transpose(jvp([attention]))', 'exp')}, {estimate(500)}",
        f"ROOT %sum = f32[8] add(%p, %p), {named('optimizer', 'aten__add')}, {estimate(60)}",
        before=before,
    )
    assert cycles == {
        "matrix products": 1000,
        "attention": 500,
        "adapters": 200,
        "elementwise": 60,
        "rope and norms": 30,
        "copies and layout": 4,
    }


@pytest.mark.slow
def test_what_a_plan_traces_is_named(tmp_path):
    model = make_model(tmp_path / "model")
    argv = ["plan", "--topology", "v5e-1", "--seq_lengths", "64", "--max_length", "64", "--hlo", str(tmp_path)]
    argv += ["--model_name_or_path", str(model), "--use_peft", "true", "--output_dir", str(tmp_path / "run")]
    script = Path(__file__).with_name("trace_parts.py")
    done = subprocess.run([sys.executable, script, *argv], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    (program,) = tmp_path.glob("training_step_*.txt")
    found = cycles_by_part(program.read_text(encoding="utf-8"))
    assert {"attention", "rope and norms", "adapters", "head", "optimizer"} <= found.keys()
