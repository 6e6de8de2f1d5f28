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
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from graphcache.errors import Fallback
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
    (torch, "set_rng_state", Reason.GENERATOR, "torch.set_rng_state() or fork_rng()"),
    (torch.random, "set_rng_state", Reason.GENERATOR, "torch.random.set_rng_state()"),
    (torch.cuda, "set_rng_state", Reason.GENERATOR, "torch.cuda.set_rng_state() or fork_rng()"),
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
# Work for another thread, where no trial sees it, and which may wait for what this thread holds.
_HAND_OVERS = ((threading.Thread, "start"), (ThreadPoolExecutor, "submit"))
_FACTORIES = ("tensor", "as_tensor", "asarray")


# Says what to note of a call; what it raises ends the trial.
Judge = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Reason, str] | None]


class _Hearing(threading.local):
    """Whom the stand-ins tell, in each thread."""

    note: Note | None = None


_hearing = _Hearing()
_installing = threading.Lock()
_installed = 0


@contextlib.contextmanager
def noticing_host_reads(note: Note) -> Iterator[None]:
    """Tell `note` of each host read of this thread; what it raises stops the read."""
    outer, _hearing.note = _hearing.note, note
    _install(+1)
    try:
        yield
    finally:
        _install(-1)
        _hearing.note = outer


def _install(change: int) -> None:
    """Put the stand-ins in place for the first who listens, and take them away after the last."""
    global _installed
    with _installing:
        if _installed == 0:
            for stand_in in _stand_ins():
                stand_in.install()
        _installed += change
        if _installed == 0:
            for stand_in in _stand_ins():
                stand_in.remove()


class _StandIn:
    """Stands in for `owner.name`; made once, since a trial needs a hundred of them."""

    def __init__(self, owner: Any, name: str, judge: Judge) -> None:
        self._owner, self._name, self._judge = owner, name, judge
        self._own = name in vars(owner)  # else inherited, from the C base of Tensor
        self._original: Any = None

    def install(self) -> None:
        original = getattr(self._owner, self._name)
        if original is not self._original:  # at first, or somebody else put one in its place
            self._original, self._function = original, self._around(original)
        setattr(self._owner, self._name, self._function)

    def remove(self) -> None:
        """Unless somebody replaced it meanwhile, as torch does when it first imports Dynamo: theirs
        stays, around a stand-in that listens to nobody.
        """
        if vars(self._owner).get(self._name) is not self._function:
            return
        if self._own:
            setattr(self._owner, self._name, self._original)
        else:
            delattr(self._owner, self._name)

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        judge = self._judge

        @functools.wraps(original)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if _hearing.note is not None:
                found = judge(args, kwargs)
                if found is not None:
                    _hearing.note(*found)
            return original(*args, **kwargs)

        return stand_in


@functools.cache
def _stand_ins() -> list[_StandIn]:
    always = [
        _StandIn(owner, name, functools.partial(_always, reason, text))
        for owner, name, reason, text in (*_READS, *_DRAWS)
    ]
    handed = [
        _StandIn(owner, name, functools.partial(_handed_over, f"{owner.__name__}.{name}()"))
        for owner, name in _HAND_OVERS
    ]
    made = [
        _StandIn(torch, name, functools.partial(_made_for_the_device, name)) for name in _FACTORIES
    ]
    return [*always, _StandIn(torch.Tensor, "to", _to_the_cpu), *handed, *made]


def _always(
    reason: Reason, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Reason, str]:
    return reason, text


def _handed_over(text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise Fallback(Reason.OPAQUE_CODE, f"forward hands work to another thread: {text}")


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
