"""The miss path: reads a call, learns what it must, chooses what serves it, admits and captures graphs.

Owns the graphs and everything known about the module. Called under the cache's lock; trials and captures also hold the
process's capture lock. Whatever stands in the way is a `Fallback`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from cachetools import LRUCache
from torch import Tensor, nn

from graphcache.buckets import parse_buckets
from graphcache.cache import Entry, GraphLRU, Key
from graphcache.call import Binder, Call, Reading, differences
from graphcache.callplan import CallPlan
from graphcache.capture import Capturer
from graphcache.dims import DynamicDims
from graphcache.errors import BucketError, Fallback
from graphcache.explain import Explanation, ProbeReport
from graphcache.facts import Facts, Learner
from graphcache.graphs import CAPTURE_LOCK, Backend, backend_for
from graphcache.padding import head
from graphcache.probe import DimFacts
from graphcache.reasons import Reason
from graphcache.route import Route, choose_route, refuse_empty
from graphcache.settings import Settings
from graphcache.signature import Modes, Signature
from graphcache.splitting import SplitPlan
from graphcache.stats import Ledger
from graphcache.tracing import refuse_capturing, refuse_tracing
from graphcache.watch import Watch, refuse_hooks

_EXACT_USES = 3  # uses before an exact size is captured for a module that has buckets
_MIN_GRAPHS = 32


class MissPath:
    """Everything between a call without a plan and its plan. See the module's docstring."""

    def __init__(
        self,
        wrapped: Callable[..., Any],
        module: nn.Module | None,
        settings: Settings,
        ledger: Ledger,
        forget: Callable[[Entry], None],
    ) -> None:
        self.name = (
            type(module).__name__
            if module is not None
            else getattr(wrapped, "__name__", type(wrapped).__name__)
        )
        self.target: Callable[..., Any] = (
            torch.compile(wrapped, dynamic=True) if settings.compile else wrapped
        )
        self.binder = Binder(_forward_of(wrapped))
        self.dims = DynamicDims(
            settings.dynamic_shapes, self.binder.parameters, self.binder.open_ended
        )
        self.buckets = parse_buckets(settings.buckets, self.dims.names)
        self.watch = Watch(module)
        self.sealed = False
        self._module = module
        self._settings = settings
        self._ledger = ledger
        self._forget = forget
        self._backend: Backend | None = None
        self._modes = Modes("cpu")
        self.graphs = GraphLRU(
            settings.max_graphs or max(_MIN_GRAPHS, len(self.buckets)), self._release
        )
        self._clear_knowledge()
        self._captured: LRUCache[Key, None] = LRUCache(4096)

    def _clear_knowledge(self) -> None:
        self._facts: LRUCache[Signature, Facts] = LRUCache(4 * self._settings.max_signatures)
        self._follows: dict[str, bool] = {}
        self._forms: LRUCache[Signature, Call] = LRUCache(self._settings.max_signatures)

    # The hit path's questions.

    def circumstances(self, form: tuple[Any, ...]) -> tuple[Any, ...]:
        """The key of a call's plan: its form, the modes it runs under, and the module's own mode."""
        modes = self._modes
        return (form, modes.context(), modes.kernels(), self.watch.state)

    def count_use(self, entry: Entry) -> None:
        """Keep the LRU's order, and count a capture once, as a capture and not as a replay too."""
        self.graphs.tick += 1
        entry.last_used = self.graphs.tick
        entry.uses += 1
        if entry.fresh:
            entry.fresh = False
            self._ledger.captures += 1
        else:
            self._ledger.replays += 1

    # Deciding.

    def decide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan | SplitPlan:
        """The plan of a call that has none, capturing its bucket if that is due.

        Raises:
            Fallback: why it has none.
        """
        reading, facts = self._known(Call(self.binder, args, kwargs))
        route = self._route(reading, facts)
        if route.bucket is None:
            return SplitPlan(reading, facts, route.dim, route.pieces)
        entry = self._entry(reading, facts, route)
        if route.bucket != reading.sizes and not entry.checked:
            self._check_padding(entry, facts)
        return self._plan(reading, facts, entry)

    def _check_padding(self, entry: Entry, facts: Facts) -> None:
        """Before a graph serves its first padded call; a graph that fails leaves, and its bucket is refused."""
        try:
            with CAPTURE_LOCK, self.backend.aside():
                self._capturer.check(entry, facts)
        except Fallback as fallback:
            facts.failed[entry.key[1]] = fallback
            del self.graphs[entry.key]
            raise

    def _plan(self, reading: Reading, facts: Facts, entry: Entry) -> CallPlan:
        fills = facts.fills(len(reading.signature.inputs))
        lend = self.backend.lend if self._settings.outputs == "view" else None
        traffic = reading.traffic
        return CallPlan(
            entry, reading.sizes, reading.call.slots, fills, facts.axes(), traffic, lend
        )

    def _known(self, call: Call) -> tuple[Reading, Facts]:
        """Read a call and learn its signature's facts, or raise what refuses it."""
        refuse_tracing()
        self.catch_up()
        if torch.is_grad_enabled() and (
            self.watch.needs_grad() or any(t.requires_grad for t in call.leaves)
        ):
            raise Fallback(Reason.GRAD)
        refuse_hooks(self.watch)
        reading = self._read(call)
        refuse_empty(reading.sizes, reading.dims)
        facts = self._facts.get(reading.signature)
        if facts is None:
            facts = self._learn(reading)
        if facts.refused is not None:
            raise facts.refused
        if reading.candidates and not self.buckets.exact and not self._trusting():
            return self._settle_followers(call, reading)
        return reading, facts

    def _read(self, call: Call, follows: dict[str, bool] | None = None) -> Reading:
        backend = self._backend_of(call)
        if backend.device.type == "cuda":
            refuse_capturing()
        follows = {**self._follows, **(follows or {})}
        return Reading(
            call, self.dims, follows, backend.device, self.buckets.exact, self.watch.state
        )

    def _learn(self, reading: Reading) -> Facts:
        owners = {key[0] for key in self.graphs}
        if len(owners) >= self._settings.max_signatures:
            raise Fallback(Reason.TOO_MANY_KEYS, f"{len(owners)} signatures own graphs already")
        if self.sealed:
            raise Fallback(Reason.NOT_ADMITTED, "sealed")
        with CAPTURE_LOCK, self.backend.aside():
            facts, seen = _harmless(lambda: self._learner.first_look(reading))
        self.watch.follow(seen.reads)
        if torch.is_grad_enabled() and self.watch.needs_grad():
            raise Fallback(Reason.GRAD)  # a tensor that only the run showed
        if self._trusting() and self.dims.implicit:
            detail = 'verify="off" pads only dims named in `dynamic_shapes`'
            facts.dims = (DimFacts(False, detail, Reason.PAD_NOT_NEUTRAL),)
        self._facts[reading.signature] = facts
        self._forms[reading.signature] = reading.call
        return facts

    def _settle_followers(self, call: Call, reading: Reading) -> tuple[Reading, Facts]:
        """Find out, once per argument name, which tensors as long as the batch follow it; then read the call again."""
        with CAPTURE_LOCK, self.backend.aside():
            found = self._learner.followers(reading)
        self._follows.update(found)
        again = self._read(call, {path: False for path in reading.candidates if path not in found})
        facts = self._facts.get(again.signature) or self._learn(again)
        if facts.refused is not None:
            raise facts.refused
        return again, facts

    def _trusting(self) -> bool:
        return self._settings.verify == "off"

    def _route(self, reading: Reading, facts: Facts) -> Route:
        """Choose a bucket or pieces; before anything is padded or split, probe."""
        bucket = self.buckets.choose(reading.sizes)
        if bucket != reading.sizes and facts.dims is None:
            largest = tuple(
                max(corner[i] for corner in self.buckets.corners)
                for i in range(len(self.buckets.dims))
            )
            if self.sealed:
                raise Fallback(Reason.NOT_ADMITTED, "sealed")
            with CAPTURE_LOCK, self.backend.aside():
                facts.dims = _harmless(lambda: self._learner.probe(reading, bucket or largest))
        return choose_route(self.buckets, reading.sizes, facts, self._settings)

    # Admission and capture.

    def _entry(self, reading: Reading, facts: Facts, route: Route, ahead: bool = False) -> Entry:
        assert route.bucket is not None
        key: Key = (reading.signature, route.bucket)
        entry = self.graphs.get(key)
        if entry is not None:
            return entry
        if route.bucket in facts.failed:
            raise facts.failed[route.bucket]
        if not ahead:
            self._admit(key, route)
        return self._capture(reading, facts, key)

    def _admit(self, key: Key, route: Route) -> None:
        """Whether a key without a graph may have one now.

        A size that is exact because padding is not safe waits for its third use and may take half of the cache; the
        listed buckets are what the user asked for, and so is every size where no buckets are given.
        """
        uses, settings = self.graphs.count_use(key), self._settings
        if self.sealed:
            raise Fallback(Reason.NOT_ADMITTED, "sealed")
        wanted = (
            settings.capture_after
            if route.why_exact is None
            else max(_EXACT_USES, settings.capture_after)
        )
        if uses < wanted:
            raise route.why_exact or Fallback(
                Reason.NOT_ADMITTED, f"use {uses} of {wanted} before a capture"
            )
        if route.why_exact is not None and self._exact_graphs() >= max(
            1, int(self.graphs.maxsize) // 2
        ):
            raise route.why_exact
        owners = {owner for owner, _ in self.graphs}
        if key[0] not in owners and len(owners) >= settings.max_signatures:
            raise Fallback(Reason.TOO_MANY_KEYS, f"{len(owners)} signatures own graphs already")
        if not self.graphs.has_room() and not self.graphs.outweighs(key):
            raise Fallback(Reason.TOO_MANY_KEYS, f"{len(self.graphs)} graphs are used more")
        if self._over_budget() and not self.graphs.outweighs(key):
            raise Fallback(
                Reason.MEMORY_BUDGET,
                f"{self.graph_bytes():,} bytes of {settings.max_bytes:,} are taken",
            )

    def _exact_graphs(self) -> int:
        return sum(bucket not in self.buckets.corners for _, bucket in self.graphs)

    def _over_budget(self) -> bool:
        """Whether a graph like those at hand would go over `max_bytes`."""
        limit = self._settings.max_bytes
        typical = min((entry.nbytes for entry in self.graphs.entries()), default=0)
        return limit is not None and len(self.graphs) > 0 and self.graph_bytes() + typical > limit

    def _capture(self, reading: Reading, facts: Facts, key: Key) -> Entry:
        started = time.perf_counter()
        while not self.graphs.has_room():
            self._evict()
        try:
            entry = self._build(reading, facts, key)
            if (
                self._settings.max_bytes is not None
                and self.graph_bytes() + entry.nbytes > self._settings.max_bytes
            ):
                entry = self._rebuild_alone(entry, reading, facts, key)
        except Fallback as fallback:
            if fallback.reason is not Reason.OUT_OF_MEMORY:
                facts.failed[key[1]] = fallback
            raise
        finally:
            self._ledger.capture_seconds += time.perf_counter() - started
        self._ledger.recaptures += key in self._captured
        self._captured[key] = None
        self.graphs[key] = entry
        return entry

    def _build(self, reading: Reading, facts: Facts, key: Key) -> Entry:
        """Capture, and once more with every other graph gone if memory runs out."""
        for last in (False, True):
            try:
                with CAPTURE_LOCK, self.backend.aside():
                    return self._capturer.entry(reading, facts, key)
            except torch.OutOfMemoryError as error:
                if last:
                    self._ledger.failures += 1
                    raise Fallback(Reason.OUT_OF_MEMORY, str(error).splitlines()[0]) from error
                self._evict_all()
            except Fallback:
                raise
            except Exception as error:
                self._ledger.failures += 1
                if not len(self.graphs):
                    self.backend.flush()  # else what it took stays in the pool, for later captures
                raise Fallback(
                    Reason.CAPTURE_FAILED, f"{type(error).__name__}: {error}".splitlines()[0]
                ) from error
        raise AssertionError("unreachable")

    def _rebuild_alone(self, entry: Entry, reading: Reading, facts: Facts, key: Key) -> Entry:
        """Over `max_bytes`: start a new generation with this graph alone; hot keys come back at their next use.

        One graph's reset returns little of a shared pool (390 -> 388 MiB measured), so the whole pool goes.
        """
        self._release(entry)
        self._evict_all()
        entry = self._build(reading, facts, key)
        if self.graph_bytes() + _static_bytes(entry) > (self._settings.max_bytes or 0):
            self._release(entry)
            self._evict_all()
            raise Fallback(
                Reason.MEMORY_BUDGET, f"bucket {key[1]} alone takes {entry.nbytes:,} bytes"
            )
        return entry

    def _evict(self) -> None:
        self.graphs.popitem()
        self._ledger.evictions += 1

    def _evict_all(self) -> None:
        while len(self.graphs):
            self._evict()
        self.backend.flush()

    def _release(self, entry: Entry) -> None:
        """The only end of a graph: nobody can reach it, no replay of it is in flight."""
        entry.alive = False
        self._forget(entry)
        backend = self.backend
        backend.drain()
        backend.retire(entry.graph)

    # Ahead of calls.

    def seen_calls(self) -> list[Call]:
        """One call of each form that was learned and not refused."""
        return [
            call
            for signature, call in self._forms.items()
            if self._facts[signature].refused is None
        ]

    def warmup_sizes(self, sizes: Iterable[Any] | None) -> list[tuple[int, ...]]:
        """Buckets to capture, largest first, so that smaller graphs reuse the pool memory of larger ones.

        Raises:
            BucketError: `sizes` that are no buckets.
        """
        wanted = self.buckets if sizes is None else parse_buckets(list(sizes), self.dims.names)
        strange = [corner for corner in wanted.corners if corner not in self.buckets.corners]
        if strange and not self.buckets.exact:
            raise BucketError(
                f"warmup sizes {strange} are no buckets; the buckets are {self.buckets.corners}."
            )
        return list(reversed(wanted.corners))

    def warm(self, call: Call, bucket: tuple[int, ...]) -> None:
        """Capture one bucket for a call's form unless it has a graph."""
        reading, facts = self._known(call)
        resized = reading.resized(bucket)
        if resized is None:
            raise Fallback(
                Reason.UNSUPPORTED_INPUT,
                "exact sizes without named dims cannot be made from a sample",
            )
        reading, facts = self._known(resized)
        if facts.dims is None and not self.buckets.exact:
            with CAPTURE_LOCK, self.backend.aside():
                facts.dims = _harmless(lambda: self._learner.probe(reading, bucket))
        entry = self._entry(reading, facts, Route(bucket), ahead=True)
        if entry.fresh:
            entry.fresh = False
            self._ledger.warmup_captures += 1

    def wait(self) -> None:
        if self._backend is not None:
            self._backend.drain()

    def static_views(self, call: Call, sizes: tuple[int, ...]) -> dict[str, Tensor]:
        reading, facts = self._known(call)
        resized = reading.resized(sizes)
        if resized is None:
            raise Fallback(
                Reason.UNSUPPORTED_INPUT,
                "exact sizes without named dims cannot be made from a sample",
            )
        reading, facts = self._known(resized)
        route = self._route(reading, facts)
        if route.bucket is None:
            raise Fallback(Reason.OVER_MAX, "a call of these sizes is served in pieces")
        entry = self._entry(reading, facts, route, ahead=True)
        if entry.fresh:
            entry.fresh = False
            self._ledger.warmup_captures += 1
        entry.handed_out = True
        inputs = reading.signature.inputs
        return {
            spec.name: head(t, spec, sizes) for spec, t in zip(inputs, entry.inputs, strict=True)
        }

    def rebucket(self, buckets: Any) -> None:
        self.buckets = parse_buckets(buckets, self.dims.names)
        for facts in self._facts.values():
            facts.failed.clear()

    # Seeing it.

    def explain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
        reading, facts = self._known(Call(self.binder, args, kwargs))
        route = self._route(reading, facts)
        sizes = dict(dims=reading.dims, sizes=reading.sizes)
        if route.bucket is None:
            return Explanation(
                "split", pieces=tuple(piece.bucket for piece in route.pieces), **sizes
            )
        key = (reading.signature, route.bucket)
        if key in self.graphs:
            return Explanation("replay", bucket=route.bucket, **sizes)
        nearest = self._nearest(key)
        if route.bucket in facts.failed or route.why_exact is not None:
            why = facts.failed.get(route.bucket) or route.why_exact
            return Explanation(
                "eager",
                bucket=route.bucket,
                reason=why.reason,
                detail=why.detail,
                nearest=nearest,
                **sizes,
            )
        return Explanation("capture", bucket=route.bucket, nearest=nearest, **sizes)

    def _nearest(self, key: Key) -> tuple[str, ...]:
        """How the captured key that is most alike differs, a line each."""
        options = []
        for signature, bucket in self.graphs:
            lines = list(differences(key[0], signature))
            if bucket != key[1]:
                lines.append(f"bucket: {key[1]}, captured {bucket}")
            options.append(tuple(lines))
        return min(options, key=len, default=())

    def probe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ProbeReport:
        reading, facts = self._known(Call(self.binder, args, kwargs))
        with CAPTURE_LOCK, self.backend.aside():
            bucket = self.buckets.choose(reading.sizes) or self.buckets.corners[-1]
            facts.dims = _harmless(lambda: self._learner.probe(reading, bucket))
        return ProbeReport(dict(zip(reading.dims, facts.dims, strict=True)))

    def graph_bytes(self) -> int:
        if self._backend is None:
            return 0
        return self._backend.pool_bytes() + sum(
            _static_bytes(entry) for entry in self.graphs.entries()
        )

    # Change and forgetting.

    def catch_up(self) -> None:
        """Look at a module that may have changed; forget every graph if its tensors moved."""
        watch = self.watch
        if watch.same():
            return
        moves = watch.moves
        watch.refresh()
        if watch.moves != moves:
            self.forget()
            self._backend = None  # it may lie on another device now

    def forget(self) -> None:
        self.graphs.clear()
        self._clear_knowledge()

    def flush(self) -> None:
        if self._backend is not None:
            self._backend.flush()

    def quarantine(self, plan: CallPlan | SplitPlan, mismatch: Fallback) -> None:
        """Never again serve a key whose result differed from eager's."""
        if isinstance(plan, SplitPlan):
            return
        signature, bucket = plan.entry.key
        facts = self._facts.get(signature)
        if facts is not None:
            facts.failed[bucket] = mismatch
        self.graphs.pop((signature, bucket), None)

    def poison(self, output: Tensor) -> None:
        self.backend.poison(output)

    def _backend_of(self, call: Call) -> Backend:
        if self._backend is None:
            device = _device_of(self._module, call.leaves)
            self._backend = backend_for(device, self._settings.backend)
            self._modes = Modes(device.type)
            trusting = self._trusting()
            self._learner = Learner(
                self.target, self._module, self._backend, self._settings.fill, trusting
            )
            self._capturer = Capturer(self._learner, self._module, self._backend)
        return self._backend

    @property
    def backend(self) -> Backend:
        """The backend of the graphs; there is one as soon as a call was read."""
        if self._backend is None:
            raise Fallback(Reason.DEVICE, "no call was seen yet")
        return self._backend

    def check(self) -> None:
        self.graphs.check()
        assert all(entry.graph.nbytes >= 0 for entry in self.graphs.entries())


def _harmless(trial: Callable[[], Any]) -> Any:
    """Run trials; what the module raises in them is no error of the call's, which eager will answer."""
    try:
        return trial()
    except Fallback:
        raise
    except torch.OutOfMemoryError as error:
        raise Fallback(Reason.OUT_OF_MEMORY, str(error).splitlines()[0]) from error
    except Exception as error:
        raise Fallback(
            Reason.CAPTURE_FAILED,
            f"a trial run raised {type(error).__name__}: {error}".splitlines()[0],
        ) from error


def _static_bytes(entry: Entry) -> int:
    return sum(static.untyped_storage().nbytes() for static in entry.inputs)


def _forward_of(wrapped: Callable[..., Any]) -> Callable[..., Any]:
    inner = getattr(wrapped, "_orig_mod", wrapped)  # torch.compile's wrapper takes *args, **kwargs
    return inner.forward if isinstance(inner, nn.Module) else inner


def _device_of(module: nn.Module | None, leaves: Sequence[Tensor]) -> torch.device:
    """The one accelerator that the module or the inputs are on, else the CPU.

    Raises:
        Fallback: `device`, if there are several.
    """
    held = [*module.parameters(), *module.buffers()] if module is not None else []
    devices = {tensor.device for tensor in (*held, *leaves) if tensor.device.type != "cpu"}
    if len(devices) > 1:
        raise Fallback(Reason.DEVICE, f"tensors on {', '.join(sorted(map(str, devices)))}")
    return devices.pop() if devices else torch.device("cpu")
