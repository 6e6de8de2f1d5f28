"""Why a piece of work runs eagerly: a closed list of codes, each with the phrase that logs and
`explain()` print, and what to do about it.
"""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """A fallback's reason. Members equal their code, so `stats().fallbacks == {"host-sync": 4}`
    compares.
    """

    phrase: str
    remedy: str

    def __new__(cls, code: str, phrase: str, remedy: str) -> Reason:
        member = str.__new__(cls, code)
        member._value_ = code
        member.phrase, member.remedy = phrase, remedy
        return member

    EMPTY = "empty", "a dynamic dim is 0", "nothing: there is no work"
    OVER_MAX = "over-max", "larger than every bucket, and not splittable", "add a bucket"
    PADDING_RATIO = (
        "padding-ratio",
        "padding would exceed `max_padding_ratio`",
        "add a bucket between, or raise the ratio",
    )
    CHEAPER_EAGER = "cheaper-eager", "eager was measured to be cheaper", "nothing"
    NOT_ADMITTED = (
        "not-admitted",
        "not used often enough yet, or the cache is sealed",
        "lower `capture_after`; warm up what you need before `seal()`",
    )
    TOO_MANY_KEYS = (
        "too-many-keys",
        "the cache is full of keys that are used more, or `max_signatures` is reached",
        "raise `max_graphs` or `max_signatures`; use fewer buckets",
    )
    MEMORY_BUDGET = (
        "memory-budget",
        "`max_bytes` leaves no room for this graph",
        "raise `max_bytes`; use fewer or smaller buckets",
    )
    BATCH_COUPLED = (
        "batch-coupled",
        "padding the batch changes real rows, so only exact sizes are captured",
        "`model.eval()` if it is a BatchNorm's doing; else only exact sizes can have graphs",
    )
    PAD_NOT_NEUTRAL = (
        "pad-not-neutral",
        "padding this dim changes real results, so only exact sizes are captured",
        "pass a mask, or name its `fill`",
    )
    HOST_SYNC = (
        "host-sync",
        "the module waits for the device, which breaks a capture",
        "keep the decision on the device (`torch.where`)",
    )
    HOST_COPY = (
        "host-copy",
        "the module copies through the host, which breaks a capture or freezes a value",
        "create and keep tensors on the device",
    )
    DYNAMIC_OUTPUT = (
        "dynamic-output",
        "an operation's output shape depends on data (`nonzero`, boolean indexing)",
        "use a mask of fixed shape",
    )
    GRAD = (
        "grad",
        "gradients are needed",
        "call under `torch.inference_mode()` or `torch.no_grad()`",
    )
    INPUT_MUTATED = "input-mutated", "the module writes to an input", "write to a copy"
    STATE_WRITTEN = (
        "state-written",
        "the module changes its own state in a way that a replay would not repeat",
        "keep such state in a buffer that is written in place",
    )
    GENERATOR = (
        "generator",
        "random numbers come from a generator that a graph cannot follow",
        "draw from torch's default generator of the module's device",
    )
    UNSUPPORTED_INPUT = (
        "unsupported-input",
        "an argument that calls cannot be told apart by, or a tensor that is no plain one",
        "pass tensors, containers and plain values",
    )
    UNSUPPORTED_OUTPUT = (
        "unsupported-output",
        "a result that cannot be cut out of a padded one, or is a view of an input",
        "return another shape, or a new tensor",
    )
    HOOKS = "hooks", "hooks would not run in a replay", "remove them, or hook the cache itself"
    NESTED_CAPTURE = (
        "nested-capture",
        "the caller is itself capturing",
        "nothing: the module becomes part of that graph",
    )
    TRACING = (
        "tracing",
        "the caller is tracing, compiling or under a dispatch or function mode",
        "nothing: the module runs plainly",
    )
    CAPTURE_FAILED = (
        "capture-failed",
        "a trial run or the capture failed, and was undone",
        "mend what the error says; if only one bucket raises it, leave that one out",
    )
    OUT_OF_MEMORY = (
        "out-of-memory",
        "the device has no memory left for this graph",
        "set `max_bytes`, or use smaller buckets",
    )
    VERIFY_MISMATCH = (
        "verify-mismatch",
        "a shadow run by eager differed, so this key is quarantined",
        "pass globals that forward reads as arguments, or `invalidate()`; else please report it",
    )
    DEVICE = (
        "device",
        "tensors on several devices, or on one without graphs",
        "wrap the part on each device by itself",
    )
    RANK_MISMATCH = (
        "rank-mismatch",
        "the ranks of `group` disagree",
        "give every rank the same calls",
    )
    OPAQUE_CODE = (
        "opaque-code",
        "code that issues no ATen operation, or works in another thread, cannot be followed",
        "on the CPU recorder: test that part on a GPU; else cache the parts around it",
    )


#: Expected in ordinary use: `on_fallback="raise"` lets these run eagerly, and they are logged at
#: INFO.
QUIET = frozenset(
    {Reason.EMPTY, Reason.NOT_ADMITTED, Reason.CHEAPER_EAGER, Reason.NESTED_CAPTURE, Reason.TRACING}
)
