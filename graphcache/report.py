"""Tells the user of fallbacks: a log line for the first of each, a warning or an error where asked
for.
"""

from __future__ import annotations

import logging
import re
import warnings

from graphcache.errors import CaptureError, Fallback, GraphCacheError
from graphcache.frames import user_frame
from graphcache.reasons import QUIET, Reason

logger = logging.getLogger("graphcache")

_MAX_SEEN = 1024
_NUMBER = re.compile(r"\d+")


class FallbackReport:
    """Called with each fallback of one cache.

    Args:
        name: the module's class.
        policy: "eager", "warn" or "raise".

    Raises:
        GraphCacheError: under "raise", unless the reason belongs to ordinary use (see
            `reasons.QUIET`).
    """

    def __init__(self, name: str, policy: str) -> None:
        self._name = name
        self._policy = policy
        self._seen: set[tuple[Reason, str]] = set()

    def __call__(self, fallback: Fallback) -> None:
        reason = fallback.reason
        why = f"{fallback.detail} ({reason.phrase})" if fallback.detail else reason.phrase
        text = f"{self._name} runs eagerly: {reason}: {why}; to do: {fallback.remedy}"
        if self._policy == "raise" and reason not in QUIET:
            kind = CaptureError if reason is Reason.CAPTURE_FAILED else GraphCacheError
            raise kind(f"{text}.") from fallback
        # Ordinary ones once each; a call that is too large once, whatever its size.
        detail = _NUMBER.sub("", fallback.detail) if reason is Reason.OVER_MAX else fallback.detail
        told = (reason, "" if reason in QUIET else detail)
        if told in self._seen or len(self._seen) >= _MAX_SEEN:
            return
        self._seen.add(told)
        logger.log(logging.INFO if reason in QUIET else logging.WARNING, "%s", text)
        if self._policy == "warn" and reason not in QUIET:
            warnings.warn(text, RuntimeWarning, stacklevel=user_frame()[1] + 1)
