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


def cut(output: Tensor, axes: Sequence[OutputAxis], sizes: Sequence[int]) -> Tensor:
    """The view of a padded output that a call of `sizes` gets."""
    for axis, dim, scale, offset in axes:
        output = output.narrow(axis, 0, scale * sizes[dim] + offset)
    return output


def volume(sizes: Sequence[int]) -> int:
    """Elements of the dynamic dims: the product of their sizes."""
    return math.prod(sizes)
