"""Signals and maintenance notices, without a trainer."""

import multiprocessing
import os
import pty
import signal
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import forked
import pytest
from transformers import TrainerControl, TrainerState

from hf_tpu_ext.callbacks import preemption
from hf_tpu_ext.callbacks.preemption import EvaluationCut, Preemption, TrainingPreempted, watch_maintenance


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture(autouse=True)
def signals_of_a_terminal():
    """
    A job in the background of a script has SIGINT ignored, and one of `nohup` SIGHUP. One that is not noted ends the tests where it was sent.
    """
    before = handlers()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


def handlers():
    return [signal.getsignal(number) for number in SIGNALS]


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_first_signal_is_noted_and_told_in_one_line(number, capfd):
    stop, before = Preemption(), handlers()
    with stop.listen():
        assert stop.reason is None
        signal.raise_signal(number)
        assert stop.reason == number.name
    assert handlers() == before
    told = capfd.readouterr().err
    assert told.strip() == f"{number.name}: saving after this step; a second one exits immediately."
    with stop.listen():
        assert stop.reason is None


def test_second_signal_does_what_it_did_before(monkeypatch):
    stop, before = Preemption(), handlers()
    with pytest.raises(KeyboardInterrupt), stop.listen():
        signal.raise_signal(signal.SIGINT)
        # `timeout` and others repeat a signal at once.
        signal.raise_signal(signal.SIGINT)
        assert handlers() != before
        monkeypatch.setattr(preemption, "_ONE_SIGNAL_SECONDS", -1.0)
        signal.raise_signal(signal.SIGINT)
    assert handlers() == before


@pytest.mark.slow
def test_second_sigterm_ends_the_process():
    code = """
import signal, time
from hf_tpu_ext.callbacks.preemption import Preemption

with Preemption().listen():
    signal.raise_signal(signal.SIGTERM)
    time.sleep(1.1)
    signal.raise_signal(signal.SIGTERM)
"""
    done = forked.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGTERM
    assert done.stderr.count("SIGTERM") == 1


def test_a_run_whose_terminal_is_closed_still_writes():
    process, terminal = pty.fork()
    if not process:
        status = 1
        try:
            stop = Preemption()
            with stop.listen():
                os.write(1, b"listens")
                while stop.reason is None:
                    time.sleep(0.01)
                os.write(1, b"loss")
                os.write(2, b"progress")
                status = 0 if stop.reason == "SIGHUP" else 2
        finally:
            os._exit(status)
    assert os.read(terminal, 7) == b"listens"
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGHUP), ids=lambda number: number.name)
def test_what_is_ignored_stays_ignored(number):
    signal.signal(number, signal.SIG_IGN)
    with Preemption().listen():
        assert signal.getsignal(number) == signal.SIG_IGN
    assert signal.getsignal(number) == signal.SIG_IGN


def test_only_the_main_thread_listens():
    seen = []

    def train():
        stop = Preemption()
        with stop.listen():
            seen.append((stop.listening, handlers()))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [(False, handlers())]


def test_a_forked_worker_dies_of_sigterm_and_outlives_ctrl_c():
    stop = Preemption()
    with stop.listen():
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        worker.start()
        os.kill(worker.pid, signal.SIGINT)
        worker.join(0.3)
        assert worker.is_alive()
        worker.terminate()
        worker.join(30)
        assert worker.exitcode == -signal.SIGTERM
        assert stop.reason is None


def test_an_evaluation_is_cut_inside_the_context_only(capfd):
    stop, state, control = Preemption(), TrainerState(), TrainerControl()
    with stop.listen():
        with stop.cutting_evaluation():
            stop.on_prediction_step(None, state, control)
        signal.raise_signal(signal.SIGTERM)
        stop.on_prediction_step(None, state, control)
        with pytest.raises(EvaluationCut), stop.cutting_evaluation():
            stop.on_prediction_step(None, state, control)
        stop.on_prediction_step(None, state, control)


def test_exit_status_and_words():
    stopped = TrainingPreempted("SIGTERM", "runs/a/checkpoint-12", 12)
    assert stopped.code == os.EX_TEMPFAIL == 75 and not isinstance(stopped, Exception)
    for words in ("SIGTERM after step 12", "runs/a/checkpoint-12", "--resume_from_checkpoint true"):
        assert words in str(stopped)


# ---- The notice of a Cloud machine ----


@contextmanager
def metadata_server(answers):
    """Answers a path with its next answer, the last one again and again; without the header, as Google's, with 403."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):  # noqa: N802
            asked.append(self.path)
            left = answers.get(self.path.rpartition("/")[2], [])
            if self.headers["Metadata-Flavor"] != "Google" or not left:
                self.send_error(403 if left else 404)
                return
            body = (left.pop(0) if len(left) > 1 else left[0]).encode()
            if not body:
                self.wfile.write(b"no HTTP\r\n\r\n")
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/instance", asked
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("answers", "notice"),
    [
        (
            {"maintenance-event": ["NONE", "TERMINATE_ON_HOST_MAINTENANCE"], "preempted": ["FALSE"]},
            "maintenance-event: TERMINATE_ON_HOST_MAINTENANCE",
        ),
        ({"maintenance-event": ["NONE"], "preempted": ["FALSE", "FALSE", "TRUE"]}, "preempted: TRUE"),
        ({"preempted": ["FALSE", "TRUE"]}, "preempted: TRUE"),
        ({"preempted": ["", "TRUE"]}, "preempted: TRUE"),
    ],
    ids=["maintenance", "preempted", "one-key-missing", "no-http"],
)
def test_notice_is_told_once(answers, notice, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    told = []
    with metadata_server(answers) as (url, asked):
        watch_maintenance(url, told.append, threading.Event(), seconds_between=0.001)
    assert told == [f"Maintenance notice ({notice})"]
    assert set(asked) == {"/instance/preempted", "/instance/maintenance-event"}


def test_no_metadata_server_is_no_notice():
    told, done = [], threading.Event()
    asking = ("http://127.0.0.1:9/instance", told.append, done, 0.001)
    thread = threading.Thread(target=watch_maintenance, args=asking)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive() and not told
    done.set()
    thread.join(30)
    assert not thread.is_alive()


def test_a_signal_after_the_notice_is_the_first(monkeypatch, capfd):
    """The machine is taken in the middle of the save that the notice asked for."""
    told = threading.Event()
    monkeypatch.setattr(preemption, "watch_maintenance", lambda url, tell, done: (tell(url), told.set()))
    stop = Preemption("notice")
    with stop.listen():
        assert told.wait(60)
        signal.raise_signal(signal.SIGTERM)
        assert stop.reason == "notice"
    assert [line.split(":")[0] for line in capfd.readouterr().err.split("\n") if line] == ["notice", "SIGTERM"]
