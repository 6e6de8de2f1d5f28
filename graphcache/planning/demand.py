"""The planning problem as arrays: what must be served, and which buckets may serve it.

A corner holds every point that is at most as large in each dim. A point is served by the cheapest
chosen corner that holds it, or eagerly where that is cheaper; having a corner costs its `nodes`
price (its capture and memory, per call).
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def is_amount(value: Any) -> bool:
    """Whether a value from outside is a finite number of at least 0."""
    return isinstance(value, numbers.Real) and 0 <= float(value) < math.inf


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """Points with weights, and candidate corners with prices, all in one unit of cost.

    Args:
        points: (n, d) distinct sizes.
        weights: (n,) each point's share of the calls.
        eager: (n,) the cost of a call of each point without a graph, finite.
        corners: (m, d) the candidates.
        costs: (m,) the cost of one replay.
        nodes: (m,) the price of having the corner, per call; may be 0.
        forced: (m,) corners that every plan must have.
    """

    points: Ints
    weights: Floats
    eager: Floats
    corners: Ints
    costs: Floats
    nodes: Floats
    forced: Bools

    def holds(self) -> Bools:
        """(n, m): does the corner hold the point?"""
        held = np.ones((len(self.points), len(self.corners)), dtype=bool)
        for axis in range(self.points.shape[1]):
            held &= self.points[:, axis, None] <= self.corners[None, :, axis]
        return held

    def table(self) -> Floats:
        """(n, m): the cost of a call of each point if the corner were the only one."""
        eager = self.eager[:, None]
        return np.where(self.holds(), np.minimum(self.costs[None, :], eager), eager)

    def serving(self, chosen: Ints) -> float:
        """The mean cost of a call under these corners (their indices), without their prices."""
        if not len(chosen):
            return float(self.weights @ self.eager)
        return float(self.weights @ self.only(chosen).table().min(axis=1))

    def total(self, chosen: Ints) -> float:
        """`serving` and the prices of the corners: what a plan minimises."""
        return self.serving(chosen) + float(self.nodes[chosen].sum())

    def only(self, chosen: Ints | Bools) -> Demand:
        """The same with these candidates alone."""
        return Demand(
            self.points,
            self.weights,
            self.eager,
            self.corners[chosen],
            self.costs[chosen],
            self.nodes[chosen],
            self.forced[chosen],
        )
