"""Gradients between micro-steps: their sums are kept, and parameters have none."""

import pytest
import torch
from torch import nn

from hf_tpu_ext.step.train_step import GradientSums


# Its runtime starts before the first backward pass.
pytestmark = pytest.mark.usefixtures("xla")


def model():
    torch.manual_seed(0)
    return nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})


def backward(net, number):
    net["used"](torch.full((1, 2), float(number))).sum().backward()


def test_sums_of_micro_steps_are_those_of_autograd():
    net, plain = model(), model()
    net["unused"].bias.requires_grad_(False)
    gradients = GradientSums(net, accumulates=True)
    kept = gradients.tensors
    assert len(kept) == 3
    for step in range(2):
        for number in (1, 2, 3):
            backward(plain, number + step)
            with gradients.micro_step(sync_gradients=number == 3):
                backward(net, number + step)
            if number < 3:
                assert all(parameter.grad is None for parameter in net.parameters())
        for name in ("weight", "bias"):
            assert torch.equal(getattr(net["used"], name).grad, getattr(plain["used"], name).grad)
        # Nothing has used these: an optimizer leaves them out.
        assert net["unused"].weight.grad is None and net["unused"].bias.grad is None
        gradients.drop()
        plain.zero_grad()
        assert all(parameter.grad is None for parameter in net.parameters())
        # In place: a program is given the same tensors.
        assert all(mine is before and not mine.any() for mine, before in zip(gradients.tensors, kept, strict=True))


def test_without_accumulation_nothing_is_kept():
    net = model()
    gradients = GradientSums(net, accumulates=False)
    with gradients.micro_step(sync_gradients=True):
        backward(net, 1)
    assert gradients.tensors == [] and net["used"].weight.grad is not None and net["unused"].weight.grad is None
    gradients.drop()
    assert net["used"].weight.grad is None


def test_a_parameter_frozen_in_mid_run_has_no_gradient_and_the_others_go_on():
    net = model()
    gradients = GradientSums(net, accumulates=True)
    with gradients.micro_step(sync_gradients=False):
        backward(net, 1)
    net["used"].weight.requires_grad_(False)
    assert not gradients.are_of(net)
    later = GradientSums(net, True, gradients)
    assert later.are_of(net)
    with later.micro_step(sync_gradients=True):
        backward(net, 2)
    assert net["used"].weight.grad is None and net["used"].bias.grad.tolist() == [2.0, 2.0]


def scale(net):
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def replace(net):
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5


def clear(net):
    net.zero_grad()


def clear_one(net):
    net["used"].bias.grad = None


def add_another(net):
    net["unused"].weight.grad = torch.ones(2, 2)


def freeze(net):
    net["used"].weight.requires_grad_(False)


@pytest.mark.parametrize("code", [scale, replace, clear, clear_one, add_another, freeze])
def test_code_between_micro_steps_sees_and_changes_gradients_as_with_autograd(code):
    net, plain = model(), model()
    gradients = GradientSums(net, accumulates=True)
    for number in (1, 2, 3):
        backward(plain, number)
        if not gradients.are_of(net):
            gradients = GradientSums(net, True, gradients)
        with gradients.micro_step(sync_gradients=number == 3):
            backward(net, number)
        if number < 3:
            gradients.show()
            for name, parameter in plain.named_parameters():
                shown = net.get_parameter(name).grad
                assert (shown is None) == (parameter.grad is None)
                assert shown is None or torch.equal(shown, parameter.grad)
            code(net)
            code(plain)
            gradients.take_back()
            if code is not freeze:
                assert all(parameter.grad is None for parameter in net.parameters())
    for name, parameter in plain.named_parameters():
        mine = net.get_parameter(name).grad
        assert (mine is None) == (parameter.grad is None), name
        assert mine is None or torch.equal(mine, parameter.grad), name


def test_gradients_are_shown_after_a_micro_step_that_ran_no_python():
    net = model()
    gradients = GradientSums(net, accumulates=True)
    with gradients.micro_step(sync_gradients=True):
        backward(net, 1)
    gradients.drop()
    for total in gradients.tensors:
        total.fill_(3)
    gradients.show()
    assert net["used"].weight.grad.tolist() == [[3.0, 3.0]] * 2 and net["unused"].weight.grad is None


@pytest.mark.parametrize("sync_gradients", [False, True])
def test_a_hook_that_puts_another_gradient_in_its_place_is_followed(sync_gradients):
    net = model()
    gradients = GradientSums(net, accumulates=True)
    weight = net["used"].weight
    weight.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", parameter.grad * 3))
    with gradients.micro_step(sync_gradients):
        backward(net, 1)
    assert gradients.sums[weight].tolist() == [[3.0, 3.0]] * 2
    assert (weight.grad is not None) == sync_gradients


@pytest.mark.parametrize("hooked", [True, False])
def test_a_hook_that_takes_a_gradient_away_is_followed(hooked):
    """PyTorch's own pattern, for an optimizer in the backward pass. The update leaves such a parameter alone."""
    net = model()
    gradients = GradientSums(net, accumulates=True)
    weight = net["used"].weight
    with gradients.micro_step(sync_gradients=False):
        backward(net, 1)
    if hooked:
        weight.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    with gradients.micro_step(sync_gradients=True):
        backward(net, 2)
    assert (weight.grad is None) == hooked and net["used"].bias.grad is not None
    assert gradients.sums[weight].any() != hooked


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_gradient_that_is_one_number_for_all_elements_can_be_written_to(xla, accumulates):
    """torch_xla leaves the gradient of a sum a view of one number, and adds up what is written to its parts."""
    net = nn.ParameterDict({"all": torch.zeros(3), "rows": torch.zeros(2, 3)}).to(xla.device)
    gradients = GradientSums(net, accumulates)
    with gradients.micro_step(sync_gradients=True):
        (
            net["all"].sum() * -6 + (net["rows"].sum(0) * torch.tensor([1.0, 2.0, 3.0], device=xla.device)).sum()
        ).backward()
    for parameter in net.values():
        parameter.grad.mul_(torch.tensor(0.5, device=xla.device))
    assert xla.fetch(net["all"].grad).tolist() == [-3.0] * 3
    assert xla.fetch(net["rows"].grad).tolist() == [[0.5, 1.0, 1.5]] * 2
