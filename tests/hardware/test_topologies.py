import pytest

from hf_tpu_ext.backends import detect
from hf_tpu_ext.hardware.topologies import find_chip, find_topology, read_topologies


@pytest.mark.parametrize(
    ("name", "chips", "compiler_name"),
    [
        ("v5e-1", 1, "v5e:1x1"),
        ("v5e-4", 4, "v5e:2x2"),
        ("v5e-8", 8, "v5e:2x4"),
        ("v6e-1", 1, "v6e:1x1"),
        ("v6e-4", 4, "v6e:2x2"),
        ("v6e-8", 8, "v6e:2x4"),
        ("v5p-2", 1, "v5p:1x1x1"),
        ("v5p-8", 4, "v5p:2x2x1"),
        ("v5litepod-8", 8, "v5e:2x4"),
        ("v5e-16", 16, "v5e:4x4"),
        ("v5litepod-256", 256, "v5e:16x16"),
        ("v6e-64", 64, "v6e:8x8"),
        ("v5p-32", 16, "v5p:2x2x4"),
        ("v6e:2x2", 4, "v6e:2x2"),
        (" V5E-8 ", 8, "v5e:2x4"),
    ],
)
def test_names_of_people_and_of_the_compiler(name, chips, compiler_name):
    topology = find_topology(name)
    assert (topology.num_chips, topology.compiler_name) == (chips, compiler_name)
    assert topology.compiler_options["topology_name"] == compiler_name
    assert ("chips_per_host_bounds" in topology.compiler_options) == (chips == 1)


def test_a_corner_has_one_neighbour_along_each_dimension():
    assert find_topology("v5e-1").exchange_bytes_per_second == 0
    assert find_topology("v5e-8").exchange_bytes_per_second == 2 * 50e9
    assert find_topology("v5p-8").exchange_bytes_per_second == 2 * 100e9
    assert find_topology("v5e-64").exchange_bytes_per_second == 2 * 50e9
    # The whole pod is a torus.
    assert find_topology("v5e-256").exchange_bytes_per_second == 4 * 50e9


def test_chips_of_each_host_are_those_of_libtpu():
    """As `jax.experimental.topologies` says with libtpu 0.0.21, `process_index` of each device."""
    assert find_topology("v5e-16").hosts == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert find_topology("v6e-64").hosts[:3] == [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13]]
    assert find_topology("v5e-256").hosts[1] == [2, 3, 18, 19] and find_topology("v5e-256").num_hosts == 64
    assert find_topology("v5p-16").hosts == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert find_topology("v5e-8").hosts == [list(range(8))] and find_topology("v5e-1").num_hosts == 1


def test_each_figure_has_a_source():
    for topology in read_topologies().values():
        figures = {name for name, value in vars(topology.chip).items() if isinstance(value, int | float)}
        assert figures == topology.chip.sources.keys()


@pytest.mark.parametrize(
    ("name", "close"), [("v5e8", "v5e-8"), ("v5-litepod-4", "v5e-4"), ("v6e-17", "v6e-16"), ("tpu", "number of chips")]
)
def test_an_unknown_name_lists_the_closest(name, close):
    with pytest.raises(ValueError, match=close) as error:
        find_topology(name)
    assert repr(name) in str(error.value) and "v5p-8" in str(error.value)


def test_chips_are_known_by_what_a_machine_says():
    """Figures of a run on a TPU: how much memory a program can use, and the peak that utilization is of."""
    known = {title: find_chip(title) for title in detect._TPU_PCI_DEVICES.values()}
    assert {title: chip.name for title, chip in known.items() if chip is not None} == {
        "TPU v5e": "v5e",
        "TPU v5p": "v5p",
        "TPU v6e": "v6e",
    }
    assert find_chip("TPU") is None
