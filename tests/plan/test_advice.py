"""What is advised is in the documented order, is not set yet, and is accepted by the recipe that it is for."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import fixes
import forked
import pytest
from transformers import AutoConfig

from hf_tpu_ext.cli import plan as plan_command
from hf_tpu_ext.examples.tiny import make_model
from hf_tpu_ext.hardware.topologies import find_topology
from hf_tpu_ext.plan.advice import advise, foresee
from hf_tpu_ext.plan.hlo_cost import Cost
from hf_tpu_ext.plan.programs import Argument, CompiledProgram, Generations, TracedProgram
from hf_tpu_ext.plan.result import Plan, Trial
from hf_tpu_ext.plan.trace import Run


GB = 10**9
#: Full fine-tuning in float32, with a reference, and nothing set that saves memory.
FULL = Run(
    config=AutoConfig.for_model("llama"),
    parameters=8000,
    trained_parameters=8000,
    precision="",
    mesh={"data": 8, "fsdp": 1},
    per_device_train_batch_size=4,
    per_device_eval_batch_size=8,
    gradient_accumulation_steps=4,
    rematerialization="dots",
    rows=None,
    optimizer_steps=None,
    max_steps=None,
    token_share=None,
    token_waste=None,
    trains_in_float32=True,
    other_passes=False,
    attention="splash",
    could_precompute_reference=True,
    could_have_adapter=True,
    could_be_quantized=True,
)
#: With all of it set.
SMALL = replace(
    FULL,
    mesh={"data": 1, "fsdp": 8},
    per_device_train_batch_size=1,
    per_device_eval_batch_size=1,
    rematerialization="full",
    trains_in_float32=False,
    could_precompute_reference=False,
    could_have_adapter=False,
    could_be_quantized=False,
)
IN_ORDER = "Try in this order:"
LENGTH = "max_length: 512 (--seq_lengths 512, where these are given), which cuts off longer rows"
MORE = "more chips (--topology), or a smaller model"
BFLOAT16 = "dtype: bfloat16, which halves weights, gradients and optimizer state, and rounds them"
FASTER = "--search compiles variants, larger batches among them, and says which are faster."


def program(kind="training step", weights=1, activations=2, shape=(32, 1024)):
    """A program of so many GB, which the compiler takes."""
    memory = {"argument": weights * GB, "output": 0, "alias": 0, "temp": activations * GB, "generated_code": 0}
    return CompiledProgram(kind, shape, 1.0, None, memory, {"weights": weights * GB}, cost=Cost(1, 1, [], []))


def refused(kind="training step", shape=(32, 1024)):
    return CompiledProgram(kind, shape, 1.0, "RESOURCE_EXHAUSTED: hbm", arguments={"weights": GB})


def plan(*programs, topology="v5e-8"):
    return Plan("recipe", {}, find_topology(topology), list(programs), {})


def settings(advice):
    """The first setting of each line that has one."""
    return [match[1] for line in advice if (match := re.match(r"(\w+): ", line))]


def test_what_is_not_set_is_listed_in_the_documented_order():
    lines = [
        IN_ORDER,
        "rematerialization: full, which computes activations again",
        "mesh: fsdp, which shards weights and optimizer state over the chips",
        "per_device_train_batch_size: 2 with gradient_accumulation_steps: 8, the same global batch size",
        "per_device_eval_batch_size: 4",
        LENGTH,
        "precompute_ref_log_probs: true, which runs the reference once, before training, and drops its weights",
        "use_peft: true (LoRA), which trains adapters alone",
        BFLOAT16,
        "load_in_4bit: true with use_peft: true (QLoRA), with frozen linear layers in 4 bits",
        MORE,
        "To know whether rematerialization or mesh or per_device_train_batch_size is enough, add --search rematerialization mesh "
        "per_device_train_batch_size to this command: it compiles variants, and says which fit.",
    ]
    assert advise(plan(refused(), refused("evaluation step")), FULL) == lines
    # What the compiler takes, and is too large beside what stays on a chip.
    together = plan(program(activations=20), program("evaluation step", activations=20))
    assert advise(together, FULL) == lines
    assert advise(plan(refused(), refused("evaluation step")), SMALL) == [IN_ORDER, LENGTH, MORE]


def test_the_documented_order():
    page = (Path(__file__).parents[2] / "docs" / "compile_time.md").read_text()
    table = page.partition("## Out of memory")[2].partition("\n## ")[0]
    documented = re.findall(r"`([a-z]\w+)(?:: \w+)?`", "\n".join(re.findall(r"^\| \d \|([^|]*)", table, re.MULTILINE)))
    advised = settings(advise(plan(refused(), refused("evaluation step")), FULL))
    assert [name for name in dict.fromkeys(documented) if name in advised] == advised


@pytest.mark.parametrize(
    ("programs", "is_advised"),
    [
        ([refused(), program("evaluation step")], ["rematerialization", "per_device_train_batch_size"]),
        ([refused("micro-step"), program()], ["rematerialization", "per_device_train_batch_size"]),
        ([refused("reference step"), program()], ["per_device_train_batch_size"]),
        ([program(), refused("evaluation step")], ["per_device_eval_batch_size"]),
        ([program(), refused("prediction step of 512 rows")], ["per_device_eval_batch_size"]),
        ([program(), refused("reference pass of an evaluation")], ["per_device_eval_batch_size"]),
        ([program(), refused("decode")], []),
    ],
)
def test_what_makes_less_of_a_program_that_fits_is_left_out(programs, is_advised):
    of_programs = ("rematerialization", "per_device_train_batch_size", "per_device_eval_batch_size")
    assert [name for name in settings(advise(plan(*programs), FULL)) if name in of_programs] == is_advised


@pytest.mark.parametrize(
    ("run", "line"),
    [
        (dict(per_device_train_batch_size=9), "per_device_train_batch_size: 3 with gradient_accumulation_steps: 12"),
        (dict(per_device_train_batch_size=7), "per_device_train_batch_size: 1 with gradient_accumulation_steps: 28"),
        # The KL of KTO takes two rows of a batch.
        (dict(train_rows_multiple=2), "per_device_train_batch_size: 2 with gradient_accumulation_steps: 8"),
        (dict(train_rows_multiple=2, per_device_train_batch_size=2), None),
    ],
)
def test_fewer_rows_keep_the_global_batch_size(run, line):
    found = [text for text in advise(plan(refused()), replace(FULL, **run)) if text.startswith("per_device")]
    assert found == ([] if line is None else [f"{line}, the same global batch size"])


def test_completions_are_cut_where_they_are_generated():
    run = replace(FULL, generations=Generations(1, 64), eval_rows_multiple=4)
    planned = plan(refused(shape=(32, 320)), program("decode", shape=(64, 64)), refused("scoring of an evaluation"))
    advice = advise(planned, run)
    assert "max_completion_length: 32, which cuts off longer completions" in advice
    assert "max_length" not in settings(advice) and "per_device_eval_batch_size: 4" in advice
    assert "per_device_eval_batch_size" not in settings(advise(planned, replace(run, eval_rows_multiple=8)))


def test_with_an_adapter_4_bits_are_left():
    advice = advise(plan(refused()), replace(SMALL, could_be_quantized=True))
    assert "load_in_4bit: true (QLoRA), with frozen linear layers in 4 bits" in advice


@pytest.mark.parametrize(
    ("run", "names"),
    [
        (dict(rematerialization="full"), "mesh per_device_train_batch_size"),
        (dict(rematerialization="full", mesh={"data": 1, "fsdp": 8}), "per_device_train_batch_size"),
        (dict(rematerialization="full", mesh={"data": 2, "fsdp": 4}, per_device_train_batch_size=1), "mesh"),
    ],
)
def test_a_search_is_advised_of_what_it_can_change(run, names):
    *_, line = advise(plan(refused()), replace(FULL, **run))
    asked = " or ".join(names.split())
    assert line.startswith(f"To know whether {asked} is enough, add --search {names} to this command: ")


def test_what_a_search_tries_is_left_to_it():
    advice = advise(plan(refused()), FULL, searched=("mesh", "per_device_train_batch_size"))
    assert settings(advice)[:2] == ["rematerialization", "max_length"]
    assert not any("--search" in line for line in advice)


def test_of_a_plan_that_fits_or_is_not_known():
    planned = plan(program(weights=8))
    # Nothing that makes numbers less exact, or memory smaller.
    assert advise(planned, FULL) == [FASTER] and advise(planned, FULL, ["mesh"]) == []
    unknown = replace(planned, programs=[], unknown=["the TPU compiler is not installed"])
    assert advise(unknown, FULL) == [] and advise(unknown, FULL, ["mesh"]) == []


@pytest.mark.parametrize(
    ("sharding", "weights"),
    [
        (None, 16),
        ("{devices=[8,1]0,1,2,3,4,5,6,7}", 2),
        ("{devices=[4,1,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}", 4),
    ],
)
def test_state_that_a_chip_has_no_room_for_is_told_before_it_is_compiled(sharding, weights):
    arguments = [
        Argument("weights", 16 * GB, False, sharding),
        Argument("optimizer state", GB, True, "{replicated}"),
        Argument("batch", 9 * GB, False),
    ]
    traced = TracedProgram("training step", (32, 1024), b"", arguments, 8)
    assert traced.resident == {"weights": weights * GB, "optimizer state": GB, "gradients": 0}
    lines = foresee([traced], find_topology("v5e-8"), FULL)
    if weights < 16:
        assert lines == []
    else:
        assert (
            "weights 16.00 GB, optimizer state 1.00 GB take 101 % of the 16.91 GB of HBM that a chip has" in lines[0]
        )
        # Nothing that makes less of a batch.
        assert settings(line.removeprefix("- ") for line in lines) == [
            "mesh",
            "precompute_ref_log_probs",
            "use_peft",
            "dtype",
            "load_in_4bit",
        ]
        assert foresee([traced], find_topology("v5e-8"), FULL, searched=["mesh"])[1].startswith("- precompute_ref")


def test_accumulation_is_advised_where_there_is_room_for_its_gradients():
    """They take what the trained weights take, and are kept from the second micro-step on."""
    rows = "per_device_train_batch_size: 2"
    same, other = (
        f"{rows} with gradient_accumulation_steps: 2, the same global batch size",
        f"{rows}, a smaller global",
    )
    once = replace(FULL, gradient_accumulation_steps=1)
    # Half of the weights are a reference's.
    beside_reference = replace(once, other_parameters=8000)
    for run, weights, line in [
        (once, 8, same),
        (once, 9, other),
        (beside_reference, 9, same),
        (beside_reference, 12, other),
        (replace(once, trained_parameters=80), 12, same),
    ]:
        advice = advise(plan(program(weights=weights, activations=20)), run)
        (found,) = [text for text in advice if text.startswith(rows)]
        assert found.startswith(line)


def test_a_search_that_found_what_fits_needs_no_more():
    found = replace(plan(program(weights=20)), trials=[Trial({}, True)])
    assert advise(found, SMALL, ["mesh"]) == []


COMMANDS = {
    "sft": ["--eval_strategy", "epoch", "--gradient_checkpointing", "false"],
    "sft_lora": ["--use_peft", "true", "--rematerialization", "dots"],
    "dpo": ["--eval_strategy", "epoch", "--mesh", "data=2,fsdp=4"],
    "kto": ["--per_device_train_batch_size", "4"],
    "grpo": ["--eval_strategy", "epoch", "--reward_funcs", "recipes.rewards.same_number", "--num_generations", "4"],
    "qat": ["--qat_weight_dtype", "int4", "--qat_group_size", "32"],
    "from_scratch": ["--from_scratch", "true", "--packing", "true", "--packing_strategy", "wrapped"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # Blocks of quantized weights are along rows of 64.
    return make_model(tmp_path_factory.mktemp("advised") / "model", hidden_size=64, intermediate_size=128)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_advised_is_accepted(name, model, tmp_path):
    def plan_all(argvs):
        output = tmp_path / "told.json"
        done = forked.run(
            [sys.executable, Path(__file__).with_name("advice_driver.py"), output],
            input=json.dumps(argvs),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(output.read_text())

    command = name if name in ("dpo", "kto", "grpo") else "sft"
    words = ["--model_name_or_path", model, "--output_dir", tmp_path / "run"]
    words += ["--seq_lengths", "64", "--report_to", "none"]
    words += ["--max_completion_length", "32"] if command == "grpo" else ["--max_length", "64"]
    own = [command, *map(str, words), *COMMANDS[name]]
    (told,) = plan_all([own])
    assert told["status"] == 1, told["printed"]
    *lines, search = told["advice"]
    assert "--search" in search
    edited = []
    for line in lines:
        if settings([line]):
            ((changed),) = fixes.edits({}, line, line)
            edited.append([*own, *(str(word) for name, value in changed.items() for word in (f"--{name}", value))])
    assert len(edited) > 3
    # What it does is tested with it.
    words = re.search(r"--search(?: \w+)+(?= to this)", search)[0].split()
    assert plan_command._options([*own, *words])[0].search == words[1:]
    for argv, again in zip(edited, plan_all(edited), strict=True):
        assert again["status"] == 1, f"{argv}\n{again['printed']}"
