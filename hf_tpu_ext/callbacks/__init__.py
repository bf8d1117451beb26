"""Callbacks of a run, and what it prints and records."""
