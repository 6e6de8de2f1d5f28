"""GraphCache, the public face: what a user passes, calls and reads. `serving` does the calls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from graphcache import ahead, insight
from graphcache.adapting import Adapter
from graphcache.call import Call
from graphcache.delegate import Delegate
from graphcache.errors import Fallback, Finding, GraphCacheError
from graphcache.explain import Explanation, ProbeReport
from graphcache.holdings import Holder
from graphcache.measuring import measure
from graphcache.miss import MissPath
from graphcache.padding import Fill
from graphcache.planning.cost import CostModel
from graphcache.planning.profile import TrafficProfile
from graphcache.report import FallbackReport
from graphcache.serving import Server
from graphcache.settings import Settings, parse_bytes
from graphcache.shadow import Shadow
from graphcache.stats import Ledger, Stats
from graphcache.trials import in_trial


class GraphCache(Delegate):
    """Serve a module's calls by CUDA graphs captured at a few padded sizes; run eagerly, with a
    reason, what cannot be.

    On CPU tensors a recorder of ATen operations stands in for CUDA graphs. Thread-safe: one call of
    a cache at a time uses the graphs. A replay is asynchronous on the caller's current stream; a
    capture (at the first use of a bucket) waits for the device. Results are the caller's own memory
    unless `outputs="view"`.

    Args:
        module: an nn.Module, a bound method of one, or a plain callable.
        buckets: sizes of the one dynamic dim ([8, 16, 32]), a grid by dim name, a list of tuples in
            the order of the dims; a `Plan` or the path of one; "auto": found from the traffic; or
            None: exact sizes, captured while there is room.
        dynamic_shapes: which axes of which arguments vary, in `torch.export`'s form; dims are
            strings or `torch.export.Dim`. None: one dim "batch", axis 0 of the first tensor and of
            those that follow it.
        fill: by input name, the number to pad with, or "repeat" (the last real row). Unset: the
            probe settles it.
        split: "auto", a dim's name or None: may a call above every bucket be served in pieces?
        max_graphs: bound of the LRU; None: the larger of 32 and the number of buckets.
        max_bytes: bound on `stats().graph_bytes`, an int or text such as "2GiB".
        max_signatures: how many distinct signatures may own graphs.
        capture_after: capture a bucket on its n-th use.
        max_padding_ratio: run eagerly when padded / real elements exceeds this.
        outputs: "copy", or "view": results are valid until the next call of this cache.
        verify: "capture" probes padding before it is used; a fraction also shadows that share of
            calls by eager; "off" pads only dims named in `dynamic_shapes`, unprobed.
        on_fallback: "eager", "warn", or "raise" a GraphCacheError naming module and reason.
        autograd: not yet.
        compile: compile the module first, `torch.compile(module, dynamic=True)`.
        backend: "auto", "cuda" or "recorded".
        group: not yet.

    Raises:
        BucketError: buckets or dynamic_shapes that cannot be used.
        GraphCacheError: another option outside its values.

    Example:
        >>> fast = GraphCache(torch.nn.Linear(4, 2), buckets=[8, 16])
        >>> with torch.inference_mode():
        ...     fast(torch.ones(5, 4)).shape
        torch.Size([5, 2])
    """

    _wrapped: Callable[..., Any]
    _settings: Settings
    _miss: MissPath
    _server: Server

    def __init__(
        self,
        module: Callable[..., Any],
        buckets: Any = None,
        *,
        dynamic_shapes: Any = None,
        fill: Mapping[str, Fill] | None = None,
        split: str | None = "auto",
        max_graphs: int | None = None,
        max_bytes: int | str | None = None,
        max_signatures: int = 64,
        capture_after: int = 1,
        max_padding_ratio: float | None = None,
        outputs: str = "copy",
        verify: float | str = "capture",
        on_fallback: str = "eager",
        autograd: bool = False,
        compile: bool = False,
        backend: str = "auto",
        group: Any = None,
    ) -> None:
        """Wrap `module`; nothing is run yet. The class says what the options mean."""
        if isinstance(module, type) or not callable(module):
            raise GraphCacheError(
                f"`module` is {module!r}; pass an nn.Module, a bound method or a callable."
            )
        if autograd or group is not None:
            early = "`autograd=True` is" if autograd else "`group=` is"
            raise GraphCacheError(f"{early} not yet supported; leave it out.")
        settings = Settings(
            buckets=buckets,
            dynamic_shapes=dynamic_shapes,
            fill={} if fill is None else fill,
            split=split,
            max_graphs=max_graphs,
            max_bytes=parse_bytes(max_bytes),
            max_signatures=max_signatures,
            capture_after=capture_after,
            max_padding_ratio=max_padding_ratio,
            outputs=outputs,
            verify=verify,
            on_fallback=on_fallback,
            backend=backend,
            compile=compile,
        )
        owner = getattr(module, "__self__", module)
        inner: nn.Module | None = owner if isinstance(owner, nn.Module) else None
        if isinstance(owner, torch.jit.ScriptModule):
            inner = None  # it keeps its state out of reach
        super().__init__(inner)
        own = self.__dict__  # plain assignments would reach the inner module
        own["_wrapped"], own["_settings"] = module, settings
        ledger = Ledger()
        report = FallbackReport(self._name(), settings.on_fallback)
        watched = owner if isinstance(owner, nn.Module) else Holder(module)
        own["_miss"] = MissPath(module, watched, settings, ledger)
        adapter = Adapter(self._miss, ledger, settings.max_graphs, self._name())
        own["_server"] = Server(self._miss, ledger, report, Shadow(settings.shadowed), adapter)

    # The call.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `module(*args, **kwargs)` returns, usually by one graph replay.

        Raises:
            GraphCacheError: under `on_fallback="raise"`; otherwise only what the module raises.
        """
        if torch.compiler.is_compiling() or in_trial():
            return self._miss.target(*args, **kwargs)
        return self._server.call(args, kwargs)

    # Ahead of calls.

    def warmup(
        self, sizes: Iterable[Any] | None = None, sample: Any = None, progress: bool = True
    ) -> None:
        """Capture graphs ahead of traffic, largest first, and wait until they are ready.

        Graphs are those of calls without gradients, in whatever mode this is called.

        Args:
            sizes: buckets to capture; None: all.
            sample: one call's arguments (a tuple is *args, a dict **kwargs, anything else one
                argument), which are cut or repeated to each size; None: the form of the calls seen
                so far.
            progress: show a progress bar.

        Raises:
            GraphCacheError: no sample and no call seen yet, a sample that forward does not take or
                that is empty, or nothing to warm up (no buckets and no `sizes`, or sealed); under
                `on_fallback="raise"` also what stops a capture.

        Example:
            >>> fast = GraphCache(torch.nn.Linear(4, 2).eval(), buckets=[8, 16])
            >>> fast.warmup(sample=torch.ones(1, 4), progress=False)
            >>> fast.stats().warmup_captures
            2
        """
        with self._server.lock, torch.no_grad():
            calls = [self._call(sample)] if sample is not None else self._miss.knowledge.examples()
            if not calls:
                raise GraphCacheError(
                    "warmup() has seen no call yet; pass `sample`, one call's arguments."
                )
            wanted = ahead.warmup_sizes(self._miss, sizes)
            ahead.warm_all(self._miss, calls, wanted, progress, self._server.report)

    def seal(self) -> None:
        """Never capture again, for the life of this cache: calls without a graph run eagerly, as
        `not-admitted`.
        """
        with self._server.lock:
            self._miss.store.sealed = True

    def static_inputs(self, sizes: Any, like: Any = None) -> dict[str, Tensor]:
        """Views of the static inputs that a call of these sizes would be copied into, by input
        name.

        Write into them (on the stream that calls the cache) and pass them as the call's tensors:
        nothing is copied. They stay the cache's memory: a call of another size in the same bucket
        overwrites them, and after an eviction they are ordinary tensors. Captures the bucket if it
        has no graph yet.

        Args:
            sizes: one size for each dynamic dim, or an int.
            like: a call's arguments, as in `warmup`; needed unless calls of exactly one form were
                seen.

        Raises:
            GraphCacheError: no form or several, or the reason why these sizes get no graph.

        Example:
            >>> fast = GraphCache(torch.nn.Linear(4, 2).eval(), buckets=[8])
            >>> with torch.inference_mode():
            ...     x = fast.static_inputs(3, like=torch.ones(1, 4))["input"]
            ...     fast(x.copy_(torch.ones(3, 4))).shape
            torch.Size([3, 2])
        """
        with self._server.lock, torch.no_grad():
            call = self._only_call("static_inputs", "like", like)
            wanted = ahead.read_sizes(sizes, self._miss.dims.names)
            try:
                return ahead.static_views(self._miss, call, wanted)
            except Fallback as fallback:
                why = f"{fallback}; to do: {fallback.remedy}"
                raise GraphCacheError(f"sizes {sizes} get no graph: {why}.") from fallback

    def rebucket(self, plan: Any) -> None:
        """Use other buckets from the next call on; graphs of buckets in both sets are kept.

        Args:
            plan: whatever the `buckets` argument takes.

        Raises:
            BucketError: as the constructor.
        """
        with self._server.lock:
            self._server.drop_plans()
            self._miss.rebucket(plan)
            self._server.adapter.restart()

    def _only_call(self, what: str, option: str, sample: Any) -> Call:
        """The sample's call, or the one form that was seen."""
        calls = [self._call(sample)] if sample is not None else self._miss.knowledge.examples()
        if len(calls) != 1:
            raise GraphCacheError(
                f"{what}() knows {len(calls)} forms of call; pass `{option}`, one call's arguments."
            )
        return calls[0]

    def _call(self, sample: Any) -> Call:
        args, kwargs = (sample, {}) if isinstance(sample, tuple) else ((), sample)
        if not isinstance(sample, (tuple, dict)):
            args, kwargs = (sample,), {}
        try:
            call = Call(self._miss.binder, args, kwargs)
            ahead.try_out(self._miss, call)
            return call
        except Fallback as fallback:
            raise GraphCacheError(
                f"the sample is no call of {self._name()}: {fallback.detail}; a tuple is *args, a "
                "dict **kwargs; pass (value,) for one argument that is a tuple or a dict itself."
            ) from fallback

    # Seeing it.

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """What a call would do and why: bucket, pieces or reason, and how its key differs from the
        nearest captured.

        Nothing is captured or counted; a form not seen before is tried out (trial runs, undone).

        Example:
            >>> fast = GraphCache(torch.nn.Linear(4, 2).eval(), buckets=[8])
            >>> with torch.no_grad():
            ...     fast.explain(torch.ones(3, 4)).action
            'capture'
        """
        with self._server.lock:
            try:
                return insight.explain(self._miss, args, kwargs)
            except Fallback as fallback:
                return Explanation.eager(fallback)

    def probe(self, *args: Any, **kwargs: Any) -> ProbeReport:
        """Run the padding probe on a call now and report what was found about each dim. Trial runs,
        undone.

        Example:
            >>> fast = GraphCache(torch.nn.Linear(4, 2).eval(), buckets=[8])
            >>> fast.probe(torch.ones(3, 4)).dims["batch"].neutral
            True
        """
        with self._server.lock, torch.no_grad():
            try:
                return insight.probe(self._miss, args, kwargs)
            except Fallback as fallback:
                return ProbeReport({}, fallback.reason, fallback.detail, fallback.remedy)

    def _look(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Finding], ProbeReport]:
        """Everything found about a call, for `check`."""
        with self._server.lock, torch.no_grad():
            return insight.look(self._miss, args, kwargs)

    def stats(self) -> Stats:
        """Counters so far; reading `graph_bytes` looks at the allocator, without synchronising."""
        with self._server.lock:
            return self._server.stats()

    @property
    def traffic(self) -> TrafficProfile:
        """The sizes of the calls so far, a live profile; those that raised or were traced are left
        out.
        """
        with self._server.lock:
            self._server.settle()
            return self._server.traffic

    @property
    def costs(self) -> CostModel | None:
        """The costs that calls are routed by: measured by `CostModel.measure` or
        `buckets="auto"`, or brought by a plan; None where padded elements count.
        """
        costs = self._miss.buckets.costs
        return costs if isinstance(costs, CostModel) else None

    def _measure(self, sizes: Any, sample: Any, progress: bool) -> CostModel:
        """For `CostModel.measure`."""
        with self._server.lock, torch.no_grad():
            call = self._only_call("CostModel.measure", "sample", sample)
            self._server.take_back()
            costs = measure(self._miss, call, sizes, progress)
            self._server.drop_plans()
            self._miss.price(costs)
            return costs

    @property
    def module(self) -> Any:
        """The wrapped module or callable."""
        return self._wrapped

    # Forgetting.

    def invalidate(self) -> None:
        """Forget every graph and everything learned; waits for replays in flight. Memory stays with
        the pool.
        """
        with self._server.lock:
            self._server.drop_plans()
            self._miss.forget()

    def reset(self) -> None:
        """`invalidate()`, and give the pool's memory back."""
        with self._server.lock:
            self.invalidate()
            self._miss.flush()

    def train(self, mode: bool = True) -> Any:
        if isinstance(self._wrapped, torch.jit.ScriptModule):
            self._wrapped.train(mode)  # which shares nothing with this object
        return super().train(mode)

    # Copies.

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphCache:
        return _rebuild(copy.deepcopy(self._wrapped, memo), self._settings)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self._wrapped, self._settings)

    def __repr__(self) -> str:
        if "_server" not in self.__dict__:  # construction failed
            return object.__repr__(self)
        stats = self.stats()
        served = f"graphs={stats.graphs}, calls={stats.calls}"
        return f"GraphCache({self._name()}, {self._miss.buckets}, {served})"

    def _name(self) -> str:
        """What messages call the module: its class, or the function's name."""
        known = self._inner if self._inner is not None else self._wrapped
        known = getattr(known, "_orig_mod", known)
        return getattr(known, "__name__", type(known).__name__)

    def _check(self) -> None:
        """Assert the invariants of docs/design.md, section 6; for tests."""
        with self._server.lock:
            self._server.check()


def _rebuild(wrapped: Callable[..., Any], settings: Settings) -> GraphCache:
    options = {name: getattr(settings, name) for name in Settings.__slots__}
    return GraphCache(wrapped, options.pop("buckets"), **options)
