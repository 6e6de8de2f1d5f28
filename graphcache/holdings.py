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
from graphcache.frames import is_users
from graphcache.hooks import derived_names

_INTERNAL = frozenset(vars(nn.Module())) - {"training"}

_DEPTH = 3
_MOST_INSIDE = 4096


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
        values += _run_by(type(module))
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
    is_slot = types.MemberDescriptorType
    return {n: v for n, v in vars(kind).items() if type(v) is is_slot} if _is_users(kind) else {}


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


class Outside(MutableMapping[str, Any]):
    """What the user's own function reads by name from outside: its closure, and the globals that
    its code names, without modules, classes and what installed packages define.
    """

    def __init__(self, function: types.FunctionType) -> None:
        code, cells = function.__code__, function.__closure__ or ()
        self._globals = function.__globals__
        self._cells = dict(zip(code.co_freevars, cells, strict=True))
        names = [name for name in _named(code) if name in self._globals]
        found = {name: self._globals[name] for name in names if name not in self._cells}
        self._names = (*self._cells, *(n for n, value in found.items() if not _is_fixed(value)))

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cells[name].cell_contents if name in self._cells else self._globals[name]
        except ValueError:  # a cell that is empty yet
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._cells:
            self._cells[name].cell_contents = value
        else:
            self._globals[name] = value

    def __delitem__(self, name: str) -> None:
        if name in self._cells:
            del self._cells[name].cell_contents
        else:
            del self._globals[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name in self)

    def __len__(self) -> int:
        return len(self._names)


def _named(code: types.CodeType) -> list[str]:
    """The names in a function's code, functions within it included."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return [*code.co_names, *itertools.chain.from_iterable(map(_named, inner))]


def _is_fixed(value: Any) -> bool:
    """Whether a global is none that a user changes: a module, a class, a logger, a function of an
    installed package.
    """
    if isinstance(value, types.FunctionType):
        return not _is_own(value)
    return issubclass(type(value), _FIXED) or type(value).__module__.split(".")[0] in _BUSY


def _is_own(function: types.FunctionType) -> bool:
    return is_users(function.__code__.co_filename, installed=False)


def _run_by(kind: type) -> list[types.FunctionType]:
    """The methods of the user's own that a call runs: `forward` or `__call__`, and those that the
    code of these names.
    """
    bases = [base for base in reversed(kind.__mro__) if _is_users(base)]
    methods = {name: value for base in bases for name, value in vars(base).items()}
    found: dict[str, types.FunctionType] = {}
    waiting = ["forward", "__call__"]
    while waiting:
        name = waiting.pop()
        method = methods.get(name)
        if name not in found and isinstance(method, types.FunctionType) and _is_own(method):
            found[name] = method
            waiting += _named(method.__code__)
    return list(found.values())


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
        self._inside = 0
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

    def _look_at_class(self, kind: type) -> None:
        """What a user's class and its bases hold, which their objects read as their own."""
        for base in kind.__mro__:
            if base not in self.classes and _is_users(base) and not issubclass(base, enum.Enum):
                self.classes[base] = _class_values(base)
                holder = vars(base)
                self.containers.append(holder)
                self.places += [(holder, n, value) for n, value in self.classes[base].items()]
                for value in (*self.classes[base].values(), *_run_by(base)):
                    self._look_into(value, _DEPTH)

    def _look_into(self, value: Any, depth: int) -> None:
        if depth and not issubclass(type(value), (*_CONTAINERS, nn.Module, Tensor)):
            self._look_at_class(value if isinstance(value, type) else type(value))
        for holder in _opened(value):
            key = id(value) if isinstance(holder, _MADE) else id(holder)
            if depth == 0 or key in self._seen or self._inside >= _MOST_INSIDE:
                continue
            self._seen.add(key)
            self._inside += 1
            self.containers.append(holder)
            for name, inner in itertools.islice(_items(holder), _MOST_INSIDE):
                self.places.append((holder, name, inner))
                self._look_into(inner, depth - 1)


def _internal(module: nn.Module) -> frozenset[str]:
    """Attributes of nn.Module itself, which are no values that forward reads. Containers replace
    their dict of modules when one is removed.
    """
    replaced = isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
    return _INTERNAL - {"_modules"} if replaced else _INTERNAL


_CODE = (type, nn.Module, Tensor, types.ModuleType)
_FIXED = (type, types.ModuleType, types.BuiltinFunctionType)
_MADE = (Slotted, Underneath, Outside)  # anew at each look
_CONTAINERS = (list, tuple, deque, dict, types.MappingProxyType)
_READING = ("__len__", "__getitem__", "__iter__", "items")
_LOCAL = (contextvars.ContextVar, threading.local)  # another value in each context or thread
_OURS = frozenset({"torch", "builtins", "typing", "abc", "graphcache"})
_BUSY = frozenset({"_io", "asyncio", "concurrent", "io", "logging", "multiprocessing", "threading"})


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
    if issubclass(kind, (*_CODE, *_LOCAL)) or not _is_users(kind):
        return []
    try:
        own = value.__dict__
    except Exception:  # a property of that name, or there is none
        own = None
    slotted = [Slotted(value)] if any(map(_slots, kind.__mro__)) else []
    return [own, *slotted] if type(own) is dict else slotted


def _read_by(function: types.FunctionType) -> list[Any]:
    own = [function.__dict__] if function.__dict__ else []
    if not _is_own(function):
        return own
    outside, kept = Outside(function), (function.__defaults__, function.__kwdefaults__)
    return [*own, *([outside] if len(outside) else []), *filter(None, kept)]


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


def _is_users(kind: type) -> bool:
    """Whether a class may hold what a user changes: it is not torch's, but for distributions, and
    none of Python's that keep books of their own.
    """
    where = kind.__module__
    return where.split(".")[0] not in _OURS | _BUSY or where.startswith("torch.distributions.")


def _class_values(kind: type) -> dict[str, Any]:
    """Numbers, flags and the like on a class, and the forward that it defines."""
    return {
        name: value
        for name, value in vars(kind).items()
        if name == "forward" or not (name.startswith("__") or _is_code(value))
    }


def _is_code(value: Any) -> bool:
    return callable(value) or hasattr(value, "__get__")


def is_lazy(value: Any) -> bool:
    """Whether a parameter waits for the first call to learn its shape."""
    return isinstance(value, (UninitializedParameter, UninitializedBuffer))
