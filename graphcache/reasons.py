"""Why a piece of work runs eagerly: a closed list of codes, each with the phrase that logs and
`explain()` print.
"""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """A fallback's reason. Members equal their code, so `stats().fallbacks == {"host-sync": 4}`
    compares.
    """

    phrase: str

    def __new__(cls, code: str, phrase: str) -> Reason:
        member = str.__new__(cls, code)
        member._value_ = code
        member.phrase = phrase
        return member

    EMPTY = "empty", "a dynamic dim is 0"
    OVER_MAX = "over-max", "larger than every bucket and not splittable"
    PADDING_RATIO = "padding-ratio", "padding would exceed `max_padding_ratio`"
    CHEAPER_EAGER = "cheaper-eager", "eager was measured to be cheaper"
    NOT_ADMITTED = "not-admitted", "not used often enough to be captured, or the cache is sealed"
    TOO_MANY_KEYS = (
        "too-many-keys",
        "the cache is full of keys that are used more, or `max_signatures` is reached",
    )
    MEMORY_BUDGET = "memory-budget", "`max_bytes` leaves no room for this graph"
    BATCH_COUPLED = (
        "batch-coupled",
        "padding the batch changes real rows, so only exact sizes are captured",
    )
    PAD_NOT_NEUTRAL = (
        "pad-not-neutral",
        "padding this dim changes real results, so only exact sizes are captured",
    )
    HOST_SYNC = "host-sync", "the module waits for the device, which breaks a capture"
    HOST_COPY = (
        "host-copy",
        "the module copies through the host, which breaks a capture or freezes a value",
    )
    DYNAMIC_OUTPUT = "dynamic-output", "an operation's output shape depends on data"
    GRAD = "grad", "gradients are needed; call under torch.no_grad() or torch.inference_mode()"
    INPUT_MUTATED = "input-mutated", "the module writes to an input"
    STATE_WRITTEN = (
        "state-written",
        "the module changes its own state in a way that a replay would not repeat",
    )
    GENERATOR = "generator", "random numbers come from a generator that a graph cannot follow"
    UNSUPPORTED_INPUT = (
        "unsupported-input",
        "an argument that calls cannot be told apart by, or that is no plain tensor",
    )
    UNSUPPORTED_OUTPUT = (
        "unsupported-output",
        "a result that cannot be cut out of a padded one or told apart",
    )
    HOOKS = "hooks", "hooks would not run in a replay"
    NESTED_CAPTURE = "nested-capture", "the caller is itself capturing"
    TRACING = "tracing", "the caller is tracing, compiling or under a dispatch mode"
    CAPTURE_FAILED = "capture-failed", "the capture failed and was undone"
    OUT_OF_MEMORY = "out-of-memory", "the device has no memory left for this graph"
    VERIFY_MISMATCH = (
        "verify-mismatch",
        "a shadow run by eager differed, so this key is quarantined",
    )
    DEVICE = "device", "tensors on several devices, or on one without graphs"
    RANK_MISMATCH = "rank-mismatch", "the ranks of `group` disagree"
    OPAQUE_CODE = "opaque-code", "code that issues no ATen operation cannot be recorded on the CPU"


#: Expected in ordinary use: `on_fallback="raise"` lets these run eagerly, and they are logged at
#: INFO.
QUIET = frozenset(
    {Reason.EMPTY, Reason.NOT_ADMITTED, Reason.CHEAPER_EAGER, Reason.NESTED_CAPTURE, Reason.TRACING}
)
