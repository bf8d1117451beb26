"""`hf-tpu pretrain`: next-token training on plain text with `TPUTrainer`."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

from ..errors import UserError
from .launch import start_processes
from .recipe import Recipe, load_recipe
from .recipe_parser import RecipeParser


DESCRIPTION = """\
Train a language model on plain text on the TPU, GPU or CPU of this machine: documents are joined and cut into rows of
max_length tokens, so no token is padding.

examples:
  hf-tpu pretrain --config recipes/pretrain_tinystories.yaml
  hf-tpu pretrain --model_name_or_path HuggingFaceTB/SmolLM2-135M --from_scratch --dataset_name roneneldan/TinyStories \\
      --max_length 512 --output_dir runs/stories
"""
#: What `--smoke` trains on.
tiny_data = "stories"


@dataclass
class PretrainArguments:
    """The model and the text of `hf-tpu pretrain`."""

    model_name_or_path: str = field(metadata={"help": "Model and tokenizer to load."})
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of the model."})
    from_scratch: bool = field(
        default=False,
        metadata={"help": "Take the model's architecture and tokenizer, but start from random weights."},
    )
    dataset_text_field: str = field(default="text", metadata={"help": "Column of the dataset that holds the text."})


def token_rows(dataset, tokenizer, text_field: str, max_length: int):
    """
    Tokenize documents, each closed by an end-of-sequence token, join them and cut the result into rows of `input_ids`
    and `labels`, each `(max_length,)`. What each thousand documents leave over is dropped.
    """
    from trl import pack_dataset

    def tokenize(batch):
        documents = tokenizer(batch[text_field], return_attention_mask=False)["input_ids"]
        return {"input_ids": [ids + [tokenizer.eos_token_id] for ids in documents]}

    def keep_full(batch):
        rows = [ids for ids in batch["input_ids"] if len(ids) == max_length]
        return {"input_ids": rows, "labels": rows}

    dataset = dataset.select_columns([text_field]).map(tokenize, batched=True, remove_columns=[text_field])
    return pack_dataset(dataset, max_length, strategy="wrapped").map(keep_full, batched=True)


def run(argv: list[str]) -> int:
    """Train from the recipe that the arguments after `hf-tpu pretrain` name, and return the exit status."""
    recipe = load_recipe(argv, tiny_data)
    status = start_processes("pretrain", recipe, parser)
    if status is None:
        train(recipe, parser())
    return status or 0


def parser(title: str = "pretrain", description: str = DESCRIPTION) -> RecipeParser:
    """The parser of its recipes. `title` is the name of the command and `description` the first part of its help."""
    from trl import ScriptArguments

    from ..trainers import TPUTrainingArguments

    return RecipeParser((ScriptArguments, TPUTrainingArguments, PretrainArguments), title, description)


def train(recipe: Recipe, parser: RecipeParser, adapt_trainer: Callable[[type], type] | None = None) -> None:
    """
    Train with a recipe, and save the model. `parser` is what [`parser`] returns, and `adapt_trainer` makes the trainer
    class from [`TPUTrainer`].
    """
    import torch
    from datasets import Dataset, load_dataset
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, default_data_collator, set_seed

    from ..trainers import TPUTrainer
    from ..trainers.checkpoint.files import leaving_no_empty_dir
    from ..trainers.checks.settings import check_recipe

    script_args, training_args, args = parser.parse(recipe)
    if script_args.dataset_name is None:
        raise UserError("dataset_name is missing. For example: --dataset_name roneneldan/TinyStories")
    if training_args.max_length is None:
        raise UserError("max_length, the number of tokens in a row, is missing. For example: --max_length 512")
    if adapt_trainer is None:
        check_recipe(training_args)

    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path, revision=args.model_revision)

    def rows(split):
        dataset = load_dataset(
            script_args.dataset_name, script_args.dataset_config, split=split, streaming=script_args.dataset_streaming
        )
        dataset = token_rows(dataset, tokenizer, args.dataset_text_field, training_args.max_length)
        if isinstance(dataset, Dataset) and not len(dataset):
            raise UserError(
                f"Split {split!r} of {script_args.dataset_name} has less text than one row of "
                f"max_length={training_args.max_length} tokens. Set a smaller max_length, or add text."
            )
        return dataset

    set_seed(training_args.seed)
    if args.from_scratch:
        config = AutoConfig.from_pretrained(args.model_name_or_path, revision=args.model_revision)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_pretrained(
            args.model_name_or_path, revision=args.model_revision, dtype=torch.float32
        )
    trainer_cls = TPUTrainer if adapt_trainer is None else adapt_trainer(TPUTrainer)
    with leaving_no_empty_dir(training_args.output_dir) if adapt_trainer is None else nullcontext():
        trainer = trainer_cls(
            model=model,
            args=training_args,
            data_collator=default_data_collator,
            train_dataset=rows(script_args.dataset_train_split),
            eval_dataset=rows(script_args.dataset_test_split) if training_args.eval_strategy != "no" else None,
            processing_class=tokenizer,
        )
        trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)
    trainer.accelerator.print(f"Model saved to {training_args.output_dir}.")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
