import compact_cache
import numpy as np
import pytest
import torch

from hf_tpu_ext.distillation.cache_format import CacheSettings
from hf_tpu_ext.distillation.cache_writer import CacheWriter
from hf_tpu_ext.distillation.top_k import TeacherRows


def test_errors_are_those_of_half_a_step(tmp_path):
    logits = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * 4
    rows = TeacherRows.of(logits, 32, (1.0, 2.0))
    settings = CacheSettings("t", "", "", "", 512, 32, (1.0, 2.0), None, "float32", False, "", 1, 64)
    writer = CacheWriter(tmp_path, settings, [bytes(16)], [64])
    writer.write(range(1), [rows])
    writer.finish()
    results = compact_cache.measure(tmp_path)
    half_steps = (rows.values[:, 0] - rows.values[:, -1]).float().numpy() / 510
    assert results[1.0]["max"] == pytest.approx(half_steps.max(), rel=0.1)
    assert results[2.0]["max"] == pytest.approx(results[1.0]["max"] / 2, rel=1e-3)
    # Errors are spread evenly over a step.
    assert results[1.0]["rms"] == pytest.approx(np.sqrt(np.square(half_steps).mean() / 3), rel=0.1)
    assert 0 < results[1.0]["weighted"] < results[1.0]["max"]
    assert 0 < results[1.0]["mass"] < results[1.0]["mass_max"]
    assert "| 1 |" in compact_cache.make_table(results)
