"""Two processes that a launcher has started, on the eager CPU with gloo: upstream's numbers there, or those of one process."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import processes_driver
import pytest
from processes_driver import KINDS, LEARNS, SAVES, TAUGHT, assert_same, build, in_processes, of_test, taught_rows
from safetensors.torch import load_file

from hf_tpu_ext.distillation.cache import TeacherCache
from hf_tpu_ext.trainers.checkpoint.verification import find_damage


# Process 0 has rows 0 and 1, process 1 rows 2 and 3.
BY_PROCESS = {
    "own tokens": dict(TAUGHT["online"], average_tokens_across_devices=False, max_steps=1),
}
PLAIN = dict(LEARNS, train_sampling_strategy="random")


@pytest.fixture(scope="module")
def tiny_model(two_layer_model):
    """Of one layer, what is near zero differs by more than what is compared to."""
    return two_layer_model


def rows_of_two(spec):
    """As many rows in one process."""
    return {
        name: config
        if "command" in config
        else {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, **config}
        for name, config in spec.items()
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    taught_rows().to_json(directory / "train.jsonl")
    return directory


@pytest.fixture(scope="module")
def two(tiny_model, teacher, data, tmp_path_factory):
    """A directory, what each of two processes noted, and what it printed."""
    directory = tmp_path_factory.mktemp("two")
    spec = {
        "cache": build(directory, tiny_model, teacher, data),
        **TAUGHT,
        "plain": PLAIN,
        **BY_PROCESS,
        "whole": SAVES,
        "stopped": dict(SAVES, stop_at=3, save_strategy="no", run_report=True),
        "resumed": dict(SAVES, dir="stopped", resume=True, save_strategy="no"),
    }
    noted, printed = in_processes(of_test(spec, teacher, directory / "cache"), tiny_model, directory)
    for name in spec:
        assert noted[0][name].get("weights") == noted[1][name].get("weights"), name
    return directory, noted, printed


@pytest.fixture(scope="module")
def one(tiny_model, teacher, data, tmp_path_factory):
    """A directory, and what one process noted with the rows of two."""
    directory = tmp_path_factory.mktemp("one")
    # Of one process of the two by itself.
    alone = {
        f"{name} of {process}": dict(config, first_row=2 * process, per_device_train_batch_size=2)
        for name, config in BY_PROCESS.items()
        for process in range(2)
    }
    spec = {"cache": build(directory, tiny_model, teacher, data), **TAUGHT, **alone}
    spec["stock"] = dict(PLAIN, ours=False)
    (noted,), _ = in_processes(
        rows_of_two(of_test(spec, teacher, directory / "cache")), tiny_model, directory, count=1
    )
    return directory, noted


@pytest.mark.parametrize("name", TAUGHT)
def test_two_processes_learn_from_a_teacher_as_one(two, one, name):
    assert_same(two[1][0][name]["log"], one[1][name]["log"])


def test_tokens_of_each_process_by_themselves(two, one):
    """`average_tokens_across_devices=False`: the mean of the losses that each process has of its own tokens."""
    step, of_each = (
        two[1][0]["own tokens"]["log"][0],
        [one[1][f"own tokens of {process}"]["log"][0] for process in (0, 1)],
    )
    assert step["loss"] == pytest.approx(sum(each["loss"] for each in of_each) / 2, rel=1e-6)
    assert of_each[0]["loss"] != pytest.approx(of_each[1]["loss"], rel=1e-2)


def test_cache_that_two_processes_build_is_that_of_one(two, one):
    assert [noted["cache"] for noted in two[1]] == [{"status": 0, "files": 3}] * 2
    assert one[1]["cache"] == {"status": 0, "files": 6}
    found, expected = (
        {path.name: path.read_bytes() for path in (directory / "cache").iterdir()} for directory in (two[0], one[0])
    )
    assert found == expected and len(found) == 7
    assert "in each of 2 processes, batch size 4" in two[2][0] and "24 sequences of" in two[2][0]
    assert "batch size 4" not in two[2][1] and "sequences of" not in two[2][1]


def test_two_processes_train_what_upstreams_trainer_trains_in_one(two, one):
    log, expected = two[1][0]["plain"]["log"][:3], one[1]["stock"]["log"][:3]
    for entry, other in zip(log, expected, strict=True):
        assert [entry["step"], entry["loss"], entry["grad_norm"]] == pytest.approx(
            [other["step"], other["loss"], other["grad_norm"]], rel=1e-6, abs=1e-6
        )


def test_signal_to_one_process_stops_both_and_the_run_goes_on(two):
    directory, noted, printed = two
    checkpoint = str(directory / "stopped" / "checkpoint-3")
    assert [each["stopped"]["stopped"] for each in noted] == [[os.EX_TEMPFAIL, "SIGTERM", checkpoint, 3]] * 2
    assert find_damage(Path(checkpoint)) is None
    for each in noted:
        assert each["resumed"]["weights"] == each["whole"]["weights"]
    # The mean loss of a run is that of the steps after it was resumed.
    assert_same(noted[0]["resumed"]["log"][:-1], noted[0]["whole"]["log"][:-1], rel=0)


def test_one_process_writes_and_prints(two):
    directory, noted, printed = two
    assert printed[0].count("Stopped by SIGTERM after step 3") == 1 and "Stopped by" not in printed[1]
    assert "in 2 processes" in printed[0] and "Training on" not in printed[1] and "'loss'" not in printed[1]
    files = {path.name for path in (directory / "stopped").iterdir()}
    assert {"run.jsonl", "report.html", "report.md", "checkpoint-3"} <= files
    events = [json.loads(line)["event"] for line in (directory / "stopped" / "run.jsonl").read_text().splitlines()]
    assert events.count("begin") == 1


# ---- As upstream's trainers in the same two processes ----


@pytest.mark.slow
def test_two_processes_train_as_with_upstreams_trainers(tiny_model, tmp_path):
    spec = {}
    for name, config in KINDS.items():
        spec |= {name: config, f"stock {name}": dict(config, ours=False)}
    noted, _ = in_processes(spec, tiny_model, tmp_path)
    for name in KINDS:
        for each in noted:
            assert_same(each[name]["log"], each[f"stock {name}"]["log"], rel=0)
            assert each[name]["weights"] == each[f"stock {name}"]["weights"], name


SPLIT = dict(
    split=True,
    fsdp=True,
    fsdp_config={
        "fsdp_version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"],
    },
)


@pytest.mark.slow
def test_weights_that_accelerate_splits(two, one, tiny_model, teacher, tmp_path):
    """FSDP2, as on GPUs: what upstream's trainers log there, a cached teacher, a run that is stopped and goes on."""
    saves = dict(max_steps=4, save_strategy="steps", save_steps=2, **SPLIT)
    spec = {
        "cached": dict(LEARNS, kd_cache="CACHE", lora={}, **SPLIT),
        "whole": saves,
        "stopped": dict(saves, stop_at=3, save_strategy="no"),
        "resumed": dict(saves, dir="stopped", resume=True, save_strategy="no"),
    }
    for name in ("lora", "dpo", "grpo"):
        spec |= {name: dict(KINDS[name], **SPLIT), f"stock {name}": dict(KINDS[name], ours=False, **SPLIT)}
    noted, _ = in_processes(of_test(spec, teacher, two[0] / "cache"), tiny_model, tmp_path)
    for each in noted:
        assert {(found["distributed"], found["split weights"] > 20) for found in each.values()} == {("FSDP", True)}
        for name in ("lora", "dpo", "grpo"):
            assert_same(each[name]["log"], each[f"stock {name}"]["log"], rel=0)
            assert each[name]["weights"] == each[f"stock {name}"]["weights"], name
        assert each["stopped"]["stopped"][0] == os.EX_TEMPFAIL and each["stopped"]["step"] == 3
        assert each["resumed"]["weights"] == each["whole"]["weights"]
        # Upstream's norm is another one there.
        for mine, other in zip(each["cached"]["log"], one[1]["cached"]["log"], strict=True):
            for key in {*other} - {"grad_norm"}:
                assert mine[key] == pytest.approx(other[key], rel=1e-6, abs=1e-8), f"{key} at step {other['step']}"


# ---- As one process with the rows of both ----


@pytest.mark.slow
def test_two_processes_round_average_and_take_quantized_weights_as_one(wide_model, tmp_path):
    spec = {
        # Adam would move a weight by its rate where the gradient is rounding, and it would be rounded to another step.
        "qat": dict(LEARNS, qat_weight_dtype="int4", qat_group_size=16, optim="sgd"),
        # TRL's adapters of quantized models are bfloat16, which the order of a sum rounds one way or the other. And a divergence
        # from the base is to be larger than what float32 leaves of a difference of logarithms.
        "qlora": dict(LEARNS | {"learning_rate": 5e-2}, qlora=True, float32_adapters=True, lora={}, kd_teacher="base"),
        "average": dict(LEARNS, optim="sgd", ema_decay=0.5, save_strategy="steps", save_steps=3),
    }
    two, _ = in_processes(spec, wide_model, tmp_path / "two")
    one, _ = in_processes(rows_of_two(spec), wide_model, tmp_path / "one", count=1)
    for name in spec:
        assert two[0][name]["weights"] == two[1][name]["weights"]
        assert_same(two[0][name]["log"], one[0][name]["log"])
    averages = [load_file(tmp_path / count / "average/checkpoint-3/ema.safetensors") for count in ("two", "one")]
    for name, average in averages[0].items():
        assert (average - averages[1][name]).abs().max() < 1e-6, name


@pytest.mark.slow
def test_run_moves_from_two_processes_to_one_and_back(tiny_model, teacher, tmp_path):
    spec = of_test({"run": SAVES}, teacher, "")
    (whole, _), _ = in_processes(spec, tiny_model, tmp_path / "whole")
    resumed = {"run": dict(spec["run"], resume=True)}
    shutil.copytree(tmp_path / "whole/run/checkpoint-2", tmp_path / "one/run/checkpoint-2")
    (one,), printed = in_processes(resumed, tiny_model, tmp_path / "one", count=1)
    assert "To keep it on 1: 2 per device x 4 gradient accumulation steps." in printed[0]
    shutil.copytree(tmp_path / "one/run/checkpoint-4", tmp_path / "back/run/checkpoint-4")
    # And with other rows, as the recipe says, of which one process tells.
    checkpoint = str(tmp_path / "one/run/checkpoint-4")
    resumed["other"] = dict(spec["run"], resume=checkpoint, per_device_train_batch_size=1, max_steps=5)
    (back, _), printed = in_processes(resumed, tiny_model, tmp_path / "back")
    assert "this run takes 4, as the recipe says" in printed[0] and "as the recipe says" not in printed[1]
    assert back["run"]["step"] == 6
    for found in (one, back):
        for mine, other in zip(found["run"]["log"][:-1], whole["run"]["log"][:-1], strict=True):
            # Upstream and we log the mean over micro-steps of metrics, whose number differs.
            for key in ("step", "loss", "grad_norm", "learning_rate", "num_tokens"):
                assert mine[key] == pytest.approx(other[key], rel=1e-6), f"{key} at step {other['step']}"
    averages = [load_file(tmp_path / run / "run/checkpoint-6/ema.safetensors") for run in ("whole", "back")]
    for name, average in averages[0].items():
        assert (average - averages[1][name]).abs().max() < 1e-6, name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", "rloo", "distillation"])
def test_completions_of_both_processes_are_resumed(tiny_model, tmp_path, kind):
    """In the middle of a generation, whose completions each process has padded to its own longest."""
    config = dict(
        rollout=dict(kind=kind, steps=4, **({"rewards": []} if kind == "distillation" else {})),
        save_strategy="steps",
        save_steps=1,
    )
    if kind != "distillation":
        config |= dict(steps_per_generation=2, num_iterations=2)
    spec = {"whole": config, "resumed": dict(config, resume=str(tmp_path / "whole" / "checkpoint-3"))}
    noted, _ = in_processes(spec, tiny_model, tmp_path)
    for each in noted:
        # The rest is the mean of a run, of which the resumed one has had one step.
        assert_same(each["resumed"]["log"][:-1], each["whole"]["log"][:-1], rel=0)
        assert each["resumed"]["weights"] == each["whole"]["weights"]


# ---- Stopped and lost processes ----


@pytest.mark.slow
def test_signal_to_one_process_in_the_middle_of_an_evaluation(tiny_model, tmp_path):
    evaluates = dict(max_steps=4, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2)
    spec = {
        "whole": evaluates,
        "cut": dict(evaluates, stop_at=3, stops_evaluation=True),
        "made up": dict(evaluates, dir="cut", resume=True),
    }
    noted, _ = in_processes(spec, tiny_model, tmp_path)
    for each in noted:
        assert each["cut"]["stopped"][0] == os.EX_TEMPFAIL and each["cut"]["step"] == 2
        assert not any("eval_loss" in entry for entry in each["cut"]["log"])
        assert each["made up"]["weights"] == each["whole"]["weights"]
        assert_same(each["made up"]["log"][:-1], each["whole"]["log"][:-1], rel=0)


@pytest.mark.slow
def test_cache_whose_build_lost_a_process_is_the_same_byte_for_byte(tiny_model, teacher, data, tmp_path):
    spec = {name: build(tmp_path / name, tiny_model, teacher, data, per_file=2) for name in ("whole", "killed")}
    killed = build(tmp_path / "killed", tiny_model, teacher, data, per_file=2, dies_at=3)
    in_processes({"killed": killed}, tiny_model, tmp_path / "first", lost=True)
    manifest = json.loads((tmp_path / "killed/cache/manifest.json").read_text())
    assert len(manifest["shards"]) == 4
    with pytest.raises(ValueError, match="is not complete"):
        TeacherCache(tmp_path / "killed/cache")
    noted, _ = in_processes(spec, tiny_model, tmp_path / "second")
    assert [each["whole"]["files"] for each in noted] == [6, 6]
    assert [each["killed"]["files"] for each in noted] == [4, 4]
    found, expected = (
        {path.name: path.read_bytes() for path in (tmp_path / name / "cache").iterdir()} for name in spec
    )
    assert found == expected and len(found) == 13


@pytest.mark.slow
def test_torchrun_of_which_one_process_is_told_to_stop(tiny_model, teacher, tmp_path):
    spec_file = tmp_path / "spec.json"
    spec = of_test({"run": dict(SAVES, stop_at=3, save_strategy="no", left_alone=True)}, teacher, "")
    spec_file.write_text(json.dumps(spec))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    result = subprocess.run(
        [
            *launch,
            processes_driver.__file__,
            str(tiny_model),
            str(tmp_path),
            str(spec_file),
            str(tmp_path / "noted.json"),
        ],
        env={**os.environ, "USE_TORCH_XLA": "0", "HF_TPU_EXT_BACKEND": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=processes_driver.SECONDS,
    )
    # Of torchrun itself, which names those of its processes.
    assert result.returncode == 1 and "exitcode  : 75" in result.stderr, result.stderr[-3000:]
    assert result.stdout.count("Stopped by SIGTERM after step 3") == 1
    assert find_damage(tmp_path / "run" / "checkpoint-3") is None
