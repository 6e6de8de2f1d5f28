"""Trial runs: the module runs once, watched, and everything but its result is undone.

An `Observer` sees each ATen operation before it runs and notes what a capture could not hold, what
was read and written, and whether random numbers were drawn. It only notes; the run goes on, since
all of it is harmless in eager. While a trial lasts "are we capturing?" is answered yes, in this
thread only: model code asks, and skips host checks (transformers drops an all-ones mask by such a
check, and would be refused for it).
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphcache.attributes import Attributes
from graphcache.bounds import refuse_out_of_range
from graphcache.compiled import uncompiled
from graphcache.errors import Fallback, Finding
from graphcache.frames import user_line
from graphcache.generators import RandomStates, default_generators, refuse_iterators
from graphcache.hazards import operation_hazard, tensors_in, written_tensors
from graphcache.holdings import Slots
from graphcache.hostreads import QUESTIONS, noticing_host_reads
from graphcache.otherweights import Substitutes, standing_in
from graphcache.reasons import Reason
from graphcache.signature import Spec, flatten
from graphcache.stilled import stilled
from graphcache.storages import is_plain, storage_bytes, storage_id
from graphcache.trials import as_trial

_ASKED = "is_current_stream_capturing"


class Origin(NamedTuple):
    """Where a result tensor comes from: made by the run (the `place`-th such tensor), input `place`
    itself, a view of input `place`, a tensor that the module holds, or another one over its memory.
    """

    kind: Literal["made", "input", "view", "state", "state view"]
    place: int = 0


@dataclass(slots=True)
class Observation:
    """What one trial run did. `written` holds the bytes that the run left in the storages it wrote,
    before the undo; `made` are the storages that it made, its results' left out.
    """

    outputs: list[Tensor]
    spec: Spec
    reads: list[Tensor]
    writes: list[Tensor]
    written: list[Tensor]
    draws: bool
    origins: list[Origin]
    findings: list[Finding]
    asks: frozenset[Reason]
    made: list[weakref.ref[Any]]
    operations: set[str]

    def kept(self) -> list[Any]:
        """The storages that the run made and that somebody keeps; what only garbage refers to does
        not count.
        """
        if any(ref() is not None for ref in self.made):
            gc.collect()
        return [storage for storage in (ref() for ref in self.made) if storage is not None]

    @property
    def hazard(self) -> Fallback | None:
        """The first finding, as what a call falls back for."""
        return self.findings[0].fallback() if self.findings else None


@contextlib.contextmanager
def as_captured() -> Iterator[None]:
    """The modes of a capture: no grad, inference mode off, no autocast weight cache, "capturing?"
    answered yes.

    The weight cache would keep casts of today's weights inside the graph.
    """
    caching = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with as_trial(), plain_modes(), _answering_yes():
            yield
    finally:
        torch.set_autocast_cache_enabled(caching)


@contextlib.contextmanager
def plain_modes() -> Iterator[None]:
    """Where static memory and views of it are made: no grad, and no inference tensors, which could
    not be written to outside inference mode.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextlib.contextmanager
def _answering_yes() -> Iterator[None]:
    original, me = torch.cuda.is_current_stream_capturing, threading.get_ident()

    def capturing() -> bool:
        return threading.get_ident() == me or original()

    places = (torch.cuda, torch.cuda.graphs)
    try:
        for place in places:
            setattr(place, _ASKED, capturing)
        yield
    finally:
        for place in places:
            setattr(place, _ASKED, original)


class Observer(TorchDispatchMode):
    """Notes hazards, reads, writes and draws of every ATen operation. Keeps the bytes of what is
    about to be written.
    """

    def __init__(self, inputs: Sequence[Tensor], weights: Substitutes, still: bool) -> None:
        super().__init__()
        self._weights = weights
        self._still = still
        self.findings: list[Finding] = []
        self.operations: set[str] = set()
        self.drew = False
        self.python_drew = False
        self.asks: set[Reason] = set()
        self.reads: dict[int, Tensor] = {}
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.generators: dict[torch.Generator, Tensor] = {}
        self._inputs = {storage_id(tensor): tensor for tensor in inputs}
        self._made: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._weights:
            args, kwargs = _pytree.tree_map_only(Tensor, self._substituted, (args, kwargs))
        self.operations.add(func.name())
        draws = torch.Tag.nondeterministic_seeded in func.tags
        self.drew = self.drew or draws
        tensors = _plain((*args, *kwargs.values()))
        self._look(func, args, kwargs, tensors)
        if not func.name().startswith("aten::lift"):  # how a new torch.tensor(...) announces itself
            for tensor in tensors:
                self._read(tensor)
        for tensor in written_tensors(func, args, kwargs):
            self._write(func, tensor)
        refuse_out_of_range(func, args, kwargs)
        run = stilled if draws and self._still else _as_it_is
        result = run(func, args, kwargs)
        outside = self.reads.keys() | self._inputs.keys()
        for tensor in _plain([result]):
            if storage_id(tensor) not in outside:
                self._made[storage_id(tensor)] = weakref.ref(tensor.untyped_storage())
        return result

    def _substituted(self, tensor: Tensor) -> Tensor:
        if not is_plain(tensor):
            return tensor
        substitute = self._weights.get(storage_id(tensor))
        return tensor if substitute is None else standing_in(substitute, tensor)

    def _look(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
        found = operation_hazard(func, args, kwargs)
        if found is not None and not (
            found[0] is Reason.HOST_COPY and self._constants(func, tensors)
        ):
            self.note(*found)
        generator = kwargs.get("generator")
        if generator is not None and generator not in default_generators():
            self.generators.setdefault(generator, generator.get_state())
            self.note(Reason.GENERATOR, f"{func.name()} draws from a generator of its own")

    def _constants(self, func: Any, tensors: list[Tensor]) -> bool:
        """CPU scalars that the run itself made are constants of the key; a kernel takes them by
        value.
        """
        cpu = [tensor for tensor in tensors if tensor.device.type == "cpu"]
        by_value = not func.name().startswith(("aten::_to_copy", "aten::copy_"))
        return by_value and all(t.dim() == 0 and storage_id(t) in self._made for t in cpu)

    def _read(self, tensor: Tensor) -> None:
        key = storage_id(tensor)
        if key not in self._made and key not in self._inputs:
            self.reads.setdefault(
                key, tensor
            )  # held for the run, so that its id is not given out again

    def _write(self, func: Any, tensor: Tensor) -> None:
        key = storage_id(tensor)
        if key in self._inputs:
            self.note(Reason.INPUT_MUTATED, f"{func.name()}")
        elif key not in self._made and key not in self.kept:
            self.kept[key] = (tensor, storage_bytes(tensor).clone())

    def note(self, reason: Reason, what: str) -> None:
        """Keep a hazard, with the user's source line; the same one of a loop once. That forward
        asks for gradients is one only where they are enabled, and that it asks how a tensor lies
        only for inputs with gaps.
        """
        if reason in QUESTIONS:
            self.asks.add(reason)
            return
        self.python_drew = self.python_drew or reason is Reason.GENERATOR
        found = Finding(reason, what, user_line())
        if found not in self.findings:
            self.findings.append(found)

    def made(self, tensor: Tensor) -> bool:
        return storage_id(tensor) in self._made

    def made_beside(self, outputs: Sequence[Tensor]) -> list[weakref.ref[Any]]:
        """The storages made by the run, without those of its results."""
        ours = set(map(storage_id, outputs))
        return [ref for key, ref in self._made.items() if key not in ours]

    def undo(self) -> list[Tensor]:
        """Put back every byte written outside the run; returns what had been left there."""
        left = []
        for tensor, before in self.kept.values():
            live = storage_bytes(tensor)
            left.append(live.clone())
            live.copy_(before)
        for generator, state in self.generators.items():
            generator.set_state(state)
        return left


def _as_it_is(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _found_in(
    results: list[tuple[Tensor, Origin]], seen: AbstractSet[int], attributes: Attributes
) -> Iterator[Finding]:
    """What the results themselves tell against a capture; `seen` are the storages that operations
    touched.
    """
    known = seen | attributes.storages
    if any(
        origin.kind.startswith("state") and storage_id(out) not in known for out, origin in results
    ):
        yield Finding(Reason.OPAQUE_CODE, "a result comes from code that no trial run can see")
    if any(out.requires_grad and origin.kind == "made" for out, origin in results):
        yield Finding(Reason.GRAD, "forward turns gradients on by itself")


def observe(
    run: Callable[[], Any],
    inputs: Sequence[Tensor],
    module: nn.Module | None,
    device: torch.device,
    weights: Substitutes | None = None,
    still: bool = False,
) -> Observation:
    """Run once under watch and undo all it did to the module's tensors and attributes and to the
    generators.

    Args:
        run: calls the module on `inputs`, which are the caller's to lose.
        weights: what operations get instead of some of the module's tensors, see `otherweights`.
        still: take the chance out of random operations, see `stilled`.

    Raises:
        Fallback: `unsupported-output`; anything that `run` raises passes through, after the undo.
    """
    slots = Slots(module)
    refuse_iterators(slots)
    attributes, generators = Attributes(slots), RandomStates(device, slots)
    observer = Observer(inputs, weights or {}, still)
    outputs: list[Tensor] = []
    try:
        with as_captured():
            with uncompiled(), noticing_host_reads(observer.note), observer:
                result = run()
            spec = flatten(result, outputs, Reason.UNSUPPORTED_OUTPUT)
            _refuse_layouts(outputs)
        draws = observer.drew and generators.drawn()
        elsewhere = generators.drawn_elsewhere(observer.drew)
    finally:
        written = observer.undo()
        changed = attributes.restore()
        generators.restore(observer.drew, observer.python_drew)
    held = attributes.tensors | set(map(id, observer.reads.values()))
    origins = _origins(outputs, inputs, observer, held)
    results = list(zip(outputs, origins, strict=True))
    findings = observer.findings
    if elsewhere is not None:
        findings.append(Finding(Reason.GENERATOR, f"forward draws from {elsewhere}"))
    if changed:
        findings.append(Finding(Reason.STATE_WRITTEN, f"forward changes {', '.join(changed)}"))
    if outputs and not observer.operations and device.type == "cpu":
        findings.append(Finding(Reason.OPAQUE_CODE, "forward issued no ATen operation"))
    findings += _found_in(results, observer.reads.keys() | observer.kept.keys(), attributes)
    return Observation(
        outputs=outputs,
        spec=spec,
        reads=list(observer.reads.values()),
        writes=[tensor for tensor, _ in observer.kept.values()],
        written=written,
        draws=draws,
        origins=origins,
        findings=findings,
        asks=frozenset(observer.asks),
        made=observer.made_beside(outputs),
        operations=observer.operations,
    )


def _refuse_layouts(outputs: Sequence[Tensor]) -> None:
    for output in outputs:
        if not is_plain(output):
            what = "nested" if output.is_nested else str(output.layout)
            raise Fallback(Reason.UNSUPPORTED_OUTPUT, f"a result of layout {what}")


def _origins(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    observer: Observer,
    held: frozenset[int],
) -> list[Origin]:
    positions = {id(tensor): i for i, tensor in enumerate(inputs)}
    storages = {storage_id(tensor): i for i, tensor in enumerate(inputs)}
    made: dict[int, int] = {}
    found = []
    for output in outputs:
        if id(output) in positions:
            found.append(Origin("input", positions[id(output)]))
        elif storage_id(output) in storages:
            found.append(Origin("view", storages[storage_id(output)]))
        elif observer.made(output):
            found.append(Origin("made", made.setdefault(id(output), len(made))))
        else:
            found.append(Origin("state" if id(output) in held else "state view"))
    return found


def _plain(arguments: Iterable[Any]) -> list[Tensor]:
    """The tensors with a storage among arguments or results of an operation."""
    return [t for t in tensors_in(arguments) if is_plain(t)]
