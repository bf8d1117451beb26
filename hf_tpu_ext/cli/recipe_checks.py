"""
What cannot be right in a recipe is told at once: a typing error in a key or a mesh, and a stream without an end, before PyTorch and
TRL are imported, which takes seconds; a path that is not there before the hub is asked for it, for the better part of a minute; a
directory of a model without its tokenizer, for which upstream makes one without words, or asks for packages.
"""

import difflib
import glob
import os
import re
import shlex
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from ..errors import UserError
from ..hub_names import hint_at_similar, may_be_on_hub, why_no_tokenizer
from ..installing import install_command
from ..sharding import parse_mesh
from ..yes_no import NO
from .recipe import Recipe


# Where keys are declared: as fields of dataclasses, and as options of parsers.
_DECLARED = {
    "trl": ("trainer/*_config.py", "experimental/*/*_config.py", "scripts/*.py", "cli/**/*.py"),
    "transformers": ("training_args*.py",),
    "accelerate": ("commands/launch.py",),
    "hf_tpu_ext": (
        "cli/cache_teacher.py",
        "cli/plan.py",
        "cli/warmup.py",
        "trainers/configs.py",
        "trainers/*/arguments.py",
    ),
}
_FIELD, _OPTION = re.compile(r"^    ([a-z]\w*)\s*:", re.MULTILINE), re.compile(r"[\"']--?([A-Za-z][\w-]*)[\"']")
#: Keys that take a directory, or the name of something on the hub.
_KEYS = ("dataset_name", "model_name_or_path", "teacher_model_name_or_path", "kd_teacher", "chat_template_path")
# How the file of a chat template ends: without one of these, upstream takes the name for that of a model with a template.
_TEMPLATES = (".jinja", ".j2")
# What `load_dataset` calls files with these ends.
_FORMATS = {".jsonl": "json", ".txt": "text"}
# Files of these names are splits of the directory that they are in.
_SPLITS = ("train", "test", "validation")
# Keys of data.
_OF_DATA = ("dataset_name", "datasets")
# Keys that quantize the weights of a model when it is loaded.
_QUANTIZE = ("load_in_4bit", "load_in_8bit")
# What is meant by keys that no spelling leads to.
_MEANT = {
    **dict.fromkeys(("lora", "peft", "use_lora"), "'use_peft'"),
    **dict.fromkeys(("qlora", "use_qlora"), "'use_peft' and 'load_in_4bit'"),
    "lr": "'learning_rate'",
    "epochs": "'num_train_epochs'",
    # Of other tools.
    **dict.fromkeys(("batch_size", "train_batch_size", "micro_batch_size"), "'per_device_train_batch_size'"),
    **dict.fromkeys(("sequence_len", "seq_len"), "'max_length'"),
    "preprocessing_num_workers": "'dataset_num_proc'",
    "dataset_mixer": "'datasets', a list such as [{path: trl-lib/Capybara}]",
    "chat_template": "'chat_template_path', the file that the template is in, such as template.jinja",
    # Of earlier releases of TRL, where another command than GRPO's has them.
    **dict.fromkeys(
        ("max_prompt_length", "max_completion_length"), "'max_length', which counts prompt and completion"
    ),
    "rpo_alpha": "'loss_type: [sigmoid, sft]', with 'loss_weights: [1.0, ALPHA]'",
    # Of earlier releases of transformers.
    "torch_dtype": "'dtype'",
    "warmup_ratio": "'warmup_steps', of which a number below 1 is a share of all steps",
    "group_by_length": "'train_sampling_strategy: group_by_length'",
    "adafactor": "'optim: adafactor'",
    "no_cuda": "'use_cpu'",
    "tpu_num_cores": "'num_chips'",
    "use_flash_attention_2": "'attn_implementation: flash_attention_2'",
    "push_to_hub_token": "'hub_token'",
    "push_to_hub_model_id": "'hub_model_id'",
    **dict.fromkeys(("dispatch_batches", "split_batches"), "'accelerator_config', which has it"),
    **dict.fromkeys(("fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap"), "'fsdp_config', which has it"),
    **dict.fromkeys(
        ("use_reentrant", "gradient_checkpointing_use_reentrant"), "'gradient_checkpointing_kwargs', which has it"
    ),
}
# Keys of earlier releases of transformers and TRL, and of other tools, that have nothing in their place: most said what is the default by
# now.
_GONE = set(
    "overwrite_output_dir save_safetensors logging_dir use_mps_device use_ipex jit_mode_eval include_tokens_per_second past_index ray_scope "
    "mp_parameters half_precision_backend fp16_backend fp16_opt_level torchdynamo tpu_metrics_debug use_legacy_prediction_loop "
    "dataset_batch_size num_of_sequences chars_per_token label_pad_token_id padding_value is_encoder_decoder generate_during_eval "
    "tokenizer_name_or_path reference_free force_use_ref_model model_adapter_name ref_adapter_name use_logits_to_keep".split()
)


def check_keys(recipe: Recipe) -> None:
    """
    Refuse keys that no command takes (`ValueError`). Those that another command takes are refused by the parser of this one.

    Names are read in the sources, since importing the classes takes seconds. Where there are no sources, all is left to the
    parser.
    """
    known_keys = {*_names()}
    if not {"learning_rate", "model_name_or_path"} <= known_keys:
        return
    unknown = [
        (values, key)
        for values in (recipe.file, recipe.command_line)
        for key in values
        if key not in known_keys and key.removeprefix("no_") not in known_keys and key not in ("h", "help")
    ]
    refuse_unknown(recipe, unknown, known_keys)


def refuse_unknown(
    recipe: Recipe, unknown: Iterable[tuple[dict[str, Any], str]], known_keys: Iterable[str], prog: str = ""
) -> None:
    """
    Refuse keys of a recipe (`ValueError`), each with the values among which it stands, and say which of the `known_keys` is meant, or
    that the help of `prog` lists them.
    """
    lines = []
    for values, key in unknown:
        # `lora_rank` is meant for `lora_r`, although `local_rank` has more letters of it.
        beginnings = sorted((name for name in known_keys if "_" in name and key.startswith(name)), key=len)
        # `model` is meant for `model_name_or_path`, and not for `module`.
        paths = [name for name in known_keys if name == f"{key}_name_or_path"]
        close = beginnings[-1:] or paths or difflib.get_close_matches(key, list(known_keys), n=1)
        meant = _MEANT.get(key) or (repr(close[0]) if close else None)
        where = f"in {recipe.path}" if values is recipe.file else "on the command line"
        hint = f"Did you mean {meant}?" if meant else f"`{f'{prog} --help'.strip()}` lists the keys."
        if key in _GONE:
            hint = "It is a key of earlier releases of transformers or TRL, or of another tool: leave it out."
        lines.append(f"unknown key {key!r} {where}. {hint}")
    if lines:
        raise UserError("\n".join(lines))


def check_mesh(recipe: Recipe) -> None:
    """Refuse a mesh that is malformed (`ValueError`). What is no text is left to the parser, and what fits the chips to the trainer."""
    if isinstance(mesh := recipe.get("mesh"), str):
        parse_mesh(mesh)


def check_adapter_keys(recipe: Recipe) -> None:
    """
    Refuse keys of LoRA without `use_peft` (`ValueError`), with which TRL trains all weights. A `use_peft: false` answers for the keys
    of its own place, and on the command line for those of the file, too.
    """
    if recipe.says_yes("use_peft") or "use_peft" in recipe.command_line:
        return
    given = recipe.command_line if "use_peft" in recipe.file else recipe.file | recipe.command_line
    keys = [key for key in given if key.startswith("lora_") or key in ("use_rslora", "use_dora")]
    if keys:
        names = ", ".join(keys)
        raise UserError(
            f"{recipe.where(keys[0])}: {names} {'is' if len(keys) == 1 else 'are'} for LoRA, and without use_peft all weights are "
            f"trained. Add use_peft: true (on the command line --use_peft true), or leave {names} out."
        )


def check_packages(recipe: Recipe) -> None:
    """Refuse weights of 4 or 8 bits (`ValueError`) where bitsandbytes, which upstream loads them with, is not installed."""
    for key in _QUANTIZE:
        if recipe.says_yes(key) and find_spec("bitsandbytes") is None:
            raise UserError(
                f"{recipe.where(key)}: {key} needs bitsandbytes, which is not installed: {install_command('qlora')}"
            )


def check_quantized(recipe: Recipe) -> None:
    """Refuse quantized weights without an adapter to train (`ValueError`)."""
    for key in _QUANTIZE:
        if recipe.says_yes(key) and not recipe.says_yes("use_peft"):
            raise UserError(
                f"{recipe.where(key)}: weights that {key} quantizes are not trained, but an adapter on them is. Add use_peft: true (on the "
                f"command line --use_peft true), or leave {key} out."
            )


def check_training(recipe: Recipe) -> None:
    """
    Refuse a recipe that is not to train (`ValueError`), quantized weights without an adapter, and a stream where no `max_steps` says when
    training ends.
    """
    check_quantized(recipe)
    if str(recipe.get("do_train", True)).lower() in NO:
        raise UserError(
            f"{recipe.where('do_train')}: do_train is false, and this command trains. Leave it out. "
            "To evaluate a finished run, run its command again with --eval_on_start true --resume_from_checkpoint true"
        )
    key = "streaming" if recipe.get("datasets") else "dataset_streaming"
    if recipe.says_yes(key) and str(recipe.get("max_steps", -1)) in ("-1", "0"):
        raise UserError(
            f"{recipe.where(key)}: {key} needs max_steps, since the number of rows of a stream is not known. Set it, for example "
            "--max_steps 1000"
        )


def _names() -> Iterator[str]:
    for package, patterns in _DECLARED.items():
        spec = find_spec(package)
        for directory in spec.submodule_search_locations if spec else ():
            for path in (path for pattern in patterns for path in Path(directory).glob(pattern)):
                text = path.read_text(encoding="utf-8")
                yield from _FIELD.findall(text)
                yield from (name.replace("-", "_") for name in _OPTION.findall(text))


# ---- Paths ----


class NoSuchPath(UserError):
    """Data, or a model, that a recipe names is not here, or not all that is needed of it."""

    def __init__(self, message: str, is_data: bool):
        super().__init__(message)
        self.is_data = is_data


def check_paths(recipe: Recipe, reads_data: bool = True) -> None:
    """
    Refuse paths that are not there, that of the data only where the command `reads_data`: [`NoSuchPath`], but a plain `UserError` for
    the path of a model, which says all. What may be a name on the hub, and is close to one here, gets a line.
    """
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    values = [(key, recipe.get(key)) for key in (_KEYS if reads_data else _KEYS[1:])]
    datasets = recipe.get("datasets") if reads_data else None
    for entry in datasets if isinstance(datasets, list) else [datasets]:
        if isinstance(entry, str):
            values.append(("datasets", entry))
        # Where an entry names its files, its path is the name of a format, or of a dataset on the hub that has them.
        elif isinstance(entry, dict) and not {"data_files", "data_dir"} & entry.keys():
            values.append(("datasets", entry.get("path")))
        elif isinstance(entry, dict) and _is_format(entry.get("path")):
            _check_data_files(recipe, entry)
    for key, value in values:
        if key == "chat_template_path" and isinstance(value, str) and "{" in value:
            raise UserError(
                f"{recipe.where(key)}: {key} is a template, and no path. Write it to a file, for example template.jinja, and set "
                "chat_template_path: template.jinja"
            )
        if key in _OF_DATA and isinstance(value, str) and os.path.isfile(value):
            _refuse_file(recipe, key, value)
        if key in _OF_DATA and _is_format(value):
            _refuse_format(recipe, key, value)
        if key == "model_name_or_path" and isinstance(value, str) and (reason := why_no_tokenizer(value)) is not None:
            raise NoSuchPath(f"{recipe.where(key)}: {reason}.", is_data=False)
        if key not in _OF_DATA and key != "chat_template_path" and isinstance(value, str) and os.path.isdir(value):
            _check_has_model(recipe, key, value)
        if not isinstance(value, str) or "://" in value or os.path.exists(value):
            continue
        message = f"{_told(recipe, key)} is {value!r}, and there is no such file or directory in {os.getcwd()}, where paths begin."
        hint = hint_at_similar(value)
        if not may_be_on_hub(value) or key == "chat_template_path" and value.endswith(_TEMPLATES):
            raise NoSuchPath(message + hint, is_data=True) if key in _OF_DATA else UserError(message + hint)
        # A teacher whose cache is there is not loaded.
        if key != "kd_teacher" and "HF_HUB_OFFLINE" not in os.environ and not _is_cached(value) and not _reaches(hub):
            raise NoSuchPath(
                f"{message} {hub} cannot be reached, and nothing of that name was loaded from it before.{hint}",
                key in _OF_DATA,
            )
        # `Qwen/Qwen3-0.6B-Base` may be on the hub, although there is a directory `Qwen/Qwen3-0.6B` here. Of a directory `chats` that is
        # gone, datasets would go on with the rows that it has kept.
        if (hint or key in _OF_DATA and "/" not in value) and os.environ.get("RANK", "0") == "0":
            print(f"{message} It is looked for on the hub.{hint}", file=sys.stderr)


def _told(recipe: Recipe, key: str) -> str:
    """Where a path stands, and what it is there: the beginning of a message."""
    return f"{recipe.where(key)}: {'a path of datasets' if key == 'datasets' else key}"


def _name_files(path: str, files: str) -> str:
    """What a recipe has in the place of `dataset_name` for files of a format."""
    return f"datasets:\n  - path: {path}\n    data_files: {files}"


def _check_has_model(recipe: Recipe, key: str, directory: str) -> None:
    files = os.listdir(directory)
    if {"config.json", "adapter_config.json"} & {*files} or any(name.endswith(".gguf") for name in files):
        return
    fix = "It has a config.json, or an adapter's adapter_config.json."
    # A run that was killed has saved no other model.
    if checkpoints := [name for name in files if re.fullmatch(r"checkpoint-\d+", name)]:
        newest = max(checkpoints, key=lambda name: int(name.partition("-")[2]))
        fix = f"Name a checkpoint in it: {key}: {os.path.join(directory, newest)}"
    raise UserError(f"{recipe.where(key)}: {key} is {directory!r}, a directory without a model. {fix}")


def _is_format(name: Any) -> bool:
    """Whether `load_dataset` takes a name for that of a format of files, such as `json`, whatever else there is by that name."""
    (datasets,) = find_spec("datasets").submodule_search_locations
    return isinstance(name, str) and name.isidentifier() and os.path.isdir(f"{datasets}/packaged_modules/{name}")


def _refuse_format(recipe: Recipe, key: str, name: str) -> None:
    told = (
        f"{_told(recipe, key)} is {name!r}, which load_dataset takes for the format of all files below {os.getcwd()}."
    )
    if os.path.isdir(name):
        raise UserError(f"{told} Write the directory as './{name}'.")
    raise UserError(f"{told} Name the files:\n{_name_files(name, 'FILE')}")


def _check_data_files(recipe: Recipe, entry: Mapping[str, Any]) -> None:
    """Refuse files of an entry of `datasets` that are not there."""
    files, directory = entry.get("data_files") or [], entry.get("data_dir") or ""
    by_split = files.values() if isinstance(files, dict) else [files]
    for file in chain.from_iterable([value] if isinstance(value, str) else value for value in by_split):
        path = os.path.join(directory, file)
        if "://" not in path and not glob.glob(os.path.expanduser(path), recursive=True):
            raise NoSuchPath(
                f"{recipe.where('datasets')}: data_files has {file!r}, and there is no such file in "
                f"{os.path.abspath(directory)}.{hint_at_similar(path)}",
                is_data=True,
            )


def _is_cached(name: str) -> bool:
    """Whether upstream has kept something of this name on the hub, a model or a dataset."""
    from huggingface_hub.constants import HF_HOME, HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    folders = [
        os.path.join(HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type=kind)) for kind in ("model", "dataset")
    ]
    cache_dir = os.environ.get("HF_DATASETS_CACHE", os.path.join(HF_HOME, "datasets"))
    return any(map(os.path.isdir, [*folders, os.path.join(cache_dir, name.replace("/", "___"))]))


def _reaches(address: str) -> bool:
    """Whether there is a way to a server: a proxy, or a connection within seconds."""
    if getproxies():
        return True
    url = urlsplit(address)
    try:
        socket.create_connection((url.hostname, url.port or {"http": 80}.get(url.scheme, 443)), timeout=5).close()
    except OSError:
        return False
    return True


def _refuse_file(recipe: Recipe, key: str, file: str) -> None:
    directory, suffix = os.path.splitext(file)
    parent, stem = os.path.split(directory)
    if key == "datasets":
        raise UserError(
            f"{_told(recipe, key)} is the file {file!r}. Name its format and the file:\n"
            f"{_name_files(_FORMATS.get(suffix, suffix[1:]), file)}"
        )
    told = f"{_told(recipe, key)} is the file {file!r}, and load_dataset takes directories."
    # Of `.`, upstream makes a dataset without a name, which it refuses.
    if stem in _SPLITS and os.path.basename(parent) not in ("", "."):
        raise UserError(f"{told} Name the one that it is in: --dataset_name {shlex.quote(parent)}")
    raise UserError(
        f"{told} Put it into one: "
        f"{shlex.join(['mkdir', directory])} && {shlex.join(['mv', file, f'{directory}/train{suffix}'])}, and then "
        f"--dataset_name {shlex.quote(directory)}"
    )
