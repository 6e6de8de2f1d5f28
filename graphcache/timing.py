"""How long a replay and an eager call take at a graph's sizes; whatever they change is undone."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from torch import Tensor

from graphcache.cache import Entry
from graphcache.callplan import CallPlan
from graphcache.capture import Capturer, statics_kept
from graphcache.graphs import CAPTURE_LOCK, Backend
from graphcache.preflight import plain_modes
from graphcache.trials import as_trial

_BACK_TO_BACK, _RUNS = 5, 9
_SHORT, _LONG = 1e-3, 0.02  # seconds of a run: above the first they are timed one at a time


class Stopwatch:
    """Times runs on one backend, on the device where there is one. The caller holds the cache's
    lock, and waits.
    """

    def __init__(self, capturer: Capturer, backend: Backend) -> None:
        self._capturer = capturer
        self._backend = backend

    def replay(self, plan: CallPlan, leaves: list[Tensor]) -> float:
        """Median seconds of copying in, replaying and copying out."""
        return self._median(plan.entry, lambda: plan.run(leaves, lend=False))

    def eager(self, entry: Entry, target: Callable[..., Any], args: Any, kwargs: Any) -> float:
        """Median seconds of `target`, the module, at a graph's sizes."""
        return self._median(entry, lambda: target(*args, **kwargs))

    def _median(self, entry: Entry, run: Callable[[], object]) -> float:
        timed = self._backend.timed
        with CAPTURE_LOCK, self._backend.aside(), plain_modes(), as_trial():
            with statics_kept(entry), self._capturer.undone(entry):
                timed(run, 1)  # the first run of a shape may load kernels
                once = timed(run, 1)
                times = _BACK_TO_BACK if once < _SHORT else 1
                runs = _RUNS if once < _LONG else 3
                return statistics.median(timed(run, times) for _ in range(runs))
