"""Where in the user's own code something happened."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import FrameType

_TORCH = importlib.util.find_spec("torch")  # found without importing it
_INTERNAL = tuple(
    f"{Path(file).parent}{os.sep}" for file in (_TORCH and _TORCH.origin, __file__) if file
)


def user_frame() -> tuple[FrameType, int]:
    """The innermost frame outside PyTorch and this package, and how many frames above the caller of
    this function it is.
    """
    frame, depth = sys._getframe(1), 0
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INTERNAL):
        frame, depth = frame.f_back, depth + 1
    return frame, depth


def user_line() -> str:
    """File and line of that frame."""
    frame, _ = user_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
