"""Indices out of range, found before the kernel runs.

On a CUDA device such an index is a device assert, which ends the process's CUDA context: no trial
of another size may get there. A table of positions shorter than a bucket would be one way, a mask
that was not padded along with its batch another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

Checked = tuple[Tensor, int, int]  # indices, and the range [low, high) that they must lie in

_BY_DIM = frozenset(
    {
        "gather", "index_select", "index_add", "index_copy", "index_fill", "index_reduce",
        "scatter", "scatter_add", "scatter_reduce",
    }
)  # fmt: skip
_BY_LIST = frozenset({"index", "index_put", "_index_put_impl", "_unsafe_index"})
_BY_ROW = frozenset({"embedding", "_embedding_bag", "_embedding_bag_forward_only"})
_FLAT = frozenset({"take", "put"})


def refuse_out_of_range(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise IndexError if an ATen operation would index out of range. Waits for the device.

    Raises:
        IndexError: as the operation itself does on the CPU.
    """
    name = func.name().split(".")[0].removeprefix("aten::").rstrip("_")
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    for index, low, high in _indices(name, given):
        if index.numel() and index.dtype not in (torch.bool, torch.uint8):
            least, most = (int(bound) for bound in index.aminmax())
            if least < low or most >= high:
                raise IndexError(
                    f"{name}: index {most if most >= high else least} is out of range for a "
                    f"dimension of size {high}"
                )


def _indices(name: str, given: dict[str, Any]) -> Iterator[Checked]:
    if name in _BY_ROW:
        yield given["indices"], 0, len(given["weight"])
    elif name in _BY_DIM:
        table = given["self"]
        size = table.shape[given["dim"]] if table.dim() else 1
        yield given["index"], 0, size
    elif name in _FLAT:
        size = given["self"].numel()
        yield given["index"], -size, size
    elif name in _BY_LIST:
        yield from _listed(given["self"], given["indices"])


def _listed(table: Tensor, indices: list[Tensor | None]) -> Iterator[Checked]:
    """`table[i, :, j]`: each index has an axis of its own; a mask has as many as it has axes."""
    axis = 0
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            size = table.shape[axis]
            axis += 1
            if index is not None:
                yield index, -size, size
        else:
            axis += index.dim()
