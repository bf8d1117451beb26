"""
Plans recipes with a compiler that refuses all that it is given, and writes down the status, the advice and what was printed of each.

    python advice_driver.py OUTPUT < argvs.json
"""

import contextlib
import io
import json
import sys
from pathlib import Path

from hf_tpu_ext.cli.main import main
from hf_tpu_ext.plan import make
from hf_tpu_ext.plan.programs import CompiledProgram


def refuse(programs, *args):
    for program in programs:
        yield CompiledProgram(program.kind, program.batch_shape, 1.0, "RESOURCE_EXHAUSTED", arguments=program.resident)


make.compile_programs, make.find_wrong_versions = refuse, list
output = Path(sys.argv[1])
told = []
for argv in json.load(sys.stdin):
    output.unlink(missing_ok=True)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            status = main(["plan", *argv, "--json", str(output)])
        except SystemExit as stop:
            status = stop.code
    advice = json.loads(output.read_text())["advice"] if output.exists() else []
    told.append({"status": status, "advice": advice, "printed": printed.getvalue()})
output.write_text(json.dumps(told))
