"""Names of models and data: on the Hugging Face hub, or of directories here."""

import difflib
import os
from itertools import chain
from pathlib import Path


# Files of tokenizers, by name.
_OF_TOKENIZERS = ("*token*", "*vocab*", "*.model", "*.tiktoken", "tekken.json")


def may_be_on_hub(name: str) -> bool:
    """Whether a name may be one on the hub, `owner/name` or `name`, and not only a path."""
    return not name.startswith((".", "/", "~")) and name.count("/") <= 1


def hint_at_similar(path: str) -> str:
    """Of a path that is not there, the end of a message: what is there with a close name, if anything."""
    directory, name = os.path.split(path.rstrip("/"))
    inside = os.listdir(directory or ".") if os.path.isdir(directory or ".") else []
    near = difflib.get_close_matches(name, inside, n=1, cutoff=0.75)
    return f" Did you mean {os.path.join(directory, near[0])!r}?" if near else ""


def why_no_tokenizer(name: str) -> str | None:
    """
    The start of a message for a directory with a model's configuration and without a tokenizer, `None` for every other name. Of a
    Llama's, upstream makes a tokenizer without words.
    """
    directory = Path(name)
    if not (directory / "config.json").is_file() or any(chain.from_iterable(map(directory.glob, _OF_TOKENIZERS))):
        return None
    return (
        f"the directory {name!r} has a model's config.json, and no tokenizer. Copy the model's own beside it (tokenizer.json, "
        "tokenizer_config.json, chat_template.jinja)"
    )
