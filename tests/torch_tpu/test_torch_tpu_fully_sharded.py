"""Processes that hold parts of the weights, and speak by gloo on the host: what one process trains with the rows of all."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "trainers")]

import preference  # noqa: E402
from preference import Case  # noqa: E402
from ranks_data import evaluated_rows, logits_in_mean, on_ranks  # noqa: E402


CONFIG = dict(max_steps=6, length_buckets=[16, 24, 32, 48], per_device_eval_batch_size=4)
EVALUATED = dict(eval_strategy="steps", eval_steps=2)
SAVED = dict(save_strategy="steps", save_steps=2)
SPLIT = dict(mesh="fsdp", compile_step="off")
FULL = dict(
    CONFIG | EVALUATED | {"max_steps": 8}, gradient_checkpointing=False, include_num_input_tokens_seen="non_padding"
)
LORA = dict(CONFIG, lora={}, gradient_checkpointing=False, gradient_accumulation_steps=2)
LORA["per_device_train_batch_size"] = 2
STARTS = {
    "full": dict(FULL, **SPLIT, **SAVED, load_best_model_at_end=True),
    "lora": dict(LORA, **SPLIT, **SAVED),
    # Evaluated where the mean of the logits is not nearly 0.
    "layers": dict(
        CONFIG | EVALUATED | {"eval_steps": 3, "max_steps": 3},
        mesh="fsdp=2",
        metrics=True,
        gradient_checkpointing=True,
    ),
    "dpo": dict(case={"kind": "dpo", "steps": 3}, per_device_train_batch_size=2, **SPLIT),
    "dpo_lora": dict(case={"kind": "dpo", "steps": 3, "lora": "new"}, per_device_train_batch_size=2, **SPLIT),
}
REFUSED = {
    "ema": (dict(ema_decay=0.9), "ema_decay=0.9 does not work with mesh='fsdp'"),
    "qat": (
        dict(qat_weight_dtype="int4", qat_group_size=16),
        "qat_weight_dtype='int4' does not work with mesh='fsdp'",
    ),
    "quantized": (dict(quantized=True, lora={}), "a model with quantized weights does not work with mesh='fsdp'"),
    "samples": (dict(show_samples=2), "show_samples=2 does not work with mesh='fsdp'"),
    "sgd": (dict(optim="sgd"), "optim='sgd' does not work with mesh='fsdp'"),
    "teacher": (dict(kd_teacher="base"), "kd_teacher='base' does not work with mesh='fsdp'"),
    "synced": (
        dict(case={"kind": "dpo", "steps": 1}, sync_ref_model=True),
        "sync_ref_model=True does not work with mesh='fsdp'",
    ),
    "whole": (dict(gradient_checkpointing=False, compile_step="step"), "compile_step='step' is not possible: weights"),
    "sizes": (dict(mesh="fsdp=4"), "mesh='fsdp=4' is for 4 chips, not 2"),
}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """Directory of a tiny Qwen3 whose head is its embedding."""
    from hf_tpu_ext.examples.tiny import make_model

    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    return make_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True, **sizes)


@pytest.fixture(scope="module")
def noted(tpu, tiny_model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("split")
    again = dict(STARTS["lora"], resume=str(directory / "lora" / "checkpoint-2"))
    refused = {name: dict(mesh="fsdp", refused=True) | config for name, (config, _) in REFUSED.items()}
    ranks, printed = on_ranks({**STARTS, "lora_again": again, **refused}, tiny_model, directory)
    return directory, ranks, printed


def test_two_processes_train_as_one_with_the_rows_of_both(noted, ours, stock_of_ranks, same_logs):
    _, ranks, printed = noted
    same_logs(ours("full"), stock_of_ranks(**STARTS["full"]))
    assert "fully sharded (mesh fsdp=2)" in printed
    assert ranks[0]["full"]["compiles"][3:] == [0] * 5


@pytest.mark.parametrize("name", ["full", "lora"])
def test_each_holds_half(noted, name):
    (first, whole), (second, _) = (rank[name]["held"] for rank in noted[1])
    # A vocabulary of an odd number is one row more in one of them.
    assert first + second == whole and abs(first - second) <= 0.01 * whole


def test_adapters_and_accumulation_and_going_on(ours, stock_of_ranks, same_logs, as_trainer):
    one = stock_of_ranks(**STARTS["lora"])
    same_logs(ours("lora"), one)
    # The last entry is of the run that ends: the mean loss of its own steps.
    until_the_end = [as_trainer(trainer.state.log_history[:-1]) for trainer in (ours("lora_again"), one)]
    same_logs(*until_the_end)


def test_layers_compiled_one_by_one_and_predictions_of_all(noted, ours, stock_of_ranks, same_logs):
    one = stock_of_ranks(**STARTS["layers"], kwargs={"compute_metrics": logits_in_mean})
    same_logs(ours("layers"), one)
    assert "The 2 layers are compiled one by one, and the rest is run by operators: weights are split over" in noted[2]


@pytest.mark.parametrize("name", ["dpo", "dpo_lora"])
def test_preferences(ours, tpu, tiny_model, monkeypatch, tmp_path, name):
    """A reference is split as well; that of an adapter is the model without it."""
    monkeypatch.setattr(preference, "_model_dir", lambda *_, **__: tiny_model)
    case = Case(**STARTS[name]["case"], settings={"per_device_train_batch_size": 4})
    trainer = preference.trainer_for(case, tmp_path, ours=False)
    trainer.train()
    preference.assert_same_numbers(case, ours(name).state.log_history, trainer.state.log_history)


def test_a_checkpoint_is_in_plain_form(noted, tiny_model):
    """Whole tensors, tied weights once, by the first process alone, under the names that upstream gives."""
    directory, ranks, _ = noted
    checkpoint = directory / "full" / "checkpoint-2"
    names = sorted(path.name for path in checkpoint.iterdir())
    assert "model.safetensors" in names and names.count("optimizer.pt") == 1
    stored = load_file(checkpoint / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert set(stored) == {name for name, _ in model.named_parameters()} and "lm_head.weight" not in stored
    assert {name: value.shape for name, value in stored.items()} == {
        name: value.shape for name, value in model.named_parameters()
    }
    moments = torch.load(checkpoint / "optimizer.pt")["state"]
    assert {value.device.type for state in moments.values() for value in state.values()} == {"cpu"}
    assert sum(state["exp_avg"].numel() for state in moments.values()) == model.num_parameters()
    # The best is the last, whose weights were loaded at the end.
    best = load_file(directory / "full" / "checkpoint-8" / "model.safetensors")
    for rank in ranks:
        for name, value in best.items():
            assert rank["full"]["weights"][name] == pytest.approx(value.double().sum().item(), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_work_is_refused(noted, name):
    for rank in noted[1]:
        assert REFUSED[name][1] in rank[name]["refused"]


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_any_number_of_processes(
    noted, ours, runs, shared, tiny_model, as_trainer, same_logs, tmp_path
):
    """In one that holds all, in two that hold all, and in two that hold parts."""
    from hf_tpu_ext import TPUSFTConfig

    directory, _, _ = noted
    until_the_end = as_trainer(ours("full").state.log_history[:-1])
    runs.train_dataset, runs.eval_dataset = shared.make_rows(24), evaluated_rows()
    whole = {**FULL, **SAVED, "compile_step": "off"}
    one = runs.ours(
        train=False,
        config_cls=TPUSFTConfig,
        output_dir=str(tmp_path / "one"),
        **{**whole, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8},
    )
    one.train(resume_from_checkpoint=str(directory / "full" / "checkpoint-2"))
    same_logs(as_trainer(one.state.log_history[:-1]), until_the_end)
    legs = {
        "data": dict(whole, mesh="data", resume=str(tmp_path / "one" / "checkpoint-4")),
        "fsdp": dict(whole, mesh="fsdp", resume=str(tmp_path / "data" / "checkpoint-6")),
    }
    ranks, _ = on_ranks(legs, tiny_model, tmp_path)
    for name in legs:
        same_logs(as_trainer(ranks[0][name]["log"][:-1]), until_the_end)


@pytest.mark.slow
def test_eight_stop_and_one_goes_on_and_then_four(
    tpu, tiny_model, runs, stock_of_ranks, as_trainer, same_logs, tmp_path
):
    """Two groups of four that hold parts, of which process 1 alone is told to stop; one that holds all; four that hold parts."""
    from hf_tpu_ext import TPUSFTConfig

    until_the_end = as_trainer(stock_of_ranks(**FULL).state.log_history[:-1])
    config = {**FULL, "save_strategy": "steps", "save_steps": 4, "compile_step": "off"}

    def rows(count):
        return {"per_device_train_batch_size": count, "per_device_eval_batch_size": count}

    eight = dict(config, mesh="data=2,fsdp=4", stop_at=2, **rows(1))
    ranks, printed = on_ranks({"eight": eight}, tiny_model, tmp_path, count=8)
    assert [rank["eight"]["step"] for rank in ranks] == [2] * 8
    assert "fully sharded in 2 groups (mesh data=2 x fsdp=4)" in printed
    one = runs.ours(train=False, config_cls=TPUSFTConfig, output_dir=str(tmp_path / "one"), **{**config, **rows(8)})
    one.train(resume_from_checkpoint=str(tmp_path / "eight" / "checkpoint-2"))
    same_logs(as_trainer(one.state.log_history[:-1]), until_the_end)
    four = dict(config, mesh="fsdp", resume=str(tmp_path / "one" / "checkpoint-4"), **rows(2))
    ranks, _ = on_ranks({"four": four}, tiny_model, tmp_path, count=4)
    same_logs(as_trainer(ranks[0]["four"]["log"][:-1]), until_the_end)


@pytest.mark.slow
def test_groups_of_processes_that_hold_parts(tpu, tiny_model, stock_of_ranks, as_trainer, same_logs, tmp_path):
    config = dict(FULL, mesh="data=2,fsdp=2", compile_step="off", per_device_train_batch_size=2)
    config["per_device_eval_batch_size"] = 2
    ranks, printed = on_ranks({"groups": config}, tiny_model, tmp_path, count=4)
    same_logs(as_trainer(ranks[0]["groups"]["log"]), stock_of_ranks(count=4, **config))
    assert "fully sharded in 2 groups (mesh data=2 x fsdp=2)" in printed
    held = [rank["groups"]["held"] for rank in ranks]
    assert sum(own for own, _ in held) == 2 * held[0][1]
