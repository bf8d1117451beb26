"""Runs `hf-tpu` on a host of a pretended slice."""

import sys

import join_slice  # noqa: F401

from hf_tpu_ext.cli.main import main


if __name__ == "__main__":
    sys.exit(main())
