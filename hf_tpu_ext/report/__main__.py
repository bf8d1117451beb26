"""`python -m hf_tpu_ext.report RUN_DIR`: what a trainer starts when a run ends."""

import sys

from .make import make_report


try:
    print(f"Report: {make_report(sys.argv[1:])}")
except ValueError as error:
    sys.exit(str(error))
