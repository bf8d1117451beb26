"""Numbers and names as people read them."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence


def format_seconds(seconds: float) -> str:
    """A duration, e.g. `"2.3 ms"`, `"12 s"`, `"3 min 5 s"`, `"2 h 10 min"`."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    if seconds < 3599.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes} min"


def format_number(value: float) -> str:
    """A number with at least four digits that count, e.g. `"12,345"`, `"1.234"`, `"2e-05"`."""
    if isinstance(value, int) or (math.isfinite(value) and abs(value) >= 1000):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def format_bytes(num_bytes: int) -> str:
    """A size, e.g. `"1.20 GB"`, with 1 GB = 10^9 bytes."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"


def format_size(shape: Sequence[int]) -> str:
    """A shape, e.g. `"8 x 512"`."""
    return " x ".join(map(str, shape))


def kind_of_device(backend: str) -> str:
    """What a device of a backend is called: `"chip"` where it is of a TPU or stands for one. A CPU is none, and a GPU is not called so."""
    return "device" if backend in ("cuda", "cpu") else "chip"


def number_setting(backend: str) -> str:
    """The setting for how many devices of a backend a run takes."""
    return "num_chips" if kind_of_device(backend) == "chip" else "num_processes"


def count(number: int, what: str) -> str:
    """A number of things, e.g. `"1 program"`, `"1,200 programs"`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def format_value(value: object) -> str:
    """A value as Python writes it, cut off after 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def count_each(texts: Iterable[str], most: int = 3) -> str:
    """How often each text is there, those of the rest together, e.g. `"one (3x); another (1x); others (2x)"`."""
    counts = Counter(texts).most_common()
    if num_others := sum(number for _, number in counts[most:]):
        counts[most:] = [("others", num_others)]
    return "; ".join(f"{text} ({number}x)" for text, number in counts)


def name_of_any_layer(name: str) -> str:
    """The name of a parameter without the number of its layer, e.g. `"model.layers.*.mlp.up_proj.weight"`."""
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def dtype_name(dtype: object) -> str:
    """The name of a `torch.dtype`, e.g. `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")
