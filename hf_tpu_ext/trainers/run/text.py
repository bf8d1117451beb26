"""Text that the model of a trainer generates, in the middle of a run or outside of one: for the trainer, and by `model.generate`."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, GenerationMixin
from transformers.trainer_utils import unwrap_peft_model
from transformers.utils import logging

from ...backends.base import Backend
from ...backends.compiled_function import CompiledFunction
from ...errors import UserError
from ...generation import Generated, Generator, TextRequest
from ...generation.models import check_model
from ...generation.sampling import check_generation_config, count_until_end, find_ends
from ...layers.layer_scan import LayerStack
from ...temporarily import temporarily


logger = logging.get_logger(__name__)

# The only method of a trainer whose code runs while text is generated.
_METHODS = ("autocast_smart_context_manager",)


class TextGeneration:
    """
    Generates completions with the weights that a trainer's model has now, in programs of static shape.

    They are compiled as steps are, unless code of the user's runs in the model. Where shapes are not static, upstream's `generate`
    makes the tokens, and no log-probabilities. `config`, `prompt_lengths` and `is_complete` are as in [`Generator`]; by default there
    is the length of the longest prompt of each call.
    """

    def __init__(
        self, trainer, config: GenerationConfig, prompt_lengths: Sequence[int] = (), is_complete: bool = False
    ):
        self._trainer, self._backend, self._programs = trainer, trainer.backend, trainer.programs
        self._config, self._lengths, self._is_complete = config, list(prompt_lengths), is_complete
        self.generator: Generator | None = None

    def check(self) -> None:
        """Refuse (`ValueError`) what would be refused at the first text, in the middle of a run perhaps."""
        if self._backend.static_shapes:
            check_model(self._model)
            check_generation_config(unwrap_peft_model(self._model)._prepare_generation_config(self._config)[0])

    def generate(
        self, prompts: Sequence[Sequence[int]], seed: int | None = None, rows: int | None = None, copies: int = 1
    ) -> Generated:
        """As [`Generator.generate`]. By programs of `rows` rows, where fewer prompts than that are to be one of them."""
        model = self._model
        was_training = model.training
        try:
            if not self._backend.static_shapes:
                return self._generate_eagerly(prompts, seed)
            missing = 0 if rows is None else max(0, rows - len(prompts))
            completions = self._generate_by_programs([*prompts, *prompts[-1:] * missing], seed, copies)
            return Generated(completions.token_ids[: len(prompts)], completions.log_probs[: len(prompts)])
        finally:
            # What replays programs has it in evaluation mode from the start.
            model.train(was_training)

    @property
    def _model(self) -> nn.Module:
        return self._trainer.model

    def _generate_by_programs(self, prompts: Sequence[Sequence[int]], seed: int | None, copies: int) -> Generated:
        trainer = self._trainer
        lengths = self._lengths or [max(map(len, prompts))]
        # A run adds the end of its tokenizer to the model's own settings, and so may the caller.
        settings = unwrap_peft_model(self._model).generation_config.to_json_string()
        # What decodes knows where the weights of layers are.
        is_loop = any(isinstance(module, LayerStack) for module in self._model.modules())
        key = (self, self._model, is_loop, *lengths, settings)
        generators = self._programs.of_run
        with trainer.models_as_run(), trainer.autocast(), trainer.chips.tokens_stay_on_chips():
            if key not in generators:
                generators[key] = Generator(
                    self._model, self._backend, self._config, lengths, self._end, self._compile, self._is_complete
                )
            self.generator = generators[key]
            with trainer.copies.unwatched():
                return self.generator.generate(prompts, seed, copies)

    def _generate_eagerly(self, prompts: Sequence[Sequence[int]], seed: int | None) -> Generated:
        model, config = self._model.eval(), self._config
        rows = [torch.tensor(prompt) for prompt in prompts]
        ids, mask = (
            pad_sequence(each, batch_first=True, padding_value=value, padding_side="left").to(model.device)
            for each, value in ((rows, config.pad_token_id or 0), ([torch.ones_like(row) for row in rows], 0))
        )
        # The random numbers of the run go on as they were.
        with (
            torch.no_grad(),
            self._trainer.autocast(),
            torch.random.fork_rng([model.device] if model.device.type == "cuda" else [], enabled=seed is not None),
        ):
            if seed is not None:
                torch.manual_seed(seed)
            completions = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)[
                :, ids.shape[1] :
            ]
        ends = find_ends(unwrap_peft_model(model)._prepare_generation_config(config)[0])
        return Generated([row[: count_until_end(row, ends)] for row in completions.tolist()], [])

    def _end(self, name: str, shape: tuple[int, int], execute: Callable[[], Any] | None = None) -> Any:
        return self._programs.end(name, f"{name} after step {self._programs.steps_done}", execute=execute, shape=shape)

    def _compile(self, function: Callable, state: Callable[[], list[torch.Tensor]]) -> CompiledFunction:
        compiled = self._programs.compile(function, [self._model], _METHODS, state)
        if self._trainer.compile_step == "off" and self._backend.compiles_functions:
            compiled.why_traced = "compile_step='off'"
        else:
            self._programs.warn_if_traced(compiled)
        return compiled


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
        # By configuration and prompt lengths: the programs, and the rows that they are compiled for.
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
        weights, buffers = self._fetch_weights(), list(model.buffers())
        on_host = dict(zip(map(id, buffers), self._backend.fetch(buffers), strict=True))
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
    if inputs is not None:
        kwargs["inputs"] = inputs
    by_trainer = _OF_MODELS[model]() if model in _OF_MODELS else None
    if by_trainer is not None and by_trainer.has(model):
        if unwrap_peft_model(model).config.is_encoder_decoder:
            given = {"generation_config": generation_config, **kwargs}
            return by_trainer.run_on_host(model, **{name: value for name, value in given.items() if value is not None})
        input_ids = kwargs.get("input_ids", inputs)
        others = {name: kwargs[name] for name in kwargs.keys() - {"inputs", "input_ids", "attention_mask"}}
        if input_ids is not None:
            tokens = by_trainer.run(model, input_ids, kwargs.get("attention_mask"), generation_config, **others)
            if tokens is not None:
                return tokens
    return type(model).generate(model, generation_config=generation_config, **kwargs)
