"""What a caller puts in the place of a trainer's model, data or collator after it was made is taken up, as upstream does."""

import random

import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_tpu_ext import TPUTrainer


def tokens(count, longest, seed=0):
    rng = random.Random(seed)
    rows = [[rng.randrange(200) for _ in range(rng.randint(longest // 2, longest))] for _ in range(count)]
    return Dataset.from_dict({"input_ids": rows})


class MaskThirds:
    """A collator of the user's."""

    def __init__(self, collate):
        self.collate = collate

    def __call__(self, rows):
        batch = self.collate(rows)
        batch["labels"] = batch["labels"].masked_fill(batch["labels"] % 3 == 0, -100)
        return batch


@pytest.fixture
def both(xla, tiny_model, tmp_path):
    """Measures with upstream's trainer and with ours, which gives the same."""
    collate = DataCollatorForLanguageModeling(AutoTokenizer.from_pretrained(tiny_model), mlm=False)

    def load():
        return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)

    def compare(measure):
        measured = {}
        for cls in (Trainer, TPUTrainer):
            torch.manual_seed(0)
            args = TrainingArguments(
                str(tmp_path / cls.__name__),
                max_steps=2,
                per_device_train_batch_size=4,
                learning_rate=1e-2,
                logging_steps=1,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                use_cpu=cls is Trainer,
            )
            trainer = cls(
                load(), args, train_dataset=tokens(12, 10), eval_dataset=tokens(5, 10, 1), data_collator=collate
            )
            numbers = measure(trainer, load)
            losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
            measured[cls] = [*numbers, *losses]
        assert measured[TPUTrainer] == pytest.approx(measured[Trainer], rel=1e-5)

    return compare


def eval_loss(trainer):
    return trainer.evaluate()["eval_loss"]


@pytest.mark.ci
def test_another_model(both):
    def measure(trainer, load):
        before = eval_loss(trainer)
        model = load()
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        trainer.model = trainer.model_wrapped = model
        numbers = [before]
        for _ in range(3):
            # A program of the model before would not know its weights.
            numbers.append(eval_loss(trainer))
            with torch.no_grad():
                model.lm_head.weight.mul_(1.5)
        trainer.train()
        numbers.append(eval_loss(trainer))
        trainer.model = trainer.model_wrapped = load()
        trainer.optimizer = None
        trainer.train()
        return [*numbers, eval_loss(trainer)]

    both(measure)


@pytest.mark.ci
def test_other_data(both):
    def measure(trainer, load):
        trainer.train()
        trainer.train_dataset, trainer.eval_dataset = tokens(8, 30, 2), {"a": tokens(4, 50, 3)}
        trainer.train()
        return [trainer.evaluate()["eval_a_loss"]]

    both(measure)


def test_another_collator(both):
    def measure(trainer, load):
        trainer.train()
        trainer.data_collator = MaskThirds(DataCollatorForLanguageModeling(trainer.data_collator.tokenizer, mlm=False))
        trainer.train()
        return [eval_loss(trainer)]

    both(measure)


class MaskMore(TrainerCallback):
    """Changes a setting of the trainer's collator."""

    def __init__(self):
        self.trainer, self.seen = None, []

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.trainer.data_collator.mlm_probability += 0.3
        self.seen.append(self.trainer.data_collator.mlm_probability)


def test_the_collator_of_a_trainer_is_the_users(xla, tiny_model, tmp_path):
    """Its tokenizer is in checkpoints, and a callback changes a setting of it."""
    tokenizer, files = AutoTokenizer.from_pretrained(tiny_model), {}
    for cls in (Trainer, TPUTrainer):
        collator = DataCollatorForLanguageModeling(tokenizer, mlm=False, mlm_probability=0.1)
        args = TrainingArguments(
            str(tmp_path / cls.__name__),
            num_train_epochs=2,
            report_to="none",
            disable_tqdm=True,
            use_cpu=cls is Trainer,
        )
        callback = MaskMore()
        trainer = callback.trainer = cls(
            AutoModelForCausalLM.from_pretrained(tiny_model),
            args,
            train_dataset=tokens(4, 8),
            data_collator=collator,
            callbacks=[callback],
        )
        trainer.train()
        assert callback.seen == [0.4, 0.7] and collator.mlm_probability == 0.7
        files[cls] = {path.name for path in (tmp_path / cls.__name__ / "checkpoint-2").iterdir()}
    assert "tokenizer.json" in files[Trainer] and files[Trainer] <= files[TPUTrainer]
