"""
Programs in `data/` are what libtpu 0.0.21 made, for v5e, of the gradient of a toy with 3 checkpointed layers: `q = x @ w` in
8 heads of 64, scores `q q'`, `x + scores q`; 4 rows of 256 in bfloat16, with the layers in a loop. Once on one chip, and
once with the weights split over 8 chips with one row each. Metadata is cut off.
"""

from pathlib import Path

import pytest

from hf_tpu_ext.plan.hlo_cost import Exchange, measure_cost


DATA = Path(__file__).parent / "data"


def measure(name):
    return measure_cost((DATA / f"{name}.hlo").read_text(encoding="utf-8"))


def program(*lines, before=""):
    return measure_cost(
        f"""\
HloModule m

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%x, %y)
}}

{before}
ENTRY %main (p: f32[8]) -> f32[8] {{
"""
        + "".join(f"  {line}\n" for line in lines)
        + "}\n"
    )


def test_collectives_in_a_loop_count_for_each_turn():
    cost = measure("loop_fsdp_v5e_8")
    # A layer's weight is gathered for each pass, and its gradient reduced; each chip keeps an eighth.
    weight = 512 * 512 * 2
    assert cost.exchanges == [
        Exchange("all-gather", 6, 6 * weight, 6 * weight * 7 // 8),
        Exchange("reduce-scatter", 3, 3 * weight, 3 * weight * 7 // 8),
    ]
    assert cost.link_bytes == 9 * weight * 7 // 8
    assert cost.unknown == []


def estimate(cycles):
    return f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}","iteration_bounds":["1"]}}}}'


def test_cycles_are_the_compilers_for_each_turn_of_a_loop():
    before = (
        "%products (x: f32[8]) -> f32[8] {\n  %x = f32[8] parameter(0)\n"
        f"  ROOT %made = f32[8] add(%x, %x), {estimate(9)}\n}}\n\n"
        "%body (y: f32[8]) -> f32[8] {\n  %y = f32[8] parameter(0)\n"
        f"  ROOT %turn = f32[8] fusion(%y), kind=kLoop, calls=%products, {estimate(1000)}\n}}\n\n"
        "%goes_on (z: f32[8]) -> pred[] {\n  %z = f32[8] parameter(0)\n  ROOT %yes = pred[] constant(true)\n}\n\n"
    )
    cost = program(
        "%p = f32[8] parameter(0)",
        '%loop = f32[8] while(%p), condition=%goes_on, body=%body, backend_config={"known_trip_count":{"n":"3"}}',
        f"%again = f32[8] fusion(%loop), kind=kLoop, calls=%products, {estimate(7)}",
        f"ROOT %sum = f32[8] add(%loop, %again), {estimate(50)}",
        before=before,
    )
    # What is fused counts with the fusion.
    assert cost.cycles == 3 * 1000 + 7 + 50


def test_what_is_kept_on_the_chip_is_not_memory_traffic():
    loop = measure("loop_v5e_1")
    # At least: the weights and the input are read, the gradient of the weights is written.
    least = 2 * 3 * 512 * 512 * 2 + 4 * 256 * 512 * 2
    # The compiler's own analysis says 155 MB, most of it of tensors in the chip's vector memory.
    assert least <= loop.memory_bytes < 3 * least


def test_a_product_reads_its_factors_and_writes_its_result():
    cost = program(
        "%l = f32[3,8,4]{2,1,0} parameter(0)",
        "%r = f32[3,4,5]{2,1,0} parameter(1)",
        "ROOT %d = f32[3,8,5]{2,1,0} dot(%l, %r), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, "
        "rhs_contracting_dims={1}",
    )
    assert cost.memory_bytes == 4 * (3 * 8 * 4 + 3 * 4 * 5 + 3 * 8 * 5)


FUSED = """\
%fused (a: f32[28,64], b: s32[], c: f32[28,64], d: f32[1,64]) -> f32[28,64] {
  %a = f32[28,64]{1,0} parameter(0)
  %b = s32[] parameter(1)
  %c = f32[28,64]{1,0} parameter(2)
  %d = f32[1,64]{1,0:S(1)} parameter(3)
  %z = s32[] constant(0)
  %part = f32[1,64]{1,0} dynamic-slice(%a, %b, %z), dynamic_slice_sizes={1,64}
  %sum = f32[1,64]{1,0} add(%part, %d)
  ROOT %u = f32[28,64]{1,0} dynamic-update-slice(%c, %sum, %b, %z)
}
"""


def test_a_fusion_moves_the_parts_that_it_takes():
    cost = program(
        "%a = f32[28,64]{1,0} parameter(0)",
        "%b = s32[] parameter(1)",
        "%c = f32[28,64]{1,0} parameter(2)",
        "%d = f32[1,64]{1,0:S(1)} parameter(3)",
        "ROOT %f = f32[28,64]{1,0} fusion(%a, %b, %c, %d), kind=kLoop, calls=%fused",
        before=FUSED,
    )
    # A row read, a row written, and the index, for both.
    assert 2 * 256 <= cost.memory_bytes <= 2 * 256 + 8


VIEWED = """\
%view (a: f32[64,128]) -> f32[64,128] {
  %a = f32[64,128]{1,0} parameter(0)
  ROOT %b = f32[64,128]{1,0} bitcast(%a)
}
%fused (x: f32[8,128], w: f32[64,128]) -> f32[8,64] {
  %x = f32[8,128]{1,0:S(1)} parameter(0)
  %w = f32[64,128]{1,0} parameter(1)
  %v = f32[64,128]{1,0} fusion(%w), kind=kLoop, calls=%view
  ROOT %p = f32[8,64]{1,0:S(1)} convolution(%x, %v), dim_labels=bf_oi->bf
}
"""


def test_a_fusion_moves_what_it_takes_through_a_view():
    cost = program(
        "%x = f32[8,128]{1,0:S(1)} parameter(0)",
        "%w = f32[64,128]{1,0} parameter(1)",
        "ROOT %f = f32[8,64]{1,0:S(1)} fusion(%x, %w), kind=kOutput, calls=%fused",
        before=VIEWED,
    )
    assert cost.memory_bytes == 4 * 64 * 128


def test_asynchronous_copies_move_what_they_copy():
    cost = program(
        "%p = f32[512,512]{1,0:T(8,128)} parameter(0)",
        "%c = (f32[512,512]{1,0:T(8,128)S(1)}, f32[512,512]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%p)",
        "%cd = f32[512,512]{1,0:T(8,128)S(1)} copy-done(%c)",
        "%s = ((f32[512,512]{1,0:T(8,128)}), f32[128,512]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%p), "
        "slice={[0:128], [0:512]}",
        "ROOT %sd = f32[128,512]{1,0:T(8,128)S(1)} slice-done(%s)",
    )
    assert cost.memory_bytes == 4 * (512 * 512 + 128 * 512)


def test_asynchronous_exchanges_move_what_they_take_and_make():
    cost = program(
        "%p = f32[16]{0} parameter(0)",
        "%g = (f32[16]{0}, f32[64]{0}) all-gather-start(%p), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}",
        "%c = (f32[16]{0}, f32[16]{0:S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p), channel_id=2",
        "%r = f32[16]{0} all-reduce-start(%p), channel_id=3, replica_groups={{0,1,2,3}}, to_apply=%add",
        "ROOT %d = f32[64]{0} all-gather-done(%g)",
    )
    assert cost.memory_bytes == 4 * ((16 + 64) + 16 + (16 + 16))


BESIDE = """\
%async_collective_fusion.1 (x: f32[8,128], w: f32[64,128], s: f32[16], g: f32[64]) -> (f32[8,64], f32[16], f32[64]) {
  %x = f32[8,128]{1,0} parameter(0)
  %w = f32[64,128]{1,0} parameter(1)
  %p = f32[8,64]{1,0} convolution(%x, %w), dim_labels=bf_oi->bf
  %s = f32[16]{0} parameter(2)
  %g = f32[64]{0} parameter(3)
  %gathered = f32[64]{0} all-gather(%s), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %t = (f32[8,64]{1,0}, f32[16]{0}, f32[64]{0}, f32[64]{0}) tuple(%p, %s, %g, %gathered)
}
"""


def test_an_exchange_beside_a_product_is_none_of_what_the_product_moves():
    cost = program(
        "%x = f32[8,128]{1,0} parameter(0)",
        "%w = f32[64,128]{1,0} parameter(1)",
        "%s = f32[16]{0} parameter(2)",
        "%g = f32[64]{0} parameter(3)",
        "ROOT %f = (f32[8,64]{1,0}, f32[16]{0}, f32[64]{0}, f32[64]{0}) fusion(%x, %w, %s, %g), kind=kOutput, "
        "output_to_operand_aliasing={{1}: (2, {}), {2}: (3, {}), {3}: (3, {})}, calls=%async_collective_fusion.1",
        before=BESIDE,
    )
    assert cost.memory_bytes == 4 * (8 * 128 + 64 * 128 + 8 * 64)


@pytest.mark.parametrize(
    ("operation", "sent"),
    [
        ("all-reduce(%p), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add", 2 * 3 * 64 // 4),
        ("all-reduce(%p), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add", 2 * 3 * 64 // 4),
        ("collective-permute(%p), channel_id=1, source_target_pairs={{0,1},{1,2}}", 64),
    ],
)
def test_what_a_chip_sends(operation, sent):
    cost = program("%p = f32[16]{0} parameter(0)", f"ROOT %c = f32[16]{{0}} {operation}")
    assert (cost.exchanges[0].num_bytes, cost.link_bytes) == (64, sent)


def test_what_cannot_be_counted_is_said():
    cost = program(
        "%p = f32[16]{0} parameter(0)",
        'ROOT %attend = f32[16]{0} custom-call(%p), custom_call_target="tpu_custom_call"',
    )
    assert cost.unknown == ["what the kernel attend does"]


def named(*scopes):
    return f'metadata={{op_type="aten__mm" op_name="{"/".join(scopes)}" source_file="m.py" source_line=1}}'


def test_kernels_that_are_named_with_their_arithmetic_count_for_each_turn_of_a_loop():
    def kernel(name, *scopes):
        return f'{name} = f32[8] custom-call(%y), custom_call_target="tpu_custom_call", {named(*scopes)}'

    before = (
        "%body (y: f32[8]) -> f32[8] {\n  %y = f32[8] parameter(0)\n"
        f"  {kernel('%forward', 'jit(f)', 'vmap(attention_kernel[flops=1000])', 'pallas_call')}\n"
        f"  {kernel('%other', 'jit(f)', 'gmm', 'pallas_call')}\n"
        f"  ROOT {kernel('%backward', '[layer].4', 'attention_kernel[flops=30]', 'splash_mha_dq')}\n}}\n\n"
        "%goes_on (z: f32[8]) -> pred[] {\n  %z = f32[8] parameter(0)\n  ROOT %yes = pred[] constant(true)\n}\n\n"
    )
    cost = program(
        "%p = f32[8] parameter(0)",
        'ROOT %loop = f32[8] while(%p), condition=%goes_on, body=%body, backend_config={"known_trip_count":{"n":"3"}}',
        before=before,
    )
    assert cost.kernel_flops == 3 * 1030
    assert cost.unknown == ["what the kernel other does"]
    assert cost.cycles == 0
