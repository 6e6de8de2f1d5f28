"""Counters: every served piece of work is counted once, as a capture, a replay or an eager run
(invariant I8).
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from graphcache.reasons import Reason

Bucket = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stats:
    """What one cache has done so far. Counts of pieces of work, elements of the dynamic dims,
    bytes, seconds.

    `captures + replays + eager == calls + extra pieces of splits`; `warmup_captures` counts apart.
    `replans` counts the changes that `buckets="auto"` made to the buckets.
    `padding_overhead` is padded / real - 1 over the pieces that graphs served.

    Example:
        >>> Stats(calls=2, captures=1, replays=1).eager
        0
    """

    calls: int = 0
    captures: int = 0
    replays: int = 0
    eager: int = 0
    splits: int = 0
    evictions: int = 0
    recaptures: int = 0
    warmup_captures: int = 0
    failures: int = 0
    real_elements: int = 0
    padded_elements: int = 0
    padding_overhead: float = 0.0
    graphs: int = 0
    graph_bytes: int = 0
    capture_seconds: float = 0.0
    fallbacks: dict[Reason, int] = field(default_factory=dict)
    per_bucket: dict[Any, int] = field(default_factory=dict)
    replans: int = 0

    def __str__(self) -> str:
        shown = {f.name: getattr(self, f.name) for f in fields(self)}
        width = max(map(len, shown))
        return "\n".join(f"{name:<{width}}  {_show(value)}" for name, value in shown.items())


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {count}" for key, count in value.items()) or "-"
    return f"{value:,}"


_PIECES = (
    "captures", "replays", "eager", "splits", "real_elements", "padded_elements", "fallbacks",
    "per_bucket",
)  # fmt: skip


@dataclass(slots=True)
class Ledger:
    """The mutable counters behind `Stats`; its owner holds the lock."""

    calls: int = 0
    captures: int = 0
    replays: int = 0
    eager: int = 0
    splits: int = 0
    evictions: int = 0
    recaptures: int = 0
    warmup_captures: int = 0
    replans: int = 0
    failures: int = 0
    real_elements: int = 0
    padded_elements: int = 0
    capture_seconds: float = 0.0
    fallbacks: Counter[Reason] = field(default_factory=Counter)
    per_bucket: Counter[Bucket] = field(default_factory=Counter)

    def served(self, bucket: Bucket, real: int, padded: int, count: int, fresh: bool) -> None:
        """Count `count` pieces that a graph served, and their padding; `fresh`: the first of them
        was its capture.
        """
        self.captures += fresh
        self.replays += count - fresh
        self.real_elements += real * count
        self.padded_elements += padded * count
        self.per_bucket[bucket] += count

    def served_so_far(self) -> dict[str, Any]:
        """The counters of pieces, to come back to."""
        return {name: copy.copy(getattr(self, name)) for name in _PIECES}

    def take_back(self, before: dict[str, Any]) -> None:
        """Uncount the pieces served since `before`; their captures stay, as made ahead of use."""
        self.warmup_captures += self.captures - before["captures"]
        for name, count in before.items():
            setattr(self, name, count)

    def fell_back(self, reason: Reason) -> None:
        self.eager += 1
        self.fallbacks[reason] += 1

    def snapshot(self, graphs: int, graph_bytes: int) -> Stats:
        counts = {f.name: getattr(self, f.name) for f in fields(self)}
        counts["fallbacks"] = dict(self.fallbacks)
        counts["per_bucket"] = {
            b[0] if len(b) == 1 else b: n for b, n in sorted(self.per_bucket.items())
        }
        overhead = self.padded_elements / self.real_elements - 1 if self.real_elements else 0.0
        return Stats(**counts, padding_overhead=overhead, graphs=graphs, graph_bytes=graph_bytes)
