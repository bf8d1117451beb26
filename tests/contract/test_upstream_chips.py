"""What running on several chips relies on in transformers, TRL and torch_xla."""

import inspect
import re
from pathlib import Path

import pytest
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import trl.trainer.utils
from torch_xla.experimental import scan as xla_scan
from torch_xla.experimental.scan import _scan_impl_pytree
from transformers import AutoModelForCausalLM, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer
from trl import SFTConfig
from trl.trainer.sft_trainer import add_fused_lm_head

import hf_tpu_ext
from hf_tpu_ext.examples.tiny import make_model
from hf_tpu_ext.trainers.run.chips import count_all_chips


@pytest.fixture
def tiny(tmp_path):
    return AutoModelForCausalLM.from_pretrained(make_model(tmp_path, hidden_size=16, num_hidden_layers=2))


def test_the_fused_head_is_looked_up_when_it_is_used(tiny, monkeypatch):
    """sharding/per_chip.py puts another in its place for the time of a forward pass."""
    calls = []
    original = trl.trainer.utils._ChunkedLogProbFunction

    class Recorded:
        @staticmethod
        def apply(*args):
            calls.append(args)
            return original.apply(*args)

    add_fused_lm_head(tiny)
    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", Recorded)
    ids = torch.arange(12).reshape(2, 6)
    outputs = tiny(input_ids=ids, labels=ids, fused_lm_head=True)
    (arguments,) = calls
    hidden, weight, bias, targets, *settings = arguments
    assert hidden.shape == (10, 16) and weight is tiny.lm_head.weight and bias is None and targets.shape == (10,)
    assert not any(isinstance(setting, torch.Tensor) for setting in settings)
    assert outputs.log_probs.shape == (2, 5)


def test_layers_and_losses_are_recognised(tiny):
    """trainers/run/chips.py splits the activations between layers, and keeps gradients local for losses over tokens."""
    assert sum(isinstance(module, GradientCheckpointingLayer) for module in tiny.modules()) == 2
    assert tiny.loss_type == "ForCausalLM"


@pytest.mark.parametrize("value", [True, "full_shard", "full_shard auto_wrap"])
def test_fsdp_is_normalised_by_the_arguments(value, tmp_path):
    """trainers/checks/adaptations.py reads `fsdp_config` only."""
    args = SFTConfig(str(tmp_path), fsdp=value, use_cpu=True)
    assert args.fsdp is True and args.fsdp_config["xla"] is False
    assert args.fsdp_config.get("reshard_after_forward", True) is True
    assert args.fsdp_plugin_args is not None
    offloaded = SFTConfig(str(tmp_path), fsdp="full_shard offload", use_cpu=True)
    assert offloaded.fsdp_config["cpu_offload"] is True
    assert TrainingArguments(str(tmp_path), use_cpu=True).fsdp is None


def rows_of(loader):
    return len(next(iter(loader))["input_ids"])


def test_the_batch_of_an_argument_is_that_of_the_loader(stock):
    """
    trainers/run/chips.py says in `train_batch_size` and `eval_batch_size` what a process takes at once, which upstream
    reads, while the rows per device stay as they were given.
    """
    trainer = stock.trainer(per_device_train_batch_size=4, per_device_eval_batch_size=1)
    assert trainer._train_batch_size == trainer.args.per_device_train_batch_size == 4
    assert rows_of(trainer.get_train_dataloader()) == 4
    assert rows_of(trainer.get_eval_dataloader()) == trainer.args.eval_batch_size == 1
    count_all_chips(trainer.args, 3)
    assert rows_of(trainer.get_eval_dataloader()) == trainer.args.eval_batch_size == 3
    trainer._train_batch_size = 2
    assert rows_of(trainer.get_train_dataloader()) == 2
    assert trainer.get_total_train_batch_size(trainer.args) == 2 * trainer.args.gradient_accumulation_steps


def test_calls_of_torch_xla_that_are_not_public(xla):
    """All that the package makes: the public forms return a tensor subclass, or read a split tensor by making it whole first."""
    sources = [path.read_text() for path in Path(hf_tpu_ext.__file__).parent.rglob("*.py")]
    names = {name for source in sources for name in re.findall(r"\b_XLAC\.(_\w+)", source)}
    assert len(names) > 30
    assert sorted(names - set(dir(torch_xla._XLAC))) == []
    assert "xla_spec" in dir(xs.ShardingSpec)


def test_the_loop_that_scan_is_made_of(xla):
    """backends/xla/program_parts.py calls it directly: the public `scan` traces its function with tensors that autograd cannot follow."""
    assert list(inspect.signature(_scan_impl_pytree).parameters) == ["fn", "init", "xs", "reverse"]
    weight = torch.randn(3)
    sent = xla.send(weight)

    def turn(carry, entries):
        # On this thread, as distillation/fused_head.py has it: autograd's own holds its last tensors for a moment longer.
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            leaf = sent.detach().requires_grad_()
            (gradient,) = torch.autograd.grad((leaf * entries[0]).square().sum(), leaf)
        return (carry[0] + gradient,), (gradient.sum(),)

    rows = torch.randn(4, 3)
    with torch.no_grad():
        (total,), (sums,) = _scan_impl_pytree(turn, (xla.send(torch.zeros(3)),), (xla.send(rows),))
    expected = 2 * weight * rows.square()
    torch.testing.assert_close(xla.fetch(total), expected.sum(0))
    torch.testing.assert_close(xla.fetch(sums), expected.sum(1))


def test_operands_of_a_loop_go_through_its_builder(xla, monkeypatch):
    """backends/xla/program_parts.py puts another in its place while chips run by themselves."""
    added = []

    class Recorded(xla_scan.Builder):
        def add_param(self, val):
            added.append(val)
            return super().add_param(val)

    monkeypatch.setattr(xla_scan, "Builder", Recorded)
    row = xla.send(torch.ones(3))
    with torch.no_grad():
        _scan_impl_pytree(lambda carry, entries: ((carry[0] * 0.3,), entries), (row,), (xla.send(torch.ones(4, 3)),))
    # The turn's number, what is carried, what is gone through, what comes out, and the number in the body.
    assert [tuple(tensor.shape) for tensor in added] == [(), (3,), (4, 3), (4, 3), ()]
    argument, result = torch_xla._XLAC._check_tensor_need_materialization([row, row * 0.5])
    assert not argument and result
