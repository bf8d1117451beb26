"""Function and docstring pairs, read from the sources of the Python standard library that runs this code."""

import ast
import re
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .jsonl import write_splits


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


class Pair(NamedTuple):
    """
    A function and what it does.

    Attributes:
        module (`str`): Dotted name of the module that holds the function.
        source (`str`): Source of the function without its docstring and comments, dedented.
        sentence (`str`): First sentence of its docstring.
    """

    module: str
    source: str
    sentence: str


def first_sentence(docstring: str) -> str | None:
    """
    First sentence of a docstring, on one line.

    Args:
        docstring (`str`): A docstring.

    Returns:
        `str` or `None`: The sentence with its full stop. `None` where the first paragraph holds no whole sentence that
        begins with a capital letter, or one too short or too long to learn from.
    """
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    match = re.match(r"[A-Z].*?\.(?=\s+[A-Z]|$)", paragraph)
    if match is None or not MIN_SENTENCE_LENGTH <= len(match[0]) <= MAX_SENTENCE_LENGTH:
        return None
    return match[0]


def iter_pairs(stdlib_dir: str | Path | None = None) -> Iterator[Pair]:
    """
    All usable functions of the standard library, each source and each sentence once.

    Args:
        stdlib_dir (`str` or `Path`, *optional*):
            Folder of Python sources. Defaults to the standard library of the running interpreter.

    Yields:
        [`Pair`]: In the order of the file names, and within a file in the order of [`ast.walk`].
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
    """
    Whether the functions of a module are held out. About one module in ten is, always the same ones.

    Args:
        module (`str`): Dotted name of a module.

    Returns:
        `bool`: `True` for the test split.
    """
    return zlib.crc32(module.encode()) % 100 < TEST_MODULES_PERCENT


def to_row(pair: Pair) -> dict:
    """
    A pair in TRL's conversational prompt-completion form.

    Args:
        pair ([`Pair`]): Function and docstring.

    Returns:
        `dict`: `prompt` and `completion`, each a list of one message.
    """
    prompt = f"{INSTRUCTION}\n\n```python\n{pair.source}\n```"
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "completion": [{"role": "assistant", "content": pair.sentence}],
    }


def make_docstrings(
    output_dir: str | Path, num_train: int = 1024, num_test: int = 48, stdlib_dir: str | Path | None = None
) -> Path:
    """
    Write `train.jsonl` and `test.jsonl` of function and docstring pairs. No module has rows in both.

    Args:
        output_dir (`str` or `Path`):
            Directory to write to. Created when absent.
        num_train (`int`, *optional*, defaults to `1024`):
            Number of rows of the train split; fewer where the library has fewer.
        num_test (`int`, *optional*, defaults to `48`):
            Number of rows of the test split, likewise.
        stdlib_dir (`str` or `Path`, *optional*):
            Folder of Python sources. Defaults to the standard library of the running interpreter.

    Returns:
        `Path`: `output_dir`, which `datasets.load_dataset` loads.

    Raises:
        ValueError: If the folder holds no usable functions for one of the splits.
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
    return write_splits(
        output_dir,
        {
            "train": [to_row(pair) for pair in splits["train"][:num_train]],
            "test": [to_row(pair) for pair in splits["test"][:num_test]],
        },
    )
