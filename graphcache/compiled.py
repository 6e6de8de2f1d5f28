"""Code that was through torch.compile: kept from being spoilt by trials, and refused where it has
CUDA graphs of its own, which cannot be captured again.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from graphcache.errors import Finding
from graphcache.holdings import tree
from graphcache.reasons import Reason


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Run compiled code as it was written. Needed around a dispatch mode of ours: torch.compile
    would see the mode, skip the code, and go on skipping it for the rest of the process.
    """
    if "torch._dynamo" not in sys.modules:  # then nothing is compiled, and importing it takes long
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def own_graphs(target: Callable[..., Any], module: nn.Module | None) -> list[Finding]:
    """What was compiled with `mode="reduce-overhead"` or "max-autotune", or with the option that
    these set.
    """
    what = (
        "{} is compiled with CUDA graphs of its own; "
        'compile it by the default mode or by mode="max-autotune-no-cudagraphs"'
    )
    names = (name for name, part in _compiled(target, module) if _has_graphs(part))
    return [Finding(Reason.CAPTURE_FAILED, what.format(name)) for name in dict.fromkeys(names)]


def _compiled(target: Callable[..., Any], module: nn.Module | None) -> Iterator[tuple[str, Any]]:
    """Whatever may have been through torch.compile: the target, submodules, their `compile()`."""
    yield _name(target), target
    for submodule in tree(module):
        name = _name(submodule)
        yield name, submodule
        yield name, vars(submodule).get("_compiled_call_impl")


def _name(part: Any) -> str:
    part = getattr(part, "_orig_mod", part)
    return getattr(part, "__name__", type(part).__name__)


def _has_graphs(part: Any) -> bool:
    """torch.compile leaves the compiler's options on what it returns."""
    get = getattr(part, "get_compiler_config", None)
    config = get() if get is not None else None
    return bool(config and config.get("triton.cudagraphs"))
