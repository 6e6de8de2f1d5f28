"""The sizes that calls had, counted. No torch, so that a profile can be read and planned on any
machine.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from graphcache.errors import GraphCacheError

_VERSION = 1


class TrafficProfile:
    """Counts of sizes over named dims.

    Args:
        dims: the dims' names, in the order of the sizes.

    Example:
        >>> profile = TrafficProfile(("batch", "seq"))
        >>> profile.record((5, 41), count=3)
        >>> profile.counts
        {(5, 41): 3}
    """

    def __init__(self, dims: Sequence[str] = ("batch",)) -> None:
        self.dims = tuple(dims)
        self._counts: Counter[tuple[int, ...]] = Counter()

    def record(self, sizes: tuple[int, ...] | int, count: int = 1) -> None:
        """Count calls of these sizes; an int is short for a tuple of one.

        Raises:
            GraphCacheError: another number of sizes than dims.
        """
        key = (sizes,) if isinstance(sizes, int) else sizes
        if len(key) != len(self.dims):
            raise GraphCacheError(
                f"sizes {sizes!r} for the dims {', '.join(self.dims)}; pass one size for each."
            )
        self._counts[key] += count

    @property
    def counts(self) -> dict[tuple[int, ...], int]:
        """A copy: sizes to count."""
        return dict(self._counts)

    def __repr__(self) -> str:
        return f"TrafficProfile({', '.join(self.dims)}: {len(self)} sizes, {self.total:,} calls)"

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def total(self) -> int:
        """Calls counted."""
        return self._counts.total()

    def merge(self, other: TrafficProfile) -> None:
        """Add another profile's counts.

        Raises:
            GraphCacheError: other dims.
        """
        if other.dims != self.dims:
            raise GraphCacheError(
                f"cannot merge dims {other.dims} into {self.dims}; "
                "record both under the same names."
            )
        self._counts.update(other._counts)

    @classmethod
    def from_csv(cls, path: str | Path, dims: Sequence[str] = ("batch",)) -> TrafficProfile:
        """Read one call a row from the columns named `dims`; other columns are ignored.

        Raises:
            GraphCacheError: a missing column, or a size that is no positive integer, with file and
                line.
        """
        profile = cls(dims)
        for sizes in read_sizes(path, dims):
            profile.record(sizes)
        return profile

    def to_csv(self, path: str | Path) -> None:
        """Write one row a call, sizes in sorted order, with an empty `timestamp_s` as in recorded
        traces.
        """
        with open(path, "w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["timestamp_s", *self.dims])
            for sizes in sorted(self._counts):
                rows.writerows([["", *sizes]] * self._counts[sizes])

    def save(self, path: str | Path) -> None:
        """Write as JSON, with a version."""
        counts = [[*sizes, count] for sizes, count in sorted(self._counts.items())]
        Path(path).write_text(
            json.dumps({"version": _VERSION, "dims": self.dims, "counts": counts})
        )

    @classmethod
    def load(cls, path: str | Path) -> TrafficProfile:
        """Read what `save` wrote.

        Raises:
            GraphCacheError: not such a file, or of another version.
        """
        try:
            data: dict[str, Any] = json.loads(Path(path).read_text())
            version = data["version"]
            if version == _VERSION:
                profile = cls(data["dims"])
                for *sizes, count in data["counts"]:
                    profile.record(tuple(sizes), count)
                return profile
        except (ValueError, KeyError, TypeError, GraphCacheError) as error:
            raise GraphCacheError(
                f"{path} is no traffic profile ({error!r}); write one with save()."
            ) from error
        raise GraphCacheError(
            f"{path} has version {version}, this package reads {_VERSION}; record it anew."
        )


def read_sizes(path: str | Path, dims: Sequence[str]) -> Iterable[tuple[int, ...]]:
    """The sizes of each row of a CSV trace, in order.

    Raises:
        GraphCacheError: as `TrafficProfile.from_csv`.
    """
    with open(path, newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file)
        missing = [dim for dim in dims if dim not in (rows.fieldnames or ())]
        if missing:
            raise GraphCacheError(
                f"{path}: no column {missing} among {rows.fieldnames}; name the columns in `dims`."
            )
        for row in rows:
            yield tuple(_positive(row[dim], dim, path, rows.line_num) for dim in dims)


def _positive(text: str | None, dim: str, path: str | Path, line: int) -> int:
    if text is None or not text.strip().isdecimal() or int(text) < 1:
        raise GraphCacheError(
            f"{path}:{line}: {dim} is {text!r}, not a positive integer; mend or remove the row."
        )
    return int(text)
