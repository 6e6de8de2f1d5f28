"""A snapshot of what a module holds, to tell and undo that a trial run changed it."""

from __future__ import annotations

import array
import copy
import itertools
import types
from collections import deque
from collections.abc import Mapping, MutableMapping
from operator import is_
from typing import Any

import numpy as np
from torch import Tensor

from graphcache.holdings import Slots, is_lazy
from graphcache.hooks import derived_names, hook_dicts
from graphcache.signature import TENSORS
from graphcache.storages import is_plain, storage_id


class Attributes:
    """A snapshot of what every submodule holds, and of lists, dicts, sets, objects and arrays
    inside, to tell and undo that a trial run changed it. The values of tensors are the observer's
    to undo.
    """

    def __init__(self, slots: Slots) -> None:
        derived = {id(vars(part)): derived_names(part) for part in slots.modules}
        values = [value for _, _, value in slots.places]
        inner = [value for value in values if type(value) in _LOOSE]
        hooks = [held for part in slots.modules for held in hook_dicts(part)]
        self._classes = slots.classes
        self._taken = [
            (live, _copied(live), derived.get(id(live), set()))
            for live in (*slots.containers, *inner, *hooks)
            if not isinstance(live, (tuple, types.MappingProxyType))
        ]
        self._tensors = [
            (t, t.detach(), _place(t))
            for t in values
            if type(t) in TENSORS and not is_lazy(t) and is_plain(t)
        ]
        #: Identities of the tensors that the module holds, and of their storages.
        self.tensors = frozenset(id(tensor) for tensor, _, _ in self._tensors)
        self.storages = {storage_id(tensor) for tensor, _, _ in self._tensors}
        self._arrays = [(a, a.copy()) for a in values if issubclass(type(a), np.ndarray)]

    def restore(self) -> list[str]:
        """Put everything back; returns what had changed that no recorded hook computes."""
        changed = []
        for live, kept, derived in self._taken:
            if not _alike(live, kept):
                if not _alike(_without(live, derived), _without(kept, derived)):
                    changed.append(_what_changed(live, kept))
                _put_back(live, kept)
        for kind, values in self._classes.items():
            for name, value in values.items():
                if vars(kind).get(name) is not value:
                    changed.append(f"`{kind.__name__}.{name}`")
                    setattr(kind, name, value)
        for tensor, kept, place in self._tensors:
            if _place(tensor) != place:  # `.data =` and `set_` change an object's memory
                changed.append("the memory of a tensor that it holds")
                tensor.data = kept
        for live, kept in self._arrays:
            if not np.array_equal(live, kept, equal_nan=live.dtype.kind in "fc"):
                changed.append("a NumPy array that it holds")
                np.copyto(live, kept)
        return changed


_LOOSE = frozenset({set, bytearray, array.array})


def _copied(live: Any) -> Any:
    """What a container holds, in a plain one."""
    if isinstance(live, Mapping):
        return dict(live.items())
    return list(live) if isinstance(live, (list, deque)) else copy.copy(live)


def _put_back(live: Any, kept: Any) -> None:
    """Only what differs, so that another thread that uses the module finds everything there."""
    if isinstance(live, list):
        list.__setitem__(live, slice(None), kept)
    elif isinstance(live, (bytearray, array.array)):
        live[:] = kept
    elif isinstance(live, MutableMapping):
        for name in [name for name in live if name not in kept]:
            del live[name]
        live.update({k: v for k, v in kept.items() if k not in live or live[k] is not v})
        if live.keys() == kept.keys():
            same = sum(itertools.takewhile(bool, map(is_, live, kept)))
            for name in list(kept)[same:]:
                live[name] = live.pop(name)
    else:
        live.clear()
        live.extend(kept) if isinstance(live, deque) else live.update(kept)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _without(container: Any, names: set[str]) -> Any:
    return {k: v for k, v in container.items() if k not in names} if names else container


def _what_changed(live: Any, kept: Any) -> str:
    """For a dict the keys that are new, gone or hold another object; else the kind of container."""
    if not isinstance(live, Mapping):
        return f"a {type(live).__name__} that it holds"
    gone = object()
    names = [k for k in {**kept, **live} if live.get(k, gone) is not kept.get(k, gone)]
    return ", ".join(f"`{name}`" for name in names)


def _alike(live: Any, kept: Any) -> bool:
    if len(live) != len(kept):
        return False
    if isinstance(live, Mapping):
        return all(map(is_, live.values(), kept.values())) and all(map(is_, live, kept))
    ordered = isinstance(live, (list, deque))
    return all(map(is_, live, kept)) if ordered else bool(live == kept)
