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
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import Pool
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
    (torch.Tensor, "__reduce_ex__", Reason.HOST_COPY, "pickling or saving a tensor"),
    (torch.Tensor, "apply_", Reason.HOST_SYNC, "Tensor.apply_()"),
    (torch.Tensor, "map_", Reason.HOST_SYNC, "Tensor.map_()"),
    (torch.Tensor, "map2_", Reason.HOST_SYNC, "Tensor.map2_()"),
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


_DRAWS = (
    *_draws(random, random.random),
    *_draws(np.random, np.random.rand),
    (np.random, "default_rng", Reason.GENERATOR, "numpy.random.default_rng()"),
)
# Work for another thread, where no trial sees it, and which may wait for what this thread holds.
_HAND_OVERS = (
    (threading.Thread, "start"),
    (ThreadPoolExecutor, "submit"),
    (Pool, "apply_async"),
    (Pool, "_map_async"),
    (Pool, "imap"),
    (Pool, "imap_unordered"),
)
_FACTORIES = ("tensor", "as_tensor", "asarray")
_SPLITS = ((torch, "tensor_split"), (torch.Tensor, "tensor_split"))
# What a capture may answer otherwise than eager. Calls with gradients enabled get no graph of
# whoever asks for them, nor do inputs with gaps of whoever asks how a tensor lies, which is dense
# in a graph; calls in inference mode, or on parts of other tensors, are not told from others, so
# there nobody does.
_QUESTIONS = (
    (torch, "is_grad_enabled", Reason.GRAD, "torch.is_grad_enabled()"),
    (torch, "is_inference_mode_enabled", Reason.OPAQUE_CODE, "torch.is_inference_mode_enabled()"),
    (torch.Tensor, "stride", Reason.UNSUPPORTED_INPUT, "Tensor.stride()"),
    (torch.Tensor, "is_contiguous", Reason.UNSUPPORTED_INPUT, "Tensor.is_contiguous()"),
    (torch.Tensor, "storage_offset", Reason.OPAQUE_CODE, "Tensor.storage_offset()"),
    (torch.Tensor, "_is_view", Reason.OPAQUE_CODE, "Tensor._is_view()"),
)


#: The reasons of those questions that most calls may ask.
QUESTIONS = frozenset({Reason.GRAD, Reason.UNSUPPORTED_INPUT})
_NOT_ASKING = frozenset({"torch", "graphcache"})

# Says what to note of a call.
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

    def __init__(self, owner: Any, name: str, judge: Judge, ends: bool = False) -> None:
        self._owner, self._name, self._judge, self._ends = owner, name, judge, ends
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
        judge, ends = self._judge, self._ends

        @functools.wraps(original)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if _hearing.note is not None:
                found = judge(args, kwargs)
                if found is not None:
                    _hearing.note(*found)
                    if ends:  # forward may catch this; the note stays
                        raise Fallback(*found)
            return original(*args, **kwargs)

        return stand_in


@functools.cache
def _stand_ins() -> list[_StandIn]:
    always = [
        _StandIn(owner, name, functools.partial(_always, reason, text))
        for owner, name, reason, text in (*_READS, *_DRAWS)
    ]
    what = "forward hands work to another thread: {}.{}()"
    handed = [
        _StandIn(
            owner,
            name,
            functools.partial(_always, Reason.OPAQUE_CODE, what.format(owner.__name__, name)),
            ends=True,
        )
        for owner, name in _HAND_OVERS
    ]
    made = [_StandIn(torch, name, functools.partial(_made, name)) for name in _FACTORIES]
    split = [_StandIn(owner, name, _split_by_a_tensor) for owner, name in _SPLITS]
    asked = [
        _StandIn(owner, name, functools.partial(_asked, reason, text))
        for owner, name, reason, text in _QUESTIONS
    ]
    others = [
        _StandIn(torch.Tensor, "to", _to_the_cpu),
        _StandIn(torch.Tensor, "new_tensor", _made_anew),
    ]
    return [*always, *others, *handed, *made, *split, *asked]


def _always(
    reason: Reason, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Reason, str]:
    return reason, text


def _to_the_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Reason, str] | None:
    """`.to("cpu")` by a literal; `.to(x.device)` follows its module, whatever that is on."""
    if any(type(to) is str and to == "cpu" for to in (*args[1:2], kwargs.get("device"))):
        return Reason.HOST_COPY, 'Tensor.to("cpu")'
    return None


def _made(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Reason, str] | None:
    """A tensor made of Python values: of tensors among them, which the host reads, or for a device
    that code names by a `torch.device`, as `x.device` is, which on a GPU is a copy to it.
    """
    data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
    if _holds_tensors(data):
        return Reason.HOST_SYNC, f"torch.{name}() of a list of tensors"
    device = kwargs.get("device")
    if device is None or device == "cpu" or isinstance(data, torch.Tensor):
        return None  # of a tensor: a copy on the device, or one that the operations show
    if torch.device(device).type == "meta":
        return None
    return Reason.HOST_COPY, f"torch.{name}(..., device={device!r})"


def _made_anew(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Reason, str] | None:
    """`x.new_tensor(values)`, on x's device unless told otherwise."""
    if kwargs.get("device") is None:
        kwargs = {**kwargs, "device": args[0].device}
    found = _made("new_tensor", args[1:], kwargs)
    return None if found is None else (found[0], found[1].replace("torch.", "Tensor."))


def _holds_tensors(data: Any) -> bool:
    if not isinstance(data, (list, tuple)):
        return False
    return any(isinstance(value, torch.Tensor) or _holds_tensors(value) for value in data)


def _split_by_a_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Reason, str] | None:
    if any(isinstance(value, torch.Tensor) for value in (*args[1:], *kwargs.values())):
        return Reason.HOST_SYNC, "tensor_split() by a tensor"
    return None


def _asked(
    reason: Reason, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Reason, str] | None:
    """Asked by the user's code; torch's own asks too, but computes the same either way."""
    asking = sys._getframe(2).f_globals.get("__name__", "")
    return None if asking.split(".")[0] in _NOT_ASKING else (reason, text)
