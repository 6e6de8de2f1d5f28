"""`buckets="auto"`: which buckets to have while the traffic is still being learned.

A policy without torch, fed with what was seen. The first buckets are guesses: the largest size and
the median. From then on every review solves the planning problem of recent traffic in which graphs
that exist are free and others must pay their capture within twice the calls that were seen, at most
two half-lives (ski rental: Karlin et al. 1988). To keep what there is is one of its choices, so it
moves only when the gain pays the captures.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from graphcache.planning.cost import CostModel
from graphcache.planning.plan import Plan, make_plan
from graphcache.planning.problem import Options
from graphcache.planning.profile import TrafficProfile
from graphcache.stats import Bucket

FIRST, EVERY = 8, 250
MOST_BETWEEN = 1000  # calls between reviews that change nothing
HALF_LIFE = 4000  # calls
AHEAD = 2  # times the calls seen, within which a capture must pay
HORIZONS = 2  # half-lives, at most
CAPTURES_PER_GRAPH = 3
CALLS_PER_CAPTURE = 10_000  # beyond those
STEPS_PER_DOUBLING = 32
FAR = 2  # times the elements of the largest size measured


class OnlinePlanner:
    """Decides on buckets from the sizes seen so far.

    Args:
        dims: the dims' names.
        limits: the largest size of each that will come; None: not known.
        max_graphs: the most buckets.
    """

    def __init__(
        self, dims: tuple[str, ...], limits: tuple[int | None, ...], max_graphs: int
    ) -> None:
        self._dims = dims
        self._limits = limits
        self._max_graphs = max_graphs
        self._recent = TrafficProfile(dims, HALF_LIFE)
        self._known: dict[Bucket, float] = {}
        self._interval = FIRST
        self.calls = 0.0
        self.due: float = FIRST  # calls, at which to review next

    def see(self, counts: Mapping[Bucket, float]) -> None:
        """Take in the counts of all calls so far, of sizes of at least 1."""
        for sizes, count in counts.items():
            more = count - self._known.get(sizes, 0)
            if more > 0 and min(sizes) > 0:
                self._recent.record(sizes, more)
                self.calls += more
        self._known = dict(counts)

    def _stepped(self) -> TrafficProfile:
        """Recent traffic, its sizes rounded up to 32 steps per doubling, so that a few samples look
        like the rest. Never beyond the largest size seen, which may be all that the module takes.
        """
        counts, stepped = self._recent.counts, TrafficProfile(self._dims)
        largest = tuple(max(sizes) for sizes in zip(*counts, strict=True))
        for sizes, count in counts.items():
            stepped.record(tuple(map(_stepped, sizes, largest)), count)
        return stepped

    def first(self, failed: Collection[Bucket] = ()) -> list[Bucket]:
        """Buckets to begin with: one that holds everything, by each dim, and one for the median; in
        place of what cannot be captured the largest sizes seen that can.
        """
        counts = self._stepped().counts
        top = tuple(max(sizes) for sizes in zip(*counts, strict=True))
        middle = tuple(self._median(axis) for axis in range(len(self._dims)))
        downwards = [top, *sorted(counts, key=math.prod, reverse=True)]
        largest = next((sizes for sizes in downwards if sizes not in failed), top)
        return sorted({largest, middle} - set(failed)) or [largest]

    def _median(self, axis: int) -> int:
        ordered = sorted((sizes[axis], n) for sizes, n in self._stepped().counts.items())
        left = self._recent.total / 2
        for size, count in ordered:
            left -= count
            if left <= 0:
                return size
        return ordered[-1][0]

    def priced(self, tables: Mapping[str, Mapping[Bucket, float]]) -> CostModel | None:
        """The costs to plan with, of what was measured so far; None where nothing was.

        A slope between close sizes is mostly noise, and would tell anything of sizes far beyond:
        that graphs never pay there, so that none is made and nothing more is learned. There it is
        hoped that a graph saves the same share of eager's time. One is made if that pays, and then
        measured.
        """
        if not tables:
            return None
        costs = CostModel(tables, self._dims)
        largest = max(tables["replay"], key=math.prod)
        beyond = tuple(max(sizes) for sizes in zip(*self._recent.counts, strict=True))
        replay, eager = costs.replay_of(largest), costs.eager_of(largest)
        if math.prod(beyond) <= FAR * math.prod(largest) or not replay < eager < math.inf:
            return costs
        hoped = min(costs.replay_of(beyond), costs.eager_of(beyond) * replay / eager)
        replays = {**tables["replay"], beyond: hoped}
        return CostModel({**tables, "replay": replays}, self._dims)

    def plan(
        self,
        costs: CostModel,
        captured: Iterable[Bucket],
        captures: int,
        failed: Iterable[Bucket] = (),
    ) -> Plan | None:
        """The buckets to have from now on, or None where those captures are not allowed any more.

        Args:
            costs: measured so far.
            captured: the buckets that have graphs.
            captures: how many captures there were in all.
            failed: buckets that cannot be captured.
        """
        present = tuple(sorted(set(captured)))
        options = Options(
            max_graphs=self._max_graphs,
            memory_budget=None,
            horizon=max(FIRST, min(AHEAD * self.calls, HORIZONS * HALF_LIFE)),
            align=(1,) * len(self._dims),
            include=(),
            limits=self._limits,
            prior=True,
            split=None,
            grid=False,
            seed=0,
            captured=present,
            exclude=tuple(sorted(set(failed))),
            quick=True,
        )
        plan = make_plan(self._stepped(), costs, options)
        new = len(set(plan.corners) - set(present))
        return plan if captures + new <= self.allowed() else None

    def allowed(self) -> int:
        """Captures so far, in all, that are not too many."""
        return CAPTURES_PER_GRAPH * self._max_graphs + int(self.calls // CALLS_PER_CAPTURE)

    def reviewed(self, calls: int, changed: bool) -> None:
        """Set when the next review is due: soon at first, later every 250 calls, and less often
        while nothing changes.
        """
        if calls < EVERY:
            self.due = min(2 * max(calls, FIRST), EVERY)
            return
        self._interval = EVERY if changed else min(max(2 * self._interval, EVERY), MOST_BETWEEN)
        self.due = calls + self._interval

    def stop(self) -> None:
        """No more reviews."""
        self.due = math.inf


def _stepped(size: int, largest: int) -> int:
    step = 1 << max(size.bit_length() - STEPS_PER_DOUBLING.bit_length(), 0)
    return min(-(-size // step) * step, largest)
