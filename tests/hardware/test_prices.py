import json

import pytest

from hf_tpu_ext.hardware.prices import Price, read_prices
from hf_tpu_ext.hardware.topologies import read_topologies


def test_every_chip_has_a_price_with_its_date():
    prices = read_prices()
    assert prices.keys() == {topology.chip.name for topology in read_topologies().values()}
    assert all(price.date >= "2026" and price.region and price.source for price in prices.values())


def test_a_file_of_ones_own(tmp_path):
    values = {"dollars_per_chip_hour": 0.5, "region": "europe-west4", "date": "2026-11-20", "source": "spot"}
    (tmp_path / "mine.json").write_text(json.dumps({"v5e": values}))
    assert read_prices(tmp_path / "mine.json") == {"v5e": Price(0.5, "europe-west4", "2026-11-20", "spot")}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "cannot be read"),
        ("[]", "it is not an object"),
        ('{"v5e": 1.2}', "v5e: expected an object, found 1.2"),
        ('{"v5e": {"dollars_per_chip_hour": 1}}', "date, region, source missing"),
        ('{"v5e": {"dollars_per_chip_hour": "1", "region": "", "date": "2026", "source": ""}}', "expected a number"),
        ('{"v5e": {"dollars_per_chip_hour": -1, "region": "", "date": "2026", "source": ""}}', "expected a number"),
        ('{"v5e": {"dollars_per_chip_hour": true, "region": "", "date": "2026", "source": ""}}', "expected a number"),
        (
            '{"v5e": {"dollars_per_chip_hour": 1, "region": "", "date": "May", "source": ""}}',
            "date is 'May', expected \"2026\"",
        ),
        (
            '{"v5e": {"dollars_per_chip_hour": 1, "region": 4, "date": "2026", "source": ""}}',
            "region is 4, expected text",
        ),
        ('{"v5e": {"dollars_per_chip_hour": 1, "region": "", "date": "2026", "source": "", "a": 1}}', "a unknown"),
    ],
)
def test_a_damaged_file_says_what_to_write(tmp_path, text, told):
    path = tmp_path / "prices.json"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        read_prices(path)
    assert told in str(error.value) and str(path) in str(error.value) and '"date": "2026-11-20"' in str(error.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        read_prices(tmp_path / "none.json")
