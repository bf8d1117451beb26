"""Choosing the next token on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from ..backends.base import Backend
from ..errors import UserError
from ..layers.random_numbers import BY_ROW, gumbel, scramble


# Settings of [`~transformers.GenerationConfig`] that need more than one pass for each token, the host, or an operator that XLA does not
# have (`typical_p`: `nansum`), and what is without effect.
_REFUSED = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "penalty_alpha": None,
    "dola_layers": None,
    "constraints": None,
    "force_words_ids": None,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "stop_strings": None,
    "max_time": None,
    "watermarking_config": None,
    "token_healing": False,
    "min_length": 0,
    "return_dict_in_generate": False,
    "output_scores": False,
    "output_logits": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "guidance_scale": 1,
    "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
    "sequence_bias": None,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "remove_invalid_values": False,
    "exponential_decay_length_penalty": None,
    "begin_suppress_tokens": None,
    "top_h": None,
    "typical_p": 1,
    "eta_cutoff": 0,
}
# Allowed settings that do nearly the same as one that is refused.
_IN_ITS_PLACE = {"min_length": "min_new_tokens", "no_repeat_ngram_size": "repetition_penalty"}


def check_generation_config(config: GenerationConfig) -> None:
    """Refuse settings that cannot work in a program of static shapes (`ValueError`)."""
    for name, without_effect in _REFUSED.items():
        value = vars(config).get(name)
        if value not in (None, without_effect):
            fix = _IN_ITS_PLACE.get(name, "generate() of the model on CPU or CUDA")
            raise UserError(
                f"{name}={value!r} cannot be used in a program of static shapes. Leave it out (where it is the model's own: "
                f"model.generation_config.{name} = None), or use {fix}."
            )


def find_ends(config: GenerationConfig) -> list[int]:
    """The tokens that end a row."""
    ends = config.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def count_until_end(tokens: Sequence[int], ends: Sequence[int]) -> int:
    """How many tokens a row has, up to and with the one that ends it."""
    return next((count for count, token in enumerate(tokens, 1) if token in ends), len(tokens))


class Sampler:
    """
    Chooses tokens as [`~transformers.GenerationMixin.generate`] does, by the processors of logits that the model
    makes of complete settings, without reading the device.

    Samples follow from a seed, the token's number and the row: they are the same on one chip and on eight.
    """

    def __init__(self, model: PreTrainedModel, config: GenerationConfig, backend: Backend):
        check_generation_config(config)
        self._in_one_pass = backend.kernels.platform != "cpu"
        self._samples = bool(config.do_sample)
        self._temperature = config.temperature if self._samples and config.temperature else 1.0
        #: Tokens that end a text.
        self.ends = find_ends(config)
        # No token has the number -1.
        self._ends = torch.tensor(self.ends or [-1]).to(backend.device)
        self._min_new_tokens = (config.min_new_tokens or 0) if self.ends else 0
        self.processors = LogitsProcessorList(
            each
            for each in model._get_logits_processor(
                config, input_ids_seq_length=1, device=backend.device, logits_processor=[]
            )
            if not type(each).__name__.startswith("MinNewTokens")
        )
        #: Whether a choice depends on the tokens before.
        self.reads_history = any(isinstance(each, RepetitionPenaltyLogitsProcessor) for each in self.processors)

    def choose(self, logits: Tensor, seed: Tensor, number: Tensor, history: Tensor | None) -> tuple[Tensor, Tensor]:
        """
        Choose a token for each row.

        Args:
            logits (`torch.Tensor` of shape `(rows, vocabulary)`): Those of the last position.
            seed, number (`torch.Tensor` of shape `()`, int32):
                The seed of the text, and the number of the token in it, from 0.
            history (`torch.Tensor` of shape `(rows, length)`, *optional*):
                Tokens before this one, where [`~Sampler.reads_history`].

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: The tokens, int64 of shape `(rows,)`, and their log-probabilities in
            float32: of the softmax of the logits over the temperature, before tokens are left out.
        """
        logits = logits.float()
        scores = logits
        if self._min_new_tokens:
            vocabulary = torch.arange(logits.shape[-1], device=logits.device)
            is_end = (vocabulary[:, None] == self._ends).any(-1)
            scores = torch.where(is_end & (number < self._min_new_tokens), -torch.inf, scores)
        scores = self.processors(history, scores)
        if self._samples:
            # The largest of scores with Gumbel noise is drawn with the probability of its softmax.
            scores = scores + gumbel(tuple(scores.shape), scramble(seed + number * BY_ROW))
        if self._in_one_pass:
            token = scores.argmax(-1)
        else:
            # XLA for the host would compute argmax, and the noise in its scores, without vectors.
            numbers = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device)
            is_largest = scores == scores.amax(-1, keepdim=True)
            token = torch.where(is_largest, numbers, scores.shape[-1] - 1).amin(-1).long()
        scaled_logits = logits / self._temperature
        return token, scaled_logits.gather(-1, token[:, None])[:, 0] - scaled_logits.logsumexp(-1)

    def is_end(self, token: Tensor) -> Tensor:
        """Say of tokens `(rows,)` whether they end a text: 1 or 0, int32."""
        return (token[:, None] == self._ends).int().amax(-1)
