"""`buckets="auto"` at run time: measures what is captured, and adopts what the policy plans.

The policy is `planning/online.py`. Reviews happen at the end of a call, in its thread; a new bucket
is captured by the next call that wants it, or by `warmup()`.
"""

from __future__ import annotations

import logging

import torch

from graphcache.ahead import captured_for, cost, failed_for
from graphcache.buckets import BucketSet
from graphcache.call import Call
from graphcache.errors import Fallback
from graphcache.frames import told
from graphcache.miss import MissPath
from graphcache.planning.cost import CostModel
from graphcache.planning.online import OnlinePlanner
from graphcache.planning.profile import TrafficProfile
from graphcache.stats import Bucket, Ledger
from graphcache.tracing import refuse_tracing

logger = logging.getLogger("graphcache")

MOST_GRAPHS = 16

Table = dict[Bucket, float]


class Adapter:
    """Keeps one cache's buckets in step with its traffic. Called under the cache's lock.

    Args:
        miss: whose buckets they are.
        ledger: where captures and changes are counted.
        max_graphs: the most buckets; None: 16.
        name: the module's, for the log.

    `due` is the number of calls at which to review next.
    """

    def __init__(self, miss: MissPath, ledger: Ledger, max_graphs: int | None, name: str) -> None:
        self._miss = miss
        self._ledger = ledger
        self._name = name
        self._max_graphs = max_graphs or MOST_GRAPHS
        self._tables: dict[str, Table] = {}
        self._own: CostModel | None = None
        self._failed: set[Bucket] = set()
        self.restart()

    def restart(self) -> None:
        """Begin anew, if the buckets are to be found."""
        dims = self._miss.dims
        self._planner = OnlinePlanner(dims.names, dims.limits, self._max_graphs)
        if not self._miss.auto:
            self._planner.stop()
        self.due = self._ledger.calls + self._planner.due

    def review(self, traffic: TrafficProfile) -> bool:
        """Look at the traffic so far, and change the buckets if that pays.

        A failure ends the reviews, with a log line; the buckets stay as they are.

        Returns:
            Whether the buckets or their costs are others.
        """
        changed = self._reviewed(traffic)
        self.due = self._planner.due
        return changed

    def _reviewed(self, traffic: TrafficProfile) -> bool:
        before = self._miss.buckets
        try:
            with torch.no_grad():
                self._planner.see(traffic.counts)
                wanted = self._wanted()
        except Fallback:  # the caller is capturing or tracing, say
            self._planner.reviewed(self._ledger.calls, False)
            return False
        except Exception as error:
            self._planner.stop()
            what = "%s: buckets='auto' stays as it is, since a review raised %s"
            logger.warning(what, self._name, told(error))
            return False
        changed = wanted.corners != before.corners
        self._planner.reviewed(self._ledger.calls, changed)
        if changed:
            self._miss.adopt(wanted)
            self._ledger.replans += 1
            what = "%s: buckets='auto' after %d calls: %s, were %s"
            logger.info(what, self._name, self._ledger.calls, wanted, before)
        else:
            self._miss.buckets = wanted  # perhaps with other costs
        return wanted is not before

    def _wanted(self) -> BucketSet:
        """The buckets to have from now on.

        Raises:
            Fallback: this is not the time to replay and release graphs.
        """
        present = self._miss.buckets
        refuse_tracing()
        self._miss.refuse_capturing()
        self._miss.store.refuse_sealed()
        calls = self._miss.knowledge.examples()
        if not calls or not self._planner.calls:
            return present
        self._failed |= failed_for(self._miss, calls[0])
        costs = self._costs(calls[0])
        first = BucketSet(present.dims, self._planner.first(self._failed))
        if costs is None:
            return first if first.corners != present.corners else present
        captured = {bucket for _, bucket in self._miss.store.graphs}
        plan = self._planner.plan(costs, captured, self._captures(), self._failed)
        if plan is None or not plan.corners:
            return (first if present.exact else present).priced(costs)
        return plan.bucket_set

    def _costs(self, call: Call) -> CostModel | None:
        """What the user measured, or what was captured and timed so far; None: nothing yet."""
        known = self._miss.buckets.costs
        if isinstance(known, CostModel) and known is not self._own:
            return known
        self._measure(call)
        self._own = self._planner.priced(self._tables)
        return self._own

    def _captures(self) -> int:
        return self._ledger.captures + self._ledger.warmup_captures

    def _measure(self, call: Call) -> None:
        """Time the graphs that were captured since the last review, and eager beside them."""
        for bucket in captured_for(self._miss, call):
            if bucket not in self._tables.get("replay", {}):
                for kind, value in cost(self._miss, call, bucket).items():
                    self._tables.setdefault(kind, {})[bucket] = value
