"""CUDA graphs: capture, memory pool, streams, and the repair after a failed capture.

The hard fact: a graph replays addresses. Its intermediates lie in a private pool that all graphs of
a cache share, so one replay may overwrite the outputs of another; callers copy results out on the
same stream before the next replay.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from graphcache.errors import Fallback
from graphcache.graphs import CAPTURE_LOCK, Graph
from graphcache.reasons import Reason

# From 2.12 on, resetting any graph frees the cuBLAS workspaces of its capture stream, whose
# addresses the stream's other graphs hold (pytorch/pytorch#193402). There a cache has a capture
# stream of its own, and graphs that are given up are kept until the whole generation goes.
_RESET_FREES_WORKSPACES = torch.__version__ >= "2.12"

_streams: dict[int, torch.cuda.Stream] = {}
_abandoned: list[CudaBackend] = []  # of caches that are gone, not freed yet


class CapturedGraph:
    """A `torch.cuda.CUDAGraph` with its static outputs, which are not kept alive in the pool.

    Not keeping them lets later captures use their memory: six graphs of ResNet-50 add 232 MiB
    (H200, torch 2.11, benchmarks/results/memory.json). They are read through tensors over the same
    addresses.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: list[Tensor], nbytes: int) -> None:
        self._graph = graph
        self.replay: Callable[[], None] = graph.replay
        self.outputs = [_over(tensor) for tensor in outputs]
        self.nbytes = nbytes

    def reset(self) -> None:
        self.outputs = []
        self._graph.reset()


class CudaBackend:
    """Captures on one persistent stream into one pool, and orders the streams of callers.

    Not thread-safe: the cache's lock guards it, and the process's capture lock guards captures.
    """

    saves_launches = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._raw: int | None = None
        self._last: torch.cuda.Stream | None = None
        self._live: dict[int, CapturedGraph] = {}
        self._retired: list[Graph] = []
        self._begin_generation()

    def _begin_generation(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._pool_bytes = 0
        self._anchor: torch.cuda.CUDAGraph | None = None
        self._stream = (
            _own_stream(self._index) if _RESET_FREES_WORKSPACES else _shared_stream(self._index)
        )

    def enter(self) -> None:
        raw = torch._C._cuda_getCurrentRawStream(self._index)
        if raw != self._raw:
            current = torch.cuda.current_stream(self._index)
            if self._last is not None:
                current.wait_stream(self._last)
            self._raw, self._last = raw, current

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        self.enter()
        current = torch.cuda.current_stream(self._index)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.device(self._index), torch.cuda.stream(self._stream):
                yield
        finally:  # what failed may have read the caller's tensors all the same
            current.wait_stream(self._stream)

    def check(self, run: Callable[[], object]) -> None:
        """Uses the sync-debug mode, which is process-wide: only while no other Python thread could
        trip over it.
        """
        if threading.active_count() > 1:
            return
        before = torch.cuda.get_sync_debug_mode()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of being a prototype; an error under -W error
                torch.cuda.set_sync_debug_mode("error")
            run()
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            raise Fallback(Reason.HOST_SYNC, str(error).splitlines()[0]) from error
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def capture(self, run: Callable[[], list[Tensor]]) -> Graph:
        _bury()
        if self._anchor is None:
            # A pool whose last graph goes cannot be captured into again: the pinned-memory
            # allocator asserts (2.11).
            self._anchor = self._trivial_graph(pool=self._pool)
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.memory_reserved(self._index)
        try:
            with _no_garbage_collection():
                # thread_local: another thread may allocate, copy or wait without failing this
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                outputs = run()
                _end(graph)
        except BaseException:
            self._heal(graph)
            raise
        finally:
            growth = max(0, torch.cuda.memory_reserved(self._index) - before)
            self._pool_bytes += growth
        captured = CapturedGraph(graph, outputs, growth)
        self._live[id(captured)] = captured  # so that they go before their pool, see `close`
        return captured

    def _heal(self, graph: torch.cuda.CUDAGraph) -> None:
        """After a failed capture: end it, take the allocator out of the pool, and the generator out
        of capture mode.

        Without the last step every later draw on this device raises (measured on torch 2.11); a
        successful capture of anything resets it. A capture that cannot be ended keeps its hold on
        the pool, which would never be freed.
        """
        try:
            _end(graph)
        except RuntimeError:
            for let_go in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
                with contextlib.suppress(RuntimeError):
                    let_go(self._index, self._pool)
        with contextlib.suppress(RuntimeError):
            graph.reset()
        torch.cuda.synchronize(self._index)
        self._trivial_graph().replay()
        torch.cuda.synchronize(self._index)

    def _trivial_graph(self, **pool: Any) -> torch.cuda.CUDAGraph:
        """Capture one addition, which allocates nothing."""
        graph, cell = torch.cuda.CUDAGraph(), torch.zeros(1, device=self.device)
        graph.capture_begin(capture_error_mode="thread_local", **pool)
        cell.add_(1)
        _end(graph)
        torch.cuda.current_stream().synchronize()
        return graph

    def lend(self, view: Tensor) -> Tensor:
        return _over(view)  # a storage of its own, so that it alone can be poisoned

    def poison(self, lent: Tensor) -> None:
        torch._C._set_storage_access_error_msg(
            lent,
            "this result of a GraphCache with outputs='view' was overwritten by a later call; "
            "read it before the next call, clone it, or pass outputs='copy'",
        )

    def drain(self) -> None:
        if self._last is not None:
            self._last.synchronize()  # streams wait for one another, so the last one ends last

    def retire(self, graph: Graph) -> None:
        self._live.pop(id(graph), None)
        if _RESET_FREES_WORKSPACES:
            self._retired.append(graph)
        else:
            graph.reset()

    def flush(self) -> None:
        torch.cuda.synchronize(self._index)
        for graph in self._retired:
            graph.reset()
        self._retired.clear()
        if self._anchor is not None:
            self._anchor.reset()
        self._begin_generation()  # drops the old pool, which returns its memory to the allocator
        torch.cuda.empty_cache()

    def close(self) -> None:
        """Called by the finalizer of a cache, perhaps by the garbage collector in the midst of
        anything. Left to itself the collector would free a pool before its graphs, or a graph
        during another one's capture."""
        _abandoned.append(self)
        _bury()

    def _free(self) -> None:
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(self._index)
        for graph in (*self._live.values(), *self._retired, self._anchor):
            if graph is not None:
                with contextlib.suppress(RuntimeError):
                    graph.reset()
        self._live.clear()
        self._retired.clear()
        self._anchor = None

    def pool_bytes(self) -> int:
        """What reserved memory grew by during this generation's captures.

        Not read from `torch.cuda.memory_snapshot(pool)`: some hundred calls of that ended in a
        segmentation fault (torch 2.11), which leaving out the calls, and only that, cured.
        """
        return self._pool_bytes

    def timed(self, run: Callable[[], object], times: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(times):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / times


def _bury() -> None:
    """Free what is abandoned, unless a capture is under way; then the start of the next one does.

    Never waits for the lock: the collector may run this in a thread that another one waits for.
    """
    if not _abandoned or torch.cuda.is_current_stream_capturing():
        return
    if not CAPTURE_LOCK.acquire(blocking=False):
        return
    try:
        while _abandoned:
            _abandoned.pop()._free()
    finally:
        CAPTURE_LOCK.release()


def _end(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture. Of an empty graph torch warns when all is done, which `-W error` turns into an
    exception that must not pass for a failure.
    """
    with contextlib.suppress(Warning):
        graph.capture_end()


def _over(tensor: Tensor) -> Tensor:
    """A tensor over the same memory that does not keep it allocated."""
    storage = tensor.untyped_storage()
    unowned = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    place = (unowned, tensor.storage_offset(), tensor.size(), tensor.stride())
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(*place)


def _shared_stream(index: int) -> torch.cuda.Stream:
    """One capture stream per device, so that cuBLAS keeps one workspace for all caches."""
    if index not in _streams:
        _streams[index] = torch.cuda.Stream(index)
    return _streams[index]


def _own_stream(index: int) -> torch.cuda.Stream:
    """A stream that nobody else is handed; `torch.cuda.Stream()` deals out the same 32 again and
    again.
    """
    handle = ctypes.c_void_p()
    with torch.cuda.device(index):
        error = torch.cuda.cudart().cudaStreamCreate(ctypes.addressof(handle))
    torch.cuda.check_error(error)
    return torch.cuda.ExternalStream(handle.value or 0, index)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A graph that is collected during a capture breaks the capture (pytorch/pytorch#161037)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
