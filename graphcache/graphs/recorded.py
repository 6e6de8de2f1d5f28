"""The CPU recorder: one run's ATen operations, replayed on the same storages.

It stands in for a CUDA graph wherever there is no GPU, with the same hazards: addresses are fixed,
Python branches and numbers are frozen, host reads are refused, random operations draw anew, and
each replay overwrites the outputs. It does not model streams, memory pools or the CUDA generator. A
replay costs about what eager costs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from graphcache.compiled import uncompiled
from graphcache.errors import CaptureError, Fallback
from graphcache.graphs import Graph
from graphcache.hazards import operation_hazard
from graphcache.hostreads import QUESTIONS, noticing_host_reads
from graphcache.reasons import Reason
from graphcache.storages import storage_id

# Their results are memory without contents, which a replay leaves as it is.
_ALLOCATIONS = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
    }
)
# A replay must run the operations as they were dispatched, so an autocast of the caller must not
# cast them again.
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

Step = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[tuple[Tensor, int]]]


class RecordedGraph:
    """The steps of one recorded run, and its static outputs."""

    def __init__(self, steps: list[Step], outputs: list[Tensor], nbytes: int) -> None:
        self._steps = steps
        self.outputs = outputs
        self.nbytes = nbytes

    def replay(self) -> None:
        """Run every step again and put its results where the recorded run had them."""
        # What forward made in inference mode can be written to in that mode only.
        inference = any(p.is_inference() for step in self._steps for p, _ in step[3])
        mode = torch.inference_mode() if inference else torch.no_grad()
        with mode, torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            for func, args, kwargs, places in self._steps:
                result = _run(func, args, kwargs)
                if places:
                    found = result if isinstance(result, (tuple, list)) else (result,)
                    for place, index in places:
                        place.copy_(found[index])

    def reset(self) -> None:
        self._steps, self.outputs = [], []


def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return func(*args, **kwargs)
    except (RuntimeError, IndexError) as error:  # of this call's values, as in eager
        what = f"a replay raised {type(error).__name__}: {error}".splitlines()[0]
        raise Fallback(Reason.CAPTURE_FAILED, what) from error


class _Recorder(TorchDispatchMode):
    """Runs each operation and keeps it, with its arguments as they were at that moment."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self._storages: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        hazard = operation_hazard(func, args, kwargs)
        if hazard is not None:
            _refuse(*hazard)
        if func.name().startswith("aten::lift_fresh"):
            self._keep_constant(args[0])
        frozen_args, frozen_kwargs = _all_frozen((args, kwargs))
        result = func(*args, **kwargs)
        if self._needs_replay(func, args, kwargs, result):
            self.steps.append(
                (func, frozen_args, frozen_kwargs, self._places(args, kwargs, result))
            )
        return result

    def _keep_constant(self, constant: Tensor) -> None:
        """A tensor that the run makes of Python numbers; the run may write to it, so replays renew
        it.
        """
        with _disable_current_modes():
            value = constant.clone()
        copy = torch.ops.aten.copy_.default
        self.steps.append((copy, (_frozen(constant), value), {}, []))

    def _needs_replay(self, func: Any, args: Any, kwargs: Any, result: Any) -> bool:
        if func.name().split(".")[0] in _ALLOCATIONS or torch.Tag.inplace_view in func.tags:
            return False
        writes = any(
            a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments
        )
        says = writes or not func._schema.returns  # an assertion
        return says or bool(self._places(args, kwargs, result))

    def _places(self, args: Any, kwargs: Any, result: Any) -> list[tuple[Tensor, int]]:
        """The results in memory of their own, each with its index; views and in-place results have
        none.
        """
        given = {
            storage_id(tensor)
            for tensor in _pytree.tree_leaves((args, kwargs))
            if isinstance(tensor, Tensor)
        }
        found = result if isinstance(result, (tuple, list)) else (result,)
        places = []
        for index, tensor in enumerate(found):
            if isinstance(tensor, Tensor) and storage_id(tensor) not in given:
                self._storages[storage_id(tensor)] = tensor.untyped_storage().nbytes()
                places.append((_frozen(tensor), index))
        return places

    @property
    def nbytes(self) -> int:
        return sum(self._storages.values())


def _refuse(reason: Reason, what: str) -> None:
    if reason in QUESTIONS:
        return  # the calls that may not ask them are refused before
    raise CaptureError(f"{what} cannot be recorded: {reason.phrase}.")


class RecordedBackend:
    """Records on the CPU. Its pool is the sum of what its graphs hold."""

    saves_launches = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._live: dict[int, int] = {}

    def enter(self) -> None:
        pass  # CPU operations run in the caller's order

    def aside(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def check(self, run: Callable[[], object]) -> None:
        pass  # what waits for a device is in the list of hazards already

    def capture(self, run: Callable[[], list[Tensor]]) -> Graph:
        recorder = _Recorder()
        with uncompiled(), noticing_host_reads(_refuse), recorder:
            outputs = run()
        graph = RecordedGraph(recorder.steps, outputs, recorder.nbytes)
        self._live[id(graph)] = graph.nbytes
        return graph

    def lend(self, view: Tensor) -> Tensor:
        return view.clone()

    def poison(self, lent: Tensor) -> None:
        pass  # copies stay valid

    def drain(self) -> None:
        pass

    def retire(self, graph: Graph) -> None:
        self._live.pop(id(graph), None)
        graph.reset()

    def flush(self) -> None:
        self._live.clear()

    def close(self) -> None:
        pass  # ordinary memory, freed as its last reference goes

    def pool_bytes(self) -> int:
        return sum(self._live.values())

    def timed(self, run: Callable[[], object], times: int) -> float:
        started = time.perf_counter()
        for _ in range(times):
            run()
        return (time.perf_counter() - started) / times


def _frozen(value: Any) -> Any:
    """A tensor with the metadata of this moment; operations such as `transpose_` change it in place
    later.
    """
    if not isinstance(value, Tensor):
        return value
    with _disable_current_modes():
        return value.detach()


def _all_frozen(values: Any) -> Any:
    """All tensors of one operation. What was one tensor stays one: self-attention asks whether its
    key is its query, and computes in another order if it is not.
    """
    kept: dict[int, Any] = {}

    def freeze(value: Any) -> Any:
        if id(value) not in kept:
            kept[id(value)] = _frozen(value)
        return kept[id(value)]

    return _pytree.tree_map(freeze, values)
