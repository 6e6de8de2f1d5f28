"""Which axes of which arguments are dynamic: the `dynamic_shapes` argument, read once and matched
with each call.

The form is `torch.export`'s: a dict by parameter name or a tuple by position, nested as the
argument is, each tensor's entry a dict {axis: dim} or a sequence with one entry per axis. A dim is
a string (our extension) or a `torch.export.Dim`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from graphcache.errors import BucketError
from graphcache.signature import Leaf, Node, Spec

_UNBOUNDED = 2**31  # what torch.export.Dim says where no maximum is given is larger


class DynamicDims:
    """The named dynamic dims of a module. `implicit` means: dim 0 of the first tensor, called
    "batch".

    Args:
        dynamic_shapes: as above, or None.
        parameters: forward's parameter names, in order.

    Raises:
        BucketError: an entry that names no dim, or a dict key that forward has no parameter for.
    """

    def __init__(
        self, dynamic_shapes: Any, parameters: tuple[str, ...], open_ended: bool = False
    ) -> None:
        self.implicit = dynamic_shapes is None
        if isinstance(dynamic_shapes, (tuple, list)):
            dynamic_shapes = dict(zip(parameters, dynamic_shapes, strict=False))
        if not isinstance(dynamic_shapes, (Mapping, type(None))):
            raise BucketError(
                f"`dynamic_shapes` is {dynamic_shapes!r}; pass a dict by argument, "
                "e.g. {'x': {0: 'batch'}}, or a tuple in the order of the arguments."
            )
        self._spec: Mapping[str, Any] = dynamic_shapes or {}
        unknown = [name for name in self._spec if name not in parameters]
        if unknown and not open_ended:
            raise BucketError(
                f"`dynamic_shapes` names {unknown}, "
                f"but forward's parameters are {list(parameters)}."
            )
        for name, entry in self._spec.items():
            if isinstance(entry, str):
                raise BucketError(
                    f"`dynamic_shapes[{name!r}]` is {entry!r}; say which axes, "
                    f"e.g. {{{name!r}: {{0: {entry!r}}}}}."
                )
        found = dict(_named(self._spec))
        self.names: tuple[str, ...] = ("batch",) if self.implicit else tuple(found)
        #: The largest size of each, where `torch.export.Dim(name, max=)` declares it.
        self.limits: tuple[int | None, ...] = tuple(map(found.get, self.names))
        if not self.names:
            raise BucketError(
                "`dynamic_shapes` names no dim; name one, e.g. {'x': {0: 'batch'}}, or pass None."
            )

    def match(self, arguments: Node) -> list[tuple[str, list[tuple[int, str]]]]:
        """For each tensor of the bound arguments, in order: its dotted name, and (axis, dim) for
        each dynamic axis.
        """
        return [(path, _entries(entry)) for path, entry in _walk("", arguments, self._spec)]


def _walk(path: str, spec: Spec, entry: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(spec, Leaf):
        yield path, entry
    elif isinstance(spec, Node):
        for key, child in zip(spec.keys(), spec.children, strict=True):
            yield from _walk(f"{path}.{key}" if path else str(key), child, _child(entry, key))


def _child(spec: Any, key: Any) -> Any:
    if isinstance(spec, Mapping):
        return spec.get(key)
    if isinstance(spec, (tuple, list)) and isinstance(key, int) and key < len(spec):
        return spec[key]
    return None


def _entries(entry: Any) -> list[tuple[int, str]]:
    """The (axis, dim name) pairs of one tensor's entry."""
    pairs = entry.items() if isinstance(entry, Mapping) else enumerate(entry or ())
    return [(axis, name) for axis, dim in pairs if (name := _dim_name(dim)) is not None]


def _named(spec: Any) -> Iterable[tuple[str, int | None]]:
    """Every dim named anywhere in a spec, in order, with the largest size that it declares."""
    if isinstance(spec, Mapping):
        return itertools.chain.from_iterable(map(_named, spec.values()))
    if isinstance(spec, (tuple, list)):
        return itertools.chain.from_iterable(map(_named, spec))
    name, largest = _dim_name(spec), getattr(spec, "max", None)
    declared = isinstance(largest, int) and largest < _UNBOUNDED
    return [] if name is None else [(name, largest if declared else None)]


def _dim_name(dim: Any) -> str | None:
    if dim is None or isinstance(dim, int):
        return None  # static, as in torch.export
    if isinstance(dim, str):
        return dim
    name = getattr(dim, "__name__", None)
    if isinstance(name, str):
        return name
    if getattr(getattr(dim, "type", None), "name", "") == "STATIC":  # torch.export.Dim.STATIC
        return None
    raise BucketError(
        f"`dynamic_shapes` holds {dim!r}; name each dynamic dim with a string or torch.export.Dim."
    )
