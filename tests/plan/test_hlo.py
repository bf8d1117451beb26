import pytest

from hf_tpu_ext.plan.hlo import Collective, Shape, argument_shapes, find_collectives, parse_module, parse_shapes


MODULE = """\
HloModule step, is_scheduled=true, entry_computation_layout={(f32[8,4]{1,0}, s64[])->(f32[8,4]{1,0})}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%x, %y)
}

ENTRY %main (p.0: f32[8,4], p.1: s64[], p.2: (bf16[2,3], pred[5])) -> (f32[8,4]) {
  %p.0 = f32[8,4]{1,0} parameter(0), sharding={replicated}
  %p.1 = s64[] parameter(1)
  %p.2 = (bf16[2,3]{1,0}, /*index=1*/pred[5]{0}) parameter(2)
"""


def collectives(*lines):
    return list(find_collectives(parse_module(MODULE + "".join(f"  {line}\n" for line in lines) + "}\n")))


@pytest.mark.parametrize(
    ("text", "shapes", "num_bytes"),
    [
        ("f32[2,3]{1,0}", [("f32", (2, 3))], 24),
        ("bf16[128,64]{1,0:T(8,128)(2,1)S(1)}", [("bf16", (128, 64))], 16384),
        ("pred[]", [("pred", ())], 1),
        ("s4[7]{0}", [("s4", (7,))], 3),
        ("f8e4m3fn[5]{0}", [("f8e4m3fn", (5,))], 5),
        ("(f64[2]{0}, /*index=1*/u32[], token[])", [("f64", (2,)), ("u32", ())], 20),
    ],
)
def test_shapes_and_their_bytes(text, shapes, num_bytes):
    assert [(shape.dtype, shape.dims) for shape in parse_shapes(text)] == shapes
    assert sum(shape.num_bytes for shape in parse_shapes(text)) == num_bytes


def test_arguments_are_those_of_the_entry_alone():
    assert sum(shape.num_bytes for shape in argument_shapes(MODULE + "}\n")) == 8 * 4 * 4 + 8 + 2 * 3 * 2 + 5


def test_all_reduce_of_several_tensors():
    (found,) = collectives(
        "%s = f32[] constant(0)",
        "%all-reduce.7 = (f32[8,4]{1,0}, /*index=1*/f32[]) all-reduce(%p.0, /*index=1*/%s), channel_id=3, "
        "replica_groups={{0,1}}, use_global_device_ids=true, to_apply=%add",
        "%first = f32[8,4]{1,0} get-tuple-element(%all-reduce.7), index=0",
    )
    assert found == Collective("all-reduce", (Shape("f32", (8, 4)), Shape("f32", ())))
    assert found.num_bytes == 8 * 4 * 4 + 4


def test_a_gather_counts_what_it_makes_and_a_scatter_what_it_takes():
    gather, scatter = collectives(
        "%all-gather = f32[16,4]{1,0} all-gather(%p.0), channel_id=1, replica_groups={{0,1}}, dimensions={0}",
        "ROOT %reduce-scatter = f32[4,4]{1,0} reduce-scatter(%p.0), channel_id=2, dimensions={0}, to_apply=%add",
    )
    assert (gather.kind, gather.num_bytes) == ("all-gather", 16 * 4 * 4)
    assert (scatter.kind, scatter.num_bytes) == ("reduce-scatter", 8 * 4 * 4)


def test_an_asynchronous_pair_is_one():
    found = collectives(
        "%ags = (f32[8,4]{1,0}, f32[16,4]{1,0}) all-gather-start(%p.0), channel_id=1, dimensions={0}",
        "%agd = f32[16,4]{1,0} all-gather-done(%ags)",
        "%ars = f32[8,4]{1,0} all-reduce-start(%p.0), channel_id=2, to_apply=%add",
        "%ard = f32[8,4]{1,0} all-reduce-done(%ars)",
        "%cps = (f32[8,4]{1,0}, f32[8,4]{1,0}, u32[], u32[]) collective-permute-start(%p.0), channel_id=3",
        "ROOT %cpd = f32[8,4]{1,0} collective-permute-done(%cps)",
    )
    assert [(item.kind, item.num_bytes) for item in found] == [
        ("all-gather", 16 * 4 * 4),
        ("all-reduce", 8 * 4 * 4),
        ("collective-permute", 8 * 4 * 4),
    ]


def test_all_to_all_in_pieces():
    (found,) = collectives("%a = (f32[8,4]{1,0}, f32[8,4]{1,0}) all-to-all(%p.0, %p.0), replica_groups={{0,1}}")
    assert (found.num_bytes, found.tensors) == (2 * 8 * 4 * 4, 2 * (Shape("f32", (8, 4)),))


def test_operations_with_one_channel_are_parts_of_one_exchange():
    found = collectives(
        "%a = f32[16,4]{1,0} all-gather(%p.0), channel_id=7, dimensions={0}",
        "%b = f32[16,4]{1,0} all-gather(%p.0), channel_id=7, dimensions={0}",
        "%c = f32[16,4]{1,0} all-gather(%p.0), channel_id=8, dimensions={0}",
    )
    assert len(found) == 2


def test_an_all_reduce_fused_with_slicing_is_a_reduce_scatter():
    fusions = "".join(
        f"""\
%all-reduce-scatter.{number} (x: f32[8,4]) -> f32[4,4] {{
  %x = f32[8,4]{{1,0}} parameter(0)
  %all-reduce.{number} = f32[8,4]{{1,0}} all-reduce(%x), channel_id=1, to_apply=%add
  ROOT %slice.{number} = f32[4,4]{{1,0}} dynamic-slice(%all-reduce.{number}), dynamic_slice_sizes={{4,4}}
}}

"""
        for number in range(2)
    )
    found = find_collectives(parse_module(fusions + MODULE + "}\n"))
    assert [(item.kind, item.num_bytes) for item in found] == 2 * [("reduce-scatter", 8 * 4 * 4)]


def test_names_that_only_mention_a_collective_do_not_count():
    assert not collectives(
        "%all-reduce.9 = f32[8,4]{1,0} fusion(%p.0), kind=kLoop, calls=%add",
        '%c = f32[8,4]{1,0} copy(%all-reduce.9), metadata={op_name="all-gather(x)"}',
    )
