"""`hf-tpu cache-teacher`: precompute a teacher's top-k log-probs over the data of a recipe."""

import math
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import UserError
from ..formatting import count, dtype_name, kind_of_device
from .launch import start_processes
from .recipe import Recipe, load_recipe
from .recipe_parser import RecipeParser
from .script_checks import advise_split, naming_broken_rows


DESCRIPTION = """\
Precompute a teacher's top-k log-probs over the data of a recipe, for offline distillation: students are then trained
without running the teacher. The data are prepared as `hf-tpu sft` prepares them with the same recipe. Run the command
again to continue one that was stopped.

examples:
  hf-tpu cache-teacher --config recipe.yaml --kd_teacher Qwen/Qwen3-4B --kd_cache caches/qwen3-4b
  hf-tpu cache-teacher --config recipe.yaml --kd_top_k 64 --temperatures 1 2 4
"""
DEFAULT_TOP_K = 128


@dataclass
class CacheArguments:
    """What `hf-tpu cache-teacher` takes besides the keys of a recipe."""

    temperatures: list[float] | None = field(
        default=None,
        metadata={"help": "Temperatures that the cache can be used at. Default: 1 and the recipe's kd_temperature."},
    )
    overwrite: bool = field(default=False, metadata={"help": "Start over if there is a cache with other settings."})
    batch_size: int | None = field(
        default=None,
        metadata={"help": "Batch size per chip. Default: the recipe's per_device_eval_batch_size."},
    )


def parser() -> RecipeParser:
    """The parser of its recipes."""
    import trl

    from ..trainers import TPUSFTConfig

    dataclass_types = (trl.ScriptArguments, TPUSFTConfig, trl.ModelConfig, trl.DatasetMixtureConfig, CacheArguments)
    return RecipeParser(dataclass_types, "cache-teacher", DESCRIPTION)


def run(argv: list[str]) -> int:
    """
    Make a teacher's cache with the recipe that the arguments after `hf-tpu cache-teacher` name, and return the exit status.
    """
    recipe = load_recipe(argv, tiny_data="data")
    if recipe.smoke is not None:
        recipe.file.setdefault("kd_teacher", str(Path(recipe.smoke) / "teacher"))
        recipe.file.setdefault("kd_cache", str(Path(recipe.file["output_dir"]) / "teacher_cache"))
    # On the command line `output_dir` is where the cache goes; in a recipe it is where the training run goes.
    if "output_dir" in recipe.command_line:
        recipe.command_line["kd_cache"] = recipe.command_line.pop("output_dir")
    status = start_processes("cache-teacher", recipe, parser, resumes=False)
    if status is not None:
        return status

    import torch

    from ..backends.processes import ALONE
    from ..distillation.cache_builder import TeacherRun, build_cache
    from ..distillation.cache_writer import CacheWriter
    from ..trainers.checkpoint.run_lock import only_run_in

    arguments = parser().parse(recipe)
    _check(*arguments)
    _, training_args, model_args, _, cache_args = arguments
    directory = Path(training_args.kd_cache)
    compute_dtype = torch.bfloat16 if training_args.bf16 else torch.float16 if training_args.fp16 else None
    student = model_args.model_name_or_path
    kd_teacher = student if training_args.kd_teacher == "base" else training_args.kd_teacher
    trainer, pad_token_id, sequences, settings = _prepare(kd_teacher, *arguments, compute_dtype)
    processes = trainer.backend.processes
    # Hosts run the teacher together, and each writes all that it says.
    sharing = processes if processes.own_rows else ALONE
    # Another build would delete files of this one, and its manifest would tell of files that it has not written.
    with only_run_in(directory, processes):
        writer = CacheWriter(
            directory, settings, sequences.keys, sequences.lengths, cache_args.overwrite, processes=sharing
        )
        if writer.complete and processes.index == 0:
            print(f"{directory} is complete already, with the same settings.")
        how = (trainer.data_collator, trainer.args.eval_batch_size, pad_token_id, compute_dtype)
        teacher = TeacherRun(trainer.model, trainer.backend, *how)
        chips = count(teacher.backend.num_chips, kind_of_device(teacher.backend.name)) + (
            f" in each of {sharing.count} processes" * (sharing.count > 1)
        )
        own = " (the student's own start)" if kd_teacher == student else ""
        if processes.index == 0:
            print(f"{kd_teacher}{own} on {teacher.backend.device_name}, {chips}, batch size {teacher.rows}")
        with trainer.chips.split_activations(trainer.model):
            manifest = build_cache(teacher, sequences, writer, training_args.disable_tqdm)
    if processes.index == 0:
        _report(directory, manifest, recipe)
    return 0


def _check(script_args, training_args, model_args, dataset_args, cache_args) -> None:
    """Refuse what cannot work, before anything is loaded."""
    if model_args.model_name_or_path is None:
        raise UserError(
            "model_name_or_path, the student whose tokenizer prepares the data, is missing. For example: "
            "--model_name_or_path Qwen/Qwen3-0.6B"
        )
    if script_args.dataset_name is None and not dataset_args.datasets:
        raise UserError("dataset_name is missing. For example: --dataset_name trl-lib/Capybara")
    if training_args.kd_teacher is None:
        raise UserError("kd_teacher, the model to learn from, is missing. For example: --kd_teacher Qwen/Qwen3-4B")
    if training_args.kd_cache is None:
        raise UserError("kd_cache, the directory of the cache, is missing. For example: --kd_cache caches/qwen3-4b")
    for name in ("packing", "eval_packing"):
        if vars(training_args)[name]:
            raise UserError(
                f"{name}=True joins sequences to rows, and a teacher's cache is looked up by the sequence. Set "
                f"{name}=False in the recipe; length_buckets keeps the padding low."
            )
    for name, streams in (("dataset_streaming", script_args.dataset_streaming), ("streaming", dataset_args.streaming)):
        if streams:
            raise UserError(
                f"{name}=True does not work with a cache, which needs to know all sequences before the first. Set {name}=False."
            )
    for temperature in cache_args.temperatures or []:
        if not 0 < temperature < math.inf:
            raise UserError(f"--temperatures {temperature} is not above 0. For example: --temperatures 1 2")
    if cache_args.batch_size is not None and cache_args.batch_size < 1:
        raise UserError(
            f"--batch_size {cache_args.batch_size} is not positive. Give the number of rows at once, for example --batch_size 8"
        )


def _load(kd_teacher, training_args, model_args, compute_dtype):
    """Load the teacher, with the student's vocabulary, and the student's tokenizer or processor."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoProcessor, AutoTokenizer, ProcessorMixin

    from ..distillation.teachers import check_vocabulary

    trust = training_args.trust_remote_code
    processor = AutoProcessor.from_pretrained(
        model_args.model_name_or_path, revision=model_args.model_revision, trust_remote_code=trust
    )
    tokenizer = processor.tokenizer if isinstance(processor, ProcessorMixin) else processor
    # The student's own start is the revision that it starts from.
    revision = model_args.model_revision if kd_teacher == model_args.model_name_or_path else None
    check_vocabulary(
        AutoTokenizer.from_pretrained(kd_teacher, revision=revision, trust_remote_code=trust), tokenizer, kd_teacher
    )
    # In half precision, weights are loaded as they are stored: the model computes in it anyway, and they are half as large.
    model = AutoModelForCausalLM.from_pretrained(
        kd_teacher,
        revision=revision,
        dtype=torch.float32 if compute_dtype is None else "auto",
        attn_implementation=model_args.attn_implementation,
        trust_remote_code=trust,
    )
    config = AutoConfig.from_pretrained(
        model_args.model_name_or_path, revision=model_args.model_revision, trust_remote_code=trust
    )
    vocab_size = max(config.get_text_config().vocab_size, len(tokenizer))
    if vocab_size < model.get_output_embeddings().weight.shape[0]:
        # Rows beyond it pad the teacher's embedding, and are no tokens.
        model.resize_token_embeddings(vocab_size)
    return model, processor, tokenizer


def _load_splits(script_args, training_args, dataset_args):
    """Load the recipe's training split, and its evaluation split or `None`, as TRL's script does."""
    import numpy as np
    from datasets import load_dataset
    from trl import get_dataset

    # As for training: the rows that `test_split_size` holds out are those that NumPy's generator says.
    np.random.seed(training_args.seed)
    with naming_broken_rows(script_args, dataset_args):
        if dataset_args.datasets:
            dataset = get_dataset(dataset_args)
        else:
            dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    splits = [script_args.dataset_train_split]
    if training_args.eval_strategy != "no":
        splits.append(script_args.dataset_test_split)
    for split in splits:
        if split not in dataset:
            raise UserError(
                f"The dataset has no split {split!r}, but {', '.join(map(repr, dataset))}. {advise_split(split, script_args)}"
            )
    return dataset[splits[0]], dataset[splits[1]] if len(splits) > 1 else None


def _prepare(kd_teacher, script_args, training_args, model_args, dataset_args, cache_args, compute_dtype):
    """Prepare the data as the recipe's training would: in the trainer, with the teacher, which is then not trained."""
    import torch

    from ..distillation.cache_builder import Sequences, weights_hash
    from ..distillation.cache_format import CacheSettings, chat_template_hash, tokenizer_hash
    from ..distillation.teachers import check_answers_alone
    from ..trainers import TPUSFTTrainer

    model, processor, tokenizer = _load(kd_teacher, training_args, model_args, compute_dtype)
    vocab_size, weights = model.get_output_embeddings().weight.shape[0], weights_hash(model)
    top_k = min(DEFAULT_TOP_K, vocab_size) if training_args.kd_top_k is None else training_args.kd_top_k
    if top_k > vocab_size:
        raise UserError(
            f"kd_top_k={top_k}, but the teacher's vocabulary has {vocab_size} tokens. Set kd_top_k to 1...{vocab_size}."
        )
    temperatures = cache_args.temperatures or [1.0, training_args.kd_temperature]
    train_dataset, eval_dataset = _load_splits(script_args, training_args, dataset_args)
    training_args.output_dir = training_args.kd_cache
    training_args.kd_teacher = training_args.kd_cache = training_args.model_init_kwargs = None
    training_args.gradient_checkpointing = training_args.push_to_hub = training_args.padding_free = False
    training_args.show_samples = 0
    # It is the student that is rounded.
    training_args.qat_weight_dtype = None
    training_args.per_device_eval_batch_size = cache_args.batch_size or training_args.per_device_eval_batch_size
    trainer = TPUSFTTrainer(
        model, training_args, train_dataset=train_dataset, eval_dataset=eval_dataset, processing_class=processor
    )
    if model.get_output_embeddings().weight.shape[0] != vocab_size:
        raise UserError(
            f"chat_template_path={training_args.chat_template_path!r} adds tokens to the vocabulary, for which the teacher has no "
            "weights. Save that model's chat template as a .jinja file, and set chat_template_path to that file."
        )
    datasets = [dataset for dataset in (trainer.train_dataset, trainer.eval_dataset) if dataset is not None]
    sequences = Sequences(datasets, quiet=training_args.disable_tqdm or trainer.backend.processes.index > 0)
    if sequences.largest_id >= vocab_size:
        raise UserError(
            f"The data have the token id {sequences.largest_id}, but the teacher's vocabulary has {vocab_size} tokens. Set kd_teacher to "
            "a model of the student's family."
        )
    check_answers_alone(model, max(sequences.lengths), kd_teacher)
    settings = CacheSettings(
        teacher=kd_teacher,
        teacher_hash=weights,
        tokenizer_hash=tokenizer_hash(tokenizer),
        chat_template_hash=chat_template_hash(tokenizer),
        vocab_size=vocab_size,
        top_k=top_k,
        temperatures=tuple(sorted({float(temperature) for temperature in temperatures})),
        max_length=training_args.max_length,
        compute_dtype=dtype_name(compute_dtype or torch.float32),
        dataset_hash=sequences.hash,
        sequences=len(sequences.keys),
        tokens=sum(sequences.lengths),
    )
    return trainer, tokenizer.pad_token_id, sequences, settings


def _report(directory: Path, manifest, recipe: Recipe) -> None:
    size = manifest.tokens * manifest.bytes_per_token
    print(
        f"{manifest.sequences} sequences of {manifest.tokens} tokens, {manifest.bytes_per_token:.1f} bytes per token, "
        f"{size / 1e6:.1f} MB in {len(manifest.shards)} files"
    )
    coverage = zip(manifest.coverage, manifest.temperatures, strict=True)
    coverage_text = ", ".join(f"{share:.1%} at temperature {temperature:g}" for share, temperature in coverage)
    print(f"The top {manifest.top_k} tokens hold of the teacher's mass: {coverage_text}")
    for warning in (line for temperature in manifest.temperatures for line in manifest.warn_of_tail(temperature)):
        print(f"warning: {warning}")
    words = ["hf-tpu", "sft"]
    for option, path in (("--config", recipe.path), ("--smoke", recipe.smoke)):
        words += [] if path is None else [option, path]
    for key, value in recipe.command_line.items():
        # What a cache alone takes is no key of training.
        if key not in ("kd_cache", *CacheArguments.__dataclass_fields__):
            words += [f"--{key}", *([] if value is True else value if isinstance(value, list) else [value])]
    print(f"Train from it: {shlex.join([*words, '--kd_cache', str(directory)])}")
