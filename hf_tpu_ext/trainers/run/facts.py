"""What the start of a run prints about it, and what its record keeps."""

from collections.abc import Callable, Sized
from dataclasses import MISSING, asdict, fields
from importlib.metadata import version
from importlib.util import find_spec
from platform import python_version
from typing import Any

from datasets import Dataset, IterableDataset
from peft import PeftConfig, PeftModel
from torch import nn
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import unwrap_peft_model

from ... import __version__
from ...callbacks.run_lines import RunFacts
from ...data.padding_report import TokenWaste
from ...formatting import count, dtype_name, format_bytes
from ...quantization.bitsandbytes import find_config
from ...quantization.packed_linear import count_parameters, names_of_packed
from ..checks.datasets import named_datasets
from ..configs import ExtensionArguments


# What upstream makes of fields that were left out, where that is not their default.
_LEFT_OUT: dict[str, Callable[[Any], Any]] = {
    "activation_checkpointing": lambda args: bool(type(args).gradient_checkpointing),
    "bf16": lambda args: not args.fp16,
    "dataloader_pin_memory": lambda args: not args.use_cpu,
    "disable_tqdm": lambda args: False,
    "do_eval": lambda args: args.eval_strategy != "no",
    "eval_steps": lambda args: args.logging_steps,
    "generation_batch_size": lambda args: (
        args.per_device_train_batch_size * args.world_size * args.steps_per_generation
    ),
    # The former name of the first one.
    "gradient_checkpointing": lambda args: vars(args).get("activation_checkpointing"),
    "greater_is_better": lambda args: not args.metric_for_best_model.endswith("loss"),
    "metric_for_best_model": lambda args: "loss",
    "pad_to_multiple_of": lambda args: None,
    "steps_per_generation": lambda args: args.gradient_accumulation_steps,
}
# Of an adapter's config, what PEFT sets by itself.
_OF_THE_MODEL = ("auto_mapping", "base_model_name_or_path", "peft_type", "peft_version", "task_type")
_PACKAGES = ("torch", "torch_xla", "libtpu", "transformers", "trl", "accelerate", "peft", "datasets")


class RunFactsMixin:
    """The part of [`TPUTrainerMixin`] that says what a run is."""

    def find_facts(self) -> RunFacts:
        """What the start of a run prints, as the trainer and its datasets are by now."""
        args, backend, compiled = self.args, self.backend, self.compiled
        others = names_of_packed(self.model).union(*(frozen.names for frozen in self.frozen[:1]))
        dtypes = {
            dtype_name(parameter.dtype)
            for name, parameter in self.model.named_parameters()
            if parameter.is_floating_point() and name not in others
        }
        quantization = find_config(self.model)
        if quantization is not None:
            dtypes.add(quantization.quantization_method())
        compute = "bfloat16" if compiled.compute_dtype or args.bf16 else "float16" if args.fp16 else None
        precision = f"{'/'.join(sorted(dtypes))} weights" + (f", {compute} compute" if compute else "")
        lines = self.chips.lines(self.model, self.averaging.average is not None)
        lines += [*self.describe_frozen(), *self.averaging.lines(self.state.max_steps)]
        lines += compiled.changes
        lines += self._few_rows()
        facts = RunFacts(precision, self._train_batch_size, [], None, lines)
        rows = self.train_dataset
        # Those of a stream may not be known.
        columns = (rows.column_names or []) if isinstance(rows, (Dataset, IterableDataset)) else []
        facts.pairs = any(name.startswith("rejected") for name in columns)
        if backend.static_shapes and self.lengths:
            facts.lengths = self.step_lengths
            # Other columns hold several sequences of an example, as a pair does.
            if self._train_lengths is not None and "input_ids" in columns:
                waste = TokenWaste(
                    self._train_lengths,
                    self.lengths,
                    self._train_batch_size,
                    args.train_sampling_strategy,
                    packing=vars(args).get("packing"),
                )
                facts.lengths = list(waste.pad_share_per_length)
                facts.token_waste = waste.describe()
                buckets = args.length_buckets if isinstance(args, ExtensionArguments) else None
                if buckets and len(buckets) > 1 and (advice := waste.describe_unused(buckets)) is not None:
                    lines.append(advice)
                facts.token_share = 1 - waste.pad_share
            facts.programs = len(facts.lengths) * (2 if args.gradient_accumulation_steps > 1 else 1)
            facts.programs *= 2 if self.some_without_images else 1
        return facts

    def describe_frozen(self) -> list[str]:
        """A line on the memory of frozen weights, if they take less."""
        num_bytes = sum(frozen.num_bytes for frozen in self.frozen)
        if not num_bytes:
            return []
        whole = format_bytes(2 * num_bytes)
        return [f"frozen weights in bfloat16 (exact): {format_bytes(num_bytes)} of HBM instead of {whole}"]

    def _few_rows(self) -> list[str]:
        """A line where an optimizer step has more rows than there are. Trainers that generate repeat their prompts."""
        rows, total = self.train_dataset, self.get_total_train_batch_size(self.args)
        if self.generates or not isinstance(rows, Sized) or len(rows) >= total:
            return []
        return [
            f"train_dataset has {count(len(rows), 'row')}, fewer than the global batch size of {total}: each step has only these. Lower "
            "per_device_train_batch_size or gradient_accumulation_steps"
        ]

    def describe_run(self, args: TrainingArguments, facts: RunFacts | None) -> dict[str, Any]:
        """What the record of a run says of it, as JSON: the arguments as they were given, the facts as it began."""
        model, backend, config = unwrap_peft_model(self.model), self.backend, args.to_dict()
        adapter, datasets = _settings_of_adapter(self.model), named_datasets(vars(self))
        own_code = self.describe_own_code()
        parameters, num_trained = count_parameters(self.model)
        return {
            "versions": find_versions(),
            "arguments": config | adapter | own_code,
            "changed": sorted([*adapter, *own_code, *(name for name in _changed_fields(args) if name in config)]),
            "model": {
                "name": model.config.name_or_path if isinstance(model, PreTrainedModel) else type(model).__name__,
                "parameters": parameters,
                "trained": num_trained,
            },
            "datasets": {
                name: dataset.info.dataset_name for name, dataset in datasets.items() if isinstance(dataset, Dataset)
            },
            "rows": {name: len(dataset) for name, dataset in datasets.items() if isinstance(dataset, Sized)},
            "backend": {
                "name": backend.name,
                "device": backend.device_name,
                "reason": backend.reason,
                "chips": backend.num_chips * self.args.world_size,
                "hosts": backend.processes.hosts,
                "processes": max(self.args.world_size, backend.processes.count),
                "memory_per_chip": backend.memory_per_chip,
            },
            "facts": asdict(self.find_facts() if facts is None else facts),
        }


def find_versions() -> dict[str, str]:
    """Versions of Python, this package and those that it builds on."""
    versions = {name: version(name) for name in _PACKAGES if find_spec(name) is not None}
    return {"python": python_version(), "hf_tpu_ext": __version__, **versions}


def _changed_fields(settings: TrainingArguments | PeftConfig) -> list[str]:
    """Names of the fields whose value a person has set: it is not the one that they have when they are left out."""
    names = []
    for field in fields(settings):
        value = vars(settings)[field.name]
        default = field.default if field.default_factory is MISSING else field.default_factory()
        # Upstream makes the last two of what was left out, too.
        if value == default or value == [] or isinstance(value, AcceleratorConfig):
            continue
        if field.name not in _LEFT_OUT or value != _LEFT_OUT[field.name](settings):
            names.append(field.name)
    return names


def _settings_of_adapter(model: nn.Module) -> dict[str, Any]:
    """
    What a person has set of the adapter that is trained, as `peft_config.lora_alpha`, and its rank, also the default; nothing
    without one.
    """
    if not isinstance(model, PeftModel):
        return {}
    config = model.peft_config[model.active_adapter]
    # AdaLoRA begins with another one than `r`.
    rank = "init_r" if "init_r" in vars(config) else "r"
    names = {rank, *_changed_fields(config)}.difference(_OF_THE_MODEL)
    values = {name: value for name, value in vars(config).items() if name in names}
    return {
        f"peft_config.{name}": sorted(value) if isinstance(value, set) else value for name, value in values.items()
    }
