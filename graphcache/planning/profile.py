"""The sizes that calls had, counted. No torch, so that a profile can be read and planned on any
machine.
"""

from __future__ import annotations

import csv
import json
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from graphcache.errors import GraphCacheError
from graphcache.planning.demand import is_amount

_VERSION = 1
_MOST_DOUBLINGS = 64
_NOTHING = 1e-6  # of a call
_TOO_LARGE = 2**40  # sizes of tensors are smaller, and their products fit into a float


#: What reading a file that is not as it should be raises.
UNREADABLE = (
    OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, GraphCacheError,
)  # fmt: skip


class TrafficProfile:
    """Counts of sizes over named dims.

    Args:
        dims: the dims' names, in the order of the sizes.
        half_life: calls after which an earlier call counts half, so that counts are floats; None:
            every call counts one for good.

    Raises:
        GraphCacheError: a half-life that is not positive.

    Example:
        >>> profile = TrafficProfile(("batch", "seq"))
        >>> profile.record((5, 41), count=3)
        >>> profile.counts
        {(5, 41): 3}
    """

    def __init__(self, dims: Sequence[str] = ("batch",), half_life: float | None = None) -> None:
        if half_life is not None and not half_life > 0:
            raise GraphCacheError(
                f"`half_life` is {half_life!r}; pass a positive number of calls, or None."
            )
        self.dims = tuple(dims)
        self.half_life = half_life
        # Instead of shrinking all counts at each call, what a call counts grows.
        self._unit: float = 1
        self._counts: dict[tuple[int, ...], float] = {}

    def record(self, sizes: tuple[int, ...] | int, count: float = 1) -> None:
        """Count calls of these sizes; an int is short for a tuple of one.

        Raises:
            GraphCacheError: another number of sizes than dims, sizes that are no integers of at
                least 0, or a count that is no finite number of at least 0.
        """
        key = self._checked(sizes, count)
        if self.half_life is not None:
            self._age(count)
        self._counts[key] = self._counts.get(key, 0) + count * self._unit

    def _checked(self, sizes: Any, count: Any) -> tuple[int, ...]:
        key = corner_of(sizes)
        if len(key) != len(self.dims):
            raise GraphCacheError(
                f"sizes {sizes!r} for the dims {', '.join(self.dims)}; pass one size for each."
            )
        if not all(type(n) is int and 0 <= n < _TOO_LARGE for n in key):
            raise GraphCacheError(f"sizes {sizes!r}; pass integers of at least 0.")
        if not is_amount(count):
            raise GraphCacheError(
                f"{count!r} calls of sizes {sizes!r}; pass a number of at least 0."
            )
        return key

    def _age(self, calls: float) -> None:
        """Let what is counted shrink by so many calls; counts of 0 go."""
        self._unit *= 2 ** min(calls / (self.half_life or math.inf), _MOST_DOUBLINGS)
        if self._unit > 2**_MOST_DOUBLINGS:
            kept = {key: n / self._unit for key, n in self._counts.items()}
            self._counts = {key: n for key, n in kept.items() if n > _NOTHING}
            self._unit = 1.0

    @property
    def counts(self) -> dict[tuple[int, ...], float]:
        """A copy: sizes to count."""
        if self.half_life is None:
            return dict(self._counts)
        return {key: count / self._unit for key, count in self._counts.items()}

    def __repr__(self) -> str:
        calls = f"{self.total:,.0f} calls"
        return f"TrafficProfile({', '.join(self.dims)}: {len(self)} sizes, {calls})"

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def total(self) -> float:
        """Calls counted."""
        counted = sum(self._counts.values())
        return counted / self._unit if self.half_life is not None else counted

    def merge(self, other: TrafficProfile) -> None:
        """Add another profile's counts, as they are now.

        Raises:
            GraphCacheError: other dims.
        """
        if other.dims != self.dims:
            raise GraphCacheError(
                f"cannot merge dims {other.dims} into {self.dims}; "
                "record both under the same names."
            )
        for key, count in other.counts.items():
            self._counts[key] = self._counts.get(key, 0) + count * self._unit

    @classmethod
    def from_csv(cls, path: str | Path, dims: Sequence[str] = ("batch",)) -> TrafficProfile:
        """Read one call a row from the columns named `dims`; other columns are ignored.

        Raises:
            GraphCacheError: a file that cannot be read, a missing column, or a size that is no
                positive integer, with file and line.
        """
        profile = cls(dims)
        for sizes in read_sizes(path, dims):
            profile.record(sizes)
        return profile

    def to_csv(self, path: str | Path) -> None:
        """Write one row a call, sizes in sorted order, with an empty `timestamp_s` as in recorded
        traces; decayed counts are rounded.
        """
        with open(path, "w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["timestamp_s", *self.dims])
            for sizes, count in sorted(self.counts.items()):
                rows.writerows([["", *sizes]] * round(count))

    def save(self, path: str | Path) -> None:
        """Write as JSON, with a version."""
        Path(path).write_text(json.dumps(self.to_json()))

    def to_json(self) -> dict[str, Any]:
        """Plain values that `from_json` reads."""
        counts = [[*sizes, count] for sizes, count in sorted(self.counts.items())]
        return {
            "version": _VERSION,
            "dims": self.dims,
            "half_life": self.half_life,
            "counts": counts,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TrafficProfile:
        """Read what `to_json` gave.

        Raises:
            ValueError, KeyError, TypeError, GraphCacheError: other data, or another version.
        """
        if data["version"] != _VERSION:
            raise GraphCacheError(f"version {data['version']}, this package reads {_VERSION}")
        profile = cls(data["dims"], data.get("half_life"))
        for *sizes, count in data["counts"]:
            profile._counts[profile._checked(sizes, count)] = count
        return profile

    @classmethod
    def load(cls, path: str | Path) -> TrafficProfile:
        """Read what `save` wrote.

        Raises:
            GraphCacheError: not such a file, or of another version.
        """
        try:
            return cls.from_json(json.loads(Path(path).read_text()))
        except UNREADABLE as error:
            raise GraphCacheError(
                f"{path} is no traffic profile of version {_VERSION} ({error}); record it "
                "anew, and write it with save()."
            ) from error


def profile_of(
    profile: TrafficProfile | Mapping[Any, float], dims: Sequence[str] | None = None
) -> TrafficProfile:
    """A profile, or one of a mapping from sizes, tuples or ints, to counts.

    Args:
        profile: either.
        dims: names for a mapping; None: "batch" for one dim, else "dim0", "dim1", ..

    Raises:
        GraphCacheError: an empty mapping, or sizes and counts that are none.
    """
    if isinstance(profile, TrafficProfile):
        return profile
    if not isinstance(profile, Mapping) or not profile:
        raise GraphCacheError(
            f"`profile` is {profile!r}; pass a TrafficProfile, or a mapping from sizes to counts."
        )
    sizes = [corner_of(key) for key in profile]
    names = dims or (
        ("batch",) if len(sizes[0]) == 1 else [f"dim{i}" for i in range(len(sizes[0]))]
    )
    for key in sizes:
        if not key or not all(isinstance(n, int) and n >= 1 for n in key):
            raise GraphCacheError(f"`profile` has the sizes {key}; pass positive integers.")
    made = TrafficProfile(names)
    for key, count in zip(sizes, profile.values(), strict=True):
        made.record(key, count)
    return made


def corner_of(key: Any) -> tuple[int, ...]:
    """Sizes as a tuple; an int is short for one of them."""
    if not isinstance(key, (tuple, list)):
        key = (key,)
    return tuple(operator.index(n) if hasattr(n, "__index__") else n for n in key)


def read_sizes(path: str | Path, dims: Sequence[str]) -> Iterable[tuple[int, ...]]:
    """The sizes of each row of a CSV trace, in order.

    Raises:
        GraphCacheError: as `TrafficProfile.from_csv`.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            yield from _sizes(csv.DictReader(file), path, dims)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise GraphCacheError(
            f"{path}: {error}; pass a CSV file, one call a row, with the columns "
            f"{' and '.join(dims)}."
        ) from error


def _sizes(
    rows: csv.DictReader[str], path: str | Path, dims: Sequence[str]
) -> Iterable[tuple[int, ...]]:
    if not rows.fieldnames:
        raise GraphCacheError(
            f"{path} is empty; its first line names the columns: {', '.join(dims)}."
        )
    missing = [dim for dim in dims if dim not in rows.fieldnames]
    if missing:
        raise GraphCacheError(
            f"{path}: no column {missing} among {rows.fieldnames}; name the columns in `dims`."
        )
    for row in rows:
        yield tuple(_positive(row[dim], dim, path, rows.line_num) for dim in dims)


def _positive(text: str | None, dim: str, path: str | Path, line: int) -> int:
    if text is None or not text.strip().isdecimal() or int(text) < 1:
        found = "missing" if text is None else f"{text!r}, not a positive integer"
        raise GraphCacheError(f"{path}:{line}: {dim} is {found}; mend or remove the row.")
    return int(text)
