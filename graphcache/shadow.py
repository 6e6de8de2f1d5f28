"""Shadow runs: a share of calls is also run eagerly and compared (`verify=0.01`)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphcache.compare import all_close
from graphcache.errors import Fallback
from graphcache.reasons import Reason
from graphcache.signature import flatten
from graphcache.trials import as_trial


class Shadow:
    """Decides which calls to shadow, by a generator of its own, and compares them by the norms of
    `compare`.

    Modules that write state or draw random numbers are not shadowed: a second run would change what
    they are.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self._random = random.Random(0)

    def due(self) -> bool:
        return self._random.random() < self.share

    def run(
        self, target: Callable[..., Any], result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Fallback | None:
        """Run eagerly and compare; the mismatch, or None. Waits for the device."""
        ours: list[Tensor] = []
        theirs: list[Tensor] = []
        spec = flatten(result, ours)
        with torch.no_grad(), as_trial():
            expected = flatten(target(*args, **kwargs), theirs)
        if spec == expected and all_close(ours, theirs):
            return None
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in theirs)
        return Fallback(Reason.VERIFY_MISMATCH, f"results of shapes {shapes} differ from eager's")
