"""TPU chips by torch_xla, or XLA compiled for the host. Nothing outside this folder imports torch_xla."""
