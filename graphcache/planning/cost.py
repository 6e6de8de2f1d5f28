"""What a bucket costs: a replay, an eager call, a capture, and the memory of a graph.

Costs between the sizes of a table are interpolated linearly in each dim, which never overshoots its
neighbours; below it the smallest is taken (launches do not get cheaper), above it the last slope
goes on, if it rises.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphcache.errors import GraphCacheError
from graphcache.planning.demand import Floats, Ints

_VERSION = 1
_KINDS = ("replay", "eager", "capture", "nbytes")
_UNITS = {"": 1.0, "_us": 1.0, "_ms": 1e3, "_s": 1e6}

Sizes = tuple[int, ...]


class CostModel:
    """Costs of buckets over named dims: microseconds, and bytes for `nbytes`.

    Args:
        tables: by kind ("replay", "eager", "capture", "nbytes"), sizes to value. Each table holds
            every combination of the sizes that it names in each dim. "replay" is needed; what else
            is absent is unknown, and plans leave it out.
        dims: the dims' names, in the order of the sizes.

    Raises:
        GraphCacheError: an unknown kind, no replay table, sizes of another number of dims, a value
            that is no finite number of at least 0, or a combination that is missing.

    Example:
        >>> cost = CostModel({"replay": {(1,): 300.0, (9,): 380.0}})
        >>> cost.replay([(1,), (5,), (9,)]).tolist()
        [300.0, 340.0, 380.0]
        >>> cost.knows("eager")
        False
    """

    def __init__(
        self, tables: Mapping[str, Mapping[Sizes, float]], dims: Sequence[str] = ("batch",)
    ) -> None:
        self.dims = tuple(dims)
        strange = set(tables) - set(_KINDS)
        if strange or "replay" not in tables:
            raise GraphCacheError(
                f"the cost tables are {sorted(tables)}; pass 'replay', and what is known of "
                f"{', '.join(_KINDS[1:])}."
            )
        self.tables = {kind: dict(table) for kind, table in tables.items()}
        self._grids = {kind: _Grid(kind, table, self.dims) for kind, table in tables.items()}

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

    def __repr__(self) -> str:
        known = ", ".join(f"{kind}: {len(table)} sizes" for kind, table in self.tables.items())
        return f"CostModel({', '.join(self.dims)}; {known})"

    @classmethod
    def from_csv(cls, path: str | Path, dims: Sequence[str] = ("batch",)) -> CostModel:
        """Read a table with a column for each dim and for what is known: `replay_us`, `eager_us`,
        `capture_ms`, `nbytes`; the endings _us, _ms and _s give the unit.

        Raises:
            GraphCacheError: a missing column, or a value that is no number, with file and line.
        """
        tables: dict[str, dict[Sizes, float]] = {}
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            names = rows.fieldnames or ()
            columns = {name: known for name in names if (known := _column(name))}
            if any(dim not in names for dim in dims) or not columns:
                raise GraphCacheError(
                    f"{path}: the columns are {list(names)}; it needs {', '.join(dims)} and "
                    "replay_us, and may have eager_us, capture_ms and nbytes."
                )
            for row in rows:
                try:
                    sizes = tuple(int(row[dim]) for dim in dims)
                    for name, (kind, unit) in columns.items():
                        tables.setdefault(kind, {})[sizes] = float(row[name]) * unit
                except (TypeError, ValueError) as error:
                    raise GraphCacheError(
                        f"{path}:{rows.line_num}: {error}; mend or remove the row."
                    ) from error
        return cls(tables, dims)

    def save(self, path: str | Path) -> None:
        """Write as JSON, with a version."""
        Path(path).write_text(json.dumps(self.to_json()))

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """Read what `save` wrote.

        Raises:
            GraphCacheError: not such a file, or of another version.
        """
        try:
            return cls.from_json(json.loads(Path(path).read_text()))
        except (ValueError, KeyError, TypeError, AttributeError, GraphCacheError) as error:
            raise GraphCacheError(
                f"{path} is no cost model of version {_VERSION} ({error!r}); write one with save()."
            ) from error

    def to_json(self) -> dict[str, Any]:
        """Plain values that `from_json` reads."""
        tables = {
            kind: [[*sizes, value] for sizes, value in sorted(table.items())]
            for kind, table in self.tables.items()
        }
        return {"version": _VERSION, "dims": self.dims, "tables": tables}

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
        return cls(tables, data["dims"])


def _column(name: str) -> tuple[str, float] | None:
    """The kind and unit of a column, as of "capture_ms"."""
    for kind, (ending, unit) in itertools.product(_KINDS, _UNITS.items()):
        if name == kind + ending and (kind != "nbytes" or not ending):
            return kind, unit
    return None


class _Grid:
    """Multilinear interpolation of one table."""

    def __init__(self, kind: str, table: Mapping[Sizes, float], dims: Sequence[str]) -> None:
        for sizes, value in table.items():
            if len(sizes) != len(dims) or not (np.isfinite(value) and value >= 0):
                raise GraphCacheError(
                    f"the {kind} cost of {sizes} is {value!r}; give a number of at least 0 for "
                    f"one size of each dim: {', '.join(dims)}."
                )
        self._levels = [np.array(sorted(set(axis))) for axis in zip(*table, strict=True)]
        if not self._levels:
            raise GraphCacheError(f"the {kind} table is empty; give at least one size.")
        whole = list(itertools.product(*(axis.tolist() for axis in self._levels)))
        missing = [sizes for sizes in whole if sizes not in table]
        if missing:
            raise GraphCacheError(
                f"the {kind} table lacks {missing[0]} and {len(missing) - 1} others; give every "
                "combination of the sizes of each dim."
            )
        shape = [len(axis) for axis in self._levels]
        self._values = np.array([float(table[sizes]) for sizes in whole]).reshape(shape)

    def __call__(self, sizes: Ints) -> Floats:
        values = np.broadcast_to(self._values, (len(sizes), *self._values.shape))
        for axis, levels in enumerate(self._levels):
            values = _between(values, levels, sizes[:, axis])
        return np.asarray(np.maximum(values, 0.0))


def _between(values: Floats, levels: Ints, wanted: Ints) -> Floats:
    """Interpolate the first axis after the calls': (n, levels, ...) to (n, ...)."""
    if len(levels) == 1:
        return values[:, 0]
    upper = np.clip(np.searchsorted(levels, wanted), 1, len(levels) - 1)
    lower, own = upper - 1, np.arange(len(wanted))
    share = (wanted - levels[lower]) / (levels[upper] - levels[lower])
    share = np.maximum(share, 0.0).reshape(-1, *[1] * (values.ndim - 2))
    low, high = values[own, lower], values[own, upper]
    inside = (1 - share) * low + share * high  # exact at both ends
    above = high + (share - 1) * np.maximum(high - low, 0.0)
    return np.asarray(np.where(share > 1, above, inside))
