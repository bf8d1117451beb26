"""On XLA, by torch_xla or torch_tpu, the losses, gradient norms and metrics are those of upstream's trainer on eager CPU."""

import os

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

from hf_tpu_ext import TPUTrainer, TPUTrainingArguments
from hf_tpu_ext.examples.tiny import make_model


EVERY_METRIC = {"loss", "grad_norm", "learning_rate", "entropy", "mean_token_accuracy", "num_tokens"}


@pytest.mark.usefixtures("two_layers")
@pytest.mark.parametrize("lora", [None, pytest.param({}, marks=pytest.mark.ci)], ids=["full", "lora"])
def test_twenty_steps_with_evaluation(runs, xla, same_logs, lora):
    config = dict(max_steps=20, warmup_steps=5, eval_strategy="steps", eval_steps=10)
    ours = runs.ours(lora=lora, **config)
    assert {ours.args.device.type, ours.accelerator.device.type, ours.model.device.type} == {xla.name}
    same_logs(ours, runs.stock(lora=lora, **config))
    assert EVERY_METRIC <= set(ours.state.log_history[0])
    assert {"eval_loss", "eval_entropy", "eval_mean_token_accuracy", "eval_num_tokens"} <= set(
        next(entry for entry in ours.state.log_history if "eval_loss" in entry)
    )


@pytest.mark.parametrize(
    "config",
    [
        dict(gradient_accumulation_steps=4, max_steps=4),
        pytest.param(
            dict(num_train_epochs=2, max_steps=-1, gradient_accumulation_steps=4, logging_steps=2),
            marks=pytest.mark.slow,
        ),
        pytest.param(dict(loss_type="dft"), marks=pytest.mark.slow),
        pytest.param(dict(label_smoothing_factor=0.1), marks=pytest.mark.slow),
        pytest.param(dict(max_grad_norm=0.0, max_steps=4), marks=pytest.mark.slow),
        pytest.param(dict(max_grad_norm=0.5, lr_scheduler_type="cosine"), marks=pytest.mark.slow),
        dict(completion_only_loss=False, max_steps=4),
        pytest.param(dict(gradient_checkpointing=False, adam_beta2=0.95, max_steps=4), marks=pytest.mark.slow),
        pytest.param(dict(dataloader_num_workers=1, max_steps=4), marks=pytest.mark.slow),
        dict(packing=True, packing_strategy="wrapped", max_steps=4),
        dict(eos_token="<|im_start|>", pad_token="<|im_end|>", max_steps=4),
        dict(train_sampling_strategy="group_by_length", max_steps=6),
    ],
    ids=lambda config: "-".join(f"{key}={value}" for key, value in config.items()),
)
def test_setting(runs, same_logs, config):
    same_logs(runs.ours(**config), runs.stock(**config))


@pytest.mark.ci
def test_dora(runs, same_logs):
    same_logs(runs.ours(lora={"use_dora": True}, max_steps=5), runs.stock(lora={"use_dora": True}, max_steps=5))


@pytest.mark.ci
def test_assistant_only_loss(runs, same_logs, rows):
    chats = rows(14).map(
        lambda row: {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["completion"]},
            ]
        },
        remove_columns=["prompt", "completion"],
    )
    both = dict(
        assistant_only_loss=True, max_length=96, max_steps=3, kwargs={"train_dataset": chats, "eval_dataset": None}
    )
    same_logs(runs.ours(**both), runs.stock(**both))


def test_streaming_with_several_evaluation_sets(runs, same_logs):
    """Of a stream, whose last batch is short and which TRL does not dispatch, that batch counts as a full one."""
    datasets = {
        "train_dataset": runs.train_dataset.to_iterable_dataset(),
        "eval_dataset": {"a": runs.eval_dataset, "b": runs.eval_dataset.select(range(5)).to_iterable_dataset()},
    }
    config = dict(kwargs=datasets, eval_strategy="steps", eval_steps=4)
    same_logs(runs.ours(**config), runs.stock(**config))


@pytest.mark.ci
def test_accumulation_is_invariant(runs):
    one_by_eight = runs.ours(per_device_train_batch_size=1, gradient_accumulation_steps=8, max_steps=4)
    eight_by_one = runs.ours(per_device_train_batch_size=8, gradient_accumulation_steps=1, max_steps=4)
    for key in ("loss", "grad_norm"):
        a, b = (
            [entry[key] for entry in run.state.log_history if key in entry] for run in (one_by_eight, eight_by_one)
        )
        assert a == pytest.approx(b, rel=1e-5)


@pytest.mark.ci
def test_bfloat16_compute_keeps_float32_weights_and_stays_close(runs):
    """TRL's default precision. The tolerance is that of bfloat16's 8 bits, on eager CPU as well."""
    ours, stock = runs.ours(bf16=True, max_steps=6), runs.stock(bf16=True, max_steps=6)
    assert {parameter.dtype for parameter in ours.model.parameters()} == {torch.float32}
    moments = {state[name].dtype for state in ours.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")}
    assert moments == {torch.float32}
    for mine, other in zip(ours.state.log_history[:-1], stock.state.log_history[:-1], strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=2**-8)


@pytest.mark.ci
def test_neftune_adds_noise_in_training_only(runs):
    noisy = runs.ours(neftune_noise_alpha=5.0, max_steps=3, learning_rate=0.0, eval_strategy="steps", eval_steps=3)
    plain = runs.ours(max_steps=3, learning_rate=0.0, eval_strategy="steps", eval_steps=3)
    assert noisy.state.log_history[0]["loss"] != plain.state.log_history[0]["loss"]
    assert noisy.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-6)


@pytest.mark.ci
def test_one_nan_loss_is_reported_and_does_not_poison_later_logs(runs, caplog):
    from hf_tpu_ext import TPUSFTTrainer

    class NaNAtStepThree(TPUSFTTrainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            # The gradient is left alone: what is tested is the log.
            return loss + (float("nan") if self.state.global_step == 2 else 0.0)

    trainer = runs.ours(cls=NaNAtStepThree, max_steps=8, logging_steps=2, learning_rate=0.0)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 4 and all(loss == loss for loss in losses)
    assert trainer.state.log_history[-1]["train_loss"] == trainer.state.log_history[-1]["train_loss"]
    assert "NaN or infinite at step 3 " in caplog.text


FAMILIES = ["llama", "gemma2", "gemma3_text", "mistral", "phi3", "gpt_neox", "qwen3_moe"]
#: Soft caps and sliding windows; experts.
IN_CI = ["gemma2", "qwen3_moe"]


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.ci if name in IN_CI else pytest.mark.slow) for name in FAMILIES]
)
def test_model_family(runs, same_logs, tmp_path, family):
    overrides = {"output_router_logits": True, "router_aux_loss_coef": 0.05} if family == "qwen3_moe" else {}
    model_dir = make_model(tmp_path / family, model_type=family, **overrides)
    ours, stock = (
        run(
            model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
            max_steps=2,
            warmup_steps=0,
            eval_strategy="steps",
            eval_steps=2,
        )
        for run in (runs.ours, runs.stock)
    )
    same_logs(ours, stock)
    assert ("aux_loss" in ours.state.log_history[0]) == (family == "qwen3_moe")


class Weighted(nn.Module):
    """A model whose batches have tensors in a dictionary or a list."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)

    def forward(self, input_ids, extra, labels):
        weights = extra["weights"] if isinstance(extra, dict) else extra[0]
        logits = self.head(self.embed(input_ids) * weights[..., None])
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


@pytest.mark.ci
@pytest.mark.parametrize("in_list", [pytest.param(False, marks=pytest.mark.ci), True], ids=["dictionary", "list"])
def test_tensors_in_a_dictionary_or_a_list_of_a_batch(tmp_path, same_logs, caplog, in_list):
    """They are data as others are. Printed, these would be the same in all batches: ones, with an ellipsis between."""
    torch.manual_seed(0)
    weights = 2 * torch.rand(12, 1200)
    weights[:, :8] = weights[:, -8:] = 1.0
    rows = Dataset.from_dict({"input_ids": torch.randint(32, weights.shape).tolist(), "weights": weights.tolist()})

    def collate(rows):
        ids, weights = (torch.tensor([row[name] for row in rows]) for name in ("input_ids", "weights"))
        return {"input_ids": ids, "labels": ids, "extra": [weights] if in_list else {"weights": weights}}

    def train(trainer_class, args_class, chips=1, **more):
        set_seed(0)
        args = args_class(
            str(tmp_path), max_steps=6, per_device_train_batch_size=4 // chips, learning_rate=1e-2, logging_steps=1,
            remove_unused_columns=False, save_strategy="no", report_to="none", **more,
        )  # fmt: skip
        trainer = trainer_class(Weighted(), args, data_collator=collate, train_dataset=rows)
        trainer.train()
        return trainer

    chips = int(os.environ.get("CPU_NUM_DEVICES", "1"))
    ours = train(TPUTrainer, TPUTrainingArguments, chips, step_replay=True)
    assert "recompilation" not in caplog.text and "sync" not in caplog.text
    same_logs(ours, train(Trainer, TrainingArguments, use_cpu=True))
