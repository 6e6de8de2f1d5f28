"""Serving a call in pieces along one dim whose rows are independent, and joining the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphcache.buckets import Piece
from graphcache.call import Reading
from graphcache.compare import all_same
from graphcache.errors import Fallback
from graphcache.facts import Facts
from graphcache.reasons import Reason
from graphcache.signature import flatten, unflatten


class SplitPlan:
    """How one form of call is cut. The pieces are calls of their own, with plans of their own."""

    def __init__(self, reading: Reading, facts: Facts, dim: int, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self.facts = facts
        self.buckets = tuple(piece.bucket for piece in pieces)
        self.calls = 0  # as in CallPlan
        self.traffic: tuple[int, ...] = ()
        self._spec = reading.call.spec
        self._axes: list[int | None] = [None] * len(reading.call.slots)
        for slot, spec in zip(reading.call.slots, reading.signature.inputs, strict=True):
            self._axes[slot] = next((axis for axis, d in spec.axes if d == dim), None)
        outputs = facts.dims[dim].axes if facts.dims else None
        self._joints = [axes[0].axis if axes else None for axes in outputs or ()]

    def cut(self, leaves: Sequence[Tensor], piece: Piece) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The args and kwargs of one piece: views of the caller's tensors, one of each object."""
        rows = piece.stop - piece.start
        parts: dict[int, Tensor] = {}
        for leaf, axis in zip(leaves, self._axes, strict=True):
            if id(leaf) not in parts:
                parts[id(leaf)] = leaf if axis is None else leaf.narrow(axis, piece.start, rows)
        args, kwargs = unflatten(self._spec, iter([parts[id(leaf)] for leaf in leaves]))
        return args, kwargs

    def join(self, results: Sequence[Any]) -> Any:
        """One result of the pieces' results; tensors without the dim must be the same in all, bit
        for bit.

        Raises:
            Fallback: `over-max`, where they are not, so that the whole call runs eagerly. Comparing
                waits for the device.
        """
        flat: list[list[Tensor]] = []
        for result in results:
            leaves: list[Tensor] = []
            spec = flatten(result, leaves, Reason.UNSUPPORTED_OUTPUT)
            flat.append(leaves)
        joined = []
        for axis, parts in zip(self._joints, zip(*flat, strict=True), strict=True):
            if axis is None and not all(all_same([parts[0]], [part]) for part in parts[1:]):
                raise Fallback(
                    Reason.OVER_MAX, "a result without the split dim differs between the pieces"
                )
            joined.append(parts[0] if axis is None else torch.cat(parts, axis))
        return unflatten(spec, iter(joined))
