"""Admission, capture and release of graphs: which keys may have one, and what happens when room or
memory runs out.

Owns the LRU and its backend's pool. Called under the cache's lock; captures also hold the process's
capture lock.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator

import torch
from cachetools import LRUCache

from graphcache.cache import Entry, GraphLRU, Key
from graphcache.call import Reading
from graphcache.capture import Capturer
from graphcache.errors import Fallback
from graphcache.facts import Facts
from graphcache.frames import told
from graphcache.graphs import CAPTURE_LOCK, Backend
from graphcache.preflight import plain_modes
from graphcache.reasons import Reason
from graphcache.settings import Settings
from graphcache.stats import Ledger

_EXACT_USES = 3  # uses before an exact size is captured for a module that has buckets


class GraphStore:
    """The graphs of one cache.

    Args:
        maxsize: how many graphs at most.
        settings: the bounds.
        ledger: where captures, evictions and failures are counted.
    """

    def __init__(self, maxsize: int, settings: Settings, ledger: Ledger) -> None:
        self.graphs = GraphLRU(maxsize, self._release)
        self.sealed = False
        self._settings = settings
        self._ledger = ledger
        #: Told of every entry that leaves, so that its call plans go too; set by their owner.
        self.forget: Callable[[Entry], None] = lambda entry: None
        self._captured: LRUCache[Key, None] = LRUCache(4096)

    def attach(self, backend: Backend, capturer: Capturer) -> None:
        """Capture by these from now on; there are no graphs of another backend left."""
        self._backend = backend
        self._capturer = capturer

    def entry(self, reading: Reading, facts: Facts, key: Key, why_exact: Fallback | None) -> Entry:
        """The graph of a key, captured now if that is due.

        Raises:
            Fallback: why there is none.
        """
        found = self.graphs.get(key)
        if found is None:
            self.refuse_failed(facts, key)
            self._admit(key, why_exact)
            found = self._capture(reading, facts, key)
            found.exact = why_exact is not None
        return found

    def entry_ahead(self, reading: Reading, facts: Facts, key: Key) -> Entry:
        """The graph of a key, captured now if it has none, counted as a warm-up."""
        found = self.graphs.get(key)
        if found is None:
            self.refuse_failed(facts, key)
            self.refuse_sealed()
            found = self._capture(reading, facts, key)
            found.fresh = False
            self._ledger.warmup_captures += 1
        return found

    @contextlib.contextmanager
    def borrowed(self, reading: Reading, facts: Facts, key: Key) -> Iterator[Entry]:
        """The graph of a key, or one captured for the time being, outside the LRU and the counts.

        Raises:
            Fallback: why there is none.
        """
        entry = self.graphs.get(key)
        if entry is not None:
            yield entry
            return
        self.refuse_failed(facts, key)
        self.refuse_sealed()
        started = time.perf_counter()
        entry = self._build(reading, facts, key)
        entry.capture_seconds = time.perf_counter() - started
        try:
            yield entry
        finally:
            self._release(entry)

    # Admission.

    def refuse_sealed(self) -> None:
        if self.sealed:
            remedy = "warm up what you need before `seal()`, which is for good"
            raise Fallback(Reason.NOT_ADMITTED, "the cache is sealed", remedy)

    def refuse_failed(self, facts: Facts, key: Key) -> None:
        if key[1] in facts.failed:
            raise facts.failed[key[1]].again()

    def refuse_signatures(self, signature: object) -> None:
        owners = {owner for owner, _ in self.graphs}
        if signature not in owners and len(owners) >= self._settings.max_signatures:
            raise Fallback(
                Reason.TOO_MANY_KEYS, f"{len(owners)} signatures own graphs (`max_signatures`)"
            )

    def _admit(self, key: Key, why_exact: Fallback | None) -> None:
        uses = self.graphs.count_use(key)
        self.refuse_unfit(key, why_exact, uses)

    def refuse_unfit(self, key: Key, why_exact: Fallback | None, uses: int) -> None:
        """Whether a key without a graph may have one at its `uses`-th use.

        A size that is exact because padding is not safe waits for its third use and may take half
        of the cache; the listed buckets are what the user asked for, and so is every size where no
        buckets are given. A full cache makes room only for a key that is used more than the one
        that would leave.
        """
        self.refuse_sealed()
        wanted = self._settings.capture_after
        if why_exact is not None:
            wanted = max(_EXACT_USES, wanted)
        if uses < wanted:
            raise why_exact or Fallback(
                Reason.NOT_ADMITTED, f"use {uses}; captured at use {wanted} (`capture_after`)"
            )
        if why_exact is not None and self._exact_graphs() >= max(1, self.graphs.maxsize // 2):
            raise why_exact
        self.refuse_signatures(key[0])
        if not self.graphs.has_room() and not self.graphs.outweighs(uses):
            raise Fallback(
                Reason.TOO_MANY_KEYS, f"all {len(self.graphs)} graphs are used more (`max_graphs`)"
            )
        self._refuse_memory(uses)

    def _exact_graphs(self) -> int:
        return sum(entry.exact for entry in self.graphs.entries())

    def _refuse_memory(self, uses: int) -> None:
        limit = self._settings.max_bytes
        if limit is None or not len(self.graphs) or self.graphs.outweighs(uses):
            return
        typical = min(entry.nbytes for entry in self.graphs.entries())
        if self.graph_bytes() + typical > limit:
            taken = (
                f"{self.graph_bytes():,} of {limit:,} bytes are taken (`max_bytes`), "
                f"and the smallest graph has {typical:,}"
            )
            raise Fallback(Reason.MEMORY_BUDGET, taken)

    # Capture.

    def _capture(self, reading: Reading, facts: Facts, key: Key) -> Entry:
        started = time.perf_counter()
        while not self.graphs.has_room():
            self._evict()
        try:
            entry = self._within_budget(reading, facts, key)
            entry.capture_seconds = time.perf_counter() - started
        except Fallback as fallback:
            if fallback.reason is not Reason.OUT_OF_MEMORY:
                facts.failed[key[1]] = fallback.again()
            raise
        finally:
            self._ledger.capture_seconds += time.perf_counter() - started
        self._ledger.recaptures += key in self._captured
        self._captured[key] = None
        self.graphs[key] = entry
        return entry

    def _within_budget(self, reading: Reading, facts: Facts, key: Key) -> Entry:
        """Capture; if that goes over `max_bytes`, start a new generation with this graph alone.

        One graph's reset returns next to nothing of a shared pool, so the whole
        pool goes. Hot keys come back at their next use.
        """
        entry = self._build(reading, facts, key)
        if self._fits(entry):
            return entry
        self._release(entry)
        self._evict_all()
        entry = self._build(reading, facts, key)
        if self._fits(entry):
            return entry
        taken = self.graph_bytes() + entry.static_bytes
        self._release(entry)
        self._evict_all()
        what = f"bucket {key[1]} alone takes {taken:,} bytes, more than `max_bytes`"
        raise Fallback(Reason.MEMORY_BUDGET, what)

    def _fits(self, entry: Entry) -> bool:
        limit = self._settings.max_bytes
        return limit is None or self.graph_bytes() + entry.static_bytes <= limit

    def _build(self, reading: Reading, facts: Facts, key: Key) -> Entry:
        """Capture, and once more with every other graph gone if memory runs out."""
        try:
            return self._try(reading, facts, key)
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)
        self._evict_all()
        try:
            return self._try(reading, facts, key)
        except torch.OutOfMemoryError as error:
            self._ledger.failures += 1
            traceback.clear_frames(error.__traceback__)
            raise Fallback(Reason.OUT_OF_MEMORY, str(error).splitlines()[0]) from error

    def _try(self, reading: Reading, facts: Facts, key: Key) -> Entry:
        try:
            with CAPTURE_LOCK, self._backend.aside(), plain_modes():
                return self._capturer.entry(reading, facts, key)
        except (Fallback, torch.OutOfMemoryError):
            raise
        except Exception as error:
            self._ledger.failures += 1
            traceback.clear_frames(error.__traceback__)  # they hold tensors of the pool
            if not len(self.graphs):
                self._backend.flush()  # beside live graphs it stays in the pool, for later captures
            raise Fallback(Reason.CAPTURE_FAILED, told(error)) from error

    def check_padding(self, entry: Entry, facts: Facts, smallest: Reading, middle: Reading) -> None:
        """Before a graph serves its first padded call. One that fails leaves; its bucket is
        refused.

        Args:
            entry: the graph.
            facts: what is known of its signature.
            smallest: a call of the smallest sizes that its bucket serves. Whatever changes at one
                size between there and the bucket shows at one of the two ends.
            middle: a call of half of the bucket or so. There rows much alike are tried, since what
                has room for a share of the rows (the experts of a mixture) shows it then.

        Raises:
            Fallback: padding changes real results of this graph.
        """
        with self._refusing(entry, facts):
            self._capturer.check(entry, facts)
            try:
                self._capturer.compare(entry, facts, smallest)
            except (Fallback, torch.OutOfMemoryError):
                raise
            except Exception as error:  # a size that the module does not take
                traceback.clear_frames(error.__traceback__)
                entry.picky = True
            self._capturer.compare_alike(entry, facts, middle)
            entry.checked = True

    def compare(self, entry: Entry, facts: Facts, reading: Reading) -> None:
        """Compare a graph's first padded call with eager, and its first of each size if the module
        raises at some; else as `check_padding`.
        """
        if entry.checked and (entry.picky or not entry.compared):
            with self._refusing(entry, facts):
                self._capturer.compare(entry, facts, reading)
                entry.compared = True

    @contextlib.contextmanager
    def _refusing(self, entry: Entry, facts: Facts) -> Iterator[None]:
        """Trial runs of one graph, which leaves if they refuse it."""
        try:
            with CAPTURE_LOCK, self._backend.aside(), plain_modes():
                yield
        except Fallback as fallback:
            facts.failed[entry.key[1]] = fallback.again()
            del self.graphs[entry.key]
            raise
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)
            raise Fallback(Reason.OUT_OF_MEMORY, str(error).splitlines()[0]) from error
        except Exception as error:  # eager raises the same to the caller
            traceback.clear_frames(error.__traceback__)
            raise Fallback(Reason.CAPTURE_FAILED, f"a trial run raised {told(error)}") from error

    # Release.

    def _evict(self) -> None:
        self.graphs.popitem()
        self._ledger.evictions += 1

    def _evict_all(self) -> None:
        while len(self.graphs):
            self._evict()
        self._backend.flush()

    def _release(self, entry: Entry) -> None:
        """The only end of a graph: nobody can reach it, no replay of it is in flight."""
        entry.alive = False
        entry.filled_for = None  # a cycle with its call plan would keep the static memory
        self.forget(entry)
        self._backend.drain()
        self._backend.retire(entry.graph)

    def keep(self, buckets: frozenset[tuple[int, ...]]) -> None:
        """Drop the graphs of other buckets; exact sizes stay."""
        for key, entry in list(self.graphs.items()):
            if key[1] not in buckets and not entry.exact:
                del self.graphs[key]

    def trim(self) -> None:
        """Evict down to the bound, after it was lowered."""
        while len(self.graphs) > self.graphs.maxsize:
            self._evict()

    def graph_bytes(self) -> int:
        """Reserved segments of the pool and static inputs (invariant I7)."""
        if not hasattr(self, "_backend"):
            return 0
        statics = sum(entry.static_bytes for entry in self.graphs.entries())
        return self._backend.pool_bytes() + statics

    def check(self) -> None:
        """Assert what can be seen from here: I4 and I7; for tests."""
        self.graphs.check()
        for entry in self.graphs.entries():
            assert entry.alive
            assert [static.data_ptr() for static in entry.inputs] == entry.addresses
            assert entry.graph.nbytes >= 0
