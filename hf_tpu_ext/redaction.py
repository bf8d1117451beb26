"""Secrets stay out of the files that this package writes."""

import re
from collections.abc import Mapping
from typing import Any


# Names of settings whose text is a secret. Names of a tokenizer's tokens end as those of access tokens do.
_SECRET = re.compile(
    r"(?<!pad_)(?<!eos_)(?<!bos_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!mask_)token$|password|passwd|secret|credential|authorization"
    r"|cookie|(api|access|account|private|signing|encryption|wandb)_?key|connection_?string",
    re.IGNORECASE,
)
# The credentials in `https://user:password@host`, and tokens that say themselves what they are.
_IN_TEXT = re.compile(
    r"(?<=://)[^/?#\s]+(?=@)|\bhf_[A-Za-z0-9]{20,}\b|\bsk-[A-Za-z0-9_-]{20,}|\bgh[pousr]_[A-Za-z0-9]{20,}"
    r"|\bgithub_pat_\w{20,}|\bglpat-[\w-]{20,}|\bBearer \S+"
)

# What is in the query of a URL, by its name there: keys, and the signatures of signed URLs.
_IN_QUERY = re.compile(
    r"([?&][^=&#\s]*(?:token|passw(?:or)?d|secret|signature|credential|key)=|[?&]sig=)[^&#\s]+", re.IGNORECASE
)


def redact(value: Any, name: str = "") -> Any:
    """
    Take the secrets out of a nested structure of what JSON knows, by the `name` that each value has in it: tokens,
    passwords, keys. The text of one becomes its name in angle brackets, as in upstream's
    `TrainingArguments.to_dict`. What is neither a structure nor a secret is returned as it is.
    """
    if isinstance(value, Mapping):
        # In what has the name of a secret, all text is one.
        inner = name if _SECRET.search(name) else ""
        return {key: redact(item, inner or str(key)) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(redact(item, name) for item in value)
    # Not of an enumeration, which is text, too.
    if type(value) is not str or not value:
        return value
    if _SECRET.search(name):
        return f"<{name.upper()}>"
    return _IN_QUERY.sub(r"\1<REDACTED>", _IN_TEXT.sub("<REDACTED>", value))
