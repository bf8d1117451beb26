"""
Every two values of our settings, and of upstream's that change what a step is, meet in some run, and so do every two values of
upstream's fields that work and change numbers: what a run logs is what eager PyTorch logs on the CPU without the settings that
are not to change any number.
"""

import itertools
import random
from pathlib import Path

import preference
import pytest
import rollouts
import test_preference_options
import test_rollouts
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig

from hf_tpu_ext import TPUSFTConfig, TPUTrainer
from hf_tpu_ext.backends import select_backend
from hf_tpu_ext.errors import UserError
from hf_tpu_ext.trainers.checks.fields import WORK


pytestmark = pytest.mark.slow

#: Rows that are cut off.
SHORT = {"max_length": 16, "truncation_mode": "keep_end"}
#: Settings that numbers depend on, on every backend.
NUMBERS = {
    "gradient_accumulation_steps": (1, 2),
    "packing": (False, True),
    "completion_only_loss": (False, True),
    "lora": (None, {"r": 4}),
    "teacher": (None, "model", "base"),
    "qat_weight_dtype": (None, "int4"),
    "ema_decay": (None, 0.8),
    "max_grad_norm": (1.0, 0.1),
}
#: Settings of XLA, which leave them as they are.
OF_XLA = {
    "length_buckets": (None, [24, 48]),
    "scan_layers": ("off", "on"),
    "rematerialization": ("none", "full", "dots"),
    "attention": ("auto", "slices"),
    "step_replay": (None, False),
    "mesh": (None, "fsdp"),
}
#: Pairs that cannot be, and words of the error that says so.
REFUSED = {
    (("lora", "None"), ("teacher", "base")): "kd_teacher='base'",
}
REFUSED_OF_UPSTREAM = {
    **{
        (("optim", name), ("scan_layers", "on")): "optim='adamw_torch'"
        for name in ("sgd", "adafactor", "adagrad", "rmsprop")
    },
    (("rows", str(SHORT)), ("length_buckets", "[24, 48]")): "set `max_length=48`",
}


@pytest.fixture(scope="module")
def tiny_model(two_layer_model):
    """With layers to loop over."""
    return two_layer_model


def _pairs(case):
    return set(itertools.combinations([(key, str(value)) for key, value in case.items()], 2))


def _refusal(case):
    pairs = _pairs(case)
    refused = REFUSED | REFUSED_OF_UPSTREAM
    return next((words for pair, words in refused.items() if tuple((k, str(v)) for k, v in pair) in pairs), None)


def _covering(settings, seed=0):
    """Few cases in which every pair of values meets that can: the best of some random ones, again and again."""
    rng = random.Random(seed)
    keys = list(settings)
    left = {
        ((a, str(x)), (b, str(y)))
        for a, b in itertools.combinations(keys, 2)
        for x, y in itertools.product(settings[a], settings[b])
    } - {tuple((k, str(v)) for k, v in pair) for pair in REFUSED | REFUSED_OF_UPSTREAM}
    cases = []
    while left:
        drawn = ({key: rng.choice(settings[key]) for key in keys} for _ in range(400))
        best = max((case for case in drawn if _refusal(case) is None), key=lambda case: len(_pairs(case) & left))
        assert _pairs(best) & left
        left -= _pairs(best)
        cases.append(best)
    return cases


CASES = _covering(NUMBERS | OF_XLA)

#: Fields of upstream that work and change numbers, or what is logged; those that belong together have a name of ours.
OF_UPSTREAM = {
    "optim": ("adamw_torch", "sgd", "adafactor", "adagrad", "rmsprop"),
    "adam": ({}, {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6}),
    "weight_decay": (0.01, 0.2),
    "schedule": (
        {},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4}},
        {"lr_scheduler_type": "inverse_sqrt", "learning_rate": 5e-4},
    ),
    "warmup_steps": (3, 0.25),
    "max_grad_norm": (1.0, 0.1, 0.0),
    "batches": (
        {},
        {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "average_tokens_across_devices": False},
    ),
    "seed": (42, 7),
    "data_seed": (None, 3),
    "full_determinism": (False, True),
    "label_smoothing_factor": (0.0, 0.1),
    "loss_type": ("nll", "chunked_nll", "dft"),
    "completion_only_loss": (None, False),
    "rows": (
        {},
        {"packing": True, "packing_strategy": "wrapped"},
        {"packing": True, "packing_strategy": "bfd_split", "eval_packing": False},
        SHORT,
        {"pad_to_multiple_of": 16},
        {"dataset_kwargs": {"add_special_tokens": False}, "dataset_num_proc": 2},
    ),
    "shuffle_dataset": (False, True),
    "train_sampling_strategy": ("random", "sequential", "group_by_length"),
    "accelerator_config": (
        None,
        {"use_seedable_sampler": False},
        {"split_batches": True, "even_batches": False, "non_blocking": True},
    ),
    "loader": (
        {},
        {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 1, "dataloader_persistent_workers": True},
    ),
    "dataloader_drop_last": (False, True),
    "use_cache": (False, True),
    "steps": ({"max_steps": 4}, {"max_steps": -1, "num_train_epochs": 0.7}),
    "logs": (
        {},
        {"logging_strategy": "epoch"},
        {"logging_steps": 3, "logging_first_step": True},
        {"logging_steps": 0.25, "include_num_input_tokens_seen": "non_padding"},
        {"include_num_input_tokens_seen": "all"},
    ),
    "evaluations": (
        {},
        {
            "eval_strategy": "steps",
            "eval_steps": 2,
            "eval_on_start": True,
            "eval_accumulation_steps": 1,
            "per_device_eval_batch_size": 3,
        },
        {"eval_strategy": "epoch", "eval_delay": 0.5, "prediction_loss_only": True, "eval_use_gather_object": True},
    ),
    "lora": (None, {"r": 4}),
    # Ours.
    "step_replay": (None, False),
    "scan_layers": ("off", "on"),
    "length_buckets": (None, [24, 48]),
}
# Names of ours.
_TOGETHER = ("adam", "schedule", "batches", "rows", "loader", "steps", "logs", "evaluations")
CASES_OF_UPSTREAM = _covering(OF_UPSTREAM)
#: Fields that are met elsewhere.
MET = {
    "test_upstream_habits.py": ["auto_find_batch_size"],
    "test_trajectory.py": ["neftune_noise_alpha", "assistant_only_loss", "eos_token", "pad_token"],
    "test_ragged_batches.py": ["remove_unused_columns", "label_names"],
    "test_loader_workers.py": ["dataloader_multiprocessing_context"],
    "test_evaluation.py": ["batch_eval_metrics", "include_for_metrics", "eval_do_concat_batches"],
    "test_bad_settings.py": ["metric_for_best_model"],
    "test_ema.py": ["load_best_model_at_end", "greater_is_better"],
    "test_seq2seq.py": ["predict_with_generate", "generation_max_length"],
    "test_bad_input.py": ["dataset_text_field"],
    "test_rollout_chips.py": ["generation_batch_size"],
    "test_reference_log_probs.py": ["precompute_ref_log_probs", "precompute_ref_batch_size"],
    "test_rollouts_written.py": [
        *("top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs", "chat_template_kwargs"),
        "log_unique_prompts",
    ],
}
# Rows about what changes no number: names, files, the host's own work, and text that upstream prepares before there are batches.
_OF_NO_NUMBER = {"logs", "checkpoints", "hub", "device", "models"}
_NO_NUMBER = {
    "do_train",
    "do_eval",
    "do_predict",
    "dataloader_in_order",
    "log_completions_hub_repo",
    "chat_template_path",
}


def _config(case, teacher):
    config = {key: value for key, value in case.items() if key not in ("lora", "teacher")}
    if case["teacher"] is not None:
        config |= {"kd_teacher": teacher if case["teacher"] == "model" else "base", "kd_alpha": 0.5}
    if case["qat_weight_dtype"] is not None:
        config["qat_group_size"] = 16
    if case["ema_decay"] is not None:
        config["ema_eval"] = True
    # XLA recomputes layers by its own setting.
    return {**config, "gradient_checkpointing": False, "max_steps": 4, "eval_strategy": "steps", "eval_steps": 2}


def test_pairs_are_covered():
    met = set().union(*map(_pairs, CASES))
    settings = NUMBERS | OF_XLA
    for a, b in itertools.combinations(settings, 2):
        for x, y in itertools.product(settings[a], settings[b]):
            pair = ((a, str(x)), (b, str(y)))
            assert pair in met or pair in {tuple((k, str(v)) for k, v in known) for known in REFUSED}
    assert len(CASES) < 25


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_settings_together_train_what_eager_pytorch_trains(case, runs, teacher, same_logs, request):
    config = _config(case, teacher)
    plain = {key: value for key, value in config.items() if key not in OF_XLA}
    ours = runs.ours(config_cls=TPUSFTConfig, lora=case["lora"], **config)
    if case["teacher"] is case["qat_weight_dtype"] is case["ema_decay"] is None:
        upstream = {key: value for key, value in plain.items() if key not in TPUSFTConfig.__annotations__}
        reference = runs.stock(lora=case["lora"], **{k: v for k, v in upstream.items() if not k.startswith("ema")})
    else:
        request.addfinalizer(lambda: select_backend("xla"))
        reference = runs.ours(config_cls=TPUSFTConfig, lora=case["lora"], backend="cpu", **plain)
    if case["qat_weight_dtype"] is None:
        same_logs(ours, reference)
    else:
        # After an update, the last bit of a weight decides about integers.
        first, expected = ours.state.log_history[0], reference.state.log_history[0]
        assert first["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert first["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(("pair", "words"), REFUSED.items(), ids=str)
def test_a_pair_that_cannot_be_is_refused(pair, words, runs, teacher):
    case = {key: values[0] for key, values in (NUMBERS | OF_XLA).items()}
    for key, value in pair:
        case[key] = next(known for known in (NUMBERS | OF_XLA)[key] if str(known) == str(value))
    with pytest.raises(UserError) as error:
        runs.ours(config_cls=TPUSFTConfig, lora=case["lora"], **_config(case, teacher))
    assert words in str(error.value)


def test_every_field_that_works_and_changes_numbers_is_met():
    met = {name for names in MET.values() for name in names}
    for table in (NUMBERS, OF_UPSTREAM):
        met.update(table, *(value for name in _TOGETHER for value in table.get(name, ())))
    for cases in (test_preference_options.CASES, test_rollouts.CASES, test_rollouts.MORE):
        met.update(*(case.settings for case in cases.values()))
    met.update(preference.DEFAULTS, rollouts.DEFAULTS, ["length_column_name"])
    # By the names that they have in `generate`: test_seq2seq.py.
    met |= {"generation_num_beams", "generation_config"}
    works = {name for row in WORK if row.says not in _OF_NO_NUMBER for name in row.names.split()}
    assert works - _NO_NUMBER <= met, works - _NO_NUMBER - met
    for file, names in MET.items():
        text = (Path(__file__).parent / file).read_text(encoding="utf-8")
        assert all(name in text for name in names), file


@pytest.fixture
def deterministic(request):
    """What `full_determinism` sets in a process is put back."""
    yield
    torch.use_deterministic_algorithms(False)


def _flat(case):
    config = {key: value for key, value in case.items() if key != "lora" and key not in _TOGETHER}
    for name in set(_TOGETHER) & set(case):
        config |= case[name]
    return {**config, "gradient_checkpointing": False}


@pytest.mark.parametrize("strategy", ["group_by_length", "sequential"])
def test_lengths_of_a_column_group_rows(runs, same_logs, strategy):
    """They are others than those of the rows."""
    rows = Dataset.from_list(
        [{"input_ids": [5 + i] * 8, "labels": [5 + i] * 8, "size": i * 7 % 16} for i in range(16)]
    )
    trainers = []
    for cls in (TPUTrainer, Trainer):
        args = TrainingArguments(
            str(runs.output_dir),
            per_device_train_batch_size=2,
            max_steps=4,
            logging_steps=1,
            learning_rate=1e-3,
            train_sampling_strategy=strategy,
            length_column_name="size",
            remove_unused_columns=True,
            report_to="none",
            save_strategy="no",
            use_cpu=cls is Trainer,
        )
        model = AutoModelForCausalLM.from_pretrained(runs.model_dir, dtype=torch.float32)
        trainers.append(cls(model, args, train_dataset=rows))
        trainers[-1].train()
    same_logs(*trainers)


@pytest.mark.parametrize(("pair", "words"), REFUSED_OF_UPSTREAM.items(), ids=str)
def test_a_pair_of_upstreams_that_cannot_be_is_refused(pair, words, runs):
    case = {key: next(known for known in OF_UPSTREAM[key] if str(known) == value) for key, value in pair}
    with pytest.raises(UserError) as error:
        runs.ours(config_cls=TPUSFTConfig, **_flat(case))
    assert words in str(error.value)


@pytest.mark.parametrize("case", CASES_OF_UPSTREAM, ids=range(len(CASES_OF_UPSTREAM)))
def test_fields_of_upstream_together_train_what_stock_trains(case, runs, same_logs, deterministic):
    config = _flat(case)
    ours = runs.ours(config_cls=TPUSFTConfig, lora=case["lora"], **config)
    of_ours = TPUSFTConfig.__dataclass_fields__.keys() - SFTConfig.__dataclass_fields__.keys()
    reference = runs.stock(lora=case["lora"], **{k: v for k, v in config.items() if k not in of_ours})
    same_logs(ours, reference)
