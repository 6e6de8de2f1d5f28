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
_PYTHONS = (f"{Path(os.__file__).parent}{os.sep}", "<frozen ")


def _is_users(file: str) -> bool:
    """Whether code is neither PyTorch's nor this package's nor of Python's own library."""
    installed = "site-packages" in file or "dist-packages" in file
    return not file.startswith(_INTERNAL) and (installed or not file.startswith(_PYTHONS))


def user_frame() -> tuple[FrameType, int]:
    """The innermost frame outside PyTorch, this package and Python's own library, and how many
    frames above the caller of this function it is.
    """
    frame, depth = sys._getframe(1), 0
    while frame.f_back is not None and not _is_users(frame.f_code.co_filename):
        frame, depth = frame.f_back, depth + 1
    return frame, depth


def user_line() -> str:
    """File and line of that frame."""
    frame, _ = user_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
