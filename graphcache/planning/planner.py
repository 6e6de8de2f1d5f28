"""`plan_buckets`: reads what a user asks for and has it planned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from graphcache.buckets import parse_buckets
from graphcache.errors import GraphCacheError
from graphcache.planning.cost import CostModel
from graphcache.planning.plan import Plan, make_plan
from graphcache.planning.problem import Options, positive_int
from graphcache.planning.profile import TrafficProfile, profile_of

Cost = CostModel | Callable[[Any], float] | Mapping[Any, float]


def plan_buckets(
    profile: TrafficProfile | Mapping[Any, float],
    cost: Cost | None = None,
    *,
    max_graphs: int = 32,
    memory_budget: float | None = None,
    horizon: float = 100_000,
    align: int | Mapping[str, int] | None = None,
    include: Iterable[Any] = (),
    limits: int | Mapping[str, int] | None = None,
    prior: str | None = "auto",
    split: str | None = None,
    grid: bool = False,
    seed: int = 0,
) -> Plan:
    """The cheapest buckets for some traffic.

    In one dim the result is exact (a shortest path by dynamic programming, after Schieber 1998). In
    several dims, and with pieces, it is found by local search, and `Plan.gap` says how far from the
    best it can be. The same arguments give the same plan.

    Args:
        profile: sizes with their counts; a mapping from sizes, ints or tuples, for the dims
            "batch" or "dim0", "dim1", .. unless `cost` names them.
        cost: a `CostModel`; or a mapping or a function from a bucket to microseconds of a replay.
            None: padded elements count, and the plan is by padding alone.
        max_graphs: the most buckets. Fewer are taken where one more does not pay its capture.
        memory_budget: bytes that all graphs may take together; needs a cost of "nbytes".
        horizon: calls over which a capture should pay.
        align: buckets are multiples of this, by dim or in all; None: 1.
        include: buckets that must be there.
        limits: the largest size of each dim that will be served by graphs, or of all. Where eager's
            cost is not known, a bucket of the limits is always there; else only if it pays.
        prior: "auto": mix in some weight on sizes that a small sample may have missed (32 calls'
            worth in one dim, 64 in several); None: trust the sample.
        split: the dim along which calls may be served in pieces.
        grid: in several dims, take levels per dim and their product.
        seed: of the search's perturbations.

    Raises:
        GraphCacheError: an empty profile, options outside their values, or that contradict each
            other.
        BucketError: `include` that is no list of buckets.

    Example:
        >>> plan_buckets({1: 500, 2: 300, 7: 200}, max_graphs=2, prior=None).buckets
        [2, 7]
    """
    names = cost.dims if isinstance(cost, CostModel) else None
    traffic = profile_of(profile, names)
    dims = traffic.dims
    if names is not None and names != dims:
        raise GraphCacheError(
            f"the costs have the dims {', '.join(names)}, the profile {', '.join(dims)}; use the "
            "same names in the same order."
        )
    if prior not in ("auto", None):
        raise GraphCacheError(f"`prior` is {prior!r}; pass 'auto' or None.")
    if isinstance(include, (str, bytes)) or not isinstance(include, Iterable):
        raise GraphCacheError(f"`include` is {include!r}; pass a list of buckets.")
    wanted = list(include)
    options = Options(
        max_graphs=positive_int("max_graphs", max_graphs),
        memory_budget=memory_budget,
        horizon=horizon,
        align=tuple(size or 1 for size in _per_dim("align", align, dims)),
        include=parse_buckets(wanted, dims).corners if wanted else (),
        limits=_per_dim("limits", limits, dims),
        prior=prior is not None,
        split=split,
        grid=grid,
        seed=seed,
    ).checked(dims)
    return make_plan(traffic, _model(cost, traffic, options), options)


def _per_dim(
    name: str, value: int | Mapping[str, int] | None, dims: Sequence[str]
) -> tuple[int | None, ...]:
    given: Mapping[str, Any] = value if isinstance(value, Mapping) else dict.fromkeys(dims, value)
    strange = set(given) - set(dims)
    if strange:
        raise GraphCacheError(f"`{name}` names {sorted(strange)}; the dims are {', '.join(dims)}.")
    for dim, size in given.items():
        if size is not None:
            positive_int(f"{name} of {dim}", size)
    return tuple(None if given.get(dim) is None else int(given[dim]) for dim in dims)


def _model(cost: Cost | None, traffic: TrafficProfile, options: Options) -> CostModel | None:
    if cost is None or isinstance(cost, CostModel):
        return cost
    if isinstance(cost, Mapping):
        return CostModel.from_table(cost, traffic.dims)
    if not callable(cost):
        raise GraphCacheError(
            f"`cost` is {cost!r}; pass a CostModel, a mapping or a function from buckets to "
            "microseconds, or None."
        )
    aligned = [
        tuple(-(-size // step) * step for size, step in zip(sizes, options.align, strict=True))
        for sizes in traffic.counts
    ]
    limits = [limit or 1 for limit in options.limits]
    return CostModel.from_callable(
        cost, [*traffic.counts, *aligned, *options.include, tuple(limits)], traffic.dims
    )
