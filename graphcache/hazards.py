"""The operations that a CUDA graph cannot hold, told from their schema and arguments before they
run.

One list for the real thing and for the CPU recorder, so that a laptop refuses what a GPU would.
Sources: the tags of PyTorch's operator schemas, and the operations measured to break a capture
(docs/design.md, "Measured facts").
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from graphcache.reasons import Reason

Hazard = tuple[Reason, str]

# These wait for the device inside their kernels and carry no tag that says so.
_SYNCHRONISING = frozenset(
    {
        "aten::_linalg_check_errors", "aten::_linalg_svd", "aten::_linalg_eigh",
        "aten::_linalg_eigvals", "aten::linalg_eig", "aten::linalg_eigvals", "aten::linalg_lstsq",
        "aten::is_nonzero", "aten::equal",
        "aten::allclose", "aten::_local_scalar_dense", "aten::item", "aten::is_coalesced",
    }
)  # fmt: skip
_WORDS = {
    "aten::_local_scalar_dense": "`.item()`, `float()`, `if tensor:` (aten::_local_scalar_dense)",
    "aten::is_nonzero": "`if tensor:` (aten::is_nonzero)",
}
_INDEXING = frozenset(
    {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
)
_MASKS = (torch.bool, torch.uint8)


def operation_hazard(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hazard | None:
    """Whether an ATen operation would break or falsify a capture; the text names it."""
    name = func.name().split(".")[0]
    if name in _SYNCHRONISING or torch.Tag.data_dependent_output in func.tags:
        return Reason.HOST_SYNC, _WORDS.get(name, name)
    if name in _INDEXING:  # tagged as dynamic in any case, though only masks are
        if _indexes_by_mask(name, args):
            return Reason.DYNAMIC_OUTPUT, f"{name} with a boolean mask"
    elif torch.Tag.dynamic_output_shape in func.tags and not _given_size(name, kwargs):
        return Reason.DYNAMIC_OUTPUT, name
    tensors = tensors_in((*args, *kwargs.values()))
    if any(tensor.is_nested for tensor in tensors):
        return Reason.DYNAMIC_OUTPUT, f"{name} on a nested tensor"
    if _crosses_devices(func, tensors, kwargs):
        return Reason.HOST_COPY, name
    return None


def _given_size(name: str, kwargs: dict[str, Any]) -> bool:
    return name == "aten::repeat_interleave" and kwargs.get("output_size") is not None


def _indexes_by_mask(name: str, args: tuple[Any, ...]) -> bool:
    """Boolean indexing counts its ones on the host, except for the masked fill that `x[mask] =
    scalar` becomes.
    """
    indices = [index for index in args[1] if isinstance(index, Tensor)]
    if not any(index.dtype in _MASKS for index in indices):
        return False
    accumulate = len(args) > 3 and args[3]
    fills = name != "aten::index" and args[2].numel() == 1 and not accumulate
    return not (fills and all(index.dtype in _MASKS for index in indices))


def _crosses_devices(func: Any, tensors: list[Tensor], kwargs: dict[str, Any]) -> bool:
    kinds = {tensor.device.type for tensor in tensors}
    target = kwargs.get("device")
    if target is not None and tensors and func.name().startswith("aten::_to_copy"):
        kinds.add(torch.device(target).type)
    return "cpu" in kinds and len(kinds - {"meta"}) > 1


# These write the running statistics (arguments 3 and 4) in training, which their schema does not
# say.
_HIDDEN_WRITES = frozenset(
    {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}
)


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes, by its schema and by the exceptions known."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[position] if position < len(args) else kwargs.get(argument.name))
    if func.name().split(".")[0] in _HIDDEN_WRITES and args[5]:
        found += args[3:5]
    return tensors_in(found)


def tensors_in(arguments: Iterable[Any]) -> list[Tensor]:
    """The tensors among the arguments of an operation, which are flat but for lists."""
    found = []
    for value in arguments:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
    return found
