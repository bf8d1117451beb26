"""Several completions of a prompt in one row: layers read the prompt once, and attention sees each completion by itself."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .token_mask import TokenMask


class SharedPrompts(NamedTuple):
    """
    How rows that begin with the same prompt, of `length` tokens, are one row: the prompt, and then all `completions`
    of it.
    """

    length: int
    completions: int

    def pack(self, rows: Tensor, dim: int = 1) -> Tensor:
        """
        From `(prompts * completions, length + completion, ...)` to `(prompts, length + completions * completion, ...)`, or with
        tokens in another dimension than the second. Of the rows of a prompt, which come one after the other, the first has the
        prompt that is kept.
        """
        prompts, completions = self._parts_of_rows(rows, dim)
        return torch.cat([prompts[:, 0], completions], dim)

    def unpack(self, packed: Tensor, dim: int = 1) -> Tensor:
        """The rows that [`~SharedPrompts.pack`] has packed."""
        prompts, completions = self._parts_of_packed(packed, dim)
        prompts = prompts.expand(-1, self.completions, *[-1] * (packed.ndim - 1))
        return torch.cat([prompts, completions], dim + 1).flatten(0, 1)

    def pack_gradient(self, gradient: Tensor, dim: int = 1) -> Tensor:
        """The gradient of packed rows, given that of the rows that [`~SharedPrompts.unpack`] has made of them."""
        prompts, completions = self._parts_of_rows(gradient, dim)
        return torch.cat([prompts.sum(1), completions], dim)

    def unpack_gradient(self, gradient: Tensor, dim: int = 1) -> Tensor:
        """The gradient of rows, given that of what [`~SharedPrompts.pack`] has made of them."""
        prompts, completions = self._parts_of_packed(gradient, dim)
        others = torch.zeros_like(prompts).expand(-1, self.completions - 1, *[-1] * (gradient.ndim - 1))
        return torch.cat([torch.cat([prompts, others], 1), completions], dim + 1).flatten(0, 1)

    def _parts_of_rows(self, rows: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """The prompt of each row, `(prompts, completions, length, ...)`, and the completions as packed rows have them."""
        prompts, completions = rows.unflatten(0, (-1, self.completions)).tensor_split([self.length], dim + 1)
        return prompts, completions.movedim(1, dim).flatten(dim, dim + 1)

    def _parts_of_packed(self, packed: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Prompts, `(prompts, 1, length, ...)`, and completions, `(prompts, completions, completion, ...)`."""
        prompts, completions = packed.tensor_split([self.length], dim)
        return prompts[:, None], completions.unflatten(dim, (self.completions, -1)).movedim(dim, 1)

    def positions(self, length: int, device: torch.device) -> Tensor:
        """The position in its own row of each token of a packed row: `(1, packed length)`; `length` is that of a row."""
        return self.pack(torch.arange(length, device=device).expand(self.completions, -1))

    def before_completions(self, hidden: Tensor) -> Tensor:
        """
        The hidden states that predict the tokens of completions: `(prompts, completions * completion, hidden_size)`, given those
        of all tokens of packed rows but the last. Each completion begins after the prompt.
        """
        by_completion = hidden[:, self.length - 1 :].unflatten(1, (self.completions, -1))
        last_of_prompt = by_completion[:, :1, :1].expand(-1, self.completions, -1, -1)
        return torch.cat([last_of_prompt, by_completion[:, :, 1:]], 2).flatten(1, 2)


class _Unpack(torch.autograd.Function):
    """[`~SharedPrompts.unpack`]. Autograd would add up gradients of its parts, each as large as all of them."""

    @staticmethod
    def forward(ctx, packed: Tensor, shared: SharedPrompts, dim: int) -> Tensor:
        ctx.shared, ctx.dim = shared, dim
        return shared.unpack(packed, dim)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.shared.pack_gradient(gradient, ctx.dim), None, None


class _Pack(torch.autograd.Function):
    """[`~SharedPrompts.pack`], likewise."""

    @staticmethod
    def forward(ctx, rows: Tensor, shared: SharedPrompts) -> Tensor:
        ctx.shared = shared
        return shared.pack(rows)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.shared.unpack_gradient(gradient), None


class SharedPromptsMask(NamedTuple):
    """The attention mask of rows, each with its prompt, whose first dimension is split into prompts and completions."""

    mask: Tensor | TokenMask
    shared: SharedPrompts


_shared: ContextVar[SharedPrompts | None] = ContextVar("shared_prompts", default=None)


@contextmanager
def prompts_shared(shared: SharedPrompts) -> Iterator[None]:
    """Within this context, models are given packed rows."""
    token = _shared.set(shared)
    try:
        yield
    finally:
        _shared.reset(token)


def mask_each_row(make_mask: Callable, *, batch_size: int, q_length: int, kv_length: int, **kwargs: Any) -> Any:
    """What `make_mask` makes for [`~transformers.AttentionMaskInterface`]; of packed rows, for each completion by itself."""
    shared, attention_mask = _shared.get(), kwargs.pop("attention_mask", None)
    if shared is None:
        return make_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **kwargs
        )
    attention_mask = shared.unpack(attention_mask)
    rows, length = attention_mask.shape
    mask = make_mask(batch_size=rows, q_length=length, kv_length=length, attention_mask=attention_mask, **kwargs)
    return SharedPromptsMask(_map(mask, lambda tensor: tensor.unflatten(0, (batch_size, -1))), shared)


def attend_each_row(
    attend: Callable,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | TokenMask | SharedPromptsMask | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """
    What `attend` computes for [`~transformers.AttentionInterface`]; of packed rows, for each completion after its prompt, as if
    the rows were not packed.
    """
    if not isinstance(attention_mask, SharedPromptsMask):
        return attend(module, query, key, value, attention_mask, **kwargs)
    mask, shared = attention_mask
    # Heads come before tokens, and after them.
    query, key, value = (_Unpack.apply(tensor, shared, 2) for tensor in (query, key, value))
    output, _ = attend(module, query, key, value, _map(mask, lambda tensor: tensor.flatten(0, 1)), **kwargs)
    return _Pack.apply(output.flatten(2), shared).unflatten(2, output.shape[2:]), None


def _map(mask: Tensor | TokenMask, change: Callable[[Tensor], Tensor]) -> Tensor | TokenMask:
    return mask._replace(documents=change(mask.documents)) if isinstance(mask, TokenMask) else change(mask)
