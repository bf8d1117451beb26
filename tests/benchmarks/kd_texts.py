"""Real text of several kinds, for [`kd_recovery`]: what is trained on, what settings are chosen on, and what is tested on."""

import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase


#: Its tests hold the English texts of the Canterbury corpus.
PACKAGE = "Brotli==1.1.0"
FILES = {"proceedings": "lcet10.txt", "fiction": "alice29.txt", "play": "asyoulik.txt", "verse": "plrabn12.txt"}
#: Kinds whose lines end where the page did.
WRAPPED = ("proceedings", "fiction")


def download(output_dir: Path) -> None:
    """Take the texts out of a PyPI package. Nothing is installed; texts that are there already are kept."""
    if all((output_dir / name).exists() for name in FILES.values()):
        return
    output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output_dir) as directory:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:"]
        subprocess.run([*pip, f"--dest={directory}", PACKAGE], check=True)
        (archive,) = Path(directory).glob("*.tar.gz")
        with tarfile.open(archive) as sources:
            for name in FILES.values():
                (member,) = (path for path in sources.getnames() if path.endswith(f"/tests/testdata/{name}"))
                partial = Path(directory) / name
                partial.write_bytes(sources.extractfile(member).read())
                partial.replace(output_dir / name)


def tidy(text: str, wrapped: bool) -> str:
    """Leave out what is layout alone: indents, more than one blank line, and line breaks within paragraphs."""
    lines = "\n".join(" ".join(line.split()) for line in text.splitlines())
    paragraphs = re.split(r"\n{2,}", lines.strip())
    return "\n\n".join(paragraph.replace("\n", " ") if wrapped else paragraph for paragraph in paragraphs)


def read_texts(directory: Path) -> dict[str, str]:
    """Read all texts but the code."""
    texts = {
        kind: tidy((directory / name).read_text(encoding="ascii"), kind in WRAPPED) for kind, name in FILES.items()
    }
    return {**texts, "reference": tidy("\n\n".join(topics.values()), wrapped=True)}


def passages(
    tokenizer: PreTrainedTokenizerBase, text: str, length: int, count: int, part: tuple[float, float] = (0, 1)
) -> Tensor:
    """
    Passages from all over a text, which do not overlap.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The tokenizer.
        text (`str`):
            The text.
        length (`int`):
            Tokens of a passage.
        count (`int`):
            How many.
        part (`tuple[float, float]`, *optional*, defaults to `(0, 1)`):
            Where in the text to take them from: begin and end, of 1.

    Returns:
        `torch.Tensor` of shape `(count, length)`: Token ids.

    Raises:
        ValueError: If the text is too short.
    """
    ids = torch.tensor(tokenizer(text)["input_ids"])
    begin, end = (int(share * len(ids)) for share in part)
    available = (end - begin) // length
    if available < count:
        raise ValueError(f"The text holds {available} passages of {length} tokens, not {count}. Ask for fewer.")
    rows = ids[begin : begin + available * length].reshape(available, length)
    return rows[torch.arange(count) * available // count]
