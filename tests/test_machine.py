"""A state machine: calls, captures, evictions and changes to the module in any order, beside an
eager twin.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor, nn
from zoo import assert_same, assert_sums, assert_unchanged, tensors

from graphcache import CostModel, GraphCache, plan_buckets

SIZES = st.integers(1, 11)
LAYERS = st.sampled_from(["0", "2"])
PLAN = plan_buckets(
    {3: 5, 8: 2, 11: 1},
    CostModel.from_table({2: 5.0, 4: 6.0, 8: 20.0}, eager={1: 15.0, 20: 18.0}, piece=1.0),
    max_graphs=3,
    include=[2, 4, 8],
)
BUCKETS = st.sampled_from([[4], [2, 4, 8], [3, 6], [8], [1, 2, 3, 4], None, PLAN, "auto"])


class Net(nn.Module):
    """A buffer that training writes, weights, a plain attribute, an optional argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.gain = 1.0

    def forward(self, x: Tensor, bias: Tensor | None = None) -> dict[str, Tensor]:
        y = self.layers(x) * self.gain
        return {"y": y if bias is None else y + bias[:, None], "size": x.sum(1)}


class CacheMachine(RuleBasedStateMachine):
    """After each call the result, after each rule the module's state, equal the eager twin's."""

    device = "cpu"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        module = Net().to(self.device).eval()
        self.eager = copy.deepcopy(module)
        self.cache = GraphCache(module, [2, 4, 8], max_graphs=3)
        self.module = module
        self.kept: list[Any] = []
        self.held: list[tuple[Tensor, Tensor]] = []

    def both(self) -> tuple[Net, Net]:
        return self.module, self.eager

    @rule(n=SIZES, biased=st.booleans())
    def call(self, n: int, biased: bool) -> None:
        x = torch.randn(n, 3, device=self.device)
        args = (x, torch.randn(n, device=self.device)) if biased else (x,)
        before = [tensor.clone() for tensor in args]
        with torch.no_grad():
            if n == 1 and self.module.layers[1].training:
                self.both_refuse(args)
                return
            theirs = self.eager(*args)
            ours = self.cache(*args)
        assert_same(ours, theirs)
        assert_unchanged(list(args), before)
        self.held = [*self.held[-12:], *((t, t.clone()) for t in tensors(ours))]

    def both_refuse(self, args: tuple[Tensor, ...]) -> None:
        """Batch norm takes no single row in training."""
        for call in (self.eager, self.cache):
            with pytest.raises(ValueError, match="more than 1 value"):
                call(*args)

    @rule(n=SIZES)
    def call_often(self, n: int) -> None:
        for _ in range(4):
            self.call(n, False)

    @rule(sizes=st.lists(SIZES, min_size=8, max_size=12))
    def call_many(self, sizes: list[int]) -> None:
        """So that `buckets="auto"` reviews."""
        for n in sizes:
            self.call(n, n % 2 == 0)

    @precondition(lambda self: not self.cache._miss.buckets.exact and not self.module.training)
    @rule()
    def measure(self) -> None:
        """From then on calls go the cheapest way."""
        sample = torch.randn(2, 3, device=self.device)
        CostModel.measure(self.cache, [2, 5], sample=sample, progress=False)

    @rule(n=st.integers(2, 4))
    def call_with_gradients(self, n: int) -> None:
        x = torch.randn(n, 3, device=self.device)
        ours, theirs = self.cache(x)["y"], self.eager(x)["y"]
        torch.testing.assert_close(ours, theirs)
        for result, module in ((ours, self.module), (theirs, self.eager)):
            module.zero_grad()
            result.sum().backward()
        for a, b in zip(self.module.parameters(), self.eager.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)

    @precondition(lambda self: not self.cache._miss.buckets.exact and not self.module.training)
    @rule()
    def warmup(self) -> None:
        self.cache.warmup(sample=torch.randn(2, 3, device=self.device), progress=False)

    @rule()
    def invalidate(self) -> None:
        self.cache.invalidate()

    @rule()
    def reset(self) -> None:
        self.cache.reset()

    @rule(buckets=BUCKETS)
    def rebucket(self, buckets: Any) -> None:
        self.cache.rebucket(buckets)

    @rule(seed=st.integers(0, 9))
    def load_in_place(self, seed: int) -> None:
        torch.manual_seed(seed)
        state = copy.deepcopy(Net().to(self.device).state_dict())
        self.cache.load_state_dict(state)
        self.eager.load_state_dict(state)

    @rule(layer=LAYERS, keep=st.booleans())
    def replace_a_weight(self, layer: str, keep: bool) -> None:
        """The old one may live on, or be freed and its memory be taken."""
        fresh = torch.randn_like(getattr(self.module.layers, layer).weight)
        if keep:
            self.kept.append(getattr(self.module.layers, layer).weight)
        for module in self.both():
            getattr(module.layers, layer).weight = nn.Parameter(fresh.clone())
        self.kept.append(torch.full_like(fresh, 7.0))

    @rule(layer=LAYERS, keep=st.booleans())
    def swap_the_data(self, layer: str, keep: bool) -> None:
        fresh = torch.randn_like(getattr(self.module.layers, layer).bias)
        if keep:
            self.kept.append(getattr(self.module.layers, layer).bias.data)
        for module in self.both():
            getattr(module.layers, layer).bias.data = fresh.clone()

    @rule(factor=st.sampled_from([0.5, 2.0]))
    def scale_in_place(self, factor: float) -> None:
        with torch.no_grad():
            for module in self.both():
                module.layers[2].weight.mul_(factor)

    @rule(gain=st.sampled_from([1.0, 2.0, -1.0]))
    def set_an_attribute(self, gain: float) -> None:
        self.cache.gain = gain
        self.eager.gain = gain

    @rule(mode=st.booleans())
    def train_or_eval(self, mode: bool) -> None:
        self.cache.train(mode)
        self.eager.train(mode)

    @rule(mode=st.booleans())
    def freeze_the_statistics(self, mode: bool) -> None:
        for module in self.both():
            module.layers[1].train(mode)

    @rule()
    def replace_a_submodule(self) -> None:
        fresh = nn.Linear(4, 2).to(self.device)
        for module in self.both():
            module.layers[2] = copy.deepcopy(fresh)

    @rule()
    def add_and_remove_a_hook(self) -> None:
        handles = [
            module.layers[0].register_forward_hook(lambda layer, args, result: result * 3)
            for module in self.both()
        ]
        self.call(3, False)
        for handle in handles:
            handle.remove()

    @rule()
    def deepcopy_the_cache(self) -> None:
        """A copy has a module and graphs of its own, and goes on in the original's place."""
        self.cache = copy.deepcopy(self.cache)
        self.module = self.cache.module
        assert self.cache.stats().graphs == 0

    @invariant()
    def invariants_hold(self) -> None:
        self.cache._check()
        stats = self.cache.stats()
        assert stats.graphs <= 3
        assert_sums(stats, stats.captures + stats.replays + stats.eager - stats.calls)
        if not stats.splits:
            assert_sums(stats)

    @invariant()
    def the_state_is_the_twins(self) -> None:
        assert_same(self.module.state_dict(), self.eager.state_dict())

    @invariant()
    def old_results_are_unchanged(self) -> None:
        assert_unchanged([now for now, _ in self.held], [then for _, then in self.held])


class CudaMachine(CacheMachine):
    device = "cuda"


TestRecorded = CacheMachine.TestCase
TestRecorded.settings = settings(max_examples=40, stateful_step_count=25)
TestCuda = pytest.mark.gpu(
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")(CudaMachine.TestCase)
)
TestCuda.settings = settings(max_examples=10, stateful_step_count=25)
