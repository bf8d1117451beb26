"""`hf-tpu doctor --full`: every mechanism passes here, and a fault of torch_xla's own calls makes its line fail."""

import json
import os
import re
import subprocess
import sys

import pytest

from hf_tpu_ext.doctor.trials import FULL, MECHANISMS, Trials


PLANT = """
import os, sys
{environment}
import torch, torch_xla
import torch_xla.experimental.scan, torch_xla.runtime
from torch.utils._pytree import tree_map_only
def wrong(module, name, change):
    right = getattr(module, name)
    setattr(module, name, lambda *args, **kwargs: change(right, *args, **kwargs))
def every(tensors, change):
    return [change(tensor) if tensor.is_floating_point() else tensor for tensor in tensors]
X = torch_xla._XLAC
{fault}
from hf_tpu_ext.doctor import speed
speed.SMOLLM2 |= {{"num_hidden_layers": 2, "vocab_size": 512}}
from hf_tpu_ext.doctor.mechanisms import main
sys.exit(main(*sys.argv[1:]))
"""
SENT = "wrong(X, '_xla_tensors_from_aten', lambda right, tensors, *args: right(every(tensors, lambda t: {}), *args))"
# What a program is given next may not be pending.
RUN = """
def run(right, *args):
    results = every(right(*args), lambda t: {})
    X._xla_sync_multi(results, [], True, False)
    return results
wrong(X, '_run_cached_graph', run)
"""
READ = "wrong(X, '_xla_get_cpu_tensors', lambda right, *args: every(right(*args), lambda t: {}))"
#: A fault for each mechanism, and what its line says then.
FAULTS = {
    "runtime": ("os.environ['HF_TPU_EXT_BACKEND'] = 'gpu'", "Unknown HF_TPU_EXT_BACKEND"),
    "parity": (SENT.format("t * 1.1"), "on eager CPU"),
    "adapter": (RUN.format("t * 1.01"), "on eager CPU"),
    "replay": (RUN.format("t * (1 + 2**-20)"), "traced against replayed: .* weights differ"),
    "donation": ("wrong(X, '_set_buffer_donation', lambda right, *args: None)", "of 141 .* are updated in place"),
    "two lengths": ("os.environ['XLA_COMPILATION_CACHE_SIZE'] = '1'", "compiled late"),
    "accumulation": (RUN.format("t * 1.01"), "on eager CPU"),
    "bfloat16": (RUN.format("t.bfloat16().float()"), "weights are kept in bfloat16"),
    "activation checkpointing": (
        # In place, behind the back of autograd, as the barrier itself.
        "def barrier(right, tensors):\n"
        "    right(tensors)\n"
        "    every(tensors, lambda t: t.data.mul_(1.1))\n"
        "wrong(X, '_xla_optimization_barrier_', barrier)",
        "on eager CPU",
    ),
    "layers as a loop": (
        "def scan(right, body, carry, *args):\n"
        "    carry, results = right(body, carry, *args)\n"
        # A factor would be lost: the norm behind the layers divides by it.
        "    return tree_map_only(torch.Tensor, lambda t: t.flip(-1) if t.is_floating_point() else t, carry), results\n"
        "wrong(torch_xla.experimental.scan, '_scan_impl_pytree', scan)",
        "on eager CPU",
    ),
    "splash attention": (
        "wrong(X, '_xla_user_computation', lambda right, *args: every(right(*args), lambda t: t * 2))",
        "on eager CPU|sliced attention",
    ),
    "evaluation": (READ.format("t * 1.01"), "on eager CPU"),
    "teacher": (RUN.format("t * 1.01"), "on eager CPU"),
    "DPO": (RUN.format("t * 1.01"), "on eager CPU"),
    "generation": (
        "wrong(X, '_xla_get_cpu_tensors', lambda right, *args: [\n"
        "    t if t.is_floating_point() or t.ndim < 2 else (t + 1) % 250 for t in right(*args)])",
        "a greedy token has a logit",
    ),
    "all chips": ("wrong(X, '_xla_mark_sharding', lambda right, *args: None)", "holds every weight whole"),
    "kill and resume": (SENT.format("t + 1e-4 * (t.ndim > 0)"), "resumed against never stopped"),
    "compile cache": ("wrong(torch_xla.runtime, 'initialize_cache', lambda right, *args, **kwargs: None)", "no graph"),
    "SmolLM2-135M": (RUN.format("t * float('nan')"), "the loss does not fall"),
}


def try_one(name, fault, tmp_path, environment=""):
    command = (sys.executable, "-c", PLANT.format(fault=fault, environment=environment))
    trials = Trials([[name]], command=command)
    (check,) = trials.run()
    return check, trials.output


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_a_planted_fault_is_found(name, tmp_path):
    fault, text = FAULTS[name]
    environment = "os.environ['CPU_NUM_DEVICES'] = '8'" if name == "all chips" else ""
    if fault.startswith("os.environ"):
        environment, fault = fault, ""
    check, output = try_one(name, fault, tmp_path, environment)
    assert (check.status, check.fix) == ("failed", MECHANISMS[name]), output
    assert re.search(text, check.text), f"{check.text}\n{output}"


def test_every_mechanism_is_tried_once():
    assert [name for names in FULL for name in names] == list(MECHANISMS)
    assert set(FAULTS) == set(MECHANISMS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [
        {"PJRT_DEVICE": "CPU"},
        {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"},
        {"HF_TPU_EXT_BACKEND": "cpu"},
    ],
    ids=["xla-1", "xla-8", "cpu"],
)
def test_this_machine(environment, tmp_path):
    command = [sys.executable, "-m", "hf_tpu_ext.cli.main", "doctor", "--full", "--minutes", "25"]
    result = subprocess.run(
        [*command, "--json", str(tmp_path / "found.json")],
        capture_output=True,
        text=True,
        env=os.environ | environment | {"PYTHONIOENCODING": "utf-8"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    tried = {check["name"]: check for check in found["checks"][-len(MECHANISMS) :]}
    assert list(tried) == list(MECHANISMS)
    applies = {name for name, check in tried.items() if check["status"] == "ok"}
    assert {"parity", "accumulation", "evaluation", "teacher", "DPO", "generation", "kill and resume"} <= applies
    assert all("seconds" in check["numbers"] for check in tried.values())
