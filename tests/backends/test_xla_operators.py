"""Operators that torch_xla has no program for: values and gradients, without a transfer to the host."""

import pytest
import torch


@pytest.mark.parametrize("unitriangular", [False, True])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("upper", [False, True])
def test_triangular_systems_are_solved_on_the_device(xla, upper, left, unitriangular):
    generator = torch.Generator().manual_seed(0)
    matrix = 0.1 * torch.randn(2, 3, 16, 16, generator=generator) + torch.eye(16)
    values = torch.randn((2, 3, 16, 5) if left else (2, 3, 5, 16), generator=generator)

    def solve(send):
        one, other = send(matrix).requires_grad_(), send(values).requires_grad_()
        solved = torch.linalg.solve_triangular(one, other, upper=upper, left=left, unitriangular=unitriangular)
        return [solved, *torch.autograd.grad(solved.square().sum(), [one, other])]

    before = xla.counters()
    ours = solve(lambda tensor: tensor.to(xla.device))
    assert (xla.counters() - before).fallbacks == 0
    exact, stock = solve(torch.Tensor.double), solve(torch.clone)
    for found, right, other in zip(ours, exact, stock, strict=True):
        error = (found.cpu() - right).abs().max()
        assert error <= 2 * (other - right).abs().max() + 1e-6 * right.abs().max()


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("out_int32", [True, False])
def test_places_between_boundaries(xla, right, out_int32):
    boundaries = torch.arange(0.25, 1, 0.25)
    values = torch.tensor([[0.0, 0.25, 0.3], [0.75, 0.9, -1.0]])
    before = xla.counters()
    found = torch.bucketize(values.to(xla.device), boundaries.to(xla.device), right=right, out_int32=out_int32)
    assert (xla.counters() - before).fallbacks == 0
    expected = torch.bucketize(values, boundaries, right=right, out_int32=out_int32)
    assert found.dtype == expected.dtype and torch.equal(found.cpu(), expected)


@pytest.mark.parametrize(("dimension", "size", "step"), [(-1, 3, 1), (1, 2, 2), (0, 2, 3)])
def test_windows_are_cut_on_the_device(xla, dimension, size, step):
    values = torch.arange(5.0 * 7 * 6).reshape(5, 7, 6)

    def unfold(send):
        sent = send(values).requires_grad_()
        windows = sent.unfold(dimension, size, step)
        weights = send(torch.arange(1.0, windows.numel() + 1).reshape(windows.shape))
        return [windows, *torch.autograd.grad((windows * weights).sum(), [sent])]

    before = xla.counters()
    ours = unfold(lambda tensor: tensor.to(xla.device))
    assert (xla.counters() - before).fallbacks == 0
    for found, right in zip(ours, unfold(torch.clone), strict=True):
        assert torch.equal(found.cpu(), right)


@pytest.mark.parametrize("make", [torch.complex, torch.polar])
def test_complex_numbers_are_made_on_the_device(xla, make):
    parts = torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(0))

    def compute(send):
        one, other = (send(part).requires_grad_() for part in parts)
        found = torch.view_as_real(make(one, other) * make(other, one))
        return [found, *torch.autograd.grad(found.square().sum(), [one, other])]

    before = xla.counters()
    ours = compute(lambda tensor: tensor.to(xla.device))
    assert (xla.counters() - before).fallbacks == 0
    for found, right in zip(ours, compute(torch.clone), strict=True):
        torch.testing.assert_close(found.cpu(), right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("values", [[True, False, True, True], [1, 0, 3, 1], [0.5, 0.0, 2.0, 1.0]])
def test_running_sums_are_those_of_pytorch(xla, values):
    """Also of booleans, whose sums are counts."""
    values = torch.tensor([values])
    before = xla.counters()
    found = values.to(xla.device).cumsum(-1)
    assert (xla.counters() - before).fallbacks == 0
    assert found.dtype == values.cumsum(-1).dtype and torch.equal(found.cpu(), values.cumsum(-1))


@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 5), (2, 3, 4, 4)])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_and_its_running_statistics(xla, shape, training):
    module = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d}[len(shape)]
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(shape, generator=generator) * 2 + 1 for _ in range(3)]
    norms = [module(3).train(training) for _ in range(2)]
    norms[1].to(xla.device)
    for norm, device in zip(norms, ("cpu", xla.device), strict=True):
        for batch in batches:
            norm(batch.to(device)).pow(3).sum().backward()
    expected, found = ({**norm.state_dict(), "gradient": norm.weight.grad} for norm in norms)
    for name, value in expected.items():
        torch.testing.assert_close(found[name].cpu(), value, rtol=1e-5, atol=1e-6)
