"""Makes an entry: preflight at the padded sizes, plain warm-up, capture, and the two-fill check of
the graph itself.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from graphcache.attributes import Attributes
from graphcache.cache import Entry, Key
from graphcache.call import Reading
from graphcache.callplan import results
from graphcache.compare import all_close, all_same, close
from graphcache.errors import CaptureError, Fallback
from graphcache.facts import Facts, Learner
from graphcache.garbage import alike, counted_down
from graphcache.generators import RandomStates
from graphcache.graphs import Backend
from graphcache.holdings import Slots
from graphcache.padding import allocate, fit, head, tails
from graphcache.preflight import Observation, as_captured
from graphcache.reasons import Reason
from graphcache.signature import Input, flatten
from graphcache.storages import storage_bytes, storage_id


class Capturer:
    """Captures one call's form at a bucket. The caller holds the locks and is `backend.aside()`."""

    def __init__(self, learner: Learner, module: nn.Module | None, backend: Backend) -> None:
        self._learner = learner
        self._module = module
        self._backend = backend

    def entry(self, reading: Reading, facts: Facts, key: Key) -> Entry:
        """Capture `reading`'s form at the key's bucket.

        Raises:
            Fallback: what the preflight or the check of the graph found, or `capture-failed`.
            torch.OutOfMemoryError: passes through.
        """
        statics = self._static_inputs(reading, key[1])
        seen = self._learner.observe(reading.call, [static.clone() for static in statics])
        if seen.hazard is not None:
            raise seen.hazard.again()
        args, kwargs = reading.call.arguments_with(statics)
        target = self._learner.target
        if self._backend.device.type == "cuda":
            with self.undone(seen), as_captured():
                target(*args, **kwargs)  # outside all modes: compilation and workspaces happen here
            with self.undone(seen), as_captured():
                self._backend.check(lambda: target(*args, **kwargs))
        entry = self._capture(lambda: target(*args, **kwargs), statics, key, seen)
        entry.memos = [*seen.kept(), *(t for t in seen.reads if storage_id(t) not in facts.reads)]
        return entry

    def _static_inputs(self, reading: Reading, bucket: Sequence[int]) -> list[Tensor]:
        device = self._backend.device
        return [
            allocate(spec, bucket).copy_(fit(tensor.detach().to(device), spec, bucket))
            for tensor, spec in zip(reading.call.tensors, reading.signature.inputs, strict=True)
        ]

    def _capture(
        self, run: Callable[[], object], statics: list[Tensor], key: Key, seen: Observation
    ) -> Entry:
        state: list[Tensor | None] = []

        def captured() -> list[Tensor]:
            """The static outputs: each tensor that the run made, once."""
            leaves: list[Tensor] = []
            with as_captured():
                spec = flatten(run(), leaves, Reason.UNSUPPORTED_OUTPUT)
            if spec != seen.spec:
                raise CaptureError("two runs of the module gave results of different structure")
            made = {
                o.place: leaf.resolve_conj().resolve_neg()  # their lazy bits are not in the memory
                for o, leaf in zip(seen.origins, leaves, strict=True)
                if o.kind == "made"
            }
            state.extend(
                leaf if o.kind.startswith("state") else None
                for o, leaf in zip(seen.origins, leaves, strict=True)
            )
            return list(made.values())

        with self.undone(seen):
            graph = self._backend.capture(captured)
        parts = (key, graph, statics, seen.spec, seen.origins, state, seen.writes, seen.draws)
        return Entry(*parts)

    @contextlib.contextmanager
    def undone(self, seen: Observation | Entry) -> Iterator[None]:
        """Undo what a run outside the observer does to state, by what the preflight saw it do."""
        attributes, generators = Attributes(Slots(self._module)), RandomStates(self._backend.device)
        kept = [(storage_bytes(tensor), storage_bytes(tensor).clone()) for tensor in seen.writes]
        try:
            yield
        finally:
            for live, before in kept:
                live.copy_(before)
            attributes.restore()
            if seen.draws:
                generators.restore()

    def check(self, entry: Entry, facts: Facts) -> None:
        """Replay with different values beside the real rows; the real rows must not move by a bit.
        Once per graph.

        Raises:
            Fallback: they do; the graph must not serve padded calls.
        """
        bucket = entry.key[1]
        real = _half(bucket, facts)
        if real != bucket:
            with statics_kept(entry):
                turns = (False, True, True)
                first, second, again = (self._replay(entry, facts, real, turn) for turn in turns)
            steady = all_same(second, again)
            if not (all_same(first, second) or (not steady and all_close(first, second))):
                detail = f"at bucket {bucket} values in padded rows change real results"
                raise Fallback(Reason.PAD_NOT_NEUTRAL, detail)

    def compare(self, entry: Entry, facts: Facts, reading: Reading) -> None:
        """Compare a graph with eager at a call's own sizes, by norm: a branch on the size shows
        here. A graph that draws cannot be replayed without chance, so its module runs instead,
        padded as the graph is.

        Raises:
            Fallback: they differ; the graph must not serve padded calls.
        """
        device, call, sizes = self._backend.device, reading.call, reading.sizes
        real = [tensor.detach().to(device, copy=True) for tensor in call.tensors]
        with statics_kept(entry), self.undone(entry):
            _pad_into(entry.inputs, entry.key[0].inputs, real, facts, sizes, entry.key[1])
            if entry.draws:
                padded = self._learner.observe(call, [t.clone() for t in entry.inputs], still=True)
                made = _made(padded)
            else:
                entry.graph.replay()
                made = dict(enumerate(entry.graph.outputs))
            ours = {
                k: view.clone() for k, view in results(entry, facts.axes(), sizes, made).items()
            }
        _refuse_other(entry, ours, self._learner.observe(call, real, still=entry.draws), sizes)

    def compare_alike(self, entry: Entry, facts: Facts, reading: Reading) -> None:
        """The same for rows much alike, if the module takes them. It runs instead of its graph,
        under the watch that lets nothing out of a table's range.
        """
        device, inputs, sizes = self._backend.device, entry.key[0].inputs, reading.sizes
        pairs = zip(reading.call.tensors, inputs, strict=True)
        real = [alike(tensor.detach().to(device, copy=True), spec) for tensor, spec in pairs]
        statics = [torch.empty_like(static) for static in entry.inputs]
        _pad_into(statics, inputs, real, facts, sizes, entry.key[1])
        try:
            padded, seen = (
                self._learner.observe(reading.call, tensors, still=True)
                for tensors in (statics, real)
            )
            ours = results(entry, facts.axes(), sizes, _made(padded))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # opposites of values may be none that the module takes
            traceback.clear_frames(error.__traceback__)
            return
        _refuse_other(entry, ours, seen, sizes)

    def _replay(
        self, entry: Entry, facts: Facts, real: Sequence[int], turned: bool
    ) -> list[Tensor]:
        bucket, inputs = entry.key[1], entry.key[0].inputs
        for static, spec, fill in zip(entry.inputs, inputs, facts.fills(len(inputs)), strict=True):
            static.copy_(counted_down(static, spec, bucket, real))
            if turned:
                _turn(static, spec, real, bucket)
            for refill in tails(static, spec, real, bucket, fill):
                refill()
        with self.undone(entry):
            entry.graph.replay()
            made = dict(enumerate(entry.graph.outputs))
            return [
                *(view.clone() for view in results(entry, facts.axes(), real, made).values()),
                *(storage_bytes(t).clone() for t in entry.writes),
            ]


def _pad_into(
    statics: Sequence[Tensor],
    inputs: Sequence[Input],
    real: Sequence[Tensor],
    facts: Facts,
    sizes: Sequence[int],
    bucket: Sequence[int],
) -> None:
    fills = facts.fills(len(inputs))
    for static, spec, tensor, fill in zip(statics, inputs, real, fills, strict=True):
        head(static, spec, sizes).copy_(tensor)
        for refill in tails(static, spec, sizes, bucket, fill):
            refill()


def _refuse_other(
    entry: Entry, ours: Mapping[int, Tensor], seen: Observation, sizes: Sequence[int]
) -> None:
    theirs = _made(seen)
    same_form = seen.spec == entry.spec and ours.keys() == theirs.keys()
    if not (same_form and all(close(ours[k], theirs[k]) for k in ours)):
        detail = f"bucket {entry.key[1]} gives another result than eager at sizes {tuple(sizes)}"
        raise Fallback(Reason.PAD_NOT_NEUTRAL, detail)


def _made(seen: Observation) -> dict[int, Tensor]:
    """The tensors that a run made, each once, by their place."""
    pairs = zip(seen.origins, seen.outputs, strict=True)
    return {origin.place: leaf for origin, leaf in pairs if origin.kind == "made"}


@contextlib.contextmanager
def statics_kept(entry: Entry) -> Iterator[None]:
    """Put the static inputs back: the caller may have been handed them, and may be passing them."""
    kept = [static.clone() for static in entry.inputs]
    entry.filled_for = None
    try:
        yield
    finally:
        for static, before in zip(entry.inputs, kept, strict=True):
            static.copy_(before)


def _turn(static: Tensor, spec: Input, real: Sequence[int], bucket: Sequence[int]) -> None:
    """Other values in the tails: the first real row for integers, which stays in range, and its
    opposite for floats.
    """
    for axis, dim in reversed(spec.axes):
        if real[dim] < bucket[dim]:
            row = static.narrow(axis, 0, 1)
            floats = static.is_floating_point() or static.is_complex()
            tail = static.narrow(axis, real[dim], bucket[dim] - real[dim])
            tail.copy_(-2 * row if floats else row)


def _half(bucket: Sequence[int], facts: Facts) -> tuple[int, ...]:
    """Sizes to check a bucket at: half of each dim that may be padded."""
    if facts.dims is None:
        return tuple(bucket)
    halves = (
        max(d.smallest, n // 2) if d.neutral else n for n, d in zip(bucket, facts.dims, strict=True)
    )
    return tuple(map(min, halves, bucket))
