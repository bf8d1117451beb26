"""Two processes with a device each, which speak by gloo on the host: what one process trains with the rows of both."""

import shutil
import sys
from pathlib import Path

import pytest


HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "trainers")]

import preference  # noqa: E402
from preference import Case  # noqa: E402
from ranks_data import evaluated_rows, logits_in_mean, on_ranks  # noqa: E402


CONFIG = dict(max_steps=6, length_buckets=[16, 24, 32, 48], per_device_eval_batch_size=4)
EVALUATED = dict(eval_strategy="steps", eval_steps=3)
FULL = dict(CONFIG, **EVALUATED, gradient_checkpointing=False, include_num_input_tokens_seen="non_padding")
STARTS = {
    "full": dict(FULL, mesh="data=2"),
    "lora": dict(
        CONFIG, lora={}, gradient_checkpointing=False, gradient_accumulation_steps=2, per_device_train_batch_size=2
    ),
    "layers": dict(CONFIG, **EVALUATED, metrics=True, max_steps=3, gradient_checkpointing=True),
    "dpo": dict(case={"kind": "dpo", "steps": 3}, per_device_train_batch_size=2),
    "taught": dict(CONFIG, **EVALUATED, kd_teacher="TEACHER", kd_top_k=16, max_steps=3, gradient_accumulation_steps=2),
    # Far enough from its base for the divergence to be more than rounding.
    "anchored": dict(
        CONFIG,
        lora={},
        kd_teacher="base",
        learning_rate=0.05,
        warmup_steps=0,
        max_steps=3,
        gradient_checkpointing=False,
    ),
    "cached": dict(CONFIG, kd_cache="nowhere", refused=True),
    # A run that is resumed saves as often as its checkpoint says.
    "stopped": dict(FULL, stop_at=2, save_strategy="steps", save_steps=4),
}


@pytest.fixture(scope="module")
def noted(tpu, tiny_model, tmp_path_factory):
    from hf_tpu_ext.examples.tiny import make_model

    directory = tmp_path_factory.mktemp("ranks")
    teacher = make_model(directory / "teacher", hidden_size=48, intermediate_size=64, num_hidden_layers=1, seed=5)
    starts = {
        name: {**start, "kd_teacher": str(teacher)} if start.get("kd_teacher") == "TEACHER" else start
        for name, start in STARTS.items()
    }
    ranks, printed = on_ranks(starts, tiny_model, directory)
    for name in (name for name in STARTS if "refused" not in STARTS[name]):
        first, second = (rank[name] for rank in ranks)
        assert first["weights"] == second["weights"] and first["shapes"] == second["shapes"], name
    return directory, ranks, printed


def test_two_processes_train_as_one_with_the_rows_of_both(noted, ours, stock_of_ranks, same_logs):
    _, found, printed = noted
    same_logs(ours("full"), stock_of_ranks(**STARTS["full"]))
    assert "2 chips in 2 processes" in printed
    assert "global batch size 8 (4 per chip x 1 gradient accumulation step x 2 chips)" in printed
    assert "compiled one by one" not in printed
    assert found[0]["full"]["compiles"][2:] == [0] * 4 and found[0]["full"]["recompiles"] == 0


def test_batches_have_the_declared_shape_of_the_longest_row_of_both(noted):
    _, ranks, _ = noted
    lengths = [
        [min(size for size in [16, 24, 32, 48] if size >= own) for own in rank["full"]["longest"]] for rank in ranks
    ]
    # By themselves they would have taken batches of other lengths for the same step.
    assert lengths[0] != lengths[1]
    assert ranks[0]["full"]["shapes"] == [[4, max(both)] for both in zip(*lengths, strict=True)]


def test_adapters_and_accumulation(ours, stock_of_ranks, same_logs):
    """With the weights of the first process in both."""
    one = stock_of_ranks(**STARTS["lora"])
    same_logs(ours("lora"), one)


def test_layers_compiled_one_by_one_and_predictions_of_all(ours, stock_of_ranks, same_logs):

    one = stock_of_ranks(**STARTS["layers"], kwargs={"compute_metrics": logits_in_mean})
    same_logs(ours("layers"), one)


@pytest.mark.parametrize("name", ["taught", "anchored"])
def test_distillation(noted, runs, shared, same_logs, ours, name):
    from hf_tpu_ext import TPUSFTConfig

    runs.train_dataset, runs.eval_dataset = shared.make_rows(24), evaluated_rows()
    config = {**STARTS[name], "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8}
    if config["kd_teacher"] == "TEACHER":
        config["kd_teacher"] = str(noted[0] / "teacher")
    one = runs.ours(config_cls=TPUSFTConfig, backend="cpu", dataloader_pin_memory=False, **config)
    same_logs(ours(name), one)
    assert any("kd_loss" in entry for entry in one.state.log_history)


def test_a_cached_teacher_is_refused(noted):
    for rank in noted[1]:
        assert "is read by one process only with torch_tpu" in rank["cached"]["refused"]


def test_preferences(ours, tpu, tiny_model, monkeypatch, tmp_path):
    monkeypatch.setattr(preference, "_model_dir", lambda *_, **__: tiny_model)
    case = Case(**STARTS["dpo"]["case"], settings={"per_device_train_batch_size": 4})
    trainer = preference.trainer_for(case, tmp_path, ours=False)
    trainer.train()
    preference.assert_same_numbers(case, ours("dpo").state.log_history, trainer.state.log_history)


def test_all_stop_after_the_same_step_and_go_on_in_one_process_and_in_two(
    noted, runs, shared, tiny_model, as_trainer, same_logs, ours, tmp_path
):
    """Process 1 alone was told. The run goes on in one process with as many rows, and again in two."""
    from hf_tpu_ext import TPUSFTConfig

    directory, found, printed = noted
    assert [rank["stopped"]["step"] for rank in found] == [
        2,
        2,
    ] and "Stopped by SIGTERM after step 2, saved in" in printed
    shutil.copytree(directory / "stopped", tmp_path / "one")
    runs.train_dataset, runs.eval_dataset = shared.make_rows(24), evaluated_rows()
    config = {**FULL, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8}
    one = runs.ours(
        train=False,
        config_cls=TPUSFTConfig,
        output_dir=str(tmp_path / "one"),
        save_strategy="steps",
        save_steps=4,
        **config,
    )
    one.train(resume_from_checkpoint=True)
    # The last entry is of the run that ends: the mean loss of its own steps.
    until_the_end = as_trainer(ours("full").state.log_history[:-1])
    same_logs(as_trainer(one.state.log_history[:-1]), until_the_end)
    again, _ = on_ranks({"again": dict(FULL, resume=str(tmp_path / "one" / "checkpoint-4"))}, tiny_model, tmp_path)
    same_logs(as_trainer(again[0]["again"]["log"][:-1]), until_the_end)


def test_hf_tpu_starts_a_process_for_each_chip(hf_tpu, tmp_path):
    """Two chips, which the machine is said to have. Their exit status is that of the command."""
    hf_tpu("prepare", "tiny", "--output_dir", "tiny")
    (tmp_path / "rewards.py").write_text(
        "def short(completions, **_): return [-float(len(text)) for text in completions]"
    )
    common = ("--smoke", "tiny", "--output_dir", "out", "--compile_step", "off")
    trained = hf_tpu("sft", *common, "--max_steps", "2", "--mesh", "data=2", chips=2)
    assert "2 chips in 2 processes" in trained.stdout and trained.stdout.count("Training on") == 1
    assert (tmp_path / "out" / "model.safetensors").is_file() and (tmp_path / "out" / "report.html").is_file()
    rewards = ("--reward_funcs", "rewards.short", "--max_completion_length", "8")
    written = hf_tpu("grpo", *common, "--max_steps", "1", *rewards, chips=2)
    assert "2 chips in 2 processes" in written.stdout
    refused = hf_tpu("sft", *common, "--num_chips", "3", chips=2, status=2)
    assert "num_chips=3, but this machine has 2 chips" in refused.stderr
    mistaken = hf_tpu("sft", *common, "--mesh", "fsdp", "--ema_decay", "0.9", chips=2, status=2)
    assert "ema_decay=0.9 does not work with mesh='fsdp'" in mistaken.stderr
