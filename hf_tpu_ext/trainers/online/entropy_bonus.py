"""The entropy bonus of GRPO, whose coefficient may follow the entropy (`use_adaptive_entropy`)."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import TrainerCallback

from ...step.metrics import DeviceSums
from ...temporarily import temporarily


_COEF = "entropy_coef"


class EntropyBonusMixin:
    """
    The part of [`TPUGRPOTrainer`] that sends the coefficient of the entropy bonus with each step, for it to change without another
    program.

    With `use_adaptive_entropy` upstream reads the entropy of an optimizer step and decides on the coefficient of the next one. Here
    it is summed on the device, and read once when the step has ended: the one setting with which a training step is read.
    """

    # Of the optimizer step under way, where the coefficient follows them.
    _entropy_sums: DeviceSums | None = None
    # Of the loss under way: entropies of the tokens, and which of them upstream trains on.
    _entropies: Tensor | None = None
    _high_entropy: Tensor | None = None

    def _finish_set_up(self) -> None:
        super()._finish_set_up()
        # The coefficients since the last log.
        self._coefs: list[float] = []
        if self.use_adaptive_entropy and self.backend.static_shapes:
            self._entropy_sums = DeviceSums(self.backend, floats=("entropy", "tokens"), integers=())
            self.add_callback(_FollowEntropy(self._adapt_entropy_coef))

    def step_data(self) -> dict[str, Tensor]:
        if not self._entropy_bonus_enabled:
            return super().step_data()
        adapts = self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target
        return {**super().step_data(), _COEF: torch.tensor(0.0 if adapts else self.entropy_coef)}

    def data_of_evaluation(self) -> dict[str, Tensor]:
        data = super().data_of_evaluation()
        if not self._entropy_bonus_enabled or _COEF in data:
            return data
        return {**data, _COEF: self.backend.send(self.step_data()[_COEF])}

    def state_of_steps(self) -> list[Tensor]:
        tensors = super().state_of_steps()
        return tensors if self._entropy_sums is None else [*tensors, *self._entropy_sums.tensors.values()]

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not (self._entropy_bonus_enabled and self.backend.static_shapes):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        data = self.steps.data if self.model.training else self.data_of_evaluation()
        # To upstream it is a number that stays.
        with temporarily(self, entropy_coef=data[_COEF], use_adaptive_entropy=False):
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._entropy_sums is not None:
            if self.model.training:
                is_counted = inputs["completion_mask"].bool()
                for mask in (inputs.get("tool_mask"), self._high_entropy):
                    is_counted = is_counted if mask is None else is_counted & mask.bool()
                entropy = torch.where(is_counted, self._entropies, torch.zeros_like(self._entropies)).sum()
                self._entropy_sums.add(entropy=entropy, tokens=is_counted.sum())
            # A program that is replayed makes nothing else than its state.
            self._entropies = self._high_entropy = None
        return loss

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._entropy_sums is not None:
            self._entropies = result[1]
        return result

    def get_high_entropy_mask(self, *args, **kwargs) -> Tensor:
        mask = super().get_high_entropy_mask(*args, **kwargs)
        if self._entropy_sums is not None:
            self._high_entropy = mask
        return mask

    def _adapt_entropy_coef(self) -> None:
        """Decide on the coefficient of the next step, as upstream does, by the entropy of the one that has ended."""
        sums = self.backend.fetch(self._entropy_sums.tensors)
        self._entropy_sums.reset()
        of_process = [sums[name].item() for name in ("entropy", "tokens")]
        total, tokens = self.backend.processes.total(of_process)
        entropy = total / max(tokens, 1.0)
        args, coef = self.args, self.entropy_coef
        if entropy <= args.entropy_target:
            self.entropy_coef = min(coef + args.entropy_coef_delta, args.entropy_coef_max)
        else:
            self.entropy_coef = max(coef - args.entropy_coef_delta, args.entropy_coef_min)
        self._last_world_entropy = entropy
        self._coefs.append(self.entropy_coef)

    def log(self, logs, start_time=None) -> None:
        if self._coefs and self.model.training:
            self._metrics["train"][_COEF], self._coefs = self._coefs, []
        super().log(logs, start_time)


class _FollowEntropy(TrainerCallback):
    def __init__(self, adapt: Callable[[], None]):
        self._adapt = adapt

    def on_step_end(self, args, state, control, **kwargs):
        self._adapt()
