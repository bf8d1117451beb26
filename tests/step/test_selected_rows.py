"""Statistics over some elements are those of the elements picked out."""

import math

import pytest
import torch
from trl.trainer.utils import nanmax, nanmin

from hf_tpu_ext.step.selected_rows import nanmax_of_all, nanmin_of_all, quantile_of_chosen


@pytest.mark.parametrize("values", [[1.0, -2.0, 0.5], [math.nan, 3.0, -1.0, math.nan], [math.nan] * 3, [0.0]])
def test_extremes_leave_nan_out(values):
    values = torch.tensor(values)
    torch.testing.assert_close(nanmin_of_all(values), nanmin(values), equal_nan=True)
    torch.testing.assert_close(nanmax_of_all(values), nanmax(values), equal_nan=True)


@pytest.mark.parametrize("count", [1, 2, 7, 24])
@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_quantile(threshold, count):
    values = torch.randn(4, 6, generator=torch.Generator().manual_seed(count))
    chosen = torch.arange(24).view(4, 6) < count
    expected = torch.quantile(values[chosen], threshold)
    torch.testing.assert_close(quantile_of_chosen(values, chosen, threshold), expected, rtol=0, atol=0)


def test_of_nothing_chosen_no_element_is_above():
    values = torch.randn(3)
    assert not (values >= quantile_of_chosen(values, torch.zeros(3, dtype=torch.bool), 0.5)).any()
