"""The contract of GraphCache (design.md, sections 1 to 3), for every module of the zoo, option,
method and reason.

Results are compared with eager by `zoo.Twin`, which also asserts after every call that inputs and
old results are untouched, that the counters add up, and the invariants.
"""

from __future__ import annotations

import copy
import logging
import pickle
import random
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from zoo import (
    BY_NAME,
    ELSEWHERE,
    ZOO,
    Member,
    Twin,
    assert_cut_same,
    assert_same,
    assert_sums,
    padded,
    walk_sizes,
)

from graphcache import (
    BucketError,
    CaptureError,
    GraphCache,
    GraphCacheError,
    Reason,
    Stats,
    TrafficProfile,
    serving,
)


def linear(device: str, width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 5), nn.Tanh()).to(device).eval()


def rows(n: int, device: str, width: int = 4) -> Tensor:
    return torch.randn(n, width, device=device)


def error_of(call: Any, args: Any, kwargs: Any) -> Exception:
    try:
        call(*args, **kwargs)
    except Exception as error:
        return error
    raise AssertionError("no error was raised")


class Centered(nn.Module):
    """Padding its batch changes real rows."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0, correction=0) + 1e-3)


class Scaled(nn.Module):
    def forward(self, x: Tensor, k: Any = 1.0) -> Tensor:
        return x * k


class Prefix(nn.Module):
    """Rows are independent, but a result without the batch is that of the first row."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x[0] + 1


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("member", ZOO, ids=lambda member: member.name)
class TestContract:
    """What must hold for every module that is safe to pad."""

    def test_every_size_from_one_to_above_the_largest_bucket_equals_eager(
        self, member: Member, device: str
    ) -> None:
        """Twice over, so that each size is served by fresh and used graphs; none eagerly."""
        twin = Twin(self._cache(member, device))
        for _ in range(2):
            for sizes in walk_sizes(member):
                args, kwargs = member.arguments(device, *sizes)
                twin(*args, **kwargs)
        stats = twin.cache.stats()
        assert stats.eager == 0, stats.fallbacks
        assert stats.replays > stats.captures > 0
        assert stats.splits > 0

    def test_two_sizes_in_turn_equal_eager(self, member: Member, device: str) -> None:
        """A, B, A, B in one bucket and in two, with new values in each call: no tail of another
        call shows.
        """
        twin = Twin(self._cache(member, device))
        pairs = (
            [(4, 3), (8, 2), (1, 7)]
            if len(member.dims) == 1
            else [((4, 8), (3, 5)), ((1, 4), (2, 2))]
        )
        for pair in pairs:
            for sizes in (*pair, *pair):
                sizes = sizes if isinstance(sizes, tuple) else (sizes,)
                args, kwargs = member.arguments(device, *sizes)
                twin(*args, **kwargs)

    def test_a_result_has_the_bits_of_eager_on_the_padded_input(
        self, member: Member, device: str
    ) -> None:
        """Section 1: bitwise equal to eager run on the padded input and cut back."""
        cache = self._cache(member, device)
        module = cache.module
        for sizes in walk_sizes(member):
            args, kwargs = member.arguments(device, *sizes)
            result = cache(*args, **kwargs)
            bucket = cache.explain(*args, **kwargs).bucket
            if bucket is not None:
                longer, named = padded(member, args, kwargs, sizes, bucket)
                assert_cut_same(result, module(*longer, **named))

    def test_results_take_the_mode_of_the_caller(self, member: Member, device: str) -> None:
        """In inference mode they are inference tensors, outside not, by the same graphs in either
        order.
        """
        for modes in ((True, False, True), (False, True, False)):
            twin = Twin(self._cache(member, device))
            captures = []
            for mode in modes:
                args, kwargs = member.arguments(device, *[3] * len(member.dims))
                with torch.inference_mode() if mode else torch.no_grad():
                    twin(*args, **kwargs)
                captures.append(twin.cache.stats().captures)
            assert captures[0] == captures[-1] == 1

    def test_the_callers_tensors_may_be_views_of_larger_ones(
        self, member: Member, device: str
    ) -> None:
        """Inputs with gaps between their rows are read where they lie, and left alone."""
        twin = Twin(self._cache(member, device))
        for sizes in ((4,), (3,)) if len(member.dims) == 1 else ((2, 4), (2, 3)):
            args, kwargs = member.arguments(device, *sizes)
            twin(*_spread(args), **_spread(kwargs))

    def test_a_warmed_cache_captures_nothing_more(self, member: Member, device: str) -> None:
        """`warmup` with a sample captures every bucket; calls of that form then only replay."""
        twin = Twin(self._cache(member, device))
        args, kwargs = member.arguments(device, *[3] * len(member.dims))
        if args and kwargs:
            twin(*args, **kwargs)  # a sample is either; forms that were seen are warmed as well
        sample = None if args and kwargs else (args or kwargs)
        before = twin.cache.stats()
        twin.cache.warmup(sample=sample, progress=False)
        warmed = twin.cache.stats()
        assert warmed.warmup_captures == warmed.graphs - before.graphs
        assert (warmed.calls, warmed.captures) == (before.calls, before.captures)
        for n in (3, 6):
            args, kwargs = member.arguments(
                device, *[min(n, 4) if len(member.dims) > 1 else n] * len(member.dims)
            )
            if member.name != "optional" or n % 3 == 0:
                twin(*args, **kwargs)
        assert twin.cache.stats().captures == before.captures

    def test_a_grid_of_one_dim_and_a_list_are_the_same(self, member: Member, device: str) -> None:
        """A free-form list of the grid's corners chooses the same buckets."""
        corners = (
            [(n,) for n in (2, 4, 8)]
            if len(member.dims) == 1
            else [(n, m) for n in (4, 2) for m in (8, 4, 8)]
        )
        grid, free = self._cache(member, device), self._cache(member, device, corners)
        for sizes in list(walk_sizes(member))[:6]:
            args, kwargs = member.arguments(device, *sizes)
            assert_same(grid(*args, **kwargs), free(*args, **kwargs), bitwise=True)
        assert grid.stats().per_bucket == free.stats().per_bucket

    @staticmethod
    def _cache(member: Member, device: str, buckets: Any = None) -> GraphCache:
        return GraphCache(
            member.build(device), buckets or member.buckets, dynamic_shapes=member.dynamic_shapes
        )


def _spread(value: Any) -> Any:
    """The same values in every second place of twice as many."""
    if isinstance(value, Tensor):
        wide = value.repeat_interleave(2, -1)
        return wide[..., ::2]
    if isinstance(value, dict):
        return {key: _spread(child) for key, child in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(map(_spread, value))
    return value


class TestBuckets:
    def test_the_smallest_bucket_that_holds_a_call_serves_it(self, device: str) -> None:
        """In any order, with repeats, as any iterable of integers."""
        for buckets in ([8, 2, 4, 4], (2, 4, 8), {2, 4, 8}, np.array([8, 4, 2]), iter([2, 4, 8])):
            cache = GraphCache(linear(device), buckets)
            for n in range(1, 9):
                cache(rows(n, device))
            assert cache.stats().per_bucket == {2: 2, 4: 2, 8: 4}

    def test_two_dims_take_the_corner_with_the_fewest_padded_elements(self, device: str) -> None:
        """Of the free-form corners that hold (3, 20), (4, 32) is cheaper than (8, 20)."""
        member = BY_NAME["causal"]
        cache = GraphCache(
            _Wide().to(device), [(8, 20), (4, 32), (2, 64)], dynamic_shapes=member.dynamic_shapes
        )
        for sizes, bucket in (((3, 20), (4, 32)), ((5, 6), (8, 20)), ((1, 40), (2, 64))):
            args, _ = member.arguments(device, *sizes)
            assert_same(cache(*args), cache.module(*args))
            assert cache.explain(*args).bucket == bucket
        assert cache.stats().per_bucket == {(2, 64): 1, (4, 32): 1, (8, 20): 1}

    @pytest.mark.parametrize(
        ("buckets", "shapes", "says"),
        [
            ([], None, "empty"),
            ([0, 4], None, "0"),
            ([-1], None, "-1"),
            ([2.5], None, "2.5"),
            ([True], None, "True"),
            (["8"], None, "'8'"),
            (8, None, "8"),
            ([(2, 4)], None, "2 size"),
            ({"batch": [2]}, {"x": {0: "batch", 1: "seq"}}, "seq"),
            ({"batch": [2], "seq": []}, {"x": {0: "batch", 1: "seq"}}, "seq"),
            ({"batch": [2], "time": [4]}, {"x": {0: "batch"}}, "time"),
            ([(2, 4, 8)], {"x": {0: "batch", 1: "seq"}}, "3 size"),
            ([2], {"y": {0: "batch"}}, "y"),
            ([2], {"x": {0: 3.5}}, "3.5"),
            ([2], {}, "no dim"),
        ],
    )
    def test_buckets_that_cannot_be_used_raise_a_bucket_error_naming_the_value(
        self, buckets: Any, shapes: Any, says: str
    ) -> None:
        """Also a ValueError and a GraphCacheError; a dim that no entry names is one too."""
        with pytest.raises(BucketError) as error:
            GraphCache(Scaled(), buckets, dynamic_shapes=shapes)
        assert isinstance(error.value, ValueError)
        assert isinstance(error.value, GraphCacheError)
        assert says in str(error.value)

    def test_exact_sizes_are_captured_and_never_padded(self, device: str) -> None:
        """`buckets=None`: captured at the first use while there is room, then replayed."""
        twin = Twin(GraphCache(linear(device)))
        for n in (5, 3, 5, 3, 5, 3, 5, 3):
            twin(rows(n, device))
        stats = twin.cache.stats()
        assert stats.real_elements == stats.padded_elements > 0
        assert (stats.captures, stats.replays, stats.eager) == (2, 6, 0)

    @pytest.mark.parametrize("policy", ["eager", "raise"])
    def test_a_piece_that_raises_is_not_counted(self, policy: str, device: str) -> None:
        """An index out of range in the last piece raises what eager raises; counts add up after."""
        if device == "cuda":
            pytest.skip("an index out of range is a device assert, which ends the context")
        cache = GraphCache(nn.Embedding(10, 4), [4], on_fallback=policy, capture_after=2)
        good = torch.tensor([1, 2, 3])
        for _ in range(3):
            cache(good)
        with pytest.raises(IndexError):
            cache(torch.tensor([1] * 9 + [99]))
        stats = cache.stats()
        assert stats.captures + stats.replays + stats.eager == stats.calls == 3
        cache._check()

    def test_auto_buckets_serve_calls(self, device: str) -> None:
        """`buckets="auto"` equals eager, however it decides."""
        twin = Twin(GraphCache(linear(device), "auto"))
        for n in (5, 3, 5, 3, 5, 3, 1):
            twin(rows(n, device))

    @pytest.mark.parametrize("buckets", [None, [4]])
    def test_an_exact_scalar_or_no_tensor_at_all_equals_eager(
        self, buckets: Any, device: str
    ) -> None:
        """A call without any axis has no size to record, and must not fail for that."""
        scalar = Twin(GraphCache(Scaled().to(device), buckets))
        constant = Twin(GraphCache(_Constant().to(device), buckets))
        for _ in range(4):
            scalar(torch.tensor(3.0, device=device), 2)
            constant()


class _Wide(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1)


class _Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self) -> Tensor:
        return self.weight * 2


class TestDynamicShapes:
    def test_export_dims_strings_tuples_and_negative_axes_mean_the_same(self, device: str) -> None:
        """`torch.export.Dim` objects, names, by position or by name, from either end."""
        batch, seq = torch.export.Dim("batch"), torch.export.Dim("seq", max=64)
        forms = [
            {"x": {0: batch, 1: seq}, "mask": {0: batch, 1: seq}},
            {"x": (batch, seq, None), "mask": (batch, seq)},
            ({0: "batch", 1: "seq"}, {0: "batch", 1: "seq"}),
            {"x": {0: "batch", -2: "seq"}, "mask": {-2: "batch", -1: "seq"}},
            {"x": {0: batch, 1: seq, 2: torch.export.Dim.STATIC}, "mask": {0: "batch", 1: "seq"}},
        ]
        member = BY_NAME["attention"]
        for shapes in forms:
            twin = Twin(GraphCache(member.build(device), member.buckets, dynamic_shapes=shapes))
            for sizes in ((2, 4), (3, 7), (1, 2)):
                args, kwargs = member.arguments(device, *sizes)
                twin(*args, **kwargs)
            assert twin.cache.stats().eager == 0
            assert set(twin.cache.stats().per_bucket) == {(2, 4), (4, 8)}

    def test_entries_for_absent_optional_arguments_are_fine(self, device: str) -> None:
        """Nested entries as well; presence is part of the key."""
        shapes = {"x": {0: "n"}, "mask": {0: "n"}, "extra": {"bias": {0: "n"}}}
        member = BY_NAME["optional"]
        twin = Twin(GraphCache(member.build(device), [4], dynamic_shapes=shapes))
        for n in (1, 2, 3, 4):
            args, kwargs = member.arguments(device, n)
            twin(*args, **kwargs)
        assert twin.cache.stats().captures == 3

    def test_a_side_input_of_equal_length_by_chance_is_never_padded_or_split(
        self, device: str
    ) -> None:
        """Whether it has that length at the first call or later."""

        class Near(nn.Module):
            def forward(self, x: Tensor, table: Tensor) -> Tensor:
                return (x @ table.T).softmax(-1)

        for first in (5, 3):
            twin = Twin(GraphCache(Near().to(device), [4, 8]))
            for n in (first, 3, 5, 8, 5, 12):
                twin(rows(n, device), rows(5, device))
            assert twin.cache.stats().eager == 0

    def test_a_side_input_that_follows_the_batch_is_padded_with_it(self, device: str) -> None:
        """Decided by argument name, whatever the order of the arguments."""

        class Weighted(nn.Module):
            def forward(self, x: Tensor, *, weight: Tensor) -> Tensor:
                return x * weight[:, None]

        twin = Twin(GraphCache(Weighted().to(device), [4, 8]))
        for n in (4, 3, 1, 6, 11):
            twin(weight=torch.rand(n, device=device), x=rows(n, device))
        assert twin.cache.stats().eager == 0

    def test_positional_and_keyword_calls_share_a_graph(self, device: str) -> None:
        """Keywords are bound to their parameters, in any order."""
        twin = Twin(GraphCache(BY_NAME["gather_scatter"].build(device), [4]))
        x, index = rows(3, device, 5), torch.randint(5, (3, 5), device=device)
        twin(x, index)
        twin(x, index=index)
        twin(index=index, x=x)
        assert (twin.cache.stats().captures, twin.cache.stats().replays) == (1, 2)

    def test_tensors_that_disagree_about_a_named_dim_run_eagerly(self, device: str) -> None:
        """Eager may well broadcast them."""
        member = BY_NAME["many_to_many"]
        shapes = {"a": {0: "batch"}, "b": {0: "batch"}}
        twin = Twin(GraphCache(member.build(device), [4], dynamic_shapes=shapes))
        twin(rows(3, device, 3), rows(1, device, 3))
        assert twin.cache.stats().fallbacks == {"unsupported-input": 1}

    def test_an_output_axis_may_follow_the_batch_by_a_line(self, device: str) -> None:
        """Three rows for one, one row more, and a row fewer are cut to what eager returns."""

        class Lines(nn.Module):
            def forward(self, x: Tensor) -> tuple[Tensor, ...]:
                return x.repeat_interleave(3, 0), torch.cat([x[:1], x]), x[1:] * 2, x.sum(1)

        twin = Twin(GraphCache(Lines().to(device), [4, 8]))
        for n in (5, 2, 8, 3, 1, 4):
            twin(rows(n, device))
        assert twin.cache.stats().eager == 0

    def test_two_padded_dims_flattened_into_one_are_not_padded(self, device: str) -> None:
        """batch * seq is no line of one dim: `unsupported-output`."""

        class Flat(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return (x * 2).flatten(0, 1)

        member = BY_NAME["causal"]
        twin = Twin(
            GraphCache(Flat().to(device), member.buckets, dynamic_shapes=member.dynamic_shapes)
        )
        for sizes in ((2, 3), (3, 5), (2, 4), (1, 7)):
            args, _ = member.arguments(device, *sizes)
            twin(*args)
        assert set(twin.cache.stats().fallbacks) == {"unsupported-output"}

    def test_a_module_with_another_form_at_size_one_equals_eager(self, device: str) -> None:
        """`squeeze()` drops the batch at one row only."""

        class Squeezed(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return (x * 2).squeeze()

        twin = Twin(GraphCache(Squeezed().to(device), [4, 8]))
        for n in (3, 1, 4, 1, 8, 1, 1, 9):
            twin(rows(n, device))


class TestOptions:
    def test_a_bucket_is_captured_on_its_nth_use(self, device: str) -> None:
        """`capture_after`: earlier uses are eager, `not-admitted`, for each bucket by itself."""
        twin = Twin(GraphCache(linear(device), [4, 8], capture_after=3))
        for n in (1, 2, 8, 3, 4, 8, 7):
            twin(rows(n, device))
        stats = twin.cache.stats()
        assert (stats.captures, stats.replays) == (2, 1)
        assert stats.fallbacks == {"not-admitted": 4}

    def test_never_more_graphs_than_max_graphs_live(self, device: str) -> None:
        """The least recently used leaves for a key used more; the rest is `too-many-keys`."""
        twin = Twin(GraphCache(linear(device), [1, 2, 4, 8], max_graphs=2))
        for n in (1, 2, 4, 4, 8, 8, 8, 1, 2, 4, 8):
            twin(rows(n, device))
            assert twin.cache.stats().graphs <= 2
        stats = twin.cache.stats()
        assert stats.evictions > 0
        assert stats.captures - stats.evictions == stats.graphs == 2
        assert set(stats.fallbacks) == {"too-many-keys"}

    def test_a_sweep_of_one_off_sizes_never_flushes_a_hot_graph(self, device: str) -> None:
        """A key used once does not outweigh one that was replayed often."""
        twin = Twin(GraphCache(linear(device), list(range(1, 40)), max_graphs=2))
        for _ in range(5):
            twin(rows(1, device))
            twin(rows(2, device))
        for n in range(3, 40):
            twin(rows(n, device))
        before = twin.cache.stats()
        twin(rows(1, device))
        twin(rows(2, device))
        after = twin.cache.stats()
        assert (after.captures, after.replays) == (before.captures, before.replays + 2)
        assert before.captures == 2

    def test_a_recapture_counts_as_a_capture_and_as_a_recapture(self, device: str) -> None:
        twin = Twin(GraphCache(linear(device), [2, 4], max_graphs=1))
        for n in (2, 4, 4, 2, 2, 2, 2):
            twin(rows(n, device))
        stats = twin.cache.stats()
        assert stats.recaptures == 1
        assert stats.captures == 3

    def test_distinct_signatures_stay_under_max_signatures(self, device: str) -> None:
        """Beyond: `too-many-keys`, whatever the plain argument."""
        twin = Twin(GraphCache(Scaled().to(device), [4], max_signatures=3))
        for k in [*range(6), *range(6)]:
            twin(rows(3, device), k)
        stats = twin.cache.stats()
        assert (stats.captures, stats.replays) == (3, 3)
        assert stats.fallbacks == {"too-many-keys": 6}

    def test_graph_bytes_stay_under_max_bytes(self, device: str) -> None:
        """A bound without room for any graph is `memory-budget`; results are eager's all along."""
        member = BY_NAME["mlp"]
        for limit in (1, "1KB", "4KiB", "1GiB"):
            twin = Twin(GraphCache(member.build(device), [8, 16, 32, 64], max_bytes=limit))
            most = {1: 1, "1KB": 1000, "4KiB": 4096, "1GiB": 2**30}[limit]
            for n in (8, 64, 32, 16, 16, 64, 64, 64, 3):
                twin(rows(n, device))
                assert twin.cache.stats().graph_bytes <= most
            assert set(twin.cache.stats().fallbacks) <= {"memory-budget"}
            assert (twin.cache.stats().replays > 0) == (limit == "1GiB") or device == "cpu"
        assert "memory-budget" in Twin(_filled(device)).cache.stats().fallbacks

    def test_a_call_that_padding_would_blow_up_runs_eagerly(self, device: str) -> None:
        """`max_padding_ratio` bounds padded / real elements; at the bound it is served."""
        twin = Twin(GraphCache(linear(device), [8], max_padding_ratio=2.0))
        for n in (4, 3, 8, 1):
            twin(rows(n, device))
        assert twin.cache.stats().fallbacks == {"padding-ratio": 2}

    def test_a_view_equals_eager_until_the_next_call(self, device: str) -> None:
        """outputs="view", read in time, in any bucket and after an eviction."""
        cache = GraphCache(linear(device), [2, 4, 8], outputs="view", max_graphs=2)
        for n in (3, 8, 2, 2, 2, 1, 8, 5, 4):
            x = rows(n, device)
            assert_same(cache(x).clone(), cache.module(x))
            cache._check()

    def test_outputs_copied_are_the_callers_own(self, device: str) -> None:
        """Writing to a result changes neither later results nor inputs nor weights."""
        cache = GraphCache(linear(device), [4])
        x = rows(3, device)
        for _ in range(3):
            y = cache(x)
            assert_same(y, cache.module(x))
            y.fill_(7.0)

    def test_verify_off_pads_only_named_dims(self, device: str) -> None:
        """Unnamed, a call that does not fit exactly runs eagerly at its own size until it is used
        three times.
        """
        unnamed = Twin(GraphCache(linear(device), [4], verify="off"))
        named = Twin(
            GraphCache(linear(device), [4], verify="off", dynamic_shapes={"input": {0: "n"}})
        )
        for n in (3, 4, 2):
            unnamed(rows(n, device))
            named(rows(n, device))
        assert unnamed.cache.stats().padding_overhead == 0
        assert unnamed.cache.stats().eager == 2
        assert named.cache.stats().eager == 0

    def test_verify_off_splits_only_a_named_dim(self, device: str) -> None:
        """Section 2: "splits only a dim named in split"."""
        shapes = {"input": {0: "n"}}
        auto = Twin(GraphCache(linear(device), [4], verify="off", dynamic_shapes=shapes))
        named = Twin(
            GraphCache(linear(device), [4], verify="off", dynamic_shapes=shapes, split="n")
        )
        auto(rows(9, device))
        named(rows(9, device))
        assert auto.cache.stats().fallbacks == {"over-max": 1}
        assert named.cache.stats().splits == 1

    def test_verify_one_shadows_every_call_and_quarantines_what_differs(self, device: str) -> None:
        """A value that the graph froze is found, counted as `verify-mismatch`, and eager from then
        on.
        """
        ELSEWHERE.scale = 1.0

        class Frozen(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x * ELSEWHERE.scale

        cache, x = GraphCache(Frozen().to(device), [4], verify=1.0), rows(3, device)
        assert_same(cache(x), x)
        assert cache.stats().fallbacks == {}
        ELSEWHERE.scale = 2.0
        for n in (3, 3, 4):
            x = rows(n, device)
            assert_same(cache(x), x * 2)
        assert cache.stats().fallbacks == {"verify-mismatch": 3}
        assert_sums(cache.stats())
        cache._check()

    def test_verify_one_leaves_right_graphs_alone(self, device: str) -> None:
        twin = Twin(GraphCache(linear(device), [4, 8], verify=1.0))
        for n in (3, 4, 8, 5, 12):
            twin(rows(n, device))
        assert twin.cache.stats().eager == 0

    def test_fallbacks_warn_once_each_under_warn(self, device: str) -> None:
        """The warning names the module and the reason; ordinary reasons do not warn."""
        cache = GraphCache(Reader().to(device), [4], on_fallback="warn")
        with pytest.warns(RuntimeWarning, match=r"Reader.*host-sync"):
            cache(rows(3, device))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cache(rows(3, device))
            cache(rows(0, device))

    def test_the_first_of_each_reason_is_logged_at_warning(
        self, device: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Always; the log names the operation and the user's source line."""
        cache = GraphCache(Reader().to(device), [4])
        with caplog.at_level(logging.WARNING, logger="graphcache"):
            for n in (3, 3, 4):
                cache(rows(n, device))
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        for part in ("Reader", "host-sync", "_local_scalar_dense", "test_runtime.py"):
            assert part in record.getMessage()

    def test_fallbacks_raise_under_raise_except_the_ordinary_ones(self, device: str) -> None:
        """A GraphCacheError naming module and reason; `empty` and `not-admitted` run eagerly."""
        cache = GraphCache(Reader().to(device), [4], on_fallback="raise")
        with pytest.raises(GraphCacheError, match=r"Reader.*host-sync"):
            cache(rows(3, device))
        twin = Twin(GraphCache(linear(device), [4], on_fallback="raise", capture_after=2))
        for n in (0, 3, 3, 3):
            twin(rows(n, device))
        assert twin.cache.stats().fallbacks == {"empty": 1, "not-admitted": 1}

    @pytest.mark.parametrize("policy", ["eager", "raise"])
    def test_wrong_inputs_raise_what_eager_raises(self, policy: str, device: str) -> None:
        """Bad width, bad dtype, a missing and an unknown argument; the cache stays usable and
        counts add up.
        """
        twin = Twin(GraphCache(linear(device), [4], on_fallback=policy))
        twin(rows(3, device))
        wrong: list[Any] = [
            ((rows(3, device, 5),), {}),
            ((torch.ones(3, 4, dtype=torch.int64, device=device),), {}),
            ((), {}),
            ((rows(3, device),), {"unknown": 1}),
            (("text",), {}),
        ]
        for args, kwargs in wrong:
            theirs, ours = error_of(twin.eager, args, kwargs), error_of(twin.cache, args, kwargs)
            assert type(ours) is type(theirs)
            assert str(ours) == str(theirs)
            twin(rows(4, device))
        assert twin.cache.stats().calls == 6

    def test_wrong_inputs_to_a_cold_cache_leave_it_usable(self, device: str) -> None:
        """The first call may be the wrong one."""
        twin = Twin(GraphCache(linear(device), [4]))
        with pytest.raises(RuntimeError):
            twin.cache(rows(3, device, 7))
        twin(rows(3, device))
        twin(rows(4, device))
        assert (twin.cache.stats().captures, twin.cache.stats().replays) == (1, 1)

    def test_split_none_or_another_dim_never_splits(self, device: str) -> None:
        """`over-max`, which names the size, the largest bucket, and the cure."""
        cache = GraphCache(linear(device), [4], split=None)
        x = rows(9, device)
        assert_same(cache(x), cache.module(x))
        how = cache.explain(x)
        assert how.reason == Reason.OVER_MAX
        assert "batch=9" in str(how)
        assert "batch=4" in str(how)
        assert cache.stats().fallbacks == {"over-max": 1}

    def test_a_call_is_split_into_at_most_sixteen_pieces(self, device: str) -> None:
        """Beyond: `over-max`."""
        twin = Twin(GraphCache(linear(device), [2]))
        twin(rows(32, device))
        assert twin.cache.stats().splits == 1
        twin(rows(33, device))
        assert twin.cache.stats().fallbacks == {"over-max": 1}

    def test_rows_that_depend_on_each_other_are_never_split(self, device: str) -> None:
        """A recurrence over seq may be padded at its end, and not be cut."""
        member = BY_NAME["causal"]
        cache = GraphCache(
            member.build(device), [(4, 4)], dynamic_shapes=member.dynamic_shapes, split="seq"
        )
        args, _ = member.arguments(device, 4, 9)
        assert_same(cache(*args), cache.module(*args))
        assert cache.stats().fallbacks == {"over-max": 1}

    def test_a_result_without_the_split_dim_that_differs_between_pieces_runs_eagerly(
        self, device: str
    ) -> None:
        """Such a call is one piece of work, done by eager."""
        twin = Twin(GraphCache(Prefix().to(device), [4]))
        x = rows(9, device)
        assert_same(twin.cache(x), twin.eager(x))
        stats = twin.cache.stats()
        assert stats.fallbacks == {"over-max": 1}
        assert stats.captures + stats.replays + stats.eager == stats.calls == 1
        assert stats.splits == 0

    def test_a_drawing_or_writing_module_is_never_split(self, device: str) -> None:
        dropout = GraphCache(nn.Dropout(0.5).train().to(device), [4])
        counter = Twin(GraphCache(_Counter().to(device), [4]))
        dropout(rows(9, device))
        counter(rows(9, device))
        assert_same(counter.cache.module.seen, counter.eager.seen)
        assert dropout.stats().splits == counter.cache.stats().splits == 0

    @pytest.mark.parametrize(
        "option",
        [
            {"outputs": "borrow"},
            {"on_fallback": "ignore"},
            {"backend": "metal"},
            {"verify": 0.0},
            {"verify": 2.0},
            {"verify": "sometimes"},
            {"max_graphs": 0},
            {"max_graphs": 2.5},
            {"max_signatures": 0},
            {"capture_after": 0},
            {"max_bytes": "2 parsecs"},
            {"max_bytes": -1},
            {"max_padding_ratio": 0.5},
            {"fill": {"x": "zero"}},
            {"split": "rows"},
        ],
        ids=str,
    )
    def test_an_option_outside_its_values_raises_an_error_that_names_it(
        self, option: dict[str, Any]
    ) -> None:
        """`split` must name a dim."""
        with pytest.raises(GraphCacheError, match=next(iter(option))):
            GraphCache(Scaled(), [4], **option)

    def test_a_named_fill_makes_a_float_mask_a_control(self, device: str) -> None:
        """Unnamed, a float mask is not held, and seq is not padded; named, it is."""

        class FloatMasked(nn.Module):
            def forward(self, x: Tensor, mask: Tensor) -> Tensor:
                return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)

        shapes = {"x": {0: "batch", 1: "seq"}, "mask": {0: "batch", 1: "seq"}}
        for fill, eager in ((None, True), ({"mask": 0.0}, False)):
            twin = Twin(
                GraphCache(FloatMasked().to(device), [(4, 8)], dynamic_shapes=shapes, fill=fill)
            )
            for n, m in ((4, 8), (3, 5), (2, 7), (3, 5)):
                x, mask = torch.randn(n, m, 2, device=device), torch.ones(n, m, device=device)
                twin(x, mask)
            assert (twin.cache.stats().fallbacks.get("pad-not-neutral", 0) > 0) == eager

    @pytest.mark.filterwarnings("ignore:TensorFloat32")  # the compiler's advice
    def test_compile_serves_what_the_module_returns(self, device: str) -> None:
        """compile=True with buckets equals the uncompiled module."""
        cache = GraphCache(linear(device), [4], compile=True)
        for n in (3, 4, 2):
            x = rows(n, device)
            assert_same(cache(x), cache.module(x))
        assert cache.stats().eager == 0

    def test_a_backend_for_another_device_is_the_device_reason(self) -> None:
        """CPU tensors have no CUDA graphs."""
        twin = Twin(GraphCache(linear("cpu"), [4], backend="cuda"))
        twin(rows(3, "cpu"))
        assert twin.cache.stats().fallbacks == {"device": 1}
        recorded = Twin(GraphCache(linear("cpu"), [4], backend="recorded"))
        recorded(rows(3, "cpu"))
        assert recorded.cache.stats().captures == 1


def _filled(device: str) -> GraphCache:
    cache = GraphCache(linear(device), [64], max_bytes=1)
    cache(rows(64, device))
    return cache


class _Counter(nn.Module):
    """Adds each call's rows to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x * 2


class Reader(nn.Module):
    """Reads a value to the host."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()


class TestMethods:
    def test_warmup_captures_every_bucket_largest_first_and_counts_apart(self, device: str) -> None:
        """Also in grad mode, for a module with parameters; the graphs serve no_grad calls."""
        twin = Twin(GraphCache(linear(device), [2, 8, 4]))
        with torch.enable_grad():
            twin.cache.warmup(sample=rows(1, device), progress=False)
        stats = twin.cache.stats()
        assert (stats.warmup_captures, stats.graphs, stats.calls, stats.captures) == (3, 3, 0, 0)
        for n in (1, 2, 3, 8):
            twin(rows(n, device))
        assert (twin.cache.stats().captures, twin.cache.stats().replays) == (0, 4)

    def test_warmup_of_some_sizes_captures_those(self, device: str) -> None:
        """A dict is keywords, a tuple is positional; sizes that are no buckets are an error."""
        for sample in ({"input": rows(2, device)}, (rows(2, device),), rows(2, device)):
            cache = GraphCache(linear(device), [2, 4, 8])
            cache.warmup([4, 8], sample=sample, progress=False)
            assert cache.stats().warmup_captures == 2
            with pytest.raises(BucketError, match="5"):
                cache.warmup([5], sample=sample, progress=False)

    def test_warmup_without_a_sample_uses_the_forms_seen(self, device: str) -> None:
        cache = GraphCache(linear(device), [2, 4])
        with pytest.raises(GraphCacheError, match="sample"):
            cache.warmup(progress=False)
        cache(rows(2, device))
        cache.warmup(progress=False)
        assert cache.stats().graphs == 2
        cache.warmup(progress=False)
        assert cache.stats().warmup_captures == 1

    def test_warmup_after_many_forms_still_works(self, device: str) -> None:
        """Forms and what was learned about them are forgotten in different orders."""
        cache = GraphCache(Scaled().to(device), [64], max_signatures=2, capture_after=1000)
        for k in range(1, 9):
            cache(rows(64, device), k)
        for k in range(1, 8):
            cache(rows(64, device), k)
        cache(rows(64, device), 9)
        cache.warmup(progress=False)
        x = rows(64, device)
        assert_same(cache(x, 9), x * 9)

    def test_warmup_leaves_the_module_and_the_generators_as_they_were(self, device: str) -> None:
        """Running statistics, counters, random numbers: as if it had not been."""
        module = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)).to(device).train()
        before = copy.deepcopy(module.state_dict())
        sample = rows(3, device)
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
        GraphCache(module, [2, 4]).warmup(sample=sample, progress=False)
        assert_same(module.state_dict(), before, bitwise=True)
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]
        assert np.array_equal(np.random.get_state()[1], states[2])
        assert all(parameter.grad is None for parameter in module.parameters())

    def test_a_sealed_cache_never_captures(self, device: str) -> None:
        """Misses are `not-admitted`; graphs that exist serve on, also sizes that were not called
        before.
        """
        twin = Twin(GraphCache(linear(device), [2, 4, 8]))
        twin(rows(3, device))
        twin.cache.seal()
        for n in (4, 8, 2, 3, 1):
            twin(rows(n, device))
        stats = twin.cache.stats()
        assert (stats.captures, stats.replays) == (1, 2)
        assert stats.fallbacks == {"not-admitted": 3}
        twin(rows(3, device).double().float()[:, [0, 1, 2, 3]])

    def test_a_sealed_cold_cache_runs_eagerly(self, device: str) -> None:
        twin = Twin(GraphCache(linear(device), [4]))
        twin.cache.seal()
        twin(rows(3, device))
        assert twin.cache.stats().fallbacks == {"not-admitted": 1}

    def test_explain_says_what_the_call_then_does(self, device: str) -> None:
        """Capture, replay, split and eager; and it neither captures nor counts."""
        cache = GraphCache(linear(device), [4, 8])
        x = rows(3, device)
        before = cache.stats()
        how = cache.explain(x)
        assert (how.action, how.bucket, how.sizes, how.reason) == ("capture", (4,), (3,), None)
        assert cache.stats() == before
        cache(x)
        assert cache.explain(x).action == "replay"
        assert cache.explain(rows(20, device)).pieces == ((8,), (8,), (4,))
        assert cache.explain(rows(0, device)).reason == Reason.EMPTY
        with torch.enable_grad():
            assert cache.explain(x).reason == Reason.GRAD
        text = str(cache.explain(rows(7, device)))
        for part in ("capture", "batch=7", "batch=8"):
            assert part in text

    def test_explain_knows_admission(self, device: str) -> None:
        """What would run eagerly for want of uses or of room, or sealed, is said to."""
        x = rows(3, device)
        waiting = GraphCache(linear(device), [4], capture_after=3)
        assert waiting.explain(x).reason == Reason.NOT_ADMITTED
        waiting(x)
        waiting(x)
        assert waiting.explain(x).action == "capture"
        full = GraphCache(linear(device), [2, 4], max_graphs=1)
        for _ in range(3):
            full(rows(2, device))
        assert full.explain(x).reason == Reason.TOO_MANY_KEYS
        sealed = GraphCache(linear(device), [2, 4])
        sealed(x)
        sealed.seal()
        assert sealed.explain(rows(2, device)).reason == Reason.NOT_ADMITTED

    def test_explain_names_the_difference_from_the_nearest_key(self, device: str) -> None:
        cache = GraphCache(Scaled().to(device), [4])
        cache(rows(3, device), 2)
        assert any(
            "5" in line and "2" in line for line in cache.explain(rows(3, device), 5).nearest
        )
        half = cache.explain(rows(3, device).half(), 2)
        assert any("float16" in line and "float32" in line for line in half.nearest)

    def test_probe_reports_dims_controls_and_independence(self, device: str) -> None:
        """Attention: seq may be padded with the mask at 0; its rows are not independent, the
        batch's are.
        """
        member = BY_NAME["attention"]
        cache = GraphCache(
            member.build(device), member.buckets, dynamic_shapes=member.dynamic_shapes
        )
        args, kwargs = member.arguments(device, 2, 3)
        before = cache.stats()
        report = cache.probe(*args, **kwargs)
        batch, seq = report.dims["batch"], report.dims["seq"]
        assert batch.neutral
        assert seq.neutral
        assert dict(seq.controls) == {"mask": 0}
        assert batch.independent
        assert not seq.independent
        assert "seq" in str(report)
        assert cache.stats() == before

    def test_probe_reports_what_is_not_neutral_or_refused(self, device: str) -> None:
        report = GraphCache(Centered().to(device), [8]).probe(rows(3, device))
        assert not report.dims["batch"].neutral
        assert report.dims["batch"].reason == Reason.BATCH_COUPLED
        assert (
            GraphCache(Reader().to(device), [8]).probe(rows(3, device)).refused == Reason.HOST_SYNC
        )

    def test_static_inputs_are_written_in_place_and_passed(self, device: str) -> None:
        """Views at the real sizes; the call copies nothing and equals eager, among other calls of
        that bucket.
        """
        cache = GraphCache(linear(device), [4])
        views = cache.static_inputs(3, like=rows(1, device))
        assert {name: tuple(view.shape) for name, view in views.items()} == {"input": (3, 4)}
        for _ in range(3):
            for n in (3, 4, 2):
                x = rows(n, device)
                assert_same(cache(views["input"].copy_(x) if n == 3 else x), cache.module(x))
        assert cache.static_inputs((2,))["input"].data_ptr() == views["input"].data_ptr()
        cache._check()

    def test_static_inputs_may_be_passed_in_each_others_place(self, device: str) -> None:
        """As eager would take them: swapped, one twice, or a part of one."""
        cache = GraphCache(BY_NAME["many_to_many"].build(device), [4])
        cache(rows(3, device, 3), rows(3, device, 3))
        a, b = cache.static_inputs(3).values()
        for first, second in ((a, b), (b, a), (a, a), (b[:2], a[1:]), (a[1:], a[:2])):
            a.copy_(rows(3, device, 3))
            b.copy_(rows(3, device, 3))
            expected = cache.module(first.clone(), second.clone())
            assert_same(cache(first, second), expected)

    def test_static_inputs_need_one_form(self, device: str) -> None:
        cache = GraphCache(linear(device), [4])
        with pytest.raises(GraphCacheError, match="like"):
            cache.static_inputs(3)
        with pytest.raises(GraphCacheError):
            cache.static_inputs(9, like=rows(1, device))

    def test_rebucket_keeps_the_graphs_that_both_sets_share(self, device: str) -> None:
        twin = Twin(GraphCache(linear(device), [4, 8]))
        for n in (3, 7):
            twin(rows(n, device))
        twin.cache.rebucket([4, 16])
        for n in (3, 7, 16):
            twin(rows(n, device))
        assert twin.cache.stats().per_bucket == {4: 2, 8: 1, 16: 2}
        assert twin.cache.stats().captures == 3
        with pytest.raises(BucketError):
            twin.cache.rebucket([0])
        twin(rows(3, device))

    def test_rebucket_makes_room_for_a_longer_list(self, device: str) -> None:
        """max_graphs=None is the larger of 32 and the number of buckets, also of new ones."""
        cache = GraphCache(linear(device), [4])
        cache.rebucket(list(range(1, 41)))
        cache.warmup(sample=rows(1, device), progress=False)
        assert cache.stats().graphs == 40

    def test_rebucket_between_exact_sizes_and_buckets_equals_eager(self, device: str) -> None:
        twin = Twin(GraphCache(linear(device)))
        for buckets in (None, [4], None, [8, 2]):
            twin.cache.rebucket(buckets)
            for n in (3, 3, 3, 4, 1):
                twin(rows(n, device))

    def test_invalidate_and_reset_forget_every_graph(self, device: str) -> None:
        """The next call captures again; results held before stay."""
        twin = Twin(GraphCache(linear(device), [4, 8]))
        for forget in (twin.cache.invalidate, twin.cache.reset, twin.cache.reset):
            for n in (3, 8):
                twin(rows(n, device))
            assert twin.cache.stats().graphs == 2
            forget()
            assert twin.cache.stats().graphs == 0
            twin.cache._check()
        twin.cache.reset()
        assert twin.cache.stats().graph_bytes == 0
        assert twin.cache.stats().recaptures == 4

    def test_traffic_counts_what_was_seen(self, device: str) -> None:
        """Every call once by its own sizes, however it was served: a plan needs the calls that ran
        eagerly too.
        """
        cache = GraphCache(linear(device), [4], max_padding_ratio=2.0)
        for n in (3, 3, 1, 4, 11):
            cache(rows(n, device))
        assert isinstance(cache.traffic, TrafficProfile)
        assert cache.traffic.counts == {(3,): 2, (1,): 1, (4,): 1, (11,): 1}

    def test_the_module_is_the_wrapped_object(self, device: str) -> None:
        """An nn.Module, a bound method of one, or any callable."""
        module = linear(device)
        x = rows(3, device)
        for target in (module, module.forward, lambda x: module(x)):
            cache = GraphCache(target, [4])
            assert cache.module == target
            assert_same(cache(x), module(x))
            assert cache.stats().captures == 1

    def test_repr_names_the_module_and_the_counts(self, device: str) -> None:
        cache = GraphCache(Scaled().to(device), [4])
        cache(rows(3, device))
        assert "Scaled" in repr(cache)
        assert "calls=1" in repr(cache)
        assert "graphs=1" in repr(cache)

    def test_stats_are_frozen_and_print_as_a_table(self, device: str) -> None:
        cache = GraphCache(Reader().to(device), [4])
        cache(rows(3, device))
        stats = cache.stats()
        assert isinstance(stats, Stats)
        with pytest.raises(AttributeError):
            stats.calls = 7  # type: ignore[misc]
        assert "host-sync: 1" in str(stats)
        assert all(isinstance(reason, Reason) for reason in stats.fallbacks)

    def test_copies_and_pickles_have_graphs_of_their_own(self, device: str) -> None:
        cache = GraphCache(Scaled().to(device), [4])
        x = rows(3, device)
        cache(x, 2)
        for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            assert other.stats().calls == 0
            assert_same(other(x, 2), cache(x, 2))
            assert other.stats().captures == 1


class TestReasons:
    """Each reason of section 3, its counter, its phrase in the explanation, and eager's result."""

    def served(
        self, cache: GraphCache, reason: str, *args: Any, times: int = 2, **kwargs: Any
    ) -> None:
        """The call equals eager and counts as `reason` each time."""
        twin = Twin(cache)
        for call in range(times):
            if call == times - 1:  # what only a capture can tell is known by then
                assert cache.explain(*args, **kwargs).reason == reason
            twin(*args, **kwargs)
        assert cache.stats().fallbacks == {reason: times}
        assert cache.stats().captures == 0
        assert Reason(reason).phrase

    def test_empty(self, device: str) -> None:
        self.served(GraphCache(linear(device), [4]), "empty", rows(0, device))
        exact = GraphCache(linear(device))
        self.served(exact, "empty", rows(0, device))
        member = BY_NAME["causal"]
        for sizes in ((0, 3), (3, 0)):
            cache = GraphCache(
                member.build(device), member.buckets, dynamic_shapes=member.dynamic_shapes
            )
            self.served(cache, "empty", *member.arguments(device, *sizes)[0])

    def test_a_static_axis_of_size_zero_equals_eager(self, device: str) -> None:
        twin = Twin(GraphCache(Scaled().to(device), [4]))
        for n in (3, 4):
            twin(rows(n, device, 0))

    def test_over_max(self, device: str) -> None:
        self.served(GraphCache(linear(device), [4], split=None), "over-max", rows(5, device))

    def test_padding_ratio(self, device: str) -> None:
        cache = GraphCache(linear(device), [8], max_padding_ratio=1.5)
        self.served(cache, "padding-ratio", rows(3, device))

    def test_not_admitted(self, device: str) -> None:
        self.served(
            GraphCache(linear(device), [4], capture_after=9), "not-admitted", rows(3, device)
        )

    def test_memory_budget(self, device: str) -> None:
        self.served(GraphCache(linear(device), [4], max_bytes=1), "memory-budget", rows(3, device))

    def test_batch_coupled(self, device: str) -> None:
        """Exact sizes are captured at their third use, and before that the reason is this one."""
        self.served(GraphCache(Centered().to(device), [8]), "batch-coupled", rows(3, device))
        twin = Twin(GraphCache(Centered().to(device), [8]))
        for _ in range(4):
            twin(rows(3, device))
        assert (twin.cache.stats().captures, twin.cache.stats().replays) == (1, 1)

    def test_exact_sizes_take_at_most_half_of_the_graphs(self, device: str) -> None:
        twin = Twin(GraphCache(Centered().to(device), [16], max_graphs=4))
        for n in (2, 3, 4, 5):
            for _ in range(5):
                twin(rows(n, device))
        assert twin.cache.stats().graphs == 2
        twin(rows(16, device))
        assert twin.cache.stats().graphs == 3

    def test_pad_not_neutral(self, device: str) -> None:
        class Mean(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x.mean(1)

        cache = GraphCache(
            Mean().to(device), [(4, 8)], dynamic_shapes={"x": {0: "batch", 1: "seq"}}
        )
        self.served(cache, "pad-not-neutral", torch.randn(3, 5, 2, device=device))

    @pytest.mark.parametrize(
        "read",
        [
            lambda x: x.sum().item(),
            lambda x: float(x.sum()),
            lambda x: 2.0 if x.sum() > 0 else 3.0,
            lambda x: sum(x[0].tolist()),
            lambda x: len(str(x)),
            lambda x: 1.0 if torch.allclose(x, x) else 2.0,
        ],
        ids=["item", "float", "branch", "tolist", "str", "allclose"],
    )
    def test_host_sync(self, read: Any, device: str) -> None:
        """Named with the operation and the source line; not tried again."""
        cache = GraphCache(lambda x: x * read(x), [4])
        self.served(cache, "host-sync", rows(3, device))
        assert "test_runtime.py" in cache.explain(rows(3, device)).detail

    @pytest.mark.parametrize(
        "copied",
        [
            lambda x: x.cpu().to(x.device),
            lambda x: x.to("cpu").to(x.device),
            lambda x: torch.from_numpy(x.detach().cpu().numpy() * 2).to(x.device),
            lambda x: torch.from_dlpack(x.cpu()).to(x.device),
        ],
        ids=["cpu", "to", "numpy", "dlpack"],
    )
    def test_host_copy(self, copied: Any, device: str) -> None:
        self.served(GraphCache(lambda x: copied(x) + x, [4]), "host-copy", rows(3, device))

    @pytest.mark.parametrize(
        "pick",
        [
            lambda x: x[x[:, 0] > 0],
            lambda x: x.nonzero(),
            lambda x: torch.unique(x),
            lambda x: x.masked_select(x > 0),
        ],
        ids=["mask", "nonzero", "unique", "masked_select"],
    )
    def test_dynamic_output(self, pick: Any, device: str) -> None:
        self.served(GraphCache(lambda x: pick(x) * 2, [4]), "dynamic-output", rows(3, device))

    def test_grad(self, device: str) -> None:
        """A parameter, an input, or a held tensor that requires grad, with grad mode on; results
        have their graph.
        """
        module = linear(device)
        cache = GraphCache(module, [4])
        with torch.enable_grad():
            y = cache(rows(3, device))
            assert y.grad_fn is not None
            assert cache.stats().fallbacks == {"grad": 1}
            module.requires_grad_(False)
            assert cache(rows(3, device)).grad_fn is None
            assert cache(rows(3, device).requires_grad_()).grad_fn is not None
            assert cache(rows(3, device)).grad_fn is None
        assert cache.stats().fallbacks == {"grad": 2}
        assert cache.stats().captures == cache.stats().replays == 1
        assert "no_grad" in Reason.GRAD.remedy

    def test_grad_needed_by_a_tensor_that_is_no_parameter(self, device: str) -> None:
        held = torch.ones(4, device=device, requires_grad=True)
        cache = GraphCache(lambda x: x * held, [4])
        cache(rows(3, device))
        with torch.enable_grad():
            for _ in range(2):
                assert cache(rows(3, device)).grad_fn is not None
        assert cache.stats().fallbacks == {"grad": 2}

    def test_gradients_asked_for_after_capture_are_given(self, device: str) -> None:
        module = linear(device).requires_grad_(False)
        cache, x = GraphCache(module, [4]), rows(3, device)
        with torch.enable_grad():
            cache(x)
            module[0].weight.requires_grad_()
            cache(x).sum().backward()
        assert module[0].weight.grad is not None

    @pytest.mark.parametrize(
        "write",
        [
            lambda x: x.add_(1),
            lambda x: x[:1].zero_(),
            lambda x: torch.mul(x, 2, out=x),
            lambda x: x.view(-1).clamp_(0),
        ],
        ids=["add_", "view", "out", "reshaped"],
    )
    def test_input_mutated(self, write: Any, device: str) -> None:
        """The caller sees the change exactly once; or the write is done by a graph and written back
        once.
        """

        def bump(x: Tensor) -> Tensor:
            write(x)
            return x * 2

        cache = GraphCache(bump, [4])
        for n in (3, 4, 3):
            ours, theirs = (torch.arange(-2.0, 4 * n - 2, device=device).view(n, 4) for _ in "ab")
            assert_same(cache(ours), bump(theirs))
            assert_same(ours, theirs, bitwise=True)
        assert set(cache.stats().fallbacks) <= {"input-mutated"}

    def test_a_list_argument_that_the_module_appends_to_is_an_input_that_it_writes(
        self, device: str
    ) -> None:
        """`input-mutated`: a replay would not append."""

        def collect(x: Tensor, seen: list[Tensor]) -> Tensor:
            y = x * 2
            seen.append(y)
            return y + 1

        cache = GraphCache(collect, [4])
        for n in (3, 4, 3):
            x, ours, theirs = rows(n, device), [], []
            assert_same(cache(x, ours), collect(x, theirs))
            assert_same(ours, theirs)

    def test_state_written(self, device: str) -> None:
        """A Python attribute changed by forward, which a replay would not repeat."""

        class Counting(nn.Module):
            calls = 0

            def forward(self, x: Tensor) -> Tensor:
                self.calls += 1
                return x * self.calls

        self.served(GraphCache(Counting().to(device), [4]), "state-written", rows(3, device))

    def test_a_buffer_that_forward_writes_is_written_once_a_call(self, device: str) -> None:
        """By the graph, and as if no trial had been."""
        twin = Twin(GraphCache(_Counter().to(device), [4, 8]))
        for n in (4, 3, 8, 2, 11):
            twin(rows(n, device))
            assert_same(twin.cache.module.seen, twin.eager.seen)
        assert twin.cache.stats().replays > 0

    def test_generator(self, device: str) -> None:
        """A generator of the module's own, Python's and numpy's: a graph would freeze the draw."""
        own = torch.Generator(device).manual_seed(0)
        draws = (
            lambda x: x + torch.rand(4, generator=own, device=x.device),
            lambda x: x * random.random(),
            lambda x: x * float(np.random.rand()),
        )
        for draw in draws:
            cache, x = GraphCache(draw, [4]), rows(3, device)
            assert not torch.equal(cache(x), cache(x))
            assert cache.stats().fallbacks == {"generator": 2}

    @pytest.mark.parametrize(
        "make",
        [
            lambda x: {1, 2},
            lambda x: object(),
            lambda x: np.ones(3),
            lambda x: x.to_sparse(),
            lambda x: torch.nested.nested_tensor([x[0], x[1][:2]]),
            lambda x: bytearray(b"ab"),
        ],
        ids=["set", "object", "numpy", "sparse", "nested", "bytearray"],
    )
    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_unsupported_input(self, make: Any, device: str) -> None:
        cache, x = GraphCache(lambda x, other: x * 2, [4]), rows(3, device)
        for _ in range(2):
            assert_same(cache(x, make(x)), x * 2)
        assert cache.stats().fallbacks == {"unsupported-input": 2}

    def test_unsupported_output(self, device: str) -> None:
        """A view of an input, a sparse tensor, an object that no tree holds."""
        for returned in (lambda x: x[:, 1:], lambda x: x.t(), lambda x: x.detach()):
            self.served(GraphCache(returned, [4]), "unsupported-output", rows(3, device))
        for strange in (lambda x: (x * 2).to_sparse(), lambda x: {"a": x * 2, "b": object}):
            cache = GraphCache(strange, [4])
            for _ in range(2):
                cache(rows(3, device))
            assert set(cache.stats().fallbacks) <= {"unsupported-output", "dynamic-output"}
            assert cache.stats().eager == 2

    def test_hooks(self, device: str) -> None:
        """On any submodule, before or behind, global, or on the cache itself; off again, graphs
        serve.
        """
        module = linear(device)
        cache, x, seen = GraphCache(module, [4]), rows(3, device), []

        def note(*args: Any) -> None:
            seen.append(1)

        places = (
            module[0].register_forward_hook,
            module.register_forward_pre_hook,
            nn.modules.module.register_module_forward_hook,
            nn.modules.module.register_module_forward_pre_hook,
        )
        for place in places:
            cache(x)
            handle = place(note)
            seen.clear()
            try:
                assert_same(cache(x), module(x))
                ours = len(seen) / 2
                assert ours >= 1
            finally:
                handle.remove()
        assert cache.stats().fallbacks == {"hooks": 4}
        assert cache.stats().replays == 3

    def test_hooks_on_the_cache_itself_fire(self, device: str) -> None:
        """It is an nn.Module, called as one."""
        cache, x = GraphCache(linear(device), [4]), rows(3, device)
        handle = cache.register_forward_hook(lambda module, args, result: result * 10)
        assert_same(cache(x), cache.module(x) * 10)
        handle.remove()
        assert_same(cache(x), cache.module(x))

    def test_a_weight_norm_pre_hook_is_recorded(self, device: str) -> None:
        """It only computes a weight, which a replay does too, also after its parameters changed."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = nn.utils.weight_norm(nn.Linear(4, 3)).to(device).eval()
        cache = GraphCache(module, [4])
        for _ in range(3):
            x = rows(3, device)
            assert_same(cache(x), module(x))
            module.weight_g.mul_(1.5)
        assert cache.stats().eager == 0

    def test_tracing(self, device: str) -> None:
        """Under vmap, jvp, a dispatch mode and FakeTensor the module runs plainly."""
        cache, x = GraphCache(linear(device), [4]), rows(3, device)
        cache(x)
        assert_same(torch.func.vmap(cache)(x), cache.module(x))
        value, slope = torch.func.jvp(cache, (x,), (torch.ones_like(x),))
        assert_same(value, cache.module(x))
        assert slope.abs().sum() > 0
        with FlopCounterMode(display=False) as flops:
            cache(x)
        assert flops.get_total_flops() == 2 * 3 * 4 * 5
        assert set(cache.stats().fallbacks) == {"tracing"}
        assert_sums(cache.stats())

    def test_a_parent_under_compile_runs_the_module_plainly(self, device: str) -> None:
        """With the eager backend of torch.compile, also in one full graph."""
        parent = nn.Sequential(GraphCache(linear(device), [4]), nn.ReLU()).to(device)
        for full in (False, True):
            compiled = torch.compile(parent, backend="eager", fullgraph=full)
            for n in (3, 4, 3):
                x = rows(n, device)
                assert_same(compiled(x), parent[0].module(x).relu())
            torch._dynamo.reset()
        assert parent[0].stats().captures == 0

    def test_a_parent_under_export_runs_the_module_plainly(self, device: str) -> None:
        parent = nn.Sequential(GraphCache(linear(device), [4]), nn.ReLU()).to(device)
        x = rows(3, device)
        assert_same(torch.export.export(parent, (x,)).module()(x), parent[0].module(x).relu())

    def test_capture_failed(self, device: str) -> None:
        """What fails only while captured is remembered for the key, and other keys are served."""
        ELSEWHERE.runs = []

        def fails_in_capture(x: Tensor) -> Tensor:
            runs = ELSEWHERE.runs
            runs.append(len(x))
            if len(x) == 4 and runs.count(4) == 3:  # two trials come before the capture
                raise RuntimeError("not now")
            return x * 2

        cache = GraphCache(fails_in_capture, [4, 8])
        for _ in range(3):
            x = rows(4, device)
            assert_same(cache(x), x * 2)
            x = rows(8, device)
            assert_same(cache(x), x * 2)
        if device == "cpu":  # a real capture has more warm-ups before it
            assert cache.stats().fallbacks == {"capture-failed": 3}
            assert cache.stats().failures == 1
            assert cache.stats().replays == 2

    def test_capture_failed_raises_a_capture_error_under_raise(self, device: str) -> None:
        ELSEWHERE.runs = []

        def fails_later(x: Tensor) -> Tensor:
            ELSEWHERE.runs.append(1)
            if len(ELSEWHERE.runs) == 3:
                raise ValueError("not now")
            return x * 2

        cache = GraphCache(fails_later, [4], on_fallback="raise")
        if device == "cpu":
            with pytest.raises(CaptureError, match="not now"):
                cache(rows(4, device))

    def test_opaque_code(self) -> None:
        """Code that computes outside of ATen cannot be recorded on the CPU."""

        def opaque(x: Tensor) -> Tensor:
            return torch.frombuffer(bytearray(x.numel() * 4), dtype=torch.float32)

        cache, x = GraphCache(opaque, [4]), rows(3, "cpu")
        for _ in range(2):
            assert_same(cache(x), opaque(x))
        assert cache.stats().eager == 2
        assert set(cache.stats().fallbacks) <= {"opaque-code", "host-copy"}

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    def test_nested_capture(self) -> None:
        """The caller's own graph holds the module's kernels."""
        cache, x = GraphCache(linear("cuda"), [4]), rows(4, "cuda")
        cache(x)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            cache.module(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            y = cache(x)
        x.fill_(0.5)
        graph.replay()
        assert_same(y, cache.module(x))
        assert cache.stats().fallbacks == {"nested-capture": 1}

    @pytest.mark.gpu
    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
    def test_tensors_on_two_devices(self) -> None:
        def both(x: Tensor, y: Tensor) -> Tensor:
            return x + y.to(x.device)

        cache = GraphCache(both, [4])
        x, y = rows(3, "cuda:0"), rows(3, "cuda:1")
        assert_same(cache(x, y), both(x, y))
        assert cache.stats().fallbacks == {"device": 1}


class TestNeverWrong:
    """Section 5: changes behind the cache's back, aliases, constants, modes."""

    def test_a_result_made_by_a_copy_of_an_input_is_no_alias_of_it(self, device: str) -> None:
        """`contiguous()` copies an input with gaps, or expanded; then the result is the caller's
        own.
        """
        cache = GraphCache(lambda x: x.contiguous(), [4])
        wide, one = rows(3, device, 8), rows(1, device)
        for x in (wide[:, ::2], wide[:, :4], one.expand(3, 4), rows(4, device).t()[:3]):
            before = x.clone()
            y = cache(x)
            assert_same(y, x.contiguous())
            y.add_(1)
            assert_same(x, before, bitwise=True)

    def test_a_result_that_is_an_input_is_the_callers_own_input(self, device: str) -> None:
        def through(x: Tensor, y: Tensor) -> dict[str, Tensor]:
            return {"x": x, "sum": x + y, "y": y}

        cache = GraphCache(through, [4])
        for n in (3, 4, 3):
            x, y = rows(n, device), rows(n, device)
            result = cache(x, y)
            assert result["x"] is x
            assert result["y"] is y
            assert_same(result["sum"], x + y)

    def test_one_tensor_returned_twice_and_two_views_of_one(self, device: str) -> None:
        def twice(x: Tensor) -> tuple[Tensor, ...]:
            y = x * 2
            return y, y, y[:, :2], y.sum(1), y.T

        twin_like = GraphCache(twice, [4])
        for n in (3, 4, 2):
            x = rows(n, device)
            assert_same(twin_like(x), twice(x))

    def test_a_constant_made_in_forward_and_changed_in_place_starts_anew(self, device: str) -> None:
        """A replay must not go on from where the last one left it."""

        def accumulate(x: Tensor) -> Tensor:
            total = torch.tensor([0.0, 0.0, 0.0, 1.0])
            total += 1
            return x + total.to(x.device)

        def filled(x: Tensor) -> Tensor:
            out = torch.zeros(4, device=x.device)
            out += 1
            out[1:] *= 3
            return x + out

        for target in (accumulate, filled):
            cache = GraphCache(target, [4])
            for n in (4, 3, 4, 3):
                x = rows(n, device)
                assert_same(cache(x), target(x))

    def test_plain_values_of_equal_hash_are_told_apart(self, device: str) -> None:
        """1, 1.0, True, 0.0 and -0.0 as arguments and inside containers."""
        cache = GraphCache(Scaled().to(device), [4])
        x = torch.arange(12, device=device).view(3, 4)
        for _ in range(2):
            for k in (1, 1.0, True, 0.0, -0.0, 0, False, 2j, float("inf")):
                assert_same(cache(x, k), x * k)
        nested = GraphCache(lambda x, k: x * k["a"][0], [4])
        for _ in range(2):
            for k in (1, 1.0, True, 2):
                assert_same(nested(x, {"a": [k]}), x * k)

    def test_weights_loaded_in_place_need_no_recapture(self, device: str) -> None:
        twin = Twin(GraphCache(linear(device), [4]))
        for _ in range(3):
            twin(rows(3, device))
            state = {k: torch.randn_like(v) for k, v in twin.eager.state_dict().items()}
            twin.cache.load_state_dict(state)
            twin.eager.load_state_dict(state)
        assert twin.cache.stats().captures == 1

    @pytest.mark.parametrize(
        "replace",
        [
            lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones_like(m[0].weight))),
            lambda m: setattr(m[0].weight, "data", torch.ones_like(m[0].weight)),
            lambda m: m[0]._parameters.update(weight=nn.Parameter(torch.ones_like(m[0].weight))),
            lambda m: setattr(m, "0", nn.Linear(4, 5, bias=False).to(m[0].weight.device)),
            lambda m: m.append(nn.Softmax(-1)),
            lambda m: m.double().float(),
            lambda m: m.apply(lambda s: setattr(s, "bias", None) if hasattr(s, "bias") else None),
        ],
        ids=["parameter", "data", "dict", "submodule", "append", "dtype", "removed"],
    )
    def test_weights_or_submodules_replaced_are_noticed(self, replace: Any, device: str) -> None:
        """Even while the old ones live on."""
        module = linear(device)
        cache = GraphCache(module, [4])
        x = rows(3, device)
        cache(x)
        old = [*module.parameters(), *(p.data for p in module.parameters())]
        replace(module)
        assert_same(cache(x), module(x))
        del old
        assert_same(cache(x), module(x))
        cache._check()

    def test_plain_attributes_are_noticed(self, device: str) -> None:
        """Numbers, tensors and functions held by submodules, and back to graphs that exist."""

        class Knobs(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale, self.shift, self.act = 1.0, torch.ones(4, device=device), torch.tanh

            def forward(self, x: Tensor) -> Tensor:
                return self.act(x * self.scale + self.shift)

        module = Knobs()
        cache, x = GraphCache(module, [4]), rows(3, device)
        old = module.shift
        changes = [("scale", 2.0), ("shift", torch.zeros(4, device=device)), ("act", torch.relu)]
        for name, value in [*changes, ("scale", 1.0), ("shift", old), ("act", torch.tanh)]:
            cache(x)
            setattr(module, name, value)
            assert_same(cache(x), module(x))

    def test_a_list_held_by_the_module_and_changed_in_place_is_noticed(self, device: str) -> None:
        """Plain attributes are compared with those at capture, numbers and tensors in a list or
        dict too.
        """

        class Lists(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scales, self.shifts = [2.0], {"a": torch.ones(4, device=device)}

            def forward(self, x: Tensor) -> Tensor:
                return x * self.scales[0] + self.shifts["a"]

        module = Lists()
        cache, x = GraphCache(module, [4]), rows(3, device)
        cache(x)
        module.scales[0] = 5.0
        assert_same(cache(x), module(x))
        old = module.shifts["a"]
        module.shifts["a"] = old * 3
        assert_same(cache(x), module(x))

    def test_training_flags_are_part_of_the_key(self, device: str) -> None:
        """Of any submodule; statistics advance exactly once a call, and eval serves on by its old
        graph.
        """
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()).to(device).eval()
        twin = Twin(GraphCache(module, [4, 8]))
        for flags in ((False,), (True,), (False,), (True, True, False)):
            for n in (4, 8, 4, 3):
                for flag in flags:
                    module[1].train(flag)
                    twin.eager[1].train(flag)
                    twin(rows(n, device))
                    assert_same(module.state_dict(), twin.eager.state_dict())
        assert twin.cache.stats().replays > 0

    def test_autocast_and_default_dtype_are_part_of_the_key(self, device: str) -> None:
        twin = Twin(GraphCache(linear(device), [4]))
        for enabled in (False, True, False, True):
            with torch.autocast(device, torch.bfloat16, enabled=enabled):
                assert_same(
                    twin.cache(rows(3, device)).dtype, torch.bfloat16 if enabled else torch.float32
                )
                x = rows(3, device)
                assert_same(twin.cache(x), twin.eager(x))
        assert twin.cache.stats().captures == 2
        made = GraphCache(lambda x: x + torch.ones(4, device=x.device) / 3, [4])
        x = rows(3, device)
        made(x)
        torch.set_default_dtype(torch.float64)
        try:
            assert made(x).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        assert made(x).dtype == torch.float32

    def test_dtypes_layouts_and_ranks_have_graphs_of_their_own(self, device: str) -> None:
        cache = GraphCache(Scaled().to(device), [4])
        for _ in range(2):
            for dtype in (
                torch.float32,
                torch.float64,
                torch.int32,
                torch.complex64,
                torch.bfloat16,
            ):
                x = torch.ones(3, 4, device=device).to(dtype)
                assert_same(cache(x, 2), x * 2)
                assert_same(cache(x.t(), 2), x.t() * 2)
                assert_same(cache(x[:, 0], 2), x[:, 0] * 2)
        assert cache.stats().eager == 0

    def test_lazily_conjugated_and_negated_inputs_equal_eager(self, device: str) -> None:
        cache = GraphCache(lambda x, y: (x * y, (x + y).conj(), (x * 1j).imag), [4])
        for n in (3, 4):
            x = torch.randn(n, 4, dtype=torch.complex64, device=device)
            y = torch.randn(n, 4, dtype=torch.complex64, device=device)
            for a, b in ((x, y), (x.conj(), y), (x.conj(), y.conj()), (x, x.conj())):
                expected = (a * b, (a + b).conj(), (a * 1j).imag)
                assert_same([t.clone() for t in cache(a, b)], [t.clone() for t in expected])

    def test_not_finite_inputs_stay_in_their_rows(self, device: str) -> None:
        twin = Twin(GraphCache(linear(device), [4, 8]))
        for n in (4, 3, 8, 2):
            x = rows(n, device)
            x[0, 0], x[-1, -1] = float("nan"), float("inf")
            twin(x)
            twin(rows(n, device))

    def test_dropout_draws_anew_and_repeats_under_the_seed(self, device: str) -> None:
        """Also at sizes that are padded, with the same distribution."""
        cache = GraphCache(nn.Dropout(0.25).train().to(device), [64])
        for n in (64, 50):
            x = torch.ones(n, 32, device=device)
            assert not torch.equal(cache(x), cache(x))
            runs = []
            for _ in range(2):
                torch.manual_seed(5)
                runs.append([cache(x) for _ in range(3)])
            assert_same(runs[0], runs[1], bitwise=True)
            assert abs((runs[0][0] == 0).float().mean().item() - 0.25) < 0.05
        assert cache.stats().eager == 0

    def test_trials_draw_nothing_from_the_callers_generators(self, device: str) -> None:
        """Draws after a capturing call are those after an eager one, if nothing is padded."""
        module = nn.Dropout(0.5).train().to(device)
        x, after = torch.ones(8, 4, device=device), []
        for call in (module, GraphCache(module, [8])):
            torch.manual_seed(2)
            call(x)
            after.append(torch.rand(4))
        assert_same(after[0], after[1], bitwise=device == "cpu")

    def test_a_cache_in_a_module_that_is_itself_cached(self, device: str) -> None:
        """The outer graph holds the inner module's operations; both stay usable."""
        inner = GraphCache(linear(device), [4, 8])
        outer = GraphCache(nn.Sequential(inner, nn.ReLU()), [4])
        module = nn.Sequential(inner.module, nn.ReLU())
        for n in (3, 4, 6, 1):
            x = rows(n, device)
            assert_same(outer(x), module(x))
            assert_same(inner(x), inner.module(x))
        assert outer.stats().eager == 0
        assert inner.stats().calls == 4
        inner.module[0].weight.data = torch.ones_like(inner.module[0].weight)
        x = rows(3, device)
        assert_same(outer(x), module(x))
        outer._check()
        inner._check()

    def test_a_cache_graphs_a_part_of_a_model_in_place(self, device: str) -> None:
        """The state dict's keys are the same, and training flags reach the part."""
        model = nn.Sequential(linear(device), nn.Linear(5, 2).to(device)).eval()
        keys, x = list(model.state_dict()), rows(3, device)
        expected = model(x)
        model[0] = GraphCache(model[0], [4])
        assert list(model.state_dict()) == keys
        assert [name for name, _ in model.named_parameters()] == keys
        assert_same(model(x), expected)
        assert model[0].stats().captures == 1
        model.train()
        assert model[0].module.training

    def test_a_module_that_raises_now_and_then_raises_to_the_caller(self, device: str) -> None:
        """Its own error, from its own code, as eager does; and nothing is left behind."""

        class Picky(nn.Module):
            def forward(self, x: Tensor, k: int) -> Tensor:
                if k < 0:
                    raise KeyError(f"k={k}")
                return x * k

        twin = Twin(GraphCache(Picky().to(device), [4]))
        for k in (-1, 2, -2, 2, -1, 2):
            if k < 0:
                with pytest.raises(KeyError, match=f"k={k}"):
                    twin.cache(rows(3, device), k)
            else:
                twin(rows(3, device), k)
        assert twin.cache.stats().calls == 3

    def test_a_call_in_a_short_lived_thread_equals_eager(self, device: str) -> None:
        """Grad mode and autocast are the thread's own."""
        twin, errors = Twin(GraphCache(linear(device), [4])), []

        def work() -> None:
            try:
                with torch.no_grad():
                    twin(rows(3, device))
            except Exception as error:
                errors.append(error)

        for _ in range(3):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        assert not errors, errors[0]
        assert twin.cache.stats().calls == 3


def test_the_oldest_plans_go_first_and_their_counts_stay(device, monkeypatch):
    """Over more sizes than plans are kept for; what they counted is in the books."""
    monkeypatch.setattr(serving, "MAX_PLANS", 4)
    module = nn.Linear(4, 2).to(device).eval()
    cache = GraphCache(module, [16])
    with torch.no_grad():
        for n in [*range(1, 15), *range(1, 15)]:
            x = torch.randn(n, 4, device=device)
            torch.testing.assert_close(cache(x), module(x))
            assert len(cache._server._plans) <= 4
            cache._check()
    assert cache.traffic.counts == {(n,): 2 for n in range(1, 15)}
    assert cache.stats().calls == 28
