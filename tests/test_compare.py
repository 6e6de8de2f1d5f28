"""When two results count as equal."""

import pytest
import torch

from graphcache import compare
from graphcache.compare import TOLERANCE, all_close, all_same, close, same_bits


class TestBits:
    def test_nan_equals_itself_and_zero_does_not_equal_minus_zero(self):
        """Bits, not values."""
        x = torch.tensor([float("nan"), 1.0, -0.0])
        assert same_bits(x, x.clone())
        assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))

    def test_one_ulp_differs(self):
        """The smallest change shows."""
        x = torch.tensor([1.0])
        assert not same_bits(x, torch.nextafter(x, torch.tensor([2.0])))

    def test_shape_and_dtype_count(self):
        """Equal bytes in another form are not the same."""
        assert not same_bits(torch.zeros(2, 3), torch.zeros(3, 2))
        assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))

    def test_layout_does_not_count(self):
        """A transposed copy with the same elements is the same."""
        x = torch.randn(3, 4)
        assert same_bits(x, x.t().contiguous().t())

    @pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.complex64, torch.bfloat16])
    def test_every_dtype_is_compared(self, dtype):
        """Also a scalar and an empty tensor."""
        x = torch.tensor([1, 0]).to(dtype)
        assert same_bits(x, x.clone())
        assert not same_bits(x, x.flip(0))
        assert same_bits(x[0], x[0].clone())
        assert same_bits(x[:0], x[:0].clone())


class TestNorms:
    @pytest.mark.parametrize("dtype", TOLERANCE)
    def test_a_difference_below_the_dtypes_bound_is_close_and_one_above_is_not(self, dtype):
        """Relative to the norm of the whole."""
        torch.manual_seed(0)
        x = torch.randn(1000, dtype=torch.float64).to(dtype)
        bound = TOLERANCE[dtype]
        wide = x.to(torch.complex128 if dtype.is_complex else torch.float64)
        assert close((wide * (1 + bound / 4)).to(dtype), x)
        assert not close((wide * (1 + bound * 4)).to(dtype), x)

    @pytest.mark.parametrize(
        ("precision", "bound"), [("tf32", 1e-2), ("bf16", 3e-2), ("ieee", 1e-3)]
    )
    def test_float32_is_as_exact_as_matmuls_are_allowed_to_be(self, precision, bound, monkeypatch):
        """Other dtypes are not loosened."""
        monkeypatch.setattr(compare, "matmul_precision", lambda device: precision)
        x = torch.randn(1000)
        assert close(x * (1 + bound / 4), x)
        assert not close(x * (1 + bound * 4), x)
        assert not close(x.double() * (1 + 1e-5), x.double())

    def test_a_wrong_element_among_many_is_found_where_it_is_large(self):
        """One row off by its own size."""
        x = torch.ones(100)
        y = x.clone()
        y[3] = 3.0
        assert not close(y, x)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_non_finite_places_must_be_equal(self, value):
        """NaN where eager has NaN; not where it has a number, nor infinity of another sign."""
        x = torch.tensor([1.0, value])
        assert close(x.clone(), x)
        assert not close(torch.tensor([1.0, 2.0]), x)
        assert not close(x, torch.tensor([1.0, 2.0]))

    def test_infinity_and_nan_are_not_close(self):
        """Nor are the two infinities."""
        inf, nan = torch.tensor([float("inf")]), torch.tensor([float("nan")])
        assert not close(inf, nan)
        assert not close(nan, inf)
        assert not close(inf, -inf)

    def test_nan_is_not_close_to_zero(self):
        """A padded run that loses a NaN is no match."""
        assert not close(torch.tensor([0.0]), torch.tensor([float("nan")]))

    def test_infinity_is_not_close_to_the_largest_finite_number(self):
        """One overflowed, the other did not."""
        most = torch.tensor([torch.finfo(torch.float32).max])
        assert not close(most, torch.tensor([float("inf")]))
        assert not close(torch.tensor([float("inf")]), most)

    def test_integers_and_bools_must_be_equal(self):
        """No tolerance for counts."""
        x = torch.tensor([10**9, 1])
        assert close(x, x.clone())
        assert not close(x + 1, x)
        assert not close(torch.tensor([True]), torch.tensor([False]))

    def test_shape_and_dtype_must_be_equal(self):
        """Broadcasting would hide a cut."""
        assert not close(torch.ones(3, 1), torch.ones(3))
        assert not close(torch.ones(3), torch.ones(3, dtype=torch.float64))

    def test_zeros_and_empty_tensors_are_close_to_themselves(self):
        """No division by a norm of 0."""
        assert close(torch.zeros(3), torch.zeros(3))
        assert close(torch.zeros(0), torch.zeros(0))


def test_lists_must_have_equal_length():
    """A result that lost a tensor is another result."""
    x = torch.ones(2)
    assert all_same([x], [x])
    assert all_close([x], [x])
    assert not all_same([x], [x, x])
    assert not all_close([x], [])
    assert not all_same([x, x], [x, x + 1])
    assert not all_close([x, x], [x, x + 1])
