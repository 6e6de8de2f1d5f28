"""What is known about one signature, learned by trial runs at the first call that needs it.

The order is: does eager accept the call, would a capture hold it, which tensors follow the batch,
which dims may be padded. Whatever is refused is remembered, so that later calls do not try again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from graphcache.call import Call, Reading
from graphcache.compare import all_close
from graphcache.compiled import own_graphs
from graphcache.errors import Fallback, Finding
from graphcache.frames import told
from graphcache.garbage import other_rows
from graphcache.graphs import Backend
from graphcache.holdings import Slots
from graphcache.modes import Modes
from graphcache.otherweights import Substitutes, other_weights
from graphcache.padding import Fill, OutputAxis, fit
from graphcache.preflight import Observation, observe
from graphcache.probe import HINT, DimFacts, Probe
from graphcache.reasons import Reason
from graphcache.signature import flatten
from graphcache.storages import is_plain, storage_id


@dataclass(slots=True)
class Facts:
    """One signature's: whether it is refused for good and all that was found against it, its dims
    once probed, and failed captures by bucket.
    """

    refused: Fallback | None = None
    findings: list[Finding] = field(default_factory=list)
    draws: bool = False
    writes: bool = False
    aliases: bool = False
    reads: frozenset[int] = frozenset()  # storages that were there before, by their ids
    # Whether gradients are enabled (a graph says no), how a tensor lies (in a graph densely).
    asks: frozenset[Reason] = frozenset()
    dims: tuple[DimFacts, ...] | None = None
    uncut: Fallback | None = None  # why calls must not be served in pieces, once that went wrong
    cuts: set[tuple[tuple[int, ...], ...]] = field(default_factory=set)  # compared with eager
    failed: dict[tuple[int, ...], Fallback] = field(default_factory=dict)

    def unpadded(self, sizes: Sequence[int]) -> frozenset[int]:
        """The dims that must keep a call's own size."""
        if self.dims is None:
            return frozenset()
        if any(size < d.smallest for size, d in zip(sizes, self.dims, strict=True)):
            return frozenset(range(len(self.dims)))  # results of another form, axes unknown
        return frozenset(i for i, d in enumerate(self.dims) if not d.neutral)

    def at_least(self, sizes: Sequence[int], bucket: Sequence[int]) -> tuple[int, ...]:
        """Sizes, but the bucket's where a dim may not be padded, and none under the smallest."""
        dims = self.dims or [DimFacts(False)] * len(sizes)
        return tuple(
            max(size, d.smallest) if d.neutral else most
            for size, most, d in zip(sizes, bucket, dims, strict=True)
        )

    def why_unpadded(self, dim: int) -> Fallback:
        facts = self.dims[dim] if self.dims else DimFacts(True)
        if facts.neutral:
            detail = "results have another form, or other values, at size 1"
            return Fallback(Reason.UNSUPPORTED_OUTPUT, detail)
        return Fallback(facts.reason, facts.detail, facts.remedy)

    def axes(self) -> list[list[OutputAxis]]:
        """How each output is cut, over all dims that may be padded."""
        known = [d.axes for d in self.dims or () if d.neutral and d.axes is not None]
        return [
            list(itertools.chain.from_iterable(per_output))
            for per_output in zip(*known, strict=True)
        ]

    def fills(self, count: int) -> list[dict[int, Fill]]:
        """For each input, the fill by dim that calls must restore."""
        found: list[dict[int, Fill]] = [{} for _ in range(count)]
        for dim, facts in enumerate(self.dims or ()):
            for i, fill in facts.fills.items():
                found[i][dim] = fill
        return found

    def splittable(self, dim: int) -> bool:
        facts = self.dims[dim] if self.dims else None
        return (
            facts is not None
            and facts.independent
            and facts.smallest == 1  # the last piece may have one row
            and not (self.draws or self.writes or self.aliases)
        )


class Learner:
    """Makes trial runs of one module and turns them into facts. Called under the capture lock,
    beside the callers' streams.

    Args:
        target: what to call.
        module: whose state the runs must leave alone.
        backend: where they run.
        fill: the caller's fills by input name.
        trusting: do not probe (verify="off").
        modes: told of the operations that runs issue.
    """

    def __init__(
        self,
        target: Callable[..., object],
        module: nn.Module | None,
        backend: Backend,
        fill: Mapping[str, Fill],
        trusting: bool,
        modes: Modes,
    ) -> None:
        self.target = target
        self._modes = modes
        self._module = module
        self._backend = backend
        self._fill = fill
        self._trusting = trusting

    def observe(
        self,
        call: Call,
        tensors: Sequence[Tensor],
        weights: Substitutes | None = None,
        still: bool = False,
    ) -> Observation:
        """One trial run of the call's form on other tensors, which the run may write to, and
        perhaps on other weights, or without chance.
        """
        args, kwargs = call.arguments_with(tensors)
        device = self._backend.device
        run = functools.partial(self.target, *args, **kwargs)
        seen = observe(run, tensors, self._module, device, weights, still)
        self._modes.heed(seen.operations)
        if not _untouched(call, args, kwargs):
            what = "forward changes a list or dict argument"
            seen.findings.append(Finding(Reason.INPUT_MUTATED, what))
        return seen

    def first_look(self, reading: Reading) -> tuple[Facts, list[Tensor]]:
        """Run the call as it is, on copies; also the tensors that the run read.

        Raises:
            Exception: whatever the module raises; eager raises the same to the caller.
        """
        call, device = reading.call, self._backend.device
        seen = self.observe(
            call, [tensor.detach().to(device, copy=True) for tensor in call.tensors]
        )
        made = all(origin.kind == "made" for origin in seen.origins)
        facts = Facts(
            findings=seen.findings,
            draws=seen.draws,
            writes=bool(seen.writes),
            aliases=not made,
            reads=frozenset(map(storage_id, seen.reads)),
            asks=seen.asks,
        )
        if any(origin.kind == "view" for origin in seen.origins):
            what = "a result is a view of an input"
            facts.findings.append(Finding(Reason.UNSUPPORTED_OUTPUT, what))
        facts.findings += own_graphs(self.target, self._module)
        facts.refused = seen.hazard
        if reading.lifted and facts.refused is None:
            facts.refused = self._judge_lifting(call, seen)
        return facts, seen.reads

    def _judge_lifting(self, call: Call, lifted: Observation) -> Fallback | None:
        """CPU inputs of a CUDA module may be handed to it on the device only if eager takes them as
        they are.
        """
        plain = self.observe(call, [tensor.detach().clone() for tensor in call.tensors])
        same_device = [a.device for a in plain.outputs] == [b.device for b in lifted.outputs]
        if same_device and all_close(plain.outputs, lifted.outputs):
            return None
        return plain.hazard or Fallback(
            Reason.HOST_COPY, "results differ when the inputs are moved to the device first"
        )

    def followers(self, reading: Reading) -> dict[str, bool]:
        """For each other tensor as long as the batch: does it follow the batch, or have that length
        by chance?

        Each is tried by cutting the others but not it, and by a row more of them: an error or
        changed rows mean that it follows. It also does if cutting it alone cuts the leading axis of
        a result. At fewer than 4 rows, rows are repeated first, so that no axis of length 1 can
        broadcast.
        """
        call, inputs = reading.call, reading.signature.inputs
        rows = max(4, reading.sizes[0])
        full = [
            fit(t.detach().to(self._backend.device), i, (rows,))
            for t, i in zip(call.tensors, inputs, strict=True)
        ]
        try:
            whole = self.observe(call, [t.clone() for t in full])
        except Exception:
            return {}
        return {
            path: self._follows(call, full, whole, reading, path) for path in reading.candidates
        }

    def _follows(
        self, call: Call, full: list[Tensor], whole: Observation, reading: Reading, path: str
    ) -> bool:
        inputs, k = reading.signature.inputs, reading.paths.index(path)
        rows = len(full[k])

        def sized(own: int, others: int) -> list[Tensor]:
            sizes = [(own if i == k else others,) for i in range(len(full))]
            return [fit(*parts) for parts in zip(full, inputs, sizes, strict=True)]

        apart = self._same_rows(call, sized(rows, rows - 1), whole, rows - 1) and self._same_rows(
            call, sized(rows, rows + 1), whole, rows + 1
        )
        return not apart or self._cuts_rows(call, sized(rows - 1, rows), whole, rows - 1)

    def _same_rows(self, call: Call, tensors: list[Tensor], whole: Observation, rows: int) -> bool:
        try:
            seen = self.observe(call, [t.clone() for t in tensors])
        except Exception:
            return False
        return (
            seen.spec == whole.spec
            and all(
                s.dim() == w.dim()
                and (s.dim() == 0 or len(s) == rows or len(s) == len(w))
                and _common_close(s, w)
                for s, w in zip(seen.outputs, whole.outputs, strict=True)
            )
            and any(s.shape != w.shape for s, w in zip(seen.outputs, whole.outputs, strict=True))
        )

    def _cuts_rows(self, call: Call, tensors: list[Tensor], whole: Observation, rows: int) -> bool:
        try:
            part = self.observe(call, [t.clone() for t in tensors])
        except Exception:
            return False
        pairs = list(zip(part.outputs, whole.outputs, strict=False))
        return any(p.dim() and len(p) == rows and len(w) == rows + 1 for p, w in pairs) and all(
            p.dim() == w.dim() and _common_close(p, w) for p, w in pairs
        )

    def probe(self, reading: Reading, bucket: Sequence[int]) -> tuple[DimFacts, ...]:
        """Probe every dim between this call's sizes and the bucket's."""
        signature = reading.signature
        tensors, sizes = self._doubled(reading)
        weights = [] if self._trusting else self._other_weights()
        today, *other_days = (
            functools.partial(self._checked, reading.call, w) for w in ({}, *weights)
        )
        probe = Probe(
            today, signature.inputs, tensors, sizes, self._fill, self._trusting, other_days
        )
        dims = tuple(probe.dim(i, bucket[i]) for i in range(len(bucket)))
        return _apart(dims)

    def _other_weights(self) -> list[Substitutes]:
        """Everything that the module holds as it may be another day; if it does not take that, all
        but integers, which may be indices, or the parameters alone.
        """
        held = [
            value for _, _, value in Slots(self._module).places if issubclass(type(value), Tensor)
        ]
        parameters = [tensor for tensor in held if isinstance(tensor, nn.Parameter)]
        choices = ((held, True), (held, False), (parameters, False))
        found = [other_weights(filter(is_plain, tensors), whole) for tensors, whole in choices]
        return [weights for weights in found if weights]

    def _doubled(self, reading: Reading) -> tuple[list[Tensor], tuple[int, ...]]:
        """The call's tensors with two entries where a dim has one, and the sizes that they have.

        One row alone hides much: relative to the best row, or centred, it is zero, and whatever
        another dim's padding does to it stays zero. A call that takes one row only stays as it is.
        """
        call, inputs = reading.call, reading.signature.inputs
        tensors = [t.detach().to(self._backend.device) for t in call.tensors]
        sizes = tuple(max(2, size) for size in reading.sizes)
        if len(sizes) == 1 or sizes == reading.sizes:
            return tensors, reading.sizes
        pairs = zip(tensors, inputs, strict=True)
        doubled = [other_rows(tensor, spec, reading.sizes, sizes) for tensor, spec in pairs]
        try:
            self._checked(call, {}, [tensor.clone() for tensor in doubled])
        except Fallback:
            return tensors, reading.sizes
        return doubled, sizes

    def _checked(self, call: Call, weights: Substitutes, tensors: list[Tensor]) -> Observation:
        """A probe's run, without chance: errors at another size are an answer, except want of
        memory.
        """
        try:
            seen = self.observe(call, tensors, weights, still=True)
        except (Fallback, torch.OutOfMemoryError):
            raise
        except Exception as error:
            what = f"other sizes or values raise {told(error)}"
            remedy = f"{HINT}; check its `fill`" if self._fill else HINT
            raise Fallback(Reason.PAD_NOT_NEUTRAL, what, remedy) from error
        if seen.hazard is not None:
            raise seen.hazard.again()
        return seen


def _untouched(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the containers that a run was given hold what they held before."""
    leaves: list[Tensor] = []
    try:
        return flatten((args, kwargs), leaves) == call.spec
    except Fallback:
        return False


def _apart(dims: tuple[DimFacts, ...]) -> tuple[DimFacts, ...]:
    """Refuse to pad any dim if an output axis follows two of them (batch * seq flattened), or one
    could not be told.

    Such an axis grows by a factor that depends on the other dim, so what was learned at these sizes
    fails at others.
    """
    if len(dims) < 2:
        return dims
    claims = [
        {(k, axis.axis) for k, output in enumerate(d.axes or ()) for axis in output} for d in dims
    ]
    shared = any(a & b for a, b in itertools.combinations(claims, 2))
    if not shared and all(d.axes is not None for d in dims):
        return dims
    detail = (
        "an axis of a result follows two dynamic dims"
        if shared
        else "an axis of a result does not follow a dim"
    )
    remedy = "" if shared else HINT
    return tuple(DimFacts(False, detail, Reason.UNSUPPORTED_OUTPUT, remedy=remedy) for _ in dims)


def _common_close(a: Tensor, b: Tensor) -> bool:
    """Whether the leading blocks that both have are close."""
    for axis, size in enumerate(map(min, a.shape, b.shape)):
        a, b = a.narrow(axis, 0, size), b.narrow(axis, 0, size)
    return all_close([a], [b])
