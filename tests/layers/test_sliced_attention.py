"""Attention in slices gives the numbers of eager attention, and never has all scores at once."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch_xla
from test_layer_stack import forward_and_backward
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen3 import modeling_qwen3

from hf_tpu_ext.examples.tiny import make_model
from hf_tpu_ext.layers import sliced_attention
from hf_tpu_ext.layers.attention import choose_attention, static_masks
from hf_tpu_ext.layers.static_kernels import use_static_kernels


ROWS, LENGTH, WIDTH = 4, 16, 8
MESH = {"data": 1, "fsdp": 1}
LOWEST = torch.finfo(torch.float32).min
CUTS = {"rows": (4, 1, 1), "heads": (4, 2, 1), "queries": (4, 2, 4)}


class Attention(nn.Module):
    """As much of a module as eager attention looks at."""

    def __init__(self, groups, sinks=None):
        super().__init__()
        self.num_key_value_groups = groups
        if sinks is not None:
            self.sinks = nn.Parameter(sinks)


class Qwen3(Attention):
    forward = modeling_qwen3.Qwen3Attention.forward
    eager = staticmethod(modeling_qwen3.eager_attention_forward)


class GptOss(Attention):
    forward = modeling_gpt_oss.GptOssAttention.forward
    eager = staticmethod(modeling_gpt_oss.eager_attention_forward)


def masks():
    positions = torch.arange(LENGTH)
    causal = positions[:, None] >= positions
    padded = causal & (positions < torch.tensor([16, 12, 7, 1])[:, None, None, None])
    documents = torch.randint(3, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1)).sort().values
    packed = causal & (documents[:, None, :, None] == documents[:, None, None, :])
    allowed = {
        "causal": causal.expand(ROWS, 1, -1, -1),
        "for_all_rows": causal[None, None],
        "padded": padded | torch.eye(LENGTH, dtype=torch.bool),
        "packed": packed,
        "sliding_window": (causal & (positions[:, None] - positions < 5)).expand(ROWS, 1, -1, -1),
    }
    return {"none": None} | {name: torch.where(mask, 0.0, LOWEST) for name, mask in allowed.items()}


def inputs(heads, groups):
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (ROWS, heads, LENGTH, WIDTH),
        *[(ROWS, heads // groups, LENGTH, WIDTH)] * 2,
        (ROWS, LENGTH, heads, WIDTH),
    ]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def attend(backend, function, module, tensors, mask, dtype=None, double=False, **kwargs):
    """Output and gradients of query, key, value and sinks; and the program where there is one."""
    *tensors, gradient = (tensor.double() if double else tensor for tensor in tensors)
    if backend is not None:
        tensors, gradient, mask = backend.send([tensors, gradient, mask])
        backend.wait()
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    with torch.autocast(gradient.device.type, dtype or torch.bfloat16, enabled=dtype is not None):
        output = function(module, *tensors, mask, scaling=WIDTH**-0.5, **kwargs)[0]
    results = (output, *torch.autograd.grad(output, [*tensors, *module.parameters()], gradient.to(output.dtype)))
    if backend is None:
        return results, None
    program = torch_xla._XLAC._get_xla_tensors_hlo(list(results))
    return backend.fetch(results), program


def largest(program):
    """Elements of the largest tensor of numbers in a program."""
    return max(math.prod(map(int, shape.split(","))) for shape in re.findall(r"(?:f32|bf16)\[([\d,]+)\]", program))


@pytest.fixture
def cut(monkeypatch):
    def cut(heads, parts):
        monkeypatch.setattr(sliced_attention, "SLICE_ELEMENTS", ROWS * heads * LENGTH**2 // math.prod(parts))

    return cut


@pytest.fixture
def sliced(xla):
    return lambda *args, **kwargs: sliced_attention.sliced_attention(xla, *args, **kwargs)


@pytest.mark.parametrize("mask", masks())
@pytest.mark.parametrize("parts", CUTS.values(), ids=CUTS)
def test_numbers_are_those_of_eager_attention(xla, sliced, cut, parts, mask):
    module, tensors, mask = Qwen3(2), inputs(heads=4, groups=2), masks()[mask]
    cut(4, parts)
    exact, _ = attend(None, module.eager, module, tensors, mask, double=True)
    found, program = attend(xla, sliced, module, tensors, mask)
    assert program.count(" while(") == 2 * sum(count > 1 for count in parts)
    for theirs, ours in zip(exact, found, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("heads", "groups"), [(2, 1), (4, 1), (6, 3), (4, 4)])
def test_numbers_under_autocast(xla, sliced, cut, heads, groups):
    """Rounded where eager attention rounds: slices of rows and heads have the same bits."""
    module, tensors, mask = Qwen3(groups), inputs(heads, groups), masks()["causal"]
    eager, _ = attend(xla, module.eager, module, tensors, mask, torch.bfloat16)
    for parts in ((4, 1, 1), (4, heads // groups, 1), (4, heads // groups, 4)):
        cut(heads, parts)
        found, _ = attend(xla, sliced, module, tensors, mask, torch.bfloat16)
        for theirs, ours in zip(eager, found, strict=True):
            assert ours.dtype == theirs.dtype
            if parts[2] == 1:
                assert torch.equal(ours, theirs)
            else:
                assert (ours - theirs).norm() < 2**-7 * theirs.norm()


def test_softcap(xla, sliced, cut):
    from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention, eager_attention_forward

    module = type("Gemma2", (Attention,), {"forward": Gemma2Attention.forward})(2)
    tensors, mask = inputs(4, 2), masks()["causal"]
    cut(4, (4, 2, 1))
    plain, _ = attend(None, eager_attention_forward, module, tensors, mask)
    expected, _ = attend(None, eager_attention_forward, module, tensors, mask, softcap=0.5)
    found, program = attend(xla, sliced, module, tensors, mask, softcap=0.5)
    assert " while(" in program and not torch.allclose(plain[0], expected[0])
    for theirs, ours in zip(expected, found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


def test_there_are_never_all_scores(xla, sliced, cut):
    module, tensors, mask = Qwen3(2), inputs(4, 2), masks()["causal"]
    scores = ROWS * 4 * LENGTH**2
    _, program = attend(xla, module.eager, module, tensors, mask)
    assert largest(program) == scores
    cut(4, CUTS["heads"])
    # Four rows of queries are more than the scores of a row here.
    _, program = attend(xla, sliced, module, tensors, mask)
    assert largest(program) == max(tensor.numel() for tensor in tensors) < scores


def test_one_slice_is_eager_attention(xla, sliced, cut):
    module, tensors, mask = Qwen3(2), inputs(4, 2), masks()["causal"]
    cut(4, (1, 1, 1))
    expected, program = attend(xla, module.eager, module, tensors, mask)
    found, same_program = attend(xla, sliced, module, tensors, mask)
    assert program.count(" = ") == same_program.count(" = ") and " while(" not in same_program
    assert all(torch.equal(theirs, ours) for theirs, ours in zip(expected, found, strict=True))


def test_lengths_that_do_not_divide():
    """There are fewer slices then, all alike, and no more than are needed."""
    choose = sliced_attention._choose_parts

    def sizes(rows, heads, keys, length):
        return torch.empty(rows, heads, length, 8, device="meta"), torch.empty(rows, keys, length, 8, device="meta")

    assert choose(*sizes(1, 2, 1, 64), 1) == [1, 1, 1]
    assert choose(*sizes(4, 16, 8, 1024), 1) == [4, 4, 1]
    assert choose(*sizes(6, 16, 8, 1024), 1) == [6, 4, 1]
    assert choose(*sizes(1, 16, 8, 8192), 1) == [1, 8, 32]
    assert choose(*sizes(1, 16, 8, 8191), 1) == [1, 8, 1]
    # Rows that are split over chips.
    assert choose(*sizes(32, 16, 8, 1024), 8) == [1, 8, 2]


def test_dropout_is_eager_attention(xla, sliced, cut):
    module, tensors, mask = Qwen3(2).train(), inputs(4, 2), masks()["causal"]
    cut(4, CUTS["heads"])
    results = []
    for function in (module.eager, sliced, sliced):
        xla.set_rng_state(7)
        results.append(attend(xla, function, module, tensors, mask, dropout=0.5)[0])
    for tensors_alike in zip(*results, strict=True):
        assert torch.equal(tensors_alike[0], tensors_alike[1]) and torch.equal(tensors_alike[0], tensors_alike[2])
    # Not drawn in evaluation.
    module.eval()
    _, program = attend(xla, sliced, module, tensors, mask, dropout=0.5)
    assert " while(" in program


def test_sinks_are_eager_attention(xla, sliced, cut):
    module, tensors, mask = GptOss(2, torch.randn(4)).to(xla.device), inputs(4, 2), masks()["causal"]
    cut(4, CUTS["heads"])
    expected, _ = attend(xla, module.eager, module, tensors, mask)
    found, _ = attend(xla, sliced, module, tensors, mask)
    assert all(torch.equal(theirs, ours) for theirs, ours in zip(expected, found, strict=True))


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    def load(**overrides):
        directory = tmp_path_factory.mktemp("model")
        make_model(directory, **dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3) | overrides)
        return AutoModelForCausalLM.from_pretrained(directory)

    return load


@pytest.fixture
def in_slices(xla, monkeypatch):
    """Makes `forward_and_backward` cut the scores of its 2 rows of 12 tokens."""

    def use(model):
        use_static_kernels(model, choose_attention(model, xla))

    def in_slices(elements):
        monkeypatch.setattr("test_layer_stack.use_static_kernels", use)
        monkeypatch.setattr(sliced_attention, "SLICE_ELEMENTS", elements)

    return in_slices


@pytest.mark.ci
@pytest.mark.parametrize(
    "dtype", [None, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize(
    "policy", [pytest.param(None, marks=pytest.mark.ci), "full", "dots"], ids=["none", "full", "dots"]
)
def test_layers_one_by_one_and_as_a_loop(xla, load, in_slices, policy, dtype):
    loss, gradients, program = forward_and_backward(xla, load(), policy, dtype)
    in_slices(12 * 12)
    same_loss, same_gradients, sliced = forward_and_backward(xla, load(), policy, dtype)
    assert sliced.count(" while(") > program.count(" while(")
    tolerance = 1e-6 if dtype is None else 2**-7
    torch.testing.assert_close(same_loss, loss, rtol=tolerance, atol=0)
    for name, gradient in gradients.items():
        assert (gradient - same_gradients[name]).norm() <= tolerance * gradient.norm(), name


@pytest.mark.ci
def test_masks_are_static(xla, load, in_slices):
    in_slices(12 * 12)
    model = load()
    forward_and_backward(xla, model)
    assert model.config._attn_implementation == "sliced"
    ids = torch.arange(24).reshape(2, 12) + 7
    before = xla.counters()
    with static_masks(xla.send(torch.ones_like(ids))):
        model(input_ids=xla.send(ids), attention_mask=xla.send(torch.ones_like(ids)), use_cache=False)
    assert xla.counters().reads == before.reads


def test_the_model_is_eager_on_another_device(xla, load, in_slices):
    model = load()
    ids = torch.arange(24).reshape(2, 12) + 7
    expected = model(input_ids=ids).logits
    in_slices(12 * 12)
    forward_and_backward(xla, model)
    torch.testing.assert_close(model.to("cpu").eval()(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
    assert "attn_implementation" not in model.config.to_diff_dict()


@pytest.mark.slow
def test_rows_split_over_chips(tmp_path):
    """Where the partitioner splits rows over chips, each goes through the slices of its own, and nothing is exchanged."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("sliced_attention_driver.py"))],
        env={**os.environ, "CPU_NUM_DEVICES": "4", "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_dump_to={tmp_path}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    programs = [path.read_text() for path in tmp_path.glob("*after_optimizations.txt")]
    (program,) = [program for program in programs if program.count(" while(") > 1]
    assert not re.search(r" (all-gather|all-reduce|all-to-all|collective-permute)(-start)?\(", program)
