"""Which weights an adapter was trained on: a hash of each, beside the adapter."""

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from torch import Tensor, nn

from ...atomic_write import write_atomically
from ...errors import damage_of
from ...formatting import dtype_name


#: Beside the adapter's own files.
BASE_FILE = "base_model.json"
#: What PEFT puts before the names of weights of a model.
PEFT_PREFIX = "base_model.model."
# Elements of a weight that are looked at: a model that was trained otherwise differs in nearly all.
_SAMPLE = 4096
# Ways to begin an adapter, of those with a name, that leave the base as it is. The others (PiSSA, OLoRA, LoftQ) take the adapter off it.
_KEEP_BASE = (True, False, "gaussian", "eva", "orthogonal")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def find_frozen(model: nn.Module) -> list[str]:
    """
    List the weights under an adapter that are those of its base, and stay so, by their names in the model that is
    trained; none where it has no adapter, or one that is not merged.
    """
    if not isinstance(model, PeftModel) or model.active_peft_config.is_prompt_learning:
        return []
    changes_base = any(_takes_from_base(config) for config in model.peft_config.values())
    return [
        name
        for name, parameter in model.named_parameters()
        if name.startswith(PEFT_PREFIX)
        and not parameter.requires_grad
        and not (changes_base and ".base_layer." in name)
    ]


def find_base_change(model: PeftModel) -> str | None:
    """
    The setting of an adapter for which its base, with the adapter switched off, is not the model that training began with; `None` where
    it is.
    """
    for config in model.peft_config.values():
        if _takes_from_base(config):
            return f"init_lora_weights={config.init_lora_weights!r}"
        # Biases of the base are trained in their place.
        if (bias := vars(config).get("bias", "none")) != "none":
            return f"bias={bias!r}"
    return None


def _takes_from_base(config: PeftConfig) -> bool:
    """Whether an adapter that began is taken off the base."""
    return vars(config).get("init_lora_weights", True) not in _KEEP_BASE


def write_base(
    directory: str | Path,
    model_name: str,
    weights: Mapping[str, Tensor],
    quantization: Mapping[str, Any] | None = None,
) -> None:
    """
    Record the base of an adapter beside it, atomically: its name, its weights by their name with the adapter, and how it was
    quantized when it was loaded, as transformers writes it.
    """
    entries = {}
    for name, weight in weights.items():
        dtype = dtype_name(weight.dtype)
        if dtype in _DTYPES and weight.numel():
            # PEFT wraps modules that it adds to, or trains a copy of.
            name = name.removeprefix(PEFT_PREFIX).replace(".base_layer.", ".").replace(".original_module.", ".")
            entries[name] = {"shape": list(weight.shape), "dtype": dtype, "hash": _hash(weight, dtype)}
    record = {"base_model": model_name, "weights": entries, "quantization": quantization}
    write_atomically(Path(directory) / BASE_FILE, json.dumps(record, indent=1))


def read_quantization(directory: str | Path) -> dict[str, Any] | None:
    """How the base of the adapter in a directory was quantized in training; `None` if it was not, or is not known."""
    path = Path(directory) / BASE_FILE
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("quantization")
    except (AttributeError, ValueError) as error:
        raise damage_of(path) from error


def find_differences(
    directory: str | Path, model: nn.Module, new: Collection[str] = ()
) -> tuple[int, list[str]] | None:
    """
    Compare a float32 model with the base that the adapter in a directory was trained on, but for weights that are `new`
    in it. Returns how many weights were compared, and the names of those that differ; `None` where there is nothing to
    compare with. A record that cannot be read is a `ValueError`.
    """
    path = Path(directory) / BASE_FILE
    if not path.is_file():
        return None
    weights = {name: weight for name, weight in model.named_parameters() if name not in new}
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["weights"]
        # A run may have added tokens to the vocabulary.
        entries = {
            name: entry
            for name, entry in entries.items()
            if name in weights and entry["shape"] == [*weights[name].shape]
        }
        differing = [name for name, entry in entries.items() if _hash(weights[name], entry["dtype"]) != entry["hash"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damage_of(path) from error
    return (len(entries), differing) if entries else None


def sample_of(weight: Tensor) -> Tensor:
    """Some thousand elements from all over a weight, or all of a small one."""
    values = weight.detach().flatten()
    # Odd, so that it goes through all columns.
    return values[:: values.numel() // _SAMPLE | 1]


def _hash(weight: Tensor, dtype: str) -> str:
    """Hash of a sample of a weight, as it is in a dtype."""
    sample = sample_of(weight).to("cpu", _DTYPES[dtype]).contiguous()
    return hashlib.blake2b(sample.view(torch.uint8).numpy(), digest_size=16).hexdigest()
