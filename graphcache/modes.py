"""The settings of the thread and of the process that a call runs under.

A graph keeps the kernels of its capture, so what chooses kernels is part of the key; and under some
settings (a caller who traces or captures) no graph may serve at all.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import call
from typing import Any

import torch
from torch._C._dynamo.guards import GlobalStateGuard
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack

# What chooses kernels in the whole process. The guarded ones `GlobalStateGuard` compares too.
_GUARDED_FLAGS = ("get_default_dtype", "_get_deterministic_algorithms")
_GUARDED_CUDA_FLAGS = (
    "_get_cublas_allow_fp16_reduced_precision_reduction",
    "_get_cublas_allow_bf16_reduced_precision_reduction",
)
_ATTENTION_FLAGS = (
    "_get_flash_sdp_enabled",
    "_get_mem_efficient_sdp_enabled",
    "_get_math_sdp_enabled",
    "_get_sdp_priority_order",
    "_get_cudnn_sdp_enabled",
)
_CUDNN_FLAGS = (
    "_get_cudnn_enabled",
    "_get_cudnn_benchmark",
    "_get_cudnn_deterministic",
    "_get_cudnn_allow_tf32",
)
_CUDA_KERNEL_FLAGS = ("_get_cublas_allow_fp16_accumulation", "_get_cublas_allow_tf32")
# Parts of the names of the operations that depend on them.
_ATTENTION = re.compile("attention|_sdp_|transformer")
_CUDNN = re.compile("cudnn|conv|norm|rnn|lstm|gru|ctc|grid|attention")
# Where any of these is not at rest a call runs eagerly (see `tracing`), so no plan is found under
# its key.
_CONTEXT: tuple[Callable[[], Any], ...] = (
    torch._C._len_torch_dispatch_stack,
    torch._C._is_tracing,
    torch._C._functorch.peek_interpreter_stack,
    functools.partial(getattr, forward_ad, "_current_level"),
)
_TF32_FLAGS = frozenset({"_get_cublas_allow_tf32", "_get_cudnn_allow_tf32"})
_FP32_BACKEND = {"cuda": "cuda", "cpu": "mkldnn"}
_FP32_OPS = ("matmul", "conv", "rnn")


def _getters(names: Sequence[str]) -> list[Callable[[], Any]]:
    return [getattr(torch._C, name) for name in names if hasattr(torch._C, name)]


def _precision(device_type: str, operation: str) -> Callable[[], str]:
    """Reads how float32 is computed: "ieee" or "none" in full, "tf32" or "bf16" not."""
    backend = _FP32_BACKEND.get(device_type, "generic")
    return functools.partial(torch._C._get_fp32_precision_getter, backend, operation)


def matmul_precision(device: torch.device) -> str:
    """How float32 matmuls are computed on a device at present, as `_precision` says it."""
    return _precision(device.type, "matmul")()


def _stream_number(device: torch.device) -> Callable[[], int]:
    """Reads the current stream's number; that of the default stream is 0."""
    if device.type != "cuda":
        return int
    index = torch.cuda.current_device() if device.index is None else device.index
    return functools.partial(torch._C._cuda_getCurrentRawStream, index)


def _order_attention(device: torch.device) -> None:
    """Have PyTorch order its attention backends for this GPU. It does so at the first use, which
    would be a setting changed by the first call.
    """
    query = torch.empty(1, 1, 1, 8, dtype=torch.float16, device=device)
    torch._fused_sdp_choice(query, query, query)


def numbering() -> Callable[[Hashable], int]:
    """Numbers values, equal ones alike; the last 256 of them are remembered."""
    numbers = itertools.count()
    return functools.lru_cache(256)(lambda _: next(numbers))


class Modes:
    """Reads the settings of the thread and of the process that a call runs under, for one device.
    The hit path reads them at each call.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._attention = self._cudnn = False  # does any operation seen depend on these flags?
        self._legible = device.type == "cuda"  # do the older flags for TF32 answer?
        guarded = _getters(_GUARDED_FLAGS)
        self._precision: list[Callable[[], Any]] = [
            _precision(device.type, operation) for operation in _FP32_OPS
        ]
        if device.type == "cuda":
            guarded += _getters(_GUARDED_CUDA_FLAGS)
            _order_attention(device)
        self._guarded = [torch.is_grad_enabled, *guarded]
        self._context = [*_CONTEXT, torch._C._len_torch_function_stack, _stream_number(device)]
        exact = self._flags(attention=True, cudnn=True, legible=False)
        self._kernels = [*exact, *guarded]
        self._numbered = numbering()
        self._last: tuple[list[Any], int, GlobalStateGuard] = ([], -1, GlobalStateGuard())
        self._scoped_last: tuple[list[Any], int] = ([], -1)
        self._read_anew()

    def heed(self, operations: Iterable[str]) -> None:
        """From now on read the settings that these operations depend on. Every graph's operations
        were seen by a trial before it was captured, so settings that none depends on choose no
        kernel of any graph.
        """
        strange = any(not name.startswith("aten::") for name in operations)
        attention = strange or any(map(_ATTENTION.search, operations))
        cudnn = strange or any(map(_CUDNN.search, operations))
        if (attention and not self._attention) or (cudnn and not self._cudnn):
            self._attention |= attention
            self._cudnn |= cudnn
            self._read_anew()

    def _read_anew(self) -> None:
        flags = self._flags(self._attention, self._cudnn, self._legible)
        self._open = [*flags, *self._context]

    def _flags(self, attention: bool, cudnn: bool, legible: bool) -> list[Callable[[], Any]]:
        """What to read of what chooses kernels, but what is guarded; TF32 by the older flags where
        they answer, which costs less than by the newer settings.
        """
        names = [*_ATTENTION_FLAGS[: None if self.device.type == "cuda" else -1]] * attention
        if self.device.type == "cuda":
            names += [*_CUDA_KERNEL_FLAGS, *_CUDNN_FLAGS[: None if cudnn else 0]]
        if legible:
            return _getters(names)
        return [*_getters([n for n in names if n not in _TF32_FLAGS]), *self._precision]

    def kernels(self) -> tuple[Any, ...]:
        """What chooses kernels: part of every signature."""
        return _frozen([*map(call, self._kernels), *self._scoped()])

    def everything(self) -> int:
        """A number for that and for what decides whether a graph may serve at all: grad, tracing,
        capturing.

        To compare with the last answers costs less than to hash them, and Dynamo's guard of the
        global state less than the getters that it makes up for. PyTorch's older flags for TF32
        refuse to answer once a newer setting says what they cannot.
        """
        try:
            flags: list[Any] = list(map(call, self._open))
            last, number, guard = self._last
            if flags == last and guard.check():
                return number
        except RuntimeError:
            self._legible = False
            self._read_anew()
            flags = list(map(call, self._open))
        return self._number(flags)

    def _number(self, flags: list[Any]) -> int:
        """The same for other flags than the last. Streams share plans, so their numbers are left
        out; the default stream cannot be captured, so there the driver is not asked.
        """
        *rest, functions, stream = flags
        rest += [functions, *map(call, self._guarded), *self._scoped()]
        if not (functions or stream):
            number = self._numbered(_frozen(rest))
            with contextlib.suppress(RuntimeError):  # it reads an older flag too
                self._last = flags, number, GlobalStateGuard()
            return number
        if stream and torch._C._cuda_isCurrentStreamCapturing():
            rest.append("capturing")
        if rest != self._scoped_last[0]:
            self._scoped_last = rest, self._numbered(_frozen(rest))
        return self._scoped_last[1]

    def _scoped(self) -> list[Any]:
        """The settings of a `with`: autocast, and `torch.device("...")`, a function mode."""
        found: list[Any] = []
        if torch.is_autocast_enabled(self.device.type):
            found.append(torch.get_autocast_dtype(self.device.type))
        if torch._C._len_torch_function_stack():
            stack = _get_current_function_mode_stack()
            found += (torch.get_default_device(), *map(type, stack))
        return found


def _frozen(flags: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(tuple(flag) if isinstance(flag, list) else flag for flag in flags)
