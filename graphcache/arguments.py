"""The values of command-line options, read from text; errors are argparse's."""

from __future__ import annotations

from argparse import ArgumentTypeError

from graphcache.errors import GraphCacheError
from graphcache.settings import parse_bytes

FORM = "8 for all dims, or batch=1,seq=8"


def count(text: str) -> int:
    """A positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is no positive integer")
    return int(text)


def names(text: str) -> tuple[str, ...]:
    """Different names, with commas between them."""
    found = tuple(name.strip() for name in text.split(","))
    if not all(found) or len(set(found)) < len(found):
        raise ArgumentTypeError(f"{text!r} is no list of different columns, such as batch,seq")
    return found


def per_dim(text: str) -> int | dict[str, int]:
    """A size for all dims, or one for each that is named."""
    if "=" not in text:
        return count(text)
    pairs = [pair.partition("=") for pair in text.split(",")]
    return {name.strip(): count(size.strip()) for name, _, size in pairs}


def nbytes(text: str) -> int | None:
    """A number of bytes, with a unit or without."""
    try:
        return parse_bytes(int(text) if text.isdecimal() else text)
    except GraphCacheError as error:
        raise ArgumentTypeError(f"{text!r} is no size such as 2GiB") from error
