"""Measured costs of one cache's module: a few sizes captured and timed, the rest interpolated."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

import numpy as np
from tqdm import tqdm

from graphcache.ahead import cost
from graphcache.buckets import parse_buckets
from graphcache.call import Call
from graphcache.errors import Fallback, GraphCacheError
from graphcache.miss import MissPath
from graphcache.planning.cost import CostModel
from graphcache.stats import Bucket

_LEVELS = {1: 9, 2: 6}  # sizes per dim, by the number of dims
_LEVELS_OF_MANY = 3


def measure(miss: MissPath, call: Call, sizes: Any, progress: bool) -> CostModel:
    """Time graphs and eager calls of these sizes, largest first, as captures are best made.

    A graph that exists is used; others are captured for the time being. Called under the cache's
    lock; waits for the device.

    Raises:
        GraphCacheError: no buckets and no sizes, or none of the sizes gets a graph.
        BucketError: `sizes` that are none.
    """
    wanted = _default(miss) if sizes is None else parse_buckets(_listed(sizes), miss.dims.names)
    tables: dict[str, dict[tuple[int, ...], float]] = {}
    refused: Fallback | None = None
    for corner in tqdm(reversed(wanted.corners), "graphcache", len(wanted), disable=not progress):
        try:
            found = cost(miss, call, corner)
        except Fallback as fallback:
            refused = fallback
            continue
        for kind, value in found.items():
            tables.setdefault(kind, {})[corner] = value
    if not tables:
        raise GraphCacheError(f"no size of {len(wanted)} gets a graph: {refused}.")
    typical = statistics.median(tables["capture"].values())  # the first ones load kernels
    tables["capture"] = dict.fromkeys(tables["capture"], typical)
    for kind in ("replay", "eager"):
        if kind in tables:
            tables[kind] = rising(tables[kind])
    return CostModel(tables, miss.dims.names)


def rising(table: dict[Bucket, float]) -> dict[Bucket, float]:
    """The table where no cost falls with a size: midway between the largest cost of what a size
    holds and the smallest of what holds it.

    What is measured at few sizes falls by chance; then a call would be padded for nothing.
    """
    sizes = np.array(list(table))
    costs = np.array(list(table.values()))
    holds = np.all(sizes[:, None, :] >= sizes[None, :, :], axis=2)  # does the first the second?
    highest = np.where(holds, costs[None, :], -np.inf).max(axis=1)
    lowest = np.where(holds.T, costs[None, :], np.inf).min(axis=1)
    return dict(zip(table, ((highest + lowest) / 2).tolist(), strict=True))


def _default(miss: MissPath) -> Any:
    """Geometric levels per dim up to the largest bucket."""
    if miss.buckets.exact:
        raise GraphCacheError("there are no buckets yet; pass `sizes`, those to measure.")
    count = _LEVELS.get(len(miss.dims.names), _LEVELS_OF_MANY)
    lowest = (min(sizes) for sizes in zip(*miss.buckets.corners, strict=True))
    levels = [
        np.unique(np.geomspace(low, high, count).round().astype(int)).tolist()
        for low, high in zip(lowest, miss.buckets.largest(), strict=True)
    ]
    return parse_buckets(dict(zip(miss.dims.names, levels, strict=True)), miss.dims.names)


def _listed(sizes: Any) -> Any:
    return list(sizes) if isinstance(sizes, Iterable) and not isinstance(sizes, dict) else sizes
