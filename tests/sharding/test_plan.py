"""Which parameter is split over which axis, and what stays on a chip."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from hf_tpu_ext.examples.tiny import make_model
from hf_tpu_ext.formatting import format_bytes
from hf_tpu_ext.sharding import ShardingPlan, advise_sharding, resolve_mesh
from hf_tpu_ext.sharding.plan import partition_spec


WHOLE, SPLIT, BOTH = (resolve_mesh(mesh, 8) for mesh in ("data", "fsdp", "data=2,fsdp=4"))


@pytest.mark.parametrize(
    ("shape", "fsdp", "expected"),
    [
        ((32, 64), 1, (None, None)),
        ((32, 64), 8, (None, "fsdp")),
        ((64, 32), 8, ("fsdp", None)),
        ((32, 32), 8, ("fsdp", None)),
        ((4, 32), 8, (None, "fsdp")),  # a LoRA matrix: the rank does not divide
        ((100, 32), 8, (None, "fsdp")),  # nor does the larger dimension here
        ((100, 32), 4, ("fsdp", None)),
        ((9, 7), 8, (None, None)),
        ((64,), 8, (None,)),
        ((), 8, ()),
        ((8, 16, 64), 8, (None, None, "fsdp")),
        ((3, 16, 5), 8, (None, "fsdp", None)),
    ],
)
def test_a_matrix_is_split_along_its_largest_even_dimension(shape, fsdp, expected):
    assert partition_spec(shape, {"data": 1, "fsdp": fsdp}) == expected
    assert partition_spec(shape, {"data": 2, "fsdp": fsdp}) == expected


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.norm = nn.Parameter(torch.ones(16))


class Small(nn.Module):
    """32 x 16 and twice 64 x 16 that are split, two kinds of vectors and 3 x 3 that are not; the first is frozen."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16).requires_grad_(False)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.odd = nn.Parameter(torch.ones(3, 3))


def test_bytes_on_a_chip():
    model = Small()
    frozen, split, whole = 32 * 16 * 4, 2 * 64 * 16 * 4, (2 * 64 + 2 * 16 + 9) * 4
    for mesh, parts in ((WHOLE, 1), (SPLIT, 8), (BOTH, 4)):
        plan = ShardingPlan(model, mesh)
        assert plan.weight_bytes_per_chip == frozen // parts + split // parts + whole
        assert plan.state_bytes_per_chip() == frozen // parts + 4 * (split // parts + whole)


def test_dtype_counts():
    plan, half = (ShardingPlan(model, SPLIT) for model in (Small(), Small().bfloat16()))
    assert 2 * half.weight_bytes_per_chip == plan.weight_bytes_per_chip


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """A tiny Qwen3 whose head is its embedding."""
    directory = make_model(
        tmp_path_factory.mktemp("tied"),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_pretrained(directory)


def test_tied_weights_stand_in_the_plan_once(tied):
    plan = ShardingPlan(tied, SPLIT)
    names = [parameter.name for parameter in plan.parameters]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert len(names) == len(set(names)) == len(list(tied.parameters()))
    assert sum(parameter.num_bytes for parameter in plan.parameters) == 4 * sum(p.numel() for p in tied.parameters())


def test_a_model_in_full(tied):
    plan = ShardingPlan(tied, SPLIT)
    assert all(parameter.trainable for parameter in plan.parameters)
    for parameter in plan.parameters:
        is_split = len(parameter.shape) > 1 and any(size % 8 == 0 for size in parameter.shape)
        assert parameter.shards == (8 if is_split else 1), parameter
        assert sum(axis == "fsdp" for axis in parameter.spec) == int(is_split)
    whole = ShardingPlan(tied, WHOLE)
    assert {parameter.shards for parameter in whole.parameters} == {1}


def test_a_model_with_lora(tied):
    """Only the adapter has gradients and optimizer state."""
    model = get_peft_model(tied, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    plan = ShardingPlan(model, SPLIT)
    trained = {parameter.name for parameter in plan.parameters if parameter.trainable}
    assert trained == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 4 and all("lora_" in name for name in trained)
    by_name = {parameter.name: parameter for parameter in plan.parameters}
    for name in trained:
        shape = by_name[name].shape
        assert by_name[name].spec == ((None, "fsdp") if shape[0] == 4 else ("fsdp", None))
    trained_bytes = sum(by_name[name].num_bytes // 8 for name in trained)
    assert plan.state_bytes_per_chip() == plan.weight_bytes_per_chip + 3 * trained_bytes


# ---- Advice ----


def test_no_advice_where_it_fits():
    needed = ShardingPlan(Small(), WHOLE).state_bytes_per_chip()
    assert advise_sharding(Small(), WHOLE, needed) is None
    assert advise_sharding(Small(), WHOLE, needed - 1) is not None
    # Besides a gradient and two moments of each trained weight, its average.
    plan = ShardingPlan(Small(), WHOLE)
    averaged = plan.state_bytes_per_chip(has_average=True)
    assert averaged - needed == (needed - plan.weight_bytes_per_chip) // 3
    assert advise_sharding(Small(), WHOLE, averaged, has_average=True) is None
    assert "optimizer state need" in advise_sharding(Small(), WHOLE, averaged - 1, has_average=True)


def test_advice_to_split():
    model = Small()
    for mesh in (WHOLE, BOTH):
        needed = ShardingPlan(model, mesh).state_bytes_per_chip()
        split = ShardingPlan(model, SPLIT).state_bytes_per_chip()
        advice = advise_sharding(model, mesh, needed - 1)
        assert "mesh=fsdp" in advice
        for size in (needed, needed - 1, split):
            assert format_bytes(size) in advice


def test_advice_where_splitting_is_not_enough():
    split = ShardingPlan(Small(), SPLIT).state_bytes_per_chip()
    for mesh in (WHOLE, SPLIT, {"data": 1, "fsdp": 1}):
        advice = advise_sharding(Small(), mesh, split - 1)
        assert "mesh=fsdp" not in advice and "use_peft: true" in advice and "more chips" in advice


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (1234567, "1.23 MB"),
        (16 * 10**9, "16.00 GB"),
        (2 * 10**12, "2000.00 GB"),
    ],
)
def test_format_bytes(num_bytes, words):
    assert format_bytes(num_bytes) == words
