"""Values that a module's weights may have another day.

A probe learns from the weights of the moment. A gate of zeros (LoRA's B, ReZero, a fresh
LayerScale) hides whatever it multiplies, and an optimizer's step or a load would bring it out
behind the probe's back. So modules with such weights are probed a second time, with weights that
say something: what a network computes from generic weights depends on a row only if it nearly
always does.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from graphcache.garbage import uniform
from graphcache.storages import storage_bytes, storage_id

Substitutes = dict[int, Tensor]


def other_weights(parameters: Iterable[Tensor]) -> Substitutes:
    """For each storage with parameters that tell nothing, a copy of it in which they do, by the
    storage's id; nothing is written to the module. Waits for the device.

    One value throughout tells nothing, and neither does a scalar that is not positive, which
    a ReLU or a clamp may hide.
    """
    found: Substitutes = {}
    for parameter in parameters:
        if parameter.is_floating_point() and parameter.numel() and _mute(parameter):
            key = storage_id(parameter)
            if key not in found:
                found[key] = storage_bytes(parameter).clone()
            standing_in(found[key], parameter).copy_(_telling(parameter))
    return found


def standing_in(substitute: Tensor, tensor: Tensor) -> Tensor:
    """The view of a substitute's bytes that `tensor` is of its own storage."""
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    place = (tensor.storage_offset(), tensor.size(), tensor.stride())
    return whole.set_(substitute.untyped_storage(), *place)


def _mute(parameter: Tensor) -> bool:
    first = parameter.flatten()[0]
    if parameter.numel() == 1:
        return not bool(first > 0)
    return bool((parameter == first).all())


def _telling(parameter: Tensor) -> Tensor:
    """Around the value that it has, or around 1 for zeros; a scalar without its sign."""
    noise = (0.5 + uniform(parameter.shape)).to(parameter.device)
    unit = parameter.flatten()[0].abs().float()
    return torch.where(unit > 0, unit, torch.ones_like(unit)) * noise
