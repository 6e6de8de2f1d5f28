"""What code of the user's own reads from outside: its closures, the globals that it names, and the
methods that it may call.

That of installed packages is taken as it is: nobody changes it between two calls, and there is much
of it.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

from graphcache.frames import is_users

_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})
_DEFAULTS = ("__defaults__", "__kwdefaults__")
_MAKING = frozenset({"__init__", "__new__", "__init_subclass__", "__set_name__"})
_HELD_BY: dict[type, tuple[str, ...]] = {
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget",),
    functools.cached_property: ("func",),
    functools.singledispatchmethod: ("func",),
    functools.partialmethod: ("func",),
}
_FIXED = (type, types.ModuleType, types.BuiltinFunctionType)
_MOST_LAYERS = 16
_OURS = frozenset({"torch", "builtins", "typing", "abc", "graphcache"})
_BUSY = frozenset({"_io", "asyncio", "concurrent", "io", "logging", "multiprocessing", "threading"})


class Outside(MutableMapping[str, Any]):
    """What the user's own function reads by name from outside: its closure, and the globals that
    its code names, without modules, classes and what installed packages define.
    """

    def __init__(self, function: types.FunctionType) -> None:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self._cells = {name: cell for name, cell in cells if not _is_empty(cell)}
        self._globals, self._function = function.__globals__, function
        names = [n for n in _globals_in(function.__code__) if n in self._globals]
        found = {n: self._globals[n] for n in names if n not in self._cells}
        named = (n for n, value in found.items() if not _is_fixed(value))
        defaults = (name for name in _DEFAULTS if getattr(function, name) is not None)
        self._names = (*self._cells, *named, *defaults)

    def __getitem__(self, name: str) -> Any:
        if name in _DEFAULTS:
            return getattr(self._function, name)
        try:
            return self._cells[name].cell_contents if name in self._cells else self._globals[name]
        except ValueError:  # emptied since
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        if name in _DEFAULTS:
            setattr(self._function, name, value)
        elif name in self._cells:
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


def _is_empty(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is cell  # of course not
    except ValueError:
        return True


@functools.lru_cache(4096)
def _globals_in(code: types.CodeType) -> tuple[str, ...]:
    """The globals that a function's code reads or writes, functions within it included. Not
    `co_names`, which has the attributes too: a script's variable of such a name is not its own.
    """
    found = {i.argval: None for i in dis.get_instructions(code) if i.opname in _GLOBAL}
    for inner in _codes_in(code):
        found |= dict.fromkeys(_globals_in(inner))
    return tuple(found)


def names_in(function: types.FunctionType) -> set[str]:
    """Every name in the code of a function and of what it wraps: what it may call."""
    return set().union(*(_names_in(layer.__code__) for layer in _layers(function)))


def _names_in(code: types.CodeType) -> set[str]:
    return set(code.co_names).union(*map(_names_in, _codes_in(code)))


def _codes_in(code: types.CodeType) -> list[types.CodeType]:
    return [const for const in code.co_consts if isinstance(const, types.CodeType)]


def _is_fixed(value: Any) -> bool:
    """Whether a global is none that a user changes: a module, a logger, a class or function of an
    installed package.
    """
    kind = type(value)
    if kind is types.FunctionType:
        return not is_own(value)
    if issubclass(kind, type):
        return not is_own_class(value)
    return issubclass(kind, _FIXED) or _package(kind) in _BUSY


def is_own(function: types.FunctionType) -> bool:
    """Whether the user's own code made a function, or what a library's decorator wraps in it."""
    return any(is_users(f.__code__.co_filename, installed=False) for f in _layers(function))


def _layers(function: types.FunctionType) -> list[types.FunctionType]:
    """A function and what it wraps, innermost last."""
    layers = [function]
    while len(layers) < _MOST_LAYERS:  # they may go in circles
        wrapped = vars(layers[-1]).get("__wrapped__")
        if type(wrapped) is not types.FunctionType:
            break
        layers.append(wrapped)
    return layers


def is_own_class(kind: type) -> bool:
    """Whether the user's own code defines a class."""
    if not is_users_class(kind):
        return False
    where = _module_of(kind)
    file = getattr(sys.modules.get(where), "__file__", None)
    if not isinstance(file, str):
        return where not in sys.builtin_module_names
    return is_users(file, installed=False)


def methods_run(kinds: Iterable[type], names: set[str]) -> list[types.FunctionType]:
    """The methods of the user's own that a call may run: `forward`, those with a meaning to Python,
    and those that code names, which is added to `names`.
    """
    users = (kind for kind in kinds if is_users_class(kind))
    methods = [(n, f) for kind in users for n, v in vars(kind).items() for f in functions_of(v)]
    found: dict[int, types.FunctionType] = {}
    while True:
        new = [
            function
            for name, function in methods
            if id(function) not in found
            and (name in names or name == "forward" or (name[:2] == "__" and name not in _MAKING))
            and is_own(function)
        ]
        if not new:
            return list(found.values())
        found |= {id(function): function for function in new}
        names.update(*map(names_in, new))


def functions_of(value: Any) -> list[types.FunctionType]:
    """The functions behind an entry of a class: itself, or what a descriptor of Python's holds."""
    held = [getattr(value, name, None) for name in _HELD_BY.get(type(value), ())]
    return [f for f in (value, *held) if type(f) is types.FunctionType]


def is_users_class(kind: type) -> bool:
    """Whether a class may hold what a user changes: it is not torch's, but for distributions, and
    none of Python's that keep books of their own.
    """
    where = _module_of(kind)
    return where.split(".")[0] not in _OURS | _BUSY or where.startswith("torch.distributions.")


def _module_of(kind: type) -> str:
    """Read past the class's own ways, which may refuse."""
    try:
        where = type.__dict__["__module__"].__get__(kind)
    except AttributeError:
        where = None
    return where if isinstance(where, str) else ""


def _package(kind: type) -> str:
    return _module_of(kind).split(".")[0]
