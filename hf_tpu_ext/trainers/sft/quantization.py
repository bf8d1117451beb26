"""Quantization-aware training: a model learns with the weights that it will have after rounding."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from peft import PeftModel
from transformers import TrainerCallback
from transformers.trainer_utils import unwrap_peft_model
from transformers.utils import logging

from ...errors import UserError
from ...formatting import count
from ...layers.chunked_head import head_wrapped_by
from ...quantization.fake_quantized import TrainedFor
from ...quantization.rounding import Rounding
from ...temporarily import temporarily
from ..configs import TPUSFTConfig


logger = logging.get_logger(__name__)


class QuantizationMixin:
    """
    The part of [`TPUSFTTrainer`] that rounds weights in the forward pass, as the `qat_` fields of [`TPUSFTConfig`] say.

    While the trainer uses the model, to train, to evaluate, to answer samples, its layers compute with rounded weights. Whoever
    takes it out of the trainer has the model that it came with, and its trained weights in full.
    """

    #: How layers round, `None` where they do not.
    rounding: Rounding | None = None

    def _prepare_fake_quantization(self) -> None:
        args = self.args
        if not isinstance(args, TPUSFTConfig) or args.qat_weight_dtype is None:
            return
        base = unwrap_peft_model(self.model)
        if vars(base).get("is_quantized"):
            raise UserError(
                f"qat_weight_dtype={args.qat_weight_dtype!r} rounds weights that are trained in full, and those of the model "
                "are quantized already. Leave out load_in_4bit, load_in_8bit and quantization_config."
            )
        self._trained_for = TrainedFor(
            args.qat_weight_dtype,
            args.qat_group_size,
            args.qat_activation_dtype,
            args.qat_quantize_embedding,
            args.qat_adapters,
            args.qat_scale,
        )
        self._fake_quantization = self._trained_for.fake_quantization(self.model)
        self._layers_round = False
        self.rounding = self._fake_quantization.rounding
        self.rounding.on = not args.qat_fake_quant_after_n_steps
        self.adapted.changes += self._describe_fake_quantization()
        if args.qat_fake_quant_after_n_steps:
            later = _RoundLater(self.rounding, args.qat_fake_quant_after_n_steps, self.watch.expect_others)
            self.add_callback(later)

    def write_model(self, output_dir: str, state_dict) -> None:
        super().write_model(output_dir, state_dict)
        if self.rounding is not None and self.args.should_save:
            self._trained_for.write(output_dir)

    def _describe_fake_quantization(self) -> list[str]:
        args, fake = self.args, self._fake_quantization
        what = f"weights of {count(len(fake.linears), 'linear layer')} in {args.qat_weight_dtype}"
        lines = [f"fake quantization: {what}, groups of {args.qat_group_size}"]
        if args.qat_scale != "max":
            lines[0] += f", scales by {args.qat_scale}"
        if args.qat_activation_dtype is not None:
            lines[0] += f", activations in {args.qat_activation_dtype}"
        if fake.inside:
            lines[0] += f", adapters inside the rounding of {len(fake.inside)}"
        if args.qat_fake_quant_after_n_steps:
            lines[0] += f", after step {args.qat_fake_quant_after_n_steps}"
        if fake.experts:
            lines.append(f"not rounded, since they are no linear layers: {', '.join(fake.experts)}")
        if not isinstance(self.model, PeftModel) and args.qat_adapters != "inside":
            lines.append(f"qat_adapters={args.qat_adapters!r} has no effect: there are no adapters (use_peft: true)")
        dropouts = [inner for module in fake.inside.values() for inner in module.lora_dropout.values()]
        if any(isinstance(dropout, torch.nn.Dropout) and dropout.p for dropout in dropouts):
            lines.append(
                "lora_dropout has no effect with qat_adapters='inside': adapters are part of the rounded weight"
            )
        return lines

    def settings_of_programs(self) -> Hashable:
        return self.rounding is not None and self.rounding.on

    @contextmanager
    def models_as_run(self) -> Iterator[None]:
        with super().models_as_run(), ExitStack() as context:
            # An evaluation in the middle of training finds them so.
            if self.rounding is not None and not self._layers_round:
                context.enter_context(self._fake_quantization.enable())
                context.enter_context(temporarily(self, _layers_round=True))
            yield

    @contextmanager
    def models_in_static_shapes(self, segment_ids: torch.Tensor | None = None) -> Iterator[None]:
        with super().models_in_static_shapes(segment_ids), self._head_rounded():
            yield

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        # In static shapes, what computes the head is chosen within first.
        with nullcontext() if self.backend.static_shapes else self._head_rounded():
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    @contextmanager
    def _head_rounded(self) -> Iterator[None]:
        if self.rounding is None or not self._layers_round or self._fake_quantization.head is None:
            yield
            return
        with head_wrapped_by(self._fake_quantization.rounding_head):
            yield


class _RoundLater(TrainerCallback):
    """Rounds from a step on, which is another program: the one more that is compiled is expected."""

    def __init__(self, rounding: Rounding, after: int, on_change: Callable[[], None]):
        self._rounding, self._after, self._on_change = rounding, after, on_change

    def on_train_begin(self, args, state, control, **kwargs):
        if self._after >= state.max_steps:
            logger.warning(
                f"qat_fake_quant_after_n_steps={self._after} leaves none of the {count(state.max_steps, 'step')} of this run to "
                "train with rounded weights, and evaluations are of weights in full. Set it lower, or train for more steps."
            )
        # A run that is resumed may evaluate before its first step, or have no step left. It rounds then as its last step did.
        self._round(state.global_step > self._after)

    def on_step_begin(self, args, state, control, **kwargs):
        self._round(state.global_step >= self._after)

    def _round(self, rounds: bool) -> None:
        if rounds != self._rounding.on:
            self._rounding.on = rounds
            self._on_change()
