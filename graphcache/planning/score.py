"""How a set of buckets serves some traffic: padding, cost, and what is left to eager."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from graphcache.buckets import BucketSet
from graphcache.planning.cost import CostModel
from graphcache.planning.profile import TrafficProfile
from graphcache.stats import Bucket


@dataclass(frozen=True, slots=True)
class Score:
    """How a set of buckets serves some traffic.

    Args:
        name: what the set is called.
        graphs: how many buckets it has.
        padding_overhead: padded / real - 1 over the calls that graphs serve.
        expected_cost: the mean cost of a call, the cheaper of a graph and eager, captures left out:
            microseconds where costs are known, else padded elements.
        eager: the share of the calls that run eagerly.
        nbytes: the graphs' bytes; None if not known.
    """

    name: str
    graphs: int
    padding_overhead: float
    expected_cost: float
    eager: float
    nbytes: float | None


class Comparison(tuple[Score, ...]):
    """Scores of several sets of buckets on the same traffic; `str()` is a table."""

    __slots__ = ()

    def __str__(self) -> str:
        rows = [("buckets", "graphs", "padding", "cost per call", "eager", "memory")]
        for score in self:
            memory = "-" if score.nbytes is None else f"{score.nbytes / 2**20:,.0f} MiB"
            rows.append((
                score.name, f"{score.graphs:,}", f"{score.padding_overhead:.1%}",
                f"{score.expected_cost:,.1f}", f"{score.eager:.1%}", memory,
            ))  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            f"{row[0]:<{widths[0]}}  "
            + "  ".join(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
            for row in rows
        ]
        return "\n".join(lines)


def score(
    name: str, buckets: BucketSet, traffic: TrafficProfile, axes: Sequence[int] = ()
) -> Score:
    """How these buckets serve this traffic.

    Args:
        name: what to call them.
        buckets: the set, with its costs.
        traffic: sizes and counts.
        axes: the dims along which calls may be cut.
    """
    real = padded = spent = eagerly = 0.0
    for sizes, count in traffic.counts.items():
        way = buckets.way(sizes, axes)
        if way.bucket is None and not way.pieces:
            eagerly += count
            spent += count * (way.cost if way.cost < math.inf else _unheld(buckets, sizes))
            continue
        spent += count * way.cost
        real += count * math.prod(sizes)
        served = [piece.bucket for piece in way.pieces] or [way.bucket or ()]
        padded += count * sum(map(math.prod, served))
    calls = traffic.total or 1.0
    costs = buckets.costs
    known = isinstance(costs, CostModel) and costs.knows("nbytes")
    return Score(
        name,
        len(buckets),
        padded / real - 1 if real else 0.0,
        spent / calls,
        eagerly / calls,
        float(costs.of("nbytes", buckets.corners).sum())
        if known and isinstance(costs, CostModel)
        else None,
    )


def _unheld(buckets: BucketSet, sizes: Bucket) -> float:
    eager = math.inf if buckets.costs is None else buckets.costs.eager_of(sizes)
    return eager if eager < math.inf else buckets.price(sizes)
