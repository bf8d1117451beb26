"""Examines a machine before a run: what is installed, what is there, and whether a small training works."""
