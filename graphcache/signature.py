"""What a call is made of: its tensors, its structure and plain values, and the modes it runs under.

Two readings of the same call. `call_key` is the hit path's: a flat, hashable description made in a
microsecond or two, with the raw shapes. `flatten` is the slow path's: a tree that can be rebuilt
around other tensors. What cannot be compared by value is refused here, since two calls that look
alike must be alike (invariant I5).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from operator import call
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
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
        if isinstance(names, tuple) and names[:1] in (("pytree",), ("dataclass",), ("typed",)):
            names = names[1]
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
    except RuntimeError:  # of tensors without sizes or strides
        raise Fallback(Reason.UNSUPPORTED_INPUT, "a nested or sparse tensor") from None
    except (TypeError, AttributeError, ValueError) as error:  # of containers with ways of their own
        raise Fallback(Reason.UNSUPPORTED_INPUT, f"a container that raised {error!r}") from None
    return tuple(parts)


def _describe(value: Any, leaves: list[Tensor], parts: list[Any]) -> None:
    first = len(leaves)
    parts.append(flatten(value, leaves))
    for leaf in leaves[first:]:
        parts += _form(leaf)


def _form(leaf: Tensor) -> tuple[Any, ...]:
    if leaf.layout is not torch.strided:
        raise Fallback(Reason.UNSUPPORTED_INPUT, f"a tensor of layout {leaf.layout}")
    return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad


# Process-wide settings that choose kernels. A graph keeps the kernels of its capture, so they are
# part of the key.
_KERNEL_FLAGS = (
    "get_default_dtype",
    "_get_deterministic_algorithms",
    "_get_flash_sdp_enabled",
    "_get_mem_efficient_sdp_enabled",
    "_get_math_sdp_enabled",
    "_get_sdp_priority_order",
)
_CUDA_KERNEL_FLAGS = (
    "_get_cudnn_enabled",
    "_get_cudnn_benchmark",
    "_get_cudnn_deterministic",
    "_get_cudnn_sdp_enabled",
    "_get_cublas_allow_fp16_accumulation",
    "_get_cublas_allow_fp16_reduced_precision_reduction",
    "_get_cublas_allow_bf16_reduced_precision_reduction",
)
# Where any of these is not at rest a call runs eagerly (see `tracing`), so no plan is found under
# its key.
_CONTEXT: tuple[Callable[[], Any], ...] = (
    torch.is_grad_enabled,
    torch._C._len_torch_dispatch_stack,
    torch._C._is_tracing,
    torch._C._functorch.peek_interpreter_stack,
    functools.partial(getattr, forward_ad, "_current_level"),
)
_SCOPES = (torch._C._is_any_autocast_enabled, torch._C._len_torch_function_stack)
_TF32_FLAGS = ("_get_cublas_allow_tf32", "_get_cudnn_allow_tf32")
_FP32_BACKEND = {"cuda": "cuda", "cpu": "mkldnn"}
_FP32_OPS = ("matmul", "conv", "rnn")


def _getters(names: Sequence[str]) -> list[Callable[[], Any]]:
    return [getattr(torch._C, name) for name in names if hasattr(torch._C, name)]


def _precision(device_type: str, operation: str) -> Callable[[], str]:
    """Reads how float32 is computed: "ieee" or "none" in full, "tf32" or "bf16" not."""
    backend = _FP32_BACKEND.get(device_type, "generic")
    return functools.partial(torch._C._get_fp32_precision_getter, backend, operation)


def matmul_precision(device: torch.device) -> str:
    """How float32 matmuls are computed on a device at present, as `_precision` says it."""
    return _precision(device.type, "matmul")()


def _stream_number(device: torch.device) -> Callable[[], int]:
    """Reads the current stream's number; that of the default stream is 0."""
    if device.type != "cuda":
        return int
    index = torch.cuda.current_device() if device.index is None else device.index
    return functools.partial(torch._C._cuda_getCurrentRawStream, index)


def _order_attention(device: torch.device) -> None:
    """Have PyTorch order its attention backends for this GPU. It does so at the first use, which
    would be a setting changed by the first call.
    """
    query = torch.empty(1, 1, 1, 8, dtype=torch.float16, device=device)
    torch._fused_sdp_choice(query, query, query)


def numbering() -> Callable[[Hashable], int]:
    """Numbers values, equal ones alike; the last 256 of them are remembered."""
    numbers = itertools.count()
    return functools.lru_cache(256)(lambda _: next(numbers))


class Modes:
    """Reads the settings of the thread and of the process that a call runs under, for one device.
    The hit path reads them at each call.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        flags = _getters(_KERNEL_FLAGS)
        context: list[Callable[[], Any]] = [*_CONTEXT, *_SCOPES, _stream_number(device)]
        precision: list[Callable[[], Any]] = [
            _precision(device.type, operation) for operation in _FP32_OPS
        ]
        older: list[Callable[[], Any]] = []
        if device.type == "cuda":
            flags += _getters(_CUDA_KERNEL_FLAGS)
            older = _getters(_TF32_FLAGS)
            _order_attention(device)
        self._kernels = [*flags, *precision]
        self._exact = [*self._kernels, *context]
        known = len(older) == len(_TF32_FLAGS)
        self._all = [*flags, *older, *context] if known else self._exact
        self._numbered = numbering()
        self._plain: tuple[list[Any], int] = ([], -1)
        self._scoped_last: tuple[list[Any], int] = ([], -1)

    def kernels(self) -> tuple[Any, ...]:
        """What chooses kernels: part of every signature."""
        return _frozen([*map(call, self._kernels), *self._scoped()])

    def everything(self) -> int:
        """A number for that and for what decides whether a graph may serve at all: grad, tracing,
        capturing. To compare with the last answers costs less than to hash them, and to read
        PyTorch's older flags for TF32 less than the newer settings; those flags refuse to answer
        once a newer setting says what they cannot.
        """
        try:
            flags: list[Any] = list(map(call, self._all))
        except RuntimeError:
            self._all = self._exact
            flags = list(map(call, self._all))
        plain, number = self._plain
        return number if flags == plain else self._number(flags)

    def _number(self, flags: list[Any]) -> int:
        """The same for flags other than the last plain ones. Streams share plans, so their numbers
        are left out; the default stream cannot be captured, so there the driver is not asked.
        """
        *rest, autocast, functions, stream = flags
        rest += [autocast, functions]
        if not (autocast or functions or stream):
            self._plain = flags, self._numbered(_frozen(rest))
            return self._plain[1]
        rest += self._scoped()
        if stream and torch._C._cuda_isCurrentStreamCapturing():
            rest.append("capturing")
        if rest != self._scoped_last[0]:
            self._scoped_last = rest, self._numbered(_frozen(rest))
        return self._scoped_last[1]

    def _scoped(self) -> list[Any]:
        """The settings of a `with`: autocast, and `torch.device("...")`, a function mode."""
        found: list[Any] = []
        if torch.is_autocast_enabled(self.device.type):
            found.append(torch.get_autocast_dtype(self.device.type))
        if torch._C._len_torch_function_stack():
            stack = _get_current_function_mode_stack()
            found += (torch.get_default_device(), *map(type, stack))
        return found


def _frozen(flags: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(tuple(flag) if isinstance(flag, list) else flag for flag in flags)


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
    """Everything about a call but its sizes; with a bucket it is a key."""

    inputs: tuple[Input, ...]
    spec: Spec
    modes: tuple[Any, ...]
    state: int


def dim_order(leaf: Tensor) -> tuple[int, ...]:
    """The axes of `leaf` by falling stride; plain order for expanded tensors."""
    strides, axes = leaf.stride(), range(leaf.dim())
    if any(stride == 0 and size > 1 for stride, size in zip(strides, leaf.shape, strict=True)):
        return tuple(axes)
    return tuple(sorted(axes, key=lambda axis: -strides[axis]))
