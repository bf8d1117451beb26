"""`hf-tpu plan`: compile a recipe ahead of time, without a TPU."""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from types import FrameType

from ..errors import UserError
from ..examples.jsonl import write_splits
from ..hardware.prices import read_prices
from ..installing import install_command
from .json_output import json_output, why_not_made
from .recipe import Recipe, load_recipe, with_underscores
from .recipe_checks import NoSuchPath, check_quantized
from .trl_scripts import SCRIPTS, take_command


DESCRIPTION = f"""\
Compile a recipe ahead of time with the TPU compiler, without a TPU and without weights: HBM, step time and cost.
The command takes about 1 GB of memory, whatever the size of the model.
The compiler: {install_command("tpu")}. It takes a core, 2 to 5 GB besides (2 GB for 1.7 billion parameters)
and one to several minutes for each graph (micro-step, training and evaluation step of each length). --search takes as
long again for each of its variants: 3 combinations of settings on one chip, 6 on several, with about 3 batch sizes each.
It shows them as they come, and Ctrl-C keeps those that are known.

examples:
  hf-tpu plan --config recipes/sft_lora_qwen3.yaml
  hf-tpu plan --config recipes/sft_lora_qwen3.yaml --topology v5e-1 --seq_lengths 1024
  hf-tpu plan --config recipes/sft_lora_qwen3.yaml --search

The exit status is 0 if it fits, 1 if it does not, and 3 if that is unknown. For a recipe of another command than `sft`:

  hf-tpu plan dpo --config recipes/dpo_lora_qwen3.yaml
  hf-tpu plan --config recipes/pretrain_tinystories.yaml

options of its own:
  --topology NAME      the TPU: v5e-1, v5e-4, v5e-8 (the default; also v5litepod-8), v6e-8, ...; of several hosts: v5e-16 to v5e-256, ...
  --seq_lengths N ...  sequence lengths, instead of reading the dataset; of a model that takes images, each row has one
  --search [NAME ...]  search rematerialization, mesh and batch size, and print the Pareto front; or only the named ones
                       of these: rematerialization, mesh, attention, per_device_train_batch_size
  --json FILE          also write the plan to FILE; -: print it alone
  --hlo DIRECTORY      write the compiled graphs (optimized HLO) there, but not those of variants
  --prices FILE        prices per chip-hour, instead of the list prices that come with this package
  --jobs N             graphs to compile at once, of variants too (by default as many as cores and memory allow)
"""
# Keys of the recipe that make no sense with synthetic rows.
_OF_THE_DATA = (
    "datasets",
    "dataset_config",
    "dataset_streaming",
    "streaming",
    "test_split_size",
    "dataset_text_field",
    "formatting_func",
)
_SEARCHED = ("rematerialization", "mesh", "per_device_train_batch_size")
# The compiler's estimate does not know kernels: for who wants to compare by the arithmetic.
_MAY_BE_SEARCHED = (*_SEARCHED, "attention")
_NEEDS = (
    "A plan needs the model's configuration and tokenizer: a directory with its config.json and a tokenizer will do "
    "(--model_name_or_path DIRECTORY). To put a small one there: hf-tpu prepare tiny --output_dir tiny; cp tiny/model/tok* "
    "tiny/model/chat* DIRECTORY"
)
_NEEDS_NO_DATA = "The data can be left out: --seq_lengths 1024"
# These say on what a run is, and that is what --topology says.
_OF_THE_MACHINE = ("PJRT_DEVICE", "CPU_NUM_DEVICES", "HF_TPU_EXT_BACKEND", "TPU_NUM_DEVICES", "TPU_VISIBLE_CHIPS")


def _options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of its own, and the rest of the command line: the recipe."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--topology", default="v5e-8")
    parser.add_argument("--seq_lengths", type=int, nargs="+")
    parser.add_argument("--search", nargs="*", choices=_MAY_BE_SEARCHED)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--hlo", type=Path)
    parser.add_argument("--prices", type=Path)
    parser.add_argument("--jobs", type=int)
    try:
        options, rest = parser.parse_known_args([with_underscores(word) for word in argv])
    except argparse.ArgumentError as error:
        raise UserError(f"command line: {error}") from error
    for length in options.seq_lengths or ():
        if length < 1:
            raise UserError(
                f"--seq_lengths {length}: a row has at least one token, for example --seq_lengths 512 1024"
            )
    if options.jobs is not None and options.jobs < 1:
        raise UserError(f"--jobs {options.jobs}: at least one graph is compiled at once, for example --jobs 2")
    if options.prices is not None:
        # Before the minutes that a plan takes.
        read_prices(options.prices)
    if options.hlo is not None and (reason := why_not_made(options.hlo)) is not None:
        raise UserError(
            f"--hlo {options.hlo} cannot be written ({reason}). Give a directory of yours, for example --hlo graphs"
        )
    return options, rest


class _Stopped(KeyboardInterrupt):
    """A signal told the command to stop."""

    def __init__(self, number: int):
        self.signal = signal.Signals(number)
        super().__init__("Ctrl-C" if self.signal == signal.SIGINT else self.signal.name)


class _Stop(Event):
    """Is set when a signal tells the command to stop, for compilers to end. `during` is what happens meanwhile, as a clause."""

    during = "its recipe was read"


@contextmanager
def _stoppable() -> Iterator[_Stop]:
    """Within this context, Ctrl-C and SIGTERM raise [`_Stopped`], and set the event."""
    stop = _Stop()

    def end(number: int, frame: FrameType | None) -> None:
        stop.set()
        raise _Stopped(number)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(argv: list[str]) -> int:
    """
    Plan a recipe, and return the exit status: `0` if it fits, `1` if it does not, `3` if that could not be told, and 128 more than
    the number of the signal that stopped it.
    """
    with _stoppable() as stop:
        try:
            command, title, rest = take_command("plan", argv)
            options, rest = _options(rest)
            with json_output(options.json) as write_json:
                return _plan(command, title, options, rest, stop, write_json)
        except _Stopped as stopped:
            print(f"The plan was stopped by {stopped} while {stop.during}. No plan was written.", file=sys.stderr)
            return 128 + stopped.signal


def _plan(
    command: str,
    title: str,
    options: argparse.Namespace,
    rest: list[str],
    stop: _Stop,
    write_json: Callable[[str], None],
) -> int:
    from ..hardware.topologies import find_topology

    topology = find_topology(options.topology)
    try:
        recipe = load_recipe(rest, SCRIPTS[command].tiny_data, reads_data=not options.seq_lengths)
    except NoSuchPath as error:
        raise UserError(f"{error}\n{_NEEDS_NO_DATA if error.is_data else _NEEDS}") from error
    check_quantized(recipe)
    for variable in _OF_THE_MACHINE:
        os.environ.pop(variable, None)
    # Programs are traced on the host. torch_xla warns, when it is imported, that it chooses by itself.
    os.environ["PJRT_DEVICE"] = "CPU"
    if recipe.asks_for_help:
        # Nothing is traced for it, so torch_xla may be missing.
        SCRIPTS[command].parser(title, DESCRIPTION).parse(recipe)
    if not options.seq_lengths and "dataset_name" not in recipe and "datasets" not in recipe:
        raise UserError(
            "The graphs of a step depend on the shapes of its batches, and the recipe names no dataset. Give their lengths instead: "
            "--seq_lengths 1024"
        )

    # Imported here: PyTorch comes with it, and reads the environment.
    from datasets import disable_progress_bars

    from ..backends.selection import select_tracing
    from ..hardware.prices import PRICES
    from ..plan.advice import advise, foresee
    from ..plan.compiler import jobs_at_once
    from ..plan.make import make_plan
    from ..plan.page import render, render_found
    from ..plan.search import search
    from ..plan.trace import trace_run

    # A plan has bars of its own.
    disable_progress_bars()
    hosts = topology.hosts if topology.num_hosts > 1 else ()
    backend = select_tracing(topology.num_chips, hosts, topology.chip)
    recipe.command_line["backend"] = backend.name
    with tempfile.TemporaryDirectory() as directory:
        if options.seq_lengths:
            recipe = _with_synthetic_rows(recipe, command, Path(directory), options.seq_lengths)

        def trace(changes: dict[str, str]):
            stop.during = "its data were read and its graphs traced"
            variant = replace(recipe, command_line=recipe.command_line | changes)
            try:
                programs, facts = trace_run(
                    lambda adapt: SCRIPTS[command].train(variant, SCRIPTS[command].parser(title, DESCRIPTION), adapt)
                )
            except OSError as error:
                needs = _NEEDS if options.seq_lengths else f"{_NEEDS}. {_NEEDS_NO_DATA}"
                raise UserError(f"{error}\n{needs}") from error
            if options.seq_lengths:
                # The rows are made up, so what they say of the data is not true.
                facts = replace(facts, rows=None, token_share=None, token_waste=None, optimizer_steps=facts.max_steps)
            return programs, facts

        def compiler_of(programs, facts):
            stop.during = f"its graphs were compiled for {topology.name}"
            name = recipe.path or facts.config.name_or_path or "the command line"
            return partial(make_plan, name, topology, programs, facts, options.prices or PRICES, stop=stop)

        jobs = jobs_at_once() if options.jobs is None else options.jobs
        programs, own = trace({})
        searched = () if options.search is None else options.search or _SEARCHED
        for line in foresee(programs, topology, own, searched):
            print(line, file=sys.stderr, flush=True)
        plan = own_plan = compiler_of(programs, own)(jobs, options.hlo)
        plan = replace(plan, advice=advise(plan, own, searched))
        print(render(plan))
        write_json(plan.to_json())

        def trace_variant(changes: dict[str, str]):
            if own.settings | changes == own.settings:
                # What is compiled already is not compiled again.
                return lambda _: own_plan
            return partial(compiler_of(*trace(changes)), quiet=True)

        if options.search is not None:
            stopped = None
            with closing(search(own_plan, own.settings, searched, trace_variant, jobs)) as found_so_far:
                try:
                    for found in found_so_far:
                        plan = replace(found, advice=[*found.advice, *advise(found, own, searched)])
                        write_json(plan.to_json())
                except _Stopped as error:
                    stopped = error
            print(f"\n{render_found(plan)}")
            if stopped is not None:
                print(f"\nThe search was stopped by {stopped}. What it found before is above.")
                return 128 + stopped.signal
    return {True: 0, False: 1, None: 3}[plan.fits]


def _check_lengths(recipe: Recipe, command: str, lengths: list[int]) -> None:
    """Refuse lengths of rows that the run would cut."""
    is_set = "max_length" in recipe
    max_length = recipe.number("max_length") if is_set else SCRIPTS[command].parser().get_default("max_length")
    if max_length is not None and max(lengths) > max_length:
        raise UserError(
            f"--seq_lengths {max(lengths)}: rows are cut to max_length={max_length}{'' if is_set else ', the default'}. To plan for longer "
            f"ones: --max_length {max(lengths)}"
        )


def _with_synthetic_rows(recipe: Recipe, command: str, directory: Path, lengths: list[int]) -> Recipe:
    """The recipe with a dataset of a synthetic row of each length."""
    file, command_line = (
        {key: value for key, value in keys.items() if key not in _OF_THE_DATA}
        for keys in (recipe.file, recipe.command_line)
    )
    if command in ("sft", "dpo", "kto") and _takes_images(recipe):
        without = replace(recipe, file=file, command_line=command_line)
        return _with_synthetic_images(without, command, directory, lengths)
    if command in ("sft", "reward", "dpo", "kto"):
        _check_lengths(recipe, command, lengths)
    if command == "sft":
        masks = {"completion_only_loss": "completion_mask", "assistant_only_loss": "assistant_masks"}
        columns = ["input_ids", *(column for setting, column in masks.items() if recipe.says_yes(setting))]
        rows = [{column: [1] * length for column in columns} for length in lengths]
        # Upstream reads the masks without it, and with it looks for messages.
        command_line["assistant_only_loss"] = "false"
    elif command in ("grpo", "rloo", "distillation"):
        rows = [{"prompt": _prompt_of(recipe, length)} for length in lengths]
    elif command == "reward":
        rows = [{column: [1] * length for column in ("chosen_ids", "rejected_ids")} for length in lengths]
    else:
        # Words of a token each, or of more. A prompt of one word, and the end-of-sequence token behind the completion.
        rows = [{"prompt": "a", "chosen": " a" * (length - 2), "rejected": " b" * (length - 2)} for length in lengths]
    write_splits(directory, {"train": rows, "test": rows})
    return replace(recipe, file=file, command_line=command_line | _name_splits(directory))


def _name_splits(directory: Path) -> dict[str, str]:
    return {"dataset_name": str(directory), "dataset_train_split": "train", "dataset_test_split": "test"}


def _takes_images(recipe: Recipe) -> bool:
    """Whether the recipe's model is one that trains on images. Without its configuration, the trainer says what is missing."""
    from transformers import PreTrainedConfig

    from ..vision.families import FAMILIES

    if "model_name_or_path" not in recipe:
        return False
    try:
        config, _ = PreTrainedConfig.get_config_dict(recipe.get("model_name_or_path"))
    except OSError:
        return False
    return config.get("model_type") in FAMILIES


def _with_synthetic_images(recipe: Recipe, command: str, directory: Path, lengths: list[int]) -> Recipe:
    """
    The recipe with a dataset of a row with an image, in whose columns [`~hf_tpu_ext.trainers.run.images.ImagesMixin.synthetic_rows`] makes those of
    each length.
    """
    import datasets
    from PIL import Image

    answers = {"dpo": ("prompt", "chosen", "rejected"), "kto": ("prompt", "completion")}.get(command, ("messages",))
    row = {name: [{"role": "user", "content": "a"}] for name in answers} | {"images": [Image.new("RGB", (64, 64))]}
    for split in ("train", "test"):
        datasets.Dataset.from_list([row | {"label": True}]).to_parquet(directory / f"{split}.parquet")
    settings = _name_splits(directory) | {"max_length": str(max(lengths))}
    if len(lengths) > 1:
        settings["length_buckets"] = [str(length) for length in lengths]
    return replace(recipe, command_line=recipe.command_line | settings)


def _prompt_of(recipe: Recipe, length: int) -> str:
    """A text of so many tokens, by the tokenizer of the recipe's model."""
    from transformers import AutoTokenizer

    if "model_name_or_path" not in recipe:
        raise UserError("model_name_or_path is missing. For example: --model_name_or_path Qwen/Qwen3-0.6B")
    tokenizer = AutoTokenizer.from_pretrained(recipe.get("model_name_or_path"))
    return tokenizer.decode(tokenizer(" a" * length)["input_ids"][:length])
