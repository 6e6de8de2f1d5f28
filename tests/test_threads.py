"""Several threads: each gets its own answer, a key is captured once, and counters add up."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import BY_NAME, assert_same, assert_sums

from graphcache import GraphCache, GraphCacheError

THREADS = 6
CALLS = 25


def in_threads(work: Callable[[int], None], count: int = THREADS) -> None:
    """Run `work(i)` in threads that start together; the first error of any is raised here."""
    errors: list[BaseException] = []
    gate = threading.Barrier(count)

    def run(i: int) -> None:
        try:
            gate.wait(30)
            with torch.no_grad():
                work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]


def rows(n: int, device: str) -> Tensor:
    """Drawn on the host, since draws of other threads on the GPU fail while one captures."""
    return torch.randn(n, 4).to(device)


def net(device: str) -> nn.Module:
    return BY_NAME["mlp"].build(device)


def test_many_threads_share_one_cache(device: str) -> None:
    """Results are held while others call; each key is captured once."""
    module = net(device)
    cache = GraphCache(module, [2, 4, 8])

    def work(i: int) -> None:
        held = []
        for step in range(CALLS):
            x = torch.full((1 + (i + step) % 8, 4), float(i + step), device=device)
            held.append((cache(x), x))
        for y, x in held:
            assert_same(y, module(x))

    in_threads(work)
    stats = cache.stats()
    assert (stats.calls, stats.captures, stats.eager) == (THREADS * CALLS, 3, 0)
    assert_sums(stats)
    cache._check()


def test_threads_that_split_and_evict_share_one_cache(device: str) -> None:
    """Above every bucket, and with room for fewer graphs than there are buckets."""
    module = net(device)
    cache = GraphCache(module, [1, 2, 4], max_graphs=2)

    def work(i: int) -> None:
        for step in range(CALLS):
            x = rows(1 + (i * 5 + step) % 10, device)
            assert_same(cache(x), module(x))

    in_threads(work)
    assert cache.stats().calls == THREADS * CALLS
    assert cache.stats().graphs <= 2
    cache._check()


@pytest.mark.parametrize("shared", [True, False], ids=["one module", "two modules"])
def test_two_caches_in_two_threads(device: str, shared: bool) -> None:
    """Captures of one while the other replays and captures."""
    modules = [net(device)]
    modules.append(modules[0] if shared else copy.deepcopy(modules[0]))
    caches = [GraphCache(module, [2, 4, 8], max_graphs=2) for module in modules]

    inputs = [rows(9, device) for _ in caches]

    def work(i: int) -> None:
        for step in range(2 * CALLS):
            x = inputs[i][: 1 + step % 9] + step
            assert_same(caches[i](x), modules[i](x))
            if step % 10 == 9:
                caches[i].invalidate()

    in_threads(work, 2)
    for cache in caches:
        assert cache.stats().calls == 2 * CALLS
        cache._check()


def test_eager_fallbacks_run_in_several_threads_at_once(device: str) -> None:
    """Fallbacks do not wait for each other: all threads meet inside the module."""
    gate = threading.Barrier(THREADS)

    class Meeting(nn.Module):
        def forward(self, x: Tensor, meet: bool) -> Tensor:
            if meet:
                gate.wait(30)
            return x * x.sum().item()

    cache = GraphCache(Meeting().to(device), [4])
    with torch.no_grad():
        cache(torch.ones(2, 3, device=device), False)
    cache.seal()

    def work(i: int) -> None:
        x = torch.full((3, 3), float(i), device=device)
        for _ in range(3):
            assert_same(cache(x, True), x * x.sum())

    in_threads(work)
    stats = cache.stats()
    assert stats.eager == stats.calls == 3 * THREADS + 1
    assert_sums(stats)


def test_errors_in_one_thread_do_not_reach_another(device: str) -> None:
    """A thread whose inputs are wrong gets eager's error, the others their results."""
    module = net(device)
    cache = GraphCache(module, [2, 4, 8])

    wrong, right = torch.randn(3, 5, device=device), rows(8, device)

    def work(i: int) -> None:
        for step in range(CALLS):  # no draws, which another thread's capture would stop
            if i % 2:
                with pytest.raises(
                    RuntimeError, match=r"shapes cannot be multiplied|size mismatch"
                ):
                    cache(wrong)
            else:
                x = right[: 1 + step % 8]
                assert_same(cache(x), module(x))

    in_threads(work)
    assert cache.stats().calls == THREADS // 2 * CALLS


def test_modes_are_those_of_each_thread(device: str) -> None:
    """Grad mode and autocast of one thread change nothing for another."""
    module = net(device)
    cache = GraphCache(module, [4])

    def work(i: int) -> None:
        for _ in range(CALLS):
            x = rows(3, device)
            with (
                torch.set_grad_enabled(i % 3 == 0),
                torch.autocast(device, torch.bfloat16, enabled=i % 3 == 1),
            ):
                y, expected = cache(x), module(x)
            assert y.requires_grad == expected.requires_grad
            assert y.dtype == expected.dtype
            torch.testing.assert_close(y, expected)

    in_threads(work)
    assert cache.stats().fallbacks == {"grad": 2 * CALLS}


def test_warmup_stats_explain_and_reset_run_beside_calls(device: str) -> None:
    """Every method takes the lock."""
    module = net(device)
    cache = GraphCache(module, [2, 4, 8])
    sample = rows(2, device)

    def methods() -> None:
        cache.warmup(sample=sample, progress=False)
        cache.explain(sample)
        cache.probe(sample)
        cache.stats()
        repr(cache)
        cache.rebucket([2, 4, 8, 16])
        cache.reset()

    def work(i: int) -> None:
        for step in range(CALLS):
            if i == 0:
                methods()
            else:
                x = rows(1 + step % 8, device)
                assert_same(cache(x), module(x))

    in_threads(work)
    cache._check()


def test_state_written_by_a_graph_is_written_once_a_call_from_any_thread(device: str) -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return x * 2

    cache = GraphCache(Counter().to(device), [4])

    def work(i: int) -> None:
        for _ in range(CALLS):
            cache(rows(3, device))

    in_threads(work)
    assert int(cache.module.seen) == THREADS * CALLS
    assert cache.stats().eager == 0


def test_weights_loaded_in_place_between_the_calls_of_threads(device: str) -> None:
    """Each round sees the weights of that round, without a recapture."""
    module = net(device)
    cache = GraphCache(module, [2, 4, 8])
    with torch.no_grad():
        for _ in range(4):
            module.load_state_dict({k: torch.randn_like(v) for k, v in module.state_dict().items()})

            def work(i: int) -> None:
                x = rows(1 + i, device)
                for _ in range(5):
                    assert_same(cache(x), module(x))

            in_threads(work)
    assert cache.stats().captures == 3


def test_strict_mode_raises_in_the_thread_that_called(device: str) -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor, read: bool) -> Any:
            return x * x.sum().item() if read else x * 2

    cache = GraphCache(Reads().to(device), [4], on_fallback="raise")

    def work(i: int) -> None:
        x = rows(3, device)
        for _ in range(CALLS):
            if i % 2:
                with pytest.raises(GraphCacheError, match="host-sync"):
                    cache(x, True)
            else:
                assert_same(cache(x, False), x * 2)

    in_threads(work)
