"""Making an entry, and what it must keep alive."""

import functools
import gc
import weakref

import pytest
import torch

from graphcache import GraphCache

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


def test_what_forward_keeps_for_itself_lives_as_long_as_a_graph_reads_it(device):
    """`functools.lru_cache` of one entry: each size's table replaces the other's."""
    made = []

    @functools.lru_cache(maxsize=1)
    def positions(n):
        table = torch.arange(float(n), device=device)[:, None] * 1.0
        made.append(weakref.ref(table.untyped_storage()))
        return table

    dims = ({0: "b", 1: "s"},)
    cache = GraphCache(
        lambda x: x + positions(x.shape[1]), {"b": [4], "s": [4, 8]}, dynamic_shapes=dims
    )
    for _ in range(2):
        for n in (4, 8, 3, 7):
            x = torch.randn(3, n, 5, device=device)
            garbage = torch.full((1 << 14,), 1e9, device=device)  # takes what was given back
            torch.testing.assert_close(cache(x), x + torch.arange(float(n), device=device)[:, None])
            del garbage
    assert cache.stats().graphs == 2
    positions.cache_clear()
    alive = sum(ref() is not None for ref in made)
    assert alive >= 2  # those that the two graphs read
    cache.reset()
    gc.collect()
    assert sum(ref() is not None for ref in made) < alive


def test_activations_are_not_kept(device):
    """Only what outlives the run and is not its result; garbage is collected first."""

    class Cycle:
        def __init__(self, tensor):
            self.tensor, self.me = tensor, self

    def forward(x):
        return Cycle(x * 2).tensor + 1

    cache, x = GraphCache(forward, [8]), torch.ones(3, 4, device=device)
    cache(x)
    (entry,) = cache._miss.store.graphs.entries()
    assert entry.memos == []
