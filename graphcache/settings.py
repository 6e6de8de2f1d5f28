"""The options of a GraphCache, checked once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphcache.errors import GraphCacheError
from graphcache.padding import REPEAT, Fill

_UNITS = {
    "": 1,
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}
_CHOICES = {
    "outputs": ("copy", "view"),
    "on_fallback": ("eager", "warn", "raise"),
    "backend": ("auto", "cuda", "recorded"),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Checked options; `max_graphs` is resolved against the number of buckets.

    Raises:
        GraphCacheError: a value outside what the option takes.
    """

    buckets: Any
    dynamic_shapes: Any
    fill: Mapping[str, Fill]
    split: str | None
    max_graphs: int | None
    max_bytes: int | None
    max_signatures: int
    capture_after: int
    max_padding_ratio: float | None
    outputs: str
    verify: float | str
    on_fallback: str
    backend: str
    compile: bool

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise GraphCacheError(
                    f"`{name}` is {getattr(self, name)!r}; pass one of {', '.join(choices)}."
                )
        if not isinstance(self.compile, bool):
            raise GraphCacheError(f"`compile` is {self.compile!r}; pass True or False.")
        for name in ("max_graphs", "max_signatures", "capture_after"):
            value = getattr(self, name)
            if value is not None and (
                not isinstance(value, int) or isinstance(value, bool) or value < 1
            ):
                raise GraphCacheError(f"`{name}` is {value!r}; pass an integer of at least 1.")
        if not (self.verify in ("capture", "off") or _is_fraction(self.verify)):
            raise GraphCacheError(
                f"`verify` is {self.verify!r}; "
                "pass 'capture', 'off' or a fraction above 0, at most 1."
            )
        ratio = self.max_padding_ratio
        if ratio is not None and not (isinstance(ratio, (int, float)) and ratio >= 1):
            raise GraphCacheError(
                f"`max_padding_ratio` is {self.max_padding_ratio!r}; "
                "pass padded / real, at least 1."
            )
        if not isinstance(self.fill, Mapping):
            raise GraphCacheError(
                f"`fill` is {self.fill!r}; pass a dict from input names to a number or 'repeat'."
            )
        for name, fill in self.fill.items():
            if not isinstance(name, str):
                raise GraphCacheError(f"`fill` has the key {name!r}; pass names of inputs.")
            if not (isinstance(fill, (int, float)) or (isinstance(fill, str) and fill == REPEAT)):
                raise GraphCacheError(f"`fill[{name!r}]` is {fill!r}; pass a number or 'repeat'.")
        object.__setattr__(self, "fill", dict(self.fill))  # the caller may change theirs

    @property
    def shadowed(self) -> float:
        """The share of calls that eager shadows."""
        return float(self.verify) if not isinstance(self.verify, str) else 0.0


def _is_fraction(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1


def parse_bytes(value: int | str | None) -> int | None:
    """Read `max_bytes`: bytes, or text such as "2GiB".

    Raises:
        GraphCacheError: neither.

    Example:
        >>> parse_bytes("2GiB")
        2147483648
    """
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = (
        re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if isinstance(value, str)
        else None
    )
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        raise GraphCacheError(
            f"`max_bytes` is {value!r}; pass a positive number of bytes or text such as '2GiB'."
        )
    return int(float(match[1]) * _UNITS[match[2]])
