"""
What models and tricks derive from the length of a batch. Its columns are those of a declared length; the length is the one that
upstream's collator gives the batch, and it comes with the batch, as data: another one is no other program.
"""

import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import UserError
from ..temporarily import temporarily


_KEY = "of the batch's length"
_LENGTH = "length"


def _types_of(module: nn.Module) -> dict[str | None, str]:
    """The type of a module's rotary embeddings, by the type of layers if they are of several."""
    types = vars(module).get("rope_type")
    return types if isinstance(types, dict) else {None: types}


def _depends_on_length(rope_type: Any) -> bool:
    return isinstance(rope_type, str) and ("dynamic" in rope_type or rope_type == "longrope")


def is_block_sparse(module: nn.Module) -> bool:
    """Whether a module is a BigBird whose attention is block-sparse now: it switches to full attention by itself."""
    return isinstance(module, PreTrainedModel) and vars(module).get("attention_type") == "block_sparse"


def _longest_unscaled(module: nn.Module, layer_type: str | None, rope_type: str) -> int:
    """The length up to which frequencies are those that the module was made with."""
    if rope_type != "longrope":
        return module.original_max_seq_len
    parameters = module.config.rope_parameters
    return (parameters if layer_type is None else parameters[layer_type])["original_max_position_embeddings"]


class BatchLength:
    """
    Gives models the length of a batch where they ask for it: rotary embeddings whose frequencies depend on it (`dynamic`,
    `longrope`), and the noise of NEFTune. Refuses columns that are added to batches of models that see padding as tokens, and of
    BigBird's block-sparse attention, in which all tokens see the last block.

    Args:
        models (`Sequence`): Models that a step runs.
        longest (`int`, *optional*): The longest row that a step has; `None` if it is not known.
        sees_padding (`str`, *optional*): The class of a model that sees padding as tokens.
    """

    def __init__(self, models: Sequence[nn.Module], longest: int | None, sees_padding: str | None = None):
        #: What the batch under way has on the device. Empty in between, for what compares the state of two steps.
        self.values: dict[Hashable, Tensor] = {}
        self._adds_noise = False
        self._is_overridden = False
        self._sees_padding = sees_padding
        self._block_sparse = [module for model in models for module in model.modules() if is_block_sparse(module)]
        self._ropes: list[nn.Module] = []
        # Those whose frequencies depend on the length of batches, each with a copy on the host in which upstream's own code
        # decides, and keeps what it knows of earlier batches.
        self._by_length: list[tuple[nn.Module, nn.Module]] = []
        #: Frequencies that change within a run, by their type, with the length up to which they do not.
        self.rope_scaling: tuple[str, int] | None = None
        for model in models:
            for module in model.modules():
                unscaled = [
                    (kind, _longest_unscaled(module, layers, kind))
                    for layers, kind in _types_of(module).items()
                    if _depends_on_length(kind)
                ]
                if not unscaled:
                    continue
                self._ropes.append(module)
                if longest is None or longest > min(most for _, most in unscaled):
                    self._by_length.append((module, type(module)(module.config)))
                    self.rope_scaling = self.rope_scaling or unscaled[0]
        #: Whether anything asks for the length of a batch.
        self.asks = bool(self._by_length)

    @property
    def is_block_sparse(self) -> bool:
        """Whether a model has block-sparse attention, which depends on the columns of a batch."""
        return any(map(is_block_sparse, self._block_sparse))

    def check_columns(self, length: int, columns: int) -> None:
        """Refuse (`ValueError`) to pad the longest row of a batch to so many more columns, where a model computes with them."""
        if self._sees_padding is not None:
            raise UserError(
                f"A batch of {length} tokens a row is padded to {columns} on XLA, and {self._sees_padding} sees padding as tokens: its "
                f"numbers would change. Keep to rows of one length (tokenizer(..., padding='max_length', max_length={columns})), or "
                "train it on a GPU, or on the CPU with use_cpu=True."
            )
        for module in self._block_sparse:
            config = module.config
            # Up to there the model takes full attention. It does so from then on, whatever the next batches are.
            full = (5 + 2 * config.num_random_blocks) * config.block_size
            if is_block_sparse(module) and columns > max(length, full):
                raise UserError(
                    f"A batch of {length} tokens a row is padded to {columns}, and the block-sparse attention of "
                    f"{type(module).__name__} depends on the columns of a batch beyond {full}: all tokens see the last block. Load "
                    "the model with attention_type='original_full', keep to rows of one length (tokenizer(..., "
                    f"padding='max_length', max_length={columns})), or to {full} tokens (TPUTrainingArguments(max_length={full}))."
                )

    def data(self, length: int, positions: Tensor | None = None) -> dict[Hashable, Tensor]:
        """
        What goes to the device with a batch on the host whose longest row has so many tokens, and whose `positions` are these
        if it has its own.
        """
        data: dict[Hashable, Tensor] = {}
        if self._adds_noise:
            data[_KEY, _LENGTH] = torch.tensor([[float(length)]])
        if not self._by_length:
            return data
        last = length - 1 if positions is None else int(positions.max())
        for place, (_, on_host) in enumerate(self._by_length):
            for layers in _types_of(on_host):
                kwargs = {} if layers is None else {"layer_type": layers}
                on_host(torch.zeros(1), torch.tensor([[last]]), **kwargs)
            # Of one row: what has as many as the batch is split over the chips.
            data |= {
                (_KEY, place, name): value[None].clone()
                for name, value in on_host.named_buffers()
                if name.endswith("inv_freq") and not name.endswith("original_inv_freq")
            }
        return data

    def take(self, batch: dict[Hashable, Any]) -> dict[str, Any]:
        """Take from a batch on the device what [`~BatchLength.data`] has added to it. Returns the rest."""
        own = {key: value for key, value in batch.items() if isinstance(key, tuple) and key[0] == _KEY}
        self.values.clear()
        self.values.update(own)
        return {key: value for key, value in batch.items() if key not in own}

    def forget(self) -> None:
        """Forget what the batch under way had on the device, as it is done."""
        self.values.clear()

    def end_run(self) -> None:
        """Note that the run has ended, in which upstream takes back its hook that adds noise."""
        self._adds_noise, self.asks = False, bool(self._by_length)

    @contextmanager
    def override_rope(self) -> Iterator[None]:
        """Within this context, rotary embeddings of the models take the length of a batch from here."""
        if self._is_overridden:
            yield
            return
        modules = [module for module, _ in self._by_length]
        with ExitStack() as stack:
            stack.enter_context(temporarily(self, _is_overridden=True))
            for module in self._ropes:
                place = modules.index(module) if module in modules else None
                stack.enter_context(temporarily(module, forward=partial(_rotary, module, self.values, place)))
            yield

    def replace_noise(self, handle: torch.utils.hooks.RemovableHandle) -> None:
        """Put noise for the length of a batch in the place of the hook of upstream that adds noise for its columns."""
        self._adds_noise = self.asks = True
        handle.hooks_dict_ref()[handle.id] = partial(_add_noise, self.values)


@torch.no_grad()
def _rotary(
    module: nn.Module,
    values: dict[Hashable, Tensor],
    place: int | None,
    x: Tensor,
    position_ids: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Upstream's rotary embedding with the frequencies that came with the batch, or with those that never change."""
    upstream: Callable = type(module).forward
    if place is not None and not values:
        # Of another call than that of a batch.
        return upstream(module, x, position_ids, *args, **kwargs)
    buffers = module._buffers
    sent_buffers = {key[2]: value[0] for key, value in values.items() if key[1] == place}
    own_buffers = {name: buffers[name] for name in sent_buffers}
    buffers.update(sent_buffers)
    try:
        # Without what looks for the longest row among the columns, and reads it from the device.
        return inspect.unwrap(upstream)(module, x, position_ids, *args, **kwargs)
    finally:
        buffers.update(own_buffers)


def _add_noise(values: dict[Hashable, Tensor], module: nn.Module, _, output: Tensor) -> Tensor:
    """As `neftune_post_forward_hook` of transformers, whose noise is the smaller the longer a batch is."""
    if not module.training:
        return output
    length = values.get((_KEY, _LENGTH))
    size = output.new_tensor(float(output.shape[1]), dtype=torch.float32) if length is None else length[0, 0]
    amplitude = module.neftune_noise_alpha / torch.sqrt(size * output.shape[2])
    return output + (torch.zeros_like(output).uniform_(-1, 1) * amplitude).to(output.dtype)
