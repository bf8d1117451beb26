"""Adapters of PEFT of every kind train as on eager CPU."""

import pytest
from peft import PEFT_TYPE_TO_CONFIG_MAPPING


TARGETS = {"target_modules": ["q_proj", "v_proj"]}
VIRTUAL = {"num_virtual_tokens": 4}
# Those that draw random numbers at each step (PVERA), or compute with sparse tensors (FROD, SHIRA), are left out, and so are those that TRL
# or this model does not take.
ADAPTERS = {
    "ADALORA": {"total_step": 6, "tinit": 1, "tfinal": 2, **TARGETS},
    "BEFT": TARGETS,
    "BOFT": TARGETS,
    "C3A": {"block_size": 8, **TARGETS},
    "DELORA": TARGETS,
    "FOURIERFT": {"n_frequency": 64, **TARGETS},
    "GLORA": TARGETS,
    "GRALORA": TARGETS,
    "HRA": TARGETS,
    "IA3": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LILY": TARGETS,
    "LN_TUNING": {},
    "LOHA": TARGETS,
    "LOKR": TARGETS,
    "LORA": {},
    "LORA of parameters": {"target_parameters": ["mlp.up_proj.weight"]},
    "LORA of some tokens": {"trainable_token_indices": [3, 4]},
    "LORA with a bias": {"lora_bias": True},
    "LORA with a trained head": {"modules_to_save": ["lm_head"]},
    "LORA with an invocation": {"alora_invocation_tokens": [5]},
    "LORA with magnitudes": {"use_dora": True},
    "MISS": {"r": 8, **TARGETS},
    "OFT": TARGETS,
    "OSF": TARGETS,
    "P_TUNING": {"encoder_hidden_size": 16, **VIRTUAL},
    "PEANUT": TARGETS,
    "PREFIX_TUNING": VIRTUAL,
    "PROMPT_TUNING": VIRTUAL,
    "PSOFT": TARGETS,
    "RANDLORA": TARGETS,
    "ROAD": {"group_size": 8, **TARGETS},
    "TINYLORA": TARGETS,
    "TRAINABLE_TOKENS": {"token_indices": [5, 6, 7]},
    "UNILORA": TARGETS,
    "VBLORA": {"vector_length": 16, "num_vectors": 32, **TARGETS},
    "VERA": TARGETS,
    "WAVEFT": {"n_frequency": 64, **TARGETS},
}


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_trains_as_on_eager_cpu(runs, same_logs, adapter):
    kind = adapter.partition(" ")[0]
    if kind not in PEFT_TYPE_TO_CONFIG_MAPPING:
        pytest.skip(f"this version of PEFT has no {kind}")
    lora = {"peft_type": kind, **ADAPTERS[adapter]}
    # Of Lily, padding counts as well.
    config = dict(max_steps=6, logging_steps=1, learning_rate=1e-3, pad_to_multiple_of=48)
    if kind == "PREFIX_TUNING":
        # What is recomputed has no prefix.
        config["gradient_checkpointing"] = False
    same_logs(runs.ours(lora=lora, **config), runs.stock(lora=lora, **config), rel=5e-5)
