"""What a run does when it is told to stop: by a signal, or by the notice that a Cloud machine gets before it is taken."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from http.client import HTTPException
from types import FrameType
from urllib.request import ProxyHandler, Request, build_opener

from transformers import TrainerCallback

from ..backends.processes import ALONE, Processes
from ..temporarily import temporarily


#: What a Cloud machine can ask about itself (https://cloud.google.com/compute/docs/metadata/predefined-metadata-keys).
METADATA_URL = "http://metadata.google.internal/computeMetadata/v1/instance"
# Some senders repeat themselves at once: `timeout` tells the process and then its group.
_ONE_SIGNAL_SECONDS = 1.0


class TrainingPreempted(SystemExit):
    """
    Raised by `train` when the run was told to stop and its checkpoint is saved.

    Left alone, it ends the process with exit status 75 (`EX_TEMPFAIL`: try again later). `except Exception` does not
    take it for an error of the run.

    Args:
        reason (`str`): What told it, e.g. `"SIGTERM"`.
        checkpoint (`str`): The checkpoint to resume from.
        step (`int`): Optimizer steps done.
    """

    def __init__(self, reason: str, checkpoint: str, step: int):
        super().__init__(os.EX_TEMPFAIL)
        self.reason = reason
        self.checkpoint = checkpoint
        self.step = step

    def __str__(self) -> str:
        return (
            f"Stopped by {self.reason} after step {self.step}, saved in {self.checkpoint}. To resume, run the same command "
            "with --resume_from_checkpoint true (hf-tpu, trl), or call trainer.train(resume_from_checkpoint=True) in your script."
        )


class EvaluationCut(Exception):
    """Ends an evaluation half-way."""


class Preemption(TrainerCallback):
    """
    Notes that the run was told to stop.

    While it listens, the first SIGTERM, SIGINT or SIGHUP (the terminal was closed, the connection is lost) is noted, and a
    second one does what it did before. Only the process and the thread that may handle signals do this; elsewhere
    nothing changes. With the URL of a Cloud machine's metadata server ([`METADATA_URL`]), that is asked for a maintenance
    notice, too. Several `processes` stop after the same step, whichever of them is told.
    """

    def __init__(self, maintenance_url: str | None = None, processes: Processes = ALONE):
        #: What told the run to stop, or `None`.
        self.reason: str | None = None
        self.listening = False
        self._maintenance_url = maintenance_url
        self._processes = processes
        self._cuts_evaluation = False

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Within this context, listen."""
        self.reason = self._signalled_at = None
        self.listening = threading.current_thread() is threading.main_thread()
        if not self.listening:
            yield
            return
        self._processes.begin_listening()
        self._process = os.getpid()
        self._handlers = {}
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # One that is ignored stays ignored, as for `nohup` and for jobs in the background of a shell script.
            if signal.getsignal(number) not in (None, signal.SIG_IGN):
                self._handlers[number] = signal.signal(number, self._on_signal)
        self._is_done = threading.Event()
        if self._maintenance_url is not None:
            asking = (self._maintenance_url, self._tell, self._is_done)
            threading.Thread(target=watch_maintenance, args=asking, daemon=True).start()
        try:
            yield
        finally:
            self.stop_listening()

    def stop_listening(self) -> None:
        """From here on signals do what they did before: the run has done its last step, after which none is left to save at."""
        self.listening = False
        self._is_done.set()
        self._restore_handlers()

    def cutting_evaluation(self) -> AbstractContextManager:
        """Within this context, an [`EvaluationCut`] ends an evaluation with its batch when the run is told to stop."""
        return temporarily(self, _cuts_evaluation=self.listening)

    def on_step_end(self, args, state, control, **kwargs):
        self._ask_others()

    def _ask_others(self) -> None:
        """Called at a place where a run can stop: several processes have a reason from the place on that they have agreed on."""
        if self.listening and self._processes.count > 1 and self.reason is None:
            self.reason = self._processes.pass_place()

    def on_prediction_step(self, args, state, control, **kwargs):
        self.cut_if_told()

    def cut_if_told(self) -> None:
        """End an evaluation here by an [`EvaluationCut`] if the run is told to stop, in [`~Preemption.cutting_evaluation`]."""
        if self._cuts_evaluation:
            self._ask_others()
        if self._cuts_evaluation and self.reason is not None:
            raise EvaluationCut

    def on_epoch_end(self, args, state, control, **kwargs):
        # Upstream calls this where the loop was left, too. What is due at the end of an epoch is due there only.
        if self.reason is not None and state.global_step < state.max_steps and state.epoch % 1:
            control.should_log = control.should_evaluate = control.should_save = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # This is a worker of a loader. Ctrl-C reaches it as well, and the step that ends still needs its batches.
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        if number == signal.SIGHUP:
            self._leave_closed_terminals()
        now = time.monotonic()
        if self._signalled_at is None:
            self._signalled_at = now
            self._tell(signal.Signals(number).name, "; a second one exits immediately")
        elif now - self._signalled_at > _ONE_SIGNAL_SECONDS:
            self._restore_handlers()
            signal.raise_signal(number)

    def _leave_closed_terminals(self) -> None:
        """Writing to a terminal that is closed raises: without this, the next line of a progress bar ends the run before it is saved."""
        for descriptor in self._terminals:
            if not os.isatty(descriptor):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)

    def _tell(self, reason: str, more: str = "") -> None:
        if self._processes.count > 1:
            self._processes.request_stop(reason)
        elif self.reason is None:
            self.reason = reason
        # Ctrl-C reaches all processes of a terminal.
        process = f"{self._processes.word} {self._processes.index}: " if self._processes.count > 1 else ""
        # The signal may have come in the middle of a write to `sys.stderr`. Nobody may be listening.
        with suppress(OSError):
            os.write(2, f"\n{process}{reason}: saving after this step{more}.\n".encode())

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}


def watch_maintenance(
    url: str, tell: Callable[[str], None], is_done: threading.Event, seconds_between: float = 5.0
) -> None:
    """
    Ask a metadata server every few seconds whether the machine is to be taken, until it says so or `is_done` is set.
    """
    # The server is of this machine, whatever proxy the network needs.
    opener = build_opener(ProxyHandler({}))
    while not is_done.wait(seconds_between):
        for key, nothing in (("preempted", "FALSE"), ("maintenance-event", "NONE")):
            # Not every kind of machine has both, and the server may be busy.
            with suppress(OSError, HTTPException):
                request = Request(f"{url}/{key}", headers={"Metadata-Flavor": "Google"})
                with opener.open(request, timeout=2) as reply:
                    answer = reply.read().decode().strip()
                if answer != nothing:
                    tell(f"Maintenance notice ({key}: {answer})")
                    return
