"""A build that is killed again and again, with SIGKILL, ends with the cache of the build that never was."""

import random
import signal
import subprocess
import sys
import time

import cache_driver
import forked
import pytest


def build_and_kill(arguments, kill_at, delay):
    """Build in a process of its own, and kill it `delay` seconds after it reached `kill_at`."""
    command = [sys.executable, cache_driver.__file__, *map(str, arguments)]
    with forked.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if not line.startswith("reached "):
                continue
            process.stdin.write("\n")
            process.stdin.flush()
            if line.removeprefix("reached ").strip() == kill_at:
                time.sleep(delay)
                process.kill()
                break
    assert process.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, 10])
def test_killed_build_is_the_same_byte_for_byte(xla, tiny_teacher, rows, tmp_path, kills):
    rows.save_to_disk(tmp_path / "rows")
    arguments = (tiny_teacher, tmp_path / "rows")
    moments = []
    cache_driver.build(*arguments, tmp_path / "undisturbed", moments.append)
    # `progress.json` is written many times; and before the first file is written there is nothing to go on from.
    once = [moment for moment in moments if moments.count(moment) == 1]
    after_first = once[once.index("renamed to shard-00000.arrow") :]

    rng = random.Random(kills)
    for moment in sorted(rng.sample(after_first, kills), key=once.index):
        build_and_kill((*arguments, tmp_path / "killed"), moment, delay=rng.uniform(0, 0.02))
        assert not (tmp_path / "killed" / "manifest.json").exists() or "manifest" in moment
    moments_of_last = []
    cache_driver.build(*arguments, tmp_path / "killed", moments_of_last.append)
    assert len(moments_of_last) < len(moments)

    def content(name):
        return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}

    assert content("killed") == content("undisturbed")
    assert sorted(content("killed")) == ["manifest.json", *(f"shard-{n:05d}.arrow" for n in range(7))]
