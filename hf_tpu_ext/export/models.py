"""What a run has left: a model, or an adapter and the name of its base."""

import json
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel, TaskType
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import CONFIG_NAME as ADAPTER_CONFIG_NAME
from peft.utils import SAFETENSORS_WEIGHTS_NAME, TrainableTokensWrapper
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoProcessor,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, align_special_tokens
from transformers.utils import CONFIG_NAME, logging

from ..errors import UserError
from ..hub_names import may_be_on_hub
from ..trainers.checkpoint.base_record import BASE_FILE, PEFT_PREFIX, find_differences, read_quantization
from ..trainers.checkpoint.saved_model import load_average
from ..trainers.checkpoint.verification import MANIFEST_NAME, find_damage, how_to_accept


logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class BaseCheck:
    """
    Whether an adapter is on the base that it was trained on, `None` where that is not known, and why. Without an
    adapter there is nothing to say.
    """

    same: bool | None
    text: str


@dataclass(frozen=True)
class Source:
    """
    What is exported: an output directory or a checkpoint, the model under its adapter with its revision, the adapter's
    configuration, and whether the average of the trained weights takes their place. The base of a model of its own is the
    directory itself.
    """

    directory: Path
    base: str
    revision: str | None = None
    adapter: PeftConfig | None = None
    ema: bool = False

    def read_config(self) -> PreTrainedConfig:
        """
        Read the configuration alone of the model that was trained. Raises `ValueError` where it is not there, or of
        neither a language model nor a reward model.
        """
        try:
            config = AutoConfig.from_pretrained(self.base, revision=self.revision)
        except OSError as error:
            raise self._no_base() from error
        rewards = self.auto_class(config) is AutoModelForSequenceClassification
        if rewards and not _classifies(config.architectures):
            # The reward trainer loads it with one label.
            config.num_labels = 1
        mapping = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING if rewards else MODEL_FOR_CAUSAL_LM_MAPPING
        if type(config) not in mapping:
            raise UserError(
                f"{self.base} is a {config.model_type} model. Causal language models and reward models are exported."
            )
        if rewards and config.num_labels != 1:
            raise UserError(
                f"{self.base} is a classifier of {config.num_labels} labels. Causal language models and reward models, which "
                "have one, are exported."
            )
        return config

    def auto_class(self, config: PreTrainedConfig) -> type:
        """
        What loads the model that was trained, and what loads its export: `AutoModelForSequenceClassification` for a
        reward model, else `AutoModelForCausalLM`. An adapter says so; its base may be a model of the other kind.
        """
        rewards = _classifies(config.architectures)
        if self.adapter is not None and self.adapter.task_type is not None:
            rewards = self.adapter.task_type == TaskType.SEQ_CLS
        elif self.adapter is not None and self.adapter.auto_mapping is not None:
            rewards = _classifies([self.adapter.auto_mapping["base_model_class"]])
        return AutoModelForSequenceClassification if rewards else AutoModelForCausalLM

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The run's tokenizer, or its base's where the run has none. Raises `ValueError` where there is none."""
        own = (self.directory / "tokenizer_config.json").is_file()
        place = self.directory if own else self.base
        tokenizer = cause = None
        try:
            tokenizer = AutoTokenizer.from_pretrained(place, revision=None if own else self.revision)
        except (OSError, ValueError) as error:
            cause = error
        # Where there are no files of one, transformers makes a tokenizer whose tokens are all special.
        if tokenizer is None or len(tokenizer) <= len(tokenizer.all_special_tokens):
            raise UserError(
                f"No tokenizer is found in {self.directory} or {self.base}. Copy it there from the model that the run "
                "began with: tokenizer.json and tokenizer_config.json."
            ) from cause
        return tokenizer

    def load_processor(
        self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
    ) -> PreTrainedTokenizerBase | ProcessorMixin:
        """What prepares a model's inputs: its tokenizer, or where the model takes images, too, the processor that the run or its base has."""
        if "vision_config" in config.sub_configs:
            for place, revision in ((self.directory, None), (self.base, self.revision)):
                try:
                    processor = AutoProcessor.from_pretrained(place, revision=revision)
                except (OSError, ValueError):
                    # This place has none.
                    continue
                if isinstance(processor, ProcessorMixin):
                    processor.tokenizer = tokenizer
                    return processor
        return tokenizer

    def load_trained(
        self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
    ) -> tuple[PreTrainedModel | PeftModel, BaseCheck]:
        """
        Load what was trained, with its configuration, in float32: an adapter on its base, with the [`BaseCheck`] of it.
        Tokens that the run's tokenizer has and the base has not, the run has added; a head that the base has not, the
        adapter has. Raises `ValueError` where a file is missing or cannot be read, or the adapter is that of another
        model.
        """
        try:
            # What is missing is an error below, or the head of the adapter.
            with _only_errors():
                model, info = self.auto_class(config).from_pretrained(
                    self.base,
                    config=config,
                    revision=self.revision,
                    dtype=torch.float32,
                    quantization_config=self._read_quantization(config),
                    output_loading_info=True,
                )
                if vars(model).get("is_quantized"):
                    model = model.dequantize(torch.float32)
        except OSError as error:
            raise self._no_base() from error
        except SafetensorError as error:
            raise UserError(
                f"The weights in {self.base} cannot be read ({error}). Take another checkpoint."
            ) from error
        check, missing = BaseCheck(None, ""), sorted(info["missing_keys"])
        if self.adapter is None and missing:
            raise UserError(f"{self.directory} has no weights for {', '.join(missing)}. Take another checkpoint.")
        if self.adapter is not None:
            check = self._check_base(model, missing)
            if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
                model.resize_token_embeddings(len(tokenizer))
            try:
                self._load_from_adapter(model, missing)
                with warnings.catch_warnings():
                    # Tied embeddings with an adapter are what `merge` takes care of.
                    warnings.filterwarnings("ignore", message="Model (with|has) `tie_word_embeddings=True`")
                    model = PeftModel.from_pretrained(model, self.directory, torch_device="cpu")
            except SafetensorError as error:
                raise UserError(
                    f"{self.directory / SAFETENSORS_WEIGHTS_NAME} cannot be read ({error}). Take another checkpoint."
                ) from error
            except RuntimeError as error:
                raise UserError(
                    f"The adapter in {self.directory} does not fit {self.base}. Give the model that it was trained on: "
                    f"--base_model DIRECTORY\n{error}"
                ) from error
        if self.ema:
            load_average(model, self.directory)
        # The trainer does so at the start of a run, and an adapter's directory does not keep it.
        align_special_tokens(model.get_base_model() if self.adapter is not None else model, tokenizer)
        return model.eval(), check

    def _read_quantization(self, config: PreTrainedConfig) -> BitsAndBytesConfig | None:
        """How to quantize the base as it was in training, where its files are not quantized."""
        settings = None if self.adapter is None else read_quantization(self.directory)
        return None if settings is None or "quantization_config" in vars(config) else BitsAndBytesConfig(**settings)

    def _load_from_adapter(self, model: PreTrainedModel, names: Collection[str]) -> None:
        """Load weights that the base has not from the adapter. With and without it, a model has one head then."""
        with safe_open(self.directory / SAFETENSORS_WEIGHTS_NAME, "pt") as file:
            keys = {name: f"{PEFT_PREFIX}{name}" for name in names}
            if absent := [name for name, key in keys.items() if key not in file.keys()]:  # noqa: SIM118
                raise UserError(
                    f"Neither {self.base} nor the adapter in {self.directory} has weights for {', '.join(absent)}. Give the "
                    "model that the adapter was trained on, --base_model DIRECTORY; a new head is kept with an adapter "
                    "that trains it: lora_task_type: SEQ_CLS."
                )
            model.load_state_dict({name: file.get_tensor(key) for name, key in keys.items()}, strict=False)

    def _check_base(self, model: PreTrainedModel, new: Collection[str]) -> BaseCheck:
        differences = find_differences(self.directory, model, new)
        if differences is None:
            return BaseCheck(
                None,
                f"Whether {self.base} is the base that the adapter was trained on could not be verified: {self.directory} has no "
                f"{BASE_FILE} that fits it.",
            )
        num_compared, differing = differences
        if not differing:
            return BaseCheck(True, f"The base is the one of the training: {num_compared} weights compared.")
        return BaseCheck(
            False,
            f"{self.base} is not the base that the adapter was trained on: {len(differing)} of {num_compared} weights differ, "
            f"{differing[0]} first. The exported model is not what was trained. Give the base of the training, "
            f"{self.adapter.base_model_name_or_path} as it was then: --base_model DIRECTORY",
        )

    def _no_base(self) -> UserError:
        if self.adapter is None:
            return UserError(f"{self.directory} holds no full model. Take another checkpoint.")
        on_hub, download = "", ""
        if may_be_on_hub(self.base):
            on_hub, download = " or on the hub", f"; or get it where there is a network: hf download {self.base}"
        return UserError(
            f"{self.base}, which the adapter in {self.directory} was trained on, is not found on this machine"
            f"{on_hub}. Say where it is: --base_model DIRECTORY{download}"
        )


def open_source(run_dir: Path, merge: bool, base_model: str | None, ema: bool = False) -> Source:
    """
    Find out what a run has left in its output directory or a checkpoint: an adapter, if one is to be merged, on the
    base that it names or `base_model`, or a whole model; with `ema`, its average. Raises `ValueError` where it is not what
    is expected.
    """
    if not run_dir.is_dir():
        raise UserError(
            f"{run_dir}: there is no such directory. Give the output_dir of a run, or a checkpoint-N in it."
        )
    if (run_dir / MANIFEST_NAME).is_file() and (damage := find_damage(run_dir)) is not None:
        raise UserError(f"{run_dir} is damaged: {damage}. Take another checkpoint.{how_to_accept(run_dir)}")
    # PEFT saves adapters that have names of their own into directories of these names.
    inside = sorted(path.parent.name for path in run_dir.glob(f"*/{ADAPTER_CONFIG_NAME}"))
    if (run_dir / ADAPTER_CONFIG_NAME).is_file():
        if not merge:
            raise UserError(f"{run_dir} holds an adapter. Add --merge.")
        if others := [name for name in inside if not name.startswith(PREFIX_CHECKPOINT_DIR)]:
            logger.warning(
                f"{run_dir} holds {', '.join(others)} besides the adapter that is exported. To export one of them, give its directory."
            )
        return _open_adapter(run_dir, base_model, ema)
    if not (run_dir / CONFIG_NAME).is_file():
        inside = inside or sorted(path.name for path in run_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*"))
        hint = f"It holds {', '.join(inside)}: give one of these." if inside else "Give the output_dir of a run."
        raise UserError(f"{run_dir} holds neither an adapter nor a model. {hint}")
    if merge:
        raise UserError(f"{run_dir} holds a full model, no adapter to merge. Leave out --merge.")
    if base_model is not None:
        raise UserError(f"{run_dir} holds a full model, which has no base. Leave out --base_model.")
    return Source(run_dir, str(run_dir), ema=ema)


def _open_adapter(run_dir: Path, base_model: str | None, ema: bool) -> Source:
    try:
        adapter = PeftConfig.from_pretrained(run_dir)
    except (json.JSONDecodeError, TypeError) as error:
        raise UserError(
            f"{run_dir / ADAPTER_CONFIG_NAME} cannot be read ({error}). Take another checkpoint."
        ) from error
    if adapter.is_prompt_learning:
        raise UserError(
            f"{run_dir} holds a {adapter.peft_type} adapter, which has no weights that a base could take up. It is used "
            "as it is: peft.AutoPeftModelForCausalLM.from_pretrained"
        )
    # Without the file PEFT asks the hub for a repository of this name.
    if not (run_dir / SAFETENSORS_WEIGHTS_NAME).is_file():
        raise UserError(f"{run_dir} has no {SAFETENSORS_WEIGHTS_NAME}: it is incomplete. Take another checkpoint.")
    base = base_model or adapter.base_model_name_or_path
    if base is None:
        raise UserError(f"{run_dir} does not say which model it was trained on. Add --base_model NAME_OR_DIRECTORY.")
    return Source(run_dir, base, None if base_model else adapter.revision, adapter, ema)


def _classifies(architectures: Collection[str] | None) -> bool:
    return any(name.endswith("ForSequenceClassification") for name in architectures or ())


@contextmanager
def _only_errors() -> Iterator[None]:
    """Within this context, transformers logs errors only."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def merge(model: PeftModel) -> PreTrainedModel:
    """
    Merge an adapter, which is not to be used afterwards, into its base, in the dtype that the weights have. Embeddings
    are tied if they still are one. Raises `ValueError` where the adapter has weights that are no numbers, or a bias that the base has
    not.
    """
    base = model.get_base_model()
    if base.get_output_embeddings() is None:
        return _merge_whole(model)
    embeddings = [base.get_input_embeddings(), base.get_output_embeddings()]
    layers = [_find_base_layer(module) for module in embeddings]
    if layers != embeddings and layers[0].weight is layers[1].weight:
        # What an adapter adds to one of two tied weights would be added to both; to both, twice.
        layers[1].weight = nn.Parameter(layers[0].weight.detach().clone())
    was_tied = base.config.tie_word_embeddings
    result = _merge_whole(model)
    weights = [result.get_input_embeddings().weight, result.get_output_embeddings().weight]
    result.config.tie_word_embeddings = was_tied and torch.equal(*weights)
    if result.config.tie_word_embeddings:
        result.tie_weights()
    return result


def _find_base_layer(module: nn.Module) -> nn.Module:
    """The layer of the base, which an adapter may wrap once for its matrices and once for its tokens."""
    while isinstance(module, BaseTunerLayer | TrainableTokensWrapper):
        module = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module.token_adapter
    return module


def _merge_whole(model: PeftModel) -> PreTrainedModel:
    """Merge an adapter as PEFT does, and refuse (`ValueError`) one of which PEFT cannot merge all."""
    try:
        result = model.merge_and_unload(safe_merge=True)
        for name, module in result.named_modules():
            if isinstance(module, BaseTunerLayer | TrainableTokensWrapper):
                raise RuntimeError(f"PEFT leaves a part of it at {name}")
    except RuntimeError as error:
        raise UserError(
            f"The adapter cannot be merged into its base ({error}). It is used as it is: peft.AutoPeftModelForCausalLM.from_pretrained"
        ) from error
    return result
