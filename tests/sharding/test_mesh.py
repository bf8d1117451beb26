"""A mesh as a person writes it: what it means, and what the message says where it means nothing."""

import re

import pytest

from hf_tpu_ext.sharding import AXES, describe_hosts, describe_mesh, parse_mesh, resolve_mesh


EXAMPLES = ["mesh='data'", "mesh='fsdp'", "mesh='data=2,fsdp=4'"]


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ("data", {"data": None}),
        ("fsdp", {"fsdp": None}),
        ("fsdp=8", {"fsdp": 8}),
        ("data=2,fsdp=4", {"data": 2, "fsdp": 4}),
        (" fsdp = 4 , data ", {"fsdp": 4, "data": None}),
    ],
)
def test_parse(mesh, expected):
    assert parse_mesh(mesh) == expected


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("tensor=8", ["unknown axis 'tensor'", "data, fsdp"]),
        ("Data", ["unknown axis 'Data'", "data, fsdp"]),
        ("data:8", ["unknown axis 'data:8'", "data, fsdp"]),
        ("8", ["unknown axis '8'", "data, fsdp"]),
        ("", ["unknown axis ''", "data, fsdp"]),
        ("data=2,", ["unknown axis ''", "data, fsdp"]),
        ("data=2,data=4", ["names the axis 'data' twice"]),
        ("data=two", ["'data'", "'two'", "positive whole number"]),
        ("fsdp=", ["'fsdp'", "''", "positive whole number"]),
        ("fsdp=0", ["'fsdp'", "'0'", "positive whole number"]),
        ("fsdp=-4", ["'fsdp'", "'-4'", "positive whole number"]),
        ("fsdp=2.0", ["'fsdp'", "'2.0'", "positive whole number"]),
        ("data=2=4", ["'data'", "'2=4'", "positive whole number"]),
        ("data,fsdp", ["more than one axis without a size"]),
    ],
)
def test_malformed(mesh, words):
    for read in (parse_mesh, lambda mesh: resolve_mesh(mesh or ",", 8)):
        with pytest.raises(ValueError) as error:
            read(mesh)
        message = str(error.value)
        assert all(word in message for word in [*words, *EXAMPLES]), message
    assert repr(mesh or ",") in message


@pytest.mark.parametrize(
    ("mesh", "num_chips", "expected"),
    [
        (None, 1, (1, 1)),
        (None, 8, (8, 1)),
        ("data", 8, (8, 1)),
        ("fsdp", 8, (1, 8)),
        ("fsdp", 1, (1, 1)),
        ("fsdp=8", 8, (1, 8)),
        ("data=2,fsdp=4", 8, (2, 4)),
        ("fsdp=4,data=2", 8, (2, 4)),
        ("data=2,fsdp", 8, (2, 4)),
        ("data,fsdp=2", 8, (4, 2)),
        ("data=8,fsdp", 8, (8, 1)),
    ],
)
def test_resolve(mesh, num_chips, expected):
    resolved = resolve_mesh(mesh, num_chips)
    assert tuple(resolved.items()) == tuple(zip(AXES, expected, strict=True))


@pytest.mark.parametrize(
    ("mesh", "num_chips", "words"),
    [
        ("data=8", 1, ["is for 8 chips, not 1."]),
        ("data=4", 8, ["is for 4 chips, not 8."]),
        ("fsdp=16", 8, ["is for 16 chips, not 8."]),
        ("data=2,fsdp=2", 8, ["is for 4 chips, not 8."]),
        ("data=3,fsdp", 8, ["is for 6 chips, not 8."]),
        ("data=16,fsdp", 8, ["is for 16 chips, not 8."]),
        ("fsdp=16,data", 1, ["is for 16 chips, not 1."]),
    ],
)
def test_size_that_is_not_the_number_of_chips(mesh, num_chips, words):
    """Whatever the message says to type works."""
    with pytest.raises(ValueError) as error:
        resolve_mesh(mesh, num_chips)
    message = str(error.value)
    assert all(word in message for word in [f"mesh={mesh!r}", *words]), message
    fitting = re.findall(r"'(data=\d+,fsdp=\d+)'", message.partition("Set mesh to one of")[2])
    assert len(fitting) == sum(num_chips % size == 0 for size in range(1, num_chips + 1))
    for suggested in fitting:
        assert resolve_mesh(suggested, num_chips) == parse_mesh(suggested)
    for fewer in map(int, re.findall(r"num_chips=(-?\d+)", message)):
        assert 1 <= fewer < num_chips, message
        assert resolve_mesh(mesh, fewer)


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("data", "4 hosts of 4 chips: data crosses hosts"),
        ("fsdp", "4 hosts of 4 chips: fsdp crosses hosts"),
        ("data=4,fsdp=4", "4 hosts of 4 chips: data crosses hosts, fsdp stays within one"),
        ("data=8,fsdp=2", "4 hosts of 4 chips: data crosses hosts, fsdp stays within one"),
        ("data=2,fsdp=8", "4 hosts of 4 chips: data and fsdp cross hosts"),
    ],
)
def test_what_crosses_hosts(mesh, words):
    assert describe_hosts(resolve_mesh(mesh, 16), 4) == words


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("data", "data parallel (mesh data=8)"),
        ("fsdp", "fully sharded (mesh fsdp=8)"),
        ("data=2,fsdp=4", "fully sharded in 2 groups (mesh data=2 x fsdp=4)"),
    ],
)
def test_describe(mesh, words):
    assert describe_mesh(resolve_mesh(mesh, 8)) == words
