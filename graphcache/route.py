"""Which bucket serves a call's sizes, or which pieces do. Pure decisions, made on a miss; nothing
is run here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from graphcache.buckets import BucketSet, Piece
from graphcache.cover import MAX_PIECES
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
        Fallback: `over-max`, `cheaper-eager`, `padding-ratio`, or why calls of this form are not
            cut any more.
    """
    unpadded = facts.unpadded(sizes)
    way = buckets.way(sizes, _axes(buckets, facts, settings), unpadded)
    if way.pieces:
        return Route(None, way.pieces, way.axis)
    if way.bucket is None:
        raise _refusal(buckets, sizes, facts, settings, way.cost)
    limit = settings.max_padding_ratio
    if limit is not None and volume(way.bucket) > limit * volume(sizes):
        raise Fallback(
            Reason.PADDING_RATIO,
            f"{volume(way.bucket)} elements for {volume(sizes)}, the limit is {limit}x",
        )
    listed = buckets.exact or way.bucket in buckets.corners
    return Route(way.bucket, why_exact=None if listed else facts.why_unpadded(min(unpadded)))


def _axes(buckets: BucketSet, facts: Facts, settings: Settings) -> list[int]:
    """The dims along which calls of this form may be cut."""
    if facts.uncut is not None:
        return []
    every = settings.split == "auto" and settings.verify != "off"
    return [
        dim
        for dim, name in enumerate(buckets.dims)
        if (every or name == settings.split) and facts.splittable(dim)
    ]


def _refusal(
    buckets: BucketSet, sizes: tuple[int, ...], facts: Facts, settings: Settings, eager: float
) -> Fallback:
    asked = ", ".join(f"{d}={n}" for d, n in zip(buckets.dims, sizes, strict=True))
    if eager < math.inf:
        return Fallback(
            Reason.CHEAPER_EAGER, f"{asked} takes {eager:,.0f} us eagerly, any bucket more"
        )
    if facts.uncut is not None:
        return facts.uncut.again()
    largest = ", ".join(f"{d}={n}" for d, n in zip(buckets.dims, buckets.largest(), strict=True))
    return Fallback(
        Reason.OVER_MAX,
        f"no bucket holds {asked}; the largest sizes are {largest}; {_why_whole(settings, facts)}",
    )


def _why_whole(settings: Settings, facts: Facts) -> str:
    if settings.split is None:
        return "`split` is None"
    if not any(facts.splittable(dim) for dim in range(len(facts.dims or ()))):
        return "no dim was found whose rows are independent"
    return f"the dims that may be split do not hold it in {MAX_PIECES} pieces"
