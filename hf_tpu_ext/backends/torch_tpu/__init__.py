"""TPU chips by torch_tpu, whose device PyTorch knows as `tpu`. Nothing outside this folder imports torch_tpu."""
