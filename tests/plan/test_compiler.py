"""Compilers are processes, which end with what they are for."""

import time
from threading import Event, Thread

import psutil

from hf_tpu_ext.hardware.topologies import find_topology
from hf_tpu_ext.plan import compiler
from hf_tpu_ext.plan.compiler import compile_programs
from hf_tpu_ext.plan.programs import TracedProgram


def test_a_stop_ends_the_compilers(tmp_path, monkeypatch):
    script = tmp_path / "compiles_for_long.py"
    script.write_text(
        "import pathlib, sys, time; pathlib.Path(sys.argv[0]).with_suffix('.begun').touch(); time.sleep(600)"
    )
    monkeypatch.setattr(compiler, "_SCRIPT", script)
    programs = [TracedProgram("training step", (8, length), b"", [], 1) for length in (64, 128, 256)]
    stop, errors = Event(), []

    def compile_all():
        try:
            list(compile_programs(programs, find_topology("v5e-1"), 2, stop))
        except ValueError as error:
            errors.append(error)

    thread = Thread(target=compile_all, daemon=True)
    thread.start()
    while not script.with_suffix(".begun").exists():
        assert thread.is_alive()
        time.sleep(0.05)
    stop.set()
    thread.join(timeout=60)
    assert not thread.is_alive() and len(errors) == 1
    assert not [child for child in psutil.Process().children() if str(script) in child.cmdline()]
