"""Weights in few bits, in the form of compressed-tensors, which transformers, vLLM and SGLang load."""

from importlib.util import find_spec
from pathlib import Path

import torch
from peft.utils import CONFIG_NAME as ADAPTER_CONFIG_NAME
from torch import nn
from transformers import PreTrainedModel

from ..errors import UserError
from ..installing import install_command
from ..quantization.fake_quantized import QUANTIZATION_FILE, TrainedFor
from ..quantization.rounding import SCALES, WEIGHT_DTYPES


#: Where the dtype is the one that a run was trained for.
AS_TRAINED = "as trained"


def choose_quantization(
    run_dir: Path, dtype: str | None, group_size: int | None, scale: str | None = None
) -> TrainedFor | None:
    """
    Find out what weights are to be rounded to: what a run was trained for, with which `dtype`, `group_size` and
    `scale` have to agree; or these, of a run that was trained without rounding. `None` where `dtype` is.

    Raises:
        `ValueError`: They do not agree, or nothing says to what.
    """
    trained_for = TrainedFor.read(run_dir)
    if dtype is None:
        for option, value in {"--group_size": group_size, "--scale": scale}.items():
            if value is not None:
                raise UserError(
                    f"{option} {value} has no effect without --quantize. Add --quantize, or leave {option} out."
                )
        return None
    if dtype not in (AS_TRAINED, *WEIGHT_DTYPES):
        raise UserError(f"--quantize {dtype}: weights are rounded to {', '.join(WEIGHT_DTYPES)}. Give one of these.")
    if scale not in (None, *SCALES):
        raise UserError(f"--scale {scale}: scales are chosen by {', '.join(SCALES)}. Give one of these.")
    if group_size is not None and group_size < 2:
        raise UserError(
            f"--group_size {group_size} is not at least 2. Leave it out for 32, or give another: --group_size 128"
        )
    if trained_for is None:
        if dtype == AS_TRAINED:
            raise UserError(
                f"{run_dir} was not trained for rounded weights (it has no {QUANTIZATION_FILE}). Give what to round to: "
                "--quantize int4; or train with qat_weight_dtype."
            )
        return TrainedFor(dtype, group_size or 32, scale=scale or "max")
    as_trained = (AS_TRAINED, trained_for.weight_dtype), (None, trained_for.group_size), (None, trained_for.scale)
    if any(value not in own for value, own in zip((dtype, group_size, scale), as_trained, strict=True)):
        raise UserError(
            f"{run_dir} was trained for {trained_for.describe()}. Leave the dtype, --group_size and --scale out, for what was "
            "trained to be exported: --quantize"
        )
    if trained_for.adapters == "beside" and (run_dir / ADAPTER_CONFIG_NAME).is_file():
        raise UserError(
            f"{run_dir} was trained with qat_adapters='beside', round(W) x + B A x, which no rounded weight is equal to. Export "
            f"its base, and serve the adapter on that: hf-tpu export BASE_DIRECTORY --quantize {trained_for.weight_dtype} "
            f"--group_size {trained_for.group_size}; or train with qat_adapters='inside'."
        )
    return trained_for


def check_installed() -> None:
    """Raise a `ValueError` unless what [`write_quantized`] needs is there."""
    if find_spec("compressed_tensors") is None:
        raise UserError(
            f"--quantize writes the format of compressed-tensors, which is not installed: {install_command('quantize')}"
        )


@torch.no_grad()
def write_quantized(model: PreTrainedModel, trained_for: TrainedFor, dtype: torch.dtype, directory: Path) -> None:
    """
    Write a float32 model with its linear layers as integers and scales, and all else in a dtype. The model is not to be
    used afterwards. Embeddings and the output head, where they are rounded, are written as the numbers that they have then.
    Raises `ValueError` where it has experts.
    """
    # It is as long to import as PyTorch, and only few exports need it.
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    fake = trained_for.fake_quantization(model)
    if fake.experts:
        raise UserError(
            f"--quantize rounds linear layers, and the experts of this model are none ({', '.join(fake.experts)}): a file with "
            "both cannot be loaded. Leave out --quantize."
        )
    rounding = fake.rounding
    rounded_weights = {name: rounding.quantize_weight(module.weight) for name, module in fake.linears.items()}
    ends = [*fake.embeddings, *([] if fake.head is None else [fake.head])]
    # Tied weights once: rounded weights have other scales.
    for weight in {id(module.weight): module.weight for module in ends}.values():
        weight.data = rounding.round_weight(weight)
    model.to(dtype)
    # Integers are packed as narrow as they are, but beside rounded activations, where compressed-tensors has bytes only.
    layout = "int-quantized" if rounding.activations else "pack-quantized"
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(
            num_bits=rounding.bits, type="int", symmetric=True, strategy="group", group_size=rounding.group_size
        ),
        input_activations=QuantizationArgs(num_bits=8, type="int", symmetric=False, dynamic=True, strategy="token")
        if rounding.activations
        else None,
        format=layout,
    )
    others = [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name not in rounded_weights
    ]
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=others, quantization_status="frozen", format=layout
    )
    apply_quantization_config(model, config)
    for name, (integers, scales) in rounded_weights.items():
        module, scales = model.get_submodule(name), scales.to(dtype)
        groups = integers.float().unflatten(-1, (-1, rounding.group_size))
        # It is rounded once more below, to the integers that it is made of. In float32, for no other ones to come out.
        module.weight.data = (groups * scales.float()[..., None]).flatten(-2)
        module.weight_scale.data = scales
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(directory)
    compressor.update_config(directory)
