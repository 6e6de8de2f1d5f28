"""What to plan: traffic with a prior, candidate buckets and their prices, as a `Demand`.

In one dim the sizes stay as they are and only buckets are aligned. In several dims sizes are first
rounded up to the alignment and merged, coarser where there would be too many for a search.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphcache.errors import GraphCacheError
from graphcache.planning.corners import agglomerative, tight_corners
from graphcache.planning.cost import CostModel
from graphcache.planning.demand import Demand, Floats, Ints
from graphcache.planning.profile import TrafficProfile
from graphcache.stats import Bucket

_MOST_POINTS, _MOST_CORNERS = 1000, 3000
_FEW_POINTS, _FEW_CORNERS = 150, 400  # for a quick plan
_PRIOR = {1: (32, 64)}  # by dims: the calls that it counts for, and its points per dim
_PRIOR_OF_SEVERAL = (64, 6)


@dataclass(frozen=True, slots=True)
class Options:
    """What a plan must keep to, by the names of `plan_buckets`; per-dim values in the dims' order.

    `captured`: buckets whose capture is paid already. `exclude`: buckets that cannot be captured.
    `quick`: plan within a few milliseconds, on coarser sizes, without a bound.
    """

    max_graphs: int
    memory_budget: float | None
    horizon: float
    align: tuple[int, ...]
    include: tuple[Bucket, ...]
    limits: tuple[int | None, ...]
    prior: bool
    split: str | None
    grid: bool
    seed: int
    captured: tuple[Bucket, ...] = ()
    exclude: tuple[Bucket, ...] = ()
    quick: bool = False

    def checked(self, dims: Sequence[str]) -> Options:
        """These options.

        Raises:
            GraphCacheError: one outside its values.
        """
        positive_int("max_graphs", self.max_graphs)
        for name, values in (("align", self.align), ("limits", self.limits)):
            if len(values) != len(dims):
                raise GraphCacheError(f"`{name}` is {values}; pass one for each of {dims}.")
            for dim, value in zip(dims, values, strict=True):
                if value is not None or name == "align":
                    positive_int(f"{name} of {dim}", value)
        for name, amount in (("horizon", self.horizon), ("memory_budget", self.memory_budget)):
            if name == "horizon" or amount is not None:
                if not (isinstance(amount, numbers.Real) and amount > 0):
                    raise GraphCacheError(f"`{name}` is {amount!r}; pass a positive number.")
        if self.split is not None and self.split not in dims:
            raise GraphCacheError(
                f"`split` is {self.split!r}; pass one of {', '.join(dims)}, or None."
            )
        if not isinstance(self.seed, int) or self.seed < 0:
            raise GraphCacheError(f"`seed` is {self.seed!r}; pass an integer of at least 0.")
        return self


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Traffic, costs and options, and what follows from them.

    Args:
        dims: the dims' names.
        sizes: (n, d) the sizes seen.
        weights: (n,) their shares of the calls, of sum 1.
        calls: how many calls were seen.
        cost: measured costs; None: padded elements.
        options: what the plan must keep to.
    """

    dims: tuple[str, ...]
    sizes: Ints
    weights: Floats
    calls: float
    cost: CostModel | None
    options: Options

    @classmethod
    def of(cls, profile: TrafficProfile, cost: CostModel | None, options: Options) -> Problem:
        """Raises GraphCacheError where there is no traffic."""
        counts = {s: count for s, count in profile.counts.items() if count > 0 and min(s) > 0}
        if not counts:
            raise GraphCacheError("the profile has no calls; record some traffic first.")
        sizes = np.array(list(counts), dtype=np.int64)
        weights = np.array(list(counts.values()), dtype=np.float64)
        with np.errstate(over="ignore"):
            total = float(weights.sum())
        if not np.isfinite(total):
            raise GraphCacheError("the profile's counts add up to infinity; scale them down.")
        return cls(profile.dims, sizes, weights / total, total, cost, options)

    def price(self, corners: Ints) -> Floats:
        """(m,) the cost of one replay of each of these corners."""
        if self.cost is not None:
            return self.cost.replay(corners)
        return np.asarray(np.prod(corners, axis=1, dtype=np.float64))

    def nodes(self, corners: Ints) -> Floats:
        """(m,) the capture of each, spread over the horizon; 0 where it is paid, or not known."""
        if self.cost is None or not self.cost.knows("capture"):
            return np.zeros(len(corners))
        paid = [tuple(corner) in set(self.options.captured) for corner in corners.tolist()]
        return np.where(paid, 0.0, self.cost.of("capture", corners) / self.options.horizon)

    @property
    def eager_known(self) -> bool:
        """Whether leaving a call to eager has a price."""
        return self.cost is not None and self.cost.knows("eager")

    def demand(self) -> Demand:
        """The problem as arrays.

        What holds no call within the limits is no candidate. Without the cost of eager, every call
        within them must be held, and the limits themselves if they are declared.
        """
        sizes, weights = self.with_prior()
        points, weights, eager, corners = self._merged(sizes, weights)
        wanted = [*self.options.include, *self.options.captured, *self._dips()]
        top = self.top(sizes)
        options = {*map(tuple, corners.tolist()), *wanted, top} - set(self.options.exclude)
        corners = np.array(sorted(options or {top}), dtype=np.int64)
        costs = self.price(corners)
        if len(self.dims) > 1:
            order = np.argsort(np.prod(corners, axis=1, dtype=np.float64), kind="stable")
            corners, costs = corners[order], costs[order]
        must = set(self.options.include)
        if not self.eager_known:
            # To leave out one point costs more than to serve all of them by the dearest bucket.
            dearest = float(costs.max()) + 1.0
            least = np.maximum(weights, np.finfo(float).tiny)
            declared = any(limit is not None for limit in self.options.limits)
            largest = self._within(sizes).max(initial=0)
            others = any(corner[0] >= largest for corner in wanted)  # that hold everything
            if declared or (len(self.dims) == 1 and not others):
                must.add(top)  # which holds everything within the limits
                eager = np.full(len(points), dearest)
            elif len(self.dims) == 1:
                eager = np.full(len(points), 2 * dearest / least.min())  # even, for the line
            else:
                eager = 2 * dearest / least
        forced = np.array([tuple(corner) in must for corner in corners.tolist()], dtype=bool)
        return Demand(points, weights, eager, corners, costs, self.nodes(corners), forced)

    def _eager(self, sizes: Ints) -> Floats:
        return self.cost.eager(sizes) if self.cost and self.eager_known else np.zeros(len(sizes))

    def _within(self, sizes: Ints) -> Ints:
        """Those of the sizes that the limits allow."""
        limits = [math.inf if limit is None else limit for limit in self.options.limits]
        return np.asarray(sizes[np.all(sizes <= np.array(limits), axis=1)])

    def top(self, sizes: Ints) -> Bucket:
        """The declared limits; of dims without one the largest size."""
        within = self._within(sizes)
        largest = self._rounded(within, self.options.align).max(axis=0, initial=1)
        pairs = zip(self.options.limits, largest.tolist(), strict=True)
        return tuple(seen if limit is None else limit for limit, seen in pairs)

    def _rounded(self, sizes: Ints, align: Sequence[int]) -> Ints:
        """Up to the alignment, but not beyond the limits."""
        rounded = -(-sizes // np.array(align)) * np.array(align)
        for axis, limit in enumerate(self.options.limits):
            if limit is not None:
                below = sizes[:, axis] <= limit
                rounded[below, axis] = np.minimum(rounded[below, axis], limit)
        return np.asarray(rounded)

    def with_prior(self) -> tuple[Ints, Floats]:
        """Sizes and weights, with some weight on what the sample may have missed: geometric points
        up to the limits. In several dims these weigh as if the dims were independent, each half as
        seen and half even, since a small sample shows its dims sooner than their combinations.
        """
        if not self.options.prior:
            return self.sizes, self.weights
        strength, count = _PRIOR.get(len(self.dims), _PRIOR_OF_SEVERAL)
        within = self._within(self.sizes)
        low = within.min(axis=0, initial=int(self.sizes.max()))
        axes, shares = [], np.ones(1)
        for axis, stop in enumerate(self.top(self.sizes)):
            start = min(int(low[axis]), stop)
            levels = np.unique(np.geomspace(start, stop, count).round().astype(np.int64))
            even = np.full(len(levels), 1 / len(levels))
            seen = even if len(self.dims) == 1 else self._seen(axis, levels)
            shares = np.multiply.outer(shares, (even + seen) / 2).reshape(-1)
            axes.append(levels)
        spread = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes))
        share = strength / (self.calls + strength)
        return (
            np.concatenate([self.sizes, spread]),
            np.concatenate([self.weights * (1 - share), shares * share]),
        )

    def _seen(self, axis: int, levels: Ints) -> Floats:
        """The share of the calls up to each level of an axis, from the one before."""
        at = np.minimum(np.searchsorted(levels, self.sizes[:, axis]), len(levels) - 1)
        return np.asarray(np.bincount(at, self.weights, minlength=len(levels)), dtype=np.float64)

    def _merged(self, sizes: Ints, weights: Floats) -> tuple[Ints, Floats, Floats, Ints]:
        """Points with their weights and eager costs, and candidate corners."""
        align = list(self.options.align)
        if len(self.dims) == 1:
            points, weights, eager = _merge(sizes, sizes, weights, self._eager(sizes))
            return points, weights, eager, self._rounded(self._within(points), align)
        quick = self.options.quick
        most_points = _FEW_POINTS if quick else _MOST_POINTS
        most_corners = _FEW_CORNERS if quick else _MOST_CORNERS
        while True:
            rounded = self._rounded(sizes, align)
            points, merged, eager = _merge(rounded, sizes, weights, self._eager(sizes))
            inside = self._within(points)
            corners = self._candidates(inside) if len(points) <= most_points else None
            if corners is not None and len(corners) <= most_corners:
                return points, merged, eager, corners
            finest = int(np.argmax([len(np.unique(axis)) for axis in points.T]))
            align[finest] *= 2

    def _dips(self) -> list[Bucket]:
        """Sizes of the cost table that are cheaper than smaller ones: a kernel may be faster at a
        multiple of its tile, whether calls have that size or not.
        """
        if self.cost is None:
            return []
        table = self.cost.tables["replay"]
        sizes, costs = np.array(list(table)), np.array(list(table.values()))
        holds = np.all(sizes[:, None, :] >= sizes[None, :, :], axis=2)
        dearest = np.where(holds, costs[None, :], -np.inf).max(axis=1)
        aligned = np.all(sizes % np.array(self.options.align) == 0, axis=1)
        within = self._within(sizes[(costs < dearest) & aligned])
        return [tuple(size) for size in within.tolist()]

    def _candidates(self, points: Ints) -> Ints:
        """In more than two dims not every tight corner is one; then the boxes of merging too."""
        if not len(points) or len(self.dims) == 2:
            return tight_corners(points) if len(points) else points
        weights = np.ones(len(points))
        boxes = agglomerative(points, weights, self.price, self.options.max_graphs)
        return np.unique(np.concatenate([tight_corners(points), *boxes]), axis=0)

    def starts(self, demand: Demand, most: int) -> list[Ints]:
        """Sets of boxes from merging, by count, as indices of the demand's corners."""
        held = demand.holds().any(axis=1)
        if not held.any():
            return [np.zeros(0, dtype=np.int64)] * most
        sets = agglomerative(demand.points[held], demand.weights[held], self.price, most)
        place = {corner: i for i, corner in enumerate(map(tuple, demand.corners.tolist()))}
        return [
            np.array(
                sorted({place[c] for c in map(tuple, s.tolist()) if c in place}), dtype=np.int64
            )
            for s in sets
        ]


def positive_int(name: str, value: Any) -> int:
    """Raises GraphCacheError unless `value` is an integer of at least 1."""
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise GraphCacheError(f"`{name}` is {value!r}; pass an integer of at least 1.")
    return number


def _merge(
    points: Ints, sizes: Ints, weights: Floats, eager: Floats
) -> tuple[Ints, Floats, Floats]:
    """Equal points as one, of their weight and mean eager cost."""
    assert len(points) == len(sizes)
    distinct, at = np.unique(points, axis=0, return_inverse=True)
    at = at.reshape(-1)
    merged = np.asarray(np.bincount(at, weights), dtype=np.float64)
    cost = np.bincount(at, weights * eager) / np.maximum(merged, np.finfo(float).tiny)
    return distinct, merged, cost
