"""
Programs in `data/` are what libtpu 0.0.21 made, for v5e, of the gradient of a toy with 3 checkpointed layers: `q = x @ w` in
8 heads of 64, scores `q q'`, `x + scores q`; 4 rows of 256 in bfloat16. Once with the layers in a loop, once one by one, and
in a loop with the weights split over 8 chips with one row each. Metadata is cut off.
"""

from pathlib import Path

import pytest

from hf_tpu_ext.plan.hlo_cost import Exchange, measure_cost


DATA = Path(__file__).parent / "data"
# Operations of a product of a layer, by hand: the projection, and a product of attention.
PROJECTION = 2 * 4 * 256 * 512 * 512
ATTENTION = 2 * 4 * 8 * 256 * 256 * 64
# Forward; in the backward pass the projection and the scores again, the projection twice, each product of attention twice.
LAYER = (PROJECTION + 2 * ATTENTION) + (PROJECTION + ATTENTION) + (2 * PROJECTION + 4 * ATTENTION)


def measure(name):
    return measure_cost((DATA / f"{name}.hlo").read_text(encoding="utf-8"))


def program(*lines, before="", hosts=()):
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
        + "}\n",
        hosts,
    )


def test_a_loop_counts_for_each_turn():
    assert measure("loop_v5e_1").matrix_flops == 3 * LAYER


def test_layers_one_by_one_count_like_a_loop_of_them():
    # The first layer's input needs no gradient: one product that a loop does all the same.
    assert measure("unrolled_v5e_1").matrix_flops == 3 * LAYER - PROJECTION


def test_collectives_in_a_loop_count_for_each_turn():
    cost = measure("loop_fsdp_v5e_8")
    # A layer's weight is gathered for each pass, and its gradient reduced; each chip keeps an eighth.
    weight = 512 * 512 * 2
    assert cost.exchanges == [
        Exchange("all-gather", 6, 6 * weight, 6 * weight * 7 // 8),
        Exchange("reduce-scatter", 3, 3 * weight, 3 * weight * 7 // 8),
    ]
    assert cost.link_bytes == 9 * weight * 7 // 8
    assert cost.matrix_flops == 3 * LAYER // 4
    assert cost.unknown == []


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
    cost = program(
        "%p = f32[8] parameter(0)",
        '%loop = f32[8] while(%p), condition=%goes_on, body=%body, backend_config={"known_trip_count":{"n":"3"}}',
        *(
            f"%{name}.1 = f32[8] fusion(%loop), kind=kLoop, calls={called}, {estimate(cycles)}"
            for cycles, (name, (_, called)) in zip((7, 20, 300, 4), fusions.items(), strict=True)
        ),
        f"ROOT %sum = f32[8] add(%loop, %zeros.1), {estimate(50)}",
        before=before,
    )
    assert cost.cycles == {
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
    cost = program(
        "%p = f32[8] parameter(0)",
        *(
            f"%{name}.1 = f32[8] fusion(%p), kind=kLoop, calls=%{name}, {estimate(cycles)}"
            for name, cycles in zip(fused, (1000, 200, 30, 4), strict=True)
        ),
        f"%soft = f32[8] exponential(%p), {named('jit(step)', 'transpose(jvp([attention]))', 'exp')}, {estimate(500)}",
        f"ROOT %sum = f32[8] add(%p, %p), {named('optimizer', 'aten__add')}, {estimate(60)}",
        before=before,
    )
    assert cost.cycles == {
        "matrix products": 1000,
        "attention": 500,
        "adapters": 200,
        "elementwise": 60,
        "rope and norms": 30,
        "copies and layout": 4,
    }


def test_what_is_kept_on_the_chip_is_not_memory_traffic():
    loop = measure("loop_v5e_1")
    # At least: the weights and the input are read, the gradient of the weights is written.
    least = 2 * 3 * 512 * 512 * 2 + 4 * 256 * 512 * 2
    # The compiler's own analysis says 155 MB, most of it of tensors in the chip's vector memory.
    assert least <= loop.memory_bytes < 3 * least


@pytest.mark.parametrize(
    ("result", "left", "right", "attributes", "flops"),
    [
        ("bf16[64,32]", "bf16[16,64]", "bf16[16,32]", "dim_labels=fb_io->bf", 2 * 64 * 32 * 16),
        (
            "bf16[4,64,32]",
            "bf16[4,64,16]",
            "bf16[32,16,1]",
            "window={size=1}, dim_labels=0bf_oi0->0bf",
            2 * 4 * 64 * 32 * 16,
        ),
        # A product for each of 6 heads: of the window of 6 only one position meets a head.
        (
            "bf16[6,64,32]",
            "bf16[6,64,16]",
            "bf16[6,32,16]",
            "window={size=6 stride=5 lhs_dilate=6}, dim_labels=0bf_0oi->0bf",
            2 * 6 * 64 * 32 * 16,
        ),
        (
            "bf16[6,64,32]",
            "bf16[6,64,16]",
            "bf16[6,32,16]",
            "window={size=6 stride=6 pad=5_5 lhs_dilate=5 rhs_reversal=1}, dim_labels=0bf_0oi->0bf",
            2 * 6 * 64 * 32 * 16,
        ),
        # A sum over a batch of 4, with the batch as a window.
        (
            "bf16[64,32,1]",
            "bf16[4,16,64]",
            "bf16[4,16,32]",
            "window={size=4}, dim_labels=0fb_0io->bf0",
            2 * 4 * 64 * 32 * 16,
        ),
        # One product, its result in 8 heads of 4.
        (
            "bf16[4,64,8,4]",
            "bf16[4,64,16,1]",
            "bf16[8,4,16,1]",
            "window={size=1x8 pad=0_0x7_7 rhs_reversal=0x1}, dim_labels=0bf1_1oi0->0b1f",
            2 * 4 * 64 * (8 * 4) * 16,
        ),
    ],
)
def test_products_as_compilers_for_tpu_write_them(result, left, right, attributes, flops):
    cost = program(
        f"%l = {left}{{1,0:T(8,128)(2,1)S(1)}} parameter(0)",
        f"%r = {right}{{1,0}} parameter(1)",
        f'ROOT %c = {result}{{1,0:T(8,128)(2,1)}} convolution(%l, %r), {attributes}, metadata={{op_name="dot.1"}}',
    )
    assert cost.matrix_flops == flops


def test_a_dot():
    cost = program(
        "%l = f32[3,8,4]{2,1,0} parameter(0)",
        "%r = f32[3,4,5]{2,1,0} parameter(1)",
        "ROOT %d = f32[3,8,5]{2,1,0} dot(%l, %r), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, "
        "rhs_contracting_dims={1}",
    )
    assert cost.matrix_flops == 2 * 3 * 8 * 5 * 4
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


@pytest.mark.parametrize(
    ("operation", "sent"),
    [
        # Within hosts.
        ("all-reduce(%p), channel_id=1, replica_groups={{0,1,4,5},{2,3,6,7}}, to_apply=%add", 0),
        ("collective-permute(%p), channel_id=1, source_target_pairs={{0,1},{1,0}}", 0),
        # All with all: the half that is the other host's, once, and back.
        ("all-reduce(%p), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add", 64),
        ("all-reduce(%p), channel_id=1, to_apply=%add", 64),
        # Each chip with one of the other host, as a grid in another order, too.
        ("all-reduce(%p), channel_id=1, replica_groups={{0,2},{1,3},{4,6},{5,7}}, to_apply=%add", 4 * 64),
        ("all-reduce(%p), channel_id=1, replica_groups=[4,2]<=[2,2,2]T(0,2,1), to_apply=%add", 4 * 64),
        ("all-to-all(%p), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}", 4 * 64 // 2),
        ("collective-permute(%p), channel_id=1, source_target_pairs={{0,2},{2,0},{1,3}}", 2 * 64),
    ],
)
def test_what_a_host_sends_to_others(operation, sent):
    lines = ("%p = f32[16]{0} parameter(0)", f"ROOT %c = f32[16]{{0}} {operation}")
    assert program(*lines, hosts=[[0, 1, 4, 5], [2, 3, 6, 7]]).host_bytes == sent
    assert program(*lines).host_bytes == program(*lines, hosts=[[*range(8)]]).host_bytes == 0


def test_what_cannot_be_counted_is_said():
    cost = program(
        "%p = f32[16]{0} parameter(0)",
        'ROOT %attend = f32[16]{0} custom-call(%p), custom_call_target="tpu_custom_call"',
    )
    assert cost.unknown == ["what the kernel attend does"]


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
    assert cost.cycles == {}
