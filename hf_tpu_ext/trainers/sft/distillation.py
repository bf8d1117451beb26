"""Fine-tuning that also learns from a teacher."""

from functools import partial
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.trainer_utils import unwrap_peft_model

from ...distillation.cache import TeacherCache, cached_teacher, collate_with_teacher
from ...distillation.cache_format import MAKE
from ...distillation.fused_head import Distillation, Head, TokenTerms, distill
from ...distillation.losses import TopK
from ...distillation.teachers import OnlineTeacher, Teacher, anchor_teacher, check_vocabulary
from ...errors import UserError
from ...layers.autocast import matmul_dtype
from ...layers.chunked_head import head_computed_by
from ...quantization.fake_quantized import without_rounding
from ...sharding.per_chip import ShardToFull
from ..checkpoint.base_record import find_base_change
from ..checks.datasets import named_datasets
from ..configs import TPUSFTConfig
from ..run.index_ranges import IndexRanges


#: Names of what is logged on top, each the mean over the tokens of a batch.
KD_METRICS = ("ce_loss", "kd_loss", "teacher_coverage", "teacher_agreement")


def distills(args: Any) -> bool:
    """Whether arguments ask for a teacher."""
    return isinstance(args, TPUSFTConfig) and (args.kd_teacher is not None or args.kd_cache is not None)


class DistillationMixin:
    """
    The part of [`TPUSFTTrainer`] that learns from a teacher: `(1 - kd_alpha) * CE + kd_alpha * T**2 * KD`
    (https://huggingface.co/papers/1503.02531), both over the tokens with a label and normalised alike.

    It goes where TRL computes the log-probabilities of a batch, so that both terms and the metrics come from one pass
    over the logits, on XLA, CUDA and CPU alike.
    """

    teacher: Teacher | None = None

    def _prepare_teacher(self) -> None:
        args = self.args
        self._check_loss()
        if self.backend.unknown_upstream and self.backend.processes.own_rows and args.kd_cache is not None:
            raise UserError(
                f"kd_cache={args.kd_cache!r} is read by one process only with torch_tpu, and here are {self.backend.processes.count}. Set "
                "num_chips=1, or set kd_teacher=MODEL and leave kd_cache out."
            )
        vocab_size = None
        if args.kd_cache is not None:
            vocab_size = self._open_cache()
            self.teacher = cached_teacher
        elif args.kd_teacher == "base":
            if not isinstance(self.model, PeftModel):
                raise UserError(
                    "kd_teacher='base' is the student with its adapters switched off, but this student has none. Train with LoRA "
                    "(use_peft: true, or peft_config=LoraConfig(...)), or name the model to learn from: kd_teacher=MODEL. A student that "
                    "is rounded (qat_weight_dtype) can learn from its own base by that name."
                )
            student = unwrap_peft_model(self.model)
            if (change := find_base_change(self.model)) is not None:
                name = student.name_or_path or "MODEL"
                raise UserError(
                    f"kd_teacher='base' is the student with its adapters switched off, and with {change} that is not the model that "
                    f"training began with. Set kd_teacher={name!r}, which is loaded beside it, or leave {change} out."
                )
            self._check_top_k(student)
            self.teacher = anchor_teacher
        else:
            self.teacher = OnlineTeacher(self._load_teacher(args.kd_teacher))
            self._place_beside(self.teacher.model)
            if self.backend.static_shapes:
                self.find_lengths_asked_for()
        self._distillation = Distillation(args.kd_temperature, args.kd_loss, args.kd_beta, args.kd_top_k, vocab_size)
        if args.kd_cache is None:
            tokens = "all tokens" if args.kd_top_k is None else f"its top {args.kd_top_k} tokens"
            self.adapted.changes.append(f"teacher {args.kd_teacher}: {tokens} at temperature {args.kd_temperature:g}")

    def _check_loss(self) -> None:
        if self.compute_loss_func is not None:
            # What upstream computes beside it, for metrics, has no gradient, and it need not hold a cross-entropy.
            raise UserError(
                "Distillation mixes the teacher's loss with plain cross-entropy, and compute_loss_func replaces that. Leave "
                "compute_loss_func out, or leave kd_teacher and kd_cache out."
            )

    def _load_teacher(self, name: str) -> torch.nn.Module:
        student = unwrap_peft_model(self.model)
        if name == student.name_or_path and not isinstance(self.model, PeftModel) and self.rounding is None:
            raise UserError(
                f"kd_teacher={name!r} is the student itself. Set kd_teacher to another model, or train with LoRA (use_peft: true) and "
                "set kd_teacher='base', which holds the student to its base."
            )
        own_code = self.args.trust_remote_code
        check_vocabulary(AutoTokenizer.from_pretrained(name, trust_remote_code=own_code), self._tokenizer, name)
        self._check_top_k(student)
        # With compute in bfloat16 it stays as it is stored, usually in half the size of the student's weights.
        in_full = self.adapted.compute_dtype is None and not self.args.bf16
        dtype = student.get_output_embeddings().weight.dtype if in_full else "auto"
        teacher = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=own_code)
        self._check_top_k(teacher)
        return teacher

    def _check_top_k(self, model: PreTrainedModel) -> None:
        top_k, vocab_size = self.args.kd_top_k, model.get_output_embeddings().weight.shape[0]
        if top_k is not None and top_k > vocab_size:
            raise UserError(
                f"kd_top_k={top_k}, but the vocabulary of {model.name_or_path!r} has {vocab_size} tokens. Set kd_top_k to "
                f"1...{vocab_size}, or leave it out for all tokens."
            )

    def _open_cache(self) -> int:
        """Have batches hold what the teacher's cache says, over so many tokens."""
        args = self.args
        cache = TeacherCache(args.kd_cache, preload=args.kd_preload)
        self._check_teacher_of(cache)
        vocab_size = unwrap_peft_model(self.model).get_output_embeddings().weight.shape[0]
        warnings = cache.check(args.kd_temperature, args.kd_top_k, self._tokenizer, args.max_length, vocab_size)
        for name, dataset in named_datasets(vars(self)).items():
            if isinstance(dataset, Dataset):
                cache.check_dataset(dataset, name)
        manifest = cache.manifest
        top_k = manifest.top_k if args.kd_top_k is None else args.kd_top_k
        self.data_collator = partial(collate_with_teacher, self.data_collator, cache, args.kd_temperature, top_k)
        coverage = manifest.coverage[manifest.temperatures.index(args.kd_temperature)]
        # How much the top K hold is known of those that are cached alone.
        share = f", {coverage:.1%} of its mass" if top_k == manifest.top_k else f" of {manifest.top_k}"
        self.adapted.changes.append(
            f"teacher {manifest.teacher} from {args.kd_cache}: its top {top_k} tokens{share} at temperature {args.kd_temperature:g}"
        )
        self.adapted.changes.extend(warnings)
        return manifest.vocab_size

    def _check_teacher_of(self, cache: TeacherCache) -> None:
        student = unwrap_peft_model(self.model).name_or_path
        teacher = student if self.args.kd_teacher == "base" else self.args.kd_teacher
        if teacher not in (None, cache.manifest.teacher):
            raise UserError(
                f"kd_teacher={self.args.kd_teacher!r}, but kd_cache={self.args.kd_cache!r} was made by "
                f"{cache.manifest.teacher!r}. Leave kd_teacher out to use the cache as it is, or build another one: {MAKE} "
                f"DIR --kd_teacher {self.args.kd_teacher}"
            )
        if cache.manifest.teacher == student and not isinstance(self.model, PeftModel) and self.rounding is None:
            raise UserError(
                f"kd_cache={self.args.kd_cache!r} was made by {student!r}, the student itself. "
                "Train with LoRA (use_peft: true), which such a cache holds to its base, or build a cache of another teacher: "
                f"{MAKE} DIR --kd_teacher MODEL"
            )

    @property
    def _runs_other_passes(self) -> bool:
        return distills(self.args) and self.args.kd_cache is None

    def _more_ranges(self) -> list[IndexRanges]:
        if not isinstance(self.teacher, OnlineTeacher):
            return []
        fix = "Set kd_teacher to a model of the student's family"
        return [IndexRanges(self.teacher.model, labels=False, name="the teacher", more_rows=fix)]

    def other_models(self) -> list[torch.nn.Module]:
        models = super().other_models()
        return [*models, self.teacher.model] if isinstance(self.teacher, OnlineTeacher) else models

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.teacher is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        # The caller may have set a loss since.
        self._check_loss()
        mode = "train" if self.model.training else "eval"
        has_label = inputs["labels"][:, 1:].flatten() != -100
        # The student's own base is a teacher as it was before it was rounded.
        with torch.no_grad(), without_rounding(self.rounding):
            teacher = self.teacher(self.model, inputs)
        token_terms: list[TokenTerms] = []

        def score(hidden, weight, bias, targets, temperature, chunk_size, softcap, scale, outputs):
            of_tokens, tokens, chips = teacher, teacher[0].shape[0], self.backend.num_chips
            by_chip = chips > 1 and tokens == hidden.shape[0] * chips
            if by_chip:
                of_tokens = teacher.full_to_shard(self.backend)
            elif tokens != hidden.shape[0]:
                # On GPUs TRL scores the tokens with a label only.
                of_tokens = TopK(*(value[has_label] for value in teacher))
            student, dtype = Head(hidden, weight, bias, softcap, scale), matmul_dtype(hidden)
            terms = distill(student, targets, of_tokens, self._distillation, self.backend, dtype)
            token_terms.append(
                TokenTerms(*(ShardToFull.apply(term, self.backend) for term in terms)) if by_chip else terms
            )
            return terms.log_probs, terms.entropy, None, None, terms.is_top1

        with head_computed_by(score), self.metrics_deferred():
            result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            loss, outputs = result if return_outputs else (result, None)
            loss = self._mix(loss, token_terms[0], has_label, num_items_in_batch, mode)
        return (loss, outputs) if return_outputs else loss

    def _mix(
        self, loss: Tensor, terms: TokenTerms, has_label: Tensor, num_items_in_batch: Tensor | int | None, mode: str
    ) -> Tensor:
        alpha, temperature = self.args.kd_alpha, self.args.kd_temperature
        mask = has_label if terms.kd.shape == has_label.shape else torch.ones_like(terms.kd, dtype=torch.bool)

        def total(term: Tensor) -> Tensor:
            return torch.where(mask, term, torch.zeros_like(term)).sum()

        ce, kd = -total(terms.log_probs), total(terms.kd)
        num_tokens = has_label.sum() if num_items_in_batch is None else num_items_in_batch
        if isinstance(num_tokens, Tensor):
            num_tokens = num_tokens.clamp(min=1)
        # Upstream counts the tokens of all processes, whose gradients are averaged.
        processes = self.backend.processes.row_shards
        shares = processes if num_items_in_batch is not None and self.args.average_tokens_across_devices else 1
        # Upstream's loss holds the cross-entropy in full.
        mixed_loss = loss + alpha * shares * (temperature**2 * kd - ce) / num_tokens
        sums = (ce, kd, total(terms.coverage), total(terms.agreement), has_label.sum())
        *sums, tokens = (self.chips.over_chips(value.detach()) for value in sums)
        if processes > 1:
            *sums, tokens = (mean * processes for mean in self.backend.processes.mean([*sums, tokens]))
        for name, value in zip(KD_METRICS, sums, strict=True):
            mean = value / tokens.clamp(min=1)
            self._metrics[mode][name].append(mean if self.backend.metrics_on_device else mean.item())
        return mixed_loss
