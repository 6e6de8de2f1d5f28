"""What a call is made of: its tensors, its structure and plain values, and the modes it runs under.

Two readings of the same call. `call_key` is the hit path's: a flat, hashable description made in a
microsecond or two, with the raw shapes. `flatten` is the slow path's: a tree that can be rebuilt
around other tensors. What cannot be compared by value is refused here, since two calls that look
alike must be alike (invariant I5).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from graphcache.errors import Fallback
from graphcache.reasons import Reason

TENSORS = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})
_ATOMS = frozenset(
    {
        type(None), bool, int, str, bytes, type(...), torch.Size,
        torch.dtype, torch.device, torch.layout, torch.memory_format,
    }
)  # fmt: skip


class Leaf(NamedTuple):
    """The place of a tensor."""


class Plain(NamedTuple):
    """A plain value, kept apart by type: 1, 1.0 and True take different graphs, and so do 0.0 and
    -0.0.
    """

    kind: type
    text: Any
    value: Any


class Node(NamedTuple):
    """A container: its type, what else rebuilding needs (keys, field names), and its children."""

    kind: Any
    context: Any
    children: tuple[Any, ...]

    def keys(self) -> Sequence[Any]:
        """What names each child: dict keys, field names, or positions."""
        names = self.context
        tagged = isinstance(names, tuple) and names[:1] in (("pytree",), ("dataclass",), ("typed",))
        if tagged and not (self.kind is dict and all(type(name) is str for name in names)):
            names = names[1]  # a dict of string keys has no tag, though a key may read like one
        fits = isinstance(names, tuple) and len(names) == len(self.children)
        return names if fits else range(len(self.children))


LEAF = Leaf()
Spec = Leaf | Plain | Node


def flatten(value: Any, leaves: list[Tensor], refused: Reason = Reason.UNSUPPORTED_INPUT) -> Spec:
    """Append the tensors of `value` to `leaves` and return the tree around them.

    Raises:
        Fallback: with `refused`, for a value that is neither tensor, container nor comparable plain
            value.
    """
    kind = type(value)
    if kind in TENSORS:
        leaves.append(value)
        return LEAF
    plain = _plain(value)
    if plain is not None:
        return plain
    children, context = _open(value, refused)
    return Node(kind, context, tuple(flatten(child, leaves, refused) for child in children))


def _plain(value: Any) -> Plain | None:
    kind = type(value)
    if kind in _ATOMS:
        return Plain(kind, None, value)
    if kind is float or kind is complex:
        return Plain(
            kind, repr(value), None
        )  # repr tells 0.0 from -0.0 and makes NaN equal to itself
    return Plain(kind, None, value) if isinstance(value, enum.Enum) else None


def _open(value: Any, refused: Reason) -> tuple[Sequence[Any], Any]:
    """The children of a container, and the hashable rest."""
    kind = type(value)
    if kind is tuple or kind is list:
        return value, None
    if kind is slice:
        return (value.start, value.stop, value.step), None
    if kind is dict:
        return list(value.values()), _keys(value, refused)
    if kind is range:
        return (value.start, value.stop, value.step), None
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return value, "namedtuple"
    node = _pytree.SUPPORTED_NODES.get(kind)
    if node is not None:
        children, context = node.flatten_fn(value)
        return list(children), ("pytree", _hashable(context, refused))
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, dict)):
        names = tuple(f.name for f in dataclasses.fields(value) if hasattr(value, f.name))
        names += tuple(name for name in getattr(value, "__dict__", ()) if name not in names)
        return [getattr(value, name) for name in names], ("dataclass", names)
    what = "tensor" if isinstance(value, Tensor) else "value"
    raise Fallback(refused, f"a {what} of type {kind.__module__}.{kind.__qualname__}")


def _keys(value: dict[Any, Any], refused: Reason) -> Any:
    """A dict's keys; with their types where 1 and True and 1.0 must be told apart."""
    keys = _hashable(tuple(value), refused)
    kinds = tuple(map(type, keys))
    return keys if all(kind is str for kind in kinds) else ("typed", keys, kinds)


def _hashable(context: Any, refused: Reason) -> Any:
    if isinstance(context, (list, tuple)):
        return tuple(_hashable(item, refused) for item in context)
    try:
        hash(context)
    except TypeError:
        raise Fallback(
            refused, f"an unhashable {type(context).__qualname__} in a container's structure"
        ) from None
    return context


def unflatten(spec: Spec, leaves: Iterator[Any]) -> Any:
    """Rebuild a value around the next tensors of `leaves`; containers are new objects each time."""
    if isinstance(spec, Leaf):
        return next(leaves)
    if isinstance(spec, Plain):
        return spec.value if spec.text is None else spec.kind(spec.text)
    children = [unflatten(child, leaves) for child in spec.children]
    if spec.kind is tuple or spec.kind is list:
        return spec.kind(children)
    if spec.kind is slice or spec.kind is range:
        return spec.kind(*children)
    if spec.kind is dict:
        return dict(zip(spec.keys(), children, strict=True))
    if spec.context == "namedtuple":
        return spec.kind._make(children)  # a subclass may have a constructor of its own
    how, context = spec.context
    if how == "pytree":
        return _pytree.SUPPORTED_NODES[spec.kind].unflatten_fn(children, context)
    new = object.__new__(spec.kind)
    for name, child in zip(context, children, strict=True):
        object.__setattr__(new, name, child)  # frozen dataclasses too; no __init__ to run twice
    return new


def call_key(
    args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Tensor]
) -> tuple[Any, ...]:
    """Describe a call for the look-up of its plan, and append its tensors to `leaves` in call
    order.

    Raises:
        Fallback: `unsupported-input`.
    """
    parts: list[Any] = [len(args), *kwargs]
    try:
        for value in (*args, *kwargs.values()):
            if type(value) in TENSORS:
                leaves.append(value)
                parts += _form(value)
            else:
                _describe(value, leaves, parts)
        if len(leaves) > 1 and len({*map(id, leaves)}) < len(leaves):
            parts.append(repeats(leaves))
    except RuntimeError:  # of tensors without sizes or strides
        raise Fallback(Reason.UNSUPPORTED_INPUT, "a nested or sparse tensor") from None
    except (TypeError, AttributeError, ValueError) as error:  # of containers with ways of their own
        raise Fallback(Reason.UNSUPPORTED_INPUT, f"a container that raised {error!r}") from None
    return tuple(parts)


def repeats(leaves: Sequence[Tensor]) -> tuple[int, ...]:
    """For each tensor the first place of the same object: self-attention asks whether its key is
    its query.
    """
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(leaf), place) for place, leaf in enumerate(leaves))


def _describe(value: Any, leaves: list[Tensor], parts: list[Any]) -> None:
    first = len(leaves)
    parts.append(flatten(value, leaves))
    for leaf in leaves[first:]:
        parts += _form(leaf)


def _form(leaf: Tensor) -> tuple[Any, ...]:
    if leaf.layout is not torch.strided:
        raise Fallback(Reason.UNSUPPORTED_INPUT, f"a tensor of layout {leaf.layout}")
    return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad


class Input(NamedTuple):
    """One tensor of a call, in the order of forward's parameters; sizes of dynamic dims are left
    out of `shape`.

    `axes` maps an axis to the index of its dynamic dim; `order` lists the axes from the
    slowest-moving one, which keeps channels_last and transposed inputs as they are; `device` is
    where the module gets it.
    """

    name: str
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int | None, ...]
    axes: tuple[tuple[int, int], ...]
    order: tuple[int, ...]

    def sizes(self, bucket: Sequence[int]) -> list[int]:
        """The full shape at these sizes of the dynamic dims."""
        shape = list(self.shape)
        for axis, dim in self.axes:
            shape[axis] = bucket[dim]
        return shape  # type: ignore[return-value]  # every None stands on a dynamic axis


class Signature(NamedTuple):
    """Everything about a call but its sizes; with a bucket it is a key. `repeats` tells which
    inputs are one object.
    """

    inputs: tuple[Input, ...]
    repeats: tuple[int, ...]
    spec: Spec
    modes: tuple[Any, ...]
    state: int


def dim_order(leaf: Tensor) -> tuple[int, ...]:
    """The axes of `leaf` by falling stride; plain order for expanded tensors."""
    strides, axes = leaf.stride(), range(leaf.dim())
    if any(stride == 0 and size > 1 for stride, size in zip(strides, leaf.shape, strict=True)):
        return tuple(axes)
    return tuple(sorted(axes, key=lambda axis: -strides[axis]))
