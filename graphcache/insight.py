"""What a call would do and what is found about it, for `explain`, `probe` and `check`. Nothing is
counted; called under the cache's lock.
"""

from __future__ import annotations

from typing import Any

from graphcache.ahead import warm
from graphcache.cache import Key
from graphcache.call import Call, differences
from graphcache.errors import Fallback, Finding
from graphcache.explain import Explanation, ProbeReport
from graphcache.miss import MissPath
from graphcache.reasons import Reason


def explain(miss: MissPath, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
    reading, facts, route = miss.routed(Call(miss.binder, args, kwargs))
    dims, sizes, bucket = reading.dims, reading.sizes, route.bucket
    if bucket is None:
        pieces = tuple(piece.bucket for piece in route.pieces)
        return Explanation("split", dims, sizes, pieces=pieces)
    key = (reading.signature, bucket)
    if key in miss.store.graphs:
        return Explanation("replay", dims, sizes, bucket)
    nearest = _nearest(miss, key)
    try:
        miss.store.refuse_failed(facts, key)
        uses = miss.store.graphs.uses(key) + 1
        miss.store.refuse_unfit(key, route.why_exact, uses)
    except Fallback as why:
        return Explanation.eager(why, dims=dims, sizes=sizes, bucket=bucket, nearest=nearest)
    return Explanation("capture", dims, sizes, bucket, nearest=nearest)


def _nearest(miss: MissPath, key: Key) -> tuple[str, ...]:
    """How the captured key that is most alike differs, a line each."""
    options = []
    for signature, bucket in miss.store.graphs:
        lines = list(differences(key[0], signature))
        if bucket != key[1]:
            lines.append(f"bucket: {key[1]}, captured {bucket}")
        options.append(tuple(lines))
    return min(options, key=len, default=())


def probe(miss: MissPath, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ProbeReport:
    reading, facts = miss.known(Call(miss.binder, args, kwargs))
    if miss.buckets.exact:
        return ProbeReport({}, detail="no buckets are given, so nothing is padded")
    bucket = miss.buckets.choose(reading.sizes) or miss.buckets.largest()
    facts.dims = None  # anew
    facts = miss.probed(reading, bucket)
    return ProbeReport(dict(zip(reading.dims, facts.dims or (), strict=True)))


def look(
    miss: MissPath, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Finding], ProbeReport]:
    """All that stands between a call and a graph that serves it padded: what a trial run shows,
    what the probe shows, and whether the capture itself succeeds.
    """
    report = ProbeReport({})
    try:
        call = Call(miss.binder, args, kwargs)
        miss.catch_up()
        miss.choose_backend(call)
        findings = miss.knowledge.findings(miss.knowledge.read(call))
        if not findings and miss.buckets.exact:
            report = probe(miss, args, kwargs)
        elif not findings:
            reading, facts = miss.known(call)
            telling = miss.buckets.smallest_telling()
            miss.knowledge.probe(reading, facts, telling)
            found = _warm_alone(miss, call, telling)
            if all(finding.reason is not Reason.CAPTURE_FAILED for finding in found):
                # Where forward raises at this size, the probe blames every dim for it.
                report = ProbeReport(dict(zip(reading.dims, facts.dims or (), strict=True)))
            for corner in miss.buckets.outermost():
                if corner != telling:
                    found += _warm_alone(miss, call, corner)
            findings = [*report.findings(), *found]
    except Fallback as fallback:
        findings = [fallback.finding()]
    return findings, report


def _warm_alone(miss: MissPath, call: Call, bucket: tuple[int, ...]) -> list[Finding]:
    """What stops a capture at one bucket, such as a table that ends before it."""
    try:
        warm(miss, call, bucket)
    except Fallback as fallback:
        found = fallback.finding()
        return [found._replace(what=f"bucket {bucket}: {found.what}")]
    return []
