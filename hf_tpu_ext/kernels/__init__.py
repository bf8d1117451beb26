"""Kernels for TPU that jax has, lowered in a process of its own: jax is never loaded beside torch_xla."""
