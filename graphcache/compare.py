"""When two results count as equal: bit for bit at one shape, by relative norm between shapes.

Kernels may change with the shape (ResNet-50 in fp32 differs in 98 % of its elements by about 5e-5),
so a padded run and a real one are compared by norm; two runs of one shape by bits. Both read the
device, so callers use them rarely.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphcache.modes import matmul_precision

TOLERANCE = {
    torch.float64: 1e-6,
    torch.complex128: 1e-6,
    torch.float32: 1e-3,
    torch.complex64: 1e-3,
    torch.float16: 1e-2,
    torch.bfloat16: 3e-2,
}
_LOOSEST = 1e-1  # 8-bit floats
# float32 in the precision that the user allows for matmuls: TF32 has float16's mantissa.
_REDUCED = {"tf32": TOLERANCE[torch.float16], "bf16": TOLERANCE[torch.bfloat16]}


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Equal shape, dtype and bits; NaN equals the same NaN."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    return torch.equal(as_bytes(ours), as_bytes(theirs))


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def close(ours: Tensor, theirs: Tensor) -> bool:
    """Equal shape and dtype, equal non-finite places, and a relative norm of the difference within
    the bound of the dtype, and of the precision allowed for float32 matmuls.

    Integers and bools must be equal.
    """
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    if not (ours.is_floating_point() or ours.is_complex()):
        return torch.equal(ours, theirs)
    wide = torch.complex128 if ours.is_complex() else torch.float64
    a, b = ours.detach().to(wide), theirs.detach().to(wide)
    finite = a.isfinite() & b.isfinite()
    if not bool(((a == b) | (a.isnan() & b.isnan()) | finite).all()):
        return False
    difference = torch.linalg.vector_norm((a - b)[finite])
    return bool(difference <= _bound(ours) * torch.linalg.vector_norm(b[finite]) + 1e-12)


def _bound(tensor: Tensor) -> float:
    bound = TOLERANCE.get(tensor.dtype, _LOOSEST)
    if bound != TOLERANCE[torch.float32]:
        return bound
    return _REDUCED.get(matmul_precision(tensor.device), bound)


def all_same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(same_bits, ours, theirs))


def all_close(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(close, ours, theirs))
