"""The general trainer, and the trainers on an eager device."""

import gc
import io
import json
import random
import re
import weakref
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from fixes import assert_fixes, refusal
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BitsAndBytesConfig,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)
from trl import SFTConfig, SFTTrainer

from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer, TPUTrainer, TPUTrainingArguments
from hf_tpu_ext.report.record import read_run


def classified_rows(tokenizer, count=30):
    rng = random.Random(0)
    texts = ["".join(rng.choice("ab") for _ in range(rng.randint(3, 30))) for _ in range(count)]
    return Dataset.from_list(
        [{**tokenizer(text), "labels": int(text.count("a") > len(text) / 2)} for text in texts]
    ).select_columns(["input_ids", "attention_mask", "labels"])


def accuracy(prediction):
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean().item()}


@pytest.fixture(scope="module")
def classify(xla, tiny_model, tmp_path_factory):
    """Trains a bidirectional classifier, whose attention mask upstream reads on the host."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    dataset = classified_rows(tokenizer)

    def train(cls, config_cls=TrainingArguments, resume_from_checkpoint=None, **config):
        torch.manual_seed(0)
        model = BertForSequenceClassification(
            BertConfig(
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=1,
                num_attention_heads=4,
                vocab_size=len(tokenizer),
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )
        args = config_cls(
            output_dir=str(tmp_path_factory.mktemp(cls.__name__)),
            num_train_epochs=2,
            logging_steps=1,
            eval_strategy="epoch",
            report_to="none",
            disable_tqdm=True,
            **{"per_device_train_batch_size": 4, "save_strategy": "no"} | config,
        )
        trainer = cls(
            model,
            args,
            train_dataset=dataset,
            eval_dataset=dataset.select(range(10)),
            processing_class=tokenizer,
            data_collator=DataCollatorWithPadding(tokenizer),
            compute_metrics=accuracy,
        )
        trainer.train(resume_from_checkpoint)
        return trainer

    return train


@pytest.fixture(scope="module")
def stock(classify):
    """Upstream's trainer after it has trained the classifier."""
    return classify(Trainer, use_cpu=True)


def test_plain_training_arguments(classify, stock, same_logs):
    ours = classify(TPUTrainer)
    same_logs(ours, stock)
    assert ours.watch.recompiles == 0 and len(ours.watch.programs) == 2


def test_a_loss_that_grows_with_micro_steps_is_as_before_on_another_number_of_chips(classify, caplog):
    """Upstream divides the loss of such a model by no accumulation, so that of the recipe is kept."""
    config = dict(per_device_train_batch_size=4, max_steps=4, save_strategy="steps", save_steps=2)
    whole = classify(TPUTrainer, **config)
    checkpoint = Path(whole.args.output_dir) / "checkpoint-2"
    state = json.loads((checkpoint / "run_state.json").read_text())
    # As a run on two chips has written it.
    state.update(num_workers=2, recipe_rows=[2, 1])
    (checkpoint / "run_state.json").write_text(json.dumps(state))
    (checkpoint / "manifest.json").unlink()
    resumed = classify(
        TPUTrainer, resume_from_checkpoint=str(checkpoint), **{**config, "per_device_train_batch_size": 2}
    )
    assert "To keep it on 1: 4 per chip x 1 gradient accumulation step." in caplog.text
    numbers = [
        [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
        for trainer in (resumed, whole)
    ]
    assert len(numbers[0]) == 4 and numbers[0] == [pytest.approx(each, rel=1e-5) for each in numbers[1]]


class LoadsByItself(TPUTrainer):
    def get_train_dataloader(self):
        collate = DataCollatorWithPadding(self.processing_class)
        return DataLoader(self.train_dataset, batch_size=4, collate_fn=collate)


@pytest.mark.ci
def test_a_loader_of_ones_own_is_asked_to_pad(classify):
    """`max_length` would not reach it."""
    with pytest.raises(ValueError, match="batches of a data loader of your own are taken as they are") as told:
        classify(LoadsByItself, TPUTrainingArguments, max_length=32)
    assert "declare the length" not in str(told.value)


class CallsTheModel(TPUTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


@pytest.mark.ci
def test_a_loss_of_ones_own_that_calls_the_model_is_replayed(classify, same_logs, capsys):
    """Its masks, too, are made without a read."""
    config = {"step_replay": True, "dataloader_drop_last": True}
    trainers = [classify(cls, TPUTrainingArguments, **config) for cls in (CallsTheModel, TPUTrainer)]
    stock = classify(Trainer, use_cpu=True, dataloader_drop_last=True)
    for trainer in trainers:
        same_logs(trainer, stock)
    own, upstreams = re.findall(r"(\d+ executions \(\d+ replayed\), \d+ device-to-host)", capsys.readouterr().out)
    assert own == upstreams and "(0 replayed)" not in own


class KeepsANumber(TPUTrainer):
    """As docs/recompilation.md has it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.model.register_buffer("my_loss", torch.zeros((), device=self.model.device), persistent=False)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss = result[0] if return_outputs else result
        self.model.my_loss.copy_(loss.detach())
        return result

    def log(self, logs, *args):
        super().log({**logs, **self.backend.fetch({"my_loss": self.model.my_loss})}, *args)


@pytest.mark.ci
def test_a_number_of_ones_own_loss_is_kept_by_a_buffer_in_replayed_steps(classify, capsys, tmp_path):
    trainer = classify(KeepsANumber, TPUTrainingArguments, step_replay=True, dataloader_drop_last=True)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len({log["loss"] for log in logs}) == len(logs) > 4
    assert [log["my_loss"] for log in logs] == pytest.approx([log["loss"] for log in logs], rel=1e-6)
    text = capsys.readouterr().out
    # As a number, which a checkpoint can hold.
    trainer.state.save_to_json(tmp_path / "state.json")
    assert "(0 outside this package)" in text and "(0 replayed)" not in text


@pytest.mark.ci
def test_buckets(classify, stock, same_logs):
    config = dict(config_cls=TPUTrainingArguments, max_length=32, length_buckets=[16, 32])
    ours = classify(TPUTrainer, **config)
    same_logs(ours, stock)
    training = [shape for kind, shape in ours.watch.programs if kind == "training step"]
    assert set(training) <= {(4, 16), (4, 32)} and len(training) > 1


@pytest.mark.parametrize("lora", [None, {}], ids=["full", "lora"])
def test_an_eager_device_is_upstream_to_the_bit(runs, lora):
    config = dict(max_steps=4, eval_strategy="steps", eval_steps=2)
    stock = runs.stock(lora=lora, **config)
    try:
        ours = runs.ours(lora=lora, config_cls=TPUSFTConfig, backend="cpu", **config)
    finally:
        from hf_tpu_ext.backends import select_backend

        select_backend("xla")
    assert ours.backend.name == "cpu" and ours.args.device.type == "cpu" and not ours.args.dataloader_pin_memory
    # A script that lists what was compiled runs here, too.
    assert ours.watch.events_of_run == []
    for mine, other in zip(ours.state.log_history, stock.state.log_history, strict=True):
        for key in ("loss", "grad_norm", "entropy", "eval_loss", "num_tokens"):
            assert mine.get(key) == other.get(key)
    for mine, other in zip(ours.model.parameters(), stock.model.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.fixture(scope="module")
def told(xla, tiny_model, tmp_path_factory, runs_class):
    """The output directory of a run that tells all that it can, and the lines that it printed."""
    runs, printed = runs_class(tiny_model, tmp_path_factory.mktemp("told")), io.StringIO()
    settings = dict(max_steps=2, gradient_accumulation_steps=2, bf16=True, show_samples=2, run_report=True)
    with redirect_stdout(printed):
        runs.ours(config_cls=TPUSFTConfig, report_to="tensorboard", **settings)
    return runs.output_dir, printed.getvalue().splitlines()


@pytest.mark.ci
def test_metrics_reach_tensorboard(told):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next(told[0].glob("**/events.out.*")).parent))
    events.Reload()
    assert {"train/loss", "train/grad_norm", "train/entropy", "train/mean_token_accuracy"} <= set(
        events.Tags()["scalars"]
    )
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2]


def test_the_line_at_the_start_says_where_and_how(told):
    line = next(line for line in told[1] if line.startswith("Training on"))
    for words in (
        "xla (CPU",
        "1 chip",
        "float32 weights, bfloat16 compute",
        "local batch size 4 x 40 per chip",
        "global batch size 8 (4 per chip x 2 gradient accumulation steps x 1 chip)",
        "320 tokens",
        "2 training graphs",
    ):
        assert words in line


def test_samples_before_and_after(told):
    directory, lines = told
    assert [sum(f"{name:>9}: " in line for line in lines) for name in ("reference", "before", "after")] == [2, 4, 2]
    # Before the run has begun, since it may be killed.
    assert " before: " in "".join(lines[: next(i for i, line in enumerate(lines) if line.startswith("Trained"))])
    after = [line.partition("after: ")[2] for line in lines if "    after: " in line]
    assert [sample["after"] for sample in read_run(directory).samples] == after


@pytest.mark.parametrize("lora", [None, pytest.param({}, marks=pytest.mark.slow)], ids=["full", "lora"])
def test_a_finished_trainer_lets_go_of_its_weights(runs, lora):
    """A notebook trains again after `del trainer, model` and `gc.collect()`."""
    trainer = runs.ours(config_cls=TPUSFTConfig, lora=lora, max_steps=4, eval_strategy="steps", eval_steps=4)
    held = [weakref.ref(each) for each in (trainer, trainer.model, *trainer.model.parameters())]
    held += [weakref.ref(moments["exp_avg"]) for moments in trainer.optimizer.state.values()]
    assert all(each() is not None for each in held)
    del trainer
    gc.collect()
    assert [each for each in held if each() is not None] == []


def test_samples_of_conversations(runs, rows, capsys):
    """What comes before the last message is the prompt, also where all of a row is trained on."""
    chats = rows(3).map(
        lambda row: {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["completion"]},
            ]
        },
        remove_columns=["prompt", "completion"],
    )
    runs.ours(
        config_cls=TPUSFTConfig,
        show_samples=2,
        max_steps=1,
        max_length=96,
        kwargs={"train_dataset": chats, "eval_dataset": chats},
    )
    lines = capsys.readouterr().out.splitlines()
    references = [line.partition("reference: ")[2] for line in lines if "reference: " in line]
    assert references == [" ".join(row["messages"][1]["content"].split()) for row in list(chats)[:2]]


def test_fewer_rows_than_the_global_batch(runs, rows, capsys):
    trainer = runs.ours(train=False, gradient_accumulation_steps=2, kwargs={"train_dataset": rows(5)})
    (line,) = [line for line in trainer.find_facts().changes if "fewer" in line]
    assert "train_dataset has 5 rows, fewer than the global batch size of 8" in line
    assert "Lower per_device_train_batch_size or gradient_accumulation_steps" in line
    trainer = runs.ours(train=False, kwargs={"train_dataset": rows(5)})
    assert not any("fewer" in line for line in trainer.find_facts().changes)


def test_float16_has_no_effect_on_the_cpu(runs):
    trainer = runs.ours(train=False, use_cpu=True, fp16=True)
    facts = trainer.find_facts()
    assert facts.precision == "float32 weights"
    assert "fp16=True has no effect on cpu: upstream computes in float16 on a GPU alone" in facts.changes


@pytest.mark.parametrize(
    ("dtype", "lost"), [(torch.float32, None), (torch.bfloat16, "1/512"), (torch.float16, "1/4096")]
)
def test_weights_trained_in_few_bits(runs, dtype, lost):
    model = str(runs.model_dir)
    trainer = runs.ours(model, train=False, model_init_kwargs={"dtype": dtype})
    lines = [line for line in trainer.find_facts().changes if "trained weights" in line]
    if lost is None:
        assert not lines
        return
    (line,) = lines
    assert f"less than {lost} of a weight is rounded away" in line and "dtype=float32 avoids that" in line
    # Just below a power of two, weights are the farthest apart beside their size.
    weight = torch.ones((), dtype=dtype) * 2 - torch.finfo(dtype).eps
    kept, changed = ((weight.double() * (1 - factor / int(lost[2:]))).to(dtype) for factor in (0.99, 1.1))
    assert kept == weight and changed != weight


@pytest.mark.ci
def test_no_batch_to_train_on(runs, rows):
    """Upstream ends such a run after no step, as one that has trained."""

    def train(**config):
        runs.ours(max_steps=1, kwargs={"train_dataset": rows(5)}, per_device_train_batch_size=8, **config)

    message = refusal(train, {"dataloader_drop_last": True})
    assert (
        "a train_dataset of 5 rows does not fill a batch of 8" in message
        and "lower per_device_train_batch_size" in message
    )
    assert_fixes(train, {"dataloader_drop_last": True}, "Set dataloader_drop_last=False")
    runs.ours(max_steps=1, kwargs={"train_dataset": rows(8)}, per_device_train_batch_size=8, dataloader_drop_last=True)


@pytest.mark.ci
def test_random_weights_in_place_of_those_of_the_model(xla, tiny_model, tmp_path):
    """As from the model's configuration by hand, and packed rows of full length."""
    dataset = Dataset.from_list([{"text": f"{number} and so on"} for number in range(40)])
    settings = dict(packing=True, packing_strategy="wrapped", max_length=32, max_steps=2, logging_steps=1)
    settings |= dict(report_to="none", save_strategy="no", bf16=False, disable_tqdm=True, seed=3, learning_rate=1e-3)

    def train(cls, args, model):
        trainer = cls(model, args, train_dataset=dataset, processing_class=AutoTokenizer.from_pretrained(tiny_model))
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    ours = train(TPUSFTTrainer, TPUSFTConfig(str(tmp_path), from_scratch=True, **settings), str(tiny_model))
    set_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model), dtype="float32")
    assert ours == pytest.approx(train(SFTTrainer, SFTConfig(str(tmp_path), **settings), model), rel=1e-5)
    message = "Pass model='...', or leave from_scratch out"
    with pytest.raises(ValueError, match=message):
        train(TPUSFTTrainer, TPUSFTConfig(str(tmp_path), from_scratch=True, **settings), model)
    quantized = BitsAndBytesConfig(load_in_4bit=True)
    with pytest.raises(ValueError, match="Leave the quantization out"):
        TPUSFTTrainer(
            str(tiny_model),
            TPUSFTConfig(str(tmp_path), from_scratch=True, **settings),
            train_dataset=dataset,
            quantization_config=quantized,
        )
