"""Padding arithmetic: buffers, tails, cuts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphcache.padding import (
    OutputAxis,
    allocate,
    countdown,
    covered,
    cut,
    fit,
    head,
    spread,
    tails,
    volume,
)
from graphcache.signature import Input, dim_order

CPU = torch.device("cpu")


def spec_of(tensor, axes):
    """The input that a tensor is, with `axes` a dict of axis to dim."""
    shape = tuple(None if a in axes else n for a, n in enumerate(tensor.shape))
    pairs = tuple(sorted(axes.items()))
    return Input("x", tensor.dtype, tensor.device, shape, pairs, dim_order(tensor))


def padded(tensor, spec, sizes, bucket, fills):
    """The static input that a call fills, its memory dirty before."""
    static = allocate(spec, bucket)
    static.copy_(torch.full_like(static, 77))
    head(static, spec, sizes).copy_(tensor)
    for refill in tails(static, spec, sizes, bucket, fills):
        refill()
    return static


def spread_over(tensor, spec, sizes, bucket, fills):
    """The same as a call does it: by one kernel what repeats, numbers beside it."""
    static = allocate(spec, bucket)
    static.copy_(torch.full_like(static, 55))
    to = covered(sizes, bucket, fills)
    rows = countdown(max(bucket), tensor.device)
    copy = spread(static, spec, sizes, to, rows) or head(static, spec, sizes).copy_
    copy(tensor)
    for refill in tails(static, spec, to, bucket, fills):
        refill()
    return static


small = st.integers(1, 5)
dtypes = st.sampled_from([torch.float32, torch.int64, torch.bool, torch.complex64])
fills = st.sampled_from([0, 1, "repeat"])


@given(
    sizes=st.tuples(small, small),
    extra=st.tuples(*[st.integers(0, 4)] * 2),
    dtype=dtypes,
    fill=st.tuples(fills, fills),
    order=st.permutations(range(3)),
)
@settings(max_examples=120, deadline=None)
def test_cutting_what_was_padded_gives_back_the_call(sizes, extra, dtype, fill, order):
    """unpad(pad(x)) == x, for every dtype, fill and layout, bit for bit."""
    shape = (sizes[0], 2, sizes[1])
    x = (
        (torch.randn([shape[a] for a in order]) * 3)
        .to(dtype)
        .permute([order.index(a) for a in range(3)])
    )
    spec = spec_of(x, {0: 0, 2: 1})
    bucket = tuple(n + e for n, e in zip(sizes, extra, strict=True))
    static = padded(x, spec, sizes, bucket, dict(enumerate(fill)))
    assert static.shape == (bucket[0], 2, bucket[1])
    axes = [OutputAxis(0, 0, 1, 0), OutputAxis(2, 1, 1, 0)]
    assert torch.equal(cut(static, axes, sizes), x)
    assert torch.equal(head(static, spec, sizes), x)


@given(
    sizes=st.tuples(small, small),
    extra=st.tuples(*[st.integers(0, 4)] * 2),
    fill=st.tuples(fills, fills),
)
@settings(max_examples=120, deadline=None)
def test_every_element_beside_the_real_rows_holds_its_fill(sizes, extra, fill):
    """Invariant I2: each tail holds its number, or repeats the last real row or column."""
    x = torch.randint(10, 50, sizes)
    bucket = tuple(n + e for n, e in zip(sizes, extra, strict=True))
    static = padded(x, spec_of(x, {0: 0, 1: 1}), sizes, bucket, dict(enumerate(fill)))
    for i in range(bucket[0]):
        for j in range(bucket[1]):
            found = static[i, j].item()
            if i >= sizes[0]:
                wanted = static[sizes[0] - 1, j].item() if fill[0] == "repeat" else fill[0]
            elif j >= sizes[1]:
                wanted = x[i, -1].item() if fill[1] == "repeat" else fill[1]
            else:
                wanted = x[i, j].item()
            assert found == wanted, (i, j)


@given(
    sizes=st.tuples(small, small),
    extra=st.tuples(*[st.integers(0, 4)] * 2),
    axes=st.lists(st.sampled_from([None, 0, 1]), min_size=1, max_size=4),
    dtype=dtypes,
    fill=st.tuples(fills, fills),
    data=st.data(),
)
@settings(max_examples=300, deadline=None)
def test_one_kernel_repeats_as_the_tails_do(sizes, extra, axes, dtype, fill, data):
    """Bit for bit, for axes in any order, side by side or apart, one dim on several of them, and
    numbers in one dim with "repeat" in the other.
    """
    shape = [2 if dim is None else sizes[dim] for dim in axes]
    order = data.draw(st.permutations(range(len(axes))))
    x = (torch.randn([shape[a] for a in order]) * 3).to(dtype)
    x = x.permute([order.index(a) for a in range(len(axes))])
    spec = spec_of(x, {a: dim for a, dim in enumerate(axes) if dim is not None})
    bucket = tuple(n + e for n, e in zip(sizes, extra, strict=True))
    found, wanted = (
        pad(x, spec, sizes, bucket, dict(enumerate(fill))) for pad in (spread_over, padded)
    )
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.uint16),
        *(torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn),
    ],
)
def test_rows_of_every_dtype_repeat(dtype, device):
    """From either device, gaps between their elements and all."""
    for source in {"cpu", device}:
        x = (torch.arange(12.0, device=source) % 5).to(dtype).view(3, 4)[:, ::2]
        spec = spec_of(torch.empty(3, 2, dtype=dtype, device=device), {0: 0, 1: 1})
        static = allocate(spec, (5, 3))
        rows = countdown(5, torch.device(device))
        spread(static, spec, (3, 2), (5, 3), rows)(x)
        wanted = x.to(device, torch.float64 if dtype.is_floating_point else dtype).cpu()
        wanted = wanted[[0, 1, 2, 2, 2]][:, [0, 1, 1]]
        assert torch.equal(static.cpu().to(wanted.dtype), wanted)


def test_a_dim_without_a_fill_is_left_alone():
    """Its leftovers are inert."""
    x = torch.ones(2, 3)
    static = padded(x, spec_of(x, {0: 0}), (2,), (4,), {})
    assert static[2:].eq(77).all()
    assert tails(static, spec_of(x, {0: 0}), (2,), (4,), {}) == []


def test_a_call_that_fits_exactly_has_no_tails():
    """Nothing to refill."""
    x = torch.ones(4, 3)
    spec = spec_of(x, {0: 0})
    assert tails(allocate(spec, (4,)), spec, (4,), (4,), {0: 0}) == []


def test_one_dim_on_two_axes_pads_both():
    """A square mask (seq, seq) follows its dim twice."""
    x = torch.arange(1, 5).view(2, 2)
    static = padded(x, spec_of(x, {0: 0, 1: 0}), (2,), (3,), {0: 0})
    assert static.tolist() == [[1, 2, 0], [3, 4, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 3, 4, 5),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(5, 4, 3, 2).permute(3, 2, 1, 0),
    ],
)
def test_a_buffer_keeps_the_inputs_order_of_axes_and_is_dense(x):
    """channels_last stays channels_last at the padded size."""
    static = allocate(spec_of(x, {0: 0}), (8,))
    assert dim_order(static) == dim_order(x)
    assert static.untyped_storage().nbytes() == static.numel() * 4
    assert static.shape == (8, *x.shape[1:])


def test_fit_cuts_where_longer_and_repeats_rows_in_turn_where_shorter():
    """Values the module has met, in both directions."""
    x = torch.tensor([[1, 2], [3, 4], [5, 6]])
    spec = spec_of(x, {0: 0})
    assert fit(x, spec, (2,)).tolist() == [[1, 2], [3, 4]]
    assert fit(x, spec, (7,)).tolist() == [[1, 2], [3, 4], [5, 6]] * 2 + [[1, 2]]
    assert fit(x, spec, (3,)).tolist() == x.tolist()
    both = spec_of(x, {0: 0, 1: 1})
    assert fit(x, both, (1, 3)).tolist() == [[1, 2, 1]]


@given(n=st.integers(0, 6), scale=st.integers(0, 3), offset=st.integers(0, 4))
@settings(deadline=None)
def test_a_cut_takes_scale_n_plus_offset_rows(n, scale, offset):
    """The leading ones, as a view of the output."""
    output = torch.arange(40)
    found = cut(output, [OutputAxis(0, 0, scale, offset)], (n,))
    assert found.tolist() == list(range(scale * n + offset))
    assert found.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()


def test_volume_is_the_product_of_the_sizes():
    """Elements of the dynamic dims."""
    assert volume((3, 5)) == 15
    assert volume(()) == 1


def test_repeat_never_makes_a_value_the_call_did_not_have():
    """An index stays in range, in both dims at once."""
    x = torch.randint(100, 200, (2, 3))
    static = padded(x, spec_of(x, {0: 0, 1: 1}), (2, 3), (5, 7), {0: "repeat", 1: "repeat"})
    assert set(static.flatten().tolist()) == set(x.flatten().tolist())
