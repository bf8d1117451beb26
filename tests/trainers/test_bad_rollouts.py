"""What cannot be trained on with GRPO and RLOO is a `ValueError` that names it and says what to do."""

import json
import math
import shutil
from pathlib import Path

import pytest
from datasets import Dataset
from refusals import refused
from rollouts import Case, assert_same_numbers, of_length, prompts_for, train, trainer_for
from transformers import AutoTokenizer, CLIPImageProcessor, LlavaProcessor
from transformers.processing_utils import ProcessorMixin
from trl import GRPOConfig, RLOOConfig

from hf_tpu_ext import TPUGRPOConfig, TPUGRPOTrainer, TPURLOOTrainer
from hf_tpu_ext.trainers.online.arguments import count_rows_of_chips


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("bad")


# ---- Settings: before a model is loaded ----


class _Processor(ProcessorMixin):
    def __init__(self): ...


@pytest.mark.parametrize(
    "settings, given, words",
    [
        ({"use_vllm": True}, {}, ["use_vllm=True", "does not work on XLA", "Set use_vllm=False"]),
        (
            {"use_transformers_paged": True},
            {},
            ["use_transformers_paged=True", "Set use_transformers_paged=False", "static cache"],
        ),
        ({"use_transformers_continuous_batching": True}, {}, ["use_transformers_continuous_batching=False"]),
        ({}, {"tools": [len]}, ["tools does not work on XLA", "Leave it out"]),
        ({}, {"environment_factory": dict}, ["environment_factory does not work on XLA", "rollout_func"]),
        ({}, {"processing_class": _Processor()}, ["_Processor", "processing_class=processor.tokenizer"]),
        ({}, {"train_dataset": Dataset.from_dict({"question": ["a"]})}, ["['question']", "'prompt'", "rename_column"]),
        ({}, {"train_dataset": Dataset.from_dict({"prompt": ["a"], "image": ["b"]})}, ["column 'image'", "on XLA"]),
        ({}, {"train_dataset": Dataset.from_dict({"prompt": []})}, ["train_dataset is empty"]),
    ],
)
def test_before_a_model_is_loaded(xla, runs, settings, given, words):
    args = GRPOConfig(str(runs.output_dir), bf16=False, report_to="none", **settings)
    refused(words, lambda: TPUGRPOTrainer("no/such-model", reward_funcs=len, args=args, **given))


def test_the_tokenizer_of_a_processor_is_taken(runs):
    processor = _Processor()
    processor.tokenizer = runs.tokenizer
    check = lambda processing_class: TPUGRPOTrainer.check_trainer_kwargs(  # noqa: E731
        {"args": runs.config(), "processing_class": processing_class}
    )
    refused(["_Processor", "prepares images", "processing_class=processor.tokenizer"], lambda: check(processor))
    check(processing_class=processor.tokenizer)


def test_a_model_that_comes_with_a_processor_for_images(xla, runs, tmp_path):
    model = Path(shutil.copytree(runs.model_dir, tmp_path / "model"))
    LlavaProcessor(image_processor=CLIPImageProcessor(), tokenizer=runs.tokenizer, patch_size=14).save_pretrained(
        model
    )
    path = model / "config.json"
    # As the configuration of a model that sees has.
    path.write_text(json.dumps({**json.loads(path.read_text()), "image_token_id": 3}))

    def make(**given):
        args = GRPOConfig(str(runs.output_dir), bf16=False, report_to="none", per_device_train_batch_size=8)
        rows = Dataset.from_dict({"prompt": ["a"] * 8})
        return TPUGRPOTrainer(str(model), args=args, reward_funcs=of_length, train_dataset=rows, **given)

    refused(["processor for images", "processing_class=AutoTokenizer.from_pretrained(...)"], make)
    make(processing_class=AutoTokenizer.from_pretrained(model))


def test_rloo_too(xla, runs):
    args = RLOOConfig(str(runs.output_dir), bf16=False, use_vllm=True)
    refused(["Set use_vllm=False"], lambda: TPURLOOTrainer("no/such-model", reward_funcs=len, args=args))


def test_a_length_that_is_not_positive(runs):
    refused(["max_prompt_length=0", "max_prompt_length=256"], lambda: TPUGRPOConfig("out", max_prompt_length=0))


def test_a_generation_batch_that_does_not_divide(xla, models):
    for settings, words in (
        (
            {"num_generations": 3},
            ["generation_batch_size=4", "divisible by num_generations=3", "steps_per_generation=3"],
        ),
        (
            {"generation_batch_size": 6},
            ["generation_batch_size=6", "divisible by the 4 rows", "generation_batch_size=4, or leave it out"],
        ),
        (
            {"per_device_eval_batch_size": 6},
            ["has 6 rows", "divisible by the 4 completions", "Set per_device_eval_batch_size=4"],
        ),
    ):
        refused(words, lambda s=settings: trainer_for(Case("grpo", s, evaluates=True), models, True))


def test_a_generation_batch_of_eight_chips(xla):
    """It is counted over all of them. That of a config that leaves it out is what they take."""
    settings = {"per_device_train_batch_size": 4, "num_generations": 4, "bf16": False}
    args = TPUGRPOConfig("out", generation_batch_size=16, **settings)
    refused(
        ["generation_batch_size=16", "32 rows of a step", "on 8 chips", "for example generation_batch_size=32"],
        lambda: count_rows_of_chips(args, 8),
    )
    both = {"generation_batch_size": 32, "steps_per_generation": 1}
    refused(["can not be both configured"], lambda: TPUGRPOConfig("out", **both, **settings))
    for given, expected in (
        ({"generation_batch_size": 64}, (64, 2)),
        ({"steps_per_generation": 3}, (96, 3)),
        # One completion of a prompt on each chip, as on as many GPUs.
        (
            {"per_device_train_batch_size": 1, "num_generations": 8, "eval_strategy": "steps", "eval_steps": 1},
            (8, 1),
        ),
    ):
        args = TPUGRPOConfig("out", **{**settings, "per_device_eval_batch_size": 1, **given})
        count_rows_of_chips(args, 8)
        assert (args.generation_batch_size, args.steps_per_generation) == expected


# ---- Prompts ----


def test_a_prompt_that_is_longer_than_declared(xla, models):
    case = Case("grpo", {"max_prompt_length": 4})
    rows = Dataset.from_dict({"prompt": ["abc", "ab", "abcdefgh"]})
    refused(
        [
            "Row 2 of train_dataset (the first is row 0) has a prompt of 8 tokens",
            "max_prompt_length=4",
            "Set max_prompt_length=8",
        ],
        lambda: trainer_for(case, models, True, train_dataset=rows),
    )


def test_a_stream_needs_a_length(xla, models):
    stream = prompts_for(Case("grpo")).to_iterable_dataset()
    refused(
        ["prompts of train_dataset are not known", "TPUGRPOConfig(max_prompt_length=256)"],
        lambda: trainer_for(Case("grpo"), models, True, train_dataset=stream),
    )
    case = Case("grpo", {"max_prompt_length": 16}, steps=4)
    trainer = train(case, models, True, train_dataset=stream)
    reference = train(case, models, False, train_dataset=stream)
    assert trainer.lengths == [16]
    assert_same_numbers(trainer.state.log_history, reference.state.log_history)
    short = trainer_for(Case("grpo", {"max_prompt_length": 4}), models, True, train_dataset=stream)
    refused(["A prompt has", "padded to 4 on XLA", "TPUGRPOConfig(max_prompt_length="], short.train)


def test_a_tokenizer_that_pads_right_trains_the_same(xla, models):
    """Upstream pads by itself, on the left."""
    case = Case("grpo", steps=4)
    tokenizer = trainer_for(case, models, True).processing_class
    tokenizer.padding_side = "right"
    trainer = train(case, models, True, processing_class=tokenizer)
    assert_same_numbers(trainer.state.log_history, train(case, models, False).state.log_history)


def test_a_completion_that_is_longer_than_declared(xla, models):
    def write(prompts, trainer):
        tokens = [trainer._tokenizer(prompt)["input_ids"] for prompt in prompts]
        return {"prompt_ids": tokens, "completion_ids": [[70] * 20 for _ in tokens], "logprobs": None}

    trainer = trainer_for(Case("grpo"), models, True, rollout_func=write)
    refused(["A completion has 20 tokens", "max_completion_length=12", "rollout_func"], trainer.train)


def test_prompts_of_a_rollout_func_may_be_longer_than_the_datas(xla, models):
    def write(prompts, trainer):
        return {
            "prompt_ids": [[70] * 20 for _ in prompts],
            "completion_ids": [[71] for _ in prompts],
            "logprobs": None,
        }

    settings = {"max_prompt_length": 24}
    trainer = trainer_for(Case("grpo", settings, steps=1), models, True, rollout_func=write)
    assert trainer.lengths == [24]
    trainer.train()
    short = trainer_for(Case("grpo", steps=1), models, True, rollout_func=write)
    refused(["A prompt has 20 tokens", "TPUGRPOConfig(max_prompt_length=24)"], short.train)


# ---- Rewards ----


def rewards(value):
    def reward(prompts, **kwargs):
        return [1.0] * (len(prompts) - 2) + [value, 1.0]

    return reward


def raises(number, **kwargs):
    if 3 in number:
        raise KeyError("no answer")
    return [0.0] * len(number)


def raises_for_many(prompts, **kwargs):
    if len(prompts) > 1:
        raise RuntimeError("too many")
    return [0.0]


async def raises_async(completions, **kwargs):
    raise OSError("the judge is away")


def too_few(prompts, **kwargs):
    return [0.0]


def one_number(prompts, **kwargs):
    return 0.5


@pytest.mark.parametrize(
    "reward, words",
    [
        (too_few, ["'too_few' returned 1 rewards", "4 were expected"]),
        (one_number, ["'one_number' returned 0.5, and not a list", "one number for each of the 4"]),
        (rewards(math.nan), ["'reward' returned nan", "row 2 of 4: prompt '", "completion '", "None where"]),
        (rewards(-math.inf), ["'reward' returned -inf", "row 2 of 4"]),
        (rewards("good"), ["'reward' returned 'good'", "no finite number", "row 2 of 4"]),
        (raises, ["'raises' raised KeyError: 'no answer' (", "test_bad_rollouts.py:", "at row 0 of 4: prompt '"]),
        (raises_for_many, ["'raises_for_many' raised RuntimeError: too many", "for none of them alone"]),
        (raises_async, ["'raises_async' raised OSError: the judge is away", "at row 0 of 4"]),
    ],
)
@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_rewards(xla, models, kind, reward, words):
    trainer = trainer_for(Case(kind, steps=9), models, True, reward_funcs=[of_length, reward])
    refused(words, trainer.train)
    # As it was.
    assert trainer.reward_funcs == [of_length, reward]
