"""What a forward does on the host without an ATen operation, noticed by stand-ins for the functions
that do it: reads of a tensor, waits for the device, draws and seeds that a replay would leave out.

A `TorchFunctionMode` would see some of them too, but its mere presence switches off PyTorch's fast
path for transformer layers, so that a trial would run other code than eager. The stand-ins act in
one thread only and are gone after the run. A function that was imported by name escapes them.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from graphcache.reasons import Reason

Note = Callable[[Reason, str], None]

# Where each lives, what it is called there, its reason, and what to call it.
_READS = (
    (torch.Tensor, "tolist", Reason.HOST_SYNC, "Tensor.tolist()"),
    (torch.Tensor, "cpu", Reason.HOST_COPY, "Tensor.cpu()"),
    (torch.Tensor, "numpy", Reason.HOST_COPY, "Tensor.numpy()"),
    (torch.Tensor, "__array__", Reason.HOST_COPY, "Tensor.__array__()"),
    (torch.Tensor, "__dlpack__", Reason.HOST_COPY, "Tensor.__dlpack__()"),
    (torch.Tensor, "__repr__", Reason.HOST_SYNC, "printing a tensor"),
    (torch.Tensor, "__format__", Reason.HOST_SYNC, "formatting a tensor"),
    (torch, "to_dlpack", Reason.HOST_COPY, "torch.to_dlpack()"),
    (torch.utils.dlpack, "to_dlpack", Reason.HOST_COPY, "torch.utils.dlpack.to_dlpack()"),
    (torch.cuda, "synchronize", Reason.HOST_SYNC, "torch.cuda.synchronize()"),
    (torch, "manual_seed", Reason.GENERATOR, "torch.manual_seed()"),
    (torch.random, "manual_seed", Reason.GENERATOR, "torch.random.manual_seed()"),
    (torch.cuda, "manual_seed", Reason.GENERATOR, "torch.cuda.manual_seed()"),
    (torch.cuda, "manual_seed_all", Reason.GENERATOR, "torch.cuda.manual_seed_all()"),
)


def _draws(owner: Any, example: Any) -> list[tuple[Any, str, Reason, str]]:
    """The functions of a module that draw from, or seed, the one generator behind `example`.

    Not those that put a state back: the code that torch.compile makes calls them, and by themselves
    they change no number.
    """
    shared = example.__self__
    return [
        (owner, name, Reason.GENERATOR, f"{owner.__name__}.{name}()")
        for name in dir(owner)
        if getattr(getattr(owner, name), "__self__", None) is shared
        and not name.endswith(("getstate", "get_state", "setstate", "set_state"))
    ]


_DRAWS = (*_draws(random, random.random), *_draws(np.random, np.random.rand))
_FACTORIES = ("tensor", "as_tensor", "asarray")


@contextlib.contextmanager
def noticing_host_reads(note: Note) -> Iterator[None]:
    """Tell `note` of each host read of this thread; what it raises stops the read."""
    me = threading.get_ident()
    with contextlib.ExitStack() as stack:
        for owner, name, reason, text in (*_READS, *_DRAWS):
            always = functools.partial(_always, reason, text)
            stack.enter_context(_standing_in(owner, name, always, note, me))
        stack.enter_context(_standing_in(torch.Tensor, "to", _to_the_cpu, note, me))
        for name in _FACTORIES:
            made = functools.partial(_made_for_the_device, name)
            stack.enter_context(_standing_in(torch, name, made, note, me))
        yield


Judge = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Reason, str] | None]


@contextlib.contextmanager
def _standing_in(owner: Any, name: str, judge: Judge, note: Note, thread: int) -> Iterator[None]:
    original = getattr(owner, name)
    own = name in vars(owner)

    @functools.wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            found = judge(args, kwargs)
            if found is not None:
                note(*found)
        return original(*args, **kwargs)

    setattr(owner, name, stand_in)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)  # inherited, from the C base of Tensor


def _always(
    reason: Reason, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Reason, str]:
    return reason, text


def _to_the_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Reason, str] | None:
    """`.to("cpu")` by a literal; `.to(x.device)` follows its module, whatever that is on."""
    if any(type(to) is str and to == "cpu" for to in (*args[1:2], kwargs.get("device"))):
        return Reason.HOST_COPY, 'Tensor.to("cpu")'
    return None


def _made_for_the_device(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Reason, str] | None:
    device = kwargs.get("device")
    if device is None or torch.device(device).type in ("cpu", "meta"):
        return None
    if args and isinstance(args[0], torch.Tensor):
        return None  # a copy on the device, or one that the operations show
    return Reason.HOST_COPY, f"torch.{name}(..., device={device!r})"
