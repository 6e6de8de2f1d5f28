"""Notices that a module is no longer what was captured.

Two kinds of change. A *move*: a parameter, buffer or tensor attribute lies at another address, or
the tree of submodules changed, so every graph is stale. A *mode*: training flags or plain
attributes differ, so other graphs apply, and the old ones may serve again later. In-place updates
are neither: a replay reads them.

The full comparison runs behind the launch, where a late find can still be answered by running
again. Only one thing must be known before: that memory was given back, since a replay on unmapped
memory ends the process's CUDA context. Weak references to the storages tell that (a storage's
Python object lives as long as the storage does).
"""

from __future__ import annotations

import copy
import itertools
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from operator import getitem, is_
from typing import Any

import numpy as np
from cachetools import LRUCache
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from graphcache.delegate import Delegate
from graphcache.errors import Fallback
from graphcache.reasons import Reason
from graphcache.signature import TENSORS, flatten

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_GLOBAL_HOOKS = (
    nn.modules.module._global_forward_hooks,
    nn.modules.module._global_forward_pre_hooks,
)
_RECORDED_HOOKS = (WeightNorm, SpectralNorm)  # they only compute a weight, which a replay does too
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}

_DEPTH = 3
_MOST_INSIDE = 4096


class Watch:
    """Compares a module with what it was at the last `refresh()`.

    `state` numbers the module's present mode; it is part of every signature. `moves` counts the
    moves seen. `hooked` names the first submodule with a hook that a replay would skip.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self._module = module
        self._modes: LRUCache[Any, int] = LRUCache(256)
        self._numbers = itertools.count()
        self._extra: list[weakref.ref[Tensor]] = []
        self._layout: Any = None
        self.moves = 0
        self.lost = False
        self.refresh()

    def refresh(self) -> None:
        """Look at the whole module again: number its mode, and count a move if tensors lie
        elsewhere.
        """
        modules = list(tree(self._module))
        slots = _Slots(modules)
        self._holders = [holder for holder, _, _ in slots.places]
        self._names = [name for _, name, _ in slots.places]
        self._values = [value for _, _, value in slots.places]
        held = [value for value in self._values if isinstance(value, Tensor)]
        self._tensors = [tensor for tensor in held if not is_lazy(tensor)]
        self.lazy = len(self._tensors) < len(held)
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._containers = slots.containers
        self._length = sum(map(len, self._containers))
        hooks = [(m, kind) for m in modules for kind in _HOOKS if not _recorded(m, kind)]
        self._hooks = [*_GLOBAL_HOOKS, *(vars(m)[kind] for m, kind in hooks)]
        self.hooked = next((type(m).__name__ for m, kind in hooks if vars(m)[kind]), None)
        if any(_GLOBAL_HOOKS):
            self.hooked = "every module"
        self.state = self._number(modules)
        self._note_move([id(module) for module in modules])

    def _number(self, modules: list[nn.Module]) -> int:
        fingerprint = (
            tuple((id(module), type(module)) for module in modules),
            tuple(self._names),
            tuple(map(_comparable, self._values)),
        )
        if fingerprint not in self._modes:
            self._modes[fingerprint] = next(self._numbers)
        return self._modes[fingerprint]

    def _note_move(self, modules: list[int]) -> None:
        layout = (modules, self._addresses, [(t.shape, t.stride(), t.dtype) for t in self._tensors])
        if self.lost or (self._layout is not None and layout != self._layout):
            self.moves += 1
            self._extra = []
        self._layout = layout
        self.lost = False
        self._storages = [self._follow(tensor) for tensor in self._tensors]

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """Also watch tensors that a run read and that no submodule holds (closures, globals)."""
        held = {id(tensor) for tensor in self._tensors}
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
        """Whether everything is as at the last refresh: identities, addresses, and no hook added.

        In C loops only, a few steps for each place; no synchronisation.
        """
        try:
            held = all(map(is_, map(getitem, self._holders, self._names), self._values))
        except (KeyError, IndexError):
            return False
        return (
            held
            and not self.lost
            and self.hooked
            is None  # while hooked every call looks again, since removing a hook leaves no trace
            and not any(self._hooks)
            and [tensor.data_ptr() for tensor in self._tensors] == self._addresses
            and sum(map(len, self._containers)) == self._length
        )

    def needs_grad(self) -> bool:
        """Whether a held tensor requires grad."""
        return any(tensor.requires_grad for tensor in self._tensors) or any(
            tensor is not None and tensor.requires_grad for tensor in (ref() for ref in self._extra)
        )


def tree(module: nn.Module | None) -> Iterator[nn.Module]:
    """Every submodule; a cache inside the module stands for the module it wraps, its own counters
    are nobody's state.
    """
    for submodule in module.modules() if module is not None else ():
        inner = vars(submodule).get("_inner") if isinstance(submodule, Delegate) else submodule
        if inner is not None:
            yield inner


def _holders(module: nn.Module) -> Iterator[dict[str, Any]]:
    own = vars(module)
    yield own
    yield from (own[name] for name in ("_parameters", "_buffers", "_modules"))


class _Slots:
    """Every place that forward may read a value from: attributes of submodules, and what lies
    inside them.

    Lists, dicts and plain objects (a config) are looked into to a depth of `_DEPTH`, each once,
    `_MOST_INSIDE` places at the most, which bounds what a comparison costs.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self.places: list[tuple[Any, Any, Any]] = []
        self.containers: list[Any] = []
        self._seen: set[int] = set()
        inside: list[tuple[Any, int]] = []
        for module in modules:
            derived = _derived(module)
            for holder in _holders(module):
                self.containers.append(holder)
                for name, value in holder.items():
                    own = holder is not vars(module) or name not in _INTERNAL
                    if own and name not in derived:
                        self.places.append((holder, name, value))
                        inside.append((value, _DEPTH))
        for value, depth in inside:
            self._look_into(value, depth)

    def _look_into(self, value: Any, depth: int) -> None:
        holder = _opened(value)
        full = len(self.containers) > _MOST_INSIDE
        if holder is None or depth == 0 or id(holder) in self._seen or full:
            return
        self._seen.add(id(holder))
        self.containers.append(holder)
        items = holder.items() if isinstance(holder, dict) else enumerate(holder)
        for key, inner in list(items)[:_MOST_INSIDE]:
            self.places.append((holder, key, inner))
            self._look_into(inner, depth - 1)


def _opened(value: Any) -> Any:
    """What to look into of an attribute's value: a list, a dict, or an object's own dict."""
    if isinstance(value, (list, dict)):
        return value
    code = (type, nn.Module, Tensor, types.FunctionType, types.MethodType, types.ModuleType)
    if isinstance(value, code) or type(value).__module__.startswith(("torch.", "torch._")):
        return None
    return getattr(value, "__dict__", None)


def _derived(module: nn.Module) -> set[str]:
    """Attributes that a recorded hook computes anew in each forward."""
    hooks = vars(module)["_forward_pre_hooks"].values()
    return {hook.name for hook in hooks if isinstance(hook, _RECORDED_HOOKS)}


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
    except (Fallback, TypeError):
        return id(value)
    return spec if not leaves else id(value)


def _recorded(module: nn.Module, kind: str) -> bool:
    hooks = vars(module)[kind].values()
    return bool(hooks) and all(isinstance(hook, _RECORDED_HOOKS) for hook in hooks)


class Attributes:
    """A snapshot of what every submodule holds, and of lists, dicts, sets, objects and arrays
    inside, to tell and undo that a trial run changed it. The values of tensors are the observer's
    to undo.
    """

    def __init__(self, module: nn.Module | None) -> None:
        modules = list(tree(module))
        slots = _Slots(modules)
        derived = {id(vars(submodule)): _derived(submodule) for submodule in modules}
        values = [value for _, _, value in slots.places]
        inner = [value for value in values if type(value) in (set, deque)]
        self._taken = [
            (live, copy.copy(live), derived.get(id(live), set()))
            for live in (*slots.containers, *inner)
        ]
        self._tensors = [
            (t, t.detach(), _place(t)) for t in values if type(t) in TENSORS and not is_lazy(t)
        ]
        self._arrays = [(a, a.copy()) for a in values if isinstance(a, np.ndarray)]

    def restore(self) -> list[str]:
        """Put everything back; returns what had changed that no recorded hook computes."""
        changed = []
        for live, kept, derived in self._taken:
            if not _alike(live, kept):
                if not _alike(_without(live, derived), _without(kept, derived)):
                    changed.append(_what_changed(live, kept))
                live.clear()
                live.extend(kept) if isinstance(live, (list, deque)) else live.update(kept)
        for tensor, kept, place in self._tensors:
            if _place(tensor) != place:  # `.data =` and `set_` change an object's memory
                changed.append("the memory of a tensor that it holds")
                tensor.data = kept
        for array, kept in self._arrays:
            if not np.array_equal(array, kept, equal_nan=array.dtype.kind in "fc"):
                changed.append("a NumPy array that it holds")
                np.copyto(array, kept)
        return changed


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def is_lazy(value: Any) -> bool:
    """Whether a parameter waits for the first call to learn its shape."""
    return isinstance(value, (UninitializedParameter, UninitializedBuffer))


def _without(container: Any, names: set[str]) -> Any:
    return {k: v for k, v in container.items() if k not in names} if names else container


def _what_changed(live: Any, kept: Any) -> str:
    """For a dict the keys that are new, gone or hold another object; else the kind of container."""
    if not isinstance(live, dict):
        return f"a {type(live).__name__} that it holds"
    gone = object()
    names = [k for k in {**kept, **live} if live.get(k, gone) is not kept.get(k, gone)]
    return ", ".join(f"`{name}`" for name in names)


def _alike(live: Any, kept: Any) -> bool:
    if len(live) != len(kept):
        return False
    if isinstance(live, dict):
        return all(map(is_, live.values(), kept.values())) and all(map(is_, live, kept))
    ordered = isinstance(live, (list, deque))
    return all(map(is_, live, kept)) if ordered else bool(live == kept)


def refuse_hooks(watch: Watch) -> None:
    """Raise the `hooks` fallback if a replay would skip a hook."""
    if watch.hooked is not None:
        raise Fallback(Reason.HOOKS, f"{watch.hooked} has forward hooks")


def refuse_lazy(watch: Watch) -> None:
    """Raise the `state-written` fallback while parameters wait for their first call."""
    if watch.lazy:
        raise Fallback(Reason.STATE_WRITTEN, "this call gives lazy parameters their shape")
