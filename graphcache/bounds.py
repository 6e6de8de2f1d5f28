"""What a CUDA kernel asserts about its inputs, found before the kernel runs.

Such an assert ends the process's CUDA context: no trial of another size, or of garbage, may get
there. A table of positions shorter than a bucket would be one way, a mask that was not padded along
with its batch another, garbage taken for a probability a third.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

Checked = tuple[Tensor, int, int]  # indices, and the range [low, high) that they must lie in

_BY_DIM = frozenset(
    {
        "gather", "index_select", "index_add", "index_copy", "index_reduce",
        "scatter", "scatter_add", "scatter_reduce",
    }
)  # fmt: skip
_BY_LIST = frozenset({"index", "index_put", "_index_put_impl", "_unsafe_index"})
_BY_ROW = frozenset({"embedding", "_embedding_bag", "_embedding_bag_forward_only"})
_FLAT = frozenset({"take", "put"})
_LOSSES = frozenset({"nll_loss_forward", "nll_loss2d_forward"})
# The argument that holds probabilities, if it is a tensor, and whether they may exceed 1.
_PROBABILITIES = {
    "bernoulli": ("self", False),
    "bernoulli_": ("p", False),
    "binary_cross_entropy": ("self", False),
    "multinomial": ("self", True),
    "poisson": ("self", True),
}


def refuse_out_of_range(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if an ATen operation would index out of range, or draw by what is no probability. Waits
    for the device.

    Raises:
        IndexError: an index, as the operation itself does on the CPU.
        RuntimeError: a probability, or an assertion of forward, likewise.
    """
    full = func.name().split(".")[0].removeprefix("aten::")
    name = full.rstrip("_")
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    if name == "_assert_async" and not bool(given["self"]):
        raise RuntimeError(str(given.get("assert_msg", "an assertion of forward fails")))
    _refuse_improbable(full, given)
    for index, low, high in _indices(name, given):
        if index.numel() and index.dtype not in (torch.bool, torch.uint8):
            least, most = (int(bound) for bound in index.aminmax())
            if least < low or most >= high:
                raise IndexError(
                    f"{name}: index {most if most >= high else least} is out of range for a "
                    f"dimension of size {high}"
                )


def _refuse_improbable(name: str, given: dict[str, Any]) -> None:
    argument, unbounded = _PROBABILITIES.get(name, ("", False))
    values = given.get(argument)
    if isinstance(values, Tensor) and values.numel():
        least, most = (float(bound) for bound in values.aminmax())
        if not (least >= 0 and (most <= 1 or (unbounded and most < math.inf))):
            raise RuntimeError(f"{name}: {least} to {most} are no probabilities")


def _indices(name: str, given: dict[str, Any]) -> Iterator[Checked]:
    if name in _BY_ROW:
        yield given["indices"], 0, len(given["weight"])
    elif name in _BY_DIM:
        table = given["self"]
        size = table.shape[given["dim"]] if table.dim() else 1
        yield given["index"], 0, size
    elif name == "index_fill":
        size = given["self"].shape[given["dim"]] if given["self"].dim() else 1
        yield given["index"], -size, size
    elif name in _LOSSES:
        targets = given["target"]
        yield targets[targets != given["ignore_index"]], 0, given["self"].shape[-1 - _images(name)]
    elif name in _FLAT:
        size = given["self"].numel()
        yield given["index"], -size, size
    elif name in _BY_LIST:
        yield from _listed(given["self"], given["indices"])


def _images(name: str) -> int:
    """How many axes follow that of the classes."""
    return 2 if name.startswith("nll_loss2d") else 0


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
