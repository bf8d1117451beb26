"""Completions of prompts: a program for each declared length of prompts, and one for all tokens after them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import GenerationConfig
from transformers.trainer_utils import unwrap_peft_model

from ..backends.base import Backend
from ..backends.compiled_function import CompiledFunction, end_unwatched
from ..errors import UserError
from ..layers.attention import static_masks
from ..layers.batch_length import BatchLength
from ..layers.static_cache import StaticKeyValueCache, pad_positions
from ..step.fingerprint import compile_alone
from ..step.index_tables import MORE_ROWS
from .memory import CopiedWeights, choose_cache_lengths, find_room
from .models import cache_argument, check_model, read_tables, takes
from .sampling import Sampler, count_until_end


#: What the watch calls the program of the prompts, and that of the tokens after them.
PREFILL, DECODE = "prefill", "decode"
# Tokens that are chosen before the host asks whether all rows have ended, where a loop is no part of a program.
_TOKENS_BETWEEN_READS = 16


@dataclass(frozen=True)
class Generated:
    """
    Completions of prompts.

    Args:
        token_ids (`list[list[int]]`): The tokens after each prompt, up to and with the one that ends it.
        log_probs (`list[list[float]]`):
            Their log-probabilities: of the softmax of the logits over the temperature, before tokens are left out.
    """

    token_ids: list[list[int]]
    log_probs: list[list[float]]


class Generator:
    """
    Generates completions with the weights that a model has now, in programs of static shape.

    Prompts are padded on the left to the shortest declared length that holds them. One program reads them and fills a cache of
    keys and values, and a second has a loop over all further tokens, which ends when all rows have. The host reads the tokens
    once. Where loops are no part of programs, the second is a token's, and the host asks once in a while whether all rows have
    ended. Eager devices have [`~transformers.GenerationMixin.generate`].

    Args:
        model ([`~torch.nn.Module`]):
            A causal language model of transformers, or a [`~peft.PeftModel`] of one. It is in evaluation mode meanwhile.
        backend ([`Backend`]): The backend in use.
        config ([`~transformers.GenerationConfig`]):
            What is generated. It needs `max_new_tokens`, and a `pad_token_id` or an `eos_token_id`. As in `generate`, the model's
            own settings stand in for those that are left out, unless it `is_complete`.
        prompt_lengths (`Sequence[int]`): Declared lengths of prompts.
        end_program (`Callable`, *optional*):
            Runs what was traced, called with the name of the program, the shape of its tokens and `execute=`, which does so.
            By default that is called.
        compile (`Callable`, *optional*):
            Makes the [`CompiledFunction`] of a function and of what lists the tensors that it reads and writes besides the model,
            always in the same order. By default it depends on the model alone.
        is_complete (`bool`, *optional*, defaults to `False`):
            Whether the model's own settings are in `config` already: what is `None` there was asked for.

    Raises:
        `ValueError`: A setting cannot work in a program of static shapes; the message names it.
    """

    def __init__(
        self,
        model: nn.Module,
        backend: Backend,
        config: GenerationConfig,
        prompt_lengths: Sequence[int],
        end_program: Callable[..., Any] | None = None,
        compile: Callable[[Callable, Callable[[], list[Tensor]]], CompiledFunction] | None = None,
        is_complete: bool = False,
    ):
        self._model, self._backend = model, backend
        plain = unwrap_peft_model(model)
        check_model(model)
        self.config = config if is_complete else plain._prepare_generation_config(config)[0]
        if not self.config.max_new_tokens:
            raise UserError(
                f"max_new_tokens={self.config.max_new_tokens} does not say how long completions may be. Set it to a number, "
                "for example max_new_tokens=256."
            )
        #: Declared lengths of prompts, ascending.
        self.prompt_lengths = sorted(set(prompt_lengths))
        self._new_tokens = self.config.max_new_tokens
        self._sampler = Sampler(plain, self.config, backend)
        pads = self.config.pad_token_id
        #: What follows the end of a row, and precedes a prompt.
        self.pad_token_id = (self._sampler.ends or [0])[0] if pads is None else pads
        self._embedding_rows, self._learned_positions = read_tables(plain)
        self._num_layers = plain.config.get_text_config(decoder=True).num_hidden_layers
        arguments = takes(plain)
        # Rotary embeddings whose frequencies depend on the length keep those that they were made with. Longer texts are refused.
        self._rope, self._rope_scaling = BatchLength([model], 0), BatchLength([model], None).rope_scaling
        settings = {"logits_to_keep": 1, "output_router_logits": False}
        self._settings = {name: value for name, value in settings.items() if name in arguments}
        self._cache_argument = cache_argument(plain)
        self._end_program = end_program or end_unwatched
        self._state: list[Tensor] = []
        self._compile = compile or partial(compile_alone, backend, model)
        self._compiled: CompiledFunction | None = None

    def tensors(self) -> list[Tensor]:
        """What the second program reads and changes besides the model: rows, their cache, and copies of weights."""
        return self._state

    def copied_weights(self) -> list[Tensor]:
        """The part of [`~Generator.tensors`] that is copies of the model's weights."""
        return self._state[len(_Rows._fields) + 2 * self._num_layers :]

    def generate(self, prompts: Sequence[Sequence[int]], seed: int | None = None, copies: int = 1) -> Generated:
        """
        Generate a completion of each prompt.

        Args:
            prompts (`Sequence[Sequence[int]]`): Token ids. Repeat a prompt for several completions of it.
            seed (`int`, *optional*):
                What samples follow from. By default it is drawn from PyTorch's generator on the host.
            copies (`int`, *optional*, defaults to 1):
                How often each prompt is there, one after the other. It is read once then, where chips have whole groups.

        Returns:
            [`Generated`]: The completions, in the order of the prompts.

        Raises:
            `ValueError`: A prompt is empty, longer than what was declared, or outside of the model's tables and frequencies.
        """
        if seed is None:
            seed = int(torch.randint(-(2**31), 2**31 - 1, ()))
        ids, mask = self._pad(prompts)
        if len(ids) % (copies * self._backend.num_chips) or not are_in_groups(ids, mask, copies):
            copies = 1
        was_training = self._model.training
        self._model.eval()
        try:
            masks = static_masks(sdpa=not self._backend.traces_steps)
            with torch.no_grad(), masks, self._backend.as_written(), self._rope.override_rope():
                try:
                    results = self._backend.fetch(
                        self._generate(ids[::copies], mask[::copies], torch.tensor(seed).to(torch.int32), copies)
                    )
                finally:
                    # The cache is free then, for training to have its memory.
                    self._backend.flush()
                    self._state = []
        finally:
            self._model.train(was_training)
        first, others = results[:2], results[2:]
        if not others:
            # There is one token each.
            others = [each.new_zeros(0, len(ids)) for each in first]
        tokens, log_probs = (
            torch.cat([each[:, None], rest.T], 1)[: len(prompts)].tolist()
            for each, rest in zip(first, others, strict=True)
        )
        lengths = [count_until_end(row, self._sampler.ends) for row in tokens]
        return Generated(
            [row[:length] for row, length in zip(tokens, lengths, strict=True)],
            [row[:length] for row, length in zip(log_probs, lengths, strict=True)],
        )

    def _pad(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        longest = max(map(len, prompts))
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise UserError(f"Prompt {number} has no tokens. Give at least one, for example the bos token.")
            if len(prompt) > self.prompt_lengths[-1]:
                raise UserError(
                    f"Prompt {number} has {len(prompt)} tokens, and the declared length of prompts is {self.prompt_lengths[-1]}. "
                    "Declare more, or cut the prompt."
                )
            self._check_tables(number, prompt)
        length = next(each for each in self.prompt_lengths if each >= longest)
        # Each chip has as many rows.
        rows = -(-len(prompts) // self._backend.num_chips) * self._backend.num_chips
        ids = torch.full((rows, length), self.pad_token_id)
        mask = torch.zeros_like(ids)
        for row in range(rows):
            prompt = torch.tensor(prompts[min(row, len(prompts) - 1)])
            ids[row, length - len(prompt) :] = prompt
            mask[row, length - len(prompt) :] = 1
        return ids, mask

    def _check_tables(self, number: int, prompt: Sequence[int]) -> None:
        """Refuse what the model has no place for in its tables: a program would take another place, and say nothing."""
        rows, positions = self._embedding_rows, self._learned_positions
        if rows is not None and not 0 <= min(prompt) <= max(prompt) < rows:
            raise UserError(
                f"Prompt {number} holds the token id {max(prompt) if min(prompt) >= 0 else min(prompt)}, but the model's embedding has "
                f"{rows} rows: 0 to {rows - 1}. {MORE_ROWS}."
            )
        # The last token is not read.
        most, limit = len(prompt) + self._new_tokens - 1, ""
        if positions is not None and most > positions.size:
            limit = f"the model has positions for {positions.size} ({positions.name})"
        elif self._rope_scaling is not None and most > self._rope_scaling[1]:
            rope_type, size = self._rope_scaling
            limit = (
                f"rotary embeddings of the model have other frequencies beyond {size} tokens (rope_type={rope_type!r})"
            )
        if limit:
            raise UserError(
                f"Prompt {number} has {len(prompt)} tokens, and up to {self._new_tokens} are generated after it, but {limit}. Generate "
                "fewer tokens, or cut the prompt; in a run, set a smaller max_length, or leave show_samples out."
            )

    # ---- The two programs ----

    def _generate(self, ids: Tensor, mask: Tensor, seed: Tensor, copies: int) -> list[Tensor]:
        if self._compiled is None:
            self._compiled = self._compile(self._run_program, self.tensors)
        self._weight_copies = CopiedWeights(self._model, self._backend)
        rows = len(ids) * copies
        prompts = self._backend.send_rows({"ids": ids, "attention": mask}, len(ids))
        seed = self._backend.send(seed)
        with self._compiled.assume_unchanged():
            first_tokens, self._state = self._compiled(
                {**prompts, "seed": seed, "copies": copies},
                partial(self._end_program, PREFILL, tuple(ids.shape)),
                name=PREFILL,
            )
            if self._new_tokens == 1:
                return first_tokens
            end_program = partial(self._end_program, DECODE, (rows, self._new_tokens))
            if self._backend.loops.in_programs:
                return first_tokens + self._compiled({"seed": seed, "rows": rows}, end_program, name=DECODE)
            return first_tokens + self._decode_one_by_one(seed, rows, end_program)

    def _run_program(self, data: dict[str, Any], name: str) -> Any:
        """What is compiled."""
        if name == PREFILL:
            return self._prefill(**data)
        return self._decode(**data) if self._backend.loops.in_programs else self._decode_next(**data)

    def _prefill(self, ids: Tensor, attention: Tensor, seed: Tensor, copies: int) -> tuple[list[Tensor], list[Tensor]]:
        """The first token of each row and its log-probability, and the state of the second program."""
        end = self.prompt_lengths[-1]
        cache = StaticKeyValueCache(self._backend, self._num_layers, ids.shape[1])
        # Padding has any position, and is on the left.
        places = torch.arange(ids.shape[1], device=ids.device)
        positions = (places + attention.sum(1, keepdim=True) - ids.shape[1]).clamp(min=0)
        logits = self._logits(ids, attention, positions, cache)
        prompts, before = len(ids), end - ids.shape[1]
        ids, attention, positions, logits = (
            _repeat(tensor, prompts, copies) for tensor in (ids, attention, positions, logits)
        )
        cache.put([_repeat(tensor, prompts, copies) for tensor in cache.tensors()])
        # Tokens of the prompt only; those that stand for others count once.
        history = torch.where(attention > 0, ids, ids[:, -1:])
        token, log_prob = self._sampler.choose(logits, seed, torch.zeros_like(seed), history)
        rows = _Rows(
            self._sampler.is_end(token),
            token,
            positions[:, -1:] + 1,
            pad(pad(attention, (before, 0)), (0, self._new_tokens), value=1),
            torch.cat([ids[:, -1:].expand(-1, before), history, ids[:, -1:].expand(-1, self._new_tokens)], 1),
        )
        state = [*rows, *pad_positions(cache.tensors(), end, self._cache_lengths(cache.tensors())[0])]
        self._shard_rows(state)
        copies_of_weights = self._weight_copies.make()
        for tensor in copies_of_weights:
            self._backend.shard(tensor, (None,) * tensor.ndim)
        # The token of the state is the next program's.
        return [token.clone(), log_prob], [*state, *copies_of_weights]

    def _shard_rows(self, tensors: Sequence[Tensor]) -> None:
        """Each chip has its own rows."""
        for tensor in tensors:
            self._backend.shard(tensor, (("data", "fsdp"), *[None] * (tensor.ndim - 1)))

    def _rows_and_cache(self) -> tuple["_Rows", list[Tensor]]:
        count = len(_Rows._fields)
        return _Rows(*self._state[:count]), self._state[count:][: 2 * self._num_layers]

    def _decode(self, seed: Tensor, rows: int) -> list[Tensor]:
        """All further tokens of the `rows` rows, in loops: tokens and log-probabilities, of shape `(new, rows)`."""
        state, cache = self._rows_and_cache()
        carry = (_all(state.is_finished), state, tuple(cache))
        decode_token, lengths = partial(self._decode_token, seed), self._cache_lengths(cache)
        results, first = [], 1
        with self._weight_copies.read(self.copied_weights()):
            for length in lengths:
                end = min(length - self.prompt_lengths[-1] + 1, self._new_tokens)
                token_numbers = torch.arange(first, end, dtype=torch.int32, device=seed.device)
                carry, tokens = self._backend.loops.scan(decode_token, carry, (token_numbers,), until=True)
                if not results:
                    # It takes the place of the state that prefill has left, which has the same shapes.
                    for tensor, value in zip([*state, *cache], [*carry[1], *carry[2]], strict=True):
                        tensor.data = value
                    self._shard_rows([*state, *cache])
                results.append(tokens)
                first = end
                if length != lengths[-1]:
                    carry = (*carry[:2], pad_positions(carry[2], length, lengths[len(results)]))
        return [torch.cat(each) for each in zip(*results, strict=True)]

    def _decode_one_by_one(self, seed: Tensor, rows: int, end_program: Callable) -> list[Tensor]:
        """Do what [`~Generator._decode`] does by a program for a token, in a loop of the host."""
        iterations = self._new_tokens - 1
        # Zeros stay where an iteration does not run, since all rows have ended.
        results = {
            name: torch.zeros(iterations, rows, dtype=dtype, device=seed.device)
            for name, dtype in (("tokens", torch.int64), ("log_probs", torch.float32))
        }
        # It is on the device, since a Python number would be part of the program.
        number, all_ended = torch.ones_like(seed), None
        for iteration in range(iterations):
            if iteration and iteration % _TOKENS_BETWEEN_READS == 0 and self._backend.fetch(all_ended):
                break
            data = {"seed": seed, "number": number, "rows": rows, **results}
            all_ended, number, results = self._compiled(data, end_program, name=DECODE)
        return list(results.values())

    def _decode_next(
        self, seed: Tensor, number: Tensor, rows: int, **results: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Whether all rows have ended, the number of the next token, and `results` with token `number` in its place."""
        state, cache = self._rows_and_cache()
        carry, new = self._decode_token(seed, (None, state, cache), (number,))
        for tensor, value in zip([*state, *cache], [*carry[1], *carry[2]], strict=True):
            if value is not tensor:
                tensor.copy_(value)
        put = self._backend.loops.put_rows
        results = {
            name: put(each, number - 1, value[None]) for (name, each), value in zip(results.items(), new, strict=True)
        }
        return carry[0], number + 1, results

    def _cache_lengths(self, cache: Sequence[Tensor]) -> list[int]:
        """Lengths of the cache, one after the other. A program for a token has one."""
        prompt, new, chips = self.prompt_lengths[-1], self._new_tokens, self._backend.num_chips
        if not self._backend.loops.in_programs:
            return [prompt + new]
        return choose_cache_lengths(cache, self._model, prompt, new, chips, find_room(self._backend))

    def _decode_token(self, seed: Tensor, carry: tuple, entries: tuple) -> tuple[tuple, tuple]:
        _, (is_finished, token, position, attention, history), keys_and_values = carry
        (number,) = entries
        index = number + (self.prompt_lengths[-1] - 1)
        length = keys_and_values[0].shape[-2]
        cache = StaticKeyValueCache(self._backend, self._num_layers, length, index, keys_and_values)
        if self._sampler.reads_history:
            history = self._backend.loops.put_block(history, token[:, None], index, dim=1)
        logits = self._logits(token[:, None], attention[:, :length], position, cache)
        token, log_prob = self._sampler.choose(logits, seed, number, history)
        token = torch.where(is_finished > 0, self.pad_token_id, token)
        is_finished = torch.maximum(is_finished, self._sampler.is_end(token))
        rows = _Rows(is_finished, token, position + 1, attention, history)
        return (_all(is_finished), rows, cache.tensors()), (token, log_prob)

    def _logits(self, ids: Tensor, attention: Tensor, positions: Tensor, cache: StaticKeyValueCache) -> Tensor:
        """The logits of the last position: `(rows, vocabulary)`."""
        output = self._model(
            input_ids=ids,
            attention_mask=attention,
            position_ids=positions,
            use_cache=True,
            **{self._cache_argument: cache},
            **self._settings,
        )
        return output.logits[:, -1]


class _Rows(NamedTuple):
    """
    What is known of each row between two tokens.

    Args:
        is_finished (`torch.Tensor` of shape `(rows,)`, int32): 1 where the last token has ended it.
        token (`torch.Tensor` of shape `(rows,)`): The last token.
        position (`torch.Tensor` of shape `(rows, 1)`): Its position.
        attention (`torch.Tensor` of shape `(rows, length)`): 0 for padding of the prompt. Later tokens are masked by their position.
        history (`torch.Tensor` of shape `(rows, length)`): All tokens so far; others stand for those that are to come.
    """

    is_finished: Tensor
    token: Tensor
    position: Tensor
    attention: Tensor
    history: Tensor


def are_in_groups(ids: Tensor, mask: Tensor, group: int) -> bool:
    """Whether prompts on the host, padded to one length, are the same in each `group` of rows one after the other."""
    groups = torch.stack([ids, mask]).unflatten(1, (-1, group))
    return bool(groups.eq(groups[:, :, :1]).all())


def _repeat(tensor: Tensor, prompts: int, copies: int) -> Tensor:
    """Each prompt's part of a tensor, `copies` times one after the other."""
    if copies == 1:
        return tensor
    return tensor.unflatten(0, (prompts, 1, -1)).expand(-1, copies, *[-1] * tensor.ndim).flatten(0, 2)


def _all(is_finished: Tensor) -> Tensor:
    return is_finished.min(0).values > 0
