"""Hooks of a module: those that a replay may do without, and those that it would skip."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_KEPT = (
    *HOOKS,
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
GLOBAL_HOOKS = (
    nn.modules.module._global_forward_hooks,
    nn.modules.module._global_forward_pre_hooks,
)
_RECORDED_HOOKS = (WeightNorm, SpectralNorm)  # they only compute a weight, which a replay does too
# Hooks that transformers leaves on its layers for good once somebody asked for hidden states. They
# do nothing unless a call asks for such outputs, and return them from that call, as a replay does.
_COLLECTING_HOOKS = "transformers.utils.output_capturing"


def hook_dicts(module: nn.Module) -> list[dict[Any, Any]]:
    """Where a module keeps its hooks, and which of them take keyword arguments."""
    own = vars(module)
    return [own[name] for name in _KEPT if isinstance(own.get(name), dict)]


def recorded(module: nn.Module, kind: str) -> bool:
    hooks = vars(module)[kind].values()
    return bool(hooks) and all(isinstance(h, _RECORDED_HOOKS) or _collects(h) for h in hooks)


def _collects(hook: Any) -> bool:
    return getattr(hook, "__module__", None) == _COLLECTING_HOOKS


def collectors(modules: list[nn.Module]) -> list[Any]:
    """The context variables that are set while a model around a hooked one collects outputs."""
    hooks = [hook for m in modules for hook in vars(m)["_forward_hooks"].values()]
    found = (hook.__globals__.get("_active_collector") for hook in hooks if _collects(hook))
    return list({id(collector): collector for collector in found if collector is not None}.values())


def derived_names(module: nn.Module) -> set[str]:
    """Attributes that a recorded hook computes anew in each forward."""
    hooks = vars(module)["_forward_pre_hooks"].values()
    return {hook.name for hook in hooks if isinstance(hook, _RECORDED_HOOKS)}
