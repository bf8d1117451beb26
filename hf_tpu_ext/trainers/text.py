"""Text that the model of a trainer generates, in the middle of a run or outside of one."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from ..backends.program import Program
from ..generation import Generated, Generator
from ..step.replay import StepReplay, warn_not_replayed
from .own_code import find_own_code


# The only method of a trainer whose code runs while text is generated.
_METHODS = ("compute_loss_context_manager",)


class TextGeneration:
    """
    Generates completions with the weights that a trainer's model has now, in programs of static shape.

    They are replayed from the third time on, as steps are, see [`StepReplay`], unless code of the user's runs in the model.
    Where steps are not traced, upstream's `generate` makes the tokens, one prompt after the other, and no log-probabilities.

    Args:
        trainer ([`TPUTrainerMixin`]):
            The trainer.
        config ([`~transformers.GenerationConfig`]):
            As in [`Generator`].
        prompt_lengths (`Sequence[int]`, *optional*):
            As in [`Generator`]. By default the length of the longest prompt of each call.
    """

    def __init__(self, trainer, config: GenerationConfig, prompt_lengths: Sequence[int] = ()):
        self._trainer, self._config, self._lengths = trainer, config, list(prompt_lengths)
        self.generator: Generator | None = None
        self._known: list[int] = []
        self._said: str | None = None

    def generate(self, prompts: Sequence[Sequence[int]], seed: int | None = None) -> Generated:
        """As [`Generator.generate`]."""
        trainer = self._trainer
        if not trainer.backend.traces_steps:
            return self._generate_eagerly(prompts)
        lengths = self._lengths or [max(map(len, prompts))]
        if self.generator is None or lengths != self.generator.prompt_lengths:
            self.generator = Generator(trainer.model, trainer.backend, self._config, lengths, run=self._run)
            self._known = []
        with trainer.models_as_run(), trainer.compute_loss_context_manager(), trainer.chips.tokens_stay_on_chips():
            self._follow_model()
            with trainer.copies.not_made():
                return self.generator.generate(prompts, seed)

    def _generate_eagerly(self, prompts: Sequence[Sequence[int]]) -> Generated:
        model = self._trainer.model
        was_training = model.training
        model.eval()
        made = []
        with torch.no_grad(), self._trainer.compute_loss_context_manager():
            for prompt in prompts:
                ids = torch.tensor([prompt], device=self._trainer.args.device)
                mask = torch.ones_like(ids)
                answer = model.generate(input_ids=ids, attention_mask=mask, generation_config=self._config)
                made.append(answer[0, len(prompt) :].tolist())
        model.train(was_training)
        return Generated(made, [])

    def _run(self, name: str, shape: tuple[int, int], run: Callable[[], Program | None]) -> Program | None:
        where = f"{name} after step {self._trainer.state.global_step}"
        return self._trainer.end_program(name, where, run=run, shape=shape)

    # ---- Replay ----

    def _follow_model(self) -> None:
        """Forget what was recorded where the model has other tensors now: a run stacks those of the layers."""
        trainer = self._trainer
        models = [trainer.model]
        known = [id(tensor) for model in models for tensor in (*model.parameters(), *model.buffers())]
        if trainer.compiled.step_replay is False or known == self._known:
            return
        self._known, self.generator.replay = known, None
        why_not = partial(self._why_not_replay, models)
        if (reason := why_not()) is not None:
            if reason not in (self._said, trainer.steps.why_not):
                warn_not_replayed(reason, training=False)
            self._said = reason
            return
        self.generator.replay = StepReplay(
            trainer.backend,
            models,
            state=self.generator.tensors,
            note=partial(trainer.steps.note_python_state, models, methods=_METHODS),
            settings=partial(_dtypes, models),
            why_not=why_not,
            copies=trainer.copies.context,
            assume_pure=trainer.compiled.step_replay is True,
            training=False,
        )

    def _why_not_replay(self, models: list[nn.Module]) -> str | None:
        if self._trainer.compiled.step_replay is True:
            return None
        found = find_own_code(self._trainer, models, _METHODS)
        return None if found is None else f"{found}; step_replay=True if it does the same at every step"


def _dtypes(models: list[nn.Module]) -> Any:
    # Frozen weights are short while they are in use.
    return tuple(parameter.dtype for model in models for parameter in model.parameters())
