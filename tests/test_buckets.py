"""Bucket sets: reading the `buckets` argument, choosing a bucket, covering a larger call."""

import itertools
import math
from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from graphcache import buckets as buckets_module
from graphcache.buckets import BucketSet, parse_buckets
from graphcache.cover import MAX_PIECES
from graphcache.errors import BucketError, GraphCacheError

small_size = st.integers(1, 12)
corners_2d = st.lists(st.tuples(small_size, small_size), min_size=1, max_size=6)


def cheapest_holding(corners, sizes):
    """Brute force: the fewest padded elements among the corners that hold `sizes`, or None."""
    costs = [
        math.prod(corner)
        for corner in corners
        if all(n <= limit for n, limit in zip(sizes, corner, strict=True))
    ]
    return min(costs, default=None)


def cheapest_cover(corners, sizes, axis):
    """Brute force: the fewest padded elements of at most 16 corners whose rows reach `sizes`."""
    usable = {
        corner
        for corner in corners
        if all(n <= c for i, (n, c) in enumerate(zip(sizes, corner, strict=True)) if i != axis)
    }
    return min(
        (
            sum(map(math.prod, chosen))
            for count in range(1, MAX_PIECES + 1)
            for chosen in itertools.combinations_with_replacement(sorted(usable), count)
            if sum(corner[axis] for corner in chosen) >= sizes[axis]
        ),
        default=None,
    )


class TestChoose:
    @given(corners=corners_2d, sizes=st.tuples(small_size, small_size))
    def test_the_chosen_bucket_is_the_cheapest_that_holds_the_sizes(self, corners, sizes):
        """`choose` agrees with a search over all corners, and answers None where none holds."""
        chosen = BucketSet(("batch", "seq"), corners).choose(sizes)
        best = cheapest_holding(corners, sizes)
        if best is None:
            assert chosen is None
        else:
            assert chosen in corners
            assert all(n <= limit for n, limit in zip(sizes, chosen, strict=True))
            assert math.prod(chosen) == best

    @given(sizes=st.lists(small_size, min_size=1, max_size=6), n=st.integers(1, 14))
    def test_in_one_dim_the_smallest_size_that_holds_is_chosen(self, sizes, n):
        """One dim: the least listed size at or above n."""
        chosen = parse_buckets(sizes, ("batch",)).choose((n,))
        holding = [size for size in sizes if size >= n]
        assert chosen == ((min(holding),) if holding else None)

    @given(corners=corners_2d, sizes=st.tuples(small_size, small_size))
    def test_an_unpadded_dim_keeps_the_calls_own_size(self, corners, sizes):
        """A dim that must not be padded takes the call's size even where no bucket lists it."""
        chosen = BucketSet(("batch", "seq"), corners).choose(sizes, frozenset({1}))
        rows = [corner[0] for corner in corners if corner[0] >= sizes[0]]
        assert chosen == ((min(rows), sizes[1]) if rows else None)

    @given(corners=corners_2d, sizes=st.tuples(small_size, small_size))
    def test_when_no_dim_may_be_padded_every_size_is_its_own_bucket(self, corners, sizes):
        """With all dims unpadded nothing is too large: the answer is the call itself."""
        assert BucketSet(("batch", "seq"), corners).choose(sizes, frozenset({0, 1})) == sizes

    @given(sizes=st.tuples(small_size, small_size))
    def test_without_buckets_every_size_is_its_own_bucket(self, sizes):
        """`buckets=None` means exact sizes."""
        buckets = parse_buckets(None, ("batch", "seq"))
        assert buckets.exact
        assert len(buckets) == 0
        assert buckets.choose(sizes) == sizes


class TestCover:
    @given(
        sizes=st.lists(st.integers(1, 25), min_size=1, max_size=3, unique=True),
        total=st.integers(1, 90),
    )
    @example(sizes=[1, 40, 100], total=117)
    @settings(max_examples=60, deadline=None)
    def test_pieces_cover_exactly_with_the_fewest_padded_elements(self, sizes, total):
        """Pieces follow each other without gap, are at most 16, and no such cover is cheaper."""
        corners = [(size,) for size in sizes]
        pieces = BucketSet(("batch",), corners).cover((total,), 0)
        best = cheapest_cover(corners, (total,), 0)
        if best is None:
            assert pieces is None
            return
        assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
        assert pieces[-1].stop == total
        assert len(pieces) <= MAX_PIECES
        assert all(0 < p.stop - p.start <= p.bucket[0] for p in pieces)
        assert {piece.bucket for piece in pieces} <= set(corners)
        assert sum(piece.bucket[0] for piece in pieces) == best

    @given(
        corners=st.lists(st.tuples(small_size, small_size), min_size=1, max_size=3),
        sizes=st.tuples(st.integers(1, 40), st.integers(1, 14)),
    )
    @settings(max_examples=60, deadline=None)
    def test_pieces_in_two_dims_are_the_cheapest_whose_other_dim_holds(self, corners, sizes):
        """Along batch, each piece's bucket must hold seq; the sum of elements is the least."""
        pieces = BucketSet(("batch", "seq"), corners).cover(sizes, 0)
        best = cheapest_cover(set(corners), sizes, 0)
        if best is None:
            assert pieces is None
            return
        assert pieces[-1].stop == sizes[0]
        assert all(piece.bucket[1] >= sizes[1] for piece in pieces)
        assert sum(math.prod(piece.bucket) for piece in pieces) == best

    @given(
        sizes=st.lists(st.integers(1, 25), min_size=1, max_size=3, unique=True),
        total=st.integers(1, 90),
    )
    def test_only_the_last_piece_is_padded(self, sizes, total):
        """The tail carries the padding: every earlier piece fills its bucket."""
        pieces = BucketSet(("batch",), [(n,) for n in sizes]).cover((total,), 0)
        for piece in (pieces or [])[:-1]:
            assert piece.stop - piece.start == piece.bucket[0]

    def test_a_call_above_sixteen_of_the_largest_bucket_has_no_cover(self):
        """More than 16 pieces are never made."""
        buckets = parse_buckets([4, 8], ("batch",))
        assert len(buckets.cover((128,), 0)) == 16
        assert buckets.cover((129,), 0) is None

    def test_a_call_whose_other_dim_no_bucket_holds_has_no_cover(self):
        """Cutting along batch does not help a seq that is too long."""
        assert parse_buckets([(4, 8)], ("batch", "seq")).cover((10, 9), 0) is None


class TestParse:
    @given(sizes=st.lists(small_size, min_size=1, max_size=8), data=st.data())
    def test_order_and_repeats_do_not_matter(self, sizes, data):
        """A shuffled list with repeats is the same bucket set."""
        again = data.draw(st.permutations(sizes + sizes))
        first, second = parse_buckets(sizes, ("batch",)), parse_buckets(again, ("batch",))
        assert first.corners == second.corners
        assert len(first) == len(set(sizes))

    @given(
        batch=st.lists(small_size, min_size=1, max_size=4),
        seq=st.lists(small_size, min_size=1, max_size=4),
    )
    def test_a_grid_is_shorthand_for_its_product(self, batch, seq):
        """{"batch": [...], "seq": [...]} holds every pair, in the order of the dims."""
        grid = parse_buckets({"seq": seq, "batch": batch}, ("batch", "seq"))
        assert set(grid.corners) == set(itertools.product(batch, seq))

    def test_numpy_integers_tuples_and_generators_are_sizes(self):
        """Whatever has an index counts as a size; any iterable counts as a list."""
        dims = ("batch",)
        assert parse_buckets((n for n in (8, 4)), dims).corners == ((4,), (8,))
        assert parse_buckets([(8,), 4], dims).corners == ((4,), (8,))
        corners = parse_buckets(list(np.array([8, 4])), dims).corners
        assert corners == ((4,), (8,))
        assert all(type(n) is int for (n,) in corners)

    def test_a_numpy_array_of_sizes_is_a_list_of_sizes(self):
        """An array is an iterable of integers like any other, not a bare ValueError of numpy's."""
        assert parse_buckets(np.array([8, 4]), ("batch",)).corners == ((4,), (8,))

    @pytest.mark.parametrize(
        ("buckets", "text"),
        [
            ([], r"`buckets` is empty; pass at least one size, or None"),
            ([0], r"bucket size 0 of dim 'batch' is not a positive integer"),
            ([-4], r"bucket size -4 of dim 'batch' is not a positive integer"),
            ([4, 2.5], r"bucket size 2\.5 of dim 'batch' is not a positive integer"),
            ([True], r"bucket size True of dim 'batch' is not a positive integer"),
            (["8"], r"bucket size '8' of dim 'batch' is not a positive integer"),
            ([None], r"bucket size None of dim 'batch' is not a positive integer"),
            ([(4, 8)], r"bucket \(4, 8\) has 2 size\(s\) for the 1 dynamic dim\(s\) batch"),
            ([()], r"bucket \(\) has 0 size\(s\) for the 1 dynamic dim\(s\) batch"),
            (8, r"`buckets` is 8; pass a list such as \[8, 16, 32\]"),
            (b"8", r"`buckets` is b'8'; pass a list"),
            ({"rows": [4]}, r"`buckets` names the dims \['rows'\], .* names \['batch'\]"),
            ({"batch": []}, r"`buckets\['batch'\]` is \[\]; pass a list of at least one size"),
            ({"batch": 8}, r"`buckets\['batch'\]` is 8; pass a list of at least one size"),
            ({"batch": "8"}, r"`buckets\['batch'\]` is '8'; pass a list of at least one size"),
            ({"batch": [0]}, r"bucket size 0 of dim 'batch' is not a positive integer"),
        ],
    )
    def test_buckets_that_cannot_be_used_are_refused_with_the_value_and_a_cure(self, buckets, text):
        """Each fault is a BucketError that names the value and what to pass."""
        with pytest.raises(BucketError, match=text):
            parse_buckets(buckets, ("batch",))

    @pytest.mark.parametrize(
        ("buckets", "text"),
        [
            ([8], r"bucket 8 has 1 size\(s\) for the 2 dynamic dim\(s\) batch, seq"),
            ([(8, 16, 4)], r"bucket \(8, 16, 4\) has 3 size\(s\) for the 2 dynamic dim\(s\)"),
            ({"batch": [4]}, r"names the dims \['batch'\], .* \['batch', 'seq'\]"),
            ([(8, 0)], r"bucket size 0 of dim 'seq' is not a positive integer"),
        ],
    )
    def test_a_wrong_number_of_dims_is_refused_in_two_dims(self, buckets, text):
        """A bucket has one size for each named dim."""
        with pytest.raises(BucketError, match=text):
            parse_buckets(buckets, ("batch", "seq"))

    def test_a_bucket_error_is_a_value_error_and_one_of_ours(self):
        """Callers may catch either."""
        with pytest.raises(BucketError) as caught:
            parse_buckets([], ("batch",))
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, GraphCacheError)


@given(corners_2d)
def test_outermost_corners_hold_all_others_and_not_each_other(corners):
    found = BucketSet(("a", "b"), corners).outermost()

    def holds(large, small):
        return large[0] >= small[0] and large[1] >= small[1]

    assert all(any(holds(large, corner) for large in found) for corner in corners)
    assert not any(holds(a, b) for a, b in itertools.permutations(found, 2))


class Priced:
    """Measured costs, seeded: a price of each bucket and of each eager call."""

    def __init__(self, seed, bumpy, eager=1.5):
        self.seed, self.bumpy, self.scale = seed, bumpy, eager
        self.piece = Random(seed).choice([0.0, 2.0, 30.0])

    def replay_of(self, sizes):
        bump = Random(f"{self.seed} {sizes}").uniform(0.4, 2.5) if self.bumpy else 1.0
        return (5.0 + math.prod(sizes)) * bump

    def eager_of(self, sizes):
        return (9.0 + math.prod(sizes)) * self.scale


def cheapest_way(corners, costs, sizes, axes):
    """Brute force: the least cost over buckets, covers of at most 16 pieces, and eager calls."""
    held = [c for c in corners if all(n <= m for n, m in zip(sizes, c, strict=True))]
    options = [costs.replay_of(corner) for corner in held]
    for axis in axes:
        fits = sorted({
            corner
            for corner in corners
            if all(n <= c for i, (n, c) in enumerate(zip(sizes, corner, strict=True)) if i != axis)
        })  # fmt: skip
        options += [
            sum(map(costs.replay_of, chosen)) + costs.piece * (count - 1)
            for count in range(1, MAX_PIECES + 1)
            for chosen in itertools.combinations_with_replacement(fits, count)
            if sum(corner[axis] for corner in chosen) >= sizes[axis]
        ]
    return min([costs.eager_of(sizes), *options]) if options else math.inf


class TestMeasuredCosts:
    def check(self, corners, costs, sizes, axes):
        """The way costs the least, and is what it costs."""
        way = BucketSet(("a", "b")[: len(sizes)], corners, costs).way(sizes, axes)
        assert way.cost == pytest.approx(cheapest_way(set(corners), costs, sizes, axes))
        if way.pieces:
            assert [p.start for p in way.pieces] == [0, *(p.stop for p in way.pieces[:-1])]
            assert way.pieces[-1].stop == sizes[way.axis]
            spent = sum(costs.replay_of(piece.bucket) for piece in way.pieces)
            assert way.cost == pytest.approx(spent + costs.piece * (len(way.pieces) - 1))
            rests = {(*p.bucket[: way.axis], *p.bucket[way.axis + 1 :]) for p in way.pieces}
            others = (*sizes[: way.axis], *sizes[way.axis + 1 :])
            assert all(n <= m for rest in rests for n, m in zip(others, rest, strict=True))
        elif way.bucket is not None:
            assert way.bucket in corners
            assert way.cost == costs.replay_of(way.bucket)
        elif way.cost < math.inf:
            assert way.cost == costs.eager_of(sizes)
        return way

    @given(
        sizes=st.lists(st.integers(1, 25), min_size=1, max_size=3, unique=True),
        total=st.integers(1, 60),
        seed=st.integers(0, 10**6),
        bumpy=st.booleans(),
        eager=st.sampled_from([0.9, 1.5, 1e6]),
        axes=st.sampled_from([[], [0]]),
    )
    @settings(max_examples=80)
    def test_in_one_dim_the_way_is_the_cheapest_of_all(
        self, sizes, total, seed, bumpy, eager, axes
    ):
        """Buckets, pieces with their overhead, and eager; bumpy prices too."""
        self.check([(n,) for n in sizes], Priced(seed, bumpy, eager), (total,), axes)

    @given(
        corners=st.lists(st.tuples(small_size, small_size), min_size=1, max_size=3),
        sizes=st.tuples(st.integers(1, 30), st.integers(1, 14)),
        seed=st.integers(0, 10**6),
        bumpy=st.booleans(),
        eager=st.sampled_from([0.9, 1.5, 1e6]),
        axes=st.sampled_from([[], [0], [1], [0, 1]]),
    )
    @settings(max_examples=80)
    def test_in_two_dims_the_way_is_the_cheapest_of_all(
        self, corners, sizes, seed, bumpy, eager, axes
    ):
        """Along either axis, or both tried."""
        self.check(corners, Priced(seed, bumpy, eager), sizes, axes)

    def test_of_equal_costs_the_smaller_bucket_is_taken_and_no_pieces(self):
        """Nor is a call eager that costs the same by a graph."""

        class Flat(Priced):
            piece = 0.0

            def replay_of(self, sizes):
                return 8.0

            def eager_of(self, sizes):
                return 8.0

        flat = Flat.__new__(Flat)
        buckets = BucketSet(("a",), [(4,), (8,), (16,)], flat)
        assert [buckets.way((n,), [0]).bucket for n in (3, 4, 5, 16)] == [(4,), (4,), (8,), (16,)]
        assert len(buckets.way((32,), [0]).pieces) == 0
        plane = BucketSet(("a", "b"), [(8, 2), (2, 8), (8, 8)], flat)
        assert plane.way((1, 1)).bucket == (2, 8)

    @given(
        corners=corners_2d,
        sizes=st.tuples(small_size, small_size),
        seed=st.integers(0, 10**6),
        dim=st.integers(0, 1),
    )
    def test_an_unpadded_dim_takes_the_calls_own_size_at_its_price(self, corners, sizes, seed, dim):
        """The cheapest of the fitted buckets, or eager."""
        costs = Priced(seed, True)
        way = BucketSet(("a", "b"), corners, costs).way(sizes, (), frozenset({dim}))
        fitted = {(sizes[0], c[1]) if dim == 0 else (c[0], sizes[1]) for c in corners}
        held = [c for c in fitted if sizes[0] <= c[0] and sizes[1] <= c[1]]
        best = min(map(costs.replay_of, held), default=math.inf)
        expected = min(best, costs.eager_of(sizes)) if held else math.inf
        assert way.cost == expected
        assert way.bucket is None or way.bucket in held

    def test_without_buckets_nothing_is_held(self):
        """An empty list is not exact sizes."""
        buckets = BucketSet(("a", "b"), [], Priced(0, False))
        assert not buckets.exact
        assert buckets.way((3, 4), [0, 1]).bucket is None
        assert not buckets.way((3, 4), [0, 1]).pieces
        assert buckets.largest() == (0, 0)
        assert BucketSet(("a", "b")).exact

    def test_a_planted_bug_is_found(self, monkeypatch):
        """Pieces without their overhead: brute force says so."""
        cover = buckets_module.Cover
        monkeypatch.setattr(buckets_module, "Cover", lambda rows, costs, _: cover(rows, costs, 0.0))
        costs = Priced(0, False, 1e6)
        costs.piece = 2.0
        with pytest.raises(AssertionError):
            self.check([(4,), (7,)], costs, (18,), [0])
