"""Modules with CUDA graphs of their own, by torch.compile. Nothing is compiled here."""

import pytest
import torch
from torch import nn

from graphcache import GraphCache
from graphcache.compiled import own_graphs

MODES = ["reduce-overhead", "max-autotune"]


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def by_function(mode):
    return torch.compile(net(), mode=mode)


def by_method(mode):
    made = net()
    made[0].compile(mode=mode)
    return made


def of_a_part(mode):
    made = net()
    made[0] = torch.compile(made[0], mode=mode)
    return made


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [by_function, by_method, of_a_part])
def test_graphs_of_its_own_are_found(make, mode):
    module = make(mode)
    (found, *_) = own_graphs(module, module)
    assert found.reason == "capture-failed"
    assert "max-autotune-no-cudagraphs" in found.what
    assert found.what.startswith(("Sequential", "Linear"))


def test_a_compiled_function_is_told_by_name():
    def double(x):
        return x * 2

    (found,) = own_graphs(torch.compile(double, mode="reduce-overhead"), None)
    assert found.what.startswith("double ")


@pytest.mark.parametrize("mode", [None, "default", "max-autotune-no-cudagraphs"])
@pytest.mark.parametrize("make", [by_function, by_method, of_a_part])
def test_other_modes_are_fine(make, mode):
    module = make(mode)
    assert own_graphs(module, module) == []


def test_plain_modules_are_fine():
    assert own_graphs(net(), net()) == []
    assert own_graphs(torch.relu, None) == []


def test_a_cache_refuses_them_with_the_remedy():
    """Eager runs the module as it is; here with a compiler that runs it as it is."""
    module = net()
    module[0].compile(mode="reduce-overhead")
    cache = GraphCache(module, buckets=[8])
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        x = torch.randn(3, 4)
        assert "max-autotune-no-cudagraphs" in cache.explain(x).detail
        torch.testing.assert_close(cache(x), module(x))
    assert cache.stats().fallbacks == {"capture-failed": 1}
