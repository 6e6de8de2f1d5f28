"""The padding probe: may a dim of this module be padded, with which fills, and what follows the dim
in the outputs?

Padding is neutral if, with some smallest set of *controls* held at their fill (a mask at 0, say),
finite garbage of either sign in every other padded input leaves the real part unchanged: bit for
bit between two garbage runs at one padded shape, and by norm against the run at the real shape. The
real part is the real rows of every output and the module's state. Garbage for integers and bools is
drawn from the values of the real input, never out of their range: an index out of range is a device
assert, which ends the process's CUDA context.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from graphcache.dimtrial import DimTrial, Run
from graphcache.errors import Fallback
from graphcache.garbage import (
    EXTREMES,
    FAINT,
    LARGE,
    PLAIN,
    alike,
    counted_down,
    extreme,
    garbage,
    marked,
    mixed,
    switched,
    telling,
    turned_on,
)
from graphcache.padding import REPEAT, Fill, OutputAxis
from graphcache.preflight import Observation
from graphcache.reasons import Reason
from graphcache.signature import Input

MAX_CONTROLS = 3
HINT = "name in `dynamic_shapes` every argument that varies with the dim, and no other"

Change = Callable[[Tensor, Input], Tensor]


def _as_it_is(leaf: Tensor, spec: Input) -> Tensor:
    return leaf


@dataclass(frozen=True, slots=True)
class DimFacts:
    """What the probe found about one dim of one signature.

    `fills` maps each input (by position) to the fill that calls must restore; inputs that follow
    the dim and are not in it are inert: even NaN and infinities in their tails leaves the real part
    alone. `controls` are those the result depends on. `axes` tells how each output follows the dim,
    None if it could not be told; `smallest` is 2 for a module whose results have another form at
    size 1 (`squeeze()`).
    """

    neutral: bool
    detail: str = ""
    reason: Reason = Reason.BATCH_COUPLED
    controls: Mapping[str, Fill] = field(default_factory=dict)
    fills: Mapping[int, Fill] = field(default_factory=dict)
    axes: Sequence[Sequence[OutputAxis]] | None = None
    smallest: int = 1
    independent: bool = False
    remedy: str = ""


class Probe:
    """Probes the dims of one signature.

    Args:
        run: observes the module on the given tensors, in the order of the signature, which it may
            write to.
        inputs: the signature's inputs.
        leaves: the real call's tensors, in the same order, on the device where the module gets
            them.
        sizes: the real call's.
        named: fills that the caller chose, by input name.
        trusting: leave out the garbage (verify="off"): shapes are learned, neutrality is taken for
            granted.
        other_days: `run` on weights that the module may have another day, the first for choice;
            none where today's tell everything.
    """

    def __init__(
        self,
        run: Run,
        inputs: Sequence[Input],
        leaves: Sequence[Tensor],
        sizes: Sequence[int],
        named: Mapping[str, Fill],
        trusting: bool = False,
        other_days: Sequence[Run] = (),
    ) -> None:
        self._run = run
        self._other_runs = other_days
        self._inputs = inputs
        self._leaves = [telling(leaf) for leaf in leaves]
        self._sizes = tuple(sizes)
        self._named = named
        self._trusting = trusting

    def dim(self, dim: int, padded: int) -> DimFacts:
        """Probe one dim between a real size and `padded`; the other dims keep their real size.

        The real size is at most half of the padded one, so that factors that depend on the shape
        show.
        """
        padded = max(2, padded)
        real = max(min(self._sizes[dim], padded // 2), min(2, padded // 2))
        axes = None
        try:
            trial = self._trial(dim, real, padded)
            axes = trial.follow(trial.observe({}, garbage(-PLAIN)))
            if self._trusting:
                facts = self._trust(trial)
            else:
                days = [
                    trial,
                    *self._other_days(dim, real, padded),
                    *self._perhaps(dim, real, padded, mixed),
                    *self._perhaps(dim, real, padded, switched),
                ]
                beside = [
                    *self._faint(trial, dim, real, padded),
                    *self._perhaps(dim, real, padded, alike),
                ]
                between = functools.partial(self._trial, dim, real, padded)
                facts = self._settle(days, beside, axes, between)
            smallest = 1 if self._holds_at_one(trial, facts, axes, dim, padded) else 2
            return dataclasses.replace(facts, axes=axes, smallest=smallest)
        except Fallback as refusal:
            remedy = refusal.remedy
            return DimFacts(False, refusal.detail, refusal.reason, axes=axes, remedy=remedy)

    def _trial(
        self, dim: int, real: int, padded: int, change: Change = _as_it_is, run: Run | None = None
    ) -> DimTrial:
        """Trial runs between two sizes of one dim, of inputs as they are or changed."""
        small = (*self._sizes[:dim], real, *self._sizes[dim + 1 :])
        changed = [change(*one) for one in zip(self._leaves, self._inputs, strict=True)]
        pairs = zip(changed, self._inputs, strict=True)
        leaves = [counted_down(leaf, spec, self._sizes, small) for leaf, spec in pairs]
        return DimTrial(run or self._run, self._inputs, leaves, dim, small, padded)

    def _holds_at_one(
        self,
        trial: DimTrial,
        facts: DimFacts,
        axes: list[list[OutputAxis]],
        dim: int,
        padded: int,
    ) -> bool:
        """Whether size 1 is like any other: results of the same form, and padded the same values.
        Code that looks at a size most often asks whether it is 1.
        """
        if not trial.holds_at_one(axes):
            return False
        if self._trusting or not facts.neutral:
            return True
        try:
            single = self._trial(dim, 1, padded)
            return single.matches_real(single.observe(facts.fills, garbage(-PLAIN)), axes)
        except Fallback:
            return False

    def _faint(self, trial: DimTrial, dim: int, real: int, padded: int) -> list[DimTrial]:
        """One more trial with real rows so small that no row of theirs hides the garbage: what asks
        for any value above a threshold has its answer from the real rows else.
        """
        if not any(map(self._is_float, trial.followers)):
            return []
        return [self._trial(dim, real, padded, _made_faint)]

    def _other_days(self, dim: int, real: int, padded: int) -> list[DimTrial]:
        """One more trial with weights and scalars as they may be another day: a gate that is closed
        today hides what it lets through.
        """
        for run in self._other_runs:
            with contextlib.suppress(Fallback):
                return [self._trial(dim, real, padded, turned_on, run)]
        return [self._trial(dim, real, padded, turned_on)] if self._changes(turned_on) else []

    def _perhaps(self, dim: int, real: int, padded: int, change: Change) -> list[DimTrial]:
        """One more trial with other values, unless the module does not take them: 1 may be out of a
        table's range.
        """
        with contextlib.suppress(Fallback):
            return [self._trial(dim, real, padded, change)] if self._changes(change) else []
        return []

    def _changes(self, change: Change) -> bool:
        pairs = zip(self._leaves, self._inputs, strict=True)
        return any(change(leaf, spec) is not leaf for leaf, spec in pairs)

    def _trust(self, trial: DimTrial) -> DimFacts:
        fills = {i: self._named.get(self._inputs[i].name, REPEAT) for i in trial.followers}
        return DimFacts(True, "not probed", fills=fills, independent=True)

    def _settle(
        self,
        days: Sequence[DimTrial],
        beside: Sequence[DimTrial],
        axes: list[list[OutputAxis]],
        between: Callable[[Change], DimTrial],
    ) -> DimFacts:
        trials = [*days, *beside]
        for controls in self._control_sets(days[0]):
            marked = self._marked(days[0], controls, between)
            if all(
                self._neutral(trial, controls, axes) for trial in itertools.chain(trials, marked)
            ):
                facts = self._facts(trials, controls, axes)
                apart = facts.independent and all(day.independent(axes) for day in days)
                return dataclasses.replace(facts, independent=apart)
        coupled = Reason.BATCH_COUPLED if days[0].leading else Reason.PAD_NOT_NEUTRAL
        held = ", ".join(f"{name}={fill}" for name, fill in self._named.items())
        remedy = f"pass a mask, or another fill than {held}" if held else ""
        raise Fallback(coupled, "values in padded rows change real results", remedy)

    def _marked(
        self, trial: DimTrial, controls: dict[int, Fill], between: Callable[[Change], DimTrial]
    ) -> Iterator[DimTrial]:
        """Trials of controls held at 0 among real zeros, and where no real one is zero: an id 0 may
        mean something, and an all-true mask something else.
        """
        held = {self._inputs[i].name for i, fill in controls.items() if fill == 0}
        for some in (True, False) if held else ():

            def change(leaf: Tensor, spec: Input, some: bool = some) -> Tensor:
                return marked(leaf, spec, trial.dim, some) if spec.name in held else leaf

            yield between(change)

    def _neutral(
        self, trial: DimTrial, controls: dict[int, Fill], axes: list[list[OutputAxis]]
    ) -> bool:
        plain = trial.observe(controls, garbage(-PLAIN))
        return (
            all(
                trial.agree(plain, trial.observe(controls, garbage(scale)), axes)
                for scale in (LARGE, -LARGE)
            )
            and trial.matches_real(plain, axes)
            and self._steady(trial, controls, plain, axes)
        )

    def _steady(
        self,
        trial: DimTrial,
        controls: dict[int, Fill],
        plain: Observation,
        axes: list[list[OutputAxis]],
    ) -> bool:
        """Whether a control held at "repeat" may repeat any row: a mask that ends in True today may
        end in False tomorrow. Needs rows that differ, else nothing is known."""
        repeats = [
            i
            for i, fill in controls.items()
            if fill == REPEAT and self._inputs[i].name not in self._named
        ]
        if not repeats:
            return True
        return all(map(trial.varies, repeats)) and all(
            trial.agree(plain, trial.observe(controls, garbage(scale), repeats), axes)
            for scale in (-PLAIN, LARGE)
        )

    def _is_float(self, i: int) -> bool:
        dtype = self._inputs[i].dtype
        return dtype.is_floating_point or dtype.is_complex

    def _control_sets(self, trial: DimTrial) -> Iterator[dict[int, Fill]]:
        """Sets of held inputs with their fills, smallest first; at least one input is left for
        garbage.
        """
        eligible = [i for i in trial.followers if _may_control(self._inputs[i], self._named)]
        most = min(MAX_CONTROLS, len(trial.followers) - 1, len(eligible))
        for count in range(most + 1):
            for held in itertools.combinations(eligible, count):
                choices = [self._choices(i) for i in held]
                for fills in itertools.product(*choices):
                    yield dict(zip(held, fills, strict=True))

    def _choices(self, i: int) -> Sequence[Fill]:
        name = self._inputs[i].name
        return [self._named[name]] if name in self._named else [REPEAT, 0]

    def _facts(
        self,
        trials: Sequence[DimTrial],
        controls: dict[int, Fill],
        axes: list[list[OutputAxis]],
    ) -> DimFacts:
        # Integers and bools always: what an earlier call left may lie outside this call's values.
        trial = trials[0]
        free = [i for i in trial.followers if i not in controls]
        held = [i for i in free if not self._is_float(i) or self._inputs[i].name in self._named]
        fills = {**{i: self._named.get(self._inputs[i].name, REPEAT) for i in held}, **controls}
        floats = [i for i in free if i not in fills]
        if floats and not all(self._inert(t, fills, axes) for t in trials):
            fills |= dict.fromkeys(floats, REPEAT)
        plain = trial.observe(controls, garbage(-PLAIN))
        filled = trial.observe({i: fills.get(i, REPEAT) for i in trial.followers}, garbage(PLAIN))
        if not trial.agree(plain, filled, axes):
            raise Fallback(Reason.PAD_NOT_NEUTRAL, "the fill itself changes real results")
        named = {self._inputs[i].name: fill for i, fill in controls.items()}
        apart = not plain.draws and not plain.writes
        return DimFacts(True, controls=named, fills=fills, independent=apart)

    def _inert(
        self, trial: DimTrial, fills: Mapping[int, Fill], axes: list[list[OutputAxis]]
    ) -> bool:
        """Whether floats that no fill is kept for may hold anything in their tails."""
        plain = trial.observe(fills, garbage(-PLAIN))
        try:
            runs = (trial.observe(fills, extreme(value)) for value in EXTREMES)
            return all(trial.agree(plain, run, axes) for run in runs)
        except Fallback:
            return False  # of a check for finite values


def _made_faint(leaf: Tensor, spec: Input) -> Tensor:
    return leaf * FAINT if leaf.is_floating_point() else leaf


def _may_control(spec: Input, named: Mapping[str, Fill]) -> bool:
    return spec.name in named or not (spec.dtype.is_floating_point or spec.dtype.is_complex)
