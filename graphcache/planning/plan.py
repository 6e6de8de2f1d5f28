"""A plan: buckets for some traffic, what they cost, and how far from the best they can be."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from graphcache.buckets import BucketSet, Way, parse_buckets
from graphcache.errors import BucketError, GraphCacheError
from graphcache.planning.cost import CostModel
from graphcache.planning.problem import Options, Problem
from graphcache.planning.profile import UNREADABLE, TrafficProfile, corner_of, profile_of
from graphcache.planning.rivals import rival_sets
from graphcache.planning.score import Comparison, Score, score
from graphcache.planning.solve import solve
from graphcache.stats import Bucket

_VERSION = 1


@dataclass(frozen=True, eq=False)
class Plan:
    """Buckets planned for some traffic, by `plan_buckets`.

    `GraphCache(model, buckets=plan)` uses it, its costs too.

    Args:
        dims: the dims' names, in the order of the sizes.
        corners: the buckets, one size for each dim.
        costs: the cost model that it was made with; None: padded elements.
        traffic: the profile that it was made for.
        options: what it had to keep to.
        total: what it costs per call of that traffic and its prior, captures and memory included.
        lower_bound: no plan under these options has a lower total. In one dim without pieces it is
            the total itself; with pieces it is the cost of a graph for every size, captured free.
        curve: the least serving cost found with 1, 2, .. graphs, on the same traffic and prior;
            exact in one dim without pieces.

    Example:
        >>> from graphcache import plan_buckets
        >>> plan = plan_buckets({3: 50, 4: 40, 9: 10}, max_graphs=2, prior=None)
        >>> plan.buckets, plan.lookup(5)
        ([4, 9], 9)
    """

    dims: tuple[str, ...]
    corners: tuple[Bucket, ...]
    costs: CostModel | None
    traffic: TrafficProfile
    options: Options
    total: float
    lower_bound: float
    curve: tuple[float, ...] = field(repr=False)

    @property
    def buckets(self) -> list[Any]:
        """The buckets by volume: ints in one dim, tuples in several."""
        return [_plain(corner) for corner in self.bucket_set.corners]

    @property
    def gap(self) -> float:
        """`total` / `lower_bound` - 1: at most so much does the best plan cost less."""
        return self.total / self.lower_bound - 1 if self.lower_bound > 0 else 0.0

    @cached_property
    def bucket_set(self) -> BucketSet:
        """What the runtime serves calls by."""
        return BucketSet(self.dims, self.corners, self.costs)

    def way(self, sizes: Bucket) -> Way:
        """How a call of these sizes is served."""
        axes = [] if self.options.split is None else [self.dims.index(self.options.split)]
        return self.bucket_set.way(sizes, axes)

    def lookup(self, sizes: Any) -> Any:
        """The bucket of a call: an int in one dim, else a tuple; a list of them for a call in
        pieces; None for an eager one. By bisection in one dim.

        Args:
            sizes: one positive int for each dim, or an int in one dim.

        Raises:
            GraphCacheError: anything else.
        """
        wanted = corner_of(sizes)
        positive = all(isinstance(size, int) and size >= 1 for size in wanted)
        if len(wanted) != len(self.dims) or not positive:
            raise GraphCacheError(
                f"sizes {sizes!r} for the dims {', '.join(self.dims)}; pass a positive one for "
                "each."
            )
        way = self.way(wanted)
        if way.pieces:
            return [_plain(piece.bucket) for piece in way.pieces]
        return None if way.bucket is None else _plain(way.bucket)

    @cached_property
    def _score(self) -> Score:
        axes = [] if self.options.split is None else [self.dims.index(self.options.split)]
        return score("planned", self.bucket_set, self.traffic, axes)

    @property
    def padding_overhead(self) -> float:
        """Padded / real - 1 over the calls of the traffic that graphs serve."""
        return self._score.padding_overhead

    @property
    def expected_cost(self) -> float:
        """The mean cost of a call of the traffic: microseconds, or padded elements without costs.

        Captures and the prior are left out. Where eager's cost is not known, a call that no bucket
        holds counts as a replay of its own size.
        """
        return self._score.expected_cost

    def compare(
        self,
        others: Mapping[str, Iterable[Any]] | None = None,
        traffic: TrafficProfile | Mapping[Any, float] | None = None,
    ) -> Comparison:
        """This plan beside the lists in common use (powers of two, steps of 1.2, vLLM's list, an
        exponential one, quantiles) and your own; all may leave calls to eager, none but this plan
        serves calls in pieces.

        Args:
            others: by name, bucket lists of yours, in any form that `buckets` takes.
            traffic: what to score on, such as later traffic; None: what was planned for.

        Raises:
            BucketError: a list that is none.
            GraphCacheError: traffic of other dims, or without calls.

        Example:
            >>> from graphcache import plan_buckets
            >>> plan = plan_buckets({3: 50, 4: 40, 9: 10}, max_graphs=2, prior=None)
            >>> [score.graphs for score in plan.compare({"mine": [16]})][:2]
            [2, 1]
        """
        seen = self.traffic if traffic is None else self._traffic_of(traffic)
        if not seen.total > 0:
            raise GraphCacheError("the traffic has no calls; record some first.")
        sizes = np.array(list(seen.counts), dtype=np.int64)
        weights = np.array(list(seen.counts.values()), dtype=np.float64)
        axes = [] if self.options.split is None else [self.dims.index(self.options.split)]
        scores = [score("planned", self.bucket_set, seen, axes)]
        for name, buckets in (others or {}).items():
            corners = parse_buckets(buckets, self.dims).corners
            scores.append(score(name, BucketSet(self.dims, corners, self.costs), seen))
        for name, rival in rival_sets(sizes, weights, len(self.corners)).items():
            scores.append(score(name, BucketSet(self.dims, rival, self.costs), seen))
        return Comparison(scores)

    def replan(
        self,
        traffic: TrafficProfile | Mapping[Any, float],
        *,
        horizon: float | None = None,
        captured: Iterable[Any] | None = None,
    ) -> Plan:
        """A plan for other traffic under the same options, in which graphs that exist are free.

        So it moves only where the gain over the horizon pays the captures; to keep the buckets as
        they are is one of its choices. Needs the cost of captures to be known, else it plans anew.

        Args:
            traffic: the new traffic.
            horizon: calls over which a capture must pay; None: as before.
            captured: buckets that have graphs; None: this plan's.

        Raises:
            GraphCacheError: traffic of other dims or without calls, a horizon that is not positive.
            BucketError: `captured` that is no list of buckets.
        """
        if horizon is not None and not horizon > 0:
            raise GraphCacheError(f"`horizon` is {horizon!r}; pass a positive number.")
        present = self.corners
        if captured is not None:
            given = list(captured)
            present = parse_buckets(given, self.dims).corners if given else ()
        options = replace(
            self.options,
            captured=tuple(sorted(set(present))),
            horizon=self.options.horizon if horizon is None else horizon,
        )
        return make_plan(self._traffic_of(traffic), self.costs, options)

    def _traffic_of(self, traffic: TrafficProfile | Mapping[Any, float]) -> TrafficProfile:
        seen = profile_of(traffic, self.dims)
        if seen.dims != self.dims:
            raise GraphCacheError(
                f"the traffic has the dims {', '.join(seen.dims)}, the plan "
                f"{', '.join(self.dims)}; use the same names in the same order."
            )
        return seen

    def save(self, path: str | Path) -> None:
        """Write as JSON with a version, the costs and the traffic included."""
        data = {
            "version": _VERSION,
            "dims": self.dims,
            "buckets": self.bucket_set.corners,
            "costs": self.costs and self.costs.to_json(),
            "traffic": self.traffic.to_json(),
            "options": asdict(self.options),
            "total": self.total,
            "lower_bound": self.lower_bound,
            "curve": self.curve,
        }
        Path(path).write_text(json.dumps(data))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read what `save` wrote.

        Raises:
            GraphCacheError: no such file, no plan, or one of another version.
        """
        try:
            data: dict[str, Any] = json.loads(Path(path).read_text())
            if data["version"] != _VERSION:
                raise ValueError(f"version {data['version']}")
            dims, buckets = tuple(data["dims"]), _tuples(data["buckets"])
            costs = data["costs"] and CostModel.from_json(data["costs"])
            traffic = TrafficProfile.from_json(data["traffic"])
            if not len(traffic):
                raise ValueError("no traffic")
            if dims != traffic.dims or (costs and costs.dims != dims):
                raise ValueError("the dims differ")
            return cls(
                dims,
                tuple(sorted(parse_buckets(buckets, dims).corners)) if buckets else (),
                costs,
                traffic,
                _options(data["options"], dims),
                float(data["total"]),
                float(data["lower_bound"]),
                tuple(data["curve"]),
            )
        except UNREADABLE as error:
            raise GraphCacheError(
                f"{path} is no plan of version {_VERSION} ({error}); write one with Plan.save() or "
                "`graphcache plan --out`."
            ) from error

    def __str__(self) -> str:
        unit = "elements" if self.costs is None else "us"
        rows = {
            "traffic": f"{self.traffic.total:,.0f} calls of {len(self.traffic):,} sizes, "
            f"dims {', '.join(self.dims)}",
            "buckets": f"{len(self.corners)}: {', '.join(map(str, self.buckets))}",
            "padding": f"{self.padding_overhead:.1%} of the real elements",
            "cost": f"{self.expected_cost:,.1f} {unit} per call, {self._score.eager:.1%} of the "
            "calls eager",
            "best": f"at most {max(self.gap, 0.0):.2%} cheaper can any plan be",
        }
        return "\n".join(f"{name:<8}  {text}" for name, text in rows.items())


def make_plan(traffic: TrafficProfile, cost: CostModel | None, options: Options) -> Plan:
    """A plan for checked arguments."""
    solution = solve(Problem.of(traffic, cost, options))
    corners = tuple(sorted(map(tuple, solution.corners.tolist())))
    return Plan(
        traffic.dims,
        corners,
        cost,
        traffic,
        options,
        solution.total,
        min(solution.bound, solution.total),
        solution.curve,
    )


def bucket_set(buckets: Any, dims: tuple[str, ...]) -> BucketSet:
    """Read the `buckets` argument of a cache: a plan, the path of one, or what `parse_buckets`
    reads.

    Raises:
        BucketError: buckets that cannot be used, or a plan for other dims.
        GraphCacheError: a path that holds no plan.
    """
    if isinstance(buckets, Path) or (isinstance(buckets, str) and buckets != "auto"):
        buckets = Plan.load(buckets)
    if not isinstance(buckets, Plan):
        return parse_buckets(buckets, dims)
    if buckets.dims != dims:
        raise BucketError(
            f"the plan is for the dims {', '.join(buckets.dims)}, `dynamic_shapes` names "
            f"{', '.join(dims)}; use the same names in the same order."
        )
    if not buckets.corners:  # eager is the cheapest for all; one bucket, for them to be routed past
        largest = tuple(max(sizes) for sizes in zip(*buckets.traffic.counts, strict=True))
        return BucketSet(dims, [largest], buckets.costs)
    return buckets.bucket_set


def _options(data: Mapping[str, Any], dims: Sequence[str]) -> Options:
    lists = {name: tuple(data[name]) for name in ("align", "limits")}
    buckets = {name: _tuples(data[name]) for name in ("include", "captured", "exclude")}
    return Options(**{**data, **lists, **buckets}).checked(dims)


def _tuples(rows: Iterable[Iterable[int]]) -> tuple[Bucket, ...]:
    return tuple(tuple(row) for row in rows)


def _plain(corner: Bucket) -> Any:
    return corner[0] if len(corner) == 1 else corner
