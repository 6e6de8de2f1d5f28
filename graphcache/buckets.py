"""Bucket sets: which padded sizes exist, and which way to serve a call is the cheapest.

A bucket is a corner: it holds every call whose sizes are at most its own in each dim. Costs are
measured ones where a plan brings them, else padded elements, the product over the dynamic dims. No
torch, no numpy.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from graphcache.cover import Cover
from graphcache.errors import BucketError
from graphcache.stats import Bucket


class Piece(NamedTuple):
    """Rows `start` to `stop` of the split dim, served by `bucket`."""

    start: int
    stop: int
    bucket: Bucket


class Way(NamedTuple):
    """How sizes are served: by a bucket, by pieces along dim `axis`, or, if neither is set,
    eagerly: no bucket holds them (`cost` is inf), or eager is cheaper.
    """

    cost: float = math.inf
    bucket: Bucket | None = None
    pieces: tuple[Piece, ...] = ()
    axis: int = 0


class Costs(Protocol):
    """Measured costs, all in one unit."""

    @property
    def piece(self) -> float:
        """Of each piece of a split after the first, beside its replay."""

    def replay_of(self, sizes: Bucket) -> float:
        """Of one replay of this bucket."""

    def eager_of(self, sizes: Bucket) -> float:
        """Of one eager call; inf if it is not known."""


_MAX_COVERS = 1024  # combinations of the other dims


class BucketSet:
    """The sorted corners over named dims.

    Args:
        dims: the dims' names.
        corners: the buckets; None: every size is its own (`exact`); none at all: nothing is held.
        costs: measured costs; None: padded elements count, and a call is cut only where no bucket
            holds it.

    Example:
        >>> BucketSet(("batch",), [(8,), (16,)]).choose((9,))
        (16,)
    """

    def __init__(
        self,
        dims: tuple[str, ...],
        corners: Iterable[Bucket] | None = None,
        costs: Costs | None = None,
    ) -> None:
        self.dims = dims
        self.exact = corners is None
        self.costs = costs
        self.corners = tuple(
            sorted(set(corners or ()), key=lambda corner: (math.prod(corner), corner))
        )
        prices = {corner: self.price(corner) for corner in self.corners}
        self._cheapest_first = sorted(self.corners, key=lambda corner: prices[corner])
        self._covers: dict[Any, tuple[list[Bucket], Cover]] = {}
        # One dim is searched by bisection: for each size, the cheapest of it and the larger ones.
        self._sizes = [corner[0] for corner in self.corners] if len(dims) == 1 else []
        self._from = [
            min(self.corners[i:], key=lambda corner: prices[corner])
            for i, _ in enumerate(self._sizes)
        ]

    def priced(self, costs: Costs) -> BucketSet:
        """The same buckets under other costs."""
        return BucketSet(self.dims, None if self.exact else self.corners, costs)

    def __len__(self) -> int:
        return len(self.corners)

    def price(self, bucket: Bucket) -> float:
        """The cost of one replay: measured, or the padded elements."""
        return math.prod(bucket) if self.costs is None else self.costs.replay_of(bucket)

    def __repr__(self) -> str:
        shown = [corner[0] if len(corner) == 1 else corner for corner in self.corners]
        return "exact sizes" if self.exact else f"{'x'.join(self.dims)}={shown}"

    def largest(self) -> Bucket:
        """The largest size of each dim over all corners; 0 without any."""
        axes = range(len(self.dims))
        return tuple(max((corner[i] for corner in self.corners), default=0) for i in axes)

    def outermost(self) -> list[Bucket]:
        """The corners that no other one holds."""
        return [
            corner
            for corner in self.corners
            if not any(
                corner != other and all(map(operator.le, corner, other)) for other in self.corners
            )
        ]

    def smallest_telling(self) -> Bucket:
        """The smallest corner that is large enough to probe padding at: 8 in each dim that goes so
        far.
        """
        wanted = [min(8, size) for size in self.largest()]
        return next((c for c in self.corners if all(map(operator.ge, c, wanted))), self.corners[-1])

    def lowest(self, corner: Bucket) -> Bucket:
        """The smallest sizes that a corner serves: in each dim one more than the next smaller
        corner's.
        """
        below = [
            [0, *(other[i] for other in self.corners if other[i] < size)]
            for i, size in enumerate(corner)
        ]
        return tuple(max(sizes) + 1 for sizes in below)

    def way(
        self, sizes: Bucket, axes: Sequence[int] = (), unpadded: frozenset[int] = frozenset()
    ) -> Way:
        """The cheapest way to serve `sizes`.

        Args:
            sizes: of the dims, each at least 1.
            axes: the dims along which a call may be cut.
            unpadded: the dims that take the call's own size, whether the list has it or not.
        """
        best = Way()
        bucket = self.choose(sizes, unpadded)
        if bucket is not None:
            best = Way(self.price(bucket), bucket)
        if bucket is None or self.costs is not None:
            for axis in axes:
                best = min(best, self._cut(sizes, axis, unpadded), key=lambda way: way.cost)
        eager = math.inf if self.costs is None else self.costs.eager_of(sizes)
        return Way(eager) if eager < best.cost < math.inf else best

    def choose(self, sizes: Bucket, unpadded: frozenset[int] = frozenset()) -> Bucket | None:
        """The cheapest bucket that holds `sizes`, or None. Dims in `unpadded` take the call's own
        size.
        """
        if self.exact or len(unpadded) == len(sizes):
            return sizes
        if unpadded:
            return self._choose_fitted(sizes, unpadded)
        if self._sizes:
            at = bisect.bisect_left(self._sizes, sizes[0])
            return self._from[at] if at < len(self._from) else None
        return next((c for c in self._cheapest_first if all(map(operator.le, sizes, c))), None)

    def _choose_fitted(self, sizes: Bucket, unpadded: frozenset[int]) -> Bucket | None:
        fitted = {
            tuple(size if i in unpadded else corner[i] for i, size in enumerate(sizes)): None
            for corner in self.corners
        }
        holding = [corner for corner in fitted if all(map(operator.le, sizes, corner))]
        return min(holding, key=self.price, default=None)

    def cover(
        self, sizes: Bucket, axis: int, unpadded: frozenset[int] = frozenset()
    ) -> list[Piece] | None:
        """Cut `sizes` along dim `axis` into at most 16 pieces at the least cost, or None.

        The last piece carries the padding.
        """
        return list(self._cut(sizes, axis, unpadded).pieces) or None

    def _cut(self, sizes: Bucket, axis: int, unpadded: frozenset[int]) -> Way:
        others = (*sizes[:axis], *sizes[axis + 1 :])
        key = (others, axis, unpadded)
        if key not in self._covers:
            if len(self._covers) >= _MAX_COVERS:
                self._covers.clear()
            self._covers[key] = self._cover_of(sizes, axis, unpadded)
        steps, cover = self._covers[key]
        chosen = cover.chosen(sizes[axis]) if steps else []
        if not chosen:
            return Way()
        pieces = tuple(_pieces(sizes[axis], [steps[i] for i in chosen], axis))
        return Way(cover.cost(chosen), None, pieces, axis)

    def _cover_of(
        self, sizes: Bucket, axis: int, unpadded: frozenset[int]
    ) -> tuple[list[Bucket], Cover]:
        """For each row count along `axis` the cheapest bucket that holds the other dims."""
        counts = sorted({corner[axis] for corner in self.corners})
        options = (self.choose((*sizes[:axis], n, *sizes[axis + 1 :]), unpadded) for n in counts)
        steps = sorted({step for step in options if step is not None}, key=lambda s: s[axis])
        costs = [self.price(step) for step in steps]
        overhead = 0.0 if self.costs is None else self.costs.piece
        return steps, Cover([step[axis] for step in steps], costs, overhead)


def _pieces(total: int, chosen: Iterable[Bucket], axis: int) -> list[Piece]:
    pieces, start = [], 0
    for bucket in chosen:
        stop = min(total, start + bucket[axis])
        pieces.append(Piece(start, stop, bucket))
        start = stop
    return pieces


def parse_buckets(buckets: Any, dims: tuple[str, ...]) -> BucketSet:
    """Read the `buckets` argument: a list of ints, a grid by dim name, a free-form list, or None
    for exact sizes.

    Raises:
        BucketError: empty, zero, negative or non-integer sizes, unknown or missing dims, wrong
            number of dims.
    """
    if buckets is None or (isinstance(buckets, str) and buckets == "auto"):
        return BucketSet(dims)
    if isinstance(buckets, Mapping):
        return BucketSet(dims, itertools.product(*_axes_of_grid(buckets, dims)))
    if isinstance(buckets, (str, bytes)) or not isinstance(buckets, Iterable):
        raise BucketError(
            f"`buckets` is {buckets!r}; pass a list such as [8, 16, 32], a dict per dim, or None."
        )
    corners = [_corner(entry, dims) for entry in buckets]
    if not corners:
        raise BucketError("`buckets` is empty; pass at least one size, or None for exact sizes.")
    return BucketSet(dims, corners)


def _axes_of_grid(grid: Mapping[str, Any], dims: tuple[str, ...]) -> list[list[int]]:
    if set(grid) != set(dims):
        raise BucketError(
            f"`buckets` names the dims {sorted(map(str, grid))}, "
            f"`dynamic_shapes` names {sorted(dims)}; "
            "they must be the same."
        )
    for dim, sizes in grid.items():
        if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Iterable) or not list(sizes):
            raise BucketError(f"`buckets[{dim!r}]` is {sizes!r}; pass a list of at least one size.")
    return [[_size(size, dim) for size in grid[dim]] for dim in dims]


def _corner(entry: Any, dims: tuple[str, ...]) -> Bucket:
    sizes = tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)
    if len(sizes) != len(dims):
        raise BucketError(
            f"bucket {entry!r} has {len(sizes)} size(s) for the {len(dims)} dynamic dim(s) "
            f"{', '.join(dims)}; "
            'name every dim in `dynamic_shapes`, e.g. {"x": {0: "batch", 1: "seq"}}.'
        )
    return tuple(_size(size, dim) for size, dim in zip(sizes, dims, strict=True))


def _size(value: Any, dim: str) -> int:
    try:
        size = operator.index(value)
    except TypeError:
        size = 0
    if size < 1 or isinstance(value, bool):
        raise BucketError(f"bucket size {value!r} of dim {dim!r} is not a positive integer.")
    return size
