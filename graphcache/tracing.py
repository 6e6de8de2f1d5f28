"""Is the caller itself tracing or capturing? Then the module runs plainly, inside the caller's own
graph.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from graphcache.errors import Fallback
from graphcache.reasons import Reason


def refuse_tracing() -> None:
    """Raise the `tracing` fallback under a dispatch mode, functorch, torch.jit or a function mode
    of the caller's.
    """
    if torch._C._len_torch_dispatch_stack():
        raise Fallback(Reason.TRACING, "a dispatch mode is active")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise Fallback(Reason.TRACING, "inside a functorch transform")
    if forward_ad._current_level >= 0:
        raise Fallback(Reason.TRACING, "inside a level of forward-mode differentiation")
    if torch._C._get_tracing_state() is not None:
        raise Fallback(Reason.TRACING, "inside torch.jit.trace")
    if torch._C._len_torch_function_stack():
        modes = [
            mode
            for mode in _get_current_function_mode_stack()
            if not isinstance(mode, DeviceContext)
        ]
        if (
            modes
        ):  # `with torch.device(...)` only chooses where new tensors go, and is part of the key
            raise Fallback(Reason.TRACING, f"the function mode {type(modes[0]).__name__} is active")


def refuse_capturing() -> None:
    """Raise the `nested-capture` fallback while the current CUDA stream is being captured."""
    if torch._C._cuda_isCurrentStreamCapturing():
        raise Fallback(Reason.NESTED_CAPTURE, "the current stream is being captured")
