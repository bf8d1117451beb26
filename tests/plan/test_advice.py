"""What is advised follows from the numbers of a plan, and is nothing that is set."""

import re
from dataclasses import replace

import pytest
from transformers import AutoConfig

from hf_tpu_ext.hardware.topologies import find_topology
from hf_tpu_ext.plan.advice import HALVES_STATE, advise, advise_besides, foresee
from hf_tpu_ext.plan.hlo_cost import Cost
from hf_tpu_ext.plan.programs import Argument, CompiledProgram, TracedProgram
from hf_tpu_ext.plan.result import Plan, Trial
from hf_tpu_ext.plan.trace import Run


GB = 10**9
LORA = Run(
    config=AutoConfig.for_model("llama"),
    parameters=8000,
    trained_parameters=100,
    precision="",
    mesh={"data": 8, "fsdp": 1},
    per_device_train_batch_size=4,
    per_device_eval_batch_size=8,
    gradient_accumulation_steps=4,
    rematerialization="full",
    rows=None,
    optimizer_steps=None,
    max_steps=None,
    token_share=None,
    token_waste=None,
    trains_in_float32=False,
    is_quantized=False,
    other_passes=False,
    attention="splash",
    quantizable_share=0.75,
)
FULL = replace(LORA, trained_parameters=8000, trains_in_float32=True)


def program(kind, state, activations, topology="v5e-8", refused=True):
    """A program with so many GB, which the compiler refuses where they are too many and `refused` says so."""
    chip = find_topology(topology).chip
    arguments = {role: round(size * GB) for role, size in state.items()}
    total, activations = sum(arguments.values()), round(activations * GB)
    if (excess := total + activations - chip.memory_bytes) > 0 and refused:
        sizes = {"Exceeded hbm capacity by": excess, "program": activations, "arguments": total}
        said = ". ".join(f"{name} {size / 2**30:.4f}G" for name, size in sizes.items())
        return CompiledProgram(kind, (32, 1024), 1.0, f"RESOURCE_EXHAUSTED: {said}", arguments=arguments)
    memory = {"argument": total, "output": 0, "alias": 0, "temp": activations, "generated_code": 0}
    return CompiledProgram(kind, (32, 1024), 1.0, None, memory, arguments, cost=Cost(1, 1, [], []))


def plan(*programs, topology="v5e-8"):
    return Plan("recipe", {}, find_topology(topology), list(programs), {})


def settings(advice):
    """The settings of an advice, without what they do, and the search."""
    return [re.split(r",? (?:\(|which|with|halves|for)|, with", line)[0] for line in advice if "--search" not in line]


@pytest.mark.parametrize("refused", [True, False], ids=["refused", "added up"])
def test_weights_that_fill_a_chip_are_sharded(refused):
    """A Llama of 8 billion parameters with LoRA: neither fewer rows nor what is set can help."""
    state = {"weights": 16.73, "optimizer state": 0.4}
    planned = plan(
        program("training step", state, 2.0, refused=refused), program("evaluation step", state, 1.5, refused=refused)
    )
    mesh, quantize, search = advise(planned, LORA)
    assert mesh == "mesh: fsdp, which shards weights and optimizer state over the chips (about 14.99 GB less)"
    # Of 16 bits of each frozen linear weight 4.5 are left.
    assert quantize == "load_in_4bit: true (QLoRA), for frozen linear layers (about 9.02 GB less)"
    assert search == "--search compiles variants, and says which of them fit."
    assert settings(advise(planned, replace(LORA, is_quantized=True))) == ["mesh: fsdp"]
    assert advise(planned, LORA, is_searched=True) == [mesh, quantize]


@pytest.mark.parametrize("refused", [True, False], ids=["refused", "added up"])
def test_what_stays_on_a_chip_beside_a_program_counts(refused):
    """During a micro-step the moments are there, too: 9.1 GB are missing, which neither half of the state nor half of the rows saves."""
    state = {"weights": 4, "gradients": 4}
    planned = plan(
        program("micro-step", state, 10, refused=refused),
        program("training step", state | {"optimizer state": 8}, 0.5, refused=refused),
    )
    assert settings(advise(planned, FULL)) == ["mesh: fsdp", "use_peft: true"]


def test_of_several_changes_the_first_saves_most():
    state = {"weights": 5, "optimizer state": 10, "gradients": 5}
    planned = plan(program("training step", state, 8))
    advice = advise(planned, replace(FULL, rematerialization="dots"))
    # 11.1 GB are missing, which neither the activations nor half of the state are.
    assert settings(advice) == ["mesh: fsdp", "use_peft: true"]
    saved = [float(size) for size in re.findall(r"about ([\d.]+) GB less", " ".join(advice))]
    assert saved == [17.5, 17.5]
    # Where each is enough.
    planned = plan(program("training step", {"weights": 3, "optimizer state": 6}, 10))
    advice = advise(planned, replace(FULL, rematerialization="dots"))
    assert settings(advice) == [
        "rematerialization: full",
        "mesh: fsdp",
        "use_peft: true",
        "per_device_train_batch_size: 2",
        "dtype: bfloat16",
    ]


def test_a_reference_that_could_be_run_before_needs_no_copy_of_the_weights():
    # Two copies of weights and the moments of one, of which LoRA leaves a copy, frozen.
    planned = plan(program("training step", {"weights": 12, "optimizer state": 5}, 1))
    dpo = replace(FULL, reference_share=0.5, mesh={"data": 1, "fsdp": 8})
    peft, reference = (line for line in advise(planned, dpo) if re.match("use_peft|precompute", line))
    assert peft.endswith("(about 14.00 GB less)")
    assert reference == (
        "precompute_ref_log_probs: true, which runs the reference once, before training, and drops its copy of the "
        "weights (about 6.00 GB less)"
    )


@pytest.mark.parametrize(
    ("activations", "setting"), [(20, "per_device_train_batch_size: 2"), (60, "per_device_train_batch_size: 1")]
)
def test_as_many_rows_as_fit(activations, setting):
    split = replace(LORA, mesh={"data": 1, "fsdp": 8})
    planned = plan(program("training step", {"weights": 1}, activations))
    rows, search = advise(planned, split)
    assert settings([rows]) == [setting] and "--search" in search
    assert f"with {4 // int(setting[-1])} times the gradient_accumulation_steps" in rows
    one = replace(split, per_device_train_batch_size=1)
    (advice,) = advise(planned, one)
    assert advice == "a smaller max_length, of which a plan with smaller --seq_lengths says how much it saves"


def test_sums_of_gradients_that_smaller_batches_need_are_subtracted():
    """With one micro-step there are none."""
    own = replace(FULL, mesh={"data": 1, "fsdp": 8}, trains_in_float32=False, trained_bytes=5 * GB)
    planned = plan(program("training step", {"weights": 2, "optimizer state": 2}, 20))
    rows = next(line for line in advise(planned, own) if line.startswith("per_device"))
    assert rows.startswith("per_device_train_batch_size: 2") and rows.endswith("(about 10.00 GB less)")
    rows = next(line for line in advise(planned, replace(own, gradient_accumulation_steps=1)) if "per_device" in line)
    # 7.1 GB are missing, which half of the rows no longer leave.
    assert rows.startswith("per_device_train_batch_size: 1") and rows.endswith("(about 10.00 GB less)")
    # Sums that take more than the rows leave are no advice.
    more = replace(own, gradient_accumulation_steps=1, trained_bytes=16 * GB)
    assert not [line for line in advise(planned, more) if line.startswith("per_device")]
    # Evaluations have no gradients.
    planned = plan(program("evaluation step", {"weights": 2}, 20))
    assert "per_device_eval_batch_size: 4 (about 10.00 GB less)" in advise(planned, more)


def test_a_layer_that_shards_are_gathered_to_is_subtracted():
    planned = plan(program("training step", {"weights": 16}, 2))
    (mesh,) = (line for line in advise(planned, replace(LORA, layer_bytes=GB)) if line.startswith("mesh"))
    # In all, 14 GB are on other chips then.
    assert mesh.endswith("(about 13.00 GB less)")
    # Where all weights are trained, gradients on other chips may make up for it.
    (mesh,) = (line for line in advise(planned, replace(FULL, layer_bytes=GB)) if line.startswith("mesh"))
    assert mesh.endswith("(about 14.00 GB less)")
    in_part = replace(LORA, layer_bytes=GB, mesh={"data": 2, "fsdp": 4})
    (mesh,) = (line for line in advise(planned, in_part) if line.startswith("mesh"))
    assert mesh.endswith("(about 8.00 GB less)")
    assert not [line for line in advise(planned, replace(LORA, layer_bytes=14 * GB)) if line.startswith("mesh")]


def test_an_evaluation_that_does_not_fit_has_a_batch_size_of_its_own():
    split = replace(LORA, mesh={"data": 1, "fsdp": 8})
    planned = plan(program("training step", {"weights": 2}, 10), program("evaluation step", {"weights": 2}, 20))
    # A search does not vary it.
    assert advise(planned, split) == ["per_device_eval_batch_size: 4 (about 10.00 GB less)"]
    # Where neither fits, neither batch alone is enough.
    planned = plan(program("training step", {"weights": 2}, 18), program("evaluation step", {"weights": 2}, 20))
    first, *others = advise(planned, split)
    assert first == "No one of these is sure to be enough; the first is the next to try, then several:"
    assert settings(others) == [
        "per_device_eval_batch_size: 4",
        "per_device_train_batch_size: 2",
        "load_in_4bit: true",
    ]


def test_says_where_nothing_is_enough():
    own = replace(LORA, mesh={"data": 1, "fsdp": 1}, is_quantized=True)
    planned = plan(program("training step", {"weights": 20}, 2, "v5e-1"), topology="v5e-1")
    (line,) = advise(planned, own)
    assert line.startswith("More chips (--topology) with mesh: fsdp")


def test_without_numbers_advises_all_that_is_not_set():
    refused = CompiledProgram("training step", (32, 1024), 1.0, "RESOURCE_EXHAUSTED: hbm", arguments={"weights": GB})
    assert settings(advise(plan(refused), LORA)) == [
        "mesh: fsdp",
        "load_in_4bit: true",
        "per_device_train_batch_size: 2",
    ]


def test_of_a_plan_that_fits_or_is_not_known():
    planned, roomy = (plan(program("training step", {"weights": weights}, 2)) for weights in (8, 2))
    faster = "--search compiles variants, larger batches among them, and says which are faster."
    assert advise(planned, LORA, is_searched=True) == []
    assert advise(planned, LORA) == [faster] and advise(planned, FULL) == [faster, HALVES_STATE]
    assert advise_besides(planned, LORA) == [] and advise_besides(planned, FULL) == [HALVES_STATE]
    # Where there is room, numbers stay exact.
    assert advise(roomy, FULL) == [faster] and advise_besides(roomy, FULL) == []
    unknown = replace(planned, programs=[], unknown=["the TPU compiler is not installed"])
    assert advise(unknown, FULL) == [] and advise_besides(unknown, FULL) == []


def test_after_a_search_that_found_nothing_what_it_does_not_try_is_left():
    planned = plan(program("training step", {"weights": 20}, 2))
    assert settings(advise_besides(planned, LORA)) == ["load_in_4bit: true"]
    assert settings(advise_besides(planned, FULL)) == ["use_peft: true", "dtype: bfloat16"]
    assert advise_besides(replace(planned, trials=[Trial({}, True)]), LORA) == []


def test_the_sums_of_gradients_are_as_large_as_the_weights_that_a_step_updates():
    sharding = "{devices=[8,1]0,1,2,3,4,5,6,7}"
    arguments = [
        Argument("weights", 16 * GB, True, sharding),
        Argument("weights", 3 * GB, False),
        Argument("optimizer state", GB, True),
    ]
    assert TracedProgram("training step", (32, 1024), b"", arguments, 8).updated_weight_bytes == 2 * GB


def traced(sharding):
    arguments = [
        Argument("weights", 16 * GB, False, sharding),
        Argument("optimizer state", GB, True, "{replicated}"),
        Argument("batch", 9 * GB, False),
    ]
    return [TracedProgram("training step", (32, 1024), b"", arguments, 8)]


def test_state_that_fills_a_chip_is_told_before_it_is_compiled():
    topology = find_topology("v5e-8")
    line = foresee(traced(None), topology, LORA)
    assert "weights 16.00 GB, optimizer state 1.00 GB take 101 % of the 16.91 GB of HBM that a chip has" in line
    assert "To change it: mesh: fsdp, which shards weights" in line
    sharded = {
        "{devices=[8,1]0,1,2,3,4,5,6,7}": 2 * GB,
        "{devices=[4,1,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}": 4 * GB,
    }
    for sharding, weights in sharded.items():
        (program,) = traced(sharding)
        assert program.resident == {"weights": weights, "optimizer state": GB, "gradients": 0}
        assert foresee([program], topology, LORA) is None
