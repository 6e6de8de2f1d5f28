"""Everything that a module holds: its submodules, also hidden ones, and every place that forward
may read a value from.
"""

from __future__ import annotations

import contextvars
import enum
import functools
import itertools
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from graphcache.delegate import Delegate
from graphcache.hooks import derived_names
from graphcache.outside import (
    Outside,
    functions_of,
    is_own,
    is_own_class,
    is_users_class,
    methods_run,
    names_in,
)

_INTERNAL = frozenset(vars(nn.Module())) - {"training"}

_DEPTH = 3
_MOST_INSIDE = 4096
_MOST_ENTRIES = 4 * _MOST_INSIDE


class Holder(nn.Module):
    """Holds a plain callable, so that what it reads is found as what a module's attributes read."""

    def __init__(self, target: Callable[..., Any]) -> None:
        super().__init__()
        self.target = target


def tree(module: nn.Module | None) -> Iterator[nn.Module]:
    """Every submodule, also those hidden from registration in a list, a tuple or a dict; a cache
    inside the module stands for the module it wraps, its own counters are nobody's state.
    """
    for submodule in _all_modules(module):
        inner = vars(submodule).get("_inner") if isinstance(submodule, Delegate) else submodule
        if inner is not None:
            yield inner


def caches(module: nn.Module | None) -> Iterator[nn.Module]:
    return (part for part in _all_modules(module) if isinstance(part, Delegate))


def _all_modules(module: nn.Module | None) -> Iterator[nn.Module]:
    waiting = [module] if module is not None else []
    seen: dict[int, Any] = {}  # kept, so that no id is given out again
    while waiting:
        for submodule in waiting.pop().modules():
            if id(submodule) not in seen:
                seen[id(submodule)] = submodule
                waiting += _hidden(submodule, seen)
                yield submodule


def _hidden(module: nn.Module, seen: dict[int, Any]) -> list[nn.Module]:
    """Modules that a module holds unregistered: as a plain attribute, by a bound method, in
    containers and plain objects, or as a global that its code names. `seen` are the containers and
    classes that need no second look.
    """
    if isinstance(module, Delegate):
        return []
    found: list[nn.Module] = []
    values = [v for name, v in vars(module).items() if name not in _INTERNAL]
    if id(type(module)) not in seen:
        seen[id(type(module))] = type(module)
        values += methods_run(type(module).__mro__, set())
    for _ in range(_DEPTH + 1):
        found += [value for value in values if issubclass(type(value), nn.Module)]
        holders = [holder for value in values for holder in _opened(value)]
        new = {id(holder): holder for holder in holders if id(holder) not in seen}
        seen |= new
        values = [inner for holder in new.values() for _, inner in _items(holder)]
    return found


def _holders(module: nn.Module) -> Iterator[MutableMapping[str, Any]]:
    own = vars(module)
    yield own
    inner = (own.get(name) for name in ("_parameters", "_buffers", "_modules"))
    yield from (holder for holder in inner if isinstance(holder, dict))  # TorchScript has others
    if any(map(_slots, type(module).__mro__)):
        yield Slotted(module)


class Slotted(MutableMapping[str, Any]):
    """The slots of an object, as a dict. Read by their descriptors, since the object's own
    `__getattr__` may do anything.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        kinds = reversed(type(owner).__mro__)
        self._slots = {name: slot for kind in kinds for name, slot in _slots(kind).items()}

    def __getitem__(self, name: str) -> Any:
        try:
            return self._slots[name].__get__(self._owner)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._slots[name].__set__(self._owner, value)

    def __delitem__(self, name: str) -> None:
        self._slots[name].__delete__(self._owner)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._slots if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _slots(kind: type) -> dict[str, Any]:
    if "__slots__" not in vars(kind):
        return {}  # of classes in C, whose members are not to be written
    is_slot = types.MemberDescriptorType
    return (
        {n: v for n, v in vars(kind).items() if type(v) is is_slot} if is_users_class(kind) else {}
    )


class Underneath(MutableMapping[Any, Any]):
    """A dict as it is underneath the ways of its own class, which may refuse to be written to,
    count otherwise or make entries when read.
    """

    def __init__(self, owner: dict[Any, Any]) -> None:
        self._owner = owner

    def __getitem__(self, name: Any) -> Any:
        return dict.__getitem__(self._owner, name)

    def __setitem__(self, name: Any, value: Any) -> None:
        dict.__setitem__(self._owner, name, value)

    def __delitem__(self, name: Any) -> None:
        dict.__delitem__(self._owner, name)

    def __iter__(self) -> Iterator[Any]:
        return dict.__iter__(self._owner)

    def __len__(self) -> int:
        return dict.__len__(self._owner)


class Slots:
    """Every place that forward may read a value from: attributes of submodules and of their
    classes, and what lies inside them.

    Lists, tuples, deques, dicts, plain objects (a config) and what functions of the user's own read
    from outside (see `Outside`) are looked into to a depth of
    `_DEPTH`, each once, `_MOST_INSIDE` of them and so many entries of each at the most, which
    bounds what a comparison costs. `modules` are the submodules, `classes` their classes with the
    attributes that those hold.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self.modules = modules = list(tree(module))
        self.places: list[tuple[Any, Any, Any]] = []
        self.containers: list[Any] = []
        self._seen: set[int] = set()
        self._inside = self._entries = 0
        self._names: set[str] = set()  # that code of the user's own names
        inside: list[Any] = []
        for module in modules:
            derived = derived_names(module)
            for holder in _holders(module):
                self.containers.append(holder)
                self._seen.add(id(holder))
                for name, value in holder.items():
                    own = holder is not vars(module) or name not in _internal(module)
                    if own and name not in derived:
                        self.places.append((holder, name, value))
                        inside.append(value)
        self.classes: dict[type, dict[str, Any]] = {}
        for module in modules:
            self._look_at_class(type(module))
        for value in inside:
            self._look_into(value, _DEPTH)
        self._look_at_methods()

    def _look_at_class(self, kind: type) -> None:
        """What a user's class and its bases hold, which their objects read as their own."""
        for base in kind.__mro__:
            if (
                base not in self.classes
                and is_users_class(base)
                and not issubclass(base, enum.Enum)
            ):
                self.classes[base] = _class_values(base)
                holder = vars(base)
                self.containers.append(holder)
                held = {**dict(_methods(base)), **self.classes[base]}
                self.places += [(holder, name, value) for name, value in held.items()]
                for value in self.classes[base].values():
                    self._look_into(value, _DEPTH)

    def _look_at_methods(self) -> None:
        """What methods read; it may be of classes whose methods they call."""
        seen: set[int] = set()
        while True:
            methods = [f for f in methods_run(list(self.classes), self._names) if id(f) not in seen]
            if not methods:
                return
            seen |= set(map(id, methods))
            for method in methods:
                self._look_into(method, _DEPTH)

    def _look_into(self, value: Any, depth: int) -> None:
        if depth and not issubclass(type(value), (*_CONTAINERS, nn.Module, Tensor)):
            self._look_at_class(value if issubclass(type(value), type) else type(value))
        for holder in _opened(value):
            key = id(value) if isinstance(holder, _MADE) else id(holder)
            if depth == 0 or key in self._seen or self._inside >= _MOST_INSIDE:
                continue
            self._seen.add(key)
            self._inside += 1
            self.containers.append(holder)
            if isinstance(holder, Outside):
                self._names |= names_in(value)
            most = max(0, min(_MOST_INSIDE, _MOST_ENTRIES - self._entries))
            self._entries += min(most, len(holder))
            for name, inner in itertools.islice(_items(holder), most):
                self.places.append((holder, name, inner))
                self._look_into(inner, depth - 1)


def _internal(module: nn.Module) -> frozenset[str]:
    """Attributes of nn.Module itself, which are no values that forward reads. Containers replace
    their dict of modules when one is removed.
    """
    replaced = isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
    return _INTERNAL - {"_modules"} if replaced else _INTERNAL


_CODE = (type, nn.Module, Tensor, types.ModuleType)
_MADE = (Slotted, Underneath, Outside)  # anew at each look
_CONTAINERS = (list, tuple, deque, dict, types.MappingProxyType)
_READING = ("__len__", "__getitem__", "__iter__", "items")
_LOCAL = (contextvars.ContextVar, threading.local)  # another value in each context or thread


def _opened(value: Any) -> list[Any]:
    """What to look into of a value: a container, what a partial or a bound method holds, an
    object's dict and slots.
    """
    kind = type(value)  # and not `isinstance`, which asks the object
    if issubclass(kind, _CONTAINERS):
        return _container(value)
    if issubclass(kind, functools.partial):
        return [(value.func,), value.args, value.keywords]
    if kind is types.MethodType:
        return [(value.__self__, value.__func__)]
    if kind is types.FunctionType:
        return _read_by(value)
    if kind is weakref.ref:
        return [(value(),)]
    if issubclass(kind, (*_CODE, *_LOCAL)) or not is_users_class(kind):
        return []
    try:
        own = value.__dict__
    except Exception:  # a property of that name, or there is none
        own = None
    slotted = [Slotted(value)] if any(map(_slots, kind.__mro__)) else []
    return [own, *slotted] if type(own) is dict else slotted


def _read_by(function: types.FunctionType) -> list[Any]:
    own = [function.__dict__] if function.__dict__ else []
    if not is_own(function):
        return own
    outside = Outside(function)
    return [*own, outside] if len(outside) else own


def _container(value: Any) -> list[Any]:
    """A container, unless its class has ways of its own to read it: a dict then underneath them."""
    own_ways = any(
        isinstance(getattr(type(value), name, None), types.FunctionType) for name in _READING
    )
    own = [vars(value)] if type(getattr(value, "__dict__", None)) is dict else []
    if not own_ways:
        return [value, *own]
    return [Underneath(value), *own] if isinstance(value, dict) else own


def _items(holder: Any) -> Iterable[tuple[Any, Any]]:
    return list(holder.items() if isinstance(holder, Mapping) else enumerate(holder))


def _class_values(kind: type) -> dict[str, Any]:
    """Numbers, flags and the like on a class, and the forward that it defines."""
    found = {
        name: value
        for name, value in vars(kind).items()
        if name == "forward" or not (name.startswith("__") or _is_code(value))
    }
    return dict(itertools.islice(found.items(), _MOST_INSIDE))


def _is_code(value: Any) -> bool:
    kind = type(value)
    if issubclass(kind, type):
        return not is_own_class(value)
    return issubclass(kind, types.BuiltinFunctionType) or hasattr(kind, "__get__")


def _methods(kind: type) -> list[tuple[str, Any]]:
    """The methods of a class of the user's own, as the class has them."""
    items = vars(kind).items() if is_own_class(kind) else ()
    return [(n, v) for n, v in items if functions_of(v) and (n == "__call__" or n[:2] != "__")]


def is_lazy(value: Any) -> bool:
    """Whether a parameter waits for the first call to learn its shape."""
    return isinstance(value, (UninitializedParameter, UninitializedBuffer))
