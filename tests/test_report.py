"""What a user is told of fallbacks."""

import logging
import warnings

import pytest
import torch
from torch import nn

from graphcache import CaptureError, GraphCache, GraphCacheError, Reason
from graphcache.errors import Fallback
from graphcache.reasons import QUIET
from graphcache.report import FallbackReport

SYNC = Fallback(Reason.HOST_SYNC, "aten::item at m.py:3")


def test_the_first_of_each_reason_and_detail_is_logged_at_warning(caplog):
    """Repeats are not; another detail is."""
    report = FallbackReport("Net", "eager")
    for fallback in (SYNC, SYNC, Fallback(Reason.HOST_SYNC, "elsewhere")):
        report(fallback)
    assert [r.levelno for r in caplog.records] == [logging.WARNING] * 2
    assert caplog.records[0].name == "graphcache"
    assert caplog.records[0].getMessage() == (
        "Net runs eagerly: host-sync: aten::item at m.py:3 "
        "(the module waits for the device, which breaks a capture); "
        "to do: keep the decision on the device (`torch.where`)"
    )


def test_each_cache_tells_its_own_first(caplog):
    """Another module's fallback is news."""
    FallbackReport("A", "eager")(SYNC)
    FallbackReport("B", "eager")(SYNC)
    assert [r.getMessage().split()[0] for r in caplog.records] == ["A", "B"]


def test_a_fallback_without_detail_is_told_by_its_phrase(caplog):
    """`grad` carries its remedy."""
    FallbackReport("Net", "eager")(Fallback(Reason.GRAD))
    assert "call under `torch.inference_mode()` or `torch.no_grad()`" in caplog.text


def test_warn_warns_once(caplog):
    """A RuntimeWarning with the text of the log line."""
    report = FallbackReport("Net", "warn")
    with pytest.warns(RuntimeWarning, match="Net runs eagerly: host-sync: aten::item"):
        report(SYNC)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report(SYNC)
        report(Fallback(Reason.EMPTY))


@pytest.mark.parametrize("reason", [r for r in Reason if r not in QUIET])
def test_strict_mode_raises_with_module_and_reason(reason):
    """Each time, chained from the cause; a failed capture is a CaptureError."""
    report = FallbackReport("Net", "raise")
    for _ in range(2):
        with pytest.raises(GraphCacheError, match=f"Net runs eagerly: {reason}: here") as caught:
            report(Fallback(reason, "here"))
        assert isinstance(caught.value.__cause__, Fallback)
        assert isinstance(caught.value, CaptureError) == (reason == "capture-failed")


@pytest.mark.parametrize("reason", sorted(QUIET))
def test_strict_mode_lets_the_ordinary_reasons_pass(reason):
    """empty, not-admitted, cheaper-eager, nested-capture, tracing."""
    assert FallbackReport("Net", "raise")(Fallback(Reason(reason))) is None


def test_a_strict_cache_names_the_module_class_and_the_operation():
    """Through the public API, and the cache stays usable."""

    class Peek(nn.Module):
        def forward(self, x):
            return x / float(x.max())

    cache = GraphCache(Peek(), [4], on_fallback="raise")
    for _ in range(2):
        with pytest.raises(
            GraphCacheError, match=r"Peek runs eagerly: host-sync: `.item\(\)`.*report\.py"
        ):
            cache(torch.rand(4, 2))
    assert cache.stats().graphs == 0
