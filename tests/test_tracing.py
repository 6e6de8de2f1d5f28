"""A caller that is itself tracing gets the module's plain run."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphcache import GraphCache
from graphcache.errors import Fallback
from graphcache.reasons import Reason
from graphcache.tracing import refuse_tracing


class Plain(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class PlainFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.fixture
def cache():
    cache = GraphCache(nn.Linear(2, 3).eval(), [4])
    with torch.no_grad():
        cache(X)
    return cache


X = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("context", "text"),
    [
        (Plain, "a dispatch mode is active"),
        (PlainFunctions, "the function mode PlainFunctions is active"),
        (FakeTensorMode, "a dispatch mode is active"),
    ],
)
def test_modes_of_the_callers_are_tracing(context, text):
    """The text names what is active."""
    with context(), pytest.raises(Fallback, match=text) as caught:
        refuse_tracing()
    assert caught.value.reason == Reason.TRACING
    refuse_tracing()


def test_a_default_device_is_not_tracing():
    """`with torch.device(...)` only chooses where new tensors go."""
    with torch.device("cpu"):
        refuse_tracing()


def test_functorch_is_tracing(cache):
    """vmap over the cache equals vmap over the module."""
    x = torch.randn(5, 2, 2)
    with torch.no_grad():
        torch.testing.assert_close(torch.vmap(cache)(x), torch.vmap(cache.module)(x))
    assert cache.stats().fallbacks == {"tracing": 1}


def test_a_dispatch_mode_of_the_callers_sees_the_modules_operations(cache):
    """Its own recorder must not miss them by a replay."""
    seen = []

    class Recorder(Plain):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Recorder():
        cache(X)
    assert any("addmm" in name for name in seen)
    assert cache.stats().fallbacks == {"tracing": 1}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_jit_trace_records_the_module(cache):
    """The traced function follows the module at other sizes."""
    cache.requires_grad_(False)
    with torch.no_grad():
        traced = torch.jit.trace(lambda x: cache(x), X)
        other = torch.randn(7, 2)
        torch.testing.assert_close(traced(other), cache.module(other))


def test_export_of_a_parent_takes_the_module_plainly():
    """The exported program has the module's operations and its results."""
    parent = nn.Sequential(GraphCache(nn.Linear(2, 3), [4]), nn.ReLU()).eval()
    program = torch.export.export(parent, (X,))
    with torch.no_grad():
        torch.testing.assert_close(program.module()(X), parent(X))
    assert any("linear" in str(node.target) for node in program.graph.nodes)


def test_a_parent_under_torch_compile_takes_the_module_plainly():
    """Without a graph break, and equal to eager (the eager backend needs no compiler)."""
    plain = nn.Sequential(nn.Linear(2, 3), nn.ReLU()).eval()
    parent = copy.deepcopy(plain)
    parent[0] = GraphCache(parent[0], [4])
    compiled = torch.compile(parent, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), plain(X))
    assert parent[0].stats().captures == 0


def test_fake_tensors_give_fake_results(cache):
    """Shape propagation through a graphed part."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        out = cache(mode.from_tensor(torch.ones(7, 2)))
    assert out.shape == (7, 3)
