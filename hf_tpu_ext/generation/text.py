"""`generate` of transformers, in programs of static shape where a device compiles every shape anew."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import GenerationConfig
from transformers.trainer_utils import unwrap_peft_model

from ..backends import select_backend
from ..errors import UserError
from ..sharding.plan import place_model
from .generator import Generated, Generator
from .sampling import find_ends


# Prompts are padded to a multiple of it, for those of about the same length to share a program.
_MULTIPLE = 64


def generate(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    prompt_lengths: Sequence[int] | None = None,
    seed: int | None = None,
    **kwargs,
) -> Tensor:
    """
    Generate as [`~transformers.GenerationMixin.generate`] does, with its arguments, on TPU, GPU and CPU.

    On a TPU two programs do it, one for the prompts and one for all tokens after them (with torch_tpu, for each), whose greedy
    tokens are those of `generate`. They are compiled once for a number of rows, a declared length and a `max_new_tokens`.
    Elsewhere this is `model.generate`.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            A causal language model. It is moved to the TPU, and stays there.
        input_ids (`torch.Tensor` of shape `(rows, length)`): Prompts, padded on the left.
        attention_mask (`torch.Tensor` of shape `(rows, length)`, *optional*):
            0 for padding. By default tokens of `pad_token_id` are, unless one ends a completion.
        generation_config ([`~transformers.GenerationConfig`], *optional*):
            What is generated. By default, the model's own.
        prompt_lengths (`Sequence[int]`, *optional*):
            Lengths that prompts are padded to, ascending. By default the next multiple of 64.
        seed (`int`, *optional*):
            What samples follow from. By default it is drawn from PyTorch's generator on the host.
        **kwargs:
            Settings of [`~transformers.GenerationConfig`], such as `max_new_tokens`.

    Returns:
        `torch.Tensor` of shape `(rows, length + new)`: Prompts and completions, padded on the right, on the host; `new` are
        the tokens of the longest.

    Raises:
        `ValueError`: A prompt is padded on the right, or a setting cannot work; the message says what to set instead.

    Example:

    ```python
    >>> from hf_tpu_ext import generate

    >>> inputs = tokenizer(["The capital of France is"], return_tensors="pt", padding_side="left")
    >>> tokens = generate(model, **inputs, max_new_tokens=32)
    >>> tokenizer.batch_decode(tokens, skip_special_tokens=True)
    ```
    """
    backend = select_backend()
    if not backend.static_shapes:
        if seed is not None:
            torch.manual_seed(seed)
        return model.generate(
            input_ids=input_ids, attention_mask=attention_mask, generation_config=generation_config, **kwargs
        )
    request = TextRequest.read(model, input_ids, attention_mask, generation_config, prompt_lengths, **kwargs)
    if next(model.parameters()).device.type != backend.device.type:
        mesh = {"data": backend.num_chips, "fsdp": 1}
        backend.use_mesh(mesh)
        place_model(model, backend, mesh)
    generator = Generator(model, backend, request.config, request.prompt_lengths, is_complete=True)
    return request.answer(generator.generate(request.prompts, seed, request.copies), generator.pad_token_id)


@dataclass
class TextRequest:
    """
    The arguments of `generate` of transformers, for a [`Generator`].

    Args:
        input_ids (`torch.Tensor` of shape `(rows, length)`): Prompts with their padding, on the host.
        prompts (`list[list[int]]`): Their tokens, each as often as completions of it are asked for.
        config ([`~transformers.GenerationConfig`]): What is generated.
        prompt_lengths (`list[int]`): Lengths that prompts are padded to, ascending.
    """

    input_ids: Tensor
    prompts: list[list[int]]
    config: GenerationConfig
    prompt_lengths: list[int]

    @classmethod
    def read(
        cls,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        generation_config: GenerationConfig | None,
        prompt_lengths: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> "TextRequest":
        """Read the arguments of [`generate`]. One that cannot work in a program of static shapes is a `ValueError`."""
        if unknown := sorted(name for name in kwargs if name not in vars(GenerationConfig())):
            raise UserError(
                f"{', '.join(unknown)} cannot be used in a program of static shapes. Leave it out, or use generate() of the "
                "model on CPU or CUDA."
            )
        model, input_ids, length = unwrap_peft_model(model), input_ids.cpu(), input_ids.shape[1]
        max_lengths = [
            kwargs.get("max_length"),
            *(each.max_length for each in (generation_config, model.generation_config) if each),
        ]
        config, _ = model._prepare_generation_config(generation_config, **kwargs)
        if config.max_new_tokens is None and config.max_length is not None:
            # `generate` counts the prompt where somebody has set max_length, and not by default.
            is_default = all(each is None for each in max_lengths)
            config.max_new_tokens = config.max_length - (0 if is_default else length)
            # Of many, another name of an attribute.
            if is_default and (size := getattr(model.config, "max_position_embeddings", None)) is not None:
                config.max_new_tokens = max(1, min(config.max_new_tokens, size - length))
            if config.max_new_tokens < 1:
                raise UserError(
                    f"max_length={config.max_length} leaves no tokens to generate after prompts of {length} tokens. Set "
                    "max_new_tokens instead, for example max_new_tokens=256."
                )
        if attention_mask is not None:
            mask = attention_mask.cpu()
        elif config.pad_token_id is not None and config.pad_token_id not in find_ends(config):
            mask = input_ids.ne(config.pad_token_id).long()
        else:
            mask = torch.ones_like(input_ids)
        if not mask[:, -1].all():
            raise UserError(
                "Prompts are padded on the right, where their completion begins. Pad them on the left: tokenizer(..., "
                'padding=True, padding_side="left").'
            )
        rows = [row[is_token.bool()].tolist() for row, is_token in zip(input_ids, mask, strict=True)]
        prompts = [row for row in rows for _ in range(config.num_return_sequences or 1)]
        return cls(input_ids, prompts, config, list(prompt_lengths or [-(-length // _MULTIPLE) * _MULTIPLE]))

    @property
    def copies(self) -> int:
        """How often each prompt is there, one after the other."""
        return self.config.num_return_sequences or 1

    def answer(self, result: Generated, pad_token_id: int) -> Tensor:
        """Prompts and completions, as `generate` returns them."""
        longest = max(map(len, result.token_ids))
        completions = [
            pad(torch.tensor(tokens), (0, longest - len(tokens)), value=pad_token_id) for tokens in result.token_ids
        ]
        return torch.cat([self.input_ids.repeat_interleave(self.copies, 0), torch.stack(completions)], 1)
