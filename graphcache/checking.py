"""`check`: what would stop a capture of a module, or make padding it wrong. Needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from graphcache.errors import Finding
from graphcache.explain import ProbeReport
from graphcache.reasons import Reason
from graphcache.runtime import GraphCache

# Large enough for rows to be told apart, small enough for a few dozen runs of a large model.
_BUCKET = 8


@dataclass(frozen=True, slots=True)
class Report:
    """The answer of `check`: findings in the order of the run, and what the padding probe found.

    `findings` are `(reason, what, line)`: `remedy(finding)` says what to do, `line` is the user's
    source line, "" where none is to blame. `evaluating`: the module is in eval mode throughout.
    Prints as a table.
    """

    name: str
    findings: tuple[Finding, ...] = ()
    probe: ProbeReport = field(default_factory=lambda: ProbeReport({}))
    evaluating: bool = False

    @property
    def ok(self) -> bool:
        """Whether calls like this one are served by graphs, padded."""
        return not self.findings

    def remedy(self, found: Finding) -> str:
        """What to do about a finding: its reason's remedy, where that would change anything."""
        if found.reason is Reason.BATCH_COUPLED and self.evaluating:
            return "only exact sizes can have graphs; `model.eval()` is in force and does not help"
        return found.remedy or found.reason.remedy

    def __str__(self) -> str:
        count = len(self.findings)
        lines = [f"{self.name}: {count or 'no'} finding{'' if count == 1 else 's'}"]
        for found in self.findings:
            lines.append(f"{found.reason}: {found.what}")
            lines += [f"    at {found.line}"] if found.line else []
            lines.append(f"    to do: {self.remedy(found)}")
        if self.probe.dims:
            lines += ["", str(self.probe)]
        return "\n".join(lines)


def check(module: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Find what would stop a capture of `module(*args, **kwargs)` or make padding it wrong.

    Trial runs on the device that the module is on, undone: parameters, buffers, attributes and
    generators are what they were. On the CPU the recorder stands in for CUDA graphs. Waits for the
    device.

    Not everything is found at once: padding is tried only where nothing stops a capture of the call
    as it is, so check again after mending that.

    Args:
        module: an nn.Module, a bound method, a plain callable, or a GraphCache, whose dims, buckets
            and fills are then the ones checked.
        args: arguments of one call; kwargs likewise.

    Example:
        >>> import torch
        >>> class Gate(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x + 1 if x.sum().item() > 0 else x
        >>> [str(found.reason) for found in check(Gate(), torch.ones(3, 4)).findings]
        ['host-sync']
    """
    cache = module if isinstance(module, GraphCache) else GraphCache(module, [_BUCKET])
    findings, probe = cache._look(args, kwargs)
    return Report(cache._name(), tuple(findings), probe, _evaluating(cache.module))


def _evaluating(wrapped: Callable[..., Any]) -> bool:
    owner = getattr(wrapped, "__self__", wrapped)
    return isinstance(owner, nn.Module) and not any(part.training for part in owner.modules())
