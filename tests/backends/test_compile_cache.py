"""The compile cache: where it is, what it keeps, what it removes, and what it says."""

import errno
import json
import os
import sys
import textwrap
import time
from pathlib import Path

import forked
import pytest

from hf_tpu_ext.backends import compile_cache
from hf_tpu_ext.backends.compile_cache import (
    CacheState,
    CacheUse,
    CompileCache,
    cache_root,
    cache_state,
    compiler_settings,
    library_id,
)
from hf_tpu_ext.backends.cpu import CPUBackend
from hf_tpu_ext.callbacks.run_lines import describe_cache_use


def store(cache, key, size=100):
    """What the runtime does with a program."""
    (cache.directory / key).write_bytes(b"x" * size)


def keys(cache):
    return sorted(path.name for path in cache.directory.iterdir() if path.name.isdecimal())


@pytest.fixture
def reopen(tmp_path):
    return lambda **toolchain: CompileCache(tmp_path / "cache", "test", toolchain)


# ---- Where ----


@pytest.mark.parametrize(
    ("setting", "variable", "expected"),
    [
        ("auto", None, ("xdg/hf_tpu_ext/compile", False)),
        ("auto", "auto", ("xdg/hf_tpu_ext/compile", False)),
        ("auto", "", ("xdg/hf_tpu_ext/compile", False)),
        ("auto", "off", (None, True)),
        ("auto", "{}/there", ("there", True)),
        ("off", "{}/there", (None, True)),
        ("{}/here", "off", ("here", True)),
    ],
)
def test_root(setting, variable, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv(compile_cache.VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(compile_cache.VARIABLE, variable.format(tmp_path))
    name, chosen = expected
    assert cache_root(setting.format(tmp_path)) == (None if name is None else tmp_path / name, chosen)


def test_root_in_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv(compile_cache.VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root("auto") == (tmp_path / ".cache" / "hf_tpu_ext" / "compile", False)
    assert cache_root("~/other") == (tmp_path / "other", True)


def test_a_user_without_a_home_directory(monkeypatch, tmp_path):
    """As in a container with a number for a user."""
    for name in ("HOME", "XDG_CACHE_HOME", compile_cache.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31)
    with pytest.raises(
        ValueError, match="HOME is not set.* Set HOME, or HF_TPU_EXT_COMPILE_CACHE to a directory or to off"
    ):
        cache_root("auto")
    monkeypatch.setenv(compile_cache.VARIABLE, str(tmp_path))
    assert cache_root("auto") == (tmp_path, True)
    monkeypatch.setenv(compile_cache.VARIABLE, "off")
    assert cache_root("auto") == (None, True)


def test_another_toolchain_is_another_directory(reopen):
    one, other = reopen(torch="2.9.0"), reopen(torch="2.9.1")
    assert one.directory != other.directory
    assert one.directory == reopen(torch="2.9.0").directory
    assert json.loads((one.directory / "toolchain.json").read_text()) == {"torch": "2.9.0"}


def test_environment(monkeypatch):
    before = compiler_settings()
    monkeypatch.setenv("XLA_FNTRACKER_FILE", "of this process")
    monkeypatch.setenv("XLA_PERSISTENT_CACHE_PATH", "anywhere")
    assert compiler_settings() == before
    monkeypatch.setenv("XLA_USE_32BIT_LONG", "1")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=1")
    changed = {"XLA_USE_32BIT_LONG": "1", "LIBTPU_INIT_ARGS": "--xla_tpu_scoped_vmem_limit_kib=1"}
    assert compiler_settings() == before | changed


def test_library_is_told_by_its_first_page_and_size(tmp_path):
    library = tmp_path / "lib.so"
    ids = set()
    for content in (b"a" * 5000, b"a" * 5001, b"b" + b"a" * 4999):
        library.write_bytes(content)
        ids.add(library_id(str(library)))
    assert len(ids) == 3


# ---- What is kept ----


def test_programs_outlive_a_process(reopen):
    store(reopen(), "12", size=10)
    cache, other = reopen(), reopen(torch="other")
    store(other, "13", size=5)
    assert keys(cache) == ["12"]
    root = cache.directory.parent
    assert cache_state(root) == CacheState(programs=2, size=15, writable=True)
    assert cache_state(root, cache.directory.name) == CacheState(programs=1, size=10, writable=True)


def test_programs_not_read_for_longest_make_room(reopen, monkeypatch):
    old, new = reopen(torch="old"), reopen(torch="new")
    for cache, key, days in ((old, "1", 1), (old, "2", 9), (new, "3", 5), (new, "4", 2)):
        store(cache, key)
        moment = time.time() - days * 86400
        os.utime(cache.directory / key, (moment, 0))
    theirs = old.directory.parent / "notes.txt"
    theirs.write_text("not ours")
    monkeypatch.setattr(compile_cache, "MOST_BYTES", 250)
    assert keys(reopen(torch="new")) == ["4"]
    assert keys(old) == ["1"]
    assert theirs.exists()


# ---- What goes wrong ----


def test_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        CompileCache(tmp_path / "file" / "cache", "test", {})


def test_directory_that_cannot_be_written_is_read(reopen, monkeypatch):
    cache = reopen()
    store(cache, "1")
    (cache.directory / "toolchain.json").unlink()
    (cache.directory / "toolchain.json").mkdir()
    monkeypatch.setattr(compile_cache, "MOST_BYTES", 0)
    cache = reopen()
    assert cache.problem == "Is a directory"
    assert keys(cache) == ["1"]


def test_a_program_of_another_user_stays(tmp_path, reopen, monkeypatch):
    """In a directory that several share. It is no reason to do without the cache."""
    store(reopen(torch="old"), "1")
    monkeypatch.setattr(compile_cache, "MOST_BYTES", 0)

    def refuse(path, missing_ok=False):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", refuse)
    cache, lines = CompileCache.open(tmp_path / "cache", "test", {"torch": "new"})
    assert cache.directory.is_dir() and not lines


def test_removed_directory(reopen):
    cache = reopen()
    (cache.directory / "toolchain.json").unlink()
    cache.directory.rmdir()
    assert cache_state(cache.directory.parent).programs == 0


# ---- In a backend ----


def test_without_effect_on_eager_devices(tmp_path):
    backend = CPUBackend("for the test")
    for setting in ("auto", "off"):
        assert backend.use_compile_cache(setting) == []
    expected = f"compile_cache_dir={tmp_path} has no effect on cpu: nothing is compiled"
    assert backend.use_compile_cache(str(tmp_path)) == [expected]
    assert backend.cache_use() is None


IN_A_PROCESS = """
import json, os, sys
import torch
from hf_tpu_ext.backends.xla.backend import XLABackend

backend = XLABackend("for the test", "CPU")
def compile(size):
    x = backend.send(torch.ones(size)) * 3
    backend.end_step()
said = {}
for setting in sys.argv[1:]:
    if setting == "compile":
        compile(7)
    else:
        said[setting] = backend.use_compile_cache(setting)
compile(5)
use = backend.cache_use()
print(json.dumps([said, use and {"misses": use.misses, "unreadable": use.unreadable, "programs": use.programs}]))
"""


def in_a_process(*argv, **env):
    result = forked.run(
        [sys.executable, "-c", textwrap.dedent(IN_A_PROCESS), *map(str, argv)],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
def test_host_stores_and_finds_again(tmp_path):
    cache, other, below_a_file = tmp_path / "cache", tmp_path / "other", Path(__file__) / "cache"
    said, use = in_a_process("auto", "off", below_a_file, cache, cache, "auto", other, "off")
    assert said["auto"] == []
    assert said["off"] == [f"compile_cache_dir=off has no effect: this process keeps its programs in {cache}"]
    assert said[str(below_a_file)] == [
        f"The compilation cache is off: {below_a_file} cannot be made (Not a directory). Set compile_cache_dir to another "
        "directory, or to off"
    ]
    assert said[str(cache)] == []  # the second time
    assert said[str(other)] == [f"compile_cache_dir={other} has no effect: this process keeps its programs in {cache}"]
    assert use == {"misses": 1, "unreadable": 0, "programs": 1}

    # What a full disk leaves: the runtime finds it, cannot load it, and stores it anew.
    (program,) = cache.glob("*/[0-9]*")
    program.write_bytes(program.read_bytes()[:100])
    said, use = in_a_process("auto", HF_TPU_EXT_COMPILE_CACHE=str(cache))
    assert said["auto"] == [
        f"compile_cache_dir={cache} has no benefit here: XLA:CPU stores executables but cannot load them"
    ]
    assert use == {"misses": 0, "unreadable": 1, "programs": 1}
    assert program.stat().st_size > 100


@pytest.mark.slow
def test_too_late(tmp_path):
    said, use = in_a_process("compile", tmp_path)
    assert said[str(tmp_path)] == [
        "The compilation cache is off: this process had compiled a graph before its first trainer was made"
    ]
    assert use is None and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_directory_of_the_runtime_itself(tmp_path):
    said, use = in_a_process(tmp_path / "ours", XLA_PERSISTENT_CACHE_PATH=str(tmp_path / "theirs"))
    assert said[str(tmp_path / "ours")] == [
        f"compile_cache_dir={tmp_path / 'ours'} has no effect: XLA_PERSISTENT_CACHE_PATH={tmp_path / 'theirs'} is set"
    ]
    assert use is None and len(list((tmp_path / "theirs").iterdir())) == 1


@pytest.mark.parametrize(
    "hits, misses, unreadable, says",
    [
        (4, 0, 0, "hits: 4, misses: 0 (nothing was compiled); "),
        (3, 1, 0, "hits: 3, misses: 1 (1 of 4 graphs compiled); "),
        (0, 0, 1, "hits: 0, misses: 0, unreadable: 1 (1 of 1 graph compiled); "),
        (0, 0, 0, "hits: 0, misses: 0; "),
    ],
)
def test_a_run_says_what_was_compiled_after_all(tmp_path, hits, misses, unreadable, says):
    use = CacheUse(tmp_path, 4, 2**20, hits, misses, unreadable, 1.5, None)
    assert says in describe_cache_use(use)
