"""A training step in its stages, and what its program depends on."""
