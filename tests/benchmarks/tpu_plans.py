"""
What the compiler for TPU makes of the training steps of models that people train: `hf-tpu plan` of each.

    python tests/benchmarks/tpu_plans.py [--only WORDS] [--tables NAME ...] [--write-docs]

Models are given by their configuration alone; nothing is downloaded and nothing is run. With `--write-docs` the tables go into
docs/plan.md, the page of one plan too. `--tables` makes some of these alone, `--only` some rows of theirs.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from parts import VISION, cycles_by_part
from tables import make_parser, write_block
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from hf_tpu_ext.examples.tiny import make_tokenizer
from hf_tpu_ext.examples.tiny_vision import find_image_tokens, make_processor
from hf_tpu_ext.formatting import format_bytes


ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "plan.md"
QWEN3 = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
GEMMA3 = {
    "vocab_size": 262144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
_LARGER_GEMMA3 = {"vocab_size": 262208, "head_dim": 256, "max_position_embeddings": 131072, "sliding_window": 1024}
_GEMMA3_4B = _LARGER_GEMMA3 | {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
_QWEN3_5 = {
    "vocab_size": 248320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
}
# The sizes that these models were published with (their `config.json`); without images, those of the text model.
MODELS = {
    "Qwen3-0.6B": ("qwen3", QWEN3),
    "Qwen3-0.6B of 8 layers": ("qwen3", {**QWEN3, "num_hidden_layers": 8}),
    "Qwen3-0.6B of 2 layers, vocabulary 32k": ("qwen3", {**QWEN3, "num_hidden_layers": 2, "vocab_size": 32768}),
    "Qwen3-0.6B of 2 layers, vocabulary 152k": ("qwen3", {**QWEN3, "num_hidden_layers": 2}),
    "Qwen2.5-0.5B": (
        "qwen2",
        {
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen2.5-1.5B": (
        "qwen2",
        {
            "vocab_size": 151936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen2.5-7B": (
        "qwen2",
        {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": False,
        },
    ),
    "Gemma-3-1B": ("gemma3_text", GEMMA3 | {"sliding_window": 512}),
    "Gemma-3-1B of 12 layers": ("gemma3_text", GEMMA3 | {"sliding_window": 512, "num_hidden_layers": 12}),
    "Qwen3 of these widths": ("qwen3", GEMMA3),
    "Gemma-3-4B": ("gemma3_text", _GEMMA3_4B),
    "Qwen3.5-0.8B": ("qwen3_5_text", _QWEN3_5),
    **{
        f"Qwen3.5-0.8B of 8 layers, {kind.replace('_', ' ')} in each": (
            "qwen3_5_text",
            {**_QWEN3_5, "vocab_size": 32768, "num_hidden_layers": 8, "layer_types": [kind] * 8},
        )
        for kind in ("linear_attention", "full_attention")
    },
    "Gemma-3-12B": (
        "gemma3_text",
        _LARGER_GEMMA3
        | {
            "hidden_size": 3840,
            "intermediate_size": 15360,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
        },
    ),
    "Gemma-3-4B with images": (
        "gemma3",
        {
            "text_config": _GEMMA3_4B,
            "vision_config": {
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_hidden_layers": 27,
                "num_attention_heads": 16,
                "image_size": 896,
                "patch_size": 14,
                "vision_use_head": False,
            },
            "mm_tokens_per_image": 256,
        },
    ),
    "Qwen2.5-VL-3B": (
        "qwen2_5_vl",
        {
            "text_config": {
                "vocab_size": 151936,
                "hidden_size": 2048,
                "intermediate_size": 11008,
                "num_hidden_layers": 36,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
                "max_position_embeddings": 128000,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
                "tie_word_embeddings": True,
            },
            "vision_config": {
                "depth": 32,
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "num_heads": 16,
                "out_hidden_size": 2048,
                "window_size": 112,
                "fullatt_block_indexes": [7, 15, 23, 31],
            },
            "tie_word_embeddings": True,
        },
    ),
}
# What the processors of those make of an image.
PROCESSORS = {"Gemma-3-4B with images": {"side": 896, "tokens_per_image": 256}, "Qwen2.5-VL-3B": {"side": 448}}
LORA = {"use_peft": "true", "lora_r": "8", "lora_target_modules": "all-linear"}


@dataclass(frozen=True)
class Case:
    """
    A run to plan.

    Args:
        title (`str`):
            What it is.
        model (`str`):
            One of [`MODELS`].
        topology (`str`):
            As `hf-tpu plan` takes it.
        length (`int`):
            Tokens of a row.
        settings (`dict[str, str]`):
            Keys of the recipe.
        sizes (`dict[str, int]`):
            In place of the model's own.
        command (`str`):
            What runs the recipe.
        teacher (`str`, *optional*):
            One of [`MODELS`], that the student learns from on-policy.
    """

    title: str
    model: str
    topology: str = "v5e-1"
    length: int = 1024
    settings: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    command: str = "sft"
    teacher: str | None = None


def _qwen3(title: str, command: str = "sft", **settings: str) -> Case:
    return Case(title, "Qwen3-0.6B", settings={"per_device_train_batch_size": "4", **settings}, command=command)


CASES = [
    _qwen3("LoRA, 4 rows", **LORA),
    # With the kernel, the compiler takes more than 18 GB for as many layers one by one.
    _qwen3("LoRA, 4 rows, scan_layers: off, attention: slices", **LORA, scan_layers="off", attention="slices"),
    _qwen3("LoRA, 4 rows, rematerialization: dots", **LORA, rematerialization="dots"),
    _qwen3(
        "LoRA, 4 rows, rematerialization: none, attention: slices",
        **LORA,
        rematerialization="none",
        attention="slices",
    ),
    _qwen3("LoRA, 32 rows", **LORA | {"per_device_train_batch_size": "32"}),
    _qwen3("full, 4 rows"),
    _qwen3("full, 4 rows, scan_layers: off, attention: slices", scan_layers="off", attention="slices"),
    *(
        Case(
            f"full, 4 rows, rematerialization: none, scan_layers: {scan_layers}, attention: slices",
            "Qwen3-0.6B of 8 layers",
            settings={
                "per_device_train_batch_size": "4",
                "rematerialization": "none",
                "scan_layers": scan_layers,
                "attention": "slices",
            },
        )
        for scan_layers in ("off", "on")
    ),
    *(
        Case(
            f"LoRA, 4 rows, {size}",
            f"Qwen3-0.6B of 2 layers, vocabulary {size}",
            settings=LORA | {"per_device_train_batch_size": "4"},
        )
        for size in ("32k", "152k")
    ),
    Case(
        "full, 4 rows a chip, mesh: data",
        "Qwen2.5-0.5B",
        "v5e-8",
        1000,
        {"per_device_train_batch_size": "4", "mesh": "data"},
    ),
    Case("LoRA, 4 rows a chip, mesh: data", "Qwen3-0.6B", "v5e-8", 1024, LORA | {"per_device_train_batch_size": "4"}),
    *(
        Case(
            f"LoRA, {rows} a chip, mesh: {mesh}",
            "Qwen2.5-7B",
            "v5e-8",
            1024,
            LORA | {"per_device_train_batch_size": rows.split()[0], "mesh": mesh},
        )
        for rows, mesh in (("1 row", "fsdp"), ("4 rows", "fsdp"), ("16 rows", "fsdp"), ("1 row", "data"))
    ),
]

# Beside as many rows of fine-tuning.
PREFERENCES = [
    _qwen3("LoRA, 8 rows", **LORA | {"per_device_train_batch_size": "8"}),
    _qwen3("DPO, LoRA, 4 pairs", "dpo", **LORA),
    _qwen3("DPO, LoRA, 4 pairs, precompute_ref_log_probs", "dpo", **LORA, precompute_ref_log_probs="true"),
    _qwen3("KTO, LoRA, 8 completions", "kto", **LORA | {"per_device_train_batch_size": "8"}),
]
_QLORA = {"load_in_4bit": "true", "use_bnb_nested_quant": "true"}


def _qwen7(title: str, rows: int, topology: str = "v5e-1", **settings: str) -> Case:
    settings = {"per_device_train_batch_size": str(rows), "dtype": "bfloat16", **LORA, "lora_r": "16", **settings}
    return Case(title, "Qwen2.5-7B", topology, settings=settings)


# In bfloat16 they do not fit a v5e.
FEW_BITS = [
    _qwen7("QLoRA, nf4, 1 row", 1, **_QLORA),
    _qwen7("QLoRA, nf4, 4 rows", 4, **_QLORA),
    _qwen7("QLoRA, 8 bits, 1 row", 1, load_in_8bit="true"),
    *(
        case
        for rows in (4, 8)
        for case in (
            _qwen7(f"QLoRA, nf4, {rows} rows", rows, "v6e-1", **_QLORA),
            _qwen7(f"LoRA on bfloat16, {rows} rows", rows, "v6e-1"),
        )
    ),
]


def _slice(title: str, topology: str, rows: int, mesh: str, **settings: str) -> Case:
    settings = {"per_device_train_batch_size": str(rows), "mesh": mesh, **settings}
    return Case(f"{title}, {rows} a chip, mesh: {mesh}", "Qwen2.5-7B", topology, settings=settings)


# Of several hosts.
SLICES = [
    _slice("full", "v5e-16", 1, "fsdp"),
    _slice("full", "v5e-16", 4, "fsdp"),
    _slice("full", "v5e-16", 1, "data=2,fsdp=8"),
    _slice("full", "v6e-16", 4, "fsdp"),
    _slice("full", "v5e-64", 4, "fsdp"),
    _slice("full", "v5e-64", 4, "data=4,fsdp=16"),
    _slice("full", "v5e-256", 4, "fsdp"),
    _slice("full", "v5e-256", 4, "data=16,fsdp=16"),
    _slice("full", "v6e-256", 4, "data=16,fsdp=16"),
    _slice("LoRA", "v5e-16", 4, "data=4,fsdp=4", **LORA),
]


def _gemma3(
    title: str, rows: int, length: int, model: str = "Gemma-3-1B", topology: str = "v5e-1", **settings: str
) -> Case:
    return Case(title, model, topology, length, {"per_device_train_batch_size": str(rows), **settings})


# Layers that alternate.
ALTERNATING = [
    _gemma3("LoRA, 4 x 1024", 4, 1024, **LORA),
    _gemma3("LoRA, 4 x 1024", 4, 1024, "Qwen3 of these widths", **LORA),
    _gemma3("full, 4 x 1024", 4, 1024),
    _gemma3("LoRA, 1 x 8192", 1, 8192, **LORA),
    _gemma3("LoRA, 1 x 8192", 1, 8192, "Qwen3 of these widths", **LORA),
    _gemma3("LoRA, 4 x 1024", 4, 1024, "Gemma-3-4B", **LORA, dtype="bfloat16"),
    _gemma3(
        "LoRA, 4 x 1024 a chip, mesh: fsdp", 4, 1024, "Gemma-3-12B", "v5e-8", **LORA, dtype="bfloat16", mesh="fsdp"
    ),
    _gemma3("full, 1 x 8192", 1, 8192),
    _gemma3("full, dtype: bfloat16, 4 x 1024", 4, 1024, dtype="bfloat16"),
    _gemma3("full, dtype: bfloat16, 1 x 8192", 1, 8192, dtype="bfloat16"),
    *(
        _gemma3(f"full, dtype: bfloat16, {rows} x {length}", rows, length, "Qwen3 of these widths", dtype="bfloat16")
        for rows, length in ((4, 1024), (1, 8192))
    ),
    _gemma3("LoRA, 4 x 1024", 4, 1024, "Qwen3.5-0.8B", **LORA),
]
# Two periods of them: to compile all 26 layers one by one takes 18.5 GiB of the host.
LOOPED = [
    _gemma3(
        f"{kind}, {rows} x {length}, scan_layers: {scan_layers}",
        rows,
        length,
        "Gemma-3-1B of 12 layers",
        **settings,
        scan_layers=scan_layers,
    )
    for kind, settings in (("LoRA", LORA), ("full", {}))
    for rows, length in ((4, 1024), (1, 8192))
    for scan_layers in ("off", "on")
]
# Layers that carry a state over the row, and attention between the same other parts.
STATES = [
    _gemma3("full, dtype: bfloat16, 4 x 1024", 4, 1024, name, dtype="bfloat16")
    for name in MODELS
    if name.endswith("in each")
]
# What rounding adds to a step.
_INSIDE = {**LORA, "lora_r": "32", "qat_weight_dtype": "int4"}
ROUNDED = [
    _qwen3("LoRA, not rounded", **LORA | {"lora_r": "32"}),
    _qwen3("int4, adapters inside, scale: max", **_INSIDE),
    _qwen3("int4, adapters inside, scale: mse", **_INSIDE, qat_scale="mse"),
]

# With one image of 448 x 448 in each row.
IMAGES = [
    Case(
        "LoRA, 1 x 1024" if topology == "v5e-1" else "LoRA, 1 x 1024 a chip, mesh: data",
        model,
        topology,
        settings={**LORA, "per_device_train_batch_size": "1", "dtype": "bfloat16", "image_tokens": "256"},
    )
    for topology in ("v5e-1", "v5e-8")
    for model in PROCESSORS
]
#: What may be made, and in which document a table is.
TABLES = {
    "tpu_plans": (DOCUMENT, CASES),
    "slice_plans": (DOCUMENT, SLICES),
    "alternating_plans": (DOCUMENT, ALTERNATING),
    "looped_plans": (DOCUMENT, LOOPED),
    "state_plans": (DOCUMENT, STATES),
    "preference_plans": (DOCUMENT, PREFERENCES),
    "image_plans": (ROOT / "docs" / "images.md", IMAGES),
    "qlora_plans": (ROOT / "docs" / "quantization.md", FEW_BITS),
    "qat_plans": (ROOT / "docs" / "quantization.md", ROUNDED),
}

# The page that is shown whole. The data is not read, so the number of steps is said.
PAGE = Case("recipes/sft_lora_qwen3.yaml", "Qwen3-0.6B", "v5e-1", settings={"max_steps": "1000"})


def make_model(name: str, directory: Path, **sizes: int) -> Path:
    """Write what a plan needs of a model: its configuration and a tokenizer, or a processor."""
    kind, published = MODELS[name]
    path = directory / name.replace(" ", "_")
    if name in PROCESSORS:
        processor = make_processor(path, kind, **PROCESSORS[name])
        architecture = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind]
        published = published | find_image_tokens(processor, kind)
    else:
        make_tokenizer(path)
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    # As it was published: plans ask for this.
    config = AutoConfig.for_model(kind, **published | sizes, dtype="bfloat16", architectures=[architecture])
    config.save_pretrained(path)
    return path


def plan(
    case: Case, directory: Path, *more: str, program: Sequence[str] = ("-m", "hf_tpu_ext.cli.main")
) -> tuple[dict, str]:
    """Plan a run with `hf-tpu plan`."""
    settings = {
        "model_name_or_path": str(make_model(case.model, directory, **case.sizes)),
        **({} if case.command in ("grpo", "distillation") else {"max_length": str(case.length)}),
        "output_dir": str(directory / "run"),
        **case.settings,
    }
    if case.teacher is not None:
        settings["teacher_model_name_or_path"] = str(make_model(case.teacher, directory))
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    output = directory / "plan.json"
    done = subprocess.run(
        [
            sys.executable,
            *program,
            "plan",
            case.command,
            "--topology",
            case.topology,
            "--seq_lengths",
            str(case.length),
        ]
        + ["--json", str(output), *words, *more],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{case} failed:\n{done.stdout}{done.stderr[-3000:]}")
    return json.loads(output.read_text(encoding="utf-8")), done.stdout


def plan_parts(case: Case, directory: Path) -> dict:
    """Plan a run with images, whose step names the cycles of its vision tower."""
    named = str(Path(__file__).with_name("trace_parts.py"))
    planned, _ = plan(case, directory, "--hlo", str(directory), program=[named])
    if planned["programs"][-1]["error"] is None:
        (text,) = directory.glob("training_step_*.txt")
        planned["of_images"] = cycles_by_part(text.read_text(encoding="utf-8"))[VISION]
    return planned


def make_row(case: Case, planned: dict) -> str:
    """Write the row of a run."""
    derived, program = planned["derived"], planned["programs"][-1]
    cells = [case.model, case.title, case.topology, f"{program['cpu_seconds']:.0f}"]
    if program["error"] is not None:
        cells += ["no", program["error"].split(". ")[0].replace("|", "/"), *[""] * 4]
    else:
        parts = derived["parts"]
        cells += [
            "yes" if derived["fits"] else "no",
            format_bytes(derived["peak_bytes"]),
            format_bytes(parts["activations and temporaries"]),
            format_bytes(parts["generated code"]),
            f"{1000 * derived['step']['seconds'][1]:.0f} ms",
            f"{program['cost']['cycles'] / 1e6:.0f} M",
        ]
        if "of_images" in planned:
            cells.append(f"{planned['of_images'] / 1e6:.0f} M")
    return f"| {' | '.join(cells)} |"


def keep_rows(cases: list[Case], block: str, document: Path, name: str) -> str:
    """The block of a table of which some runs were planned, with the rows that the document has of the others."""
    before = document.read_text(encoding="utf-8").partition(f"<!-- {name}:start -->")[2].splitlines()
    *rows, empty, versions = block.splitlines()
    found = []
    for case in cases:
        begin = f"| {case.model} | {case.title} | {case.topology} |"
        found += [row for row in rows if row.startswith(begin)] or [row for row in before if row.startswith(begin)]
    return "\n".join([*rows[:2], *found, empty, versions])


def make_table(cases: list[Case], jobs: int) -> tuple[str, list[dict]]:
    """Plan runs."""
    lines = [
        "| model | run | on | CPU seconds to compile | fits | a chip holds | of it temporary | of it code | a step is expected to take | cycles |",
        "|---|---|---|---:|---|---:|---:|---:|---:|---:|",
    ]

    if cases[0] in IMAGES:
        lines = [f"{line} {cell} |" for line, cell in zip(lines, ("of them vision tower", "---:"), strict=True)]

    def plan_alone(case: Case) -> dict:
        with tempfile.TemporaryDirectory() as directory:
            return plan_parts(case, Path(directory)) if case in IMAGES else plan(case, Path(directory))[0]

    measured = []
    with ThreadPoolExecutor(jobs) as pool:
        for case, planned in zip(cases, pool.map(plan_alone, cases), strict=True):
            measured.append(planned)
            lines.append(make_row(case, planned))
            print(lines[-1], file=sys.stderr, flush=True)
    versions = ", ".join(f"{name} {version}" for name, version in measured[0]["versions"].items())
    return "\n".join([*lines, "", f"{versions}; `python tests/benchmarks/tpu_plans.py`"]), measured


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = make_parser(__doc__, DOCUMENT)
    parser.add_argument("--only", metavar="WORDS", default="", help="plan only the runs whose row has these words")
    names = [*TABLES, "page"]
    parser.add_argument("--tables", nargs="+", choices=names, default=names, help="what to make, by default all")
    parser.add_argument("--jobs", type=int, default=1, help="how many runs to plan at once (default: 1)")
    arguments = parser.parse_args()
    measured = {}
    for name in (name for name in TABLES if name in arguments.tables):
        document, all_cases = TABLES[name]
        cases = [case for case in all_cases if arguments.only in f"{case.model} {case.title} {case.topology}"]
        if not cases:
            continue
        block, measured[name] = make_table(cases, arguments.jobs)
        print(block)
        if arguments.write:
            write_block(document, name, keep_rows(all_cases, block, document, name))
    if arguments.json:
        arguments.json.write_text(json.dumps(measured, indent=2), encoding="utf-8")
    if arguments.write and "page" in arguments.tables:
        with tempfile.TemporaryDirectory() as directory:
            _, page = plan(PAGE, Path(directory), "--config", PAGE.title)
        command = f"hf-tpu plan --config {PAGE.title} --topology {PAGE.topology} --seq_lengths {PAGE.length} --max_steps 1000"
        write_block(DOCUMENT, "plan_page", f"```text\n$ {command}\n\n{page.rstrip()}\n```")


if __name__ == "__main__":
    main()
