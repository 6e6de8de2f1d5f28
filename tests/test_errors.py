"""The exceptions that users see, and the one that they do not."""

import pytest
import torch
from torch import nn

from graphcache import BucketError, CaptureError, GraphCache, GraphCacheError, Reason, check
from graphcache.errors import Fallback

X = torch.ones(3, 4)


def test_every_error_is_a_graph_cache_error_and_a_built_in():
    """Callers may catch ours, or what Python calls it."""
    assert issubclass(GraphCacheError, RuntimeError)
    assert issubclass(CaptureError, GraphCacheError)
    assert issubclass(BucketError, GraphCacheError)
    assert issubclass(BucketError, ValueError)


def test_a_fallback_is_no_error_of_ours():
    """`except GraphCacheError` inside the package must not swallow control flow."""
    assert not issubclass(Fallback, GraphCacheError)


@pytest.mark.parametrize(
    ("fallback", "text"),
    [
        (Fallback(Reason.HOST_SYNC, "aten::item at m.py:3"), "host-sync: aten::item at m.py:3"),
        (Fallback(Reason.EMPTY), "empty: a dynamic dim is 0"),
    ],
)
def test_a_fallback_reads_as_its_code_and_detail_or_phrase(fallback, text):
    """What logs and strict errors print."""
    assert str(fallback) == text


@pytest.mark.parametrize(
    ("build", "call", "remedy"),
    [
        (lambda: GraphCache(nn.Linear(4, 2), backend="cuda"), (X,), "leave `backend` at 'auto'"),
        (
            lambda: GraphCache(nn.Linear(4, 2), dynamic_shapes={"input": {5: "batch"}}),
            (X,),
            "name in `dynamic_shapes` the axes",
        ),
        (lambda: GraphCache(nn.Bilinear(4, 4, 2), [4]), (X,), "the arguments that forward takes"),
    ],
    ids=["backend", "axis", "argument"],
)
def test_the_remedy_fits_the_case(build, call, remedy):
    """And not just the reason, in `explain` and `check` alike."""
    with torch.no_grad():
        assert remedy in str(build().explain(*call))
    assert remedy in str(check(build(), *call))


def test_what_a_trial_raised_is_told_with_the_users_line():
    def raises(x):
        raise ValueError("no such thing.")

    detail = GraphCache(raises, [4]).explain(X).detail
    line = raises.__code__.co_firstlineno + 1
    assert detail == f"a trial run raised ValueError: no such thing at {__file__}:{line}"


def test_a_dim_where_an_axis_belongs_is_told():
    with pytest.raises(BucketError, match=r"e\.g\. {'input': {0: 'batch'}}"):
        GraphCache(nn.Linear(4, 2), [4], dynamic_shapes={"input": "batch"})
