"""Serving: the straight line of a call, and the books that it keeps.

A call finds its plan (hit), or has one decided (miss: read, refuse or learn, choose a bucket,
admit, capture), then fills, replays and copies out. Whatever raises `Fallback` on the way runs
eagerly, counted with its reason; no other exception of ours leaves where eager would have succeeded
(invariant I10).
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from graphcache.adapting import Adapter
from graphcache.cache import Entry
from graphcache.callplan import CallPlan
from graphcache.errors import Fallback
from graphcache.miss import MissPath
from graphcache.planning.profile import TrafficProfile
from graphcache.reasons import Reason
from graphcache.report import FallbackReport
from graphcache.shadow import Shadow
from graphcache.signature import call_key
from graphcache.splitting import SplitPlan
from graphcache.stats import Ledger, Stats

MAX_PLANS = 4096
MAX_TRIES = 3

Plan = CallPlan | SplitPlan
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

# The module itself may refuse the call; then the caller gets its error and not ours.
_MAYBE_WRONG_INPUTS = frozenset({Reason.CAPTURE_FAILED, Reason.UNSUPPORTED_INPUT})


class Server:
    """Serves the calls of one module, one at a time.

    The hit path only counts on the plans; `settle` moves the counts to the ledger and the traffic
    profile before anybody reads them. Methods other than `call` are called under `lock`.
    """

    def __init__(
        self,
        miss: MissPath,
        ledger: Ledger,
        report: FallbackReport,
        shadow: Shadow,
        adapter: Adapter,
    ) -> None:
        self.lock = threading.RLock()
        self.ledger = ledger
        self.traffic = TrafficProfile(miss.dims.names)
        self.report = report
        self._miss = miss
        self._shadow = shadow
        self._plans: dict[Any, Plan] = {}
        self._lent: list[weakref.ref[Tensor]] = []
        self.adapter = adapter
        miss.store.forget = self.forget

    def call(self, args: Args, kwargs: Kwargs) -> Any:
        """What the module returns for a call, by a replay or eagerly."""
        try:
            with self.lock:
                if self.ledger.calls >= self.adapter.due:
                    self.review()
                if self._shadow.share and self._shadow.due():
                    result = self._shadowed(args, kwargs)
                else:
                    result = self._serve(args, kwargs, True)
                self.ledger.calls += 1
        except Fallback as fallback:
            return self._eager(fallback, args, kwargs)
        return result

    def _serve(self, args: Args, kwargs: Kwargs, whole: bool) -> Any:
        """One call by its plan. If the module is not what its plans were made for, or needs
        gradients, they go, it is looked at again and the call repeated.
        """
        watch = self._miss.watch
        for _ in range(MAX_TRIES):
            leaves: list[Tensor] = []
            plan = self._plan(args, kwargs, leaves)
            if watch.same() and not (torch.is_grad_enabled() and watch.needs_grad()):
                if isinstance(plan, SplitPlan):
                    return self._in_pieces(plan, leaves, args, kwargs)
                plan.calls += whole
                return plan.result(self._replay(plan, leaves, whole), leaves)
            self.drop_plans()
            self._miss.reread()
        raise Fallback(
            Reason.STATE_WRITTEN, f"the module changed during {MAX_TRIES} tries of this call"
        )

    def _plan(self, args: Args, kwargs: Kwargs, leaves: list[Tensor]) -> Plan:
        miss = self._miss
        form = call_key(args, kwargs, leaves)
        try:
            plan = self._plans.get((form, miss.modes.everything(), miss.watch.state))
        except TypeError as error:
            detail = f"an argument that cannot be hashed: {error}"
            raise Fallback(Reason.UNSUPPORTED_INPUT, detail) from None
        if plan is None:
            plan = self._decide(args, kwargs)
            if len(self._plans) >= MAX_PLANS:
                self._settle(self._plans.pop(next(iter(self._plans))))
            self._plans[form, miss.modes.everything(), miss.watch.state] = plan
        return plan

    def _decide(self, args: Args, kwargs: Kwargs) -> Plan:
        try:
            plan = self._miss.decide(args, kwargs)
        except Fallback as fallback:
            fallback.sizes = self._miss.sizes_read
            raise
        plan.traffic = self._miss.sizes_read or ()
        return plan

    def _replay(self, plan: CallPlan, leaves: list[Tensor], whole: bool) -> list[Tensor]:
        """Replay and count. Pieces are copied even where results are lent, since the next piece
        overwrites them.
        """
        if self._lent:
            self.take_back()
        outputs = plan.run(leaves, lend=whole)
        if plan.lends and whole:
            self._lent = [weakref.ref(output) for output in outputs]
        plan.hits += 1
        self._miss.store.graphs.touch(plan.entry)
        return outputs

    def _in_pieces(self, plan: SplitPlan, leaves: list[Tensor], args: Args, kwargs: Kwargs) -> Any:
        self.settle()
        before = self.ledger.served_so_far()
        try:
            joined = plan.join([self._piece(*plan.cut(leaves, piece)) for piece in plan.pieces])
            self._compare_cut(plan, joined, args, kwargs)
        except BaseException:
            self.settle()
            self.ledger.take_back(before)  # those pieces served nobody
            raise
        self.ledger.splits += 1
        plan.calls += 1
        return joined

    def _compare_cut(self, plan: SplitPlan, joined: Any, args: Args, kwargs: Kwargs) -> None:
        """Compare each new cut with eager once: a branch on the size shows here."""
        if plan.buckets in plan.facts.cuts or self._miss.knowledge.trusting:
            return
        if self._shadow.run(self._miss.target, joined, args, kwargs) is not None:
            detail = "in pieces its result differs from eager's"
            plan.facts.uncut = Fallback(Reason.OVER_MAX, detail)
            self.drop_plans()
            raise plan.facts.uncut.again()
        plan.facts.cuts.add(plan.buckets)

    def _piece(self, args: Args, kwargs: Kwargs) -> Any:
        try:
            return self._serve(args, kwargs, False)
        except Fallback as fallback:
            result = self._unserved(fallback, args, kwargs)
            self.ledger.fell_back(fallback.reason)
            return result

    def _unserved(self, fallback: Fallback, args: Args, kwargs: Kwargs) -> Any:
        """Report a fallback and run the module; where its own error may be the cause, it comes
        first.
        """
        suspect = fallback.reason in _MAYBE_WRONG_INPUTS
        if not suspect:
            self.report(fallback)
        result = self._miss.target(*args, **kwargs)
        if suspect:
            self.report(fallback)
        return result

    def _eager(self, fallback: Fallback, args: Args, kwargs: Kwargs) -> Any:
        result = self._unserved(fallback, args, kwargs)
        with self.lock:
            self.ledger.calls += 1
            self.ledger.fell_back(fallback.reason)
            if fallback.sizes is not None:
                self.traffic.record(fallback.sizes)
        return result

    def review(self) -> None:
        """Let `buckets="auto"` look at the traffic. Before a call, since it replays graphs: results
        that were lent are over, and those of the call are not there yet.
        """
        self.settle()
        self.take_back()
        if self.adapter.review(self.traffic):
            self.drop_rerouted()

    def _shadowed(self, args: Args, kwargs: Kwargs) -> Any:
        """One call, compared with eager. One that differs counts as nothing served: it runs eagerly
        and its key does so from now on.
        """
        self.settle()
        before = self.ledger.served_so_far()
        result = self._serve(args, kwargs, True)
        plan = self._plan(args, kwargs, [])
        if isinstance(plan, CallPlan) and (plan.entry.writes or plan.entry.draws):
            return result
        mismatch = self._shadow.run(self._miss.target, result, args, kwargs)
        if mismatch is not None:
            self.settle()
            self.ledger.take_back(before)
            self._miss.quarantine(plan, mismatch)
            self.drop_plans()
            raise mismatch
        return result

    def take_back(self) -> None:
        """Lent results are over: their memory is about to be overwritten."""
        for ref in self._lent:
            output = ref()
            if output is not None:
                self._miss.backend.poison(output)
        self._lent = []

    # The books.

    def stats(self) -> Stats:
        self.settle()
        return self.ledger.snapshot(len(self._miss.store.graphs), self._miss.store.graph_bytes())

    def settle(self) -> None:
        """Move what the hit path counted on the plans to the ledger and the traffic profile."""
        for plan in self._plans.values():
            self._settle(plan)

    def _settle(self, plan: Plan) -> None:
        if plan.calls:
            self.traffic.record(plan.traffic, plan.calls)
            plan.calls = 0
        if isinstance(plan, CallPlan) and plan.hits:
            fresh = plan.entry.fresh
            plan.entry.fresh = False
            self.ledger.served(plan.bucket, plan.real, plan.padded, plan.hits, fresh)
            plan.hits = 0

    def forget(self, entry: Entry) -> None:
        """Drop the call plans of a graph that leaves; they hold its static memory."""
        self.settle()
        plans = self._plans.items()
        for key in [k for k, p in plans if isinstance(p, CallPlan) and p.entry is entry]:
            del self._plans[key]

    def drop_plans(self) -> None:
        self.settle()
        self._plans.clear()

    def drop_rerouted(self) -> None:
        """Drop the plans of calls that other buckets serve now, and of those in pieces: to make a
        plan anew takes longer than most replays.
        """
        self.settle()
        way = self._miss.buckets.way
        self._plans = {
            key: plan
            for key, plan in self._plans.items()
            if isinstance(plan, CallPlan) and plan.bucket == way(plan.traffic).bucket
        }

    def check(self) -> None:
        """Assert the invariants of docs/design.md, section 6; for tests."""
        self._miss.store.check()
        self.settle()
        counted = self.ledger
        pieces = counted.captures + counted.replays + counted.eager
        assert pieces >= counted.calls if counted.splits else pieces == counted.calls
        assert counted.eager == counted.fallbacks.total()
        for plan in self._plans.values():
            assert isinstance(plan, SplitPlan) or plan.entry.alive
