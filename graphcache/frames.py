"""Where in the user's own code something happened."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType

_TORCH = importlib.util.find_spec("torch")  # found without importing it
_OURS = f"{Path(__file__).parent}{os.sep}"
_NOBODYS = (
    _OURS,
    *(f"{Path(file).parent}{os.sep}" for file in (_TORCH and _TORCH.origin,) if file),
    f"{sysconfig.get_path('scripts')}{os.sep}",
    "<frozen ",
)
_LIBRARY = f"{Path(os.__file__).parent}{os.sep}"


def _is_installed(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file


def is_users(file: str, installed: bool = True) -> bool:
    """Whether code is neither PyTorch's nor this package's, nor Python's own library or a console
    script; that of `installed` packages counts.
    """
    if file.startswith(_NOBODYS):
        return False
    return installed if _is_installed(file) else not file.startswith(_LIBRARY)


def user_frame() -> tuple[FrameType | None, int]:
    """The innermost frame of a user's code, and how many frames above the caller of this function
    it is; None and the depth of the stack if there is none.

    The user's own code comes before that of installed packages, unless this package's lies between
    them: then an installed model is served, and the code further out only called it.
    """
    frame: FrameType | None = sys._getframe(1)
    installed, depth = None, 0
    while frame is not None:
        file = frame.f_code.co_filename
        if installed is not None and file.startswith(_OURS):
            break
        if is_users(file):
            if not _is_installed(file):
                return frame, depth
            installed = installed or (frame, depth)
        frame, depth = frame.f_back, depth + 1
    return installed or (None, depth)


def told(error: BaseException) -> str:
    """An error on one line, with the last line of a user's code that it came from."""
    what = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
    passed = traceback.walk_tb(error.__traceback__)
    files = [(frame.f_code.co_filename, line) for frame, line in passed]
    places = [f" at {file}:{line}" for file, line in files if is_users(file)]
    return what + "".join(places[-1:])


def user_line() -> str:
    """File and line of that frame; "" if there is none."""
    frame, _ = user_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
