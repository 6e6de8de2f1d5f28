"""Random generators that a trial run may draw from: what they were, whether they moved, and how to
put them back.
"""

from __future__ import annotations

import functools
import io
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphcache.errors import Fallback
from graphcache.holdings import Slots
from graphcache.reasons import Reason


class RandomStates:
    """The generators that a module may draw from unasked, torch's defaults, `random` and
    `numpy.random`, and those that it holds itself.

    Python's and NumPy's are compared only while no other thread lives that may be drawing from them
    at the same time (`alone`); else the stand-ins of `hostreads` tell.
    """

    def __init__(
        self, device: torch.device, slots: Slots | None = None, alone: bool | None = None
    ) -> None:
        self._device = device
        self._torch = self._torch_states()
        self._seed = torch.initial_seed()
        self._alone = threading.active_count() == 1 if alone is None else alone
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._held = list(_held_generators(slots)) if slots is not None else []

    def _torch_states(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return states

    def drawn(self) -> bool:
        """Whether the device's default generator has moved on."""
        return not torch.equal(self._torch[-1], self._torch_states()[-1])

    def drawn_elsewhere(self, observed: bool) -> str | None:
        """A generator that has moved on and that a graph would freeze.

        Args:
            observed: the run was seen to draw from one of torch's generators.
        """
        state: Any = np.random.get_state()
        before: Any = self._numpy
        if torch.initial_seed() != self._seed:
            return "torch's default generator, which it seeds"
        if any(not _equal(get(), kept) for get, _, kept in self._held):
            return "a generator of its own"
        if self._alone and random.getstate() != self._python:
            return "Python's `random`"
        if self._alone and (state[2] != before[2] or not np.array_equal(state[1], before[1])):
            return "`numpy.random`"
        on_cpu = observed and self._device.type == "cuda"
        if on_cpu and not torch.equal(self._torch[0], torch.get_rng_state()):
            return "the CPU's default generator"
        return None

    def restore(self, observed: bool = True, python: bool = False) -> None:
        """Put back what moved; torch's own only if the run was seen to draw, since other threads'
        draws would be given out again."""
        if observed:
            torch.set_rng_state(self._torch[0])
            if self._device.type == "cuda":
                torch.cuda.set_rng_state(self._torch[1], self._device)
        if self._alone or python:
            random.setstate(self._python)
            np.random.set_state(self._numpy)
        for _, put, kept in self._held:
            put(kept)


Held = tuple[Callable[[], Any], Callable[[Any], object], Any]


def _held_generators(slots: Slots) -> Iterator[Held]:
    """How to read and to put back each generator that a module holds, and its state."""
    for _, _, value in slots.places:
        kind = type(value)  # and not `isinstance`, which asks the object
        if issubclass(kind, random.Random):
            yield value.getstate, value.setstate, value.getstate()
        elif issubclass(kind, torch.Generator):
            yield value.get_state, value.set_state, value.get_state()
        elif issubclass(kind, np.random.RandomState):
            yield value.get_state, value.set_state, value.get_state()
        elif issubclass(kind, np.random.Generator):
            bits = value.bit_generator
            put = functools.partial(setattr, bits, "state")
            yield functools.partial(getattr, bits, "state"), put, bits.state


def refuse_iterators(slots: Slots) -> None:
    """Raise the `generator` fallback for a module that holds an iterator: whoever draws from one
    cannot put it back, so nothing may be tried.
    """
    for _, name, value in slots.places:
        if issubclass(type(value), Iterator) and not issubclass(type(value), io.IOBase):
            raise Fallback(Reason.GENERATOR, f"the module holds an iterator in `{name}`")


def _equal(ours: Any, theirs: Any) -> bool:
    return torch.equal(ours, theirs) if isinstance(ours, Tensor) else repr(ours) == repr(theirs)


def default_generators() -> list[torch.Generator]:
    on_device = list(torch.cuda.default_generators) if torch.cuda.is_initialized() else []
    return [torch.default_generator, *on_device]
