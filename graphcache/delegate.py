"""An nn.Module that stands in a model's place for another one, without a trace in its state dict.

It shares the inner module's dicts of parameters, buffers and submodules, so that keys carry no
prefix and `model.encoder = GraphCache(model.encoder, ...)` changes nothing for optimizers,
checkpoints and `.to()`. Whatever nn.Module does to itself is passed to the inner module, whose
class may have overridden it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

# Methods of nn.Module that a class may override; those of the second kind return the module.
_ASKING = ("parameters", "named_parameters", "buffers", "named_buffers", "zero_grad", "extra_repr")
_CHANGING = (
    "train", "eval", "to", "to_empty", "cpu", "cuda", "type", "half", "float", "double", "bfloat16",
    "requires_grad_", "share_memory",
)  # fmt: skip
_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class Delegate(nn.Module):
    """Forwards attributes, modes and state to `inner`, except those in `_own`: a wrapper that
    somebody puts around this object's `forward`, and what its own hooks need.
    """

    _own: frozenset[str] = frozenset({"forward", "_is_full_backward_hook"})

    def __init__(self, inner: nn.Module | None) -> None:
        super().__init__()
        object.__setattr__(self, "_inner", inner)
        if inner is not None:
            for shared in _SHARED:
                self.__dict__[shared] = inner.__dict__[shared]
            del self.__dict__["training"]  # read from the inner module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As nn.Module's, without its two frames (1.5 us) where no hook of this very object needs
        them.
        """
        own = self.__dict__
        if (
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
        ):
            return super().__call__(*args, **kwargs)
        return self.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("_inner")
        if inner is None:
            return super().__getattr__(name)
        return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        inner = self.__dict__.get("_inner")
        if inner is None or name in self._own:
            object.__setattr__(self, name, value)
        else:
            setattr(inner, name, value)

    def __delattr__(self, name: str) -> None:
        inner = self.__dict__.get("_inner")
        if inner is None or name in self._own:
            object.__delattr__(self, name)
        else:
            delattr(inner, name)

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        if self._inner is not None:
            self._inner.apply(fn)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if self._inner is not None:
            self._inner._apply(fn, recurse)
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the inner module in place, as `nn.Module.compile` does; the cache itself is not
        code to compile.
        """
        if self._inner is not None:
            self._inner.compile(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return (
            super().state_dict(*args, **kwargs)
            if self._inner is None
            else self._inner.state_dict(*args, **kwargs)
        )

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if self._inner is None:
            return super().load_state_dict(*args, **kwargs)
        return self._inner.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if self._inner is not None:
            self._inner._load_from_state_dict(*args, **kwargs)


def _passed_on(name: str) -> Callable[..., Any]:
    """nn.Module's method, called on the inner module if there is one."""
    plain = getattr(nn.Module, name)

    @functools.wraps(plain)
    def method(self: Delegate, *args: Any, **kwargs: Any) -> Any:
        if self._inner is None:
            return plain(self, *args, **kwargs)
        result = getattr(self._inner, name)(*args, **kwargs)
        return self if name in _CHANGING else result

    return method


for _name in (*_ASKING, *_CHANGING):
    setattr(Delegate, _name, _passed_on(_name))
