"""`python -m hf_tpu_ext.report RUN_DIR`: what a trainer starts when a run ends."""

import sys

from .make import make_report
from .planned import compare_if_planned, describe_in_lines
from .record import read_run


(run_dir,) = sys.argv[1:]
try:
    print(f"Report: {make_report([run_dir])}")
    if (planned := compare_if_planned(read_run(run_dir), run_dir)) is not None:
        print(*describe_in_lines(planned), sep="\n")
except ValueError as error:
    sys.exit(str(error))
