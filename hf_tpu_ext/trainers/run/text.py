"""Text that the model of a trainer generates, in the middle of a run or outside of one."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig
from transformers.trainer_utils import unwrap_peft_model

from ...backends.compiled_function import CompiledFunction
from ...generation import Generated, Generator
from ...generation.sampling import count_until_end, find_ends


# The only method of a trainer whose code runs while text is generated.
_METHODS = ("autocast_smart_context_manager",)


class TextGeneration:
    """
    Generates completions with the weights that a trainer's model has now, in programs of static shape.

    They are compiled as steps are, unless code of the user's runs in the model. Where shapes are not static, upstream's `generate`
    makes the tokens, and no log-probabilities. `config` and `prompt_lengths` are as in [`Generator`]; by default there is the
    length of the longest prompt of each call.
    """

    def __init__(self, trainer, config: GenerationConfig, prompt_lengths: Sequence[int] = ()):
        self._trainer, self._backend, self._programs = trainer, trainer.backend, trainer.programs
        self._config, self._lengths = config, list(prompt_lengths)
        self.generator: Generator | None = None

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
        key, generators = (self, self._model, *lengths, settings), self._programs.of_run
        with trainer.models_as_run(), trainer.autocast(), trainer.chips.tokens_stay_on_chips():
            if key not in generators:
                generators[key] = Generator(
                    self._model, self._backend, self._config, lengths, self._run, self._compile
                )
            self.generator = generators[key]
            with trainer.copies.not_made():
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

    def _run(self, name: str, shape: tuple[int, int], run: Callable[[], Any] | None = None) -> Any:
        return self._programs.end(name, f"{name} after step {self._programs.steps_done}", run=run, shape=shape)

    def _compile(self, function: Callable, state: Callable[[], list[torch.Tensor]]) -> CompiledFunction:
        compiled = self._programs.compile(function, [self._model], _METHODS, state)
        if self._trainer.compile_step == "off" and self._backend.compiles_functions:
            compiled.why_traced = "compile_step='off'"
        else:
            self._programs.warn_if_traced(compiled)
        return compiled
