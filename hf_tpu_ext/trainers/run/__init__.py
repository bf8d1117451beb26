"""One run: its batches, steps, evaluations, metrics and logs, on one chip or many."""
