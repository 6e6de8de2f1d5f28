"""Everything that a module holds: its submodules, also hidden ones, and every place that forward
may read a value from.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from graphcache.delegate import Delegate
from graphcache.hooks import derived_names

_INTERNAL = frozenset(vars(nn.Module())) - {"training"}

_DEPTH = 3
_MOST_INSIDE = 4096


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
    seen: set[int] = set()
    while waiting:
        for submodule in waiting.pop().modules():
            if id(submodule) not in seen:
                seen.add(id(submodule))
                waiting += _hidden(submodule)
                yield submodule


def _hidden(module: nn.Module) -> list[nn.Module]:
    """Modules in the plain containers that a module holds, or in containers of these."""
    found: list[nn.Module] = []
    values = [v for name, v in vars(module).items() if name not in _INTERNAL]
    for _ in range(_DEPTH):
        values = [
            inner
            for value in values
            if type(value) in (list, tuple, dict)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
        found += [value for value in values if isinstance(value, nn.Module)]
    return found


def _holders(module: nn.Module) -> Iterator[dict[str, Any]]:
    own = vars(module)
    yield own
    inner = (own[name] for name in ("_parameters", "_buffers", "_modules"))
    yield from (holder for holder in inner if isinstance(holder, dict))  # TorchScript has others


class Slotted(MutableMapping[str, Any]):
    """The attributes of an object without a dict of its own, as a dict."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        kinds = type(owner).__mro__
        listed = (vars(kind).get("__slots__", ()) for kind in kinds)
        self._slots = [n for names in listed for n in ((names,) if type(names) is str else names)]

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._owner, name)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._owner, name, value)

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._owner, name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._slots if hasattr(self._owner, name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __copy__(self) -> dict[str, Any]:
        return dict(self)


class Slots:
    """Every place that forward may read a value from: attributes of submodules and of their
    classes, and what lies inside them.

    Lists, tuples, dicts and plain objects (a config) are looked into to a depth of `_DEPTH`, each
    once, `_MOST_INSIDE` places at the most, which bounds what a comparison costs. `modules` are the
    submodules, `classes` their classes with the attributes that those hold.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self.modules = modules = list(tree(module))
        self.places: list[tuple[Any, Any, Any]] = []
        self.containers: list[Any] = []
        self._seen: set[int] = set()
        inside: list[tuple[Any, int]] = []
        for module in modules:
            derived = derived_names(module)
            for holder in _holders(module):
                self.containers.append(holder)
                self._seen.add(id(holder))
                for name, value in holder.items():
                    own = holder is not vars(module) or name not in _internal(module)
                    if own and name not in derived:
                        self.places.append((holder, name, value))
                        inside.append((value, _DEPTH))
        self.classes = {kind: _class_values(kind) for kind in _classes(modules)}
        for kind, values in self.classes.items():
            self.containers.append(vars(kind))
            self.places += [(self.containers[-1], name, value) for name, value in values.items()]
        for value, depth in inside:
            self._look_into(value, depth)

    def _look_into(self, value: Any, depth: int) -> None:
        holder = _opened(value)
        full = len(self.containers) > _MOST_INSIDE
        if holder is None or depth == 0 or id(holder) in self._seen or full:
            return
        self._seen.add(id(holder))
        self.containers.append(holder)
        items = holder.items() if isinstance(holder, Mapping) else enumerate(holder)
        for key, inner in list(items)[:_MOST_INSIDE]:
            self.places.append((holder, key, inner))
            self._look_into(inner, depth - 1)


def _internal(module: nn.Module) -> frozenset[str]:
    """Attributes of nn.Module itself, which are no values that forward reads. Containers replace
    their dict of modules when one is removed.
    """
    replaced = isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
    return _INTERNAL - {"_modules"} if replaced else _INTERNAL


def _opened(value: Any) -> Any:
    """What to look into of an attribute's value: a list, a dict, or an object's own dict."""
    if isinstance(value, (list, dict, tuple)):
        return value
    code = (type, nn.Module, Tensor, types.FunctionType, types.MethodType, types.ModuleType)
    if isinstance(value, code) or type(value).__module__.startswith(("torch.", "torch._")):
        return None
    if hasattr(value, "__dict__"):
        return value.__dict__
    return Slotted(value) if hasattr(type(value), "__slots__") else None


def _classes(modules: list[nn.Module]) -> list[type]:
    """The users' classes among those of the modules and their bases."""
    found = (kind for module in modules for kind in type(module).__mro__)
    ours = ("torch.", "builtins", "typing", "abc", "graphcache.")
    return [kind for kind in dict.fromkeys(found) if not kind.__module__.startswith(ours)]


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
