"""One call, read closely: its tensors by parameter name, its dynamic sizes, its signature. The slow
path's reading.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from graphcache.dims import DynamicDims
from graphcache.errors import Fallback
from graphcache.garbage import counted_down
from graphcache.modes import Modes
from graphcache.padding import allocate, fit
from graphcache.reasons import Reason
from graphcache.signature import (
    Input,
    Node,
    Signature,
    Spec,
    dim_order,
    flatten,
    repeats,
    unflatten,
)

_NAME_AXES = "name in `dynamic_shapes` the axes of the arguments that vary, and no others"


class Binder:
    """Binds calls to forward's parameters: a positional and a keyword call read the same."""

    def __init__(self, target: Callable[..., Any]) -> None:
        try:
            self._signature: inspect.Signature | None = inspect.signature(target)
        except (TypeError, ValueError):  # some builtins have none
            self._signature = None
        kinds = self._signature.parameters.values() if self._signature else ()
        self.parameters = tuple(p.name for p in kinds)
        self.open_ended = self._signature is None or any(p.kind is p.VAR_KEYWORD for p in kinds)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by parameter name, in forward's order; `**kwargs` of forward under their
        own names.
        """
        if self._signature is None:
            return {**{str(i): value for i, value in enumerate(args)}, **kwargs}
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:  # eager raises it again, for the caller
            remedy = "call it with the arguments that forward takes"
            raise Fallback(Reason.UNSUPPORTED_INPUT, str(error), remedy) from None
        arguments: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            if self._signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                taken = self._signature.parameters  # `f(x, *args, **kw)` may be called with args=3
                arguments |= {f"{name}.{k}" if k in taken else k: v for k, v in value.items()}
            else:
                arguments[name] = value
        return arguments


def forward_of(wrapped: Callable[..., Any]) -> Callable[..., Any]:
    """Whose parameters the calls have."""
    inner = getattr(wrapped, "_orig_mod", wrapped)  # torch.compile's wrapper takes *args, **kwargs
    return inner.forward if isinstance(inner, nn.Module) else inner


class Call:
    """A call's tensors in two orders: as they were passed (`leaves`), and by parameter (`tensors`).

    `slots[i]` is the place in `leaves` of `tensors[i]`.
    """

    def __init__(self, binder: Binder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.leaves: list[Tensor] = []
        self.spec: Spec = flatten((args, kwargs), self.leaves)
        marks = [
            torch.empty(0) for _ in self.leaves
        ]  # one object may be passed twice, so places are told by marks
        marked: tuple[tuple[Any, ...], dict[str, Any]] = unflatten(self.spec, iter(marks))
        found: list[Tensor] = []
        self.arguments = cast(Node, flatten(binder.bind(*marked), found))  # of a dict, so a node
        places = {id(mark): slot for slot, mark in enumerate(marks)}
        self.slots = [places[id(mark)] for mark in found]
        self.tensors = [self.leaves[slot] for slot in self.slots]
        self.repeats = repeats(self.tensors)

    def arguments_with(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """This call's args and kwargs around other tensors, given by parameter; where one object
        was passed twice, the first of its two.
        """
        placed: list[Any] = [None] * len(tensors)
        for slot, first in zip(self.slots, self.repeats, strict=True):
            placed[slot] = tensors[first]
        args, kwargs = unflatten(self.spec, iter(placed))
        return args, kwargs

    def around(self, tensors: Sequence[Tensor]) -> Call:
        """The same form of call around other tensors, given by parameter."""
        other = copy.copy(self)
        other.tensors = list(tensors)
        other.leaves = [
            tensor
            for _, tensor in sorted(zip(self.slots, tensors, strict=True), key=lambda pair: pair[0])
        ]
        return other


class Reading:
    """A call under named dims: its sizes, and its signature under the modes of a device.

    Raises:
        Fallback: `unsupported-input` when tensors disagree about a dim or none has it, `device` for
            several GPUs.
    """

    def __init__(
        self,
        call: Call,
        dims: DynamicDims,
        follows: Mapping[str, bool],
        modes: Modes,
        exact: bool,
        state: int,
    ) -> None:
        self.call = call
        self._named = not (exact and dims.implicit)
        self.candidates: list[str] = []
        named = dims.match(call.arguments)
        self.paths = [path for path, _ in named]
        if not self._named:
            axes = self._every_axis()
        elif dims.implicit:
            axes = self._batch_axes(follows)
        else:
            axes = [self._checked(path, entries, dims) for path, entries in named]
        self.dims = dims.names if self._named else tuple(map(str, range(sum(map(len, axes)))))
        self.sizes = self._sizes(axes)
        inputs = tuple(self._input(i, axes[i], modes.device) for i in range(len(axes)))
        form = (inputs, call.repeats, call.arguments)
        self.signature = Signature(*form, modes.kernels(), state)

    def _every_axis(self) -> list[list[tuple[int, int]]]:
        """Exact sizes without named dims: each axis of each tensor is a dim of its own."""
        axes, count = [], 0
        for tensor in self.call.tensors:
            axes.append([(axis, count + axis) for axis in range(tensor.dim())])
            count += tensor.dim()
        return axes

    def _batch_axes(self, follows: Mapping[str, bool]) -> list[list[tuple[int, int]]]:
        """Axis 0 of the first tensor that has one, and of those of equal length that are not known
        to be apart.
        """
        first = next((t for t in self.call.tensors if t.dim()), None)
        axes: list[list[tuple[int, int]]] = []
        for i, (path, tensor) in enumerate(zip(self.paths, self.call.tensors, strict=True)):
            if self.call.repeats[i] != i:
                axes.append(axes[self.call.repeats[i]])
                continue
            alike = first is not None and tensor.dim() > 0 and len(tensor) == len(first)
            axes.append([(0, 0)] if alike and follows.get(path, True) else [])
            if alike and tensor is not first and path not in follows:
                self.candidates.append(path)
        return axes

    def _checked(
        self, path: str, entries: list[tuple[int, str]], dims: DynamicDims
    ) -> list[tuple[int, int]]:
        rank = self.call.tensors[self.paths.index(path)].dim()
        if any(not -rank <= axis < rank for axis, _ in entries):
            raise Fallback(
                Reason.UNSUPPORTED_INPUT,
                f"`dynamic_shapes` names axes that {path} of rank {rank} lacks",
                _NAME_AXES,
            )
        return sorted((axis % rank, dims.names.index(dim)) for axis, dim in entries)

    def _sizes(self, axes: list[list[tuple[int, int]]]) -> tuple[int, ...]:
        sizes: dict[int, int] = {}
        for path, tensor, entries in zip(self.paths, self.call.tensors, axes, strict=True):
            for axis, dim in entries:
                size = sizes.setdefault(dim, tensor.shape[axis])
                if size != tensor.shape[axis]:
                    name = self.dims[dim]
                    raise Fallback(
                        Reason.UNSUPPORTED_INPUT,
                        f"dim {name} is {size} elsewhere, {tensor.shape[axis]} in {path}",
                        _NAME_AXES,
                    )
        if len(sizes) < len(self.dims):
            raise Fallback(
                Reason.UNSUPPORTED_INPUT,
                f"no tensor has all of the dims {', '.join(self.dims)}",
                _NAME_AXES,
            )
        return tuple(sizes[dim] for dim in range(len(self.dims)))

    def _input(self, i: int, axes: list[tuple[int, int]], device: torch.device) -> Input:
        tensor = self.call.tensors[i]
        if tensor.device != device and tensor.device.type != "cpu":
            raise Fallback(
                Reason.DEVICE, f"{self.paths[i]} is on {tensor.device}, the module on {device}"
            )
        shape: list[int | None] = list(tensor.shape)
        for axis, _ in axes:
            shape[axis] = None
        return Input(
            self.paths[i], tensor.dtype, device, tuple(shape), tuple(axes), dim_order(tensor)
        )

    @property
    def traffic(self) -> tuple[int, ...]:
        """The sizes to record: those of the named dims; the first tensor's rows where every axis is
        a dim.
        """
        return self.sizes if self._named else self.sizes[:1] or (1,)

    def example(self) -> Call | None:
        """A call of this form that is cheap to keep: copies of at most two rows; None where no dims
        are named.
        """
        return self.resized(tuple(min(2, size) for size in self.sizes))

    def resized(self, sizes: tuple[int, ...]) -> Call | None:
        """A call of the same form with its dynamic axes cut or repeated to `sizes`; None where no
        dims are named.
        """
        if not self._named:
            return None
        inputs = self.signature.inputs
        pairs = zip(self.call.tensors, inputs, strict=True)
        tensors = [
            allocate(spec, sizes, t.device).copy_(
                counted_down(fit(t.detach(), spec, sizes), spec, self.sizes, sizes)
            )
            for t, spec in pairs
        ]
        return self.call.around(tensors)

    @property
    def lifted(self) -> bool:
        """Whether the module gets a tensor on its device that the caller passed on the CPU."""
        return any(
            t.device != i.device
            for t, i in zip(self.call.tensors, self.signature.inputs, strict=True)
        )


def differences(ours: Signature, theirs: Signature) -> Iterator[str]:
    """How a call's signature differs from a captured one, a line each."""
    names = {i.name: i for i in theirs.inputs}
    for spec in ours.inputs:
        other = names.pop(spec.name, None)
        if other is None:
            yield f"{spec.name}: a tensor now, none captured"
        elif other != spec:
            changed = [f for f in Input._fields if getattr(spec, f) != getattr(other, f)]
            yield f"{spec.name}: " + ", ".join(
                f"{f} {getattr(spec, f)}, captured {getattr(other, f)}" for f in changed
            )
    yield from (f"{name}: no tensor now, one captured" for name in names)
    if ours.repeats != theirs.repeats:
        yield "arguments that are one tensor: others than at capture"
    if ours.spec != theirs.spec:
        yield f"plain arguments: {_plain_text(ours.spec)}, captured {_plain_text(theirs.spec)}"
    if ours.modes != theirs.modes:
        yield f"modes: {ours.modes}, captured {theirs.modes}"
    if ours.state != theirs.state:
        yield "the module: training flags or attributes differ from those at capture"


def _plain_text(spec: Any) -> str:
    if isinstance(spec, Node):
        return (
            "{"
            + ", ".join(
                f"{k}: {_plain_text(c)}" for k, c in zip(spec.keys(), spec.children, strict=True)
            )
            + "}"
        )
    return (
        repr(getattr(spec, "text", None) or getattr(spec, "value", "tensor"))
        if hasattr(spec, "value")
        else "tensor"
    )
