"""Splash attention: which kernel, and its programs."""

import hashlib
import json
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from ..atomic_write import write_atomically
from ..installing import install_command
from .versions import find_wrong_versions, required_versions


_SCRIPT = Path(__file__).with_name("lower_splash.py")
_PROGRAMS = ("infer", "forward", "backward")
_PACKAGES = ("jax", "jaxlib")


@dataclass(frozen=True)
class SplashAttention:
    """
    Attention of a shape, by jax's kernel for TPU.

    Args:
        rows (`int`): Rows of the batch on a chip.
        heads (`int`), kv_heads (`int`): Heads of the queries, and of keys and values.
        length (`int`): Tokens of a row. Lengths that are no multiple of 128 are padded within the kernel's program.
        head_dim (`int`): Width of a head.
        dtype (`str`): Of queries, keys and values: `"bfloat16"` or `"float32"`. Scores are float32.
        window (`int`, *optional*): How many tokens a token sees, itself included. Default: all before it.
        soft_cap (`float`, *optional*): Scores are `soft_cap * tanh(scores / soft_cap)`.
        causal (`bool`, *optional*, defaults to `True`):
            Whether a token sees those before it only, and itself. Else there is no window.
        platform (`str`, *optional*, defaults to `"tpu"`): `"cpu"` is the same kernel, interpreted.
    """

    rows: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    dtype: str
    window: int | None = None
    soft_cap: float | None = None
    causal: bool = True
    platform: str = "tpu"


@cache
def why_not_lowered() -> str | None:
    """Why this environment cannot lower kernels, and what to type; `None` if it can."""
    try:
        wrong = find_wrong_versions(*_PACKAGES)
    except PackageNotFoundError:
        return f"the versions that kernels need are not known, since hf_tpu_ext is not installed: {install_command('tpu')}"
    if not wrong:
        return None
    packages = " ".join(f"{name}=={version}" for name, version in required_versions(*_PACKAGES).items())
    return f"{', '.join(wrong)}, and kernels need: pip install {packages}"


@cache
def lower(kernel: SplashAttention, directory: Path | None = None) -> dict[str, bytes]:
    """
    Lower a kernel to HLO, or read it from `directory`, if an earlier process has lowered it there.

    Returns:
        `dict[str, bytes]`: Serialized `HloModuleProto`s, the same in every process: `"infer"` takes query, key and value of
        shape `(rows, heads, length, head_dim)`, the query already scaled, and integers `(rows, length)`, of which only equal
        ones attend to one another, and gives the output; `"forward"` also the logarithms of the sums of exponentials, float32
        `(rows, heads, length)`; `"backward"` takes all these and the output's gradient, and gives those of query, key, value.

    Raises:
        `RuntimeError`: jax does not lower it. What it says is in the message.
    """
    request = json.dumps(asdict(kernel), sort_keys=True)
    key = hashlib.sha256(
        "\n".join([request, str(required_versions(*_PACKAGES)), _SCRIPT.read_text(encoding="utf-8")]).encode()
    )
    cache_dir = None if directory is None else directory / key.hexdigest()[:32]
    if cache_dir is not None and all((cache_dir / f"{name}.pb").exists() for name in _PROGRAMS):
        return {name: (cache_dir / f"{name}.pb").read_bytes() for name in _PROGRAMS}
    with tempfile.TemporaryDirectory() as name:
        exchange = Path(name)
        (exchange / "request.json").write_text(request, encoding="utf-8")
        process = subprocess.run([sys.executable, str(_SCRIPT), name], stderr=subprocess.PIPE, text=True)
        if process.returncode:
            raise RuntimeError(
                f"{kernel} cannot be lowered, attention='slices' does without it:\n{process.stderr[-2000:]}"
            )
        programs = {name: (exchange / f"{name}.pb").read_bytes() for name in _PROGRAMS}
    if cache_dir is not None:
        # Where it cannot be written, kernels are lowered by each process, a second or two each.
        with suppress(OSError):
            cache_dir.mkdir(parents=True, exist_ok=True)
            for name, program in programs.items():
                write_atomically(cache_dir / f"{name}.pb", program)
    return programs
