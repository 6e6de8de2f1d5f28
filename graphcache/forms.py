"""Forms of call that were read before: what a further call of one needs is found from its tensors'
shapes, without reading the call again.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from graphcache.call import Reading
from graphcache.facts import Facts
from graphcache.signature import dim_order, repeats


class Form:
    """What one reading found out about every call of its arguments' structure and plain values,
    under its modes. Keeps no tensor.

    Args:
        reading: of a call whose dims are named.
        facts: of its signature.
        implicit: whether tensors follow the dim by their length alone.
    """

    def __init__(self, reading: Reading, facts: Facts, implicit: bool) -> None:
        self.signature = reading.signature
        self.facts = facts
        self.slots = reading.call.slots
        leaves = reading.call.leaves
        placed = zip(self.slots, self.signature.inputs, strict=True)
        self._inputs = [(spec, leaves[slot].device) for slot, spec in sorted(placed)]
        self._repeats = repeats(leaves)
        self._dims = len(reading.sizes)
        self._implicit = implicit

    def sizes(self, leaves: Sequence[Tensor]) -> tuple[int, ...] | None:
        """The dynamic sizes of a call of the same structure; None unless reading it would surely
        give this signature.
        """
        if repeats(leaves) != self._repeats:
            return None
        sizes: dict[int, int] = {}
        for leaf, (spec, device) in zip(leaves, self._inputs, strict=True):
            shape = list(leaf.shape)
            if leaf.dtype is not spec.dtype or leaf.device != device:
                return None
            if len(shape) != len(spec.shape) or dim_order(leaf) != spec.order:
                return None
            for axis, dim in spec.axes:
                if sizes.setdefault(dim, shape[axis]) != shape[axis]:
                    return None
                shape[axis] = None  # type: ignore[call-overload]  # as in the spec
            if tuple(shape) != spec.shape:
                return None
        found = tuple(sizes[dim] for dim in range(self._dims))
        return None if 0 in found or self._by_chance(found[0]) else found

    def _by_chance(self, size: int) -> bool:
        """Whether a tensor that does not follow the dim has its length in this call."""
        return self._implicit and any(
            not spec.axes and spec.shape[:1] == (size,) for spec, _ in self._inputs
        )
