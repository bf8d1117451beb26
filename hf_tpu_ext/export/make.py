"""An export from beginning to end."""

import dataclasses
import gc
import importlib.metadata
import json
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard
from tqdm.auto import tqdm
from transformers import AutoModelForSequenceClassification, PreTrainedConfig
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .. import __version__
from ..backends import select_backend
from ..errors import UserError
from ..formatting import dtype_name
from ..quantization.fake_quantized import TrainedFor
from ..trainers.checkpoint.base_record import find_base_change
from ..trainers.checkpoint.earlier_run import EXPORT_FILE
from .files import check_output, only_export_to, whole_directory
from .models import BaseCheck, Source, open_source
from .models import merge as merge_adapter
from .proof import PROMPTS, Difference, Proof, judge
from .quantized import check_installed, choose_quantization, write_quantized


#: Dtypes that weights are written in.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Export:
    """
    What was written, and what it changed.

    Args:
        output_dir (`str`): The exported model.
        run_dir (`str`): What it was made from.
        base (`str`, *optional*): Model under the adapter, where one was merged.
        same_base (`bool`, *optional*):
            Whether it is the one that the adapter was trained on; `None` where that is not known.
        base_check (`str`): Why.
        auto_class (`str`): The class of transformers that loads it.
        ema (`bool`): Whether it has the average of the trained weights, rather than the last ones.
        dtype (`str`): Dtype of the weights.
        quantized (`str`, *optional*): What weights of linear layers were rounded to, where they were.
        trained_for (`str`, *optional*): What they were rounded to in training, where they were.
        num_bytes (`int`): Bytes of the files of weights.
        num_parameters (`int`): How many there are.
        tied (`bool`): Whether the embeddings are one weight.
        untied (`bool`): Whether the adapter has made two of one: the configuration says so.
        prompts (`int`): How many were compared.
        positions (`int`):
            Their tokens, and those of the answers; of a reward model, the pairs of answers that it chose from.
        scores (`dict[str, tuple[float, float]]`, *optional*):
            The lowest and the highest score that a reward model gave, as it was `"trained"` and `"exported"`.
        training ([`~proof.Difference`], *optional*):
            The base beside the trained model, where an adapter was merged that leaves it as it was.
        weights ([`~proof.Difference`]): The written weights, computed with in float32, beside the trained model.
        exported ([`~proof.Difference`]): The written weights, computed with in their own dtype.
        good (`bool`): Whether the export may be used in place of the trained model.
        verdict (`str`): Why.
    """

    output_dir: str
    run_dir: str
    base: str | None
    same_base: bool | None
    base_check: str
    auto_class: str
    ema: bool
    dtype: str
    quantized: str | None
    trained_for: str | None
    num_bytes: int
    num_parameters: int
    tied: bool
    untied: bool
    prompts: int
    positions: int
    scores: dict[str, tuple[float, float]] | None
    training: Difference | None
    weights: Difference
    exported: Difference
    good: bool
    verdict: str


def export_run(
    run_dir: str | Path,
    output_dir: str | Path | None = None,
    merge: bool = False,
    dtype: str | None = None,
    overwrite: bool = False,
    base_model: str | None = None,
    prompts: Sequence[str] = PROMPTS,
    ema: bool = False,
    quantize: str | None = None,
    group_size: int | None = None,
    scale: str | None = None,
    quiet: bool = True,
) -> Export:
    """
    Make a plain model of a run, on the CPU, and compare it with what was trained.

    Args:
        run_dir (`str` or `Path`): An output directory, or a `checkpoint-N` in it.
        output_dir (`str` or `Path`, *optional*):
            Where to write, by default `merged`, `converted` or `quantized` in `run_dir`, with `-ema` behind it for an
            average. It appears when it is complete.
        merge (`bool`, *optional*, defaults to `False`):
            Whether to merge the adapter that the run has trained; it is merged in float32. Without, a model is converted.
        dtype (`str`, *optional*):
            `"float32"`, `"bfloat16"` or `"float16"`. By default that of the adapter's base; of the run, for an average.
        overwrite (`bool`, *optional*, defaults to `False`): Whether an earlier export in `output_dir` may be replaced.
        base_model (`str`, *optional*):
            Name or directory of the adapter's base, where it is elsewhere than the adapter says.
        prompts (`Sequence[str]`, *optional*):
            What to compare on. The trained model goes on after each, and what it says is compared as well; a reward
            model scores [`~proof.ANSWERS`] to each.
        ema (`bool`, *optional*, defaults to `False`):
            Whether to take the average of the trained weights that a run with `ema_decay` keeps beside them.
        quantize (`str`, *optional*):
            What to round the weights of linear layers to, `"int2"` to `"int8"`; or `"as trained"`, with `qat_weight_dtype`.
        group_size (`int`, *optional*): How many of them share a scale, by default as trained, or 32.
        scale (`str`, *optional*):
            How it is chosen, `"max"` or `"mse"` as `qat_scale`; by default as trained, or `"max"`.
        quiet (`bool`, *optional*, defaults to `True`): Whether to leave out the progress.

    Returns:
        [`Export`]: What was written. It is in `export.json` beside the weights, too.

    Raises:
        `ValueError`: Something is missing or does not fit; nothing was written.
        `OSError`: It cannot be written; nothing of it was kept.
    """
    # Keeps transformers from an accelerator that it finds.
    select_backend("cpu")
    source = open_source(Path(run_dir), merge, base_model, ema)
    form = _choose_form(source, dtype, quantize, group_size, scale)
    name = "quantized" if form.quantization is not None else "merged" if merge else "converted"
    output_dir = Path(output_dir or source.directory / f"{name}{'-ema' * ema}")
    bar = tqdm(total=4, desc="reading what was trained", unit="phase", leave=False, disable=quiet)
    with only_export_to(output_dir), bar:
        check_output(output_dir, overwrite, [source.directory, *filter(Path.is_dir, [Path(source.base)])])
        tokenizer = source.load_tokenizer()
        model, base_check = source.load_trained(form.config, tokenizer)
        _begin_phase(bar, "computing with the trained model")
        # What is exported is what was trained: a model that rounds.
        with form.quantization.fake_quantization(model).enable() if form.is_as_trained else nullcontext():
            proof = Proof(model, tokenizer, prompts, rewards=form.auto_class is AutoModelForSequenceClassification)
        training = None
        if merge and find_base_change(model) is None:
            with model.disable_adapter():
                training = proof.compare(proof.measure(model))
        if merge:
            with warnings.catch_warnings():
                # PEFT warns that embeddings are two weights now. The result says so.
                warnings.filterwarnings("ignore", message="Input and output embeddings are no longer tied")
                model = merge_adapter(model)
        _begin_phase(bar, "writing")
        was_tied, tied = form.config.tie_word_embeddings, model.config.tie_word_embeddings
        known = dict(num_parameters=model.num_parameters(), tied=tied, untied=was_tied and not tied)
        known |= dict(output_dir=str(output_dir), run_dir=str(run_dir), base=source.base if merge else None, ema=ema)
        with whole_directory(output_dir) as partial:
            if form.quantization is None:
                model.to(DTYPES[form.dtype]).save_pretrained(partial)
            else:
                write_quantized(model, form.quantization, DTYPES[form.dtype], partial)
            source.load_processor(form.config, tokenizer).save_pretrained(partial)
            del model
            gc.collect()
            _begin_phase(bar, "computing with what was written")
            export = _compare_written(partial, form, proof, training, base_check, known)
            _write_card(partial, source.directory, export)
            _write_report(partial, export)
    return export


@dataclass(frozen=True)
class _Form:
    """What is written: by which class, in which dtype, linear layers rounded to what, and whether that is what they were trained for."""

    config: PreTrainedConfig
    auto_class: type
    dtype: str
    quantization: TrainedFor | None
    trained_for: TrainedFor | None
    is_as_trained: bool


def _choose_form(
    source: Source, dtype: str | None, quantize: str | None, group_size: int | None, scale: str | None
) -> _Form:
    quantization = choose_quantization(source.directory, quantize, group_size, scale)
    if quantization is not None:
        check_installed()
    config = source.read_config()
    if dtype is None:
        if source.adapter is None and not source.ema and quantization is None:
            raise UserError("Give the dtype to convert to: --dtype bfloat16 (float32 and float16 are the others).")
        dtype = dtype_name(config.dtype or torch.float32)
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}: weights are written in {', '.join(DTYPES)}. Give one of these.")
    auto_class = source.auto_class(config)
    if quantization is not None and auto_class is AutoModelForSequenceClassification:
        raise UserError("--quantize rounds causal language models, and this is a reward model. Leave it out.")
    trained_for = TrainedFor.read(source.directory)
    is_as_trained = quantization is not None and quantization == trained_for
    return _Form(config, auto_class, dtype, quantization, trained_for, is_as_trained)


def _begin_phase(bar: tqdm, phase: str) -> None:
    """Say what begins, where the phase before it has ended."""
    bar.update()
    bar.set_description(phase)


def _compare_written(
    directory: Path, form: _Form, proof: Proof, training: Difference | None, base: BaseCheck, known: dict[str, Any]
) -> Export:
    # What others will load.
    model = form.auto_class.from_pretrained(directory, dtype=form.dtype).eval()
    values = proof.measure(model)
    weights = exported = proof.compare(values)
    if form.dtype != "float32":
        # The scales of a quantized one are not made float32 afterwards.
        is_rounded = form.quantization is not None
        in_float32 = form.auto_class.from_pretrained(directory, dtype="float32") if is_rounded else model.float()
        weights = proof.compare(proof.measure(in_float32.eval()))
    good, verdict = False, base.text
    rounded_to = None if form.quantization is None else form.quantization.describe()
    if base.same is not False:
        rounds_activations = form.quantization is not None and form.quantization.activation_dtype is not None
        new_rounding = None if form.is_as_trained else rounded_to
        good, verdict = judge(form.dtype, exported, training, new_rounding, rounds_activations)
    return Export(
        **known,
        same_base=base.same,
        base_check=base.text,
        auto_class=form.auto_class.__name__,
        dtype=form.dtype,
        quantized=rounded_to,
        trained_for=None if form.trained_for is None else form.trained_for.describe(),
        num_bytes=sum(file.stat().st_size for file in directory.glob("*.safetensors")),
        prompts=proof.num_prompts,
        positions=sum(map(len, proof.values)),
        scores={"trained": _range(proof.values), "exported": _range(values)} if proof.rewards else None,
        training=training,
        weights=weights,
        exported=exported,
        good=good,
        verdict=verdict,
    )


def _range(scores: list[torch.Tensor]) -> tuple[float, float]:
    return tuple(bound.item() for bound in torch.cat(scores).aminmax())


def _write_card(directory: Path, run_dir: Path, export: Export) -> None:
    """Write the card of the run, if it has one, as that of a plain model of transformers."""
    if run_dir.name.startswith(PREFIX_CHECKPOINT_DIR):
        # Its own card is PEFT's empty form.
        run_dir = run_dir.parent
    path = run_dir / "README.md"
    if not path.is_file():
        return
    card = ModelCard.load(path)
    card.data.library_name = "transformers"
    card.data.tags = [
        tag for tag in card.data.tags or () if tag != "lora" and not tag.startswith("base_model:adapter:")
    ]
    # The report stays with the run.
    card.text = card.text.replace(": [report](report.md)", "")
    card.text = card.text.replace(f'model="{run_dir}"', f'model="{export.output_dir}"')
    merged = "" if export.base is None else ", merged into its base"
    card.text += f"\n\nExported by `hf-tpu export`{merged}, with {export.dtype} weights. {export.verdict}\n"
    card.save(directory / path.name)


def _write_report(directory: Path, export: Export) -> None:
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft")}
    versions = {"hf_tpu_ext": __version__, **versions}
    # What an export that takes its place may delete.
    files = sorted([*(path.name for path in directory.iterdir()), EXPORT_FILE])
    report = json.dumps({**dataclasses.asdict(export), "versions": versions, "files": files}, indent=2)
    (directory / EXPORT_FILE).write_text(report + "\n", encoding="utf-8")
