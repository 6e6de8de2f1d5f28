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

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from graphcache.compare import all_close, all_same
from graphcache.errors import Fallback
from graphcache.padding import REPEAT, Fill, OutputAxis, allocate, cut, fit, head, tails
from graphcache.preflight import Observation
from graphcache.reasons import Reason
from graphcache.signature import Input

MAX_CONTROLS = 3
Garbage = Callable[[Tensor, Tensor, int], Tensor]

_LARGE, _PLAIN = 1e3, 1.0  # garbage in units of the input's largest magnitude, at least 1
_EXTREMES = (math.nan, math.inf, -math.inf)  # NaN alone passes every comparison unseen
_FAINT = 1e-3
_ROWS = 8  # at which the independence of rows is tried, at least


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


class Probe:
    """Probes the dims of one signature.

    Args:
        run: observes the module on the given tensors, in the order of the signature, which it may
            write to.
        inputs: the signature's inputs.
        leaves: the real call's tensors, in the same order, on the device where the module gets
            them.
        named: fills that the caller chose, by input name.
        trusting: leave out the garbage (verify="off"): shapes are learned, neutrality is taken for
            granted.
    """

    def __init__(
        self,
        run: Callable[[list[Tensor]], Observation],
        inputs: Sequence[Input],
        leaves: Sequence[Tensor],
        named: Mapping[str, Fill],
        trusting: bool = False,
    ) -> None:
        self._run = run
        self._inputs = inputs
        self._leaves = [_telling(leaf) for leaf in leaves]
        self._named = named
        self._trusting = trusting

    def dim(self, dim: int, sizes: Sequence[int], padded: int) -> DimFacts:
        """Probe one dim between a real size and `padded`; the other dims keep their real size.

        The real size is at most half of the padded one, so that factors that depend on the shape
        show.
        """
        padded = max(2, padded)
        real = max(min(sizes[dim], padded // 2), min(2, padded // 2))
        small = (*sizes[:dim], real, *sizes[dim + 1 :])
        axes = None
        try:
            trial = _DimTrial(self._run, self._inputs, self._leaves, dim, small, padded)
            axes = trial.follow(trial.observe({}, _garbage(-_PLAIN)))
            if self._trusting:
                facts = self._trust(trial)
            else:
                facts = self._settle(self._pair(trial, dim, small, padded), axes)
            smallest = 1 if trial.holds_at_one(axes) else 2
            return dataclasses.replace(facts, axes=axes, smallest=smallest)
        except Fallback as refusal:
            return DimFacts(False, refusal.detail, refusal.reason, axes=axes)

    def _pair(
        self, trial: _DimTrial, dim: int, small: Sequence[int], padded: int
    ) -> list[_DimTrial]:
        """The trial, and one more with real rows so small that no row of theirs hides the garbage:
        what asks for any value above a threshold has its answer from the real rows else.
        """
        if not any(map(self._is_float, trial.followers)):
            return [trial]
        faint = [leaf * _FAINT if leaf.is_floating_point() else leaf for leaf in self._leaves]
        return [trial, _DimTrial(self._run, self._inputs, faint, dim, small, padded)]

    def _trust(self, trial: _DimTrial) -> DimFacts:
        fills = {i: self._named.get(self._inputs[i].name, REPEAT) for i in trial.followers}
        return DimFacts(True, "not probed", fills=fills, independent=True)

    def _settle(self, trials: Sequence[_DimTrial], axes: list[list[OutputAxis]]) -> DimFacts:
        for controls in self._control_sets(trials[0]):
            if all(self._neutral(trial, controls, axes) for trial in trials):
                return self._facts(trials, controls, axes)
        coupled = Reason.BATCH_COUPLED if trials[0].leading else Reason.PAD_NOT_NEUTRAL
        raise Fallback(coupled, "values in padded rows change real results")

    def _neutral(
        self, trial: _DimTrial, controls: dict[int, Fill], axes: list[list[OutputAxis]]
    ) -> bool:
        plain = trial.observe(controls, _garbage(-_PLAIN))
        return (
            all(
                trial.agree(plain, trial.observe(controls, _garbage(scale)), axes)
                for scale in (_LARGE, -_LARGE)
            )
            and trial.matches_real(plain, axes)
            and self._steady(trial, controls, plain, axes)
        )

    def _steady(
        self,
        trial: _DimTrial,
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
            trial.agree(plain, trial.observe(controls, _garbage(scale), repeats), axes)
            for scale in (-_PLAIN, _LARGE)
        )

    def _is_float(self, i: int) -> bool:
        dtype = self._inputs[i].dtype
        return dtype.is_floating_point or dtype.is_complex

    def _control_sets(self, trial: _DimTrial) -> Iterator[dict[int, Fill]]:
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
        trials: Sequence[_DimTrial],
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
        plain = trial.observe(controls, _garbage(-_PLAIN))
        filled = trial.observe({i: fills.get(i, REPEAT) for i in trial.followers}, _garbage(_PLAIN))
        if not trial.agree(plain, filled, axes):
            raise Fallback(Reason.PAD_NOT_NEUTRAL, "the fill itself changes real results")
        named = {self._inputs[i].name: fill for i, fill in controls.items()}
        apart = not plain.draws and not plain.writes
        independent = apart and trial.independent(axes)
        return DimFacts(True, controls=named, fills=fills, independent=independent)

    def _inert(
        self, trial: _DimTrial, fills: Mapping[int, Fill], axes: list[list[OutputAxis]]
    ) -> bool:
        """Whether floats that no fill is kept for may hold anything in their tails."""
        runs = (trial.observe(fills, _extreme(value)) for value in _EXTREMES)
        first = next(runs)
        plain = trial.observe(fills, _garbage(-_PLAIN))
        return trial.agree(first, plain, axes) and all(trial.agree(plain, x, axes) for x in runs)


class _DimTrial:
    """Runs at a real and at a padded size of one dim."""

    def __init__(
        self,
        run: Callable[[list[Tensor]], Observation],
        inputs: Sequence[Input],
        leaves: Sequence[Tensor],
        dim: int,
        sizes: Sequence[int],
        padded: int,
    ) -> None:
        self._run = run
        self._inputs = inputs
        self._dim, self._sizes = dim, tuple(sizes)
        self._bucket = (*sizes[:dim], padded, *sizes[dim + 1 :])
        self._leaves = [
            _placed(leaf, spec, sizes) for leaf, spec in zip(leaves, inputs, strict=True)
        ]
        self.followers = [i for i, spec in enumerate(inputs) if any(d == dim for _, d in spec.axes)]
        self.leading = all(
            axis == 0 for i in self.followers for axis, d in inputs[i].axes if d == dim
        )
        self.real = run([leaf.clone() for leaf in self._leaves])
        self._last: list[Tensor] = []

    def varies(self, i: int) -> bool:
        """Whether some real row of an input differs from its last one along the dim."""
        leaf, axes = self._leaves[i], self._inputs[i].axes
        return all(
            _unlike(leaf, a, leaf.shape[a] - 1) is not None for a, d in axes if d == self._dim
        )

    def observe(
        self,
        fills: Mapping[int, Fill],
        garbage: Garbage,
        turned: Sequence[int] = (),
    ) -> Observation:
        """Run at the padded size, the tails holding their fill, or garbage where they have none.

        The inputs `turned` repeat a row that differs from the last.
        """
        bucket = self._bucket
        self._last = []
        for i, (spec, leaf) in enumerate(zip(self._inputs, self._leaves, strict=True)):
            static = allocate(spec, bucket)
            head(static, spec, self._sizes).copy_(leaf)
            fill = {self._dim: fills.get(i, 0)}
            for refill in tails(static, spec, self._sizes, bucket, fill):
                if i in turned:
                    last = refill.rows.shape[refill.axis] - 1
                    other = _unlike(refill.rows, refill.axis, last) or 0
                    refill.tail.copy_(refill.rows.narrow(refill.axis, other, 1))
                elif i in fills:
                    refill()
                else:
                    refill.tail.copy_(garbage(refill.rows, refill.tail, refill.axis))
            self._last.append(static)
        return self._run([static.clone() for static in self._last])

    def follow(self, padded: Observation) -> list[list[OutputAxis]]:
        """How each output's axes follow the dim, from the two sizes: scale * n + offset with a
        whole scale.

        Raises:
            Fallback: `unsupported-output`.
        """
        if padded.spec != self.real.spec:
            raise Fallback(
                Reason.PAD_NOT_NEUTRAL, "a plain value in the result depends on the padded size"
            )
        n, step = self._sizes[self._dim], self._bucket[self._dim] - self._sizes[self._dim]
        return [
            _line(self._dim, n, step, small.shape, large.shape)
            for small, large in zip(self.real.outputs, padded.outputs, strict=True)
        ]

    def holds_at_one(self, axes: list[list[OutputAxis]]) -> bool:
        """Whether a run at size 1 gives results of the form that the other sizes have."""
        one = (*self._sizes[: self._dim], 1, *self._sizes[self._dim + 1 :])
        try:
            seen = self._run(
                [
                    _placed(leaf, spec, one)
                    for leaf, spec in zip(self._leaves, self._inputs, strict=True)
                ]
            )
        except Fallback:
            return False
        expected = [cut(out, a, one).shape for out, a in zip(self.real.outputs, axes, strict=True)]
        return seen.spec == self.real.spec and [out.shape for out in seen.outputs] == expected

    def agree(self, ours: Observation, theirs: Observation, axes: list[list[OutputAxis]]) -> bool:
        """Equal real parts of two runs at the padded shape: bits, or norms if the module's equal
        runs differ in bits.
        """
        a, b = self._real_part(ours, axes), self._real_part(theirs, axes)
        if all_same(a, b):
            return True
        again = self._real_part(self._run([static.clone() for static in self._last]), axes)
        return not all_same(b, again) and all_close(a, b)

    def matches_real(self, padded: Observation, axes: list[list[OutputAxis]]) -> bool:
        """Whether the padded run agrees with the real one; not comparable if the runs draw random
        numbers.
        """
        return padded.draws or all_close(
            self._real_part(padded, axes), [*self.real.outputs, *self.real.written]
        )

    def _real_part(self, seen: Observation, axes: list[list[OutputAxis]]) -> list[Tensor]:
        return [
            *(cut(out, a, self._sizes) for out, a in zip(seen.outputs, axes, strict=True)),
            *seen.written,
        ]

    def independent(self, axes: list[list[OutputAxis]]) -> bool:
        """Whether rows depend on nothing but themselves: parts run alone give the rows of the
        whole.

        The whole has rows enough, and different ones, to show a change of places, all of them real
        to the module (a masked row tells nothing); its parts are of unequal size. Outputs with the
        dim must have it once, one row for one; those without it must be the whole's in each part,
        and are compared again whenever pieces are joined.
        """
        plain = (1, 0)
        if any(len(a) > 1 or any((x.scale, x.offset) != plain for x in a) for a in axes):
            return False
        total = max(_ROWS, self._bucket[self._dim])
        sizes = (*self._sizes[: self._dim], total, *self._sizes[self._dim + 1 :])
        pairs = list(zip(self._leaves, self._inputs, strict=True))
        even = [_varied(leaf, spec, sizes) for leaf, spec in pairs]
        middle = total // 2 - 1
        uneven = [
            _weighted(x, s, self._dim, middle) for x, s in zip(even, self._inputs, strict=True)
        ]
        try:
            return all(self._apart(rows, axes, middle, total) for rows in (even, uneven))
        except Fallback:
            return False  # of more rows than the module takes, or of another form in parts

    def _apart(
        self, rows: list[Tensor], axes: list[list[OutputAxis]], middle: int, total: int
    ) -> bool:
        self._last = rows
        whole = self._run([leaf.clone() for leaf in rows])
        parts = ((0, middle), (middle, total))
        return all(self._part_alike(whole, axes, start, stop) for start, stop in parts)

    def _part_alike(
        self, whole: Observation, axes: list[list[OutputAxis]], start: int, stop: int
    ) -> bool:
        part = self._run([self._rows(i, start, stop) for i in range(len(self._inputs))])
        if part.spec != whole.spec:
            return False
        triples = zip(part.outputs, whole.outputs, axes, strict=True)
        return all(
            all_close([ours], [theirs.narrow(a[0].axis, start, stop - start)])
            if a
            else all_same([ours], [theirs])
            for ours, theirs, a in triples
        )

    def _rows(self, i: int, start: int, stop: int) -> Tensor:
        static = self._last[i]
        for axis, dim in self._inputs[i].axes:
            if dim == self._dim:
                static = static.narrow(axis, start, stop - start)
        return static.clone()


def _placed(leaf: Tensor, spec: Input, sizes: Sequence[int]) -> Tensor:
    return allocate(spec, sizes).copy_(fit(leaf, spec, sizes))


def _varied(leaf: Tensor, spec: Input, sizes: Sequence[int]) -> Tensor:
    """Real rows repeated in turn to `sizes`; floats between their value and its opposite, since
    larger ones might all look alike behind a saturating function.
    """
    rows = _placed(leaf, spec, sizes)
    if rows.is_floating_point() or rows.is_complex():
        source = torch.Generator(device="cpu").manual_seed(0)
        rows *= (2 * torch.rand(rows.shape, generator=source) - 1).to(rows.device, rows.dtype)
    return rows


def _weighted(rows: Tensor, spec: Input, dim: int, middle: int) -> Tensor:
    """The same with faint floats up to `middle` and large ones from there: what asks for any value
    above a threshold then answers otherwise in the first part alone.
    """
    if not (rows.is_floating_point() or rows.is_complex()):
        return rows
    rows = rows.clone()
    for axis, d in spec.axes:
        if d == dim:
            rows.narrow(axis, 0, middle).mul_(_FAINT)
            rows.narrow(axis, middle, rows.shape[axis] - middle).mul_(_LARGE)
    return rows


def _line(
    dim: int, n: int, step: int, small: Sequence[int], large: Sequence[int]
) -> list[OutputAxis]:
    if len(small) != len(large):
        raise Fallback(
            Reason.UNSUPPORTED_OUTPUT,
            f"an output has {len(small)} axes at size {n}, {len(large)} padded",
        )
    found = []
    for axis, (a, b) in enumerate(zip(small, large, strict=True)):
        scale, remainder = divmod(b - a, step)
        if remainder or scale < 0:
            raise Fallback(
                Reason.UNSUPPORTED_OUTPUT,
                f"axis {axis} of an output grows from {a} to {b} for {step} rows",
            )
        if scale:
            found.append(OutputAxis(axis, dim, scale, a - scale * n))
    return found


def _may_control(spec: Input, named: Mapping[str, Fill]) -> bool:
    return spec.name in named or not (spec.dtype.is_floating_point or spec.dtype.is_complex)


def _garbage(scale: float) -> Garbage:
    """Finite values of one sign for floats; for integers and bools one real row, another one for
    the other sign. Seeded.

    Rows are taken whole, since each column may index a table of its own. Where all real rows are
    equal, any index between 0 and the real one is in range as well.
    """

    def make(real: Tensor, tail: Tensor, axis: int) -> Tensor:
        source = torch.Generator(device="cpu").manual_seed(int(abs(scale)))
        noise = torch.rand(tail.shape, generator=source).to(tail.device)
        if not (real.is_floating_point() or real.is_complex()):
            return _row(real, axis, scale > 0, noise)
        magnitude = real.abs().nan_to_num(0.0, 0.0, 0.0).amax().float()
        unit = magnitude.clamp(min=1.0) if abs(scale) > _PLAIN else magnitude
        unit = torch.where(unit > 0, unit, torch.ones_like(unit))
        return (scale * unit * (0.5 + noise)).to(tail.dtype).nan_to_num()

    return make


def _row(real: Tensor, axis: int, other: bool, noise: Tensor) -> Tensor:
    first = real.narrow(axis, 0, 1)
    if not other:
        return first.expand(noise.shape)
    unlike = _unlike(real, axis)
    if unlike is not None:
        return real.narrow(axis, unlike, 1).expand(noise.shape)
    if real.dtype is torch.bool:
        return first.logical_not().expand(noise.shape)
    return torch.where(first > 0, ((first + 1) * noise.double()).floor().to(real.dtype), first)


def _unlike(rows: Tensor, axis: int, like: int = 0) -> int | None:
    """The first row along `axis` that differs from row `like`, if any does."""
    differs = (rows != rows.narrow(axis, like, 1)).movedim(axis, 0)
    found = differs.reshape(differs.shape[0], -1).any(1).nonzero()
    return int(found[0]) if len(found) else None


def _telling(leaf: Tensor) -> Tensor:
    """The input to probe with: the call's own, unless it is one value throughout and so hides what
    it scales.

    Zeros times anything are zeros, and a mask of False keeps nothing.
    """
    if leaf.numel() < 2 or not bool((leaf == leaf.flatten()[0]).all()):
        return leaf
    if leaf.is_floating_point() or leaf.is_complex():
        return _garbage(_PLAIN)(leaf, leaf, 0)
    if leaf.dtype is torch.bool and not bool(leaf.any()):
        return (torch.arange(leaf.numel(), device=leaf.device) % 2 == 0).reshape(leaf.shape)
    return leaf


def _extreme(value: float) -> Garbage:
    def make(real: Tensor, tail: Tensor, axis: int) -> Tensor:
        if real.is_floating_point() or real.is_complex():
            return torch.full_like(tail, value)
        return _garbage(-_PLAIN)(real, tail, axis)

    return make
