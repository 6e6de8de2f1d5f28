"""The exceptions that users see, and the one that carries a fallback inside the package."""

from __future__ import annotations

from typing import NamedTuple

from graphcache.reasons import Reason


class GraphCacheError(RuntimeError):
    """Base of every error this package raises; also raised for a fallback under
    `on_fallback="raise"`.
    """


class CaptureError(GraphCacheError):
    """A capture was refused or failed."""


class BucketError(GraphCacheError, ValueError):
    """Buckets or `dynamic_shapes` that cannot be used; the message says which value and what to
    pass.
    """


class Fallback(Exception):  # noqa: N818  (control flow, never an error: it does not leave the package)
    """The piece of work at hand runs eagerly, for `reason`; `detail` names the operation, line or
    sizes, `remedy` what to do about it where the reason's own remedy does not fit.
    """

    def __init__(self, reason: Reason, detail: str = "", remedy: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail
        self.remedy = remedy or reason.remedy
        self.sizes: tuple[int, ...] | None = None  # of the call, for the traffic profile

    def again(self) -> Fallback:
        """The same, to keep or to raise anew: a raised exception holds the frames it passed, and
        their tensors.
        """
        return Fallback(self.reason, self.detail, self.remedy)

    def finding(self) -> Finding:
        return Finding(self.reason, self.detail or self.reason.phrase, remedy=self.remedy)

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail or self.reason.phrase}"


class Finding(NamedTuple):
    """One thing that stops a capture or makes padding wrong: the reason, the operation or what else
    was seen, the user's source line, "" where none is to blame, and what to do where the reason's
    own remedy does not fit.
    """

    reason: Reason
    what: str
    line: str = ""
    remedy: str = ""

    def fallback(self) -> Fallback:
        detail = f"{self.what} at {self.line}" if self.line else self.what
        return Fallback(self.reason, detail, self.remedy)
