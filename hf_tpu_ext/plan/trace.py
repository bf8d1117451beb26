"""Tracing the programs of a run, without weights and without running them."""

import math
import tempfile
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import init_empty_weights
from peft import PeftModel
from tqdm.auto import tqdm
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import get_hf_quantizer

from ..callbacks.samples import ShowSamples
from ..errors import UserError
from ..layers.attention import is_sliced
from ..quantization.packed_linear import count_parameters, names_of_packed
from ..step.train_step import MICRO_STEP, OPTIMIZER_STEP
from ..temporarily import temporarily
from ..trainers.configs import ExtensionArguments
from ..trainers.run.every_length import EveryLengthMixin
from .programs import Argument, Generations, TracedProgram


@dataclass(frozen=True)
class Run:
    """
    What is known of a run besides its programs.

    Args:
        config ([`~transformers.PreTrainedConfig`]): Configuration of the trained model.
        parameters (`int`): Its parameters, adapters included.
        trained_parameters (`int`): Those of them that are trained.
        precision (`str`): Of weights and computation, for people.
        mesh (`dict[str, int]`): Size of each axis.
        per_device_train_batch_size (`int`): Rows of a micro-step on one chip.
        per_device_eval_batch_size (`int`): Rows of an evaluation step on one chip.
        gradient_accumulation_steps (`int`): Micro-steps of an optimizer step.
        rematerialization (`str`): What the backward pass computes again.
        rows (`int`, *optional*): Rows of the training data, where it was read.
        optimizer_steps (`int`, *optional*): Optimizer steps of the run, where they are known.
        max_steps (`int`, *optional*): Optimizer steps that the recipe asks for, whatever the data is.
        token_share (`float`, *optional*):
            Share of the tokens in batches that are not padding, where the data was read.
        token_waste (`str`, *optional*): The same in words, with what to set against it.
        trains_in_float32 (`bool`): Whether all weights are trained, and some of them are float32.
        other_passes (`bool`):
            Whether a step runs more than the trained model forward and backward: a teacher, or a reference.
        attention (`str`): `"splash"` or `"slices"`.
        generations ([`Generations`], *optional*): How often completions are generated, where the trainer does so.
        pairs (`bool`): Whether a row is a pair of sequences.
        other_parameters (`int`): Parameters of models beside the trained one: a reference, a teacher.
        could_precompute_reference (`bool`): Whether a step runs a reference of its own that could be run once before.
        could_have_adapter (`bool`): Whether it trains no adapter and could.
        could_be_quantized (`bool`): Whether its weights, if an adapter is trained, could have 4 bits and have not.
        train_rows_multiple (`int`): What the rows of a micro-step on one chip have to be a multiple of.
        eval_rows_multiple (`int`): The same of an evaluation step.
    """

    config: PreTrainedConfig
    parameters: int
    trained_parameters: int
    precision: str
    mesh: dict[str, int]
    per_device_train_batch_size: int
    per_device_eval_batch_size: int
    gradient_accumulation_steps: int
    rematerialization: str
    rows: int | None
    optimizer_steps: int | None
    max_steps: int | None
    token_share: float | None
    token_waste: str | None
    trains_in_float32: bool
    other_passes: bool
    attention: str
    generations: Generations | None = None
    pairs: bool = False
    other_parameters: int = 0
    could_precompute_reference: bool = False
    could_have_adapter: bool = False
    could_be_quantized: bool = False
    train_rows_multiple: int = 1
    eval_rows_multiple: int = 1

    @property
    def settings(self) -> dict[str, str]:
        """What a [search][hf_tpu_ext.plan.search.search] varies, as it is in this run."""
        settings = {"rematerialization": self.rematerialization, "attention": self.attention}
        axes = {axis: size for axis, size in self.mesh.items() if size > 1}
        if axes:
            # One axis takes all chips, and is named as a search names it.
            settings["mesh"] = ",".join(f"{axis}={size}" if len(axes) > 1 else axis for axis, size in axes.items())
        return settings | {"per_device_train_batch_size": str(self.per_device_train_batch_size)}


@dataclass(eq=False)
class Traced(Exception):
    """
    Ends the tracing of a run, in place of a return into a script that would save what was not trained. It carries the
    programs, in the order of their first use, and the run.
    """

    programs: list[TracedProgram]
    run: Run


class TracingMixin(EveryLengthMixin):
    """
    Makes `train` of a trainer trace the programs of training and evaluation, for every length that they need.

    The backend has to be a [`~hf_tpu_ext.backends.xla.tracing.TracingBackend`]. The trainer's arguments are changed.
    """

    steps_per_length = 1

    def __init__(self, *, args: ExtensionArguments, **kwargs):
        # Traced is what would be replayed.
        args.step_replay = True
        self._max_steps = args.max_steps if args.max_steps > 0 else None
        # The reference of a preference trainer may be run before training.
        self._traced_programs: dict[tuple[str, tuple[int, ...]], TracedProgram] = {}
        self._bar = tqdm(disable=True)
        self._sent_batch: dict[str, Any] = {}
        super().__init__(args=args, **kwargs)

    def train(self, *args, **kwargs) -> None:
        """
        Trace the programs, in place of training; arguments are not used.

        Raises:
            [`Traced`]: When they are traced.
            `ValueError`: The steps of this run are not replayed, or its rows are not tokens.
        """
        self._num_rows = None if self._train_lengths is None else len(self._train_lengths)
        self.pop_callback(ShowSamples)
        bar = tqdm(desc="tracing", unit="graph", disable=self.args.disable_tqdm)
        with bar as self._bar:
            self.train_every_length()

    def _describe_run(self) -> Run:
        facts = self.find_facts()
        rows = self._num_rows
        steps = self._max_steps
        if steps is None and rows is not None:
            steps = max(1, int(-(-rows // self.chips.rows_per_step) * self.args.num_train_epochs))
        parameters, num_trained = count_parameters(self.model)
        others = self.other_models()
        reference = vars(self).get("ref_model")
        settings = vars(self.args)
        # An adapter on random weights learns little, and upstream does not quantize them.
        is_from_scratch = settings.get("from_scratch", False)
        generations, eval_rows_multiple = None, 1
        if self.generates:
            rows_of_steps, num_steps = self.rows_of_a_step()
            times = rows_of_steps * self.num_generations // self.generation_rows
            generations = Generations(times / num_steps, self.generation_rows)
            group = settings.get("num_generations_eval") or self.num_generations
            eval_rows_multiple = group // math.gcd(group, self.backend.num_chips)
        return Run(
            config=self.model.config,
            parameters=parameters,
            trained_parameters=num_trained,
            precision="; ".join([facts.precision, *self.describe_frozen()]),
            mesh=self.chips.mesh,
            per_device_train_batch_size=self.args.per_device_train_batch_size,
            per_device_eval_batch_size=self.args.per_device_eval_batch_size,
            gradient_accumulation_steps=self.args.gradient_accumulation_steps,
            rematerialization=self.adapted.rematerialization,
            rows=rows,
            optimizer_steps=steps,
            max_steps=self._max_steps,
            token_share=facts.token_share,
            token_waste=facts.token_waste,
            trains_in_float32=num_trained == parameters
            and any(parameter.dtype == torch.float32 for parameter in self.model.parameters()),
            other_passes=self._runs_other_passes,
            attention="slices" if is_sliced(self.model) else "splash",
            generations=generations,
            pairs=facts.pairs,
            other_parameters=sum(count_parameters(model)[0] for model in others),
            could_precompute_reference=settings.get("precompute_ref_log_probs") is False
            and not settings.get("sync_ref_model")
            and reference in others,
            could_have_adapter=not (is_from_scratch or isinstance(self.model, PeftModel)),
            # QAT rounds weights that are trained in full.
            could_be_quantized=not (
                is_from_scratch or names_of_packed(self.model) or settings.get("qat_weight_dtype") is not None
            ),
            # The KL of KTO compares completions of a batch.
            train_rows_multiple=2 if vars(self).get("calculate_KL") else 1,
            eval_rows_multiple=eval_rows_multiple,
        )

    def prepare_reward(self, function: Callable, name: str) -> Callable:
        # There is no text. Reward models are programs.
        return lambda completions, **kwargs: [0.0] * len(completions)

    def end_program(
        self,
        kind: str,
        where: str,
        execute: Callable[[], Any] | None = None,
        shape: tuple[int, ...] | None = None,
        settle: bool = False,
    ) -> Any:
        is_step = kind in (OPTIMIZER_STEP, MICRO_STEP)
        if is_step and (execute is None and kind == OPTIMIZER_STEP or self.steps.compiled is None):
            raise UserError(
                "This recipe cannot be planned: its steps are not replayed, for the reason above. optim: adamw_torch, and no code of your "
                "own between the backward pass and the update, make a step one program."
            )
        roles = self._roles()
        module = self.backend.end_module() if execute is None else execute()
        shape = self.batch_shape if shape is None else shape
        key = (kind, shape)
        if key not in self._traced_programs:
            of_module = zip(module.arguments, module.is_donated, module.shardings, strict=True)
            arguments = [
                Argument(roles.get(id(tensor), "other"), tensor.nbytes, is_donated, sharding)
                for tensor, is_donated, sharding in of_module
            ]
            self._traced_programs[key] = TracedProgram(kind, shape, module.module, arguments, self.backend.num_chips)
            self._bar.update()
        return module

    def _roles(self) -> dict[int, str]:
        """What tensors are for, by their identity."""
        roles = {}
        for model in (self.model, *self.other_models()):
            for tensor in (*model.parameters(), *model.buffers()):
                roles[id(tensor)] = "weights"
        if self.steps.gradients is not None:
            roles |= {id(tensor): "gradients" for tensor in self.steps.gradients.tensors}
        if self.optimizer is not None:
            for state in self.plain_optimizer.state.values():
                roles |= {id(state[name]): "optimizer state" for name in ("exp_avg", "exp_avg_sq")}
        roles |= {id(average): "optimizer state" for average in self.averaging.tensors.values()}
        if self.generates and self._text.generator is not None:
            generator = self._text.generator
            roles |= {id(tensor): "key-value cache" for tensor in generator.tensors()}
            roles |= {id(tensor): "copies of weights" for tensor in generator.copied_weights()}
        # What is no tensor is no argument either.
        return roles | {id(value): "batch" for value in self._sent_batch.values()}

    def _send_rows(self, *args, **kwargs) -> dict[str, dict[Hashable, Any]]:
        device_data = super()._send_rows(*args, **kwargs)
        self._sent_batch = device_data["batch"]
        return device_data

    def _bfloat16_holds(self, weights: Sequence[torch.Tensor]) -> list[bool]:
        # There are no values to look at. What was published in bfloat16 is held.
        published_dtype = AutoConfig.from_pretrained(self.model.config.name_or_path).dtype
        return [published_dtype == torch.bfloat16] * len(weights)

    def _finalize_training(self, *args):
        # Within training, where frozen weights have the dtype that they are trained beside.
        raise Traced(list(self._traced_programs.values()), self._describe_run())


def trace_run(train: Callable[[Callable[[type], type]], Any]) -> tuple[list[TracedProgram], Run]:
    """
    Trace the programs of a run, in the order of their first use. `train` makes the trainer and trains with it; it is
    called with what makes its class from that of the recipe.
    """
    with tempfile.TemporaryDirectory() as directory, weights_left_out():
        try:
            train(partial(TracingMixin.over, output_dir=directory))
        except Traced as traced:
            return traced.programs, traced.run
    raise AssertionError("the trainer was not asked to train")


@contextmanager
def weights_left_out() -> Iterator[None]:
    """Within this context, models are made from their configuration alone, with parameters on the meta device."""
    make, move_to = vars(PreTrainedModel)["_from_config"].__func__, PreTrainedModel.to

    def from_config(cls, config: PreTrainedConfig, **kwargs) -> PreTrainedModel:
        with init_empty_weights():
            model = make(cls, config, **kwargs)
        model.tie_weights()
        return model

    def move(self, *args, **kwargs) -> PreTrainedModel:
        # Accelerate moves a reference. It is placed later.
        is_left_out = any(parameter.is_meta for parameter in self.parameters())
        return self if is_left_out else move_to(self, *args, **kwargs)

    methods = {"from_pretrained": classmethod(_from_pretrained), "_from_config": classmethod(from_config), "to": move}
    with temporarily(PreTrainedModel, **methods):
        yield


def _from_pretrained(
    cls, name: str, *args, config=None, dtype=None, attn_implementation=None, quantization_config=None, **kwargs
) -> PreTrainedModel:
    if not isinstance(config, PreTrainedConfig):
        where = {"revision", "trust_remote_code", "subfolder", "gguf_file", "cache_dir", "token"} & kwargs.keys()
        config = AutoConfig.from_pretrained(name, **{key: kwargs[key] for key in where})
    dtype = config.dtype if dtype in ("auto", None) else dtype
    quantizer, config, _ = get_hf_quantizer(config, quantization_config, None, True, {})
    model = cls._from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    if quantizer is not None:
        with init_empty_weights():
            quantizer.preprocess_model(model, dtype=dtype, device_map=None)
        model.hf_quantizer = quantizer
        quantizer.postprocess_model(model)
    # As upstream's leaves it, and a reference stays.
    return model.eval()
