"""What the probe fills padded rows with, and the rows it probes with: values that would show in a
real result.

All of it is seeded, so that two runs differ in what is meant to differ only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from graphcache.padding import allocate, fit
from graphcache.signature import Input

#: Makes a tail from the real rows, the tail to fill, and the axis it continues.
Garbage = Callable[[Tensor, Tensor, int], Tensor]

LARGE, PLAIN = 1e3, 1.0  # in units of the input's largest magnitude; the large ones at least 1e3
FAINT = 1e-3
EXTREMES = (math.nan, math.inf, -math.inf)  # NaN alone passes every comparison unseen


def uniform(shape: Sequence[int], seed: int = 0) -> Tensor:
    """The same numbers in [0, 1) on every device, whatever the default device is."""
    source = torch.Generator(device="cpu").manual_seed(seed)
    return torch.rand(shape, generator=source, device="cpu")


def garbage(scale: float) -> Garbage:
    """Finite values of one sign for floats; for integers and bools one real row, another one for
    the other sign. Seeded.

    Rows are taken whole, since each column may index a table of its own. Where all real rows are
    equal, any index between 0 and the real one is in range as well.
    """

    def make(real: Tensor, tail: Tensor, axis: int) -> Tensor:
        noise = uniform(tail.shape, int(abs(scale))).to(tail.device)
        if not (real.is_floating_point() or real.is_complex()):
            return _row(real, axis, scale > 0, noise)
        magnitude = real.abs().nan_to_num(0.0, 0.0, 0.0).amax().float()
        unit = magnitude.clamp(min=1.0) if abs(scale) > PLAIN else magnitude
        unit = torch.where(unit > 0, unit, torch.ones_like(unit))
        return (scale * unit * (0.5 + noise)).to(tail.dtype).nan_to_num()

    return make


def _row(real: Tensor, axis: int, other: bool, noise: Tensor) -> Tensor:
    first = real.narrow(axis, 0, 1)
    if not other:
        return first.expand(noise.shape)
    second = unlike(real, axis)
    if second is not None:
        return real.narrow(axis, second, 1).expand(noise.shape)
    if real.dtype is torch.bool:
        return first.logical_not().expand(noise.shape)
    return torch.where(first > 0, ((first + 1) * noise.double()).floor().to(real.dtype), first)


def unlike(rows: Tensor, axis: int, like: int = 0) -> int | None:
    """The first row along `axis` that differs from row `like`, if any does."""
    differs = (rows != rows.narrow(axis, like, 1)).movedim(axis, 0)
    found = differs.reshape(differs.shape[0], -1).any(1).nonzero()
    return int(found[0]) if len(found) else None


def telling(leaf: Tensor) -> Tensor:
    """The input to probe with: the call's own, unless it is one value throughout and so hides what
    it scales.

    Zeros times anything are zeros, and a mask of False keeps nothing.
    """
    if leaf.numel() < 2 or not bool((leaf == leaf.flatten()[0]).all()):
        return leaf
    if leaf.is_floating_point() or leaf.is_complex():
        return garbage(PLAIN)(leaf, leaf, 0)
    if leaf.dtype is torch.bool and not bool(leaf.any()):
        return (torch.arange(leaf.numel(), device=leaf.device) % 2 == 0).reshape(leaf.shape)
    return leaf


def turned_on(leaf: Tensor, spec: Input) -> Tensor:
    """A scalar argument as it may be another day: a flag the other way round, a number that a ReLU
    or a clamp would not hide. Others, and integers, which may be indices, stay.
    """
    if spec.axes:
        return leaf
    if leaf.numel() != 1:
        return leaf
    if leaf.dtype is torch.bool:
        return leaf.logical_not()
    if leaf.is_floating_point() and not bool(leaf > 0):
        return torch.where(leaf == 0, torch.ones_like(leaf), leaf.abs())
    return leaf


def switched(leaf: Tensor, spec: Input) -> Tensor:
    """Integers and short vectors without a dynamic dim as they may be another day: what is 0 is 1.
    A flag that is off hides what it lets through, and so does a weight of 0 in a mixture.
    """
    integers = not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype is torch.bool)
    if spec.axes or leaf.dim() > 1 or (leaf.numel() == 1 and not integers):
        return leaf  # `turned_on` does single numbers and flags
    if not bool((leaf == 0).any()):
        return leaf
    return torch.where(leaf == 0, torch.ones_like(leaf), leaf)


def alike(leaf: Tensor, spec: Input) -> Tensor:
    """Real rows that are much like the opposite of the first: a router sends all of them one way,
    and a maximum over them no longer hides a zero. They differ enough to be told apart.
    """
    if not spec.axes or not leaf.numel() or not (leaf.is_floating_point() or leaf.is_complex()):
        return leaf
    first = leaf
    for axis, _ in spec.axes:
        first = first.narrow(axis, 0, 1)
    return -(0.8 * first + 0.2 * leaf)


def other_rows(leaf: Tensor, spec: Input, old: Sequence[int], new: Sequence[int]) -> Tensor:
    """A leaf grown to new sizes by rows of its own, floats at half their value."""
    grown = placed(leaf, spec, new)
    if grown.is_floating_point() or grown.is_complex():
        for axis, dim in spec.axes:
            if new[dim] > old[dim]:
                grown.narrow(axis, old[dim], new[dim] - old[dim]).mul_(0.5)
    return grown


def counted_down(leaf: Tensor, spec: Input, old: Sequence[int], new: Sequence[int]) -> Tensor:
    """Integers that may count the entries of a dim (lengths), no larger than its new size; what is
    an index stays one.
    """
    if leaf.is_floating_point() or leaf.is_complex() or leaf.dtype is torch.bool:
        return leaf
    follows = {dim for _, dim in spec.axes}
    for dim, (before, now) in enumerate(zip(old, new, strict=True)):
        if now < before and dim not in follows and leaf.numel():
            if now < int(leaf.max()) <= before:
                leaf = leaf.clamp(max=now)
    return leaf


def extreme(value: float) -> Garbage:
    def make(real: Tensor, tail: Tensor, axis: int) -> Tensor:
        if real.is_floating_point() or real.is_complex():
            return torch.full_like(tail, value)
        return garbage(-PLAIN)(real, tail, axis)

    return make


def placed(leaf: Tensor, spec: Input, sizes: Sequence[int]) -> Tensor:
    return allocate(spec, sizes).copy_(fit(leaf, spec, sizes))


def varied(leaf: Tensor, spec: Input, sizes: Sequence[int]) -> Tensor:
    """Real rows repeated in turn to `sizes`; floats between their value and its opposite, since
    larger ones might all look alike behind a saturating function.
    """
    rows = placed(leaf, spec, sizes)
    if rows.is_floating_point() or rows.is_complex():
        rows *= (2 * uniform(rows.shape) - 1).to(rows.device, rows.dtype)
    return rows


def weighted(rows: Tensor, spec: Input, dim: int, middle: int) -> Tensor:
    """The same with faint floats up to `middle` and large ones from there, and of integers and
    bools one row up to there and another one from there: what asks for any value above a threshold,
    or for the largest, then answers otherwise in one of the parts.
    """
    real, rows = rows, rows.clone()
    for axis, d in spec.axes:
        if d == dim:
            first = rows.narrow(axis, 0, middle)
            rest = rows.narrow(axis, middle, rows.shape[axis] - middle)
            if real.is_floating_point() or real.is_complex():
                first.mul_(FAINT)
                rest.mul_(LARGE)
            else:
                kept = real.narrow(axis, 0, 1)
                other = unlike(real, axis)
                first.copy_(kept)
                rest.copy_(_other(kept) if other is None else real.narrow(axis, other, 1))
    return rows


def flagged(rows: Tensor, spec: Input, dim: int, middle: int) -> Tensor:
    """The same with bools true up to `middle` and false from there."""
    if rows.dtype is not torch.bool:
        return rows
    rows = rows.clone()
    for axis, d in spec.axes:
        if d == dim:
            rows.narrow(axis, 0, middle).fill_(True)
            rows.narrow(axis, middle, rows.shape[axis] - middle).fill_(False)
    return rows


def mixed(leaf: Tensor, spec: Input) -> Tensor:
    """Integers and bools that follow a dim, as they may be another day: in turn their own value, 0
    and 1. Ids of 0 throughout hide what they scale, and ids without 0 what they choose by it.
    """
    if leaf.is_floating_point() or leaf.is_complex() or not spec.axes or not leaf.numel():
        return leaf
    turns = [torch.arange(n, device=leaf.device) for n in leaf.shape]
    turn = sum(torch.meshgrid(*turns, indexing="ij"), torch.zeros_like(leaf, dtype=torch.long)) % 3
    return torch.where(turn == 0, leaf, (turn - 1).to(leaf.dtype))


def _other(row: Tensor) -> Tensor:
    """Another row where all are equal: flags the other way round, the index 0, which any table
    has.
    """
    return row.logical_not() if row.dtype is torch.bool else torch.zeros_like(row)


def marked(leaf: Tensor, spec: Input, dim: int, some: bool) -> Tensor:
    """A control as it may be another day: zero nowhere, or in the second half of a dim alone."""
    top = leaf.double().amax().clamp(min=1).to(leaf.dtype)
    marks = torch.where(leaf == 0, top, leaf)
    for axis, d in spec.axes:
        if some and d == dim:
            half = (leaf.shape[axis] + 1) // 2
            marks.narrow(axis, half, leaf.shape[axis] - half).zero_()
    return marks
