"""The LRU of graphs. No way out of it leaks one: every entry that leaves goes through `release`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cachetools import Cache
from torch import Tensor

from graphcache.graphs import Graph
from graphcache.padding import countdown
from graphcache.preflight import Origin
from graphcache.signature import Signature, Spec

Key = tuple[Signature, tuple[int, ...]]

#: Uses count half after this many further calls, as in aged-LFU admission.
HALF_LIFE = 1024


@dataclass(slots=True, eq=False)
class Entry:
    """One graph with its static inputs, and what its results are made of.

    For each result tensor `origins` says where it comes from, and `state` holds the tensor of the
    module that is returned as it is. `writes` are the module's tensors that each replay writes.
    `filled_for` is the call plan that wrote the static inputs last. `fresh` is true until the call
    that captured it is counted; `checked` once padding was tried on the graph itself, `compared`
    once with eager at a call's sizes, which a `picky` module, that raises at some, needs at each.
    `memos` is memory that the run keeps for later runs (`functools.lru_cache`) and may give up
    while the graph still reads it. `uses` and `last_used` are kept by the hit path.
    """

    key: Key
    graph: Graph
    inputs: list[Tensor]
    spec: Spec
    origins: list[Origin]
    state: list[Tensor | None]
    writes: list[Tensor]
    draws: bool
    exact: bool = False
    alive: bool = True
    fresh: bool = True
    checked: bool = False
    compared: bool = False
    picky: bool = False
    memos: list[Any] = field(default_factory=list)
    handed_out: bool = False
    capture_seconds: float = 0.0
    uses: float = 0.0
    last_used: int = 0
    filled_for: Any = None
    addresses: list[int] = field(init=False)
    countdown: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.addresses = [static.data_ptr() for static in self.inputs]
        device = self.inputs[0].device if self.inputs else None
        padded = any(spec.axes for spec in self.key[0].inputs)
        self.countdown = countdown(max(self.key[1]) if padded else 0, device)

    @property
    def nbytes(self) -> int:
        return self.graph.nbytes + self.static_bytes

    @property
    def static_bytes(self) -> int:
        owned = (*self.inputs, self.countdown)
        return sum(tensor.untyped_storage().nbytes() for tensor in owned)


class GraphLRU(Cache[Key, Entry]):
    """At most `maxsize` graphs, the least recently used one leaving first.

    The hit path only sets `entry.last_used`; the order is found when an entry must leave, over at
    most a few dozen. cachetools' own `clear` and overwriting call neither `popitem` nor
    `__delitem__`, so both are hooked here.
    """

    def __init__(self, maxsize: int, release: Callable[[Entry], None]) -> None:
        super().__init__(math.inf)  # the bound is kept here, since cachetools' own cannot change
        self._maxsize = maxsize
        self._release = release
        self._waiting: Counter[Key] = Counter()
        self._halvings = 0
        self.tick = 0  # calls so far, kept by the hit path

    @property
    def maxsize(self) -> int:
        """How many graphs at most; may be set, and eviction is then the caller's."""
        return self._maxsize

    @maxsize.setter
    def maxsize(self, maxsize: int) -> None:
        self._maxsize = maxsize

    def __setitem__(self, key: Key, entry: Entry) -> None:
        replaced = self.get(key)
        while replaced is None and not self.has_room():
            self.popitem()
        super().__setitem__(key, entry)
        self._waiting.pop(key, None)
        if replaced is not None and replaced is not entry:
            self._release(replaced)

    def __delitem__(self, key: Key) -> None:
        entry = self[key]
        super().__delitem__(key)
        self._release(entry)

    def popitem(self) -> tuple[Key, Entry]:
        """Remove, release and return the least recently used entry.

        Raises:
            KeyError: the cache is empty.
        """
        victim = self.victim()
        if victim is None:
            raise KeyError(f"{type(self).__name__} is empty")
        del self[victim.key]
        return victim.key, victim

    def clear(self) -> None:
        entries = list(self.entries())
        super().clear()
        for entry in entries:
            self._release(entry)

    def entries(self) -> Iterator[Entry]:
        return iter(self.values())

    def victim(self) -> Entry | None:
        return min(self.entries(), key=lambda entry: entry.last_used, default=None)

    def touch(self, entry: Entry) -> None:
        """Note a use of an entry; the hit path's."""
        self.tick += 1
        entry.last_used = self.tick
        entry.uses += 1

    def count_use(self, key: Key) -> int:
        """Count one use of a key that has no graph; returns its uses so far, aged."""
        self.tick += 1  # so that a flood of keys that are never captured ages too
        self._age()
        self._waiting[key] += 1
        return self._waiting[key]

    def has_room(self) -> bool:
        return len(self) < self._maxsize

    def uses(self, key: Key) -> int:
        """Uses so far of a key that has no graph."""
        return self._waiting[key]

    def outweighs(self, uses: int) -> bool:
        """Whether a key of so many uses is used more than the entry that would leave for it.

        So a sweep of sizes that come once never flushes hot graphs (aged LFU admission, as in
        TinyLFU).
        """
        victim = self.victim()
        return victim is None or uses > victim.uses

    def _age(self) -> None:
        halvings = self.tick // HALF_LIFE - self._halvings
        if halvings:
            self._halvings += halvings
            for entry in self.entries():
                entry.uses /= 2**halvings
            aged = {key: count >> halvings for key, count in self._waiting.items()}
            self._waiting = Counter({key: count for key, count in aged.items() if count})

    def check(self) -> None:
        """Assert the invariants that a cache can see by itself (I4)."""
        assert len(self) == len(list(self.entries())) <= self._maxsize
        assert all(entry.alive and key == entry.key for key, entry in self.items())
