"""Training on the completions that are rewarded: what is computed of them beside the training steps."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.utils import logging

from ...data.buckets import round_up_length
from ...errors import UserError
from ...generation.generator import are_in_groups
from ...layers.chunked_head import head_wrapped_by
from ...layers.random_numbers import RandomNumbers
from ...layers.shared_prompts import SharedPrompts, prompts_shared
from ...step.selected_rows import nanmax_of_all, nanmin_of_all, quantile_of_chosen
from ...temporarily import temporarily
from ..checks.upstream import upstream_names
from .arguments import count_rows_of_chips
from .reward_functions import RewardsOnDevice, check_rewards
from .rollouts import RolloutMixin, join_completions
from .shared_prompts import leave_in_order, sharing_setting, shuffle_groups, why_not_shared


logger = logging.get_logger(__name__)

#: What the watch calls the programs of log-probabilities and rewards, which run beside the training steps.
SCORING, REFERENCE, REWARD = "scoring pass", "reference pass", "reward pass"
#: Appended to the name of one whose model is in evaluation mode.
OF_EVALUATION = " of an evaluation"
# The methods of a trainer whose code runs in them: what upstream computes log-probabilities with.
_METHODS = ("_get_per_token_logps_and_entropies",)
# Whether the adapters of a model are those of the reference, or off.
_with_adapter_of_reference = ContextVar("with_adapter_of_reference", default=False)


class RewardedMixin(RolloutMixin):
    """
    The part of [`TPUGRPOTrainer`] and [`TPURLOOTrainer`] that runs models over completions, without gradients, and calls reward
    functions, which are checked.

    Upstream asks for it on the host. The rows of all completions go through a program of static shape, as many at a time as a step
    has, and what it makes is read once.
    """

    # The line that says whether layers read a prompt once.
    _said_of_sharing: str | None = None

    # ---- Setting up ----

    def _arrange_batches(self) -> None:
        super()._arrange_batches()
        if self.backend.static_shapes:
            count_rows_of_chips(self.adapted.args, self.backend.num_chips * self.backend.processes.row_shards)

    def _finish_set_up(self) -> None:
        super()._finish_set_up()
        self._decide_sharing()
        if not self.backend.static_shapes:
            return
        length = self.lengths[-1] + self.max_completion_length
        for index, function in enumerate(self.reward_funcs):
            if isinstance(function, PreTrainedModel):
                kind = f"{REWARD} {self.reward_func_names[index]}"
                # Templates of another tokenizer take other tokens.
                self.reward_funcs[index] = RewardsOnDevice(
                    function, round_up_length(length + 16, 2 * length), partial(self._reward, kind, function)
                )
                self._place_beside(function)

    def _reward(self, kind: str, model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
        """The score of each row of a batch on the host, by a reward model on the device."""

        def score(batch: dict[str, Tensor]) -> Tensor:
            with self.models_in_static_shapes():
                return model(**batch).logits[:, 0].float()

        return self.run_passes(kind, model, batch, score)

    def _why_not_shared(self, model: nn.Module) -> str | None:
        """Why a model is to read a prompt once for each of its completions, as a clause."""
        args, setting = self.args, sharing_setting(self.args)
        if setting == "off":
            return "share_prompts=off"
        if args.steps_per_generation > 1 and setting == "auto":
            return (
                f"they are shuffled over several batches with steps_per_generation={args.steps_per_generation} "
                "(share_prompts=on shuffles whole prompts)"
            )
        if self._train_batch_size % (self.num_generations * self.backend.num_chips):
            return (
                f"per_device_train_batch_size={args.per_device_train_batch_size} is no multiple of "
                f"num_generations={self.num_generations}"
            )
        # It may look at the rows of a batch.
        own_code = self.own_code_in_step("train" if self.model.training else "eval")
        return own_code or why_not_shared(model, setting)

    def _decide_sharing(self) -> None:
        setting = sharing_setting(self.args)
        #: Whether layers read a prompt once for all its completions.
        self.shares_prompts = False
        if not self.backend.traces_steps:
            return
        reason = self._why_not_shared(self.model)
        if reason is not None and setting == "on":
            raise UserError(f"share_prompts='on' is not possible: {reason}. Leave it out, or set it to 'auto'.")
        self.shares_prompts = reason is None
        changes, said = self.adapted.changes, self._said_of_sharing
        self._said_of_sharing = (
            "layers read a prompt once for all its completions"
            if reason is None
            else f"layers read a prompt again for each of its completions: {reason}"
        )
        changes[:] = [*(change for change in changes if change != said), self._said_of_sharing]

    def _keep_generation(self, rows: int, num_workers: int) -> None:
        super()._keep_generation(rows, num_workers)
        # By the batches of a generation that there are now.
        self._decide_sharing()

    def settings_of_programs(self) -> Hashable:
        return super().settings_of_programs(), self.shares_prompts

    # ---- Passes of a model ----

    def run_passes(
        self,
        kind: str,
        model: nn.Module,
        batch: dict[str, Tensor],
        compute: Callable[[dict[str, Tensor]], Tensor],
        rows_at_once: int | None = None,
    ) -> Tensor:
        """
        Compute a value for each row of a batch on the host, or several, by passes over so many rows: by default those of a step.
        `compute` has the values of some rows on the device; those of all, which are read once, are returned on the host. Passes of
        one `kind` compute the same with one model, whose adapters are the same.
        """
        rows_per_pass = rows_at_once or (self._train_batch_size if self.model.training else self.args.eval_batch_size)
        key = kind, model.training
        if (compiled := self.programs.of_run.get(key)) is None:

            def compute_seeded(data: dict[str, dict[str, Tensor]]) -> Tensor:
                with RandomNumbers(data["numbers"]["seed"]):
                    return compute(data["batch"])

            compiled = self.programs.compile(compute_seeded, [model], _METHODS, training=model.training)
            self.programs.of_run[key] = compiled
        run = partial(self.programs.end, kind, f"step {self.programs.steps_done + 1}")
        rows, values = len(batch["input_ids"]), []
        for start in range(0, rows, rows_per_pass):
            part = {key: value[start : start + rows_per_pass] for key, value in batch.items()}
            missing = rows_per_pass - len(part["input_ids"])
            # For the last part to be the same program: each row is by itself.
            part = {key: torch.cat([value, value[-1:].expand(missing, -1)]) for key, value in part.items()}
            seed, whole = {"seed": self.seeds.beside(start)}, rows_per_pass % self.backend.num_chips != 0
            with self.copies.unwatched():
                values.append(compiled(self._send_rows(part, rows_per_pass, seed, whole), run))
        return torch.cat(self.backend.fetch(values))[:rows]

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, *args, **kwargs
    ):
        compute = super()._get_per_token_logps_and_entropies
        if not self.backend.static_shapes:
            return compute(model, input_ids, attention_mask, logits_to_keep, batch_size, *args, **kwargs)
        if input_ids.device.type == self.backend.device.type:
            if self._group > 1 and self._why_not_shared(model) is None:
                return self._score_shared(compute, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
            with head_wrapped_by(partial(_only_completions, logits_to_keep, input_ids.shape, None)):
                return compute(model, input_ids, attention_mask, logits_to_keep, batch_size, *args, **kwargs)
        split = input_ids.shape[1] - logits_to_keep
        batch = {
            "prompt_ids": input_ids[:, :split],
            "prompt_mask": attention_mask[:, :split],
            "completion_ids": input_ids[:, split:],
            "completion_mask": attention_mask[:, split:],
        }
        self._check_groups(batch)
        batch = self._pad_batch(batch, self._width_of(batch))
        ids, mask = join_completions(batch)
        is_reference = _with_adapter_of_reference.get() or model is self.ref_model
        kind = REFERENCE if is_reference else SCORING
        if not self.model.training:
            # Another program, of rows of the same shape: prompts may be shared by fewer rows, and layers draw nothing.
            kind += OF_EVALUATION
        log_probs = self.run_passes(
            kind,
            model,
            {"input_ids": ids, "attention_mask": mask},
            partial(self._score, model),
            batch_size * self.backend.num_chips,
        )
        return log_probs[:, :logits_to_keep], None, None

    def _score_shared(
        self,
        compute: Callable,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args,
        **kwargs,
    ) -> tuple[Tensor | None, ...]:
        """What `compute` finds for rows in groups of a prompt, whose prompts go through the layers once."""
        length, group = input_ids.shape[1], self._group
        shared = SharedPrompts(length - logits_to_keep, group)
        ids, mask = shared.pack(input_ids), shared.pack(attention_mask)
        # Upstream leaves positions to the model, which counts those of a row.
        model_at_positions = partial(model, position_ids=shared.positions(length, ids.device))
        with (
            head_wrapped_by(partial(_only_completions, group * logits_to_keep, ids.shape, shared)),
            prompts_shared(shared),
        ):
            results = compute(model_at_positions, ids, mask, group * logits_to_keep, None, *args, **kwargs)
        return tuple(
            None if value is None else value.unflatten(1, (group, logits_to_keep)).flatten(0, 1) for value in results
        )

    @property
    def _group(self) -> int:
        """How many completions layers read their prompt once for."""
        if not self.shares_prompts:
            return 1
        if self.model.training:
            return self.num_generations
        group = self.num_generations_eval
        return 1 if self.args.eval_batch_size % (group * self.backend.num_chips) else group

    def _check_groups(self, batch: dict[str, Tensor]) -> None:
        """Have layers read a prompt with each completion from here on, where those of a batch do not come in groups."""
        if self._group > 1 and not are_in_groups(batch["prompt_ids"], batch["prompt_mask"], self._group):
            self.shares_prompts = False
            logger.warning(
                "Layers read a prompt again for each of its completions from here on: code of yours gave the completions of a prompt "
                "other prompts."
            )

    def _score(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad(), self.compute_loss_context_manager(), self.models_in_static_shapes():
            log_probs, _, _ = self._get_per_token_logps_and_entropies(
                model, batch["input_ids"], batch["attention_mask"], self.max_completion_length
            )
        return log_probs

    @contextmanager
    def _on_host(self) -> Iterator[None]:
        names = {"use_adapter": _note_reference}
        if self.shares_prompts:
            whole = self.args.steps_per_generation == 1
            names["shuffle_sequence_dict"] = leave_in_order if whole else partial(shuffle_groups, self.num_generations)
        with super()._on_host(), upstream_names(type(self), **names):
            yield

    def _arrange_rows(self, batch: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        if self.backend.processes.one_program:
            # Rewards may be drawn, asked for elsewhere, or depend on what a host has time for.
            own = batch["advantages"]
            advantages = self.backend.processes.of_first("the rewards of completions", own.tolist())
            batch = {**batch, "advantages": torch.tensor(advantages, dtype=own.dtype)}
        self._check_groups(batch)
        return batch

    # ---- Rewards ----

    def prepare_reward(self, function: Callable, name: str) -> Callable:
        """The reward function that is called in place of one of the user's. Models are not asked about."""
        return check_rewards(function, name)

    def _calculate_rewards(self, *args, **kwargs):
        functions = [
            function if isinstance(function, nn.Module) else self.prepare_reward(function, name)
            for function, name in zip(self.reward_funcs, self.reward_func_names, strict=True)
        ]
        with temporarily(self, reward_funcs=functions):
            return super()._calculate_rewards(*args, **kwargs)

    # ---- The loss ----

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        names = {"nanmin": nanmin_of_all, "nanmax": nanmax_of_all} if self.backend.static_shapes else {}
        with upstream_names(type(self), **names):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        if entropies.device.type in ("cpu", "cuda"):
            # The tensors tell where this runs: upstream calls it on an object that is no trainer yet.
            return super().get_high_entropy_mask(entropies, mask, threshold)
        is_token, gather = mask.bool(), self.backend.processes.gather
        quantile = quantile_of_chosen(gather(entropies.float()), gather(mask).bool(), threshold)
        return (entropies >= quantile) & is_token


@contextmanager
def _note_reference(model: nn.Module, adapter_name: str | None, use_adapter: Callable) -> Iterator[None]:
    """Upstream's `use_adapter`, within which a model is the reference."""
    with use_adapter(model, adapter_name):
        token = _with_adapter_of_reference.set(True)
        try:
            yield
        finally:
            _with_adapter_of_reference.reset(token)


def _only_completions(
    logits_to_keep: int, shape: torch.Size, shared: SharedPrompts | None, score: Callable
) -> Callable:
    """
    Have the head score the last `logits_to_keep` tokens of rows, packed ones if they are `shared`, whose ids are of `shape`. Upstream leaves
    out the scores of prompts later, where it cannot leave out the tokens.
    """
    rows, length = shape[0], shape[1] - 1

    def score_completions(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *settings: Any
    ) -> tuple:
        hidden = hidden.view(rows, length, -1)
        hidden = hidden[:, length - logits_to_keep :] if shared is None else shared.before_completions(hidden)
        hidden = hidden.reshape(rows * logits_to_keep, -1)
        targets = targets.view(rows, length)[:, length - logits_to_keep :].reshape(-1)
        return tuple(
            None if value is None else pad(value.view(rows, logits_to_keep), (length - logits_to_keep, 0)).view(-1)
            for value in score(hidden, weight, bias, targets, *settings)
        )

    return score_completions
