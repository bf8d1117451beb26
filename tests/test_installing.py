"""The command that installs an extra names what pip has noted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hf_tpu_ext.installing import install_command


ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("noted", "command"),
    [
        ({"url": "file:///home/a%20b/clone", "dir_info": {"editable": True}}, "pip install -e '/home/a b/clone[tpu]'"),
        ({"url": "file:///home/me/clone", "dir_info": {}}, "pip install '/home/me/clone[tpu]'"),
        (
            {"url": "file:///tmp/hf_tpu_ext-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install '/tmp/hf_tpu_ext-0.1.0-py3-none-any.whl[tpu]'",
        ),
        (
            {"url": "https://host/a.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'hf_tpu_ext[tpu] @ git+https://host/a.git@abc'",
        ),
        ({"url": "https://host/x.whl", "archive_info": {}}, "pip install 'hf_tpu_ext[tpu] @ https://host/x.whl'"),
    ],
)
def test_by_what_pip_has_noted(noted, command, tmp_path, monkeypatch):
    info = tmp_path / "hf_tpu_ext-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hf_tpu_ext\nVersion: 0.1.0\n")
    (info / "direct_url.json").write_text(json.dumps(noted))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert install_command("tpu") == command


def test_of_a_package_that_is_only_on_the_path(tmp_path):
    script = "from hf_tpu_ext.installing import install_command; print(install_command('plan', '--upgrade'))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({str(ROOT)!r}); {script}"],
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"pip install --upgrade -e '{ROOT}[plan]'\n", done.stderr


def test_no_message_has_its_own_command():
    """Nothing names an index that may not have this package."""
    for source in (ROOT / "hf_tpu_ext").rglob("*.py"):
        if source.name != "installing.py":
            assert "hf_tpu_ext[" not in source.read_text(encoding="utf-8"), source
