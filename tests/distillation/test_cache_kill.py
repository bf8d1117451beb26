"""A build that is killed again and again, with SIGKILL, ends with the cache of the build that never was."""

import random
import signal
import subprocess
import sys
import time

import cache_driver
import forked
import pytest

from hf_tpu_ext.distillation.cache import TeacherCache


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
    assert len(set(moments)) == len(moments)
    # Before the first file is written there is nothing to go on from.
    after_first = moments[moments.index("renamed to shard-00000.arrow") :]

    rng = random.Random(kills)
    for moment in sorted(rng.sample(after_first, kills), key=moments.index):
        build_and_kill((*arguments, tmp_path / "killed"), moment, delay=rng.uniform(0, 0.02))
        # The last manifest makes it complete.
        if "manifest.json of 7 files" not in moment:
            with pytest.raises(ValueError, match="is not complete"):
                TeacherCache(tmp_path / "killed")
    moments_of_last = []
    cache_driver.build(*arguments, tmp_path / "killed", moments_of_last.append)
    assert len(moments_of_last) < len(moments)

    def content(name):
        return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}

    assert content("killed") == content("undisturbed")
    assert sorted(content("killed")) == ["manifest.json", *(f"shard-{n:05d}.arrow" for n in range(7))]
