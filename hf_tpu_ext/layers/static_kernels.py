"""
Model code whose shapes do not depend on the data: attention, experts, and code of single families that reads the device, or keeps what
nobody reads. The same numbers by programs of static shape; tests/models/families.py trains each family beside upstream.
"""

import importlib
from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface
from transformers.utils.generic import GeneralInterface

from ..temporarily import temporarily


def find_transformers_model(model: nn.Module) -> PreTrainedModel | None:
    """The model of transformers that a model is, or that is inside of it, as in a [`~peft.PeftModel`]; `None` if there is none."""
    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)


def is_of_user(interface: GeneralInterface, name: str | None) -> bool:
    """Whether code outside transformers and this package has registered a name: what it computes may be something of its own."""
    function = interface.get(name)
    while isinstance(function, partial):
        function = function.func
    return function is not None and function.__module__.partition(".")[0] not in ("transformers", "hf_tpu_ext")


def use_static_kernels(model: nn.Module, attention: str | None = "eager") -> None:
    """
    Make a transformers model use the attention, where one is given, the mixture-of-experts code and the code of single families that
    compile to static shapes. Models inside wrappers such as [`~peft.PeftModel`] are found.

    Eager attention is plain matrix products, which XLA fuses: the scaled dot product operator reads the mask on the
    host to leave it out where it can, and does not take part in autocast. Experts become `"batched_mm"`: the default
    sorts tokens by expert, with sizes that change with the data. Experts that the user has registered are kept.
    """
    use_static_code(model)
    found = find_transformers_model(model)
    if found is None:
        return
    if attention is not None:
        found.set_attn_implementation(attention)
    if not is_of_user(ExpertsInterface(), found.config._experts_implementation):
        found.set_experts_implementation("batched_mm")


def use_static_code(model: nn.Module) -> None:
    """Give the modules of transformers that are named here another `forward`."""
    for module in model.modules():
        cls = type(module)
        if cls.__module__.startswith("transformers.models.") and cls.__name__ in _FORWARDS:
            # Trainers ask for its parameters.
            module.forward = update_wrapper(partial(_FORWARDS[cls.__name__], module), MethodType(cls.forward, module))


class _EveryExpert(TorchFunctionMode):
    """
    The loop that transformers writes over the experts that have tokens, each for its tokens, as one over all experts for all tokens.
    What an expert makes of a token that was not sent to it is not added. Experts that are modules get a gradient of 0 in a step
    without tokens for them, and none from upstream, whose optimizer leaves them out then.

    Such a loop calls three functions whose results depend on the data. Some of the experts behind them are modules, which upstream's
    faster forms do not know.
    """

    def __init__(self, num_experts: int):
        self._num_experts = num_experts

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is Tensor.nonzero:
            # On the host, where a loop over it and an index by it read nothing from the device.
            return torch.arange(self._num_experts)[:, None]
        if func is torch.where and len(args) == 1:
            # Shape (choices of a token, tokens).
            self._is_sent = args[0].bool().any(0)
            return args[0].int().argmax(0), torch.arange(args[0].shape[1], device=args[0].device)
        if func is Tensor.index_add_:
            total, dim, index, states = args
            args = total, dim, index, states.where(self._is_sent[:, None], 0.0)
        return func(*args, **(kwargs or {}))


def _experts(name: str) -> Callable:
    """The loop of a class whose number of experts has this name."""
    return _within(lambda module: _EveryExpert(getattr(module, name)))


class _LastEnd(TorchFunctionMode):
    """
    The state at the last end of each row, where BART, T5 and others select those at all ends to take the last. Upstream refuses rows
    of several numbers of ends, which would have to be read.
    """

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.unique_consecutive:
            return args[0][:1]
        index = args[1] if func is Tensor.__getitem__ else None
        if isinstance(index, tuple) and isinstance(index[0], Tensor) and index[0].dtype == torch.bool:
            states, (is_end, _) = args
            last = (is_end * torch.arange(is_end.shape[1], device=is_end.device)).argmax(1)
            return states[torch.arange(len(last), device=last.device), last]
        return func(*args, **(kwargs or {}))


class _WholeWrites(TorchFunctionMode):
    """One value that is written to all places of a mask, whose number depends on the data, as a choice for each place."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is Tensor.__setitem__ and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            states, mask, value = args
            inner = states.ndim - mask.ndim
            if not isinstance(value, Tensor) or value.ndim <= inner:
                return states.copy_(torch.where(mask[(..., *[None] * inner)], value, states))
        return func(*args, **(kwargs or {}))


def _within(make_mode: Callable[[nn.Module], TorchFunctionMode]) -> Callable:
    """Upstream's own code, in a mode that is made for the module."""

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with make_mode(module):
            return type(module).forward(module, *args, **kwargs)

    return forward


_by_last_end, _with_whole_writes = _within(lambda module: _LastEnd()), _within(lambda module: _WholeWrites())


def _deberta(module: nn.Module, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
    """Upstream picks the rows with a label, unless it is told that each has one of several: then -100 stands for none."""
    is_class = labels is not None and module.num_labels > 1 and labels.ndim == 1 and not labels.is_floating_point()
    problem_type = module.config.problem_type or ("single_label_classification" if is_class else None)
    with temporarily(module.config, problem_type=problem_type):
        return type(module).forward(module, *args, labels=labels, **kwargs)


def _jetmoe_gating(module: nn.Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The rows of experts are not sorted by expert; instead of the sizes of experts, it returns the expert of each row."""
    logits = module.layer(hidden_states).float()
    top_logits, experts = logits.topk(module.top_k, dim=1)
    gates = top_logits.softmax(1).type_as(hidden_states).flatten()
    rows = torch.arange(len(gates), device=gates.device)
    return rows, rows // module.top_k, gates, experts.flatten(), logits


def _jetmoe_experts(module: nn.Module, inputs: Tensor, experts: Tensor) -> Tensor:
    outputs = (F.linear(inputs, weight).where(experts[:, None] == e, 0.0) for e, weight in enumerate(module.weight))
    return sum(outputs)


def _recurrent_gemma(module: nn.Module, *args: Any, use_cache: bool = True, **kwargs: Any) -> Any:
    output = type(module).forward(module, *args, use_cache=use_cache, **kwargs)
    if not use_cache:
        # The next call would drop it.
        module.rg_lru.recurrent_states = None
    return output


class _Lengths(NamedTuple):
    """Lengths of rows, of which XLM and FlauBERT assert on the host that none is beyond the batch. Nothing else asks for them."""

    rows: int
    longest: int
    device: torch.device

    def size(self, dim: int) -> int:
        return self.rows

    def max(self) -> Tensor:
        return torch.tensor(self.longest)


def _xlm(module: nn.Module, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **kwargs) -> Any:
    if input_ids is not None and attention_mask is not None and kwargs.get("lengths") is None:
        kwargs["lengths"] = _Lengths(*input_ids.shape, input_ids.device)
    return type(module).forward(module, input_ids, attention_mask, **kwargs)


def _xlnet(
    module: nn.Module,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    mems: Sequence[Tensor] | None = None,
    inputs_embeds: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Of its states it keeps the last `mem_len`, a slice that torch_xla refuses where there are fewer."""
    length = (input_ids if inputs_embeds is None else inputs_embeds).shape[1]
    states = min(length, module.reuse_len or length) + (mems[0].shape[0] if mems else 0)
    with temporarily(module, mem_len=module.mem_len and min(module.mem_len, states)):
        return type(module).forward(module, input_ids, attention_mask, mems, inputs_embeds=inputs_embeds, **kwargs)


def _qwen4_indexer(
    module: nn.Module,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor,
    cache: Any,
) -> Tensor:
    """The blocks of tokens that each query attends to, for all queries at once: `(batch, 1, queries, keys)`."""
    rotate = importlib.import_module(type(module).__module__).apply_rotary_pos_emb
    batch, queries, _ = hidden_states.shape
    size, heads = module.compress_ratio, module.index_n_heads
    cos, sin = position_embeddings
    q, k = (
        module.index_qk_proj(hidden_states)
        .unflatten(-1, (-1, module.index_head_dim))
        .split([heads, module.index_kv_heads], 2)
    )
    q = rotate(module.q_layernorm(q), cos=cos[:, -queries:], sin=sin[:, -queries:], unsqueeze_dim=2)
    k = k.squeeze(2)
    if cache is not None:
        k = cache.update_indexer(k, module.layer_idx)
    visible = (attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0)[:, 0]
    visible = visible.expand(batch, -1, -1)
    keys = visible.shape[-1]
    # A block is the next few of the tokens that a query sees; those that do not fill a block are always attended to.
    place = torch.arange(keys, device=k.device)
    order = torch.where(visible, place, place + keys).sort(-1).values % keys
    order = order[..., : keys // size * size].unflatten(-1, (-1, size))
    row = torch.arange(batch, device=k.device)[:, None, None]
    pooled_keys = module.k_layernorm(k[row[..., None], order].float().mean(3).to(k.dtype))
    first = order[..., 0]
    blocks = rotate(pooled_keys.unsqueeze(3), cos=cos[row, first], sin=sin[row, first], unsqueeze_dim=3).squeeze(3)
    scores = (q.float() @ blocks.float().mT).relu().sum(2)
    number = visible.sum(-1, keepdim=True) // size
    is_whole = torch.arange(order.shape[2], device=k.device) < number
    best = scores.masked_fill(~is_whole, -1.0).topk(min(module.block_topk, order.shape[2]), dim=-1).indices
    is_best = torch.zeros_like(is_whole).scatter(-1, best, True)
    block = (visible.cumsum(-1) - 1).clamp(min=0) // size
    is_attended = is_best.gather(-1, block.clamp(max=order.shape[2] - 1)) | (block >= number)
    return (visible & is_attended).unsqueeze(1)


_FORWARDS: dict[str, Callable] = {
    "BartForSequenceClassification": _by_last_end,
    "BigBirdPegasusForSequenceClassification": _by_last_end,
    "DebertaForSequenceClassification": _deberta,
    "DebertaV2ForSequenceClassification": _deberta,
    "DbrxExperts": _experts("num_experts"),
    "FlaubertModel": _xlm,
    "JetMoeParallelExperts": _jetmoe_experts,
    "JetMoeTopKGating": _jetmoe_gating,
    "Kimi_K25Model": _with_whole_writes,
    "LongcatFlashExperts": _experts("total_experts"),
    "MBartForSequenceClassification": _by_last_end,
    "MT5ForSequenceClassification": _by_last_end,
    "MuseGlimmerModel": _with_whole_writes,
    "MuseSparkModel": _with_whole_writes,
    "MvpForSequenceClassification": _by_last_end,
    "NllbMoeExperts": _experts("num_experts"),
    "PLBartForSequenceClassification": _by_last_end,
    "Qwen4ExpTextQSAIndexer": _qwen4_indexer,
    "RecurrentGemmaRecurrentBlock": _recurrent_gemma,
    "Step3p7Experts": _experts("num_experts"),
    "SwitchTransformersExperts": _experts("num_experts"),
    "T5ForSequenceClassification": _by_last_end,
    "T5Gemma2TextScaledWordEmbedding": _with_whole_writes,
    "UMT5ForSequenceClassification": _by_last_end,
    "XLMModel": _xlm,
    "XLNetModel": _xlnet,
}
