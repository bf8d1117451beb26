"""
Every two values of our settings, and of upstream's that change what a step is, meet in some run: what it logs is what eager
PyTorch logs on the CPU without the settings that are not to change any number.
"""

import itertools
import random

import pytest

from hf_tpu_ext import TPUSFTConfig
from hf_tpu_ext.backends import select_backend
from hf_tpu_ext.errors import UserError


pytestmark = pytest.mark.slow

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


def _pairs(case):
    return set(itertools.combinations([(key, str(value)) for key, value in case.items()], 2))


def _refusal(case):
    pairs = _pairs(case)
    return next((words for pair, words in REFUSED.items() if tuple((k, str(v)) for k, v in pair) in pairs), None)


def _covering(settings, seed=0):
    """Few cases in which every pair of values meets that can: the best of some random ones, again and again."""
    rng = random.Random(seed)
    keys = list(settings)
    left = {
        ((a, str(x)), (b, str(y)))
        for a, b in itertools.combinations(keys, 2)
        for x, y in itertools.product(settings[a], settings[b])
    } - {tuple((k, str(v)) for k, v in pair) for pair in REFUSED}
    cases = []
    while left:
        drawn = ({key: rng.choice(settings[key]) for key in keys} for _ in range(400))
        best = max((case for case in drawn if _refusal(case) is None), key=lambda case: len(_pairs(case) & left))
        assert _pairs(best) & left
        left -= _pairs(best)
        cases.append(best)
    return cases


CASES = _covering(NUMBERS | OF_XLA)


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
