"""Checkpoints of a run: files, saving, resuming, one run a directory."""
