"""Gradients between steps: kept where micro-steps add to them, and left out where nothing has."""

import torch
from torch import nn

from hf_tpu_ext.step.optimizer import StepGradients


def model():
    torch.manual_seed(0)
    return nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})


def test_kept_gradients_are_zeroed_in_place():
    net = model()
    net["unused"].bias.requires_grad_(False)
    gradients = StepGradients(net, keep=True)
    before = {name: parameter.grad for name, parameter in net.named_parameters()}
    assert {name for name, grad in before.items() if grad is None} == {"unused.bias"}
    net["used"](torch.ones(1, 2)).sum().backward()
    assert net["used"].weight.grad.any() and gradients.unused == [net["unused"].weight]
    gradients.zero_grad()
    for name, parameter in net.named_parameters():
        assert parameter.grad is before[name] and (parameter.grad is None or not parameter.grad.any())
    assert len(gradients.unused) == 3


def test_others_are_dropped():
    net = model()
    gradients = StepGradients(net, keep=False)
    assert all(parameter.grad is None for parameter in net.parameters()) and gradients.unused == []
    net["used"](torch.ones(1, 2)).sum().backward()
    gradients.in_program = True
    gradients.zero_grad()
    assert net["used"].weight.grad is not None
    gradients.in_program = False
    gradients.zero_grad()
    assert net["used"].weight.grad is None


def test_a_parameter_frozen_in_mid_run_is_unused():
    net = model()
    gradients = StepGradients(net, keep=True)
    net["used"].weight.requires_grad_(False)
    net["used"](torch.ones(1, 2)).sum().backward()
    assert net["used"].weight in set(gradients.unused) and net["used"].bias not in set(gradients.unused)


def test_closed_gradients_are_not_followed():
    net = model()
    gradients = StepGradients(net, keep=True)
    gradients.close()
    net["used"](torch.ones(1, 2)).sum().backward()
    assert len(gradients.unused) == 4
