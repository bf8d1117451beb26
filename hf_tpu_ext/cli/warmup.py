"""`hf-tpu warmup`: fill the compilation cache before a run."""

import os
import tempfile
from functools import partial

from ..formatting import format_size
from .launch import start_processes
from .recipe import load_recipe
from .recipe_checks import check_training
from .trl_scripts import SCRIPTS, take_command


DESCRIPTION = """\
Fill the compilation cache with the graphs of a recipe, for the run itself to load; its last lines say whether it did. One
graph is compiled for each length that batches are padded to (max_length, length_buckets), for training and for
evaluation; those of a large model take minutes each. Use the recipe, and the overrides, of the run:

  hf-tpu warmup --config recipes/sft_lora_qwen3.yaml
  hf-tpu sft    --config recipes/sft_lora_qwen3.yaml

It loads the model and the data, runs a few steps of each kind, and forgets what they did: nothing is written to
output_dir, nothing is logged or reported, no checkpoint is made. Graphs go to compile_cache_dir. Runs use them as long
as model, batch size, lengths, accumulation, precision, chips and software stay the same; learning rate, schedule, number of
steps, output_dir, run_name and the order of the data may change. For a recipe of another command than `sft`:

  hf-tpu warmup dpo --config recipes/dpo_lora_qwen3.yaml
"""


def run(argv: list[str]) -> int:
    """Compile the programs of the recipe that the arguments after `hf-tpu warmup` name, and return the exit status."""
    command, title, rest = take_command("warmup", argv)
    recipe = load_recipe(rest, SCRIPTS[command].tiny_data)
    check_training(recipe)
    make_parser = partial(SCRIPTS[command].parser, title, DESCRIPTION)
    status = start_processes(title, recipe, make_parser, resumes=False)
    if status is not None:
        return status

    from ..callbacks.run_lines import describe_cache_use
    from ..trainers.run.every_length import WarmedUp, WarmUpMixin

    with tempfile.TemporaryDirectory() as directory:
        try:
            adapt = partial(WarmUpMixin.over, output_dir=directory)
            SCRIPTS[command].train(recipe, make_parser(), adapt)
        except WarmedUp as done:
            if int(os.environ.get("RANK", "0")):
                # The first of several processes prints the table.
                return 0
            print(f"{'graph':<20}{'batch':<16}{'compiled':>10}{'loaded':>10}{'seconds':>10}")
            for (kind, shape), spent in done.programs.items():
                if shape or spent.compiles or spent.loads:
                    counts = f"{spent.compiles:>10}{spent.loads:>10}{spent.compile_seconds:>10.1f}"
                    print(f"{kind:<20}{format_size(shape):<16}{counts}")
            print(describe_cache_use(done.cache))
            print(f"Next: hf-tpu {command} with the same recipe")
    return 0
