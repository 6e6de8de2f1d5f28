"""Everything about serving one form of call from one graph, computed once: the hit path runs this
and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphcache.cache import Entry
from graphcache.errors import Fallback
from graphcache.graphs import Backend
from graphcache.padding import (
    Fill,
    OutputAxis,
    Refill,
    Spread,
    covered,
    cut,
    head,
    spread,
    tails,
    volume,
)
from graphcache.reasons import Reason
from graphcache.signature import LEAF, unflatten
from graphcache.storages import storage_id

Axes = Sequence[Sequence[OutputAxis]]


class CallPlan:
    """Serves calls of one form (shapes, layouts, plain values, modes) by one entry.

    Args:
        entry: the graph to replay.
        sizes: the call's sizes of the dynamic dims.
        slots: for each input of the signature, its place in call order.
        fills: for each input, the fill by dim of what must be restored beside the real rows.
        axes: for each result, how its axes follow the dims; empty if they are not known, for exact
            sizes.
        backend: what the graph was captured by; orders the caller's stream.
        lends: hand out the static outputs themselves (outputs="view"), not copies.
    """

    def __init__(
        self,
        entry: Entry,
        sizes: Sequence[int],
        slots: Sequence[int],
        fills: Sequence[Mapping[int, Fill]],
        axes: Axes,
        backend: Backend,
        lends: bool,
    ) -> None:
        signature, bucket = entry.key
        specs = signature.inputs
        self.entry = entry
        self.bucket = bucket
        self.hits = 0  # pieces served, not yet in the ledger
        self.calls = 0  # whole calls of these sizes, not yet in the traffic profile
        self.traffic: tuple[int, ...] = ()
        self.lends = lends
        self.real, self.padded = volume(sizes), volume(bucket)
        self.heads: list[Tensor] = []  # to copy into, of the tensors at the places `_copied`
        self._copied: list[int] = []
        self._spreads: dict[int, Spread] = {}  # by the place of their tensor
        self._tails: list[Refill] = []
        placed = zip(slots, entry.inputs, specs, fills, strict=True)
        for place, static, spec, fill in sorted(placed, key=lambda item: item[0]):
            to = covered(sizes, bucket, fill)
            found = spread(static, spec, sizes, to, entry.countdown)
            if found is None:
                self.heads.append(head(static, spec, sizes))
                self._copied.append(place)
            else:
                self._spreads[place] = found
            # A number stays until another plan writes there; a repeated row changes with each call.
            self._tails += tails(static, spec, to, bucket, fill)
        self._slots = slots
        views = results(entry, axes, sizes, dict(enumerate(entry.graph.outputs)))
        self.views = list(views.values())
        self._place = {index: position for position, index in enumerate(views)}
        cuts = axes or [[] for _ in entry.state]
        self._state = [
            cut(t, a, sizes) if t is not None else None
            for t, a in zip(entry.state, cuts, strict=True)
        ]
        self._enter = backend.enter
        self._give: Callable[[Tensor], Tensor] = backend.lend if lends else Tensor.clone

    def fill(self, leaves: Sequence[Tensor]) -> None:
        """Copy the call's tensors into the static inputs, and restore fills that another call left
        dirty.
        """
        entry, heads = self.entry, self.heads
        if entry.writes:
            _refuse_written(leaves, entry.writes)
        wide: Sequence[Tensor] = ()
        if self._spreads:
            wide = [leaves[place] for place in self._spreads]
            leaves = [leaves[place] for place in self._copied]
        if entry.handed_out:
            wide = [leaf.clone() for leaf in wide]
            leaves, heads = _foreign(leaves, heads, entry.inputs)
        for spread_out, leaf in zip(self._spreads.values(), wide, strict=True):
            spread_out(leaf)
        if len(leaves) == 1:
            heads[0].copy_(leaves[0])
        elif leaves:
            torch._foreach_copy_(heads, list(leaves))
        if entry.filled_for is not self or entry.handed_out:
            for refill in self._tails:
                refill()
            entry.filled_for = self

    def run(self, leaves: Sequence[Tensor], lend: bool = True) -> list[Tensor]:
        """Order the stream, fill, replay, and copy the static outputs out before another graph of
        the pool may overwrite them.
        """
        self._enter()
        self.fill(leaves)
        self.entry.graph.replay()
        give = self._give if lend else Tensor.clone
        return [give(view) for view in self.views]

    def result(self, outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> Any:
        """The module's result around these output tensors; inputs that it returns are the caller's
        own.
        """
        spec = self.entry.spec
        if spec is LEAF and outputs:
            return outputs[0]
        made: list[Any] = []
        for origin, state in zip(self.entry.origins, self._state, strict=True):
            if origin.kind == "made":
                made.append(outputs[self._place[origin.place]])
            elif origin.kind == "input":
                made.append(leaves[self._slots[origin.place]])
            elif state is not None and origin.kind == "state view":
                made.append(state.view_as(state))  # eager makes a new one each time
            else:
                made.append(state)
        return unflatten(spec, iter(made))


def results(
    entry: Entry, axes: Axes, sizes: Sequence[int], made: Mapping[int, Tensor]
) -> dict[int, Tensor]:
    """Views of what a run of the bucket made, such as the static outputs, cut to these sizes; by
    their index among the tensors that the run made.
    """
    views: dict[int, Tensor] = {}
    for origin, cuts in zip(entry.origins, axes or [[] for _ in entry.origins], strict=True):
        if origin.kind == "made":
            views[origin.place] = cut(made[origin.place], cuts, sizes)
    return views


def _refuse_written(leaves: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
    """Refuse inputs that are state of the module which the graph writes: eager sees the write in
    them, a static input holds what they were before.
    """
    written = {storage_id(tensor) for tensor in writes}
    if any(storage_id(leaf) in written for leaf in leaves):
        raise Fallback(Reason.STATE_WRITTEN, "an input shares memory with state that is written")


def _foreign(
    leaves: Sequence[Tensor], heads: Sequence[Tensor], statics: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Leave out tensors that already lie in place; copy others that overlap any static memory."""
    static = {tensor.untyped_storage().data_ptr() for tensor in statics}
    pairs = []
    for leaf, head_ in zip(leaves, heads, strict=True):
        if leaf.data_ptr() == head_.data_ptr() and leaf.stride() == head_.stride():
            continue
        shared = leaf.untyped_storage().data_ptr() in static
        pairs.append((leaf.clone() if shared else leaf, head_))
    return [leaf for leaf, _ in pairs], [head_ for _, head_ in pairs]
