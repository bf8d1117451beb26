"""`model.generate` of a trainer's model, for callbacks that call it in the middle of a run."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin
from transformers.trainer_utils import unwrap_peft_model
from transformers.utils import logging

from ...backends.base import Backend
from ...errors import UserError
from ...generation import TextRequest
from ...temporarily import temporarily
from .text import TextGeneration


logger = logging.get_logger(__name__)


class ModelGenerate:
    """
    Makes `generate` of a trainer's model run as programs of static shape: TRL's `LogCompletionsCallback` calls it, and so do callbacks
    of the user's. Upstream's compiles a graph for each token's length.

    What such programs cannot do (beams, a streamer) is done as upstream does it, with a line that says so. Encoder-decoder models
    write on the host: traced, upstream's loop would compute all tokens again for each, in graphs that grow with the text.

    `write` makes what writes text by a configuration, after prompts of these lengths, and `fetch_weights` fetches the weights of now.
    """

    def __init__(
        self,
        model: nn.Module,
        backend: Backend,
        write: Callable[[GenerationConfig, Sequence[int]], TextGeneration],
        fetch_weights: Callable[[], dict[str, torch.Tensor]],
    ):
        self._backend, self._write, self._fetch_weights = backend, write, fetch_weights
        # Of each configuration and prompt length: the programs and the rows that they are compiled for.
        self._texts: dict[tuple, tuple[TextGeneration, int]] = {}
        self._said: set[str] = set()
        plain = unwrap_peft_model(model)
        # A copy of the model for an evaluation under way.
        self._on_host: nn.Module | None = None
        self._keeps_copy = False
        if isinstance(plain, GenerationMixin) and (not plain.config.is_encoder_decoder or backend.traces_steps):
            _OF_MODELS[model] = ref(self)
            # A method: a copy of the model has its own, and it is pickled by its name.
            model.generate = MethodType(generate, model)

    def run(self, model: nn.Module, input_ids: torch.Tensor, mask, config: GenerationConfig | None, **kwargs: Any):
        """Prompts and completions, on the host, or `None` where programs of static shape cannot make them."""
        try:
            # Callbacks have their prompts on the device, as upstream's `generate` wants them.
            input_ids, mask = self._backend.fetch((input_ids, mask))
            request = TextRequest.read(model, input_ids, mask, config, **kwargs)
            key = (request.config.to_json_string(), *request.prompt_lengths)
            text, rows = self._texts.get(key) or (self._write(request.config, request.prompt_lengths), 0)
            rows = max(rows, len(request.prompts))
            # What is not drawn leaves the host's random numbers to the order of the data.
            seed = None if request.config.do_sample else 0
            completions = text.generate(request.prompts, seed, rows=rows, copies=request.copies)
        except UserError as error:
            if (reason := str(error)) not in self._said:
                self._said.add(reason)
                logger.warning(
                    f"model.generate runs as upstream's does, and compiles a graph for each length: {reason}"
                )
            return None
        self._texts[key] = text, rows
        return request.answer(completions, text.generator.pad_token_id)

    def has(self, model: nn.Module) -> bool:
        """Whether the model is where programs run. Upstream's pipelines, which know no TPU, move it to the host."""
        return next(model.parameters()).device.type == self._backend.device.type

    def from_same_weights(self) -> AbstractContextManager[None]:
        """Within this context the weights stay as they are: those on the host are fetched once."""
        return temporarily(self, _keeps_copy=True, _on_host=None)

    def run_on_host(self, model: nn.Module, **kwargs: Any) -> Any:
        """What upstream's `generate` makes of arguments on the host, with the weights of now: a copy of the model has them there."""
        on_host = self._on_host or self._copy_to_host(model)
        if self._keeps_copy:
            self._on_host = on_host
        return on_host.train(model.training).generate(**self._backend.fetch(kwargs))

    def _copy_to_host(self, model: nn.Module) -> nn.Module:
        weights = self._fetch_weights()
        on_host = {id(tensor): tensor.cpu() for tensor in model.buffers()}
        on_host |= {
            id(value): nn.Parameter(weights[name], value.requires_grad) for name, value in model.named_parameters()
        }
        host_model = deepcopy(model, on_host)
        del host_model.generate
        return host_model


# Weak, since a trainer holds its model.
_OF_MODELS: WeakKeyDictionary[nn.Module, ref[ModelGenerate]] = WeakKeyDictionary()


def generate(model, inputs=None, generation_config=None, **kwargs):
    """`generate` of the model of a trainer, as [`~transformers.GenerationMixin.generate`]; its tokens are on the host."""
    by_trainer = _OF_MODELS[model]() if model in _OF_MODELS else None
    if by_trainer is not None and not by_trainer.has(model):
        by_trainer = None
    if by_trainer is not None and unwrap_peft_model(model).config.is_encoder_decoder:
        arguments = {"inputs": inputs, "generation_config": generation_config, **kwargs}
        return by_trainer.run_on_host(model, **{name: value for name, value in arguments.items() if value is not None})
    input_ids = kwargs.get("input_ids", inputs)
    if by_trainer is not None and input_ids is not None:
        others = {name: value for name, value in kwargs.items() if name not in ("input_ids", "attention_mask")}
        tokens = by_trainer.run(model, input_ids, kwargs.get("attention_mask"), generation_config, **others)
        if tokens is not None:
            return tokens
    if inputs is not None:
        kwargs["inputs"] = inputs
    return type(model).generate(model, generation_config=generation_config, **kwargs)
