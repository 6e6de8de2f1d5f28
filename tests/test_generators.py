"""The generators a trial run may draw from: told apart, and put back."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from graphcache.generators import RandomStates, default_generators
from graphcache.holdings import Slots

CPU = torch.device("cpu")


def test_each_source_is_named():
    """Python's, numpy's; none if nothing moved."""
    states = RandomStates(CPU, alone=True)
    assert states.drawn_elsewhere(observed=False) is None
    assert not states.drawn()
    random.random()
    assert states.drawn_elsewhere(observed=False) == "Python's `random`"
    states.restore()
    np.random.rand()
    assert states.drawn_elsewhere(observed=False) == "`numpy.random`"
    states.restore()
    assert states.drawn_elsewhere(observed=False) is None
    torch.rand(1)
    assert states.drawn()
    states.restore()
    assert not states.drawn()


HELD = {
    "random.Random": (lambda: random.Random(3), lambda g: g.random()),
    "torch.Generator": (
        lambda: torch.Generator().manual_seed(3),
        lambda g: torch.rand(1, generator=g).item(),
    ),
    "numpy.RandomState": (lambda: np.random.RandomState(3), lambda g: g.rand()),
    "numpy.Generator": (lambda: np.random.default_rng(3), lambda g: g.random()),
}


@pytest.mark.parametrize("kind", HELD)
def test_a_generator_that_a_submodule_holds_is_noticed_and_put_back(kind):
    """Each kind, deep in the module."""
    make, draw = HELD[kind]
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].source = make()
    states = RandomStates(CPU, Slots(module), alone=True)
    assert states.drawn_elsewhere(observed=False) is None
    first = draw(module[0].source)
    assert states.drawn_elsewhere(observed=False) == "a generator of its own"
    states.restore()
    assert states.drawn_elsewhere(observed=False) is None
    assert draw(module[0].source) == first


def test_other_threads_draws_are_left_alone():
    """Not alone, and nothing seen to draw: neither told nor undone."""
    states = RandomStates(CPU, alone=False)
    random.random()
    moved = random.getstate()
    assert states.drawn_elsewhere(observed=False) is None
    states.restore(observed=False)
    assert random.getstate() == moved


def test_the_cpus_default_generator_is_always_one():
    assert torch.default_generator in default_generators()
