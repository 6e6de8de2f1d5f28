"""What a call would do and why, as a value that prints as a small table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from graphcache.errors import Fallback, Finding
from graphcache.probe import DimFacts
from graphcache.reasons import Reason

_YES_NO = {True: "yes", False: "no"}


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer of `GraphCache.explain`.

    `action` is "replay", "capture", "split" or "eager". `sizes` and `bucket` are those of the
    dynamic `dims`, `pieces` the buckets of a split. `reason` is None unless eager, `detail` and
    `remedy` say more and what to do. `nearest` lists how the call's key differs from the closest
    captured one.
    """

    action: str
    dims: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    bucket: tuple[int, ...] | None = None
    pieces: tuple[tuple[int, ...], ...] = ()
    reason: Reason | None = None
    detail: str = ""
    remedy: str = ""
    nearest: tuple[str, ...] = field(default=())

    @classmethod
    def eager(cls, why: Fallback, **known: Any) -> Explanation:
        """A call that runs eagerly."""
        return cls("eager", reason=why.reason, detail=why.detail, remedy=why.remedy, **known)

    def __str__(self) -> str:
        rows = [("action", self.action)]
        if self.sizes:
            rows.append(
                ("sizes", ", ".join(f"{d}={n}" for d, n in zip(self.dims, self.sizes, strict=True)))
            )
        if self.bucket is not None:
            rows.append(
                (
                    "bucket",
                    ", ".join(f"{d}={n}" for d, n in zip(self.dims, self.bucket, strict=True)),
                )
            )
        if self.pieces:
            rows.append(("pieces", " + ".join("x".join(map(str, piece)) for piece in self.pieces)))
        if self.reason is not None:
            rows.append(("reason", f"{self.reason}: {self.detail or self.reason.phrase}"))
            rows.append(("to do", self.remedy or self.reason.remedy))
        rows += [("differs" if i == 0 else "", line) for i, line in enumerate(self.nearest)]
        return "\n".join(f"{name:<8}{text}" for name, text in rows)


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """The answer of `GraphCache.probe`: what was found about each dynamic dim, and what refuses the
    module altogether.
    """

    dims: dict[str, DimFacts]
    refused: Reason | None = None
    detail: str = ""
    remedy: str = ""

    def findings(self) -> list[Finding]:
        """Why it is refused, or which dims must not be padded."""
        if self.refused is not None:
            return [Finding(self.refused, self.detail, remedy=self.remedy)]
        return [
            Finding(facts.reason, f"dim {name}: {facts.detail}", remedy=facts.remedy)
            for name, facts in self.dims.items()
            if not facts.neutral
        ]

    def __str__(self) -> str:
        if self.refused is not None:
            return f"refused: {self.refused}: {self.detail or self.refused.phrase}"
        if not self.dims:
            return self.detail
        rows = [("dim", "padding", "controls", "rows independent", "outputs")]
        for name, facts in self.dims.items():
            padding = "neutral" if facts.neutral else str(facts.reason)
            controls = ", ".join(f"{k}={v}" for k, v in facts.controls.items()) or "-"
            axes = " ".join(str([a.axis for a in output]) for output in facts.axes or ()) or "-"
            rows.append((name, padding, controls, _YES_NO[facts.independent], axes))
        widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
        lines = ("".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join(lines)
