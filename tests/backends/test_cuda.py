"""What is asked of a machine with GPUs, which this one need not have."""

import pytest
import torch

from hf_tpu_ext.backends.cuda import CUDABackend


@pytest.mark.parametrize(
    ("gpus", "launched", "says"),
    [(1, False, False), (4, True, False), (4, False, True)],
)
def test_one_process_on_several_gpus_says_how_to_start_one_for_each(gpus, launched, says, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if launched:
        monkeypatch.setenv("WORLD_SIZE", "4")
    lines = CUDABackend("CUDA is available").prepare_host()
    assert len(lines) == says
    if says:
        assert "4 GPUs by nn.DataParallel" in lines[0]
        assert "accelerate launch --multi_gpu --num_processes 4 SCRIPT" in lines[0]
