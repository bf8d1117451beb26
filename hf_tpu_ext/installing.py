"""How this package, or an extra of it, is installed from where it came: a clone, a wheel, a repository or an index."""

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from shlex import quote
from urllib.parse import unquote, urlparse


_NAME = "hf_tpu_ext"


def requirement(extras: str = "") -> str:
    """
    The argument of `pip install` for this package with `extras` (e.g. `"tpu,plan"`), quoted for a shell: as pip has recorded
    where it came from (`direct_url.json`), and by name if that was an index.
    """
    brackets = f"[{extras}]" if extras else ""
    clone = Path(__file__).parents[1]
    try:
        direct_url = distribution(_NAME).read_text("direct_url.json")
    except PackageNotFoundError:
        direct_url = None
    if direct_url is None and (clone / "setup.cfg").is_file():
        # Not installed, and found on the path.
        return f"-e {_quote(f'{clone}{brackets}')}"
    if direct_url is None:
        return _quote(f"{_NAME}{brackets}")
    origin = json.loads(direct_url)
    url = origin["url"]
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    elif url.startswith("file:"):
        path = unquote(urlparse(url).path)
        editable = origin.get("dir_info", {}).get("editable", False)
        return f"-e {_quote(f'{path}{brackets}')}" if editable else _quote(f"{path}{brackets}")
    return _quote(f"{_NAME}{brackets} @ {url}")


def install_command(extras: str = "", options: str = "") -> str:
    """What to type to install this package with `extras`, e.g. `pip install -e '/home/me/hf_tpu_ext[tpu]'`."""
    return " ".join(filter(None, ("pip install", options, requirement(extras))))


def _quote(text: str) -> str:
    # Brackets are a pattern to some shells.
    return quote(text) if "'" in text else f"'{text}'"
