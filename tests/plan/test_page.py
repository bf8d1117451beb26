import json
from dataclasses import replace

import pytest

from hf_tpu_ext.hardware.prices import Price
from hf_tpu_ext.hardware.topologies import find_topology
from hf_tpu_ext.plan.hlo_cost import Cost, Exchange
from hf_tpu_ext.plan.page import WIDTH, format_count, render
from hf_tpu_ext.plan.programs import CompiledProgram, Generations
from hf_tpu_ext.plan.result import Plan, Trial


GB = 10**9
# As libtpu 0.0.21 says it of full fine-tuning of 1.24 billion parameters on a v5e.
OUT_OF_MEMORY = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 21.78G of 15.75G hbm. "
    "Exceeded hbm capacity by 6.03G.\n\nTotal hbm usage >= 22.03G:\n    reserved        258.00M \n    program           3.36G \n"
    "    arguments        18.42G \n\nOutput size 18.42G; shares 18.42G with arguments.\n\nProgram hbm requirement 3.36G:\n"
    "    global           144.5K\n    scoped            1.25M\n    HLO temp          3.36G (100.0% utilization)\n\n"
    "  Largest program allocations in hbm:\n\n  1. Size: 512.00M\n     Shape: bf16[16,2048,8192]{2,1,0:T(8,128)(2,1)}"
)
# And of the layers of a Qwen3 with 256 rows, whose temporaries alone are too many: 2.24 GB of weights and state are not counted.
TEMPORARIES_ALONE = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 21.29G of 15.75G hbm. "
    "Exceeded hbm capacity by 5.54G.\n\nTotal hbm usage >= 21.54G:\n    reserved        258.00M \n    program          21.29G \n"
    "    arguments            0B \n\nOutput size 0B; shares 0B with arguments.\n\nProgram hbm requirement 21.29G:\n"
    "    global            32.5K\n    HLO temp         21.29G (100.0% utilization)"
)
# 2 s at 1.5 GHz, and 0.1 s.
COST = Cost(3 * 10**9, 819 * 10**8, [Exchange("all-gather", 56, 3 * GB, 2 * GB)], [])


def program(kind="training step", **changes):
    memory = {"argument": 9 * GB, "output": 9 * GB, "alias": 9 * GB, "temp": 3 * GB, "generated_code": GB // 10}
    arguments = {"weights": 3 * GB, "optimizer state": 6 * GB}
    made = CompiledProgram(kind, (32, 1024), 21.5, None, memory, arguments)
    made = replace(made, cost=COST, model_flops=8 * 150e12)
    return replace(made, **changes)


MICRO_STEP = program(
    "micro-step",
    memory={"argument": 6 * GB, "output": 3 * GB, "alias": 3 * GB, "temp": 5 * GB, "generated_code": GB // 10},
    arguments={"weights": 3 * GB, "gradients": 3 * GB},
)


def plan(*programs, **changes):
    made = Plan(
        title="recipe.yaml",
        facts={"model": "a model " * 20},
        topology=find_topology("v5e-8"),
        programs=list(programs),
        versions={"libtpu": "0.0.21"},
        optimizer_steps=3600,
        token_share=0.5,
        price=Price(1.2, "us-central1", "2026-11", "list"),
    )
    return replace(made, **changes)


def test_fits_and_by_how_much():
    planned = plan(program())
    assert planned.fits is True
    assert planned.peak_bytes == 12.1 * GB
    assert "FITS: peak HBM 12.10 GB of 16.91 GB usable" in render(planned)
    assert "4.81 GB free" in render(planned)


def test_a_chip_also_holds_what_the_running_program_does_not_use():
    planned = plan(program(), MICRO_STEP, gradient_accumulation_steps=4)
    # During the micro-step: 6 GB of the optimizer's state besides, and the code of both programs.
    assert planned.largest is planned.programs[1]
    assert planned.peak_bytes == (3 + 3 + 5 + 6 + 0.2) * GB
    assert planned.fits is False
    assert "DOES NOT FIT: peak HBM 17.20 GB, 288.57 MB over" in render(planned)


def test_parts_add_up():
    planned = program(memory=MICRO_STEP.memory | {"output": 4 * GB})
    assert sum(planned.parts.values()) == (6 + 4 - 3 + 5 + 0.1) * GB
    assert planned.parts["outputs"] == GB


def test_what_the_compiler_refuses_does_not_fit():
    arguments = program().arguments | MICRO_STEP.arguments
    refused = CompiledProgram("training step", (64, 1024), 3.0, OUT_OF_MEMORY, arguments=arguments)
    # A program that fits beside it changes nothing.
    for planned in (plan(refused), plan(MICRO_STEP, refused, gradient_accumulation_steps=4)):
        assert planned.fits is False and planned.largest is refused
        assert planned.peak_bytes == find_topology("v5e-8").chip.memory_bytes + round(6.03 * 2**30)
        page = render(planned)
        assert "DOES NOT FIT: peak HBM 23.39 GB, 6.47 GB over the 16.91 GB" in page
        assert "the compiler says (1 G is 1.07 GB): RESOURCE_EXHAUSTED" in page and "refused" in page
        start = page.index("peak HBM per chip (during: training step, 64 x 1024 on all chips)")
        bars = [line.split("  ") for line in page[start:].split("\n\n")[0].splitlines()[1:]]
        assert [(words[1], words[-2].strip(), words[-1].count("#")) for words in bars[:-1]] == [
            ("weights, state and batch", "19.78 GB", 34),
            ("activations and code", "3.61 GB", 6),
        ]
        assert [words.strip() for words in bars[-1][-2:]] == ["23.39 GB", "of 16.91 GB: 138 %"]


@pytest.mark.parametrize(
    ("error", "kind", "arguments", "excess", "parts"),
    [
        (TEMPORARIES_ALONE, "training step", {"weights": 3 * GB, "optimizer state": 6 * GB}, 5.54, (9 * GB, 21.29)),
        # The optimizer's state stays, although a micro-step does not use it.
        (TEMPORARIES_ALONE, "micro-step", {"weights": 3 * GB, "gradients": 3 * GB}, 5.54, (12 * GB, 21.29)),
        (OUT_OF_MEMORY, "micro-step", {"weights": 3 * GB, "gradients": 3 * GB}, 6.03, (6 * GB, 3.36)),
    ],
)
def test_state_that_the_compiler_does_not_count_is_in_the_peak(error, kind, arguments, excess, parts):
    refused = CompiledProgram(kind, (64, 1024), 3.0, error, arguments=arguments)
    other = program(arguments=program().arguments | {role: 3 * GB for role in arguments if role == "gradients"})
    planned, (kept, activations) = plan(other, refused), parts
    assert planned.largest is refused
    assert planned.peak_bytes == planned.topology.chip.memory_bytes + round(excess * 2**30) + kept
    said = round(18.42 * 2**30) if error is OUT_OF_MEMORY else 0
    assert planned.parts(refused) == {
        "weights, state and batch": said + kept,
        "activations and code": round(activations * 2**30),
    }
    assert sum(planned.parts(refused).values()) == pytest.approx(planned.peak_bytes, abs=2**24)
    is_told = (
        f"it counts no arguments, and the peak has {sum(arguments.values()) // GB}.00 GB of weights and state besides"
    )
    assert (is_told in " ".join(render(planned).split())) == (error is TEMPORARIES_ALONE)


def test_another_program_is_not_shown_in_place_of_one_that_does_not_fit():
    refused = CompiledProgram("training step", (64, 1024), 3.0, "RESOURCE_EXHAUSTED: CompileTimeHbmOom")
    planned = plan(MICRO_STEP, refused, gradient_accumulation_steps=4)
    assert planned.fits is False and planned.peak_bytes is None
    page = render(planned)
    assert "DOES NOT FIT.\n" in page and "The compiler does not say what takes it." in page
    assert "optimizer state" not in page and "total" not in page


@pytest.mark.parametrize(
    "programs",
    [
        (),
        (CompiledProgram("training step", (8, 8), 1.0, "INTERNAL: crashed"),),
        (MICRO_STEP, CompiledProgram("training step", (32, 1024), 1.0, "INTERNAL: crashed")),
    ],
)
def test_could_not_tell(programs):
    planned = plan(*programs)
    assert planned.fits is None and planned.step is None and planned.run_dollars is None
    page = render(planned)
    assert "UNKNOWN whether it fits" in page and "peak HBM" not in page


def test_time_and_cost():
    planned = plan(program())
    assert planned.step.seconds == pytest.approx((2, 2.02))
    assert planned.tokens_per_step == 32 * 1024
    assert planned.tokens_per_second == pytest.approx(4096 / 2.02)
    assert planned.mfu == pytest.approx(150 / 197 / 2.02)
    assert planned.run_seconds == pytest.approx((2 * 3600, 2.02 * 3600))
    # Eight chips for two hours.
    assert planned.run_dollars[0] == pytest.approx(8 * 2 * 1.2)
    page = " ".join(render(planned).split())
    assert (
        "expect 2 s to 2.02 s, 2,028 tokens/s/chip, 1,014 without padding; MFU 38 %; 0.137 chip-hours ($0.164) per million"
        in page
    )
    assert "at 1.5 GHz: 2 s; HBM traffic: 100 ms; collectives: 20 ms, beside the rest or after it." in page
    assert "expect $19.20 to $19.39" in page and "us-central1, 2026-11 (list)" in page


def test_kernels_are_in_the_expected_time():
    # Half a second at the peak rate.
    planned = plan(program(cost=replace(COST, kernel_flops=985 * 10**11)))
    assert planned.step.seconds == pytest.approx((2.5, 2.52))
    page = " ".join(render(planned).split())
    assert "kernels: 98.5 TFLOP, 500 ms, counted analytically at the peak rate" in page
    assert "kernels:" not in render(plan(program()))


def test_micro_steps_of_an_optimizer_step():
    planned = plan(program(), MICRO_STEP, gradient_accumulation_steps=4)
    assert planned.step.seconds[0] == pytest.approx(8)
    assert planned.tokens_per_step == 4 * 32 * 1024


def test_the_largest_batch_and_the_training_programs_alone_make_a_step():
    short = program(batch_shape=(32, 128), cost=replace(COST, cycles=10**9))
    evaluation = program("evaluation step", batch_shape=(64, 2048))
    assert plan(short, program(), evaluation).step.seconds[0] == pytest.approx(2)


def test_generation_is_beside_the_training_of_a_step():
    # Twice in an optimizer step, of 256 rows; passes go through them 32 at a time.
    prefill = program("prefill", batch_shape=(256, 512), cost=replace(COST, exchanges=[], cycles=0))
    held = {"weights": 2 * GB, "copies of weights": GB, "key-value cache": GB}
    decode = program("decode", batch_shape=(256, 100), arguments=held)
    scoring = program("reference pass", cost=replace(COST, exchanges=[], cycles=15 * 10**7))
    # An evaluation has other rows, and short prompts another prefill.
    others = replace(decode, batch_shape=(64, 100)), replace(prefill, batch_shape=(256, 128))
    planned = plan(*others, prefill, decode, scoring, program(), generations=Generations(2.0, 256))
    runs = {each.batch_shape: runs for each, runs in planned.of_generation}
    assert runs == {(256, 512): 2, (256, 100): 2, (32, 1024): 16}
    assert planned.tokens_generated == 2 * 256 * 100
    assert planned.generation.cycles == pytest.approx(2 * 2 + 16 * 0.1)
    assert planned.generation.memory == pytest.approx((2 + 2 + 16) * 0.1)
    assert planned.run_seconds[0] == pytest.approx(3600 * (2 + 5.6))
    page = " ".join(render(planned).split())
    assert "51,200 tokens in an optimizer step, beside its training: expect 5.6 s" in page
    page = " ".join(render(plan(decode)).split())
    for part in ("key-value cache", "copies of weights"):
        assert f"{part} 1.00 GB" in page
        assert part not in render(plan(program()))


def test_a_reference_that_is_run_before_is_told_apart_from_the_run():
    reference = program("reference step", batch_shape=(64, 1024), cost=replace(COST, exchanges=[], cycles=3 * 10**8))
    planned = plan(reference, program())
    assert planned.reference.cycles == pytest.approx(0.2)
    assert planned.run_seconds == plan(program()).run_seconds
    told = "without the reference step, which all rows pass once before: expect 200 ms for 64 x 1024"
    assert told in " ".join(render(planned).split())
    assert "reference" not in render(plan(program()))
    assert json.loads(planned.to_json())["derived"]["reference"]["seconds"] == pytest.approx([0.2, 0.2])


def test_collectives_and_what_is_not_known():
    cost = replace(COST, unknown=["what the kernel attend does"])
    page = render(plan(program(cost=cost), unknown=["the price"]))
    assert "56 all-gather of 3.00 GB\n" in page
    assert "- the price\n- what the kernel attend does" in page


def test_without_steps_or_price():
    planned = plan(program(), optimizer_steps=None, price=None)
    assert planned.run_seconds is None and planned.run_dollars is None
    assert "the run" not in render(planned)
    assert "its cost" not in render(plan(program(), price=None))


def test_variants_are_a_table():
    trials = [
        Trial({"batch": "16"}, True, 12 * GB, 1.5, 9000.0),
        Trial({"batch": "8", "mesh": "fsdp"}, None, error="refused"),
    ]
    lines = render(plan(program(), trials=trials)).splitlines()
    start = lines.index("Pareto front of the variants tried (speed, HBM)")
    assert [line.split() for line in lines[start + 1 : start + 4]] == [
        ["batch", "mesh", "peak", "HBM", "fits", "expected", "step", "tokens/s/chip"],
        ["16", "12.00", "GB", "yes", "1.5", "s", "9,000"],
        ["8", "fsdp", "?", "?", "?", "?"],
    ]


def test_a_page_is_at_most_a_hundred_columns_wide():
    refused = CompiledProgram("micro-step", (64, 1024), 3.0, OUT_OF_MEMORY)
    for planned in (
        plan(program(), MICRO_STEP),
        plan(program(), refused),
        plan(unknown=["a reason " * 30], advice=["an advice " * 30]),
    ):
        assert max(map(len, render(planned).splitlines())) <= WIDTH


def test_what_stands_above_a_list_is_no_item_of_it():
    page = render(plan(advice=["Try in this order:", "mesh: fsdp", "more chips"]))
    assert "what to change\nTry in this order:\n- mesh: fsdp\n- more chips\n" in page


def test_the_bar_of_a_part_starts_where_the_one_before_ends():
    bars = [line.split()[-1] for line in render(plan(program())).splitlines() if "...." in line]
    filled = [{index for index, mark in enumerate(bar) if mark == "#"} for bar in bars]
    taken = sorted(index for bar in filled for index in bar)
    assert taken == list(range(round(40 * 12.1 / 16.911433728)))


def test_json_holds_all_of_it(tmp_path):
    planned = plan(program(), trials=[Trial({"batch": "8"}, True, GB, 1.0, 8000.0)])
    (tmp_path / "plan.json").write_text(planned.to_json())
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["versions"] == {"libtpu": "0.0.21"}
    assert content["topology"]["chip"]["memory_bytes"] == 16911433728
    derived = content["derived"]
    assert derived["fits"] is True and derived["step"]["seconds"] == pytest.approx([2, 2.02])
    assert derived["parts"]["optimizer state"] == 6 * GB
    assert derived["run_dollars"][0] == pytest.approx(19.2)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_json_of_a_plan_of_which_nothing_is_known():
    assert json.loads(plan().to_json())["derived"]["fits"] is None


@pytest.mark.parametrize(
    ("number", "text"), [(22.65e12, "22.6 T"), (596e6, "596 M"), (4096, "4.1 k"), (3, "3 "), (2.5e18, "2500 P")]
)
def test_large_numbers(number, text):
    assert format_count(number) == text
