"""What is asked of an accelerator: by one name for each question, and answered in its own file."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_tpu_ext
from hf_tpu_ext.backends.base import Backend
from hf_tpu_ext.backends.cpu import CPUBackend
from hf_tpu_ext.backends.cuda import CUDABackend
from hf_tpu_ext.backends.detect import BACKENDS
from hf_tpu_ext.backends.insight import describe_number
from hf_tpu_ext.examples.tiny import make_model
from hf_tpu_ext.sharding.per_chip import FullToShard, ShardToFull
from hf_tpu_ext.sharding.plan import place_model
from hf_tpu_ext.trainers import TPUSFTConfig


QUESTIONS = [name for name in Backend.__annotations__ if vars(Backend).get(name) is False]
SOURCES = {path: path.read_text() for path in Path(hf_tpu_ext.__file__).parent.rglob("*.py")}
OUTSIDE = {path: text for path, text in SOURCES.items() if path.parent.name != "backends"}


def test_an_eager_device_is_as_upstream_has_it(xla):
    assert len(QUESTIONS) == 9
    for name in QUESTIONS:
        # torch_tpu compiles single operators and functions, and has processes that hold parts.
        not_xla = name.startswith("compiles_") or name in ("splits_weights", "runs_gpu_kernels")
        assert getattr(xla, name) is not not_xla
        assert not getattr(CPUBackend, name) and getattr(CUDABackend, name) is (name == "runs_gpu_kernels")
    assert xla.kernels.platform == "cpu" and CPUBackend.kernels.platform is CUDABackend.kernels.platform is None


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_question_is_asked(name):
    assert any(re.search(rf"backend\.{name}\b", text) for text in OUTSIDE.values())


def test_nobody_asks_which_accelerator_it_is():
    for path, text in OUTSIDE.items():
        assert not re.search(r"backend\.name [!=]=|isinstance\([^)]*Backend\)", text), path


def test_names_are_written_once():
    assert vars(TPUSFTConfig)["__dataclass_fields__"]["backend"].metadata["choices"] == list(BACKENDS)
    listed = re.compile(r"[\[(]\"auto\", \"tpu\", \"xla\"")
    assert [path.name for path, text in SOURCES.items() if listed.search(text)] == ["detect.py"]


class StaticCPU(CPUBackend):
    """Runs eagerly, and wants few shapes."""

    static_shapes = True


@pytest.mark.parametrize(("backend", "experts"), [(StaticCPU, "batched_mm"), (CPUBackend, None)])
def test_static_shapes_alone(tmp_path, backend, experts):
    directory = make_model(tmp_path, "qwen3_moe", hidden_size=32, num_hidden_layers=1)
    model = AutoModelForCausalLM.from_pretrained(directory)
    before = model.config._experts_implementation
    place_model(model, backend("for the test"), {"data": 1, "fsdp": 1})
    assert model.config._experts_implementation == (experts or before) and before != "batched_mm"
    # Nothing else was asked of it: attention is the caller's, and so are calls of the model.
    assert model.config._attn_implementation == "sdpa"
    assert not vars(model).get("forward")


def test_regions_of_one_chip_change_nothing():
    backend = CPUBackend("for the test")
    tensor = torch.randn(3, 2, requires_grad=True)
    with backend.manual_sharding.region(active=False):
        assert not backend.manual_sharding.active
    with backend.manual_sharding.region():
        assert backend.manual_sharding.active
        with backend.manual_sharding.region(active=False):
            assert backend.manual_sharding.active
        shard = FullToShard.apply(tensor, backend, True)
        full = ShardToFull.apply(shard * 2, backend)
    assert not backend.manual_sharding.active
    full.sum().backward()
    assert torch.equal(full, tensor * 2) and torch.equal(tensor.grad, torch.full((3, 2), 2.0))


@pytest.mark.parametrize("number", [0.0, 1.0, -1.0, 0.5, 2.0, -2.0])
def test_which_numbers_are_folded(xla, number):
    """The compiles that they cost are those that are named."""
    tensor = torch.ones(3) * (7 + number)
    sent = xla.send(tensor)
    xla.wait()
    (sent * 0.25).sum()
    xla.wait()

    def compiles_of(value):
        kept = sent * value
        before = xla.counters().compiles
        xla.wait()
        assert kept is not None
        return xla.counters().compiles - before

    compiles_of(0.25)
    folded = describe_number(number) != "neither 0, 1 nor -1"
    assert folded == (number in (0, 1, -1))
    assert (compiles_of(number) > 0) == folded
