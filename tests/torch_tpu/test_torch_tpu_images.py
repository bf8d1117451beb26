"""Rows with images on torch_tpu: every logged number is that of upstream's trainer on eager CPU."""

import sys
from pathlib import Path

import pytest
import torch


sys.path.insert(0, str(Path(__file__).parents[1] / "trainers"))


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    from test_images import ImageRuns

    return ImageRuns(tmp_path_factory.mktemp("images"))


def sum_up(tensor, dim):
    """As `cumsum`, which the plug-in for the host cannot read: its StableHLO is older than torch_tpu's."""
    places = torch.arange(tensor.shape[dim], device=tensor.device)
    return (tensor[:, None] * (places[:, None] >= places)).sum(2)


# Of the families whose processors need no torchvision, those that compute no other `cumsum`.
@pytest.mark.parametrize("compile_step", ["auto", "off"])
@pytest.mark.parametrize("family", ["llava", "smolvlm"])
def test_several_images_train_as_with_stock(tpu, images, family, compile_step, monkeypatch):
    from test_images import check_same, make_rows

    rows = make_rows([1, 3, 2, 1, 2, 1, 1, 3, 1, 1, 2, 1, 2, 3, 1, 1])
    stock = images.stock(family, rows)
    monkeypatch.setattr(torch.Tensor, "cumsum", sum_up)
    ours = images.ours(family, rows, compile_step=compile_step)
    check_same(stock, ours)
    assert ours.model.device.type == "tpu"
    assert ours.watch.recompiles == 0
