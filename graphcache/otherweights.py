"""Values that a module's weights may have another day.

A probe learns from the weights of the moment. A gate of zeros (LoRA's B, ReZero, a fresh
LayerScale) hides whatever it multiplies, and an optimizer's step or a load would bring it out
behind the probe's back; and so would statistics and flags in buffers that are loaded later. So
modules with such tensors are probed a second time, with some that say something: what a network
computes from generic weights depends on a row only if it nearly always does.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from graphcache.garbage import uniform
from graphcache.storages import storage_bytes, storage_id

Substitutes = dict[int, Tensor]


def other_weights(held: Iterable[Tensor], integers: bool = False) -> Substitutes:
    """For each storage with tensors of a module that tell nothing, a copy of it in which they do,
    by the storage's id; nothing is written to the module. Waits for the device.

    One value throughout tells nothing, and neither does a zero in a vector, which may be the weight
    of something, or a scalar that is not positive, which a ReLU or a clamp may hide. Of `integers`,
    which may be indices, zeros become ones. Masks and matrices with zeros in them stay: what a
    causal mask hides is hidden for good.
    """
    found: Substitutes = {}
    for tensor in held:
        if tensor.numel() and _mute(tensor, integers):
            key = storage_id(tensor)
            if key not in found:
                found[key] = storage_bytes(tensor).clone()
            standing_in(found[key], tensor).copy_(_telling(tensor))
    return found


def standing_in(substitute: Tensor, tensor: Tensor) -> Tensor:
    """The view of a substitute's bytes that `tensor` is of its own storage."""
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    place = (tensor.storage_offset(), tensor.size(), tensor.stride())
    return whole.set_(substitute.untyped_storage(), *place)


def _mute(tensor: Tensor, integers: bool) -> bool:
    floats, flags = tensor.is_floating_point(), tensor.dtype is torch.bool
    if tensor.is_quantized or (floats and tensor.dtype.itemsize == 1):
        return False
    if not (floats or flags or tensor.is_complex()):
        return integers and not bool(tensor.any())
    if tensor.numel() == 1 and floats:
        return not bool(tensor > 0)
    if tensor.dim() == 1 and bool((tensor == 0).any()):
        return True
    return _uniform(tensor)


def _uniform(tensor: Tensor) -> bool:
    first = tensor.flatten()[0]
    return bool(((tensor == first) | (tensor.isnan() & first.isnan())).all())


def _telling(tensor: Tensor) -> Tensor:
    """Flags on, of those that all are every other one off; integers 1; numbers around the value
    that all have, without its sign, or around 1 in the place of zeros.
    """
    if tensor.dtype is torch.bool and bool(tensor.all()):
        return (torch.arange(tensor.numel(), device=tensor.device) % 2 == 1).view(tensor.shape)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return torch.ones_like(tensor)
    noise = (0.5 + uniform(tensor.shape)).to(tensor.device)
    if not _uniform(tensor):
        return torch.where(tensor == 0, noise.to(tensor.dtype), tensor)
    unit = tensor.flatten()[0].abs().float()
    return torch.where(unit > 0, unit, torch.ones_like(unit)) * noise
