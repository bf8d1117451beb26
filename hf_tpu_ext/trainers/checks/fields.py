"""
What becomes of each field of upstream's arguments on a device that compiles: one table, whose rows are applied in its order.
The checks before a run, the lines at its start and docs/configuration.md are made of it.
"""

import copy
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import datasets
import torch
from peft import PeftModel
from transformers import TrainingArguments
from transformers.trainer_utils import IntervalStrategy, has_length
from transformers.training_args import OptimizerNames
from trl import DPOConfig, GRPOConfig, KTOConfig, SFTConfig

from ..configs import NO_DEEPSPEED
from . import adaptations
from .adaptations import ADAMW_NAMES, HOST_SCALAR_NAMES
from .datasets import has_images
from .field_answers import AdaptedArguments, Place, Row, Run, at, refusal, replacement, without_effect, works
from .own_fields import OWN, WEIGHTS_IN_PARTS, is_set


# Optimizers whose class is of `torch.optim`, which takes no negative rate. Adafactor does.
_REFUSE_NEGATIVE_RATES = ADAMW_NAMES | HOST_SCALAR_NAMES - {OptimizerNames.ADAFACTOR}
# Losses of DPO that sort the pairs, that are one number for all of them, or that PyTorch needs as they were.
_NOT_WEIGHTED = {"aot", "aot_unpaired", "hinge", "sft"}
#: By config. Upstream looks at most of these names in the first step only.
LOSSES = {
    DPOConfig: "sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero apo_down discopop sft "
    "sigmoid_norm".split(),
    GRPOConfig: "grpo dr_grpo dapo bnpo cispo sapo luspo vespo".split(),
    KTOConfig: KTOConfig.__dataclass_fields__["loss_type"].metadata["choices"],
}


def _never(value: Any, run: Run) -> bool:
    return False


def _trains(run: Run) -> bool:
    return run.trainer_kwargs.get("train_dataset") is not None


def _has_adapter(run: Run) -> bool:
    return run.trainer_kwargs.get("peft_config") is not None or isinstance(run.trainer_kwargs.get("model"), PeftModel)


def _makes_optimizer(run: Run) -> bool:
    return not (run.trainer_kwargs.get("optimizers", (None,))[0] or run.trainer_kwargs.get("optimizer_cls_and_kwargs"))


def _is_no_loss(config: type[TrainingArguments], value: list[str] | str, run: Run) -> bool:
    names = value if isinstance(value, list) else [value]
    return isinstance(run.args, config) and not run.overrides_loss and not set(names) <= set(LOSSES[config])


def _has_no_end(max_steps: int, run: Run) -> bool:
    dataset = run.trainer_kwargs.get("train_dataset")
    return (
        max_steps <= 0
        and isinstance(dataset, (datasets.IterableDataset, torch.utils.data.IterableDataset))
        and not has_length(dataset)
    )


def _is_no_length(max_length: int | None, run: Run) -> bool:
    if max_length is None or max_length > 0:
        return False
    # An eager device takes a negative one of TRL for so many tokens to leave out at the end of each row.
    eager = not run.place.static_shapes and isinstance(run.args, SFTConfig) and not run.args.packing
    return max_length == 0 or not eager


WORK = (
    works("batches", "per_device_eval_batch_size gradient_accumulation_steps auto_find_batch_size"),
    works("batches", "per_device_train_batch_size", follows=False),
    works("steps", "num_train_epochs max_steps"),
    works("schedule", "learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps"),
    works("optimizer", "weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm"),
    works("random numbers", "seed data_seed full_determinism"),
    works("loss", "label_smoothing_factor neftune_noise_alpha", follows=False),
    works("loss", "average_tokens_across_devices use_cache"),
    works(
        "data",
        "dataloader_drop_last dataloader_num_workers dataloader_persistent_workers dataloader_prefetch_factor dataloader_in_order "
        "dataloader_multiprocessing_context remove_unused_columns label_names train_sampling_strategy length_column_name",
    ),
    works("data", "accelerator_config", adapt=adaptations.share_rows),
    works(
        "logs",
        "logging_strategy logging_steps logging_first_step log_level log_level_replica log_on_each_node disable_tqdm run_name project "
        "trackio_space_id trackio_bucket_id trackio_static_space_id skip_memory_metrics debug",
    ),
    # Batches are counted as they are collated.
    works("logs", "report_to include_num_input_tokens_seen", follows=False),
    works(
        "evaluation",
        "do_train do_eval do_predict eval_strategy eval_steps eval_delay eval_on_start eval_accumulation_steps prediction_loss_only "
        "eval_do_concat_batches eval_use_gather_object batch_eval_metrics include_for_metrics metric_for_best_model greater_is_better "
        "load_best_model_at_end",
    ),
    works("evaluation", "predict_with_generate", follows=False),
    works("evaluation", "generation_max_length generation_num_beams generation_config"),
    works(
        "checkpoints",
        "output_dir save_strategy save_steps save_total_limit save_only_model resume_from_checkpoint ignore_data_skip "
        "restore_callback_states_from_checkpoint",
    ),
    works("hub", "push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_always_push hub_revision"),
    works("device", "use_cpu", follows=False),
    works("device", "bf16", follows=False, adapt=adaptations.compute_in_bfloat16),
    works("models", "trust_remote_code teacher_model_name_or_path teacher_model_revision teacher_model_init_kwargs"),
    *at(lambda place: not place.runs_gpu_kernels, works("models", "model_init_kwargs", adapt=adaptations.load_model)),
    works(
        "text",
        "dataset_num_proc dataset_text_field dataset_kwargs chat_template_path chat_template_kwargs eos_token pad_token "
        "pad_to_multiple_of max_length truncation_mode packing packing_strategy eval_packing shuffle_dataset",
    ),
    works(
        "losses of TRL",
        "loss_type completion_only_loss assistant_only_loss router_aux_loss_coef beta label_smoothing loss_weights discopop_tau "
        "f_divergence_type f_alpha_divergence_coef ld_alpha use_weighting desirable_weight undesirable_weight "
        "center_rewards_coefficient disable_dropout",
    ),
    works(
        "reference models",
        "precompute_ref_log_probs precompute_ref_batch_size sync_ref_model ref_model_mixup_alpha ref_model_sync_steps",
    ),
    works(
        "losses of GRPO and RLOO",
        "num_iterations epsilon epsilon_high delta importance_sampling_level scale_rewards reward_weights multi_objective_aggregation "
        "mask_truncated_completions top_entropy_quantile use_bias_correction_kl off_policy_mask_threshold cast_lm_head_to_fp32 "
        "normalize_advantages reward_clip_range entropy_coef use_adaptive_entropy entropy_target entropy_coef_min entropy_coef_max "
        "entropy_coef_delta sapo_temperature_neg sapo_temperature_pos vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos",
    ),
    works(
        "completions",
        "num_generations num_generations_eval generation_batch_size steps_per_generation max_completion_length temperature top_p top_k "
        "min_p repetition_penalty generation_kwargs log_completions log_completions_hub_repo num_completions_to_print "
        "log_unique_prompts",
    ),
)

REFUSED_ANYWHERE = at(
    lambda place: True,
    refusal(
        "per_device_train_batch_size",
        "is not positive. Set it to 1 or more, for example per_device_train_batch_size=8.",
        values="below 1",
        when=lambda value, run: value < 1 and _trains(run),
    ),
    refusal(
        "gradient_accumulation_steps",
        "is not positive. Set it to 1 to update the weights after every batch, or to more, for example "
        "gradient_accumulation_steps=4.",
        values="below 1",
        # Upstream takes a negative number for no steps at all.
        when=lambda value, run: _trains(run) and (value == 0 or (value < 0 and run.place.static_shapes)),
    ),
    refusal(
        "max_steps",
        "is no number of steps, and train_dataset is a stream, whose number of rows is not known. Set it to when training is to end, for "
        "example max_steps=1000.",
        values="below 1, with a stream",
        when=_has_no_end,
    ),
    refusal(
        "learning_rate",
        "is negative, which optim={args.optim.value} does not take. Set a rate above 0, for example learning_rate=2e-5.",
        values="below 0",
        when=lambda value, run: (
            value < 0 and _trains(run) and _makes_optimizer(run) and run.args.optim in _REFUSE_NEGATIVE_RATES
        ),
    ),
    refusal(
        "per_device_eval_batch_size",
        "is not positive, and eval_strategy asks for evaluations. Set it to 1 or more, for example per_device_eval_batch_size=8.",
        values="below 1",
        when=lambda value, run: value < 1 and run.args.eval_strategy != IntervalStrategy.NO,
    ),
    refusal(
        "max_length",
        "is not positive. Set it to the longest sequence that you want to keep, in tokens, for example max_length=1024.",
        values="of 0, and below on XLA or with packing",
        when=_is_no_length,
    ),
    *(
        refusal(
            "loss_type",
            f"is no loss of {config.__name__.removesuffix('Config')}. Allowed: {', '.join(names)}.",
            values=f"another one of `{config.__name__}`",
            when=partial(_is_no_loss, config),
        )
        for config, names in LOSSES.items()
    ),
    refusal(
        "use_weighting",
        f"does not work with the losses {', '.join(sorted(_NOT_WEIGHTED))}, whose values for the pairs of a batch it cannot multiply "
        "by their weights; here loss_type={args.loss_type}. Take that loss out of loss_type, or set use_weighting=False.",
        values="with some losses",
        when=lambda value, run: value and isinstance(run.args, DPOConfig) and _NOT_WEIGHTED & set(run.args.loss_type),
    ),
    refusal(
        "sync_ref_model",
        "does not work in TRL with LoRA. Set sync_ref_model=False, or train all weights.",
        values="with LoRA",
        when=lambda value, run: value and _has_adapter(run),
    ),
    refusal(
        "ref_model_sync_steps",
        "is not positive. Set it to 1 or more, for example ref_model_sync_steps=512, or set sync_ref_model=False.",
        values="below 1",
        when=lambda value, run: value < 1 and run["sync_ref_model"],
    ),
    refusal(
        "output_dir",
        "is an address, which would be a directory of that name on the local disk. Mount the bucket, and set output_dir to a "
        "directory in it, for example output_dir=/mnt/bucket/runs.",
        values="an address such as `gs://bucket/runs`",
        when=lambda value, run: "://" in str(value),
    ),
    refusal(
        "accelerator_config",
        "has `split_batches`, by which processes share a batch. Leave it out, and divide the batch sizes by the processes.",
        values="`split_batches` in several processes",
        adapt=adaptations.check_split_batches,
    ),
    refusal(
        "optim",
        "is of bitsandbytes, which is not installed: pip install bitsandbytes. Or set optim='adamw_torch'.",
        values="of bitsandbytes, on CUDA and CPU without it",
        when=adaptations.lacks_bitsandbytes,
    ),
    refusal(
        "report_to",
        "names a service whose package is not installed; the message says which to install.",
        values="without its package",
        adapt=adaptations.check_integrations,
    ),
)

REFUSED_ON_XLA = (
    refusal("fp16", "does not work on XLA: TPUs compute in bfloat16. Set bf16=True and fp16=False."),
    refusal("deepspeed", NO_DEEPSPEED.removeprefix("deepspeed ")),
    refusal(
        "parallelism_config",
        "does not work on XLA, where one process drives all chips. Leave it out: mesh='fsdp' or mesh='data=2,fsdp=4' says how they "
        "share the work.",
    ),
    refusal(
        "max_length",
        "does not work on XLA, where every new length recompiles the step. Set max_length to the longest sequence that you want to "
        "keep, in tokens, for example max_length=1024.",
        values="`None` of `SFTConfig`, of text",
        when=lambda value, run: (
            value is None
            and isinstance(run.args, SFTConfig)
            and not has_images(run.trainer_kwargs.get("train_dataset"))
        ),
    ),
    refusal(
        "use_vllm",
        "does not work on XLA: vLLM cannot be given the weights of a model that trains on XLA. Set use_vllm=False: completions are "
        "generated by compiled programs, with the weights in place.",
        beside="vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port vllm_max_model_length "
        "vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_structured_outputs_regex "
        "vllm_tensor_parallel_size vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min "
        "vllm_importance_sampling_correction vllm_importance_sampling_mode",
    ),
    refusal(
        "use_transformers_paged",
        "does not work on XLA: its pages have other shapes at every call, each of which compiles. Set use_transformers_paged=False: "
        "completions are generated with a static cache.",
    ),
    refusal(
        "use_transformers_continuous_batching",
        "does not work on XLA: its batches have other shapes at every call, each of which compiles. Set "
        "use_transformers_continuous_batching=False: completions are generated with a static cache.",
        beside="transformers_continuous_batching_config",
    ),
    refusal(
        "tools environment_factory",
        "does not work on XLA: conversations with tools have other lengths at every turn, each of which compiles. Leave it out, and "
        "train on prompts, or use a rollout_func that runs the whole conversation.",
        when=is_set,
    ),
)

REPLACED = (
    replacement(
        "optim",
        "AdamW inside the step's program, where it is AdamW. An 8-bit or paged one (`adamw_8bit`, `adamw_bnb_8bit`, "
        "`paged_adamw_8bit`, `paged_adamw_32bit`, `adamw_torch_4bit`, `adamw_torch_8bit`) has moments of the weights' dtype, on the "
        "chips; so has RMSprop (`rmsprop_bnb`, `rmsprop_bnb_8bit`, `rmsprop_bnb_32bit`). `sgd`, `adagrad`, `rmsprop` and `adafactor` are PyTorch's and "
        "transformers' own. Others, of custom kernels, are refused.",
        beside="optim_args optim_target_modules",
        adapt=adaptations.choose_optimizer,
        follows=True,
    ),
    replacement(
        "gradient_checkpointing activation_checkpointing",
        "`rematerialization` of whole layers. Of their options, `selective`, `offload` and `context_fn` are refused.",
        beside="gradient_checkpointing_kwargs activation_checkpointing_kwargs",
        adapt=adaptations.checkpoint_activations,
    ),
    *at(
        lambda place: place.static_shapes and not place.traces_steps,
        refusal(
            "fsdp",
            "shards by accelerate, which does not know the chips of torch_tpu. Leave it out, and set mesh='fsdp', which shards the "
            "weights over them.",
            values="with torch_tpu",
            when=is_set,
        ),
    ),
    replacement(
        "fsdp",
        "`mesh='fsdp'`. Options without a meaning on XLA are refused.",
        beside="fsdp_config",
        adapt=adaptations.shard_over_chips,
    ),
    replacement(
        "padding_free",
        "padding to a static length (same loss); length_buckets pad less, and packing=True of SFTConfig hardly at all",
        becomes=False,
    ),
    # Upstream's loop would read the loss of every micro-step.
    replacement(
        "logging_nan_inf_filter",
        "a filter on the device with the same result; a line names the first step whose loss is not finite. With `False`, a NaN is "
        "in the log of its steps; upstream's later logs are all NaN",
        when=_never,
        becomes=False,
    ),
)

WITHOUT_EFFECT = (
    *at(
        lambda place: place.static_shapes and place.traces_steps,
        without_effect("save_on_each_node", "the first host writes for all", values="with torch_xla", becomes=False),
    ),
    without_effect("fp16_full_eval", "evaluation computes as training does", becomes=False),
    without_effect("bf16_full_eval", "with bf16=True, evaluation already computes in bfloat16", becomes=False),
    without_effect(
        "torch_compile",
        "the step is compiled by XLA",
        beside="torch_compile_backend torch_compile_mode",
        becomes=False,
    ),
    *at(
        lambda place: not place.runs_gpu_kernels,
        without_effect("use_liger_kernel", "its kernels are for GPUs", beside="liger_kernel_config", becomes=False),
        without_effect("tf32", "it is a format of GPUs", when=lambda value, run: value, becomes=None),
    ),
    without_effect("activation_offloading", "gradient_checkpointing saves memory on XLA", becomes=False),
    *at(
        lambda place: not (place.static_shapes or place.runs_gpu_kernels),
        without_effect(
            "activation_offloading",
            "activations are in the host's memory",
            values="on the CPU without XLA",
            becomes=False,
        ),
    ),
    without_effect("torch_empty_cache_steps", "XLA plans the memory of a step when it compiles it", becomes=None),
    without_effect(
        "ddp_backend ddp_timeout ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph local_rank",
        "the program of a step adds up the gradients of all chips",
    ),
    *at(
        lambda place: not place.static_shapes,
        without_effect(
            "ddp_backend",
            "there is one process",
            values="in one process",
            when=lambda value, run: value is not None and run.args.world_size == 1,
        ),
    ),
    without_effect("dataloader_pin_memory", "pinned memory is for CUDA", when=_never, becomes=False),
    *at(lambda place: True, without_effect("enable_jit_checkpoint", "a signal to stop saves in any case")),
    without_effect(
        "cache_implementation",
        "the cache of generation is static on XLA",
        when=lambda value, run: value not in (None, "static"),
    ),
    without_effect("ds3_gather_for_generation", "it is for DeepSpeed, which does not run on XLA"),
    without_effect("max_tool_calling_iterations", "tools do not work on XLA"),
    without_effect("log_multimodal", "GRPO and RLOO take no images on XLA"),
    without_effect(
        "sortish_sampler", "transformers reads it no more; train_sampling_strategy='group_by_length' does that"
    ),
)

#: The rows of upstream's fields.
FIELDS: tuple[Row, ...] = WORK + REFUSED_ANYWHERE + REFUSED_ON_XLA + REPLACED + WITHOUT_EFFECT


def adapt(
    args: TrainingArguments,
    place: Place,
    trainer_kwargs: Mapping[str, Any] = MappingProxyType({}),
    loads_model: bool = False,
    overrides_loss: bool = False,
) -> AdaptedArguments:
    """
    Adapt arguments, which are not changed, to the place where they are to run, by the table. The others are those of [`Run`].
    Returns a copy that is changed, with a line for each change.

    Raises:
        `ValueError`: A value is refused. The message says what to set instead.
    """
    args = copy.copy(args)
    # Upstream's trainers change the values of these in place.
    args.accelerator_config = copy.copy(args.accelerator_config)
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs", "model_init_kwargs"):
        if isinstance(vars(args).get(name), dict):
            setattr(args, name, dict(vars(args)[name]))
    run = Run(AdaptedArguments(args), place, trainer_kwargs, loads_model, overrides_loss)
    for row in FIELDS + OWN + WEIGHTS_IN_PARTS:
        row.apply(run)
    return run.adapted
