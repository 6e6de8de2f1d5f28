"""Hypothesis compares cached calls with eager ones: modules, sizes, dtypes, layouts, buckets,
orders.

`zoo.Twin` asserts equality with eager, untouched inputs and old results, the counters' sums and the
invariants after each call, so that these tests only choose what is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from zoo import ZOO, Member, Twin

from graphcache import GraphCache

ONE_DIM = [member for member in ZOO if len(member.dims) == 1]
TWO_DIMS = [member for member in ZOO if len(member.dims) == 2]
SIZES = st.integers(1, 13)
SEEDS = st.integers(0, 999)
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "max_graphs": st.integers(1, 3),
        "capture_after": st.integers(1, 2),
        "split": st.sampled_from(["auto", None, "batch"]),
        "max_padding_ratio": st.sampled_from([1.0, 1.5, 4.0]),
        "outputs": st.just("copy"),
        "verify": st.sampled_from(["capture", 1.0]),
        "max_signatures": st.integers(1, 2),
    },
)


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def _names(member: Member) -> str:
    return member.name


@given(
    seed=SEEDS,
    member=st.sampled_from(ONE_DIM),
    buckets=st.one_of(st.none(), st.lists(SIZES, min_size=1, max_size=4)),
    sizes=st.lists(st.integers(0, 16), min_size=1, max_size=7),
    options=SETTINGS,
)
@settings(max_examples=80)
def test_calls_of_any_sizes_in_any_order_equal_eager(
    device: str, seed: int, member: Member, buckets: Any, sizes: list[int], options: dict[str, Any]
) -> None:
    """One dynamic dim, any buckets and options."""
    torch.manual_seed(seed)
    twin = Twin(GraphCache(member.build(device), buckets, **options))
    for n in sizes:
        if n or member.name != "transposed_and_expanded":  # eager takes no empty expansion
            args, kwargs = member.arguments(device, n)
            twin(*args, **kwargs)


@given(
    seed=SEEDS,
    member=st.sampled_from(TWO_DIMS),
    buckets=st.one_of(
        st.none(),
        st.lists(st.tuples(st.integers(1, 6), st.integers(1, 12)), min_size=1, max_size=4),
        st.fixed_dictionaries(
            {
                "batch": st.lists(st.integers(1, 6), min_size=1, max_size=2),
                "seq": st.lists(st.integers(1, 12), min_size=1, max_size=2),
            }
        ),
    ),
    sizes=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 14)), min_size=1, max_size=6),
    options=SETTINGS,
)
@settings(max_examples=60)
def test_calls_of_two_dims_equal_eager(
    device: str,
    seed: int,
    member: Member,
    buckets: Any,
    sizes: list[tuple[int, int]],
    options: dict[str, Any],
) -> None:
    """Grids, free-form lists and exact sizes."""
    torch.manual_seed(seed)
    twin = Twin(
        GraphCache(member.build(device), buckets, dynamic_shapes=member.dynamic_shapes, **options)
    )
    for size in sizes:
        args, kwargs = member.arguments(device, *size)
        twin(*args, **kwargs)


class Reduced(nn.Module):
    """Element by element, and summed over every axis but the dynamic one."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = ~x if x.dtype == torch.bool else x * 2 + x
        others = [axis for axis in range(x.dim()) if axis != self.axis]
        return y, y.movedim(self.axis, 0).flatten(1).sum(1) if others else y


@st.composite
def layouts(draw: st.DrawFn) -> Callable[[int, str], Tensor]:
    """A maker of tensors of one dtype, rank and layout: permuted, sliced, expanded or plain."""
    rank = draw(st.integers(1, 4))
    axis = draw(st.integers(0, rank - 1))
    others = draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank))
    order = draw(st.permutations(range(rank)))
    step = draw(st.sampled_from([1, 2]))
    start = draw(st.integers(0, 1))
    expanded = draw(st.booleans())
    dtype = draw(
        st.sampled_from(
            [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]
        )
    )

    def make(n: int, device: str) -> Tensor:
        shape = [*others]
        shape[axis] = n
        back = [order.index(i) for i in range(rank)]
        wide = [shape[i] * step + start for i in order]
        data = torch.randint(0, 9, wide, device=device).to(dtype).permute(back)
        data = data[tuple(slice(start, None, step) for _ in range(rank))]
        if expanded and rank > 1:
            other = (axis + 1) % rank
            data = data.narrow(other, 0, 1).expand(shape)
        return data

    make.axis = axis  # type: ignore[attr-defined]
    return make


@given(seed=SEEDS, make=layouts(), sizes=st.lists(st.integers(1, 9), min_size=2, max_size=6))
@settings(max_examples=100)
def test_any_dtype_and_layout_equals_eager(
    device: str, seed: int, make: Any, sizes: list[int]
) -> None:
    """The dynamic axis may be any axis, and the tensor any view."""
    torch.manual_seed(seed)
    cache = GraphCache(Reduced(make.axis), [3, 6], dynamic_shapes={"x": {make.axis: "n"}})
    twin = Twin(cache)
    for n in sizes:
        twin(make(n, device))
    assert cache.stats().captures > 0


#: Steps over x: (batch, 4). Most of them couple rows, each in its own way.
STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "centre": lambda x: x - x.mean(0),
    "largest": lambda x: x - x.amax(0),
    "smallest": lambda x: x - x.amin(0),
    "median": lambda x: x - x.median(0).values,
    "first": lambda x: x + x[:1],
    "last": lambda x: x + x[-1:],
    "middle": lambda x: x + x[len(x) // 2],
    "running": lambda x: x.cumsum(0),
    "backwards": lambda x: x.flip(0).cumsum(0).flip(0),
    "softmax": lambda x: x.softmax(0),
    "row softmax": lambda x: x.softmax(1),
    "gram": lambda x: (x @ x.T) @ x / 8,
    "sorted": lambda x: x.sort(0).values,
    "rolled": lambda x: x.roll(1, 0),
    "counted": lambda x: x * len(x),
    "root": lambda x: x / len(x) ** 0.5,
    "numbered": lambda x: x + torch.arange(len(x), device=x.device)[:, None],
    "from the end": lambda x: x + torch.arange(len(x), 0, -1, device=x.device)[:, None],
    "norm": lambda x: x / (x.norm() + 1),
    "maximum": lambda x: x / (x.abs().amax() + 1),
    "any": lambda x: torch.where((x > 1).any(), x, -x),
    "halves": lambda x: torch.cat([x[: len(x) // 2] * 2, x[len(x) // 2 :]]),
    "pairs": lambda x: x + torch.cat([x[1:], x[:1]]),
    "even": lambda x: torch.cat([x[::2], x[1::2]]),
    "normed": lambda x: nn.functional.layer_norm(x, (4,)),
    "doubled": lambda x: torch.cat([x, x * 2]),
    "shorter": lambda x: x[1:] if len(x) > 1 else x,
    "positive mean": lambda x: x.relu().mean(0) + x,
    "ranked": lambda x: x.argsort(0).argsort(0).to(x.dtype) + x,
}


class Program(nn.Module):
    """A chain of steps; kept small by tanh between them."""

    def __init__(self, steps: list[str]) -> None:
        super().__init__()
        self.steps = tuple(steps)

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = STEPS[step](x.tanh() * 2)
        return x


@given(
    seed=SEEDS,
    steps=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=3),
    buckets=st.lists(st.integers(2, 12), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 14), min_size=2, max_size=6),
)
@settings(max_examples=150)
def test_rows_coupled_in_any_way_equal_eager(
    device: str, seed: int, steps: list[str], buckets: list[int], sizes: list[int]
) -> None:
    """However rows depend on each other, on their place or number: never silently wrong."""
    torch.manual_seed(seed)
    twin = Twin(GraphCache(Program(steps), buckets))
    for n in sizes:
        twin(torch.randn(n, 4, device=device))


@pytest.mark.parametrize("step", sorted(STEPS))
@pytest.mark.parametrize("sizes", [(7, 2, 8, 3), (1, 5, 1, 9), (3, 3, 3, 3, 20)], ids=str)
def test_each_coupling_by_itself_equals_eager(device: str, step: str, sizes: Any) -> None:
    """Padded, exact and above the largest bucket."""
    twin = Twin(GraphCache(Program([step]), [4, 8]))
    for n in sizes:
        twin(torch.randn(n, 4, device=device) + 2)


#: Results over x: (batch, seq, 4) with mask: (batch, seq).
MASKED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda x, m: (x * m[..., None]).sum(1) / m.sum(1, keepdim=True).clamp(1),
    "unmasked mean": lambda x, m: x.mean(1) + m.any(1, keepdim=True),
    "largest": lambda x, m: x.masked_fill(~m[..., None], -9.0).amax(1),
    "unmasked largest": lambda x, m: x.amax(1) + m[:, :1],
    "softmax": lambda x, m: x.masked_fill(~m[..., None], float("-inf")).softmax(1).nan_to_num(),
    "last": lambda x, m: x[:, -1] + m[:, :1],
    "length": lambda x, m: x * m.sum(1)[:, None, None],
    "share": lambda x, m: x * m.float().mean(1)[:, None, None],
    "kept": lambda x, m: x * m[..., None],
    "total": lambda x, m: x / m.sum(),
    "past": lambda x, m: (x * m[..., None]).cumsum(1),
    "total kept": lambda x, m: (x * m[..., None]).sum(1),
    "inverse": lambda x, m: (x * ~m[..., None]).sum(1),
}


class Masked(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return MASKED[self.name](x, mask)


@given(
    seed=SEEDS,
    name=st.sampled_from(sorted(MASKED)),
    sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=2, max_size=5),
    share=st.sampled_from([0.3, 0.7, 1.0]),
)
@settings(max_examples=100)
def test_masks_of_any_meaning_equal_eager(
    device: str, seed: int, name: str, sizes: list[tuple[int, int]], share: float
) -> None:
    """Whether a mask is heeded, ignored, counted or turned round, padding shows in no result."""
    torch.manual_seed(seed)
    both = {0: "batch", 1: "seq"}
    shapes = {"x": both, "mask": both}
    twin = Twin(GraphCache(Masked(name), [(2, 4), (4, 8)], dynamic_shapes=shapes))
    for n, m in sizes:
        twin(torch.randn(n, m, 4, device=device), torch.rand(n, m, device=device) <= share)


def test_a_mask_of_a_maximum_is_found_to_be_a_control(device: str) -> None:
    """Garbage that a maximum cannot see (negative, or positive and masked) proves nothing."""
    both = {0: "batch", 1: "seq"}
    shapes = {"x": both, "mask": both}
    twin = Twin(GraphCache(Masked("largest"), [(1, 8)], dynamic_shapes=shapes))
    x = torch.ones(1, 8, 4, device=device) * torch.tensor([1.0, 5.0] * 4, device=device)[:, None]
    mask = torch.tensor([[True, False] * 4], device=device)
    twin(x[:, :2], mask[:, :2])
    twin(x, torch.ones_like(mask))
    twin(x[:, :2], mask[:, :2])


def test_a_first_call_whose_data_hides_a_coupling_misleads_nobody(device: str) -> None:
    """All-False masks and all-zero inputs, as a warmup's sample may be, prove nothing about
    padding.
    """
    both = {0: "batch", 1: "seq"}
    shared = GraphCache(Masked("share"), [(2, 8)], dynamic_shapes={"x": both, "mask": both})
    twin = Twin(shared)
    for kept in (False, True):
        twin(torch.randn(2, 3, 4, device=device), torch.full((2, 3), kept, device=device))


def test_a_warmup_by_zeros_misleads_nobody(device: str) -> None:
    """Zero times anything is zero, so that a factor of the size does not show in zeros."""
    counted = Twin(GraphCache(Program(["counted"]), [8]))
    counted.cache.warmup(sample=torch.zeros(8, 4, device=device), progress=False)
    counted(torch.randn(3, 4, device=device))


def test_rows_that_change_places_only_among_many_are_not_split(device: str) -> None:
    """With a bucket of two rows, too, independence must be tried on enough rows to show."""
    twin = Twin(GraphCache(Program(["even"]), [2]))
    for n in (1, 3, 8):
        twin(torch.randn(n, 4, device=device))


def test_a_sum_over_pieces_of_equal_data_is_not_taken_from_one_piece(device: str) -> None:
    """A result without the split dim may be equal in all pieces and still depend on all of them."""
    both = {0: "batch", 1: "seq"}
    summed = GraphCache(Masked("total kept"), [(1, 4)], dynamic_shapes={"x": both, "mask": both})
    ones = torch.ones(1, 8, 4, device=device), torch.ones(1, 8, dtype=torch.bool, device=device)
    twin = Twin(summed)
    twin(ones[0][:, :3] * 2, ones[1][:, :3])
    twin(*ones)


@given(
    seed=SEEDS,
    widths=st.lists(st.sampled_from([1, 2, 5]), min_size=3, max_size=3),
    values=st.lists(
        st.sampled_from([0, 1, True, False, 1.0, 0.0, -0.0, 2.5, "a", None]), min_size=2, max_size=6
    ),
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=4),
)
@settings(max_examples=40)
def test_plain_values_and_widths_in_any_order_equal_eager(
    device: str, seed: int, widths: list[int], values: list[Any], sizes: list[int]
) -> None:
    """What is no tensor, and what is no dynamic dim, is part of the key."""
    torch.manual_seed(seed)

    class Chosen(nn.Module):
        def forward(self, x: Tensor, value: Any) -> Any:
            return {"value": value, "y": x * value if isinstance(value, (int, float)) else x + 1}

    twin = Twin(GraphCache(Chosen(), [2, 4], max_signatures=4))
    for i, value in enumerate(values):
        n, width = sizes[i % len(sizes)], widths[i % 3]
        twin(torch.arange(n * width, device=device).view(n, width), value)
