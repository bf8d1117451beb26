"""Splash attention, interpreted inside XLA programs, gives the numbers of eager attention."""

import sys
from dataclasses import replace

import pytest
import torch
from test_sliced_attention import Attention, Qwen3, attend
from torch.nn.functional import pad
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, masking_utils
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from hf_tpu_ext.kernels.splash import SplashAttention, lower, why_not_lowered
from hf_tpu_ext.layers import splash_attention as splash
from hf_tpu_ext.layers.attention import choose_attention, static_masks
from hf_tpu_ext.layers.sliced_attention import sliced_attention
from hf_tpu_ext.layers.splash_attention import splash_attention
from hf_tpu_ext.layers.token_mask import TokenMask


ROWS, LENGTH, DIM = 2, 256, 64
KERNEL = SplashAttention(3, 4, 2, 1024, DIM, "bfloat16")


class Gemma2(Attention):
    forward = modeling_gemma2.Gemma2Attention.forward
    eager = staticmethod(modeling_gemma2.eager_attention_forward)


class GptOss(Attention):
    forward = modeling_gpt_oss.GptOssAttention.forward
    eager = staticmethod(modeling_gpt_oss.eager_attention_forward)


def inputs(heads, kv_heads, length, dim):
    generator = torch.Generator().manual_seed(0)
    shapes = [(ROWS, heads, length, dim), *[(ROWS, kv_heads, length, dim)] * 2, (ROWS, length, heads, dim)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def documents(kind, length):
    """Document numbers, 0 for padding."""
    if kind == "padded":
        return (torch.arange(length) < torch.tensor([length, length // 3])[:, None]).int()
    numbers = torch.randint(1, 5, (ROWS, length), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    return pad(numbers.sort().values[:, 17:], (0, 17))


@pytest.mark.parametrize(
    ("module", "heads", "kv_heads", "length", "dim", "window", "kind", "softcap", "causal"),
    [
        (Qwen3, 4, 2, LENGTH, DIM, None, "packed", None, True),
        (Qwen3, 2, 1, 200, 96, 70, "packed", None, True),
        (Gemma2, 2, 1, 384, 128, 130, "padded", 5.0, True),
        (Qwen3, 2, 2, 200, 72, None, "packed", None, False),
    ],
    ids=["packed", "window-of-odd-length", "padded-softcap", "both-ways-narrow-heads"],
)
def test_numbers_are_those_of_eager_attention(
    xla, module, heads, kv_heads, length, dim, window, kind, softcap, causal
):
    tensors, ids = inputs(heads, kv_heads, length, dim), documents(kind, length)
    real = (ids > 0)[:, :, None, None]
    # There is no loss on padding.
    tensors[-1] = tensors[-1] * real
    module = module(heads // kv_heads)
    settings = {} if softcap is None else {"softcap": softcap}
    mask = TokenMask(ids, window, torch.float64, causal)
    whole = mask.block(mask.queries(), mask.keys())

    def kernel(module, query, key, value, ids, **kwargs):
        mask = TokenMask(ids, window, torch.float32, causal)
        return splash_attention(xla, module, query, key, value, mask, **kwargs)

    exact, _ = attend(None, module.eager, module, tensors, whole, double=True, **settings)
    eager, _ = attend(None, module.eager, module, tensors, whole.float(), **settings)
    found, program = attend(xla, kernel, module, tensors, ids, **settings)
    assert program.count("custom-call(") == 0, "interpreted kernels are plain HLO"
    for name, correct, theirs, ours in zip("oqkv", exact, eager, found, strict=True):
        if name == "o":
            correct, theirs, ours = correct * real, theirs * real, ours * real
        error = (ours.double() - correct).abs().max() / correct.abs().max()
        assert error < max(2e-6, 2 * (theirs.double() - correct).abs().max() / correct.abs().max()), name


def test_bfloat16_is_not_worse_than_eager(xla):
    tensors, ids = inputs(4, 2, LENGTH, DIM), documents("packed", LENGTH)
    real = (ids > 0)[:, :, None, None]
    tensors = [*(tensor.bfloat16().float() for tensor in tensors[:3]), tensors[-1].bfloat16().float() * real]
    mask, module = TokenMask(ids, None, torch.float32), Qwen3(2)
    whole = mask.block(mask.queries(), mask.keys())

    def kernel(module, query, key, value, ids, **kwargs):
        return splash_attention(xla, module, query, key, value, TokenMask(ids, None, torch.float32), **kwargs)

    exact, _ = attend(None, module.eager, module, tensors, whole.double(), double=True)
    eager, _ = attend(xla, module.eager, module, tensors, whole, torch.bfloat16)
    found, _ = attend(xla, kernel, module, tensors, ids, torch.bfloat16)
    for index, (correct, theirs, ours) in enumerate(zip(exact, eager, found, strict=True)):
        assert ours.dtype == theirs.dtype
        scale = real if index == 0 else 1
        error, of_eager = (((made.double() - correct) * scale).norm() for made in (ours, theirs))
        assert error < of_eager


# With the kernels of tests above.
@pytest.mark.parametrize(
    ("dtype", "heads", "length", "dim", "window"),
    [(None, 2, 200, 96, 70), (torch.bfloat16, 4, LENGTH, DIM, None)],
    ids=["float32", "bfloat16"],
)
def test_sinks_are_those_of_eager_attention(xla, dtype, heads, length, dim, window):
    """Value and gradients, that of the sinks too."""
    tensors, ids = inputs(heads, heads // 2, length, dim), documents("packed", length)
    real = (ids > 0)[:, :, None, None]
    tensors = [*(tensor.bfloat16().float() for tensor in tensors[:3]), tensors[-1].bfloat16().float() * real]
    mask, sinks = TokenMask(ids, window, torch.float64), torch.tensor([0.5, 3.0, -2.0, 6.0][:heads])
    whole = mask.block(mask.queries(), mask.keys())

    def kernel(module, query, key, value, ids, **kwargs):
        mask = TokenMask(ids, window, torch.float32)
        return splash_attention(xla, module, query, key, value, mask, s_aux=module.sinks, **kwargs)

    def run(backend, attention, mask, double=False, dtype=None):
        module = GptOss(2, sinks.double() if double else sinks.clone())
        if backend is not None:
            module.to(backend.device)
        return attend(backend, attention, module, tensors, mask, dtype, double=double)[0]

    exact = run(None, GptOss.eager, whole, double=True)
    eager = run(None if dtype is None else xla, GptOss.eager, whole.float(), dtype=dtype)
    found = run(xla, kernel, ids, dtype=dtype)
    for name, correct, theirs, ours in zip(["output", *"qkv", "sinks"], exact, eager, found, strict=True):
        if name == "output":
            correct, theirs, ours = correct * real, theirs * real, ours * real
        error, of_eager = ((made.double() - correct).norm() / correct.norm() for made in (ours, theirs))
        if name == "sinks" and dtype is not None:
            # A sum of products with the output, which the kernel rounds to bfloat16.
            of_eager = 2**-6
        assert error < (max(2e-6, 2 * of_eager) if dtype is None else of_eager), name


def test_without_a_mask_a_vision_tower_sees_all(xla):
    module, tensors = Qwen3(1), inputs(2, 2, 200, 72)
    module.is_causal = False

    def kernel(module, query, key, value, mask, **kwargs):
        return splash_attention(xla, module, query, key, value, None, **kwargs)

    expected, _ = attend(None, module.eager, module, tensors, None)
    found, _ = attend(xla, kernel, module, tensors, None)
    for correct, ours in zip(expected, found, strict=True):
        assert torch.allclose(ours, correct, atol=1e-5)


def test_masks_made_in_slices(xla, monkeypatch):
    """Slices of a mask by token have the numbers of slices of a whole mask, bit for bit."""
    monkeypatch.setattr("hf_tpu_ext.layers.sliced_attention.SLICE_ELEMENTS", 64 * LENGTH // 4)
    tensors, ids, module = inputs(4, 2, LENGTH, 16), documents("packed", LENGTH), Qwen3(2)
    mask = TokenMask(ids, 50, torch.float32)

    def by_token(module, query, key, value, ids, **kwargs):
        return sliced_attention(xla, module, query, key, value, TokenMask(ids, 50, torch.float32), **kwargs)

    def whole(module, query, key, value, mask, **kwargs):
        return sliced_attention(xla, module, query, key, value, mask, **kwargs)

    found, program = attend(xla, by_token, module, tensors, ids)
    expected, larger = attend(xla, whole, module, tensors, mask.block(mask.queries(), mask.keys()))
    assert f"[{ROWS},1,{LENGTH},{LENGTH}]" in larger and f",{LENGTH},{LENGTH}]" not in program
    for theirs, ours in zip(expected, found, strict=True):
        assert torch.equal(theirs, ours)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A directory in which a kernel is kept, and its programs."""
    directory = tmp_path_factory.mktemp("kernels")
    return directory, lower(KERNEL, directory)


@pytest.mark.ci
def test_kernels_are_the_same_bytes_from_every_process(kept, tmp_path, monkeypatch):
    """They are part of the hash of a program, by which it is found in the compilation cache. One cannot write its directory."""
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    programs = lower(KERNEL, tmp_path / "file" / "kernels")
    assert programs.keys() == {"infer", "forward", "backward"}
    assert programs == kept[1]


@pytest.mark.ci
def test_kernels_are_kept(kept, monkeypatch):
    directory, programs = kept
    lower.cache_clear()
    # No Python is started.
    monkeypatch.setattr(sys, "executable", "/none")
    assert lower(KERNEL, directory) == programs
    lower.cache_clear()
    for path in directory.glob("*/infer.pb"):
        path.unlink()
    with pytest.raises(FileNotFoundError):
        lower(KERNEL, directory)


@pytest.mark.ci
def test_programs_name_their_arithmetic(kept):
    """For `hf-tpu plan`: two products forward, seven in the two kernels of the backward pass, of the blocks that are seen."""
    _, programs = kept
    # Blocks of 512, of which one of four is masked; a head is as wide as the matrix unit.
    product = 2 * 3 * 4 * (3 * 512**2) * 128
    assert f"attention_kernel[flops={2 * product}]".encode() in programs["forward"]
    assert f"attention_kernel[flops={7 * product // 2}]".encode() in programs["backward"]
    narrow = lower(replace(KERNEL, window=100))
    assert f"attention_kernel[flops={2 * product}]".encode() in narrow["forward"]


def test_other_versions_of_jax_are_refused(tmp_path, monkeypatch):
    (tmp_path / "jax-0.4.1.dist-info").mkdir()
    (tmp_path / "jax-0.4.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: jax\nVersion: 0.4.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    why_not_lowered.cache_clear()
    reason = why_not_lowered()
    why_not_lowered.cache_clear()
    assert "jax is 0.4.1, not" in reason and "pip install jax==" in reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dropout": 0.1}, "attention_dropout=0.1"),
        ({"dim": 40}, "heads of 64 to 256"),
        ({"mask": None}, "its mask is another"),
        ({"sinks": torch.zeros(2)}, "its own parameters"),
    ],
    ids=["dropout", "head_dim", "mask", "sinks"],
)
def test_slices_serve_where_the_kernel_cannot(xla, monkeypatch, change, reason):
    said = []
    monkeypatch.setattr(splash.logger, "warning_once", said.append)
    module = Qwen3(1, change.get("sinks"))
    tensors = inputs(2, 2, 8, change.get("dim", DIM))
    mask = None if "mask" in change else TokenMask(torch.ones(ROWS, 8, dtype=torch.int32), None, torch.float32)
    query, key, value, _ = xla.send(tensors)
    if mask is not None:
        mask = mask._replace(documents=xla.send(mask.documents))
    found = splash_attention(
        xla, module.train(), query, key, value, mask, dropout=change.get("dropout", 0.0), scaling=1.0
    )
    assert found[0].shape == (ROWS, 8, 2, tensors[0].shape[-1])
    (line,) = said
    assert line.startswith("Attention of Qwen3 is computed in slices: ") and reason in line


@pytest.fixture
def model():
    return LlamaForCausalLM(LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9))


class TestMasks:
    """Which patterns are made by token."""

    @pytest.fixture(autouse=True)
    def registered(self, model, xla):
        choose_attention(model, xla)

    def make(self, function, model="mistral", **kwargs):
        config = AutoConfig.for_model(model, num_hidden_layers=1, sliding_window=3)
        config._attn_implementation = "splash"
        with static_masks(kwargs.pop("segment_ids", None)):
            attention_mask = kwargs.pop("attention_mask", torch.ones(2, 7))
            # The name of the fourth, the cache, depends on the version of transformers.
            return vars(masking_utils)[function](config, torch.zeros(2, 7, 4), attention_mask, None, **kwargs)

    def test_causal_and_window(self):
        assert self.make("create_causal_mask").window is None
        assert self.make("create_sliding_window_causal_mask").window == 3

    def test_documents_and_padding(self):
        segments = torch.tensor([[1, 1, 2, 2, 3, 3, 0], [1, 1, 1, 1, 1, 1, 1]])
        mask = self.make("create_causal_mask", segment_ids=segments, attention_mask=None)
        assert torch.equal(mask.documents, segments.int())
        padding = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1, 1]])
        assert torch.equal(self.make("create_causal_mask", attention_mask=padding).documents, padding.int())

    def test_other_patterns_are_whole(self):
        def more(batch, head, query, key):
            return key > 2

        assert self.make("create_causal_mask", or_mask_function=more).shape == (2, 1, 7, 7)
        # Queries may be of another sequence than keys.
        assert self.make("create_bidirectional_mask").shape == (2, 1, 7, 7)
        assert self.make("create_chunked_causal_mask", model="llama4_text").shape == (2, 1, 7, 7)


def test_asked_for_and_not_there(xla, model, monkeypatch):
    assert choose_attention(model, xla) == "sliced"
    assert choose_attention(model, xla, "splash") == "splash"
    monkeypatch.setattr("hf_tpu_ext.layers.splash_attention.why_not_lowered", lambda: "jax is not installed")
    with pytest.raises(ValueError, match="attention='splash' is not possible: jax is not installed.*'slices'"):
        choose_attention(model, xla, "splash")
