"""Graphs and the backends that capture them: CUDA, and a recorder for CPU tensors behind the same
protocols.

Captures happen in this folder only, and nothing is decided here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from graphcache.errors import Fallback
from graphcache.reasons import Reason

#: One trial or capture at a time in the process (invariant I6); a capture may start trials of its
#: own.
CAPTURE_LOCK = threading.RLock()


class Graph(Protocol):
    """One captured run at fixed addresses, as `torch.cuda.CUDAGraph` is."""

    outputs: list[Tensor]
    """Static outputs: each replay overwrites them; they may share memory with other graphs of the
    pool.
    """
    nbytes: int
    """Growth of the pool at this capture, an estimate."""

    def replay(self) -> None:
        """Run again on the same addresses; on CUDA asynchronous, on the current stream."""
        ...

    def reset(self) -> None:
        """Give the graph up; the caller has waited for its replays."""
        ...


class Backend(Protocol):
    """Captures and orders graphs of one device, in one pool of memory."""

    device: torch.device
    saves_launches: bool
    """Whether a replay can be cheaper than eager, so that the two are worth comparing."""

    def enter(self) -> None:
        """Order the current stream after the last one that used the static memory."""
        ...

    def aside(self) -> AbstractContextManager[None]:
        """The stream that trials, warm-ups and captures run on, ordered with the current one at
        both ends.
        """
        ...

    def check(self, run: Callable[[], object]) -> None:
        """Run once more where waiting for the device raises; raise `host-sync` if it does."""
        ...

    def capture(self, run: Callable[[], list[Tensor]]) -> Graph:
        """Capture one run, called inside `aside()`. On failure everything is as before, and the
        error passes on.
        """
        ...

    def lend(self, view: Tensor) -> Tensor:
        """Hand out a static output for reading until the next replay; where memory cannot be
        guarded, a copy.
        """
        ...

    def poison(self, lent: Tensor) -> None:
        """Make later reads of a lent output raise."""
        ...

    def drain(self) -> None:
        """Wait until no replay is in flight."""
        ...

    def retire(self, graph: Graph) -> None:
        """Give up one graph that nobody will replay again."""
        ...

    def flush(self) -> None:
        """Start a new generation: free the pool. The caller has retired every graph."""
        ...

    def close(self) -> None:
        """The end, when the cache itself is gone: free everything in order, or leave it for later
        if a capture is under way.
        """
        ...

    def pool_bytes(self) -> int:
        """Reserved bytes of the pool."""
        ...

    def timed(self, run: Callable[[], object], times: int) -> float:
        """Seconds of one run, of so many back to back on the current stream. Waits for them."""
        ...


def device_of(module: nn.Module | None, leaves: Sequence[Tensor]) -> torch.device:
    """The one accelerator that the module or the inputs are on, else the CPU.

    Raises:
        Fallback: `device`, if there are several.
    """
    held = [*module.parameters(), *module.buffers()] if module is not None else []
    devices = {tensor.device for tensor in (*held, *leaves) if tensor.device.type != "cpu"}
    if len(devices) > 1:
        raise Fallback(Reason.DEVICE, f"tensors on {', '.join(sorted(map(str, devices)))}")
    return devices.pop() if devices else torch.device("cpu")


def backend_for(device: torch.device, choice: str) -> Backend:
    """The backend of `device`.

    Raises:
        Fallback: `device`, when there is none or `choice` names another.
    """
    from graphcache.graphs.cuda import CudaBackend
    from graphcache.graphs.recorded import RecordedBackend

    if device.type == "cuda" and choice in ("auto", "cuda"):
        return CudaBackend(device)
    if device.type == "cpu" and choice in ("auto", "recorded"):
        return RecordedBackend()
    remedy = "leave `backend` at 'auto', or move module and inputs" if choice != "auto" else ""
    raise Fallback(Reason.DEVICE, f"tensors on {device} with backend={choice!r}", remedy)
