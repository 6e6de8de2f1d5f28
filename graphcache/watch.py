"""Notices that a module is no longer what was captured.

Two kinds of change. A *move*: a parameter, buffer or tensor attribute lies at another address, or
the tree of submodules changed, so every graph is stale. A *mode*: training flags or plain
attributes differ, so other graphs apply, and the old ones may serve again later. In-place updates
are neither: a replay reads them.

All of it is compared before each launch. That memory was given back, which weak references to the
storages tell (a storage's Python object lives as long as the storage does), must be known by then:
a replay on unmapped memory ends the process's CUDA context. The rest could wait for a graph that
only computes, but one that draws has drawn by then, and an index meant for a new table would fault
in the old one.
"""

from __future__ import annotations

import array
import contextvars
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import TensorGuards
from torch.nn.utils import parametrize

from graphcache.errors import Fallback
from graphcache.holdings import Slots, caches, is_lazy
from graphcache.hooks import GLOBAL_HOOKS, HOOKS, collectors, recorded
from graphcache.modes import numbering
from graphcache.outside import Outside
from graphcache.reasons import Reason
from graphcache.signature import TENSORS, flatten
from graphcache.storages import is_plain


class Watch:
    """Compares a module with what it was at the last `refresh()`.

    `state` numbers the module's present mode; it is part of every signature. `moves` counts the
    moves seen. `hooked` says which hook a replay would skip.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self._module = module
        self._numbered = numbering()
        self._extra: list[weakref.ref[Tensor]] = []
        self._layout: Any = None
        self.moves = 0
        self.lost = False
        self.refresh()

    def refresh(self) -> None:
        """Look at the whole module again: number its mode, and count a move if tensors lie
        elsewhere.
        """
        slots = Slots(self._module)
        modules = slots.modules
        self._places = slots.places
        values = [value for _, _, value in slots.places]
        held = [value for value in values if issubclass(type(value), Tensor)]
        self._scripts = [m for m in modules if isinstance(m, torch.jit.ScriptModule)]
        self._script = _script_state(self._scripts)
        made = [tensor for tensor in held if not is_lazy(tensor)]
        self.lazy = len(made) < len(held)
        self._tensors = [tensor for tensor in made if is_plain(tensor)]
        self.strange = next((str(t.layout) for t in made if not is_plain(t)), None)
        self._contents = [(v, _contents(v)) for v in values if type(v) in _UNORDERED]
        self._addresses = [(tensor, tensor.data_ptr()) for tensor in self._tensors]
        self._forms = [_form(tensor) for tensor in self._tensors]
        self._guards: deque[TensorGuards] = deque(maxlen=_MOST_GUARDS)
        self._kinds = [(module, type(module)) for module in modules]
        hooked = [*modules, *caches(self._module)]
        harmless = [vars(m)[kind] for m in hooked for kind in HOOKS if recorded(m, kind)]
        containers = [*slots.containers, *harmless]
        sized = [holder for holder in containers if not isinstance(holder, Outside)]
        self._lengths = [(holder, len(holder)) for holder in sized if holder]
        hooks = [(m, kind) for m in hooked for kind in HOOKS if not recorded(m, kind)]
        empty = [holder for holder in sized if not holder]
        self._empty = [*GLOBAL_HOOKS, *(vars(m)[kind] for m, kind in hooks), *empty]
        self._collectors = collectors(modules)
        self._parametrized = any("parametrizations" in vars(m).get("_modules", ()) for m in modules)
        rare = (self._scripts, self._contents, self._collectors, self._parametrized)
        self._rarities = any(map(bool, rare))
        names = (type(m).__name__ for m, kind in hooks if vars(m)[kind])
        self.hooked = next((f"{name} has forward hooks" for name in names), None)
        if any(GLOBAL_HOOKS):
            self.hooked = "every module has forward hooks"
        if any(collector.get() is not None for collector in self._collectors):
            self.hooked = "a model around this one collects outputs of its layers"
        if self._parametrized and parametrize._cache_enabled:
            self.hooked = "parametrize.cached() keeps values of parametrized weights"
        self.state = self._number(modules, slots)
        self._note_move([id(module) for module in modules])

    def _number(self, modules: list[nn.Module], slots: Slots) -> int:
        places = {id(holder): place for place, holder in enumerate(slots.containers)}
        fingerprint = (
            self._script,
            tuple((_Same(module), type(module)) for module in modules),
            tuple((type(holder), len(holder)) for holder in slots.containers),
            tuple((places[id(holder)], name) for holder, name, _ in slots.places),
            tuple(_comparable(value) for _, _, value in slots.places),
            tuple(kept for _, kept in self._contents),
        )
        return self._numbered(fingerprint)

    def _note_move(self, modules: list[int]) -> None:
        layout = (modules, [address for _, address in self._addresses], self._forms)
        if self.lost or (self._layout is not None and layout != self._layout):
            self.moves += 1
            self._extra = []
        self._layout = layout
        self.lost = False
        self._storages = [self._follow(tensor) for tensor in self._tensors]

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """Also watch tensors that a run read and that no submodule holds (closures, globals)."""
        extra = (tensor for tensor in (ref() for ref in self._extra) if tensor is not None)
        held = {id(tensor) for tensor in (*self._tensors, *extra)}
        for tensor in tensors:
            if id(tensor) not in held:
                self._extra.append(weakref.ref(tensor))
                self._storages.append(self._follow(tensor))

    def _follow(self, tensor: Tensor) -> weakref.ref[Any]:
        me = weakref.ref(self)

        def died(_: Any) -> None:
            watch = me()
            if watch is not None:
                watch.lost = True

        return weakref.ref(tensor.untyped_storage(), died)

    def same(self) -> bool:
        """Whether everything is as at the last refresh: identities, where and how tensors lie,
        and no hook added.

        A few steps for each place; no synchronisation. (Plain loops: CPython 3.11 and later run
        them faster than `map` over the same lists.)
        """
        try:
            for holder, name, value in self._places:
                if holder[name] is not value:
                    return False
        except (KeyError, IndexError):
            return False
        for holder, length in self._lengths:
            if len(holder) != length:
                return False
        for tensor, address in self._addresses:
            if tensor.data_ptr() != address:
                return False
        for module, kind in self._kinds:
            if type(module) is not kind:
                return False
        for guard in self._guards:
            if guard.check(*self._tensors):
                break
        else:
            if not self._formed_alike():
                return False
        return not (
            self.lost
            # While hooked every call looks again, since removing a hook leaves no trace.
            or self.hooked is not None
            or any(self._empty)
            or (self._rarities and self._rarely_other())
        )

    def _formed_alike(self) -> bool:
        """Whether tensors have the shapes, strides, dtypes and lazy bits that they had. Dynamo's
        guard compares all of them at once, but its answer also depends on the thread's mode; so
        there is one for each of the last modes, made here.
        """
        if [_form(tensor) for tensor in self._tensors] != self._forms:
            return False
        if self._tensors:
            shapes = [list(tensor.shape) for tensor in self._tensors]
            strides = [list(tensor.stride()) for tensor in self._tensors]
            sizes: Any = {"dynamic_dims_sizes": shapes, "dynamic_dims_strides": strides}
            guard = TensorGuards(*self._tensors, **sizes)
            self._guards.appendleft(guard)
        return True

    def _rarely_other(self) -> bool:
        """The same for what few modules have: TorchScript, sets and arrays, output collectors."""
        return (
            (bool(self._scripts) and _script_state(self._scripts) != self._script)
            or any(_contents(live) != kept for live, kept in self._contents)
            or any(collector.get() is not None for collector in self._collectors)
            or (self._parametrized and parametrize._cache_enabled > 0)
        )

    def needs_grad(self) -> bool:
        """Whether a held tensor requires grad."""
        return any(tensor.requires_grad for tensor in self._tensors) or any(
            tensor is not None and tensor.requires_grad for tensor in (ref() for ref in self._extra)
        )


def _script_state(modules: Sequence[nn.Module]) -> tuple[Any, ...]:
    """Training flags and tensors of TorchScript modules, whose attributes live in C++."""
    flags = tuple(getattr(module, "training", None) for module in modules)
    held = ((*m.parameters(recurse=False), *m.buffers(recurse=False)) for m in modules)
    tensors = itertools.chain.from_iterable(held)
    return flags, tuple((tensor.data_ptr(), *_form(tensor)) for tensor in tensors)


_MOST_GUARDS = 4
_UNORDERED = frozenset(
    {set, np.ndarray, bytearray, array.array, contextvars.ContextVar, threading.local}
)
_MOST_BYTES = 1 << 14


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """How a tensor lies in its memory."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _contents(value: Any) -> Any:
    """What lies in a set, bytes or a small array, to compare; of a large array its address; the
    value of a context or a thread.
    """
    if isinstance(value, contextvars.ContextVar):
        return _comparable(value.get(None))
    if isinstance(value, threading.local):
        return tuple((name, _comparable(inner)) for name, inner in vars(value).items())
    if isinstance(value, (bytearray, array.array)):
        return bytes(value)
    if isinstance(value, np.ndarray):
        small = value.nbytes <= _MOST_BYTES and not value.dtype.hasobject
        return value.shape, value.dtype, value.tobytes() if small else value.ctypes.data
    return frozenset(map(_comparable, value))


class _Same:
    """Equal for one object only, also after it is gone and its id is given to another."""

    __slots__ = ("_hash", "_ref")

    def __init__(self, value: Any) -> None:
        self._hash = id(value)
        try:
            self._ref: Any = weakref.ref(value)
        except TypeError:  # no weak references to it: kept, by a bounded number of modes
            self._ref = lambda: value

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._ref() is other._ref() is not None


def _comparable(value: Any) -> Any:
    """Plain values by type and value; tensors and containers by type (moves and their contents tell
    them apart); other objects by identity.
    """
    if type(value) in TENSORS or type(value) in (list, dict):
        return type(value)
    leaves: list[Tensor] = []
    try:
        spec = flatten(value, leaves)
        hash(spec)
    except Exception:  # of objects with ways of their own too
        return _Same(value)
    return spec if not leaves else _Same(value)


def refuse_hooks(watch: Watch) -> None:
    """Raise the `hooks` fallback if a replay would skip a hook."""
    if watch.hooked is not None:
        raise Fallback(Reason.HOOKS, watch.hooked)


def refuse_state(watch: Watch) -> None:
    """Raise a fallback for tensors of the module that no graph can read.

    Raises:
        Fallback: `state-written` while parameters wait for their first call, `unsupported-input`
            for sparse and the like, whose memory cannot be watched.
    """
    if watch.strange is not None:
        detail = f"the module holds a tensor of layout {watch.strange}"
        raise Fallback(Reason.UNSUPPORTED_INPUT, detail)
    if watch.lazy:
        raise Fallback(Reason.STATE_WRITTEN, "this call gives lazy parameters their shape")
