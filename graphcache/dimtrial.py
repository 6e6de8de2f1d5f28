"""Trial runs at a real and at a padded size of one dim, and what can be told from two of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from graphcache.compare import all_close, all_same
from graphcache.errors import Fallback
from graphcache.garbage import Garbage, counted_down, flagged, placed, unlike, varied, weighted
from graphcache.padding import Fill, OutputAxis, allocate, cut, head, tails
from graphcache.preflight import Observation
from graphcache.reasons import Reason
from graphcache.signature import Input

Run = Callable[[list[Tensor]], Observation]

_ROWS = 8  # at which the independence of rows is tried, at least


class DimTrial:
    """Runs at a real and at a padded size of one dim."""

    def __init__(
        self,
        run: Run,
        inputs: Sequence[Input],
        leaves: Sequence[Tensor],
        dim: int,
        sizes: Sequence[int],
        padded: int,
    ) -> None:
        self._run = run
        self._inputs = inputs
        self.dim, self._sizes = dim, tuple(sizes)
        self._bucket = (*sizes[:dim], padded, *sizes[dim + 1 :])
        self._leaves = [
            placed(leaf, spec, sizes) for leaf, spec in zip(leaves, inputs, strict=True)
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
        return all(unlike(leaf, a, leaf.shape[a] - 1) is not None for a, d in axes if d == self.dim)

    def observe(
        self,
        fills: Mapping[int, Fill],
        fill_with: Garbage,
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
            fill = {self.dim: fills.get(i, 0)}
            for refill in tails(static, spec, self._sizes, bucket, fill):
                if i in turned:
                    last = refill.rows.shape[refill.axis] - 1
                    other = unlike(refill.rows, refill.axis, last) or 0
                    refill.tail.copy_(refill.rows.narrow(refill.axis, other, 1))
                elif i in fills:
                    refill()
                else:
                    refill.tail.copy_(fill_with(refill.rows, refill.tail, refill.axis))
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
                Reason.PAD_NOT_NEUTRAL,
                "a plain value in the result depends on the padded size",
                "return no sizes; the results have them",
            )
        n, step = self._sizes[self.dim], self._bucket[self.dim] - self._sizes[self.dim]
        return [
            _line(self.dim, n, step, small.shape, large.shape)
            for small, large in zip(self.real.outputs, padded.outputs, strict=True)
        ]

    def holds_at_one(self, axes: list[list[OutputAxis]]) -> bool:
        """Whether a run at size 1 gives results of the form that the other sizes have."""
        one = (*self._sizes[: self.dim], 1, *self._sizes[self.dim + 1 :])
        try:
            seen = self._run(
                [
                    counted_down(placed(leaf, spec, one), spec, self._sizes, one)
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
        """Whether the padded run agrees with the real one."""
        return all_close(self._real_part(padded, axes), [*self.real.outputs, *self.real.written])

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
        total = max(_ROWS, self._bucket[self.dim])
        sizes = (*self._sizes[: self.dim], total, *self._sizes[self.dim + 1 :])
        pairs = list(zip(self._leaves, self._inputs, strict=True))
        even = [varied(leaf, spec, sizes) for leaf, spec in pairs]
        middle = total // 2 - 1
        uneven = [weighted(x, s, self.dim, middle) for x, s in zip(even, self._inputs, strict=True)]
        flags = [flagged(x, s, self.dim, middle) for x, s in zip(even, self._inputs, strict=True)]
        try:
            return all(self._apart(rows, axes, middle, total) for rows in (even, uneven, flags))
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
            if dim == self.dim:
                static = static.narrow(axis, start, stop - start)
        return static.clone()


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
