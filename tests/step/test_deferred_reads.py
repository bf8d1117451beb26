"""Losses that read their metrics, with the reads left on the device."""

import os
import subprocess
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from hf_tpu_ext.step.deferred_reads import Appended, DeferredReads
from hf_tpu_ext.step.selected_rows import SelectedRows


class Loss:
    """Written as upstream writes its losses. The package that is deferred is this module."""

    def __init__(self):
        self._metrics = {"train": defaultdict(list)}
        self.tokens = 0

    def metrics(self, values, counts):
        mode = "train"
        total = counts.sum()
        self._metrics[mode]["mean"].append((values.sum() / total).item() if total > 0 else 0.0)
        self.tokens += total.item() // 1
        average = values.sum().item() / total.item() if total > 0 else 7.0
        self._metrics[mode]["average"].append(average)
        if total > 0:
            self._metrics[mode]["shown"].append(values.max().item())
        # A tensor of one element.
        self._metrics[mode]["first"].append(values[:1].item())
        number = (counts > 1).sum().item()
        if total > 0 and number > 0:
            self._metrics[mode]["both"].append(self._metrics[mode]["mean"][-1] - self._metrics[mode]["average"][-1])

    def branch(self, values):
        if values.sum() > 0:
            return values * 2
        return values

    def by_rows(self, values, wanted, tokens):
        chosen = torch.nonzero(wanted, as_tuple=False).view(-1)
        others = torch.nonzero(~wanted, as_tuple=False).view(-1)
        good, bad = values.index_select(0, chosen), values.index_select(0, others)
        losses = torch.cat((2 * (1 - F.sigmoid(good)), 0.5 * F.sigmoid(1 - bad)), 0)
        of_tokens = tokens.index_select(0, chosen)
        mask = (tokens > 0).long().index_select(0, chosen)
        return losses.nanmean(), of_tokens[mask.bool()].sum(), good.nansum(), mask.sum(), tokens[tokens > 0].mean()

    def by_tokens(self, logits, labels, wanted):
        labels = labels.clone()
        labels[labels == 9] = 0
        cross_entropy = F.cross_entropy(logits[wanted], labels[wanted])
        each = F.cross_entropy(logits[wanted], labels[wanted], reduction="none")
        return cross_entropy, each.sum(), logits[wanted].mean(-1).sum()


def deferred(run):
    """Runs with the reads of this module deferred; the loss, with the metrics that were appended and their conditions."""
    loss, reads = Loss(), DeferredReads("cpu", __name__.partition(".")[0])
    loss._metrics = {"train": defaultdict(partial(Appended, reads))}
    with reads:
        result = run(loss)
    return loss, result


@pytest.mark.parametrize("counts", [[1, 2], [0, 0], [1, 0]])
def test_metrics_are_those_that_are_read(counts):
    values, counts = torch.tensor([0.25, 0.5]), torch.tensor(counts)
    eager = Loss()
    eager.metrics(values, counts)
    loss, _ = deferred(lambda loss: loss.metrics(values, counts))
    assert eager._metrics["train"].keys() <= loss._metrics["train"].keys()
    for name, appended in loss._metrics["train"].items():
        assert all(isinstance(value, torch.Tensor) and value.shape == () for value in appended)
        counted = [
            value.item()
            for value, condition in zip(appended, appended.conditions, strict=True)
            if condition is None or condition.item()
        ]
        assert counted == eager._metrics["train"].get(name, []), name
    assert loss.tokens.item() == eager.tokens


def test_nan_stays_nan():
    loss, _ = deferred(lambda loss: loss.metrics(torch.tensor([float("nan")]), torch.tensor([3])))
    assert all(value.isnan() for values in loss._metrics["train"].values() for value in values)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_other_branches_are_taken_as_they_are(sign):
    values = torch.tensor([sign])
    assert torch.equal(deferred(lambda loss: loss.branch(values))[1], Loss().branch(values))


@pytest.mark.parametrize("wanted", [[True, False, True], [False] * 3, [True] * 3])
def test_rows_that_a_mask_chooses(wanted):
    """Losses and gradients are those of the chosen rows."""
    results = []
    for run in (
        lambda loss, *given: loss.by_rows(*given),
        lambda loss, *given: deferred(lambda loss: loss.by_rows(*given))[1],
    ):
        values = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
        tokens = torch.tensor([[1.0, 2.0], [0.0, 3.0], [0.0, 0.0]], dtype=torch.float64)
        found = run(Loss(), values, torch.tensor(wanted), tokens)
        found[0].backward()
        results.append((*(value.detach() for value in found), values.grad))
    for eager, ours in zip(*results, strict=True):
        assert type(ours) is torch.Tensor
        torch.testing.assert_close(ours, eager, equal_nan=True)


@pytest.mark.parametrize("wanted", [[[True, False, True], [False, True, True]], [[True] * 3] * 2])
def test_tokens_that_a_mask_chooses(wanted):
    """Their cross-entropy, its gradients, and a number that is put where a mask is true."""
    labels, results = torch.tensor([[1, 9, 2], [0, 3, 9]]), []
    for run in (Loss().by_tokens, lambda *given: deferred(lambda loss: loss.by_tokens(*given))[1]):
        logits = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        logits.requires_grad_()
        found = run(logits, labels, torch.tensor(wanted))
        sum(found).backward()
        results.append((*(value.detach() for value in found), logits.grad))
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager)


def test_what_needs_the_number_of_rows_says_so():
    def sort(loss):
        return torch.sort(torch.arange(3.0)[torch.tensor([True, False, True])])

    with pytest.raises(NotImplementedError, match="sort of rows that a mask on the device has chosen"):
        deferred(sort)
    assert not isinstance(torch.arange(3), SelectedRows)


@pytest.mark.ci
def test_without_positions_of_code_a_condition_is_read():
    """`PYTHONNODEBUGRANGES=1`: what upstream's loss branches on is a read, and the numbers are the same."""
    script = (
        "import torch\n"
        f"from {__name__} import Loss, deferred\n"
        "counts = torch.tensor([2.0, 3.0])\n"
        "run = lambda loss: loss.metrics(torch.tensor([1.0, 4.0]), counts)\n"
        "loss, _ = deferred(run)\n"
        "expected = Loss(); run(expected)\n"
        "found = {name: [float(value) for value in values] for name, values in loss._metrics['train'].items()}\n"
        "assert found == dict(expected._metrics['train']), found\n"
    )
    # Positions are left out of bytecode that is read, too, and none may be written without.
    environment = {**os.environ, "PYTHONNODEBUGRANGES": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", script]
    subprocess.run(command, check=True, env=environment, cwd=Path(__file__).parent)
