"""A plan for a trace with the evidence for it: rivals, the cost of fewer graphs, calls held out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from graphcache.buckets import BucketSet
from graphcache.errors import GraphCacheError
from graphcache.planning.cost import CostModel
from graphcache.planning.plan import Plan
from graphcache.planning.planner import plan_buckets
from graphcache.planning.problem import Problem
from graphcache.planning.profile import TrafficProfile, read_sizes
from graphcache.planning.rivals import rival_sets
from graphcache.planning.score import Comparison, score
from graphcache.stats import Bucket


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What buckets made of the first calls of a trace are to the calls after them.

    Args:
        planned: how many calls the buckets were made of.
        scored: how many came after them.
        scores: the plan and the rivals, all made of the first calls, on the later ones.
    """

    planned: int
    scored: int
    scores: Comparison


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A plan with the evidence for it; `str()` is for reading, `to_json()` for machines.

    Args:
        plan: made of the whole trace.
        compared: the plan and the rivals on the whole trace.
        held_out: None where all calls were to be planned on.
    """

    plan: Plan
    compared: Comparison
    held_out: HeldOut | None

    def to_json(self) -> dict[str, Any]:
        """Plain values: all that `str()` shows, the curve and the scores in full."""
        plan, held = self.plan, self.held_out
        return {
            "dims": plan.dims,
            "buckets": plan.buckets,
            "calls": plan.traffic.total,
            "sizes": len(plan.traffic),
            "padding_overhead": plan.padding_overhead,
            "expected_cost": plan.expected_cost,
            "unit": unit(plan),
            "gap": plan.gap,
            "curve": plan.curve,
            "compared": _rows(self.compared),
            "held_out": held
            and {"planned": held.planned, "scored": held.scored, "compared": _rows(held.scores)},
        }

    def __str__(self) -> str:
        parts = [str(self.plan), str(self.compared), _curve_lines(self.plan)]
        if self.held_out is not None:
            parts.append(
                f"held out: made of the first {self.held_out.planned:,} calls, scored on the "
                f"{self.held_out.scored:,} after them\n{self.held_out.scores}"
            )
        return "\n\n".join(parts)


def report(
    trace: str | Path,
    dims: Sequence[str] = ("batch",),
    cost: CostModel | None = None,
    share: float = 0.5,
    **options: Any,
) -> PlanReport:
    """Plan buckets for the calls of a CSV trace, and show what the plan is worth.

    Args:
        trace: one call a row.
        dims: the columns that hold the sizes.
        cost: what buckets cost; None: padded elements.
        share: of the calls, the first ones, that the held-out plan is made of; 1: none is.
        options: of `plan_buckets`.

    Raises:
        GraphCacheError: no such file or column, sizes that are none, no rows, a share outside 0 to
            1, or as `plan_buckets`.
    """
    if not 0 < share <= 1:
        raise GraphCacheError(f"the share to plan on is {share}; pass one above 0 and up to 1.")
    rows = list(read_sizes(trace, dims))
    if not rows:
        raise GraphCacheError(f"{trace} has no rows below its header; record some calls first.")
    plan = plan_buckets(counted(rows, dims), cost, **options)
    known = max(1, round(share * len(rows)))
    held = None
    if known < len(rows):
        first, rest = counted(rows[:known], dims), counted(rows[known:], dims)
        early = plan_buckets(first, cost, **options)
        held = HeldOut(known, len(rows) - known, later(early, rest))
    return PlanReport(plan, plan.compare(), held)


def counted(rows: Sequence[Bucket], dims: Sequence[str]) -> TrafficProfile:
    """The profile of some calls."""
    profile = TrafficProfile(dims)
    for sizes in rows:
        profile.record(sizes)
    return profile


def later(plan: Plan, traffic: TrafficProfile) -> Comparison:
    """A plan and its rivals on calls that neither knew; the rivals know the declared limits too."""
    sizes = np.array(list(plan.traffic.counts), dtype=np.int64)
    weights = np.array(list(plan.traffic.counts.values()), dtype=np.float64)
    declared = zip(plan.options.limits, sizes.max(axis=0).tolist(), strict=True)
    top = np.array([seen if limit is None else limit for limit, seen in declared])
    sizes = np.concatenate([np.minimum(sizes, top), top[None]])
    rivals = rival_sets(sizes, np.append(weights, 0.0), len(plan.corners))
    return _scored(plan, rivals, traffic)


def with_prior(plan: Plan) -> Comparison:
    """A plan and its rivals on its traffic and its prior, the measure of `Plan.curve`."""
    problem = Problem.of(plan.traffic, plan.costs, plan.options)
    sizes, weights = problem.with_prior()
    traffic = TrafficProfile(plan.dims)
    for row, weight in zip(sizes.tolist(), weights.tolist(), strict=True):
        traffic.record(tuple(row), weight)
    rivals = rival_sets(problem.sizes, problem.weights, len(plan.corners))
    return _scored(plan, rivals, traffic)


def unit(plan: Plan) -> str:
    """What the plan's costs count."""
    return "elements" if plan.costs is None else "us"


def few(plan: Plan) -> list[int]:
    """Counts of graphs that show the curve: powers of two, the chosen one, the last."""
    counts = {2**i for i in range(len(plan.curve).bit_length())}
    counts |= {len(plan.corners), len(plan.curve)}
    return sorted(count for count in counts if 1 <= count <= len(plan.curve))


def _scored(plan: Plan, rivals: dict[str, list[Bucket]], traffic: TrafficProfile) -> Comparison:
    split = plan.options.split
    axes = [] if split is None else [plan.dims.index(split)]
    scores = [score("planned", plan.bucket_set, traffic, axes)]
    for name, rival in rivals.items():
        scores.append(score(name, BucketSet(plan.dims, rival, plan.costs), traffic))
    return Comparison(scores)


def _rows(scores: Comparison) -> list[dict[str, Any]]:
    return [dataclasses.asdict(one) for one in scores]


def _curve_lines(plan: Plan) -> str:
    counts = few(plan)
    costs = [f"{plan.curve[count - 1]:,.1f}" for count in counts]
    widths = [max(len(cost), len(str(count))) for cost, count in zip(costs, counts, strict=True)]
    cells = list(zip(counts, costs, widths, strict=True))
    return (
        "graphs         " + "  ".join(f"{count:>{width}}" for count, _, width in cells) + "\n"
        "cost per call  " + "  ".join(f"{cost:>{width}}" for _, cost, width in cells)
    )
