"""Rows with images on torch_tpu: every logged number is that of upstream's trainer on eager CPU."""

import pytest


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    from test_images import ImageRuns

    return ImageRuns(tmp_path_factory.mktemp("images"))


# Of the families whose processors need no torchvision, those without an operator that the plug-in lacks.
@pytest.mark.parametrize("compile_step", ["auto", "off"])
@pytest.mark.parametrize("family", ["llava", "smolvlm"])
def test_several_images_train_as_with_stock(tpu, images, family, compile_step):
    from test_images import check_same, make_rows

    rows = make_rows([1, 3, 2, 1, 2, 1, 1, 3, 1, 1, 2, 1, 2, 3, 1, 1])
    stock = images.stock(family, rows)
    ours = images.ours(family, rows, compile_step=compile_step)
    check_same(stock, ours)
    assert ours.model.device.type == "tpu"
    assert ours.watch.recompiles == 0
