"""Random operations with the chance taken out.

Two runs of different shapes draw different numbers, so their results cannot be compared. With every
draw standing still (dropout lets everything pass, noise is one number, a choice falls on the
likeliest) they can, and a factor of the padded size shows as it does in any other module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SWITCHES = ("train", "training")  # off: no draw at all
_RATES = ("dropout", "dropout_p")
_MIDDLE = 0.5


def stilled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an ATen operation that draws, without chance: what it returns, or writes in place,
    depends on its arguments alone, and each element on its own.
    """
    names = [argument.name for argument in func._schema.arguments]
    still = dict.fromkeys(_SWITCHES, False) | dict.fromkeys(_RATES, 0.0)
    args = tuple(still.get(n, value) for n, value in zip(names, args, strict=False))
    kwargs = {n: still.get(n, value) for n, value in kwargs.items()}
    result = func(*args, **kwargs)
    given = dict(zip(names, args, strict=False)) | kwargs
    if isinstance(result, Tensor) and not still.keys() & given.keys():
        result.copy_(_expected(func.name().split("::")[1].split(".")[0], given, result))
    return result


def _expected(name: str, given: dict[str, Any], result: Tensor) -> Any:
    if name == "multinomial":
        return given["self"].argmax(-1, keepdim=True).expand_as(result)
    if name == "randperm":
        return torch.arange(len(result), device=result.device)
    if name == "binomial":
        return given["count"] * given["prob"]
    if name == "exponential_":
        return torch.full_like(result, 1 / given.get("lambd", 1.0))
    if name in ("bernoulli", "poisson", "_standard_gamma", "_sample_dirichlet"):
        return given["self"]
    return torch.zeros_like(result) + _location(given, result)


def _location(given: dict[str, Any], result: Tensor) -> Any:
    """Where a distribution lies: a mean or probability that was passed, the least number of a
    range; else a number that all usual ones have.
    """
    for name in ("mean", "p", "low", "from", "from_"):
        if isinstance(given.get(name), Tensor) or given.get(name):
            return given[name]
    return _MIDDLE if result.is_floating_point() or result.is_complex() else 0
