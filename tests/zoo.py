"""Small modules of many kinds with makers of their inputs, and the comparisons that all end-to-end
tests use.

All of them are safe to pad by design.md, section 5, so each must be served by graphs. Nothing here
uses graphcache.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

#: What no watch looks into: another Python module, as forward may read its settings from.
ELSEWHERE = types.ModuleType("elsewhere")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Member:
    """One module of the zoo.

    `make(n, ...)` gives (args, kwargs) at one size for each of `dims`. `fills` holds what padding
    must hold, by input name; other inputs may be padded with any value of theirs.
    """

    name: str
    module: Callable[[], nn.Module]
    make: Callable[..., Arguments]
    dynamic_shapes: Any = None
    dims: tuple[str, ...] = ("batch",)
    fills: dict[str, Any] = field(default_factory=dict)

    @property
    def buckets(self) -> Any:
        return [2, 4, 8] if len(self.dims) == 1 else {"batch": [2, 4], "seq": [4, 8]}

    def build(self, device: str) -> nn.Module:
        """The module on a device, in eval mode, the same weights every time."""
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return self.module().to(device).eval()

    def arguments(self, device: str, *sizes: int) -> Arguments:
        with torch.device(device):
            return self.make(*sizes)


class Attention(nn.Module):
    """One head over x: (batch, seq, 8), keys outside mask: (batch, seq) left out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)) / 8**0.5
        weights = scores.masked_fill(~mask[:, None], float("-inf")).softmax(-1)
        return x + self.out(weights @ v)


class Causal(nn.Module):
    """Sums over the past of x: (batch, seq, 4), with learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(16, 4))
        self.project = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.project((x + self.positions[: x.shape[1]]).cumsum(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 5, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.gru(x)


class GatherScatter(nn.Module):
    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return torch.zeros_like(x).scatter_add(1, index, x.gather(1, index) * 2)


class ManyToMany(nn.Module):
    def forward(self, a: Tensor, b: Tensor, scale: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
        return a * scale + b, (a * b).sum(1), b.argmax(1)


class DictToDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        logits = self.head(batch["x"]) * batch["meta"]["weight"][:, None]
        return {"logits": logits, "extra": {"tag": "v1", "none": None, "best": logits.argmax(1)}}


@dataclass(frozen=True)
class Scores:
    """A result type."""

    mean: Tensor
    spread: Tensor
    label: str = "scores"


class ToDataclass(nn.Module):
    def forward(self, x: Tensor) -> Scores:
        return Scores(x.mean(1), x.amax(1) - x.amin(1))


@dataclass
class NetOutput(ModelOutput):
    """A result type as transformers makes them: a dict by the fields that are not None."""

    logits: Tensor | None = None
    loss: Tensor | None = None
    hidden: tuple[Tensor, ...] | None = None


class ToModelOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> NetOutput:
        hidden = self.body(x).tanh()
        return NetOutput(logits=self.head(hidden), hidden=(hidden, hidden * 2))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.body = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Dropout(0.5), nn.Linear(12, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(self.norm(x))


class MixedTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)

    def forward(self, ids: Tensor, weight: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        vectors = self.table(ids) * weight[..., None]
        return vectors.masked_fill(~keep[..., None], 0.0).sum(1), ids.sum(1), keep.any(1)


class TwoLayouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(x) + self.head(y)


class Optional(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None, *, extra: Any = None) -> Any:
        y = x if mask is None else x * mask
        y = y + 1 if extra is None else y + extra["bias"]
        return {"y": y, "masked": mask is not None, "pair": (y, [y + 1])}


class Pair(NamedTuple):
    """A result type."""

    total: Tensor
    parts: list[Tensor]


class Nested(nn.Module):
    def forward(self, pairs: list[tuple[Tensor, Tensor]], *more: Tensor) -> Pair:
        parts = [a + b for a, b in pairs] + [m * 2 for m in more]
        return Pair(sum(parts), parts)


def _channels_last(n: int) -> Arguments:
    return (torch.randn(n, 3, 6, 6).to(memory_format=torch.channels_last),), {}


def _masked(n: int, m: int) -> Arguments:
    mask = torch.rand(n, m) < 0.7
    mask[:, 0] = True
    return (torch.randn(n, m, 8),), {"mask": mask}


def _optional(n: int) -> Arguments:
    x = torch.randn(n, 3)
    forms: list[Arguments] = [
        ((x,), {}),
        ((x, torch.rand(n, 3)), {}),
        ((x,), {"extra": {"bias": torch.rand(n, 3)}}),
    ]
    return forms[n % 3]


def _conv() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    )
    return net.to(memory_format=torch.channels_last)


_BATCH_SEQ = {0: "batch", 1: "seq"}

ZOO = (
    Member(
        "mlp",
        lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
        lambda n: ((torch.randn(n, 4),), {}),
    ),
    Member("conv_channels_last", _conv, _channels_last),
    Member(
        "attention",
        Attention,
        _masked,
        {"x": _BATCH_SEQ, "mask": _BATCH_SEQ},
        ("batch", "seq"),
        {"mask": False},
    ),
    Member(
        "causal",
        Causal,
        lambda n, m: ((torch.randn(n, m, 4),), {}),
        {"x": _BATCH_SEQ},
        ("batch", "seq"),
    ),
    Member("gru", Recurrent, lambda n: ((torch.randn(n, 4, 3),), {})),
    Member(
        "embedding_bag",
        lambda: nn.EmbeddingBag(10, 4, mode="mean"),
        lambda n: ((torch.randint(10, (n, 6)),), {}),
    ),
    Member(
        "gather_scatter",
        GatherScatter,
        lambda n: ((torch.randn(n, 5),), {"index": torch.randint(5, (n, 5))}),
    ),
    Member(
        "many_to_many",
        ManyToMany,
        lambda n: ((torch.randn(n, 3), torch.randn(n, 3)), {"scale": 0.5}),
    ),
    Member(
        "dict_to_dict",
        DictToDict,
        lambda n: (({"x": torch.randn(n, 4), "meta": {"weight": torch.rand(n)}},), {}),
    ),
    Member("dataclass", ToDataclass, lambda n: ((torch.randn(n, 4),), {})),
    Member("model_output", ToModelOutput, lambda n: ((), {"x": torch.randn(n, 4)})),
    Member("residual", Residual, lambda n: ((torch.randn(n, 6),), {})),
    Member(
        "mixed_types",
        MixedTypes,
        lambda n: ((torch.randint(7, (n, 3)), torch.rand(n, 3), torch.rand(n, 3) < 0.5), {}),
    ),
    Member(
        "transposed_and_expanded",
        TwoLayouts,
        lambda n: ((torch.randn(6, n).t(), torch.randn(1, 6).expand(n, 6)), {}),
    ),
    Member("optional", Optional, _optional),
    Member(
        "nested",
        Nested,
        lambda n: (
            ([(torch.randn(n, 2), torch.randn(n, 2))] * 2, torch.randn(n, 2), torch.randn(n, 2)),
            {},
        ),
    ),
    Member(
        "bfloat16",
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh()).bfloat16(),
        lambda n: ((torch.randn(n, 4).bfloat16(),), {}),
    ),
)
BY_NAME = {member.name: member for member in ZOO}


def tensors(value: Any) -> list[Tensor]:
    """Every tensor in a value, by our own walk."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for child in _children(value).values() for tensor in tensors(child)]


def _children(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (tuple, list)):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return {}


def assert_same(ours: Any, theirs: Any, bitwise: bool = False) -> None:
    """Assert equal types and structure all the way down, equal plain values, and close or equal
    tensors.
    """
    assert type(ours) is type(theirs), (type(ours), type(theirs))
    if isinstance(theirs, Tensor):
        assert ours.is_inference() == theirs.is_inference()
        assert ours.requires_grad == theirs.requires_grad
        if bitwise:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        else:
            torch.testing.assert_close(ours, theirs, equal_nan=True)
        return
    a, b = _children(ours), _children(theirs)
    assert list(a) == list(b)
    for key in b:
        assert_same(a[key], b[key], bitwise)
    if not b:
        assert ours == theirs or (ours != ours and theirs != theirs)


def assert_unchanged(now: list[Tensor], then: list[Tensor]) -> None:
    """Assert that tensors still have the bits of the clones that were made of them."""
    for a, b in zip(now, then, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def assert_cut_same(ours: Any, padded: Any) -> None:
    """Assert that each tensor of `ours` has the bits of the leading block of its counterpart in
    `padded`.
    """
    for mine, whole in zip(tensors(ours), tensors(padded), strict=True):
        for axis, size in enumerate(mine.shape):
            whole = whole.narrow(axis, 0, size)
        torch.testing.assert_close(mine, whole, rtol=0, atol=0, equal_nan=True)


def padded(member: Member, args: Any, kwargs: Any, sizes: Any, bucket: Any) -> Arguments:
    """The call at the bucket's sizes: dynamic axes lengthened by the member's fills, or by the last
    row.
    """
    bound = inspect.signature(member.module().forward).bind(*args, **kwargs)
    for name, value in bound.arguments.items():
        entry = (member.dynamic_shapes or {}).get(name, {0: "batch"})
        bound.arguments[name] = _lengthened(member, name, value, entry, sizes, bucket)
    return bound.args, bound.kwargs


def _lengthened(member: Member, name: str, value: Any, entry: Any, sizes: Any, bucket: Any) -> Any:
    if isinstance(value, Tensor):
        for axis in reversed(list(entry)):
            dim = member.dims.index(entry[axis])
            assert value.shape[axis] == sizes[dim]
            extra = value.narrow(axis, -1, 1).repeat_interleave(bucket[dim] - sizes[dim], axis)
            if name in member.fills and axis == 1:
                extra = torch.full_like(extra, member.fills[name])
            value = _like(value, torch.cat([value, extra], axis))
        return value
    if isinstance(value, dict):
        return {k: _lengthened(member, name, v, entry, sizes, bucket) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_lengthened(member, name, v, entry, sizes, bucket) for v in value)
    return value


def _like(layout: Tensor, values: Tensor) -> Tensor:
    """`values` with the axes in memory in the order that `layout` has them."""
    if 0 in layout.stride():
        return values.contiguous()
    order = sorted(range(layout.dim()), key=lambda axis: -layout.stride(axis))
    back = [order.index(axis) for axis in range(layout.dim())]
    return values.permute(order).contiguous().permute(back)


def walk_sizes(member: Member) -> Iterator[tuple[int, ...]]:
    """Every batch size from 1 to above the largest bucket; for two dims, with several lengths."""
    if len(member.dims) == 1:
        yield from ((n,) for n in range(1, 12))
    else:
        yield from ((n, m) for n in range(1, 7) for m in (1, 3, 4, 7, 8))


class Twin:
    """A cache beside a copy of its module, called together.

    Everything that must hold after a call is asserted. `extra_pieces` counts what splits added.
    """

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.eager = copy.deepcopy(cache.module)
        for part in self.eager.modules() if isinstance(self.eager, nn.Module) else ():
            if isinstance(part, nn.RNNBase):
                part.flatten_parameters()  # a copy's weights lie apart, of which cuDNN warns
        self.extra_pieces = 0
        self._held: list[tuple[Tensor, Tensor]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = tensors((args, kwargs))
        before = [tensor.clone() for tensor in given]
        ours = self.cache(*args, **kwargs)
        theirs = self.eager(*args, **kwargs)
        assert_same(ours, theirs)
        assert_unchanged(given, before)
        self._held += [(tensor, tensor.clone()) for tensor in tensors(ours)]
        self.assert_consistent(args, kwargs)
        return ours

    def assert_consistent(self, args: Any, kwargs: Any) -> None:
        assert_unchanged([now for now, _ in self._held], [then for _, then in self._held])
        how = self.cache.explain(*args, **kwargs)
        if how.action == "split":
            self.extra_pieces += len(how.pieces) - 1
        assert_sums(self.cache.stats(), self.extra_pieces)
        self.cache._check()


def assert_sums(stats: Any, extra_pieces: int = 0) -> None:
    """Assert the sums of design.md, section 2.5."""
    assert stats.captures + stats.replays + stats.eager == stats.calls + extra_pieces
    assert sum(stats.fallbacks.values()) == stats.eager
    assert all(stats.fallbacks.values())
    assert sum(stats.per_bucket.values()) == stats.captures + stats.replays
    assert stats.padded_elements >= stats.real_elements
    overhead = stats.padded_elements / stats.real_elements - 1 if stats.real_elements else 0.0
    assert abs(stats.padding_overhead - overhead) < 1e-9
