"""The exceptions that users see, and the one that they do not."""

import pytest

from graphcache import BucketError, CaptureError, GraphCacheError, Reason
from graphcache.errors import Fallback


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
