"""A fingerprint notices what changes in objects of any type; tests/trainers/test_user_code.py has those of a trainer."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_tpu_ext.step.fingerprint import Fingerprint, Reach


def note_holder(holder, memory_of):
    noted = Fingerprint(lambda: Reach({"holder": holder}), memory_of=memory_of)
    noted.note()
    return noted


class Holder:
    """Something with attributes of many types."""

    def __init__(self):
        self.number = None
        self.nested = {"a": [1, {"b": SimpleNamespace(c=2.0)}]}
        self.array = np.arange(3)
        self.tensor = torch.ones(2)
        self.kinds = {"x"}


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda h: setattr(h, "number", 1), "holder.number` was None, is 1"),
        (lambda h: setattr(h, "later", None), "holder.later` was added"),
        (lambda h: delattr(h, "number"), "holder.number` was removed"),
        (lambda h: setattr(h.nested["a"][1]["b"], "c", 3.0), "holder.nested['a'][1]['b'].c` was 2.0, is 3.0"),
        (lambda h: h.nested["a"].append(5), "holder.nested['a'][2]` was added"),
        (lambda h: h.nested.update(a=h.nested["a"][:1]), "holder.nested['a']"),
        (lambda h: h.array.fill(7), "holder.array` has other numbers"),
        (lambda h: h.tensor.fill_(7), "the tensor `holder.tensor` has other numbers"),
        (lambda h: setattr(h.tensor, "data", torch.zeros(2)), "holder.tensor` has other numbers"),
        (lambda h: setattr(h, "tensor", torch.ones(2)), "holder.tensor` was replaced"),
        (lambda h: h.kinds.add("y"), "`holder.kinds` was"),
        # It may be equal, but what is in it is not known to be.
        (lambda h: setattr(h, "nested", {"a": [1, {"b": h.nested["a"][1]["b"]}]}), "holder.nested` was replaced"),
    ],
)
def test_attributes_of_any_type(change, says):
    holder = Holder()
    noted = note_holder(holder, lambda tensors: [tensor.data_ptr() for tensor in tensors])
    assert noted.change() is None
    change(holder)
    assert says in noted.change()


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda h: h.kinds.add("y"), "`holder.kinds` was"),
        (lambda h: h.array.fill(7), "holder.array` has other numbers"),
        (lambda h: h.tensor.fill_(7), "the tensor `holder.tensor` has other numbers"),
    ],
)
def test_what_changes_while_something_is_replaced_by_an_equal_value(change, says):
    holder = Holder()
    holder.nested = {"a": [1, 2.5]}
    noted = note_holder(holder, lambda tensors: [tensor.data_ptr() for tensor in tensors])
    holder.nested = {"a": [1, 2.5]}
    change(holder)
    assert says in noted.change()


def test_a_weight_that_is_frozen_while_something_is_replaced_by_an_equal_value():
    net = torch.nn.Linear(2, 2)
    net.sizes = [1, 2]
    noted = Fingerprint(lambda: Reach({"net": net}), [net], lambda tensors: None)
    noted.note()
    net.sizes = [1, 2]
    net.weight.requires_grad_(False)
    assert "`net.weight` was trained, is frozen" in noted.change()


@pytest.mark.parametrize("value", [[1.0, 2], [True, 2], {"a": 2.0}], ids=str)
def test_numbers_of_another_type_are_a_change(value):
    """As a factor, they make a tensor of another dtype."""
    holder = Holder()
    holder.nested = {"a": 2} if isinstance(value, dict) else [1, 2]
    noted = note_holder(holder, lambda tensors: None)
    holder.nested = value
    assert "`holder.nested` was" in noted.change()


def test_what_is_replaced_by_an_equal_value_is_no_change_and_watched_from_then_on():
    holder = Holder()
    holder.nested = {"a": [1, 2.5]}
    noted = note_holder(holder, lambda tensors: None)
    holder.nested = {"a": [1, 2.5]}
    holder.number = None
    assert noted.change() is None
    holder.nested["a"][1] = 3.5
    assert "2.5" in noted.change()
