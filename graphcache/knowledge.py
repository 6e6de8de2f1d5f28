"""What is known about a module: its signatures' facts, which arguments follow the batch, examples
of its calls.

Learns by trial runs when a call needs it. Called under the cache's lock; trials also hold the
process's capture lock.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from cachetools import LRUCache

from graphcache.call import Call, Reading
from graphcache.dims import DynamicDims
from graphcache.errors import Fallback, Finding
from graphcache.facts import Facts, Learner
from graphcache.frames import told
from graphcache.graphs import CAPTURE_LOCK, Backend
from graphcache.modes import Modes
from graphcache.preflight import plain_modes
from graphcache.probe import DimFacts
from graphcache.reasons import Reason
from graphcache.settings import Settings
from graphcache.signature import Signature
from graphcache.watch import Watch

T = TypeVar("T")

_MOST_WRITTEN = 8  # trials in a row, from then on at powers of two


class Knowledge:
    """Facts by signature, kept for a few times as many signatures as may own graphs.

    Args:
        dims: the module's dynamic dims.
        exact: no buckets are given.
        settings: `verify` and the bounds.
        watch: told of tensors that a run read.
    """

    def __init__(self, dims: DynamicDims, exact: bool, settings: Settings, watch: Watch) -> None:
        self._dims = dims
        self._exact = exact
        self._watch = watch
        self._signatures = settings.max_signatures
        self.trusting = settings.verify == "off"
        self.forget()

    def forget(self) -> None:
        self._facts: LRUCache[Signature, Facts] = LRUCache(4 * self._signatures)
        self._examples: LRUCache[Signature, Call] = LRUCache(self._signatures)
        self._follows: dict[str, bool] = {}
        self._written: dict[Signature, Fallback] = {}
        self._asked: Counter[Signature] = Counter()

    def attach(self, backend: Backend, modes: Modes, learner: Learner) -> None:
        """Learn by these from now on."""
        self._backend, self._modes = backend, modes
        self._learner = learner

    def read(self, call: Call, follows: Mapping[str, bool] | None = None) -> Reading:
        """Read a call under the dims, with what is known of its side inputs.

        Raises:
            Fallback: what stops the reading.
        """
        follows = {**self._follows, **(follows or {})}
        state = self._watch.state
        return Reading(call, self._dims, follows, self._modes, self._exact, state)

    def of(self, reading: Reading, admit: Callable[[Signature], None]) -> tuple[Reading, Facts]:
        """The facts of a call, learned now if its signature is new.

        Settling which side inputs follow the batch changes the reading, so that comes back too.

        Args:
            reading: the call.
            admit: raises if a new signature must not be tried out.

        Raises:
            Fallback: why calls of this signature run eagerly.
        """
        facts = self._facts_of(reading, admit)
        if reading.candidates and not self._exact and not self.trusting:
            reading = self._settled(reading)
            facts = self._facts_of(reading, admit)
        return reading, facts

    def _facts_of(self, reading: Reading, admit: Callable[[Signature], None]) -> Facts:
        facts = self._facts.get(reading.signature)
        if facts is None:
            self._refuse_writers(reading.signature)
            admit(reading.signature)
            facts = self._learn(reading)
        if facts.refused is not None:
            raise facts.refused.again()
        return facts

    def _refuse_writers(self, signature: Signature) -> None:
        """Try a form of call ever more rarely whose trials found state written: each call may be in
        another state, and a trial puts back what other threads write to the same things.
        """
        form = signature._replace(state=0)
        last = self._written.get(form)
        if last is not None:
            self._asked[form] += 1
            asked = self._asked[form]
            if asked > _MOST_WRITTEN and asked & (asked - 1):
                raise last.again()

    def findings(self, reading: Reading) -> list[Finding]:
        """What stops captures of this signature, all of it; learned now if it is new.

        Raises:
            Fallback: the module raised, or there is no memory for the trial.
        """
        facts = self._facts.get(reading.signature) or self._learn(reading)
        if facts.refused is None or facts.findings:
            return facts.findings
        return [facts.refused.finding()]

    def _learn(self, reading: Reading) -> Facts:
        try:
            facts, reads = self._trial(lambda: self._learner.first_look(reading))
        except Fallback as fallback:
            if fallback.reason in (Reason.OUT_OF_MEMORY, Reason.CAPTURE_FAILED):
                raise  # of this call, perhaps not of the next one
            facts, reads = Facts(refused=fallback.again()), []
        if facts.refused is not None and facts.refused.reason is Reason.STATE_WRITTEN:
            form = reading.signature._replace(state=0)
            self._written[form] = facts.refused.again()
        self._watch.follow(reads)
        if torch.is_grad_enabled() and self._watch.needs_grad():
            raise Fallback(Reason.GRAD)  # because of a tensor that only the run showed
        if self.trusting and self._dims.implicit and not self._exact:
            detail = 'verify="off" pads only dims named in `dynamic_shapes`'
            facts.dims = (DimFacts(False, detail, Reason.PAD_NOT_NEUTRAL),)
        self._facts[reading.signature] = facts
        try:
            with plain_modes():
                example = reading.example()
        except RuntimeError:  # of dtypes that cannot be copied row by row, such as quantised ones
            example = None
        if example is not None and facts.refused is None:
            self._examples[reading.signature] = example
        return facts

    def _settled(self, reading: Reading) -> Reading:
        """Find out, once per argument name, which tensors as long as the batch follow it."""
        found = self._trial(lambda: self._learner.followers(reading))
        self._follows.update(found)
        apart = {path: False for path in reading.candidates if path not in found}
        return self.read(reading.call, apart)

    def probe(self, reading: Reading, facts: Facts, bucket: tuple[int, ...]) -> None:
        """Probe every dim between the call's sizes and these, and keep what was found.

        Raises:
            Fallback: no memory for the trial.
        """
        facts.dims = self._trial(lambda: self._learner.probe(reading, bucket))

    def _trial(self, run: Callable[[], T]) -> T:
        """Make trial runs; what the module raises in them is for eager to raise to the caller."""
        try:
            with CAPTURE_LOCK, self._backend.aside(), plain_modes():
                return run()
        except Fallback:
            raise
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)
            raise Fallback(Reason.OUT_OF_MEMORY, str(error).splitlines()[0]) from error
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            raise Fallback(Reason.CAPTURE_FAILED, f"a trial run raised {told(error)}") from error

    def examples(self) -> list[Call]:
        """One small call of each form that was learned and not refused."""
        return list(self._examples.values())

    def forget_failures(self) -> None:
        for facts in self._facts.values():
            facts.failed.clear()

    def quarantine(self, signature: Signature, bucket: tuple[int, ...], why: Fallback) -> None:
        """Refuse a bucket of a signature from now on."""
        facts = self._facts.get(signature)
        if facts is not None:
            facts.failed[bucket] = why.again()

    def rebucket(self, exact: bool) -> None:
        """Whether buckets are given may have changed, and with it how calls are read."""
        if exact != self._exact:
            self._exact = exact
            self.forget()
        self.forget_failures()
