"""The miss path: reads a call that has no plan, and makes the plan, or says why there is none.

Brings the parts together: `watch` (is the module what it was?), `knowledge` (what may be padded?),
`route` (which bucket?), `store` (is there a graph?). Called under the cache's lock. Whatever stands
in the way is a `Fallback`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphcache.buckets import BucketSet
from graphcache.cache import Entry
from graphcache.call import Binder, Call, Reading, forward_of
from graphcache.callplan import CallPlan
from graphcache.capture import Capturer
from graphcache.dims import DynamicDims
from graphcache.errors import BucketError, Fallback, GraphCacheError
from graphcache.facts import Facts, Learner
from graphcache.forms import Form
from graphcache.frames import told
from graphcache.graphs import Backend, backend_for, device_of
from graphcache.knowledge import Knowledge
from graphcache.modes import Modes
from graphcache.padding import volume
from graphcache.planning.cost import CostModel
from graphcache.planning.plan import bucket_set
from graphcache.preflight import plain_modes
from graphcache.probe import DimFacts
from graphcache.reasons import Reason
from graphcache.route import Route, choose_route, refuse_empty
from graphcache.settings import Settings
from graphcache.signature import Signature, flatten
from graphcache.splitting import SplitPlan
from graphcache.stats import Ledger
from graphcache.store import GraphStore
from graphcache.timing import Stopwatch
from graphcache.tracing import refuse_capturing, refuse_tracing
from graphcache.watch import Watch, refuse_hooks, refuse_state

_MIN_GRAPHS = 32
_MOST_FORMS = 64
_NO_REMEDY = "nothing: buckets follow the traffic"


class MissPath:
    """Everything between a call without a plan and its plan. See the module's docstring."""

    def __init__(
        self,
        wrapped: Callable[..., Any],
        module: nn.Module | None,
        settings: Settings,
        ledger: Ledger,
    ) -> None:
        self.target = torch.compile(wrapped, dynamic=True) if settings.compile else wrapped
        self.binder = Binder(forward_of(wrapped))
        parameters, open_ended = self.binder.parameters, self.binder.open_ended
        self.dims = DynamicDims(settings.dynamic_shapes, parameters, open_ended)
        if settings.split not in (None, "auto", *self.dims.names):
            raise BucketError(
                f"`split` is {settings.split!r}; "
                f"pass 'auto', None or one of {list(self.dims.names)}."
            )
        strange = [name for name in settings.fill if name.split(".")[0] not in parameters]
        if strange and not open_ended:
            raise GraphCacheError(
                f"`fill` names {strange}; forward's parameters are {list(parameters)}."
            )
        self.auto = isinstance(settings.buckets, str) and settings.buckets == "auto"
        self.buckets = bucket_set(settings.buckets, self.dims.names)
        self.watch = Watch(module)
        self.knowledge = Knowledge(self.dims, self.exact, settings, self.watch)
        self.store = GraphStore(self._max_graphs(settings), settings, ledger)
        self._module = module
        self._settings = settings
        self._backend: Backend | None = None
        self.modes = Modes(torch.device("cpu"))
        self._forms: dict[Any, Form] = {}
        self.sizes_read: tuple[int, ...] | None = (
            None  # of the call last looked at, for the traffic
        )

    def decide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan | SplitPlan:
        """The plan of a call that has none, capturing its bucket if that is due.

        Raises:
            Fallback: why it has none.
        """
        leaves: list[Tensor] = []
        form = flatten((args, kwargs), leaves), self.modes.everything(), self.watch.state
        known = self._forms.get(form)
        plan = None if known is None else self._planned_as(known, leaves)
        return plan or self._planned_anew(args, kwargs)

    def _planned_as(self, form: Form, leaves: Sequence[Tensor]) -> CallPlan | None:
        """The plan of a call of a form that was read before; None where its graph is not there, or
        anything is yet to be tried.
        """
        facts, sizes = form.facts, form.sizes(leaves)
        if sizes is None or facts.dims is None or self.buckets.exact:
            return None
        if Reason.UNSUPPORTED_INPUT in facts.asks:
            return None  # each call's own gaps are looked at
        self.sizes_read = sizes
        self._refuse_grad(leaves)
        route = self._route(sizes, facts)
        entry = self.store.graphs.get((form.signature, route.bucket)) if route.bucket else None
        if entry is None or any(origin.kind == "input" for origin in entry.origins):
            return None
        tried = self.knowledge.trusting or (entry.checked and entry.compared and not entry.picky)
        if not (tried or route.bucket == sizes):
            return None
        return self._plan(entry, sizes, form.slots, facts)

    def _planned_anew(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan | SplitPlan:
        reading, facts, route = self.routed(Call(self.binder, args, kwargs))
        if route.bucket is None:
            return SplitPlan(reading, facts, route.dim, route.pieces)
        key = (reading.signature, route.bucket)
        entry = self.store.entry(reading, facts, key, route.why_exact)
        if route.bucket != reading.sizes:
            self.check_padding(entry, facts, reading)
            self.store.compare(entry, facts, reading)
        if not self.buckets.exact:
            self._remember(reading, facts)
        return self.plan(reading, facts, entry)

    def _remember(self, reading: Reading, facts: Facts) -> None:
        if len(self._forms) >= _MOST_FORMS:
            self._forms.clear()
        form = reading.call.spec, self.modes.everything(), self.watch.state
        self._forms[form] = Form(reading, facts, self.dims.implicit)

    def reread(self) -> None:
        """Read calls of every form anew: the module or the modes may be others."""
        self._forms.clear()

    def check_padding(self, entry: Entry, facts: Facts, reading: Reading) -> None:
        """Try a graph's padding before it is used, at half of its bucket and at the smallest sizes
        that it serves.
        """
        if entry.checked or self.knowledge.trusting:
            return
        bucket = entry.key[1]
        lowest = facts.at_least(self.buckets.lowest(bucket), bucket)
        middle = tuple(
            max(low, (low + size) // 2) for low, size in zip(lowest, bucket, strict=True)
        )
        smallest, between = (
            self.knowledge.read(self.resized(reading.call, sizes)) for sizes in (lowest, middle)
        )
        self.store.check_padding(entry, facts, smallest, between)

    def plan(self, reading: Reading, facts: Facts, entry: Entry) -> CallPlan:
        _refuse_gaps(reading, entry)
        return self._plan(entry, reading.sizes, reading.call.slots, facts)

    def _plan(
        self, entry: Entry, sizes: tuple[int, ...], slots: Sequence[int], facts: Facts
    ) -> CallPlan:
        fills = facts.fills(len(entry.inputs))
        lends = self._settings.outputs == "view"
        padded = entry.key[1] != sizes
        axes = facts.axes() if padded else []  # nothing to cut, whatever form the results have
        with plain_modes():
            return CallPlan(entry, sizes, slots, fills, axes, self.backend, lends)

    def routed(self, call: Call) -> tuple[Reading, Facts, Route]:
        """Read a call, learn what it needs, and choose what serves it."""
        reading, facts = self.ready(call)
        return reading, facts, self._route(reading.sizes, facts)

    def _route(self, sizes: tuple[int, ...], facts: Facts) -> Route:
        try:
            return choose_route(self.buckets, sizes, facts, self._settings)
        except Fallback as fallback:
            if not (self.auto and fallback.reason is Reason.OVER_MAX):
                raise
            detail = "larger than every bucket that buckets='auto' has so far"
            raise Fallback(Reason.NOT_ADMITTED, detail, _NO_REMEDY) from fallback

    def ready(self, call: Call) -> tuple[Reading, Facts]:
        """A call, and all that must be known before a bucket serves it: the probe, if it is to be
        padded.
        """
        reading, facts = self.known(call)
        if self.auto and self.buckets.exact:
            detail = "buckets='auto' has seen too few calls to plan any"
            raise Fallback(Reason.NOT_ADMITTED, detail, _NO_REMEDY)
        bucket = self.buckets.choose(reading.sizes)
        if bucket != reading.sizes and facts.dims is None:
            self.store.refuse_sealed()
            facts = self.probed(reading, bucket or self.buckets.largest())
        return reading, facts

    def probed(self, reading: Reading, bucket: tuple[int, ...]) -> Facts:
        """Probe at the smallest bucket that tells enough: it is cheaper, and what the module does
        not take at a larger one is that one's own affair.
        """
        sizes_read = self.sizes_read
        if volume(self.buckets.smallest_telling()) < volume(bucket):
            self.probe_once(reading.call)
        reading, facts = self.known(reading.call)
        if facts.dims is None:
            self.knowledge.probe(reading, facts, bucket)
        self.sizes_read = sizes_read
        return facts

    def known(self, call: Call) -> tuple[Reading, Facts]:
        self.sizes_read = None
        refuse_tracing()
        self.catch_up()
        self._refuse_grad(call.leaves)
        refuse_hooks(self.watch)
        refuse_state(self.watch)
        self.choose_backend(call)
        reading = self.knowledge.read(call)
        self.sizes_read = reading.traffic
        refuse_empty(reading.sizes, reading.dims)
        reading, facts = self.knowledge.of(reading, self._admit_signature)
        _refuse_answers(reading, facts)
        return reading, facts

    def _refuse_grad(self, leaves: Sequence[Tensor]) -> None:
        if torch.is_grad_enabled():
            if self.watch.needs_grad() or any(leaf.requires_grad for leaf in leaves):
                raise Fallback(Reason.GRAD)

    def _admit_signature(self, signature: Signature) -> None:
        self.store.refuse_sealed()
        self.store.refuse_signatures(signature)

    def probe_once(self, call: Call) -> None:
        """Probe at a small bucket, since a probe runs the module a few dozen times; and at the
        largest, if the module does not take small sizes.
        """
        telling, largest = self.buckets.smallest_telling(), self.buckets.corners[-1]
        reading, facts = self.known(self.resized(call, telling))
        if facts.dims is not None:
            return
        self.knowledge.probe(reading, facts, telling)
        found = facts.dims
        if telling != largest and not _neutral(found):
            with contextlib.suppress(Fallback):
                reading, facts = self.known(self.resized(call, largest))
                self.knowledge.probe(reading, facts, largest)
            if not _neutral(facts.dims):
                facts.dims = found

    def resized(self, call: Call, sizes: tuple[int, ...]) -> Call:
        self.catch_up()
        self.choose_backend(call)
        resized = self.knowledge.read(call).resized(sizes)
        if resized is None:
            detail = "without buckets or `dynamic_shapes` no call of another size can be made"
            raise Fallback(Reason.UNSUPPORTED_INPUT, detail)
        return resized

    def _max_graphs(self, settings: Settings) -> int:
        return settings.max_graphs or max(_MIN_GRAPHS, len(self.buckets))

    @property
    def exact(self) -> bool:
        """Whether calls are served at their own sizes, for want of buckets now and later."""
        return self.buckets.exact and not self.auto

    def rebucket(self, buckets: Any) -> None:
        """Use other buckets; costs that were measured hold for these too, unless a plan brings its
        own.
        """
        self.auto = isinstance(buckets, str) and buckets == "auto"
        wanted, costs = bucket_set(buckets, self.dims.names), self.buckets.costs
        self.adopt(wanted.priced(costs) if wanted.costs is None and costs is not None else wanted)

    def adopt(self, buckets: BucketSet) -> None:
        """Serve by these buckets from now on; graphs of others go."""
        self.buckets = buckets
        self.reread()
        self.store.graphs.maxsize = self._max_graphs(self._settings)
        self.knowledge.rebucket(self.exact)
        if not self.buckets.exact:
            self.store.keep(frozenset(self.buckets.corners))
        self.store.trim()

    def price(self, costs: CostModel) -> None:
        """Choose by these costs from now on."""
        self.buckets = self.buckets.priced(costs)

    # Change and forgetting.

    def catch_up(self) -> None:
        """Look at a module that may have changed; forget every graph if its tensors moved."""
        watch = self.watch
        if watch.same():
            return
        moves = watch.moves
        try:
            watch.refresh()
        except Exception as error:  # of what the module holds, asked in a way that it refuses
            watch.lost = True
            what = f"looking at what the module holds raised {told(error)}"
            raise Fallback(Reason.UNSUPPORTED_INPUT, what, "hold it elsewhere") from error
        if watch.moves != moves:
            self.forget()
            self._leave_device()

    def _leave_device(self) -> None:
        """Give up a backend whose device the module is no longer on."""
        if self._backend is None or self._module is None:
            return
        held = (*self._module.parameters(), *self._module.buffers())
        if any(tensor.device != self._backend.device for tensor in held):
            self._closing()
            self._backend = None

    def forget(self) -> None:
        self.reread()
        self.store.graphs.clear()
        self.knowledge.forget()

    def flush(self) -> None:
        if self._backend is not None:
            self._backend.flush()

    def wait(self) -> None:
        if self._backend is not None:
            self._backend.drain()

    def quarantine(self, plan: CallPlan | SplitPlan, mismatch: Fallback) -> None:
        """Never again serve a key whose result differed from eager's, or cut calls of its form."""
        if isinstance(plan, SplitPlan):
            plan.facts.uncut = mismatch.again()
            return
        signature, bucket = plan.entry.key
        self.knowledge.quarantine(signature, bucket, mismatch)
        self.store.graphs.pop((signature, bucket), None)

    @property
    def backend(self) -> Backend:
        """The backend of the graphs; there is one as soon as a call was read."""
        if self._backend is None:
            raise Fallback(Reason.DEVICE, "no call was seen yet")
        return self._backend

    def choose_backend(self, call: Call) -> None:
        """Find the module's device at first and after a move; refuse a capturing caller."""
        if self._backend is None:
            device = device_of(self._module, call.leaves)
            self._backend = backend_for(device, self._settings.backend)
            self._closing = weakref.finalize(self, self._backend.close)
            self.modes = Modes(self._backend.device)
            trusting, fill = self.knowledge.trusting, self._settings.fill
            learner = Learner(self.target, self._module, self._backend, fill, trusting, self.modes)
            self.knowledge.attach(self._backend, self.modes, learner)
            capturer = Capturer(learner, self._module, self._backend)
            self.store.attach(self._backend, capturer)
            self.stopwatch = Stopwatch(capturer, self._backend)
        self.refuse_capturing()

    def refuse_capturing(self) -> None:
        """Refuse a caller that is itself capturing."""
        if self._backend is not None and self._backend.device.type == "cuda":
            refuse_capturing()


def _neutral(dims: tuple[DimFacts, ...] | None) -> bool:
    return dims is not None and all(dim.neutral for dim in dims)


def _refuse_answers(reading: Reading, facts: Facts) -> None:
    """Refuse calls to which a graph would give forward another answer than eager."""
    if Reason.GRAD in facts.asks and torch.is_grad_enabled():
        raise Fallback(Reason.GRAD, "forward asks torch.is_grad_enabled()")
    if Reason.UNSUPPORTED_INPUT in facts.asks:
        for path, given in zip(reading.paths, reading.call.tensors, strict=True):
            if not _is_dense(given):
                what = f"forward asks how tensors lie in memory, and {path} has gaps or overlaps"
                raise Fallback(Reason.UNSUPPORTED_INPUT, what, f"pass {path}.contiguous()")


def _is_dense(tensor: Tensor) -> bool:
    return torch.empty_like(tensor).stride() == tensor.stride()


def _refuse_gaps(reading: Reading, entry: Entry) -> None:
    """Refuse to return an input that has gaps or overlaps as it is: `contiguous()` gives a dense
    static input back, and makes a copy of the caller's.
    """
    for origin in entry.origins:
        if origin.kind == "input":
            if not _is_dense(reading.call.tensors[origin.place]):
                detail = f"{reading.paths[origin.place]}, which is not dense, may be returned"
                raise Fallback(Reason.UNSUPPORTED_OUTPUT, detail)
