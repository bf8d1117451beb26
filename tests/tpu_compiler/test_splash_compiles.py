"""Splash attention, compiled by the compiler for TPU."""

import re
from dataclasses import replace

import pytest

from hf_tpu_ext.hardware.topologies import find_topology
from hf_tpu_ext.kernels.splash import SplashAttention, lower
from hf_tpu_ext.plan.compiler import compile_programs
from hf_tpu_ext.plan.programs import Argument, TracedProgram


KERNEL = SplashAttention(rows=2, heads=4, kv_heads=2, length=1024, head_dim=128, dtype="bfloat16")
OTHERS = {
    "narrow": {"head_dim": 64},
    "96": {"head_dim": 96},
    "160": {"head_dim": 160},
    "wide": {"head_dim": 256},
    "heads-of-their-own": {"kv_heads": 4},
    "one-key": {"kv_heads": 1},
    "window": {"window": 300},
    "soft-cap": {"soft_cap": 50.0},
    "short": {"length": 200},
    "odd-length": {"length": 1152},
    "long": {"length": 16384, "rows": 1},
}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("topology", "changes"),
    [
        ("v5e-1", {}),
        pytest.param("v6e-1", {}, marks=pytest.mark.slow),
        pytest.param("v5p-2", {}, marks=pytest.mark.slow),
        *(pytest.param("v5e-1", changes, marks=pytest.mark.slow) for changes in OTHERS.values()),
    ],
    ids=["v5e-1", "v6e-1", "v5p-2", *OTHERS],
)
def test_the_compiler_takes_it(topology, changes):
    programs = lower(replace(KERNEL, **changes))
    taken = {"infer": 4, "forward": 4, "backward": 7}
    traced = [
        TracedProgram(name, (1, 1), programs[name], [Argument("other", 0, False)] * count, 1)
        for name, count in taken.items()
    ]
    kernels = {"infer": 1, "forward": 1, "backward": 2}
    for compiled in compile_programs(traced, find_topology(topology), jobs=2):
        assert compiled.error is None, compiled.error
        assert compiled.text.count('custom_call_target="tpu_custom_call"') == kernels[compiled.kind]
        # The plan counts by it.
        assert len(re.findall(r"attention_kernel\[flops=\d+\]", compiled.text)) >= kernels[compiled.kind]
