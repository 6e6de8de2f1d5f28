"""Padding arithmetic on tensors: static buffers, the tails to refill in them, and cutting results
back.

Nothing here decides whether padding is safe; that is the probe's. A *fill* is a number or "repeat",
which repeats the last real row (or column): always a value that the module has met, so an index
stays in range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from graphcache.signature import Input

Fill = float | int | bool | str
REPEAT = "repeat"


class Refill(NamedTuple):
    """Restore the fill of one region of a static input: `tail` from another view of it, or with a
    number.

    `rows` are the real rows along `axis` that the tail continues.
    """

    tail: Tensor
    value: Tensor | float | int | bool
    axis: int
    rows: Tensor

    def __call__(self) -> None:
        if isinstance(self.value, Tensor):
            self.tail.copy_(self.value)
        else:
            self.tail.fill_(self.value)


class Spread(NamedTuple):
    """Copies a call's tensor into `region` of a static input and repeats its last rows (or columns)
    to the end of it, by one kernel.

    `sources` says for each axis which entries it takes; None: all of them, once.
    """

    region: Tensor
    sources: list[Tensor | None]

    def __call__(self, real: Tensor) -> None:
        real = real.to(self.region.device)
        torch.ops.aten.index.Tensor_out(real, self.sources, out=self.region)


class OutputAxis(NamedTuple):
    """Axis `axis` of an output has `scale * n + offset` entries at size n of dynamic dim `dim`."""

    axis: int
    dim: int
    scale: int
    offset: int


def allocate(spec: Input, bucket: Sequence[int], device: torch.device | None = None) -> Tensor:
    """A dense buffer for one input at these sizes, laid out in the input's own order of axes; on
    the device where the module gets it unless told otherwise.
    """
    shape = spec.sizes(bucket)
    strides, step = [0] * len(shape), 1
    for axis in reversed(spec.order):
        strides[axis] = step
        step *= max(1, shape[axis])
    return torch.empty_strided(shape, strides, dtype=spec.dtype, device=device or spec.device)


def fit(leaf: Tensor, spec: Input, sizes: Sequence[int]) -> Tensor:
    """`leaf` with its dynamic axes brought to `sizes`: cut where longer, its rows repeated in turn
    where shorter.
    """
    for axis, dim in spec.axes:
        have, want = leaf.shape[axis], sizes[dim]
        if want <= have:
            leaf = leaf.narrow(axis, 0, want)
        else:
            leaf = leaf.index_select(axis, torch.arange(want, device=leaf.device) % have)
    return leaf


def head(static: Tensor, spec: Input, sizes: Sequence[int]) -> Tensor:
    """The view of a static input that holds the real rows."""
    for axis, dim in spec.axes:
        static = static.narrow(axis, 0, sizes[dim])
    return static


def tails(
    static: Tensor,
    spec: Input,
    sizes: Sequence[int],
    bucket: Sequence[int],
    fills: Mapping[int, Fill],
) -> list[Refill]:
    """The regions of a static input outside its head, one for each padded axis, in the order to
    refill them.

    `fills` gives the fill by dynamic dim; a dim without one is left alone (its leftovers are
    inert). The last axis comes first, so that "repeat" along an earlier axis copies rows whose own
    tail is already right.
    """
    found = []
    for position in reversed(range(len(spec.axes))):
        axis, dim = spec.axes[position]
        real, padded = sizes[dim], bucket[dim]
        if real == padded or dim not in fills:
            continue
        region = static
        for earlier_axis, earlier_dim in spec.axes[:position]:
            region = region.narrow(earlier_axis, 0, sizes[earlier_dim])
        tail = region.narrow(axis, real, padded - real)
        fill = fills[dim]
        last = region.narrow(axis, real - 1, 1).expand_as(tail)
        rows = region.narrow(axis, 0, real)
        found.append(Refill(tail, last if isinstance(fill, str) else fill, axis, rows))
    return found


def covered(
    sizes: Sequence[int], bucket: Sequence[int], fills: Mapping[int, Fill]
) -> tuple[int, ...]:
    """What a call's tensor covers once "repeat" has spread it: the bucket's size in those dims."""
    pairs = enumerate(zip(sizes, bucket, strict=True))
    return tuple(padded if fills.get(dim) == REPEAT else real for dim, (real, padded) in pairs)


def spread(
    static: Tensor, spec: Input, sizes: Sequence[int], to: Sequence[int], rows: Tensor
) -> Spread | None:
    """What spreads a call's tensor of `sizes` to the sizes `to`; None if it covers no more.

    `rows` is a `countdown` from at least the largest size.
    """
    axes = [(axis, dim) for axis, dim in spec.axes if sizes[dim] != to[dim]]
    if not axes:
        return None
    sources: list[Tensor | None] = [None] * static.dim()
    for position, (axis, dim) in enumerate(axes):
        taken = rows[rows.shape[0] // 2 - sizes[dim] :][: to[dim]]
        sources[axis] = taken.reshape(-1, *[1] * (len(axes) - 1 - position))
    region, places = head(static, spec, to), [axis for axis, _ in axes]
    if places[-1] - places[0] >= len(places):  # indexing puts axes that lie apart in front
        region = region.movedim(places, list(range(len(places))))
    return Spread(region, sources)


def countdown(size: int, device: torch.device | None = None) -> Tensor:
    """-size, .., -2, -1 and then -1 `size` times: any slice of it that holds -n as its first entry
    takes the n entries of an axis in order, and the last one from there on.
    """
    return torch.arange(-size, size, device=device).clamp_(max=-1)


def cut(output: Tensor, axes: Sequence[OutputAxis], sizes: Sequence[int]) -> Tensor:
    """The view of a padded output that a call of `sizes` gets."""
    for axis, dim, scale, offset in axes:
        output = output.narrow(axis, 0, scale * sizes[dim] + offset)
    return output


def volume(sizes: Sequence[int]) -> int:
    """Elements of the dynamic dims: the product of their sizes."""
    return math.prod(sizes)
