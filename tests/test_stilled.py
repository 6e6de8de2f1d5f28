"""Random operations with the chance taken out."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from graphcache import GraphCache
from graphcache.reasons import Reason
from graphcache.stilled import stilled


class Still(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        run = stilled if torch.Tag.nondeterministic_seeded in func.tags else _plainly
        return run(func, args, kwargs or {})


def _plainly(func, args, kwargs):
    return func(*args, **kwargs)


DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.5, training=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "dropout of channels": lambda x: F.dropout2d(x[..., None], 0.5, training=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(
        x[:, None], x[:, None], x[:, None], dropout_p=0.5
    ),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "randn_like": torch.randn_like,
    "rand": lambda x: torch.rand(len(x), 2),
    "randint": lambda x: torch.randint(3, 9, (len(x),)),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "normal": lambda x: torch.normal(x, 1.0),
    "bernoulli": lambda x: x.sigmoid().bernoulli(),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()),
    "multinomial": lambda x: x.flatten(1).softmax(-1).multinomial(1),
    "poisson": lambda x: torch.poisson(x.abs()),
    "binomial": lambda x: torch.binomial(x.abs().ceil(), x.sigmoid()),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_stand_still_and_each_row_is_its_own(name):
    """Twice the same, and more rows change none."""
    x = torch.randn(6, 2, 4)
    with Still():
        whole, again, part = (DRAWS[name](rows.clone()) for rows in (x, x, x[:4]))
    torch.testing.assert_close(whole, again, rtol=0, atol=0)
    torch.testing.assert_close(whole[:4], part)
    assert whole.isfinite().all()


def test_what_a_draw_depends_on_shows():
    """A mean or a probability that another row changes."""
    x = torch.randn(4, 3)
    with Still():
        assert not torch.equal(torch.normal(x, 1.0), torch.normal(x + 1, 1.0))
        assert not torch.equal(x.sigmoid().bernoulli(), (x + 1).sigmoid().bernoulli())
        assert not torch.equal(F.dropout(x, 0.5), F.dropout(x + 1, 0.5))


class Drawing(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout(x, 0.1, training=True) / x.shape[0],
        lambda x: F.dropout(x - x.mean(0), 0.1, training=True),
        lambda x: x / x.shape[0] + torch.randn_like(x) * 1e-3,
        lambda x: F.dropout(x + torch.linspace(0, 1, len(x), device=x.device)[:, None], 0.1, True),
    ],
    ids=["a factor of the size", "a mean", "a factor and noise", "positions"],
)
def test_a_coupling_beside_draws_is_found(function, device):
    """Chance is no cover: the same is found without it."""
    cache, x = GraphCache(Drawing(function).to(device), [16]), torch.randn(5, 300, device=device)
    with torch.no_grad():
        cache(x)
    assert set(cache.stats().fallbacks) <= {Reason.BATCH_COUPLED, Reason.PAD_NOT_NEUTRAL}
    assert cache.stats().eager == 1


@pytest.mark.parametrize(
    "name", ["dropout", "attention", "rrelu", "randn_like", "uniform_", "multinomial", "normal"]
)
def test_draws_row_by_row_are_padded(name, device):
    cache, x = GraphCache(Drawing(DRAWS[name]).to(device), [8]), torch.randn(5, 2, 4, device=device)
    with torch.no_grad():
        assert cache(x).shape == cache.module(x).shape
    assert cache.stats().eager == 0
