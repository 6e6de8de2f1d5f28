"""The backends behind one protocol, on the CPU; tests/test_cuda.py has the real ones."""

import pytest
import torch

from graphcache import GraphCache
from graphcache.errors import CaptureError, Fallback
from graphcache.graphs import backend_for
from graphcache.graphs.recorded import RecordedBackend, RecordedGraph
from graphcache.reasons import Reason

CPU = torch.device("cpu")


@pytest.mark.parametrize("choice", ["auto", "recorded"])
def test_cpu_tensors_are_recorded(choice):
    """By default and by name."""
    backend = backend_for(CPU, choice)
    assert isinstance(backend, RecordedBackend)
    assert backend.device == CPU


@pytest.mark.parametrize(
    ("device", "choice"),
    [("cpu", "cuda"), ("cuda", "recorded"), ("meta", "auto"), ("mps", "auto"), ("xpu", "auto")],
)
def test_a_device_without_graphs_or_another_choice_is_a_device_fallback(device, choice):
    """The text names both."""
    with pytest.raises(Fallback, match=f"tensors on {device} with backend='{choice}'") as caught:
        backend_for(torch.device(device), choice)
    assert caught.value.reason == Reason.DEVICE


def test_a_cache_told_to_use_cuda_runs_cpu_tensors_eagerly():
    """`device`, and the right result."""
    cache = GraphCache(lambda x: x * 2, [4], backend="cuda")
    x = torch.randn(3, 2)
    assert torch.equal(cache(x), x * 2)
    assert cache.stats().fallbacks == {"device": 1}


def test_the_recorded_backend_has_all_of_the_protocol():
    """enter, aside, check, capture, lend, poison, drain, retire, flush, pool_bytes."""
    backend = RecordedBackend()
    static = torch.ones(3)
    backend.enter()
    with backend.aside():
        backend.check(lambda: static + 1)
        graph = backend.capture(lambda: [static + 1])
    assert isinstance(graph, RecordedGraph)
    assert graph.nbytes == 12
    graph.replay()
    backend.poison(backend.lend(graph.outputs[0]))
    backend.drain()
    backend.retire(graph)
    backend.flush()
    assert backend.pool_bytes() == 0


def test_graphs_of_one_backend_replay_interleaved():
    """A, B, A, B: each reads its own statics."""
    backend = RecordedBackend()
    a, b = torch.ones(2), torch.ones(2)
    first, second = backend.capture(lambda: [a * 2]), backend.capture(lambda: [b + 10])
    for value in (1.0, 4.0):
        a.fill_(value)
        b.fill_(-value)
        first.replay()
        second.replay()
        assert first.outputs[0].tolist() == [2 * value] * 2
        assert second.outputs[0].tolist() == [10 - value] * 2


def test_a_failed_capture_leaves_the_backend_as_it_was():
    """The error passes on, nothing is counted, the next capture works."""
    backend, x = RecordedBackend(), torch.ones(2)
    with pytest.raises(CaptureError, match=r"Tensor\.tolist\(\) cannot be recorded: the module"):
        backend.capture(lambda: [x * len(x.tolist())])
    with pytest.raises(ZeroDivisionError):
        backend.capture(lambda: [x * (1 / 0)])
    assert backend.pool_bytes() == 0
    graph = backend.capture(lambda: [x * 2])
    graph.replay()
    assert graph.outputs[0].tolist() == [2.0, 2.0]


def test_a_reset_graph_holds_no_memory():
    """Steps and outputs go."""
    x = torch.ones(2)
    graph = RecordedBackend().capture(lambda: [x * 2])
    graph.reset()
    assert graph.outputs == []
    graph.replay()  # nothing is left to do
