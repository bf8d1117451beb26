"""The state of random numbers that a step could draw on the host."""

import random
from functools import partial

import numpy as np
import torch

from hf_tpu_ext.backends.random_state import read_random_state


def test_random_numbers_of_the_host_are_compared():
    before = read_random_state()
    assert read_random_state() == before
    for draw in (random.random, np.random.rand, partial(torch.rand, ())):
        before = read_random_state()
        draw()
        assert read_random_state() != before
