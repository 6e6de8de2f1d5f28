"""What calls and trials leave behind: in modules, generators, other threads and compilers."""

import collections
import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

from graphcache import GraphCache, GraphCacheError
from graphcache.graphs.recorded import RecordedBackend

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


class Carrying(nn.Module):
    """Adds to its state, returns it, and takes it as an argument as well."""

    def __init__(self):
        super().__init__()
        self.register_buffer("h", torch.zeros(4))

    def forward(self, x, h):
        self.h.add_(x.sum(0))
        return self.h, x + h


def test_an_argument_may_be_the_state_that_the_call_writes(device):
    """A static copy of it would be read as it was before."""
    module, plain = Carrying().to(device), Carrying().to(device)
    cache = GraphCache(module)
    x = torch.ones(3, 4, device=device)
    ours, theirs = module.h, plain.h
    for _ in range(4):
        (ours, y), (theirs, expected) = cache(x, ours), plain(x, theirs)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(ours, theirs)
    assert cache.stats().fallbacks == {"state-written": 4}


def test_an_argument_beside_the_state_is_served_by_graphs(device):
    """The same module, and state of the caller's own."""
    module, plain = Carrying().to(device), Carrying().to(device)
    cache = GraphCache(module)
    x, h = torch.ones(3, 4, device=device), torch.ones(4, device=device)
    for _ in range(4):
        for ours, theirs in zip(cache(x, h), plain(x, h), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert (cache.stats().replays, cache.stats().eager) == (3, 0)


class HandsOver(nn.Module):
    """Computes one part in another thread, by `work`, which returns how to wait for the result."""

    def __init__(self, work):
        super().__init__()
        self.here, self.there = nn.Linear(4, 4), nn.Linear(4, 4)
        self.requires_grad_(False)
        self.work = work

    def forward(self, x):
        wait = self.work(self.there, x)
        return self.here(x), wait()


def by_thread(function, *args):
    out = []
    thread = threading.Thread(target=lambda: out.append(function(*args)), daemon=True)
    thread.start()

    def wait():
        thread.join()
        return out[0]

    return wait


@pytest.fixture
def by_pool():
    with ThreadPoolExecutor(1) as pool:
        yield lambda *call: pool.submit(*call).result


@pytest.fixture(params=["thread", "pool"])
def work(request, by_pool):
    return by_thread if request.param == "thread" else by_pool


@pytest.mark.parametrize("buckets", [[8], None])
def test_work_in_another_thread_is_no_part_of_a_graph(work, buckets, device):
    """It would be missing in every replay."""
    module = HandsOver(work).to(device)
    cache = GraphCache(module, buckets)
    for _ in range(3):
        x = torch.randn(3, 4, device=device)
        torch.testing.assert_close(cache(x), module(x))
    assert cache.stats().fallbacks == {"opaque-code": 3}


def test_a_cache_called_in_a_thread_of_another_caches_call_does_not_hang():
    """Each waits for its turn, and the outer call waits for the thread."""
    module = HandsOver(by_thread)
    plain = module.there
    module.there = GraphCache(plain, [8])
    cache = GraphCache(module, [8])
    x = torch.randn(3, 4)
    out = []

    def call():
        with torch.no_grad():
            out.extend(cache(x) for _ in range(2))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    for ours in out:
        torch.testing.assert_close(ours, (module.here(x), plain(x)))
    assert len(out) == 2


class Counter:
    __slots__ = ("n",)

    def __init__(self):
        self.n = 0

    def more(self):
        self.n += 1
        return self.n


def counted():
    for n in range(1, 100):
        yield float(n)


class Holder(nn.Module):
    """Multiplies by what it takes from what it holds."""

    def __init__(self, held, take):
        super().__init__()
        self.held, self.take = held, take

    def forward(self, x):
        return x * self.take(self.held)


def rotated(held):
    held.rotate()
    return held[0]


HELD = {
    "count": (lambda: itertools.count(1), next),
    "cycle": (lambda: itertools.cycle([1.0, 2.0, 3.0]), next),
    "iterator": (lambda: iter([float(n) for n in range(99)]), next),
    "map": (lambda: map(float, range(99)), next),
    "generator": (counted, next),
    "generator in a list": (lambda: [counted()], lambda held: next(held[0])),
    "object with slots": (Counter, lambda held: held.more()),
    "object with slots in a list": (lambda: [Counter()], lambda held: held[0].more()),
    "deque": (lambda: collections.deque([1.0, 2.0, 3.0]), rotated),
    "array": (lambda: np.zeros(1), lambda held: float(np.add(held, 1, out=held)[0])),
    "random in a list": (lambda: [random.Random(0)], lambda held: held[0].random()),
    "NumPy's generator in a dict": (
        lambda: {"a": np.random.default_rng(0)},
        lambda held: float(held["a"].random()),
    ),
    "NumPy's old generator in a tuple": (
        lambda: (np.random.RandomState(0),),
        lambda held: float(held[0].rand()),
    ),
    "torch's generator in a dict": (
        lambda: {"a": torch.Generator().manual_seed(1)},
        lambda held: torch.rand((), generator=held["a"]),
    ),
}


@pytest.mark.parametrize("buckets", [[8], None])
@pytest.mark.parametrize("name", HELD)
def test_what_each_call_takes_is_taken_once(name, buckets):
    """Trials take nothing, and no number is frozen; what comes next is next for the module too."""
    make, take = HELD[name]
    module, plain = Holder(make(), take), Holder(make(), take)
    cache = GraphCache(module, buckets)
    x = torch.ones(3, 4)
    for _ in range(4):
        torch.testing.assert_close(cache(x), plain(x))
    torch.testing.assert_close(module(x), plain(x))
    (reason,) = cache.stats().fallbacks
    assert reason in ("generator", "state-written")
    assert cache.stats().eager == 4


class Forking(nn.Module):
    """Draws, and puts the generator back."""

    def forward(self, x):
        with torch.random.fork_rng(devices=[]):
            return x + torch.rand_like(x)


@pytest.mark.parametrize("buckets", [[3], None])
def test_a_generator_put_back_by_forward_is_back_after_each_call(buckets):
    """A replay would draw on."""
    module, x = Forking(), torch.zeros(3, 4)
    cache = GraphCache(module, buckets)
    before = torch.get_rng_state()
    for _ in range(3):
        torch.testing.assert_close(cache(x), module(x))
        assert torch.equal(torch.get_rng_state(), before)
    assert cache.stats().fallbacks == {"generator": 3}


def test_pieces_lent_as_views_are_joined_before_they_are_overwritten(monkeypatch):
    """Views are lent of GPU graphs alone, so the recorder is made to do it."""
    monkeypatch.setattr(RecordedBackend, "lend", lambda self, view: view.view_as(view))
    cache = GraphCache(lambda x: x * 2, [8], outputs="view")
    for k in (1, 5):
        x = torch.arange(20.0).view(20, 1) * k
        torch.testing.assert_close(cache(x), x * 2)
    assert (cache.stats().splits, cache.stats().eager) == (2, 0)


class EnablesGrad(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        with torch.enable_grad():
            return self.linear(x)


def test_a_result_that_requires_grad_inside_no_grad_still_does(device):
    """Gradients that forward itself asks for."""
    module = EnablesGrad().to(device)
    cache = GraphCache(module, [8])
    for _ in range(3):
        x = torch.randn(3, 4, device=device)
        out = cache(x)
        torch.testing.assert_close(out, module(x))
        assert out.requires_grad
    assert cache.stats().fallbacks == {"grad": 3}


class ReturnsState(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(4, 4))

    def forward(self, x):
        return x * 2, self.table[:2]


def test_a_view_of_state_is_a_tensor_of_its_own_in_each_call(device):
    """What a caller does to its shape is not seen by the next; what it writes is, as in eager."""
    module, plain = ReturnsState().to(device), ReturnsState().to(device)
    cache = GraphCache(module)
    x = torch.ones(3, 4, device=device)
    for _ in range(4):
        (ours, view), (theirs, expected) = cache(x), plain(x)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(view, expected)
        for returned in (view, expected):
            returned.add_(1).unsqueeze_(0)
    assert module.table[0, 0] == 4
    assert (cache.stats().replays, cache.stats().eager) == (3, 0)


SAMPLED = {
    "warmup": lambda cache, sample: cache.warmup(sample=sample, progress=False),
    "static_inputs": lambda cache, sample: cache.static_inputs(3, like=sample),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_a_sample_that_is_no_call_raises_the_packages_error(name):
    """Which says what it is no call of."""
    cache = GraphCache(nn.Linear(4, 4), [8])
    with pytest.raises(GraphCacheError, match="no call of Linear"):
        SAMPLED[name](cache, (object(),))


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("dynamo")
class TestCompilers:
    """torch.compile keeps a memory of code that it once skipped."""

    def test_cond_works_in_eager_afterwards(self):
        """It compiles its branches."""

        def function(x):
            return torch.cond(x.sum() > 0, lambda a: a * 2, lambda a: a * 3, (x,))

        cache = GraphCache(function, [8])
        for sign in (1, -1, 1):
            x = torch.ones(3, 4) * sign
            expected = x * 2 if sign > 0 else x * 3
            torch.testing.assert_close(cache(x), expected)
            torch.testing.assert_close(function(x), expected)

    @pytest.mark.parametrize("fullgraph", [False, True])
    @pytest.mark.parametrize("before", [False, True])
    def test_compiled_code_runs_compiled_after_a_cache_has_looked_at_it(self, before, fullgraph):
        """Also for another shape, which is compiled anew."""
        runs = []

        def backend(graph, examples):
            def run(*args):
                runs.append(len(args))
                return graph(*args)

            return run

        def function(x):
            return x * 2 + 1

        compiled = torch.compile(function, backend=backend, fullgraph=fullgraph)
        x = torch.randn(3, 4)
        if before:
            compiled(x)
        cache = GraphCache(compiled, [8])
        for _ in range(3):
            torch.testing.assert_close(cache(x), function(x))
        assert (cache.stats().captures, cache.stats().eager) == (1, 0)
        runs.clear()
        for n in (3, 3, 6):
            x = torch.randn(n, 4)
            torch.testing.assert_close(compiled(x), function(x))
        assert len(runs) == 3


class Hooking(nn.Module):
    """Registers a hook in its first forward, as transformers does to collect hidden states."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.done = False

    def forward(self, x):
        if not self.done:
            self.inner.register_forward_hook(lambda module, args, output: output * 2)
            self.done = True
        return self.inner(x)


def test_a_hook_that_forward_registers_is_registered_once(device):
    """A trial takes its own away again."""
    module, x = Hooking().to(device), torch.randn(3, 4, device=device)
    cache = GraphCache(module, [8])
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(cache(x), nn.Linear.forward(module.inner, x) * 2)
    assert len(module.inner._forward_hooks) == 1


def test_hidden_states_of_an_encoder_are_collected_once(device):
    """The hooks for them come with the first call that asks."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.BertModel(config).to(device).eval()
    cache, ids = GraphCache(model, [4, 8]), torch.randint(3, 50, (2, 5), device=device)
    with torch.no_grad():
        for _ in range(3):
            seen = cache(ids, output_hidden_states=True, output_attentions=True)
            assert (len(seen.hidden_states), len(seen.attentions)) == (3, 2)


QUEUE = []


def test_what_other_threads_write_is_soon_left_alone():
    """Forward reads what they write: calls are refused, and tried ever more rarely."""

    def forward(x):
        return x * len(QUEUE)

    cache, x = GraphCache(forward, [4]), torch.ones(3, 4)
    tried = []
    learn = cache._miss.knowledge._learn
    cache._miss.knowledge._learn = lambda reading: tried.append(0) or learn(reading)

    def writes(x):
        QUEUE.append(0)
        return forward(x)

    written = GraphCache(writes, [4])
    count = written._miss.knowledge._learn
    written._miss.knowledge._learn = lambda reading: tried.append(1) or count(reading)
    with torch.no_grad():
        for n in range(1, 101):
            torch.testing.assert_close(written(x), x * n)
            torch.testing.assert_close(cache(x), x * n)
    assert len(QUEUE) == 100
    assert written.stats().fallbacks == {"state-written": 100}
    assert tried.count(1) <= 13  # 9, and at 16, 32 and 64
