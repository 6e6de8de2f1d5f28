"""Which planner solves which problem: exact on a line, by search with pieces or in several dims."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from graphcache.errors import GraphCacheError
from graphcache.planning import corners as boxes
from graphcache.planning import pieces
from graphcache.planning.budget import within_budget
from graphcache.planning.demand import Demand, Floats, Ints
from graphcache.planning.grids import grid
from graphcache.planning.line import best_sets
from graphcache.planning.pieces import SplitDemand
from graphcache.planning.problem import Problem

_PERTURBATIONS, _FEW = 20, 2  # the few of a quick plan
_UNITS = 256  # of rows, in one dim
_ROWS, _OTHERS = 32, 12  # candidates of a split in several dims


@dataclass(frozen=True, slots=True)
class Solution:
    """Buckets, and how good they are, per call of the traffic with its prior.

    `corners` (k, d); `bound`: no plan costs less, prices of the graphs included; `total`: what this
    one costs; `curve`: the least serving cost that was found for 1, 2, .. graphs.
    """

    corners: Ints
    total: float
    bound: float
    curve: tuple[float, ...]


def solve(problem: Problem) -> Solution:
    """The cheapest buckets for a problem; exact in one dim without pieces.

    Raises:
        GraphCacheError: more buckets to include than graphs, pieces without costs, a grid with
            pieces or buckets to include, or a memory budget without their bytes or too small.
    """
    _refuse(problem)
    demand = problem.demand()
    most = problem.options.max_graphs
    if int(demand.forced.sum()) > most:
        raise GraphCacheError(
            f"the buckets of `include` and of `limits` are {int(demand.forced.sum())}, "
            f"`max_graphs` is {most}; raise it."
        )
    if problem.options.split is not None:
        return _split(problem, demand, most)
    if problem.options.grid and len(problem.dims) > 1:
        return _grid(problem, demand, most)
    if len(problem.dims) == 1:
        return _line(problem, demand, most)
    return _boxes(problem, demand, most)


def _refuse(problem: Problem) -> None:
    options = problem.options
    if len(options.include) > options.max_graphs:
        raise GraphCacheError(
            f"`include` has {len(options.include)} buckets, `max_graphs` is {options.max_graphs}; "
            "raise it."
        )
    if options.split is not None and not problem.eager_known:
        raise GraphCacheError(
            "`split` needs costs of replays and eager calls, since by padded elements alone small "
            "pieces always win; pass `cost`."
        )
    if options.grid and (options.split is not None or options.include or options.memory_budget):
        raise GraphCacheError(
            "`grid` goes with neither `split` nor `include` nor `memory_budget`; leave it out: a "
            "free-form set costs no more."
        )


def _line(problem: Problem, demand: Demand, most: int) -> Solution:
    def best(priced: Demand) -> Ints:
        return best_sets(priced, most)[-1]

    free = replace(demand, nodes=np.zeros_like(demand.nodes))
    sets = [] if problem.options.quick else best_sets(free, most)[1:]
    curve = tuple(demand.serving(each) for each in sets)
    chosen = within_budget(problem, demand, best, best(demand), most)
    return Solution(demand.corners[chosen], demand.total(chosen), demand.total(best(demand)), curve)


def _boxes(problem: Problem, demand: Demand, most: int) -> Solution:
    quick = problem.options.quick
    merged = problem.starts(demand, most)

    def best(priced: Demand) -> Ints:
        grown = boxes.greedy(priced, most)
        starts = [grown[-1], merged[-1]]
        tries = _FEW if quick else _PERTURBATIONS
        return boxes.search(priced, most, starts, problem.options.seed, tries)

    chosen = within_budget(problem, demand, best, found := best(demand), most)
    if quick:
        return Solution(demand.corners[chosen], demand.total(chosen), 0.0, ())
    bound = boxes.lower_bound(demand, most, demand.total(found))
    free = replace(demand, nodes=np.zeros_like(demand.nodes))
    nested = zip(boxes.greedy(free, most), merged, strict=True)
    curve = [min(demand.serving(a), demand.serving(b)) for a, b in nested]
    curve[len(chosen) - 1 :] = np.minimum(curve[len(chosen) - 1 :], demand.serving(chosen))
    falling = np.minimum.accumulate(curve).tolist()
    return Solution(demand.corners[chosen], demand.total(chosen), bound, tuple(falling))


def _grid(problem: Problem, demand: Demand, most: int) -> Solution:
    """The best grid for each power of two of cells, by its total."""
    axes = [np.unique(axis) for axis in demand.corners.T]
    held = demand.holds().any(axis=1)
    found, curve = [], np.full(most, np.inf)
    for cells in [2**i for i in range(most.bit_length()) if 2**i < most] + [most]:
        chosen = grid(
            demand.points[held], demand.weights[held], demand.eager[held], problem.price, axes,
            cells, forced_top=not problem.eager_known,
        )  # fmt: skip
        product = np.stack(np.meshgrid(*chosen, indexing="ij"), axis=-1)
        cells_at = product.reshape(-1, len(axes))
        of_grid = _with_corners(problem, demand, cells_at)
        every = np.arange(len(cells_at))
        found.append((of_grid.total(every), cells_at))
        curve[len(every) - 1 :] = np.minimum(curve[len(every) - 1 :], of_grid.serving(every))
    total, best = min(found, key=lambda one: one[0])
    bound = boxes.lower_bound(demand, most, total)
    return Solution(best, total, bound, tuple(curve[np.isfinite(curve)].tolist()))


def _with_corners(problem: Problem, demand: Demand, corners: Ints) -> Demand:
    costs, forced = problem.price(corners), np.zeros(len(corners), dtype=bool)
    return replace(
        demand, corners=corners, costs=costs, nodes=problem.nodes(corners), forced=forced
    )


def _split(problem: Problem, demand: Demand, most: int) -> Solution:
    """The bound is what a graph of every candidate would serve at, all captures free."""
    axis = problem.dims.index(str(problem.options.split))
    several = len(problem.dims) > 1
    unit = pieces.row_units(
        demand.points[:, axis], problem.options.align[axis], _ROWS if several else _UNITS
    )
    corners = _split_corners(problem, demand, axis, unit)
    rest = np.delete(demand.points, axis, axis=1)
    others, at = np.unique(rest, axis=0, return_inverse=True)
    mine = np.delete(corners, axis, axis=1)
    holds = np.all(others[None, :, :] <= mine[:, None, :], axis=2)
    split = SplitDemand(
        rows=-(-demand.points[:, axis] // unit),
        rest=at.reshape(-1),
        weights=demand.weights,
        eager=demand.eager,
        corner_rows=np.maximum(corners[:, axis] // unit, 1),
        corner_holds=holds,
        costs=problem.price(corners),
        nodes=problem.nodes(corners),
        forced=np.array(
            [tuple(c) in problem.options.include for c in corners.tolist()], dtype=bool
        ),
        overhead=problem.cost.piece if problem.cost else 0.0,
    )
    whole = replace(
        demand, corners=corners, costs=split.costs, nodes=split.nodes, forced=split.forced
    )

    def best(priced: Floats) -> Ints:
        unsplit = replace(whole, nodes=priced)
        sets = boxes.greedy(unsplit, most) if several else best_sets(unsplit, most)[1:]
        starts = [sets[0], sets[-1]]
        return pieces.search(replace(split, nodes=priced), most, starts, problem.options.seed)

    chosen = within_budget(
        problem, whole, lambda d: best(d.nodes), best(whole.nodes), most, total=split.total
    )
    bound = split.serving(np.arange(len(corners)))
    curve = tuple(np.minimum.accumulate(pieces.curve(split, most)).tolist())
    return Solution(corners[chosen], split.total(chosen), bound, curve)


def _split_corners(problem: Problem, demand: Demand, axis: int, unit: int) -> Ints:
    """Multiples of the unit within the limit, with the sizes of the other dims that a plan without
    pieces has; and the buckets that must be there, or are.
    """
    rows = np.unique(-(-demand.corners[:, axis] // unit)) * unit
    rows = np.unique(np.concatenate([rows, np.arange(unit, int(rows.max()) + 1, unit)]))
    rows = np.unique(np.minimum(rows, problem.options.limits[axis] or rows.max()))
    wanted = [*problem.options.include, *problem.options.captured]
    fixed = np.array(wanted, dtype=np.int64).reshape(-1, len(problem.dims))
    if len(problem.dims) == 1:
        return np.unique(np.concatenate([rows[:, None], fixed]), axis=0)
    own = set(map(tuple, demand.corners.tolist())) - set(map(tuple, fixed.tolist()))
    free = np.array(sorted(own), dtype=np.int64).reshape(-1, len(problem.dims))
    others = np.unique(np.delete(free if len(free) else fixed, axis, axis=1), axis=0)
    volume = np.prod(others, axis=1, dtype=np.float64)
    order = np.argsort(volume, kind="stable")
    at = np.unique(np.linspace(0, len(others) - 1, _OTHERS).round().astype(int))
    others = others[order[at]]
    found = np.repeat(others, len(rows), axis=0)
    found = np.insert(found, axis, np.tile(rows, len(others)), axis=1)
    return np.unique(np.concatenate([found, fixed]), axis=0)
