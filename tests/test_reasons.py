"""The closed list of reasons."""

from enum import StrEnum

from graphcache import Reason
from graphcache.reasons import QUIET

DESIGN = {
    "empty", "over-max", "padding-ratio", "cheaper-eager", "not-admitted", "too-many-keys",
    "memory-budget", "batch-coupled", "pad-not-neutral", "host-sync", "host-copy",
    "dynamic-output", "grad", "input-mutated", "state-written", "generator",
    "unsupported-input", "unsupported-output", "hooks", "nested-capture", "tracing",
    "capture-failed", "out-of-memory", "verify-mismatch", "device", "rank-mismatch",
    "opaque-code",
}  # fmt: skip


def test_the_list_is_the_designs():
    """No code more, none less."""
    assert {str(reason) for reason in Reason} == DESIGN


def test_a_reason_is_a_string_equal_to_its_code():
    """So that `stats().fallbacks == {"host-sync": 4}` compares, and a dict look-up by str works."""
    assert isinstance(Reason.HOST_SYNC, StrEnum)
    assert Reason.HOST_SYNC == "host-sync"
    assert {Reason.HOST_SYNC: 4} == {"host-sync": 4}
    assert {Reason.HOST_SYNC: 4}["host-sync"] == 4
    assert f"{Reason.HOST_SYNC}" == "host-sync"
    assert Reason("host-sync") is Reason.HOST_SYNC


def test_every_reason_has_a_phrase_of_its_own():
    """Lower-case, without a full stop, so that it reads inside a log line."""
    phrases = [reason.phrase for reason in Reason]
    assert len(set(phrases)) == len(phrases)
    assert all(phrase and not phrase.endswith(".") for phrase in phrases)


def test_the_quiet_ones_are_those_that_strict_mode_lets_pass():
    """empty, not-admitted, cheaper-eager, nested-capture, tracing."""
    assert QUIET == {"empty", "not-admitted", "cheaper-eager", "nested-capture", "tracing"}
