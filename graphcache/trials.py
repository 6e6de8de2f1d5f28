"""Whether this thread runs a module for our own purposes, and not for the caller."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class _Trial(threading.local):
    depth = 0  # a class attribute, since a missing one costs a microsecond to find out


_trial = _Trial()


def in_trial() -> bool:
    """Whether this thread is inside a trial, a shadow run or a capture, in which caches inside the
    module run it plainly and count nothing.
    """
    return _trial.depth > 0


@contextlib.contextmanager
def as_trial() -> Iterator[None]:
    _trial.depth += 1
    try:
        yield
    finally:
        _trial.depth -= 1
