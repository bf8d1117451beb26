"""
What the package relies on in accelerate, torch, torch_xla and in the models of transformers: devices, optimizers, masks,
activation checkpointing. A release that moves one of them fails here, with its name and the file that has to follow.
"""

import gc
import importlib
import inspect
import re
import sys
from collections.abc import Callable

import accelerate.optimizer
import accelerate.utils.imports as accelerate_imports
import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr
import transformers.utils.import_utils as transformers_imports
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import find_batch_size
from torch._C._dynamo.guards import dict_version
from torch_xla._internal import tpu
from torch_xla.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_causal_mask
from trl.kernels.chunked_logprob import OPTIONAL_OUTPUTS, _backward_tile, _forward_tile

from hf_tpu_ext.backends import detect
from hf_tpu_ext.step.fingerprint import COUNTS_ATTRIBUTES


# ---- Switches ----


@pytest.fixture
def switches(monkeypatch):
    """Sets what transformers and accelerate have read of USE_TORCH_XLA, and forgets what they have concluded."""

    def set_to(available):
        monkeypatch.setattr(transformers_imports, "USE_TORCH_XLA", "1" if available else "0")
        monkeypatch.setattr(accelerate_imports, "_torch_xla_available", available)
        transformers_imports.is_torch_xla_available.cache_clear()
        accelerate_imports.is_torch_xla_available.cache_clear()

    yield set_to
    monkeypatch.undo()
    transformers_imports.is_torch_xla_available.cache_clear()
    accelerate_imports.is_torch_xla_available.cache_clear()


def test_torch_xla_can_be_switched_off(switches):
    """backends/selection.py, _switch_off_upstream_xla."""
    for available in (True, False):
        switches(available)
        assert transformers_imports.is_torch_xla_available() is available, "transformers reads another switch now"
        assert accelerate_imports.is_torch_xla_available() is available, "accelerate reads another switch now"


# ---- accelerate ----


@pytest.fixture
def on_meta():
    """accelerate's state, bound to a device as trainers/set_up.py binds it to the XLA device."""
    AcceleratorState._reset_state(reset_partial_state=True)
    state = PartialState(cpu=True)
    state.device = torch.device("meta")
    yield state
    AcceleratorState._reset_state(reset_partial_state=True)


def test_device_of_the_state_is_taken_over(on_meta):
    accelerator = Accelerator()
    assert accelerator.device.type == "meta", "trainers/set_up.py"
    assert (accelerator.num_processes, accelerator.process_index) == (1, 0)
    assert PartialState().device.type == "meta", "the state is no longer shared by its instances"


@pytest.mark.parametrize(("placement", "device"), [(True, "meta"), (False, "cpu")])
def test_batches_stay_on_the_host_without_device_placement(on_meta, placement, device):
    """trainers/set_up.py sets it on the accelerator after upstream has made it."""
    accelerator = Accelerator()
    accelerator.device_placement = placement
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(6), batch_size=4))
    assert [(batch.device.type, len(batch)) for batch in loader] == [(device, 4), (device, 2)]


def test_batch_size_is_found():
    assert find_batch_size({"input_ids": torch.zeros(3, 7)}) == 3, "trainers/run/evaluation.py, evaluation_loop"


def test_an_optimizer_step_asks_for_lomo(on_meta, monkeypatch):
    """backends/selection.py, select_backend."""
    asked = []
    monkeypatch.setattr(accelerate.optimizer, "is_lomo_available", lambda: bool(asked.append(1)))
    parameter = torch.nn.Parameter(torch.ones(2, device="meta"))
    Accelerator().prepare(torch.optim.SGD([parameter], lr=0.1)).step()
    assert asked, "accelerate asks elsewhere, or no longer: then it needs no remembering"


# ---- torch ----


def test_state_of_adamw():
    """step/optimizer.py creates the same state, so that checkpoints move between the two."""
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer.state[parameter]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
    assert (state["step"].device.type, state["step"].dtype, state["step"].item()) == ("cpu", torch.float32, 1)
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    defaults = {
        name: optimizer.defaults[name] for name in ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")
    }
    assert defaults == {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 1e-2,
        "amsgrad": False,
        "maximize": False,
    }


def test_state_dict_can_be_replaced_by_a_hook():
    """trainers/set_up.py makes checkpoints of CPU tensors with it."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    optimizer.register_state_dict_post_hook(lambda _, state_dict: {"replaced": state_dict})
    assert set(optimizer.state_dict()) == {"replaced"}


# ---- torch_xla ----


def test_functions_of_torch_xla():
    """backends/xla/backend.py."""
    for name in ("_xla_get_cpu_tensors", "_xla_runtime_is_initialized"):
        assert callable(vars(torch_xla._XLAC)[name])
    # What `xm.send_cpu_data_to_device` calls: tensors, the device of each, and the sharding of each or `None`.
    sent = torch_xla._XLAC._xla_tensors_from_aten(
        [torch.ones(2), torch.zeros(())], [str(torch_xla.device())] * 2, None
    )
    assert [tensor.device.type for tensor in sent] == ["xla", "xla"]
    assert "use_reentrant" in inspect.signature(checkpoint).parameters
    assert all(callable(function) for function in (torch_xla.sync, torch_xla.device, xm.wait_device_ops))
    assert all(callable(function) for function in (xr.use_spmd, xr.global_runtime_device_count, xr.device_type))
    assert all(callable(function) for function in (xm.xla_device_hw, xm.xla_device_kind))
    assert all(callable(function) for function in (xm.get_rng_state, xm.set_rng_state))


def test_names_of_metrics(xla):
    """backends/xla/backend.py, counters: an unknown name counts as 0, for good."""

    def compute(size):
        # The totals differ where a compile has failed, as in a test before this one.
        xla.fetch(xla.send(torch.arange(size)).cumsum(0) * 1.75)
        xla.wait()
        return met.counter_value("UncachedCompile"), met.metric_data("CompileTime")[0]

    before, after = compute(1237.0), compute(1238.0)
    names = {"CompileTime", "ExecuteTime", "TransferFromDeviceTime"}
    assert names <= set(met.metric_names()), f"torch_xla counts under other names than {names}"
    assert len(met.metric_data("CompileTime")) >= 2
    assert [now - then for then, now in zip(before, after, strict=True)] == [1, 1]


def test_pci_ids_of_tpus():
    """backends/detect.py looks for a TPU without importing torch_xla."""
    assert detect._GOOGLE_PCI_VENDOR == tpu._GOOGLE_PCI_VENDOR_ID
    # 0x0056 is for testing only.
    assert set(tpu._TPU_PCI_DEVICE_IDS) - {"0x0056"} == set(detect._TPU_PCI_DEVICES)


def test_a_moved_model_loses_its_ties(xla):
    """Why backends/xla/backend.py ties them again; without this it need not."""
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    second.weight = first.weight
    model = torch.nn.Sequential(first, second).to(xla.device)
    assert model[0].weight is not model[1].weight


# ---- Models of transformers ----


def config():
    config = AutoConfig.for_model("llama", num_hidden_layers=1)
    config._attn_implementation = "eager"
    return config


def test_mask_functions_are_looked_up_in_one_place():
    """step/attention_mask.py replaces the entry for "eager" while the loss is computed."""
    seen = []

    def mask(**kwargs):
        seen.append(kwargs)
        return masking_utils.eager_mask(**kwargs)

    ALL_MASK_ATTENTION_FUNCTIONS["eager"] = mask
    try:
        made = create_causal_mask(config(), torch.zeros(2, 5, 4), torch.ones(2, 5), None)
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS["eager"]
    assert ALL_MASK_ATTENTION_FUNCTIONS["eager"] is masking_utils.eager_mask
    assert made.shape == (2, 1, 5, 5)
    (kwargs,) = seen
    assert {"mask_function", "attention_mask", "allow_is_causal_skip", "dtype", "device"} <= set(kwargs)
    skip = inspect.signature(masking_utils.eager_mask).parameters
    assert "allow_is_bidirectional_skip" in skip and "mask_function" in skip


def test_masks_are_not_read_where_upstream_traces(monkeypatch):
    """layers/attention.py says so while the loss is computed."""
    monkeypatch.setattr(masking_utils, "is_tracing", lambda tensor=None: True)
    ones = torch.ones(1, 4)
    mask = masking_utils.create_recurrent_attention_mask(config(), torch.zeros(1, 4, 4), ones)
    assert torch.equal(mask, ones)


def test_eager_attention_is_a_function_beside_the_class():
    """layers/sliced_attention.py calls it with some rows, heads of one key, or queries."""
    for name in ("gemma2", "gemma3", "llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_moe"):
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        (attention,) = [
            value for key, value in vars(module).items() if re.fullmatch(r"[A-Z]\w*(?<!Flash)Attention", key)
        ]
        eager = inspect.unwrap(attention.forward).__globals__["eager_attention_forward"]
        names = list(inspect.signature(eager).parameters)
        assert names[:5] == ["module", "query", "key", "value", "attention_mask"], name
        assert {"scaling", "dropout"} <= set(names), name
        looked_up = set(re.findall(r"\bmodule\.(\w+)", inspect.getsource(eager)))
        assert looked_up <= {"num_key_value_groups", "training", "head_dim"}, name


def test_parts_of_masks():
    """step/attention_mask.py puts them together."""
    segments = torch.tensor([[1, 1, 2]])
    query, key = torch.tensor([0, 1, 2])[:, None], torch.tensor([0, 1, 2])[None]
    packed = masking_utils.packed_sequence_mask_function(segments)
    assert packed(0, 0, query, key).tolist() == [[True, True, False], [True, True, False], [False, False, True]]
    both = masking_utils.and_masks(packed, masking_utils.causal_mask_function)
    assert both(0, 0, query, key).tolist() == [[True, False, False], [True, True, False], [False, False, True]]


def test_a_missing_mask_makes_transformers_look_at_the_positions():
    """trainers/trainer.py adds a mask where a collator has none; without this it need not."""
    positions = torch.tensor([[0, 1, 0]])
    made = create_causal_mask(config(), torch.zeros(1, 3, 4), None, None, position_ids=positions)
    assert (made == 0)[0, 0].tolist() == [[True, False, False], [True, True, False], [False, False, True]]


def test_layers_call_the_checkpoint_function_that_they_hold(model_dir):
    """layers/activation_checkpointing.py replaces it."""
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    model.gradient_checkpointing_enable()
    (layer,) = model.model.layers
    assert "_gradient_checkpointing_func" in vars(layer)
    calls = []

    def function(run, *inputs):
        calls.append(inputs)
        return run(*inputs)

    layer._gradient_checkpointing_func = function
    model.train()(input_ids=torch.tensor([[5, 6]]))
    ((hidden_states, *_),) = calls
    assert hidden_states.shape == (1, 2, 32), "the hidden states are no longer the first input"


def test_implementations_can_be_set(model_dir):
    """layers/static_kernels.py."""
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
    assert list(inspect.signature(model.set_experts_implementation).parameters)[:1] == ["experts_implementation"]


def test_quantized_models_are_marked():
    """trainers/checks/adaptations.py."""
    from transformers.quantizers.base import HfQuantizer

    assert 'setattr(model, "is_quantized", True)' in inspect.getsource(HfQuantizer)


def test_the_tiles_of_upstreams_head():
    """layers/chunked_head.py calls them, with the sums in this order."""
    forward, backward = (list(inspect.signature(function).parameters) for function in (_forward_tile, _backward_tile))
    assert forward[:12] == [
        "tile",
        "tile_stride",
        "targets",
        "running_max",
        "sum_exp",
        "x_sum_exp",
        "sq_sum_exp",
        "z_sum",
        "max_before_target",
        "target_logit",
        "vocab_start",
        "n_cols",
    ]
    assert backward[:9] == [
        "tile",
        "tile_stride",
        "targets",
        "log_z",
        "entropy",
        "grad_logprobs",
        "grad_entropy",
        "vocab_start",
        "n_cols",
    ]
    transform = {"logit_scale", "softcap", "inv_t", "HAS_SOFTCAP", "BLOCK_SIZE"}
    assert set(forward[12:]) == transform | {f"HAS_{name.upper()}" for name in OPTIONAL_OUTPUTS}
    assert set(backward[9:]) == transform | {"HAS_LOGPROB_GRAD", "HAS_ENTROPY_GRAD"}


# ---- PyTorch's compiler ----


class _Watched:
    number = 1


def test_writes_to_dicts_are_counted():
    """step/fingerprint.py, with the counter that guards of PyTorch's compiler read. A Python may not count attributes."""
    module = torch.nn.Linear(2, 2)
    (of_class,) = gc.get_referents(vars(_Watched))
    namespace = vars(sys.modules[__name__])
    writes: list[tuple[dict, Callable]] = [
        (vars(module), lambda: setattr(module, "in_features", 3)),
        (module._parameters, lambda: setattr(module, "bias", None)),
        (module._buffers, lambda: module.register_buffer("mask", torch.ones(2))),
        (of_class, lambda: setattr(_Watched, "number", 2)),
        (of_class, lambda: setattr(_Watched, "other", 2)),
        (namespace, lambda: namespace.update(_written=1)),
        (namespace, lambda: namespace.pop("_written")),
    ]
    for entries, write in writes if COUNTS_ATTRIBUTES else writes[1:]:
        assert type(entries) is dict
        before = dict_version(entries)
        assert dict_version(entries) == before
        write()
        assert dict_version(entries) != before
