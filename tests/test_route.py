"""Which bucket or pieces serve a call: pure decisions."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphcache.buckets import parse_buckets
from graphcache.errors import Fallback
from graphcache.facts import Facts
from graphcache.probe import DimFacts
from graphcache.reasons import Reason
from graphcache.route import choose_route, refuse_empty
from graphcache.settings import Settings

DEFAULTS = Settings(
    buckets=None, dynamic_shapes=None, fill={}, split="auto", max_graphs=None, max_bytes=None,
    max_signatures=64, capture_after=1, max_padding_ratio=None, outputs="copy",
    verify="capture", on_fallback="eager", backend="auto", compile=False,
)  # fmt: skip
FREE = DimFacts(True, independent=True)
DEPENDENT = DimFacts(True)
COUPLED = DimFacts(False, "coupled", Reason.BATCH_COUPLED)
FROM_TWO = DimFacts(True, smallest=2)


def route(buckets, sizes, dims=(FREE,), **options):
    names = ("batch", "seq")[: len(dims)]
    settings = dataclasses.replace(DEFAULTS, **options)
    return choose_route(parse_buckets(buckets, names), sizes, Facts(dims=tuple(dims)), settings)


def reason_of(*args, **options):
    with pytest.raises(Fallback) as caught:
        route(*args, **options)
    return caught.value.reason


@given(n=st.integers(1, 16))
def test_a_call_that_a_bucket_holds_goes_to_the_cheapest(n):
    """One bucket, no pieces, no reason."""
    found = route([4, 8, 16], (n,))
    assert found.bucket == (next(b for b in (4, 8, 16) if b >= n),)
    assert (found.pieces, found.why_exact) == ((), None)


@given(n=st.integers(17, 16 * 16))
def test_a_call_above_every_bucket_is_split_where_rows_are_independent(n):
    """Pieces cover it."""
    found = route([4, 8, 16], (n,))
    assert found.bucket is None
    assert found.dim == 0
    assert found.pieces[-1].stop == n


@pytest.mark.parametrize(
    ("dims", "options"),
    [
        ((DEPENDENT,), {}),
        ((FREE,), {"split": None}),
        ((FREE,), {"split": "seq"}),
    ],
)
def test_without_leave_to_split_a_large_call_is_over_max(dims, options):
    """Dependent rows, splitting switched off, or another dim named."""
    assert reason_of([4, 8], (9,), dims, **options) == Reason.OVER_MAX


def test_the_text_of_over_max_says_what_was_asked_and_what_is_there():
    """Sizes by dim name, and the remedy."""
    text = "no bucket holds batch=513, seq=80; the largest sizes are batch=512, seq=2048"
    with pytest.raises(Fallback, match=text):
        route({"batch": [512], "seq": [64, 2048]}, (513, 80), (DEPENDENT, DEPENDENT))


def test_more_than_sixteen_pieces_is_over_max():
    """The limit of the design."""
    assert len(route([8], (128,)).pieces) == 16
    assert reason_of([8], (129,)) == Reason.OVER_MAX


def test_a_named_split_dim_is_the_only_one_cut():
    """Both dims independent, seq named."""
    found = route({"batch": [4], "seq": [8]}, (3, 20), (FREE, FREE), split="seq")
    assert found.dim == 1
    assert found.pieces[-1].stop == 20
    assert reason_of({"batch": [4], "seq": [8]}, (9, 8), (FREE, FREE), split="seq") == "over-max"


@pytest.mark.parametrize("facts", [{"draws": True}, {"writes": True}, {"aliases": True}])
def test_modules_that_draw_write_or_alias_are_never_split(facts):
    """Each piece would draw, write or return anew."""
    with pytest.raises(Fallback) as caught:
        choose_route(parse_buckets([4], ("batch",)), (9,), Facts(dims=(FREE,), **facts), DEFAULTS)
    assert caught.value.reason == Reason.OVER_MAX


@pytest.mark.parametrize("ratio", [1, 1.5, 2])
def test_padding_above_the_ratio_is_refused(ratio):
    """padded / real against the limit, the limit itself allowed."""
    for n in range(1, 9):
        if math.ceil(n / 8) * 8 > ratio * n:
            assert reason_of([8], (n,), max_padding_ratio=ratio) == Reason.PADDING_RATIO
        else:
            assert route([8], (n,), max_padding_ratio=ratio).bucket == (8,)


def test_the_text_of_padding_ratio_has_both_volumes_and_the_limit():
    """Numbers a user can act on."""
    with pytest.raises(Fallback, match=r"8 elements for 2, the limit is 1\.5x"):
        route([8], (2,), max_padding_ratio=1.5)


def test_a_dim_that_must_not_be_padded_keeps_its_size_and_says_why():
    """Unless the size is listed, in which case it is a bucket like any other."""
    found = route([4, 8], (5,), (COUPLED,))
    assert found.bucket == (5,)
    assert found.why_exact.reason == Reason.BATCH_COUPLED
    assert found.why_exact.detail == "coupled"
    assert route([4, 8], (8,), (COUPLED,)).why_exact is None


def test_one_dim_is_padded_while_another_keeps_its_size():
    """seq is padded to 16, the batch stays 3."""
    found = route({"batch": [4], "seq": [8, 16]}, (3, 9), (COUPLED, FREE))
    assert found.bucket == (3, 16)
    assert found.why_exact.reason == Reason.BATCH_COUPLED


def test_results_of_another_form_at_size_1_are_not_padded():
    """`squeeze()`: size 1 is exact, size 2 is padded."""
    found = route([4], (1,), (FROM_TWO,))
    assert found.bucket == (1,)
    assert found.why_exact.reason == Reason.UNSUPPORTED_OUTPUT
    assert route([4], (2,), (FROM_TWO,)).bucket == (4,)


def test_without_buckets_every_size_is_its_own():
    """Exact sizes are not padded, split or refused."""
    assert route(None, (1000,)).bucket == (1000,)
    assert route(None, (1000,)).why_exact is None


def test_an_empty_dim_is_named():
    """`empty`, before anything else."""
    with pytest.raises(Fallback, match="empty: seq=0") as caught:
        refuse_empty((3, 0), ("batch", "seq"))
    assert caught.value.reason == Reason.EMPTY
    refuse_empty((3, 1), ("batch", "seq"))
