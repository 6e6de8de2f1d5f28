"""Which bucket serves a call's sizes, or which pieces do. Pure decisions, made on a miss; nothing
is run here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from graphcache.buckets import MAX_PIECES, BucketSet, Piece
from graphcache.errors import Fallback
from graphcache.facts import Facts
from graphcache.padding import volume
from graphcache.reasons import Reason
from graphcache.settings import Settings


class Route(NamedTuple):
    """One bucket, or pieces along dim `dim`. `why_exact` is set where a bucket would have been
    padded but must not be.
    """

    bucket: tuple[int, ...] | None
    pieces: Sequence[Piece] = ()
    dim: int = 0
    why_exact: Fallback | None = None


def refuse_empty(sizes: Sequence[int], dims: Sequence[str]) -> None:
    for size, dim in zip(sizes, dims, strict=True):
        if size == 0:
            raise Fallback(Reason.EMPTY, f"{dim}=0")


def choose_route(
    buckets: BucketSet, sizes: tuple[int, ...], facts: Facts, settings: Settings
) -> Route:
    """The cheapest way to serve `sizes`, given what may be padded and split.

    Raises:
        Fallback: `over-max`, `padding-ratio`, or why calls of this form are not cut any more.
    """
    unpadded = facts.unpadded(sizes)
    bucket = buckets.choose(sizes, unpadded)
    if bucket is None:
        return _split(buckets, sizes, facts, settings, unpadded)
    limit = settings.max_padding_ratio
    if limit is not None and volume(bucket) > limit * volume(sizes):
        raise Fallback(
            Reason.PADDING_RATIO,
            f"{volume(bucket)} elements for {volume(sizes)}, the limit is {limit}x",
        )
    listed = buckets.exact or bucket in buckets.corners
    return Route(bucket, why_exact=None if listed else facts.why_unpadded(min(unpadded)))


def _split(
    buckets: BucketSet,
    sizes: tuple[int, ...],
    facts: Facts,
    settings: Settings,
    unpadded: frozenset[int],
) -> Route:
    if facts.uncut is not None:
        raise facts.uncut.again()
    for dim, name in enumerate(buckets.dims):
        allowed = (name,) if settings.verify == "off" else ("auto", name)
        if settings.split not in allowed or not facts.splittable(dim):
            continue
        pieces = buckets.cover(sizes, dim, unpadded)
        if pieces is not None:
            return Route(None, pieces, dim)
    largest = ", ".join(
        f"{d}={max(c[i] for c in buckets.corners)}" for i, d in enumerate(buckets.dims)
    )
    asked = ", ".join(f"{d}={n}" for d, n in zip(buckets.dims, sizes, strict=True))
    what = (
        f"no bucket holds {asked}; the largest sizes are {largest}; {_why_whole(settings, facts)}"
    )
    raise Fallback(Reason.OVER_MAX, what)


def _why_whole(settings: Settings, facts: Facts) -> str:
    if settings.split is None:
        return "`split` is None"
    if not any(facts.splittable(dim) for dim in range(len(facts.dims or ()))):
        return "no dim was found whose rows are independent"
    return f"the dims that may be split do not hold it in {MAX_PIECES} pieces"
