"""What a bucket costs: a replay, an eager call, a capture, and the memory of a graph.

Costs between the sizes of a table are interpolated linearly in each dim, which never overshoots its
neighbours; below it the smallest is taken (launches do not get cheaper), above it the last slope
goes on, if it rises. A table that lacks combinations of its sizes is interpolated by elements, the
product of the sizes, and does not fall with them.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphcache.errors import GraphCacheError
from graphcache.planning.demand import Floats, is_amount
from graphcache.planning.profile import UNREADABLE, corner_of
from graphcache.planning.surface import Sizes, surface

_VERSION = 1
_KINDS = ("replay", "eager", "capture", "nbytes")
_UNITS = {"": 1.0, "_us": 1.0, "_ms": 1e3, "_s": 1e6}
_MOST_ASKED = 4096
_PIECE = 20.0  # us: a slice, a copy, the joining of results


class CostModel:
    """Costs of buckets over named dims: microseconds, and bytes for `nbytes`.

    Args:
        tables: by kind ("replay", "eager", "capture", "nbytes"), sizes to value. "replay" is
            needed; what else is absent is unknown, and plans leave it out.
        dims: the dims' names, in the order of the sizes.
        piece: what each piece of a split after the first costs beside its replay.

    Raises:
        GraphCacheError: an unknown kind, no replay table, an empty one, sizes of another number of
            dims, or a value that is no finite number of at least 0.

    Example:
        >>> cost = CostModel({"replay": {(1,): 300.0, (9,): 380.0}})
        >>> cost.replay([(1,), (5,), (9,)]).tolist()
        [300.0, 340.0, 380.0]
        >>> cost.knows("eager")
        False
    """

    def __init__(
        self,
        tables: Mapping[str, Mapping[Sizes, float]],
        dims: Sequence[str] = ("batch",),
        piece: float = _PIECE,
    ) -> None:
        self.dims = tuple(dims)
        if not is_amount(piece):
            raise GraphCacheError(f"`piece` is {piece!r}; pass microseconds of at least 0.")
        self.piece = float(piece)
        strange = set(tables) - set(_KINDS)
        if strange or "replay" not in tables:
            raise GraphCacheError(
                f"the cost tables are {sorted(tables)}; pass 'replay', and what is known of "
                f"{', '.join(_KINDS[1:])}."
            )
        self.tables = {kind: dict(table) for kind, table in tables.items()}
        self._grids = {kind: surface(kind, table, self.dims) for kind, table in tables.items()}

    def knows(self, kind: str) -> bool:
        """Whether there is a table of this kind."""
        return kind in self._grids

    def of(self, kind: str, sizes: Any) -> Floats:
        """(n,): the values of a kind at (n, d) sizes, interpolated.

        Raises:
            GraphCacheError: no such table.
        """
        if kind not in self._grids:
            raise GraphCacheError(f"no {kind!r} costs are known, only {', '.join(self._grids)}.")
        return self._grids[kind](np.asarray(sizes, dtype=np.int64).reshape(-1, len(self.dims)))

    def replay(self, sizes: Any) -> Floats:
        """(n,): microseconds of one call by a graph of these (n, d) sizes."""
        return self.of("replay", sizes)

    def eager(self, sizes: Any) -> Floats:
        """(n,): microseconds of one eager call."""
        return self.of("eager", sizes)

    def replay_of(self, sizes: Sizes) -> float:
        """Microseconds of one replay of one bucket."""
        return float(self.replay([sizes])[0])

    def eager_of(self, sizes: Sizes) -> float:
        """Microseconds of one eager call of these sizes; inf if that is not known."""
        return float(self.eager([sizes])[0]) if self.knows("eager") else math.inf

    __call__ = replay_of

    def __repr__(self) -> str:
        known = ", ".join(f"{kind}: {len(table)} sizes" for kind, table in self.tables.items())
        return f"CostModel({', '.join(self.dims)}; {known})"

    @staticmethod
    def measure(
        cache: Any, sizes: Any = None, *, sample: Any = None, progress: bool = True
    ) -> CostModel:
        """Time a `GraphCache`'s module on its device; from then on the cache routes by the result.

        Replays are timed with their copies in and out, and eager calls, by CUDA events on a GPU:
        the median of several runs, warmed, and smoothed so that no cost falls with a size. Graphs
        that exist are used; others are captured for the time being. Whatever the module changes is
        undone. Captures count as their median. Waits for the device. The CPU recorder saves no
        launches, so there eager is not timed.

        Args:
            cache: whose module.
            sizes: those to measure, in any form that `buckets` takes; between them costs are
                interpolated. None: geometric levels up to the largest bucket, nine in one dim, six
                per dim in two.
            sample: one call's arguments, as in `warmup`; None: the one form of call seen so far.
            progress: show a progress bar.

        Raises:
            GraphCacheError: no sizes and no buckets, no form of call or several, or no size that
                gets a graph.

        Example:
            >>> import torch
            >>> from graphcache import GraphCache
            >>> fast = GraphCache(torch.nn.Linear(4, 2).eval(), buckets=[8, 16])
            >>> cost = CostModel.measure(fast, sample=torch.ones(1, 4), progress=False)
            >>> cost.knows("replay"), fast.costs is cost
            (True, True)
        """
        if not hasattr(cache, "_measure"):
            raise GraphCacheError(f"`cache` is {type(cache).__name__}; pass a GraphCache.")
        measured: CostModel = cache._measure(sizes, sample, progress)
        return measured

    @classmethod
    def from_table(
        cls,
        replay: Mapping[Any, float],
        dims: Sequence[str] = ("batch",),
        piece: float = _PIECE,
        **others: Mapping[Any, float],
    ) -> CostModel:
        """Of tables by sizes, or by one int where there is one dim.

        Args:
            replay: microseconds of a replay.
            dims: the dims' names, in the order of the sizes.
            piece: as in the constructor.
            others: `eager` and `capture` in microseconds, `nbytes` in bytes.

        Raises:
            GraphCacheError: as the constructor.

        Example:
            >>> CostModel.from_table({8: 350.0, 16: 380.0}).replay_of((12,))
            365.0
        """
        tables = {
            kind: {corner_of(key): v for key, v in table.items()}
            for kind, table in {"replay": replay, **others}.items()
        }
        return cls(tables, dims, piece)

    @classmethod
    def from_callable(
        cls, replay: Callable[[Any], float], sizes: Sequence[Sizes], dims: Sequence[str]
    ) -> CostModel:
        """Of a function, which is asked at every combination of the sizes in each dim, at most
        4,096.

        Args:
            replay: the microseconds of a bucket, an int in one dim and a tuple in several.
            sizes: those that matter; where there are too many, each dim is thinned out evenly.
            dims: the dims' names, in the order of the sizes.
        """
        most = int(_MOST_ASKED ** (1 / len(dims)))
        axes = [_thinned(sorted(set(axis)), most) for axis in zip(*sizes, strict=True)]
        table = {
            combined: float(replay(combined[0] if len(dims) == 1 else combined))
            for combined in itertools.product(*axes)
        }
        return cls({"replay": table}, dims)

    @classmethod
    def from_csv(cls, path: str | Path, dims: Sequence[str] = ("batch",)) -> CostModel:
        """Read a table with a column for each dim and for what is known: `replay_us`, `eager_us`,
        `capture_ms`, `nbytes`; the endings _us, _ms and _s give the unit.

        Raises:
            GraphCacheError: a file that cannot be read, a missing column, or a value that is no
                number, with file and line.
        """
        try:
            with open(path, newline="", encoding="utf-8-sig") as file:
                return cls(_read_tables(csv.DictReader(file), path, dims), dims)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise GraphCacheError(
                f"{path}: {error}; pass a CSV file with {', '.join(dims)} and replay_us."
            ) from error

    def save(self, path: str | Path) -> None:
        """Write as JSON, with a version."""
        Path(path).write_text(json.dumps(self.to_json()))

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """Read what `save` wrote.

        Raises:
            GraphCacheError: no such file, not of this kind, or of another version.
        """
        try:
            return cls.from_json(json.loads(Path(path).read_text()))
        except UNREADABLE as error:
            raise GraphCacheError(
                f"{path} is no cost model of version {_VERSION} ({error!r}); write one with save()."
            ) from error

    def to_json(self) -> dict[str, Any]:
        """Plain values that `from_json` reads."""
        tables = {
            kind: [[*sizes, value] for sizes, value in sorted(table.items())]
            for kind, table in self.tables.items()
        }
        return {"version": _VERSION, "dims": self.dims, "piece": self.piece, "tables": tables}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostModel:
        """Read what `to_json` gave.

        Raises:
            ValueError: another version; KeyError or TypeError: other data.
        """
        if data["version"] != _VERSION:
            raise ValueError(f"version {data['version']}")
        tables = {
            kind: {tuple(sizes): value for *sizes, value in rows}
            for kind, rows in data["tables"].items()
        }
        return cls(tables, data["dims"], data["piece"])


def read_costs(path: str | Path, dims: Sequence[str]) -> CostModel:
    """A cost model from a .json file that `CostModel.save` wrote, or else a CSV table.

    Raises:
        GraphCacheError: as `CostModel.load` and `CostModel.from_csv`.
    """
    if Path(path).suffix == ".json":
        return CostModel.load(path)
    return CostModel.from_csv(path, dims)


def _read_tables(
    rows: csv.DictReader[str], path: str | Path, dims: Sequence[str]
) -> dict[str, dict[Sizes, float]]:
    names = rows.fieldnames or ()
    columns = {name: known for name in names if (known := _column(name))}
    if any(dim not in names for dim in dims) or not columns:
        raise GraphCacheError(
            f"{path}: the columns are {list(names)}; it needs {', '.join(dims)} and replay_us, "
            "and may have eager_us, capture_ms and nbytes."
        )
    tables: dict[str, dict[Sizes, float]] = {}
    for row in rows:
        try:
            sizes = tuple(int(row[dim]) for dim in dims)
            for name, (kind, unit) in columns.items():
                tables.setdefault(kind, {})[sizes] = float(row[name]) * unit
        except (TypeError, ValueError) as error:
            raise GraphCacheError(
                f"{path}:{rows.line_num}: {error}; mend or remove the row."
            ) from error
    return tables


def _column(name: str) -> tuple[str, float] | None:
    """The kind and unit of a column, as of "capture_ms"."""
    for kind, (ending, unit) in itertools.product(_KINDS, _UNITS.items()):
        if name == kind + ending and (kind != "nbytes" or not ending):
            return kind, unit
    return None


def _thinned(values: Sequence[int], most: int) -> list[int]:
    """At most so many of them, evenly, with the first and the last."""
    at = np.unique(np.linspace(0, len(values) - 1, most).round().astype(int))
    return [values[i] for i in at]
