"""What is done ahead of calls, or beside them: samples are tried, graphs are captured for warm-up,
for writing into, and for timing. Called under the cache's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from tqdm import tqdm

from graphcache.buckets import parse_buckets
from graphcache.call import Call
from graphcache.errors import BucketError, Fallback, GraphCacheError
from graphcache.miss import MissPath
from graphcache.padding import head
from graphcache.preflight import plain_modes
from graphcache.reasons import Reason


def try_out(miss: MissPath, call: Call) -> None:
    """Refuse a sample that eager refuses, or that no call of another size can be made of.

    Raises:
        Fallback: why.
    """
    try:
        miss.known(call)
    except Fallback as fallback:
        raised = fallback.reason is Reason.CAPTURE_FAILED and fallback.__cause__ is not None
        if raised or fallback.reason in (Reason.EMPTY, Reason.UNSUPPORTED_INPUT):
            raise


def warmup_sizes(miss: MissPath, sizes: Iterable[Any] | None) -> list[tuple[int, ...]]:
    """Buckets to capture, largest first: smaller graphs reuse the pool memory of larger ones.
    Where the buckets are yet to be found, these are the first.

    Raises:
        BucketError: `sizes` that are no buckets.
    """
    wanted = miss.buckets if sizes is None else parse_buckets(list(sizes), miss.dims.names)
    strange = [corner for corner in wanted.corners if corner not in miss.buckets.corners]
    if strange and not miss.buckets.exact:
        known = list(miss.buckets.corners)
        raise BucketError(f"warmup sizes {strange} are no buckets; pass some of {known}.")
    if miss.auto and miss.buckets.exact:
        miss.buckets = wanted
    return list(reversed(wanted.corners))


def warm(miss: MissPath, call: Call, bucket: tuple[int, ...]) -> None:
    """Capture one bucket for a call's form unless it has a graph, and probe its padding."""
    if not miss.buckets.exact:
        miss.probe_once(call)
    reading, facts = miss.known(miss.resized(call, bucket))
    entry = miss.store.entry_ahead(reading, facts, (reading.signature, bucket))
    if not (miss.buckets.exact or facts.unpadded(bucket)):
        miss.check_padding(entry, facts, reading)


def warm_all(
    miss: MissPath,
    calls: Sequence[Call],
    buckets: Sequence[tuple[int, ...]],
    progress: bool,
    report: Callable[[Fallback], None],
) -> None:
    """Warm each bucket for each form of call, tell of those that get no graph, and wait.

    Raises:
        GraphCacheError: nothing to capture; or what `report` raises.
    """
    if not buckets or miss.store.sealed:
        sealed = "the cache is sealed, for good; make a new one"
        why = sealed if buckets else "no buckets are given; pass `sizes`"
        raise GraphCacheError(f"warmup() has nothing to capture: {why}.")
    pairs = [(call, bucket) for bucket in buckets for call in calls]
    for call, bucket in tqdm(pairs, "graphcache", disable=not progress):
        try:
            warm(miss, call, bucket)
        except Fallback as fallback:
            report(fallback)
    miss.wait()


def read_sizes(sizes: Any, dims: Sequence[str]) -> tuple[int, ...]:
    """One size for each dim, at least 0; an int is short for one of them.

    Raises:
        GraphCacheError: anything else.
    """
    wanted = (sizes,) if hasattr(sizes, "__index__") else sizes
    if not (
        isinstance(wanted, (list, tuple, range))
        and len(wanted) == len(dims)
        and all(hasattr(n, "__index__") for n in wanted)
        and not any(isinstance(n, (bool, Tensor)) for n in wanted)
        and min(map(int, wanted)) >= 0
    ):
        raise GraphCacheError(
            f"`sizes` is {sizes!r}; pass one size for each dynamic dim: {', '.join(dims)}."
        )
    return tuple(map(int, wanted))


def static_views(miss: MissPath, call: Call, sizes: tuple[int, ...]) -> dict[str, Tensor]:
    """The heads of a bucket's static inputs, by input name."""
    reading, facts = miss.ready(miss.resized(call, sizes))
    bucket = miss.buckets.choose(sizes, facts.unpadded(sizes))
    if bucket is None:
        limit = ", ".join(map(str, miss.buckets.largest()))
        remedy = f"ask for at most {limit}"
        raise Fallback(Reason.OVER_MAX, "no bucket holds them", remedy)
    entry = miss.store.entry_ahead(reading, facts, (reading.signature, bucket))
    if bucket != sizes:
        miss.check_padding(entry, facts, reading)
    entry.handed_out = True
    pairs = zip(reading.signature.inputs, entry.inputs, strict=True)
    with plain_modes():
        return {spec.name: head(static, spec, sizes) for spec, static in pairs}


def captured_for(miss: MissPath, call: Call) -> list[tuple[int, ...]]:
    """The buckets that have graphs for calls of this form."""
    signature = miss.knowledge.read(call).signature
    return [bucket for owner, bucket in miss.store.graphs if owner == signature]


def failed_for(miss: MissPath, call: Call) -> set[tuple[int, ...]]:
    """The buckets that calls of this form cannot have."""
    return set(miss.known(call)[1].failed)


def cost(miss: MissPath, call: Call, sizes: tuple[int, ...]) -> dict[str, float]:
    """What a graph and an eager call of these sizes cost, by the kinds of `CostModel`.

    Without eager's on a backend that saves no launches, where every call would go to eager, and
    nothing would be as it is on a GPU.

    Raises:
        Fallback: they get no graph.
    """
    reading, facts = miss.known(miss.resized(call, sizes))
    with miss.store.borrowed(reading, facts, (reading.signature, sizes)) as entry:
        plan = miss.plan(reading, facts, entry)
        tensors = [tensor.detach().clone() for tensor in reading.call.tensors]
        args, kwargs = reading.call.arguments_with(tensors)
        leaves = [leaf.detach() for leaf in reading.call.leaves]
        found = {
            "replay": miss.stopwatch.replay(plan, leaves) * 1e6,
            "capture": entry.capture_seconds * 1e6,
            "nbytes": float(entry.nbytes),
        }
        if miss.backend.saves_launches:
            eager = miss.stopwatch.eager(entry, miss.target, args, kwargs)
            found["eager"] = eager * 1e6
        return found
