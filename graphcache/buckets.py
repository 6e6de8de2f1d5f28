"""Bucket sets: which padded sizes exist, which one serves a call, and how a larger call is cut in
pieces.

A bucket is a corner: it holds every call whose sizes are at most its own in each dim. Costs here
are padded elements, the product over the dynamic dims; measured costs come with a plan. No torch,
no numpy.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from graphcache.errors import BucketError
from graphcache.stats import Bucket

MAX_PIECES = 16


class Piece(NamedTuple):
    """Rows `start` to `stop` of the split dim, served by `bucket`."""

    start: int
    stop: int
    bucket: Bucket


class BucketSet:
    """The sorted corners over named dims; `corners` is empty when only exact sizes are served.

    Example:
        >>> BucketSet(("batch",), [(8,), (16,)]).choose((9,))
        (16,)
    """

    def __init__(self, dims: tuple[str, ...], corners: Iterable[Bucket] = ()) -> None:
        self.dims = dims
        self.corners = tuple(sorted(set(corners), key=lambda corner: (math.prod(corner), corner)))

    def __len__(self) -> int:
        return len(self.corners)

    @property
    def exact(self) -> bool:
        return not self.corners

    def __repr__(self) -> str:
        shown = [corner[0] if len(corner) == 1 else corner for corner in self.corners]
        return "exact sizes" if self.exact else f"{'x'.join(self.dims)}={shown}"

    def largest(self) -> Bucket:
        """The largest size of each dim over all corners."""
        return tuple(max(sizes) for sizes in zip(*self.corners, strict=True))

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

    def choose(self, sizes: Bucket, unpadded: frozenset[int] = frozenset()) -> Bucket | None:
        """The bucket with the fewest padded elements that holds `sizes`, or None.

        Dims in `unpadded` take the call's own size, whether the list has it or not.
        """
        if self.exact or len(unpadded) == len(sizes):
            return sizes
        best: Bucket | None = None
        for corner in self.corners:
            fitted = tuple(size if i in unpadded else corner[i] for i, size in enumerate(sizes))
            holds = all(size <= limit for size, limit in zip(sizes, fitted, strict=True))
            if holds and (best is None or math.prod(fitted) < math.prod(best)):
                best = fitted
        return best

    def cover(
        self, sizes: Bucket, axis: int, unpadded: frozenset[int] = frozenset()
    ) -> list[Piece] | None:
        """Cut `sizes` along dim `axis` into at most 16 pieces with the fewest padded elements, or
        None.

        The last piece carries the padding. Dynamic programme over the rows left, cheapest first and
        fewest pieces on a tie; if that takes more than 16 pieces, fewest pieces first.
        """
        steps = self._steps(sizes, axis, unpadded)
        if not steps:
            return None
        total = sizes[axis]
        chosen = _cheapest(total, steps, axis)
        if len(chosen) > MAX_PIECES:
            chosen = _cheapest_of_few(total, steps, axis)
        return _pieces(total, chosen, axis) if chosen else None

    def _steps(self, sizes: Bucket, axis: int, unpadded: frozenset[int]) -> list[Bucket]:
        """For each row count along `axis`, the cheapest bucket of that many rows that holds the
        other dims.
        """
        rows = {corner[axis] for corner in self.corners}
        steps = (
            self.choose((*sizes[:axis], n, *sizes[axis + 1 :]), unpadded) for n in sorted(rows)
        )
        return [step for step in steps if step is not None]


def _cheapest(total: int, steps: Sequence[Bucket], axis: int) -> list[Bucket]:
    """The buckets that together hold `total` rows along `axis`: least cost, then fewest."""
    best: list[tuple[int, int, int]] = [(0, 0, -1)]  # cost, count, last step
    for left in range(1, total + 1):
        options = []
        for i, step in enumerate(steps):
            cost, count, _ = best[max(0, left - step[axis])]
            options.append((cost + math.prod(step), count + 1, i))
        best.append(min(options))
    chosen, left = [], total
    while left > 0:
        chosen.append(steps[best[left][2]])
        left -= chosen[-1][axis]
    return chosen


def _cheapest_of_few(total: int, steps: Sequence[Bucket], axis: int) -> list[Bucket]:
    """The same with at most 16 buckets, a table for each count; empty if 16 do not hold them."""
    costs = [math.prod(step) for step in steps]
    tables: list[list[tuple[float, int]]] = [[(0, -1)] + [(math.inf, -1)] * total]
    for _ in range(MAX_PIECES):
        table: list[tuple[float, int]] = [(0, -1)]
        for left in range(1, total + 1):
            rest = (tables[-1][max(0, left - step[axis])][0] for step in steps)
            options = (c + r for c, r in zip(costs, rest, strict=True))
            table.append(min((cost, i) for i, cost in enumerate(options)))
        tables.append(table)
    least = tables[-1][total][0]
    if least == math.inf:
        return []
    fewest = next(k for k, table in enumerate(tables) if table[total][0] == least)
    chosen, left = [], total
    for table in reversed(tables[1 : fewest + 1]):
        if left > 0:
            chosen.append(steps[table[left][1]])
            left -= chosen[-1][axis]
    return chosen


def _pieces(total: int, chosen: Iterable[Bucket], axis: int) -> list[Piece]:
    pieces, start = [], 0
    for bucket in sorted(chosen, key=lambda corner: -corner[axis]):
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
