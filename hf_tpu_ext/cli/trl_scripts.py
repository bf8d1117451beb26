"""`hf-tpu sft`, `dpo`, `reward`, `kto`, `grpo`, `rloo` and `distillation`: TRL's training scripts with the trainers of this package."""

import importlib
import os
import shlex
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..importing import without_garbage_collection
from ..temporarily import temporarily
from .launch import start_processes
from .recipe import Recipe, load_recipe
from .recipe_checks import check_training
from .recipe_parser import RecipeParser
from .script_checks import advise_split, check_mixture, check_reward_functions, naming_broken_rows
from .swap import TRAINERS


_DESCRIPTION = """\
{purpose} on the TPU, GPU or CPU of this machine. Takes the recipes of `trl {command}`, and runs in its place where
HF_TPU_EXT=1 is set (HF_TPU_EXT=0 never). One process drives all TPU chips; on GPUs a process for each is started, as `trl`
does, by `accelerate launch`, whose options are keys, too.

examples:
  hf-tpu {command} --config {recipe}
  hf-tpu {command} --config {recipe} --learning_rate 1e-4 --max_steps 100
  hf-tpu {command} --model_name_or_path Qwen/Qwen3-0.6B --dataset_name {dataset} {peft} {rewards}--output_dir runs/qwen3
"""


@dataclass(frozen=True)
class TRLScript:
    """
    A training script of TRL, run with the trainer of this package: its command, what it does as the start of a
    sentence, a recipe and a dataset of the Hub for it, what `--smoke` trains on, what loads the trained model, and
    the options of an example that train an adapter and reward completions.
    """

    command: str
    purpose: str
    recipe: str
    dataset: str
    tiny_data: str = "preferences"
    auto_class: str = "AutoModelForCausalLM"
    peft: str = "--use_peft"
    rewards: str = ""

    @property
    def trainer(self) -> str:
        """TRL's trainer in it."""
        return TRAINERS[self.command]

    @property
    def trains_head(self) -> bool:
        """Whether the model has a head that its base has not: an adapter has to keep it."""
        return self.auto_class != "AutoModelForCausalLM"

    def run(self, argv: list[str]) -> int:
        """Train from the recipe that the arguments after `hf-tpu <command>` name, and return the exit status."""
        recipe = load_recipe(argv, self.tiny_data)
        check_training(recipe)
        status = start_processes(self.command, recipe, self.parser)
        if status is not None:
            return status
        _, training_args, model_args, _ = self.train(recipe, self.parser())
        if os.environ.get("RANK", "0") != "0":
            # The first of several processes tells what comes next.
            return 0
        loader = f"peft.AutoPeft{self.auto_class[4:]}" if model_args.use_peft else f"transformers.{self.auto_class}"
        sees = _sees(model_args, training_args.trust_remote_code)
        if sees:
            # It loads adapters, too.
            loader = "transformers.AutoModelForImageTextToText"
        # The base of an adapter has no head, so its number of labels is not known.
        labels = ", num_labels=1" if model_args.use_peft and self.trains_head else ""
        base = model_args.model_name_or_path
        # An adapter names its base as the recipe does.
        is_relative = model_args.use_peft and not os.path.isabs(base) and os.path.isdir(base)
        where = "from this directory, where its base is," if is_relative else "anywhere"
        print(f"Load it {where} with {loader}.from_pretrained({training_args.output_dir!r}{labels})")
        if model_args.use_peft and (model_args.load_in_4bit or model_args.load_in_8bit):
            print(
                "With the quantization_config of the run: without it, its base is not the rounded one that it was trained on"
            )
        merge, run = " --merge" if model_args.use_peft else "", shlex.quote(training_args.output_dir)
        if vars(training_args).get("qat_weight_dtype") is not None:
            print(f"It is not rounded there. Round it: hf-tpu export {run}{merge} --quantize")
        elif merge and not sees:
            print(f"One plain model of adapter and base: hf-tpu export {run}{merge}")
        return 0

    def parser(self, title: str | None = None, description: str | None = None) -> RecipeParser:
        """
        The parser of its recipes. `title` is the name of the command and `description` the first part of its help, where
        these are not its own.
        """
        with without_garbage_collection():
            import trl

            from .. import trainers

            script = importlib.import_module(f"trl.scripts.{self.command}")
        config_cls = vars(trainers)[f"TPU{self.trainer.removesuffix('Trainer')}Config"]
        # Scripts that generate completions have arguments of their own.
        script_cls = vars(script)[f"{self.command.upper()}ScriptArguments"] if self.rewards else trl.ScriptArguments
        dataclass_types = (script_cls, config_cls, trl.ModelConfig, trl.DatasetMixtureConfig)
        return RecipeParser(dataclass_types, title or self.command, description or _DESCRIPTION.format(**vars(self)))

    def train(
        self, recipe: Recipe, parser: RecipeParser, adapt_trainer: Callable[[type], type] | None = None
    ) -> tuple[Any, ...]:
        """
        Run the script with a recipe, which is parsed by what [`parser`] returns. `adapt_trainer` makes the trainer class from that of
        this package. Returns the arguments of the script.
        """
        import numpy as np
        import trl

        from .. import trainers
        from ..trainers.checkpoint.directories import leaving_no_empty_dir
        from ..trainers.checks.settings import check_recipe

        script = importlib.import_module(f"trl.scripts.{self.command}")
        trainer_cls = vars(trainers)[f"TPU{self.trainer}"]
        arguments = parser.parse(recipe)
        script_args, training_args, model_args, dataset_args = arguments
        if model_args.model_name_or_path is None:
            raise UserError("model_name_or_path is missing. For example: --model_name_or_path Qwen/Qwen3-0.6B")
        if script_args.dataset_name is None and not dataset_args.datasets:
            raise UserError(f"dataset_name is missing. For example: --dataset_name {self.dataset}")
        check_mixture(script_args.dataset_name, dataset_args)
        if self.rewards and not (script_args.reward_funcs or script_args.reward_model_name_or_path):
            raise UserError(
                "reward_funcs, the functions that score completions, is missing. For example: --reward_funcs accuracy_reward, or a "
                "function of yours: --reward_funcs my_rewards.is_short, or a reward model: --reward_model_name_or_path MODEL"
            )
        if self.rewards:
            check_reward_functions(script_args.reward_funcs or ())
        if self.trains_head and model_args.use_peft and model_args.lora_task_type != "SEQ_CLS":
            raise UserError(
                f"lora_task_type={model_args.lora_task_type!r} does not keep the head of a reward model. Set lora_task_type: SEQ_CLS"
            )
        if adapt_trainer is None:
            check_recipe(training_args)

        trainer_cls = trainer_cls if adapt_trainer is None else adapt_trainer(trainer_cls)
        # TRL splits data as NumPy's generator says: after a resume, and in each process, other rows would be held out.
        np.random.seed(training_args.seed)
        try:
            with (
                temporarily(trl, **{self.trainer: trainer_cls}),
                # The padding of the tiny data is not that of the recipe's.
                temporarily(trainer_cls, tells_padding=recipe.smoke is None),
                leaving_no_empty_dir(training_args.output_dir) if adapt_trainer is None else nullcontext(),
                naming_broken_rows(script_args, dataset_args),
            ):
                script.main(*arguments)
        except KeyError as error:
            if error.args[0] not in (script_args.dataset_train_split, script_args.dataset_test_split):
                raise
            split = error.args[0]
            raise UserError(f"The dataset has no split {split!r}. {advise_split(split, script_args)}") from error
        return arguments


_SCRIPTS = (
    TRLScript(
        command="sft",
        purpose="Fine-tune a language model",
        recipe="recipes/sft_lora_qwen3.yaml",
        dataset="trl-lib/Capybara",
        tiny_data="data",
    ),
    TRLScript(
        command="dpo",
        purpose="Align a language model with preferences (DPO)",
        recipe="recipes/dpo_lora_qwen3.yaml",
        dataset="trl-lib/ultrafeedback_binarized",
    ),
    TRLScript(
        command="reward",
        purpose="Train a reward model",
        recipe="recipes/reward_qwen3.yaml",
        dataset="trl-lib/ultrafeedback_binarized",
        auto_class="AutoModelForSequenceClassification",
        peft="--use_peft --lora_task_type SEQ_CLS",
    ),
    TRLScript(
        command="kto",
        purpose="Align a language model with desirable and undesirable completions (KTO)",
        recipe="recipes/kto_lora_qwen3.yaml",
        dataset="trl-lib/kto-mix-14k",
        tiny_data="unpaired",
    ),
    TRLScript(
        command="grpo",
        purpose="Train a language model on rewards for what it writes (GRPO)",
        recipe="recipes/grpo_lora_qwen2.yaml",
        dataset="trl-lib/DeepMath-103K",
        tiny_data="questions",
        rewards="--reward_funcs accuracy_reward ",
    ),
    TRLScript(
        command="rloo",
        purpose="Train a language model on rewards for what it writes (RLOO)",
        recipe="recipes/grpo_lora_qwen2.yaml",
        dataset="trl-lib/DeepMath-103K",
        tiny_data="questions",
        rewards="--reward_funcs accuracy_reward ",
    ),
    TRLScript(
        command="distillation",
        purpose="Distill a teacher into a language model, on what the latter generates (on-policy distillation)",
        recipe="recipes/distillation_lora_qwen2.yaml",
        dataset="trl-lib/tldr",
        tiny_data="questions",
        peft="--teacher_model_name_or_path Qwen/Qwen3-4B --use_peft",
    ),
)
#: The scripts, by their command.
SCRIPTS = {script.command: script for script in _SCRIPTS}


def take_command(own: str, argv: list[str]) -> tuple[str, str, list[str]]:
    """
    Take the name of a script off the arguments of the command `own`. Returns that name, `"sft"` where none is given; the title of
    both, e.g. `"plan dpo"`; and the other arguments.
    """
    if argv and argv[0] in SCRIPTS:
        return argv[0], f"{own} {argv[0]}", argv[1:]
    return "sft", own, argv


def _sees(model_args, trust_remote_code: bool) -> bool:
    """Whether the model that was trained is one of text and images, as TRL tells when it loads it."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    config = AutoConfig.from_pretrained(
        model_args.model_name_or_path,
        revision=model_args.model_revision,
        trust_remote_code=trust_remote_code,
    )
    # A reward model may be trained from a configuration that names none.
    return (config.architectures or [None])[0] in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
