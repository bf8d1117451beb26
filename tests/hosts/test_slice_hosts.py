"""What hosts tell each other over the network, in processes without a chip."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pretended_slice import free_port

from hf_tpu_ext.backends import processes
from hf_tpu_ext.backends.slice_hosts import EXIT_STATUS, read_seconds


DRIVER = """
import json, os, sys, time
from hf_tpu_ext.backends.processes import HostsDisagree
from hf_tpu_ext.backends.slice_hosts import SliceHosts

index, count, port, silence = map(int, sys.argv[1:5])
hosts = SliceHosts(index, count, "localhost", port, silence)
def tell(value):
    print(json.dumps(value), flush=True)
exec(sys.argv[5])
"""


@pytest.fixture
def start(tmp_path):
    """Starts processes that run some lines as hosts."""
    started = []

    def start(code, count=3, silence=3):
        port = str(free_port())
        for index in range(count):
            command = [sys.executable, "-c", DRIVER, str(index), str(count), port, str(silence), code]
            started.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
            )
        return started

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(autouse=True)
def find_package(monkeypatch):
    import hf_tpu_ext

    root = str(Path(hf_tpu_ext.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])))


def ends(processes):
    """What each has told, its standard error and its exit status."""
    outputs = [process.communicate(timeout=60) for process in processes]
    told = [[json.loads(line) for line in out.splitlines()] for out, _ in outputs]
    return told, [err for _, err in outputs], [process.returncode for process in processes]


def test_one_host_has_nobody_to_ask():
    hosts = processes.ALONE
    assert (hosts.count, hosts.index) == (1, 0)
    assert hosts.exchange("here", [1]) == [[1]] and hosts.of_first("here", 2) == 2
    with hosts.together("work"):
        assert hosts.pass_place() is None
    with pytest.raises(OSError, match="full"):
        hosts.raise_together("here", OSError("full"))


@pytest.mark.slow
def test_each_gets_the_values_of_all(start):
    told, _, statuses = ends(
        start(
            """
for turn in range(3):
    time.sleep(0.2 * index)
    tell(hosts.exchange("here", [index, turn]))
tell(hosts.of_first("there", {"of": index}))
"""
        )
    )
    assert statuses == [0] * 3
    assert told == [[[[0, turn], [1, turn], [2, turn]] for turn in range(3)] + [{"of": 0}]] * 3


@pytest.mark.slow
def test_an_error_of_one_is_raised_on_all(start):
    told, _, statuses = ends(
        start(
            """
try:
    hosts.raise_together("a save", OSError("disk full") if index == 1 else None)
except (OSError, HostsDisagree) as error:
    tell([type(error).__name__, str(error)])
"""
        )
    )
    assert statuses == [0] * 3
    other = [["HostsDisagree", "host 1: OSError: disk full"]]
    assert told == [other, [["OSError", "disk full"]], other]


@pytest.mark.slow
def test_hosts_at_different_places_are_told_where_each_is(start):
    told, _, _ = ends(
        start(
            """
try:
    hosts.exchange("a save" if index == 2 else "step 3")
except HostsDisagree as error:
    tell(str(error))
"""
        )
    )
    for (message,) in told:
        assert "host 0: step 3; host 1: step 3; host 2: a save" in message
        assert "do not use the model under `if trainer.is_world_process_zero()`" in message


@pytest.mark.slow
def test_all_stop_at_the_same_place(start):
    """The first place that none has passed, though each comes to it at its own pace, and whoever is told."""
    told, _, statuses = ends(
        start(
            """
hosts.begin_listening()
for place in range(100_000):
    time.sleep(0.005 * (index + 1))
    if index == 2 and place == 40:
        hosts.request_stop("SIGTERM")
    reason = hosts.pass_place()
    if reason is not None:
        break
tell([place, reason])
"""
        )
    )
    assert statuses == [0] * 3
    assert told[0] == told[1] == told[2]
    place, reason = told[0][0]
    assert reason == "SIGTERM on host 2" and 40 <= place < 1000


WORK = """
hosts.exchange("here")
tell(os.getpid())
with hosts.together("training"):
    time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_that_is_killed_ends_the_others(start, lost):
    processes = start(WORK)
    for process in processes:
        process.stdout.readline()
    processes[lost].kill()
    began = time.monotonic()
    _, errors, statuses = ends(processes)
    assert time.monotonic() - began < 3 + 5
    for host in {0, 1, 2} - {lost}:
        assert statuses[host] == EXIT_STATUS
        assert f"Host {lost} of 3" in errors[host] and "start the same command on all hosts again" in errors[host]
    assert statuses[lost] == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("hanging", [0, 1])
def test_a_host_that_hangs_ends_the_others(start, hanging):
    """Also the first, which all speak to."""
    processes = start(WORK)
    for process in processes:
        process.stdout.readline()
    processes[hanging].send_signal(signal.SIGSTOP)
    for host in {0, 1, 2} - {hanging}:
        _, error = processes[host].communicate(timeout=30)
        assert processes[host].returncode == EXIT_STATUS
        assert f"Host {hanging} of 3 has said nothing for 3 seconds" in error


@pytest.mark.slow
def test_an_error_on_one_host_is_named_by_the_others(start):
    _, errors, statuses = ends(
        start(
            """
with hosts.together("training"):
    if index == 1:
        raise KeyError("no such column")
    time.sleep(1000)
"""
        )
    )
    assert statuses == [EXIT_STATUS, 1, EXIT_STATUS]
    for host in (0, 2):
        assert "Host 1 of 3 has ended with an error (KeyError: 'no such column')" in errors[host]


@pytest.mark.slow
def test_a_host_that_ends_too_early_is_not_waited_for(start):
    _, errors, statuses = ends(start('hosts.exchange("here")\nif index != 1: hosts.exchange("there")'))
    assert statuses == [EXIT_STATUS, 0, EXIT_STATUS]
    assert "Host 1 of 3 has ended" in errors[0]


@pytest.mark.slow
def test_hosts_that_are_done_end_at_their_own_time(start):
    code = """
with hosts.together("training"):
    time.sleep(0.3 * index)
time.sleep(2.5 * (index == 1))
"""
    _, errors, statuses = ends(start(code))
    assert statuses == [0] * 3 and errors == [""] * 3


def test_seconds_of_silence(monkeypatch):
    monkeypatch.delenv("HF_TPU_EXT_HOST_TIMEOUT", raising=False)
    assert read_seconds() == 60
    monkeypatch.setenv("HF_TPU_EXT_HOST_TIMEOUT", "12.5")
    assert read_seconds() == 12.5
    for value in ("soon", "0", "-1"):
        monkeypatch.setenv("HF_TPU_EXT_HOST_TIMEOUT", value)
        with pytest.raises(ValueError, match="HF_TPU_EXT_HOST_TIMEOUT=.*Set it to 60"):
            read_seconds()
