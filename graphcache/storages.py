"""The memory behind tensors: which one it is, and its bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is a strided view of one storage: not sparse, nested or MKL-DNN's."""
    return tensor.layout is torch.strided and not tensor.is_nested


def storage_id(tensor: Tensor) -> int:
    """Equal for tensors that share memory, while one of them lives."""
    return int(tensor.untyped_storage()._cdata)


def storage_bytes(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor as bytes, sharing its memory."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
