"""
Processes of tests that have PyTorch, torch_xla, Transformers, TRL and this package imported when they begin.

To import them takes an interpreter five seconds. [`run`] and [`Popen`] are those of `subprocess`, for commands of
`sys.executable` with a file, `-m` or `-c`: a process that has imported all this, and started nothing of XLA, is forked.
"""

import atexit
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from select import select
from types import ModuleType


IMPORTED = ("datasets", "peft", "trl.trainer.sft_trainer", "trl.trainer.dpo_trainer", "trl.trainer.grpo_trainer")
IMPORTED_FOR_XLA = ("torch_xla.distributed.spmd", "hf_tpu_ext.backends.xla.backend")
#: Of variables that are read when modules are imported; with another value of one, another process is forked. A test of
#: others, or of how an interpreter starts, starts one.
READ_AT_IMPORT = ("HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "PJRT_DEVICE", "USE_TORCH_XLA")
_servers: dict[tuple, socket.socket] = {}
# As the tests began: one of them may have changed it.
_ENVIRONMENT, _DIRECTORY = {name: os.environ[name] for name in os.environ if name not in READ_AT_IMPORT}, os.getcwd()


# ---- In a process of the tests ----


def _server(environment: dict[str, str]) -> socket.socket:
    """The connection to a process that has imported all in this environment, which lasts as long as the tests."""
    read = {name: environment[name] for name in READ_AT_IMPORT if name in environment}
    if (key := tuple(read.items())) not in _servers:
        _servers[key], theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env={**_ENVIRONMENT, **read},
                cwd=_DIRECTORY,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        # With the time that its processes took.
        atexit.register(process.wait)
        atexit.register(_servers[key].shutdown, socket.SHUT_RDWR)
    return _servers[key]


class ForkedPopen(subprocess.Popen):
    """A process that another one than this has forked, and waits for: how it is started and waited for is replaced."""

    # The arguments are those of the standard library's, which is to be the same in Python 3.11 and newer.
    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        p2cread, _, _, c2pwrite, _, errwrite = pipes = rest[3:9]
        python, *words = map(os.fspath, args)
        assert python == sys.executable and preexec_fn is None and not pass_fds
        env = dict(os.environ if env is None else env)
        request = [words, os.fspath(cwd or os.getcwd()), env, rest[-2]]
        self._answers, theirs = socket.socketpair()
        streams = [given if given >= 0 else own for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        with theirs:
            socket.send_fds(_server(env), [b"."], [theirs.fileno(), *streams])
        self._answers.sendall(json.dumps(request).encode() + b"\n")
        self.pid = self._answer()
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _answer(self):
        answer = self._answers.recv(8)
        assert answer, "the process that forks has ended"
        return int.from_bytes(answer)

    def _try_wait(self, wait_flags):
        if wait_flags & os.WNOHANG and not select([self._answers], [], [], 0)[0]:
            return 0, 0
        with self._answers:
            return self.pid, self._answer()

    def _internal_poll(self, _deadstate=None):
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)
        return self.returncode


# Where torch_tpu is tested, and in an environment for a GPU, there is nothing to fork before.
Popen = subprocess.Popen if find_spec("torch_xla") is None else ForkedPopen


def run(args, *, input=None, capture_output=False, timeout=None, **kwargs) -> subprocess.CompletedProcess:
    """As `subprocess.run`, without `check`."""
    if input is not None:
        kwargs["stdin"] = subprocess.PIPE
    if capture_output:
        kwargs |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(args, **kwargs) as process:
        try:
            stdout, stderr = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


# ---- In the process that forks, and in those that it has forked ----


def _serve(requests: socket.socket) -> list[str]:
    """Fork a process for each request. Returns in each of them what it is to run."""
    before = dict(os.environ)
    # Of what is imported, next to nothing is garbage.
    gc.disable()
    for name in (*(IMPORTED_FOR_XLA if os.environ.get("USE_TORCH_XLA") != "0" else ()), *IMPORTED):
        import_module(name)
    imports_set = {name: value for name, value in os.environ.items() if before.get(name) != value}
    # They stay where they are in memory, shared by all.
    gc.collect()
    gc.freeze()
    gc.enable()
    while fds := socket.recv_fds(requests, 1, 4)[1]:
        if os.fork() == 0:
            requests.close()
            words, env = _begin(*fds)
            os.environ.clear()
            os.environ.update(env)
            os.environ.update({name: new for name, new in imports_set.items() if env.get(name) == before.get(name)})
            return words
        for fd in fds:
            os.close(fd)
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    os._exit(0)


def _begin(channel: int, *streams: int) -> tuple[list[str], dict[str, str]]:
    """Fork a process, in which this returns what it was given, and answer with its number and then its status."""
    channel = socket.socket(fileno=channel)
    words, cwd, env, new_session = json.loads(channel.makefile().readline())
    if process := os.fork():
        for stream in streams:
            os.close(stream)
        channel.sendall(process.to_bytes(8))
        channel.sendall(os.waitpid(process, 0)[1].to_bytes(8))
        os._exit(0)
    channel.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    # Those of the interpreter were made for other files: whether one has positions is asked once.
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    if new_session:
        os.setsid()
    os.chdir(cwd)
    return words, env


def _run(first: str, *words: str) -> None:
    """What an interpreter does with its arguments. Modules of tests, which import this one, can be imported."""
    sys.path.append(sys.path[0])
    if first == "-c":
        sys.argv, sys.path[0] = [first, *words[1:]], ""
        sys.modules["__main__"] = module = ModuleType("__main__")
        exec(compile(words[0], "<string>", "exec"), vars(module))
    elif first == "-m":
        sys.argv, sys.path[0] = [*words], os.getcwd()
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [first, *words], os.path.dirname(first)
        runpy.run_path(first, run_name="__main__")


def _run_and_exit(words: list[str]) -> None:
    """Run, and end as an interpreter does, but for taking apart all that is imported, which takes longer than many a test."""
    status = 1
    try:
        _run(*words)
        status = 0
    except SystemExit as exit:
        if exit.code is None or isinstance(exit.code, int):
            status = exit.code or 0
        else:
            print(exit.code, file=sys.stderr)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    _run_and_exit(_serve(socket.socket(fileno=int(sys.argv[1]))))
