"""Random small modules, built of parts that couple rows or columns and of parts that do not, served
by a cache beside a copy run eagerly.

`python tests/generated.py --device cuda` prints the tally of a long run.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphcache import GraphCache

WIDTH = 8
SIZES = 8
TOLERANCE = {
    torch.float64: 1e-6,
    torch.float32: 1e-3,
    torch.float16: 1e-2,
    torch.bfloat16: 3e-2,
}
ROW_BUCKETS = [[2, 4, 8], [3, 8], [1, 6, 12], [8, 16]]
GRIDS = [{"batch": [2, 4], "seq": [4, 8]}, {"batch": [1, 3, 6], "seq": [6, 12]}]
BOTH = {0: "batch", 1: "seq"}

Function = Callable[[Tensor, Tensor], Tensor]  # of what came so far, and the mask


class Part(nn.Module):
    """A function with at most one layer of its own; the name says what it does."""

    def __init__(self, name: str, function: Callable[..., Tensor], layer: nn.Module | None) -> None:
        super().__init__()
        self.name, self.function = name, function
        if layer is not None:
            self.layer = layer

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        return self.function(getattr(self, "layer", None), h, mask)


def _linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def _counted(layer: Any, h: Tensor, mask: Tensor) -> Tensor:
    """State of its own, written in place; its running value is part of the result."""
    layer.add_(1)
    return h + layer


def _attend(h: Tensor, keep: Tensor) -> Tensor:
    scores = (h @ h.transpose(-1, -2)).float() / WIDTH
    weights = scores.masked_fill(~keep, -1e4).softmax(-1).to(h.dtype)
    return h + weights @ h


def _masked_mean(layer: Any, h: Tensor, mask: Tensor) -> Tensor:
    weight = mask.unsqueeze(-1).to(h.dtype)
    return h + ((h * weight).sum(1) / weight.sum(1)).unsqueeze(1)


def _causal(layer: Any, h: Tensor, mask: Tensor) -> Tensor:
    ones = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool, device=h.device)
    return _attend(h, ones.tril())


class Counter(nn.Module):
    """A buffer that acts as a tensor in `_counted`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(WIDTH))

    def add_(self, n: int) -> None:
        self.count.add_(n)

    def __radd__(self, h: Tensor) -> Tensor:
        return h + self.count.to(h.dtype)


Recipe = tuple[str, Callable[..., Tensor], Callable[[], nn.Module] | None]

# Over the last axis only: rows and columns stay apart.
APART: list[Recipe] = [
    ("linear", lambda layer, h, m: layer(h), _linear),
    ("residual", lambda layer, h, m: h + torch.tanh(layer(h)), _linear),
    ("norm", lambda layer, h, m: layer(h), lambda: nn.LayerNorm(WIDTH)),
    ("gelu", lambda layer, h, m: nn.functional.gelu(h), None),
    ("softmax", lambda layer, h, m: h + h.softmax(-1), None),
    ("in place", lambda layer, h, m: h.clone().mul_(2).relu_().add_(h), None),
    ("sorted", lambda layer, h, m: h.sort(-1).values, None),
    ("cumsum", lambda layer, h, m: h + h.cumsum(-1) / WIDTH, None),
    ("halves", lambda layer, h, m: torch.cat(h.chunk(2, -1)[::-1], -1), None),
    ("gated", lambda layer, h, m: h * torch.sigmoid(layer(h)), _linear),
    ("dropout", lambda layer, h, m: layer(h), lambda: nn.Dropout(0.5).eval()),
    ("zero gate", lambda layer, h, m: h + layer(h), lambda: _zeroed(_linear())),
    ("permuted", lambda layer, h, m: h[..., torch.arange(WIDTH, device=h.device).flip(0)], None),
    ("clamped", lambda layer, h, m: h.clamp(-3, 3), None),
    ("counted", _counted, Counter),
]
# Over the sequence, as far as the mask or the order lets them look.
ALONG: list[Recipe] = [
    ("masked mean", _masked_mean, None),
    ("masked attention", lambda layer, h, m: _attend(h, m.unsqueeze(1)), None),
    ("causal attention", _causal, None),
    ("causal sum", lambda layer, h, m: h + h.cumsum(1) / WIDTH, None),
    ("gru", lambda layer, h, m: h + layer(h)[0], lambda: nn.GRU(WIDTH, WIDTH, batch_first=True)),
]
# Over the batch.
MIXING: list[Recipe] = [
    ("centred", lambda layer, h, m: h - h.mean(0), None),
    ("scaled", lambda layer, h, m: h / (h.abs().max() + 1), None),
    ("softmax over the batch", lambda layer, h, m: h + h.softmax(0), None),
    ("rolled", lambda layer, h, m: h + h.roll(1, 0), None),
    ("flipped", lambda layer, h, m: h + h.flip(0), None),
    ("standardised", lambda layer, h, m: h / (h.std(0, correction=0) + 1), None),
    ("relative to the best", lambda layer, h, m: h - h.amax(0), None),
    ("from the last row", lambda layer, h, m: h + h[-1:], None),
    ("gate behind zero", lambda layer, h, m: h + layer(h - h.mean(0)), lambda: _zeroed(_linear())),
]
# Over the sequence, past the mask.
LEAKING: list[Recipe] = [
    ("mean over length", lambda layer, h, m: h - h.mean(1, keepdim=True), None),
    ("flipped length", lambda layer, h, m: h + h.flip(1), None),
    ("attention", lambda layer, h, m: _attend(h, torch.ones_like(m).unsqueeze(1)), None),
    ("from the end", lambda layer, h, m: h + h[:, -1:], None),
    ("two-way", lambda layer, h, m: h + layer(h)[0],
     lambda: nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)),
    ("same convolution",
     lambda layer, h, m: h + layer(h.transpose(1, 2)).transpose(1, 2),
     lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
]  # fmt: skip


def _zeroed(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class Generated(nn.Module):
    """A chain of parts over x: (batch, width), or x: (batch, seq, width) and mask: (batch, seq)."""

    def __init__(self, parts: list[Part], form: str) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.form = form

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        for part in self.parts:
            x = part(x, mask)
        if self.form == "tuple":
            return x, x.mean(-1)
        if self.form == "dict":
            return {"x": x, "peak": x.amax(-1)}
        return x


@dataclass
class Case:
    """One generated module with what is true of it by construction."""

    module: Generated
    sequence: bool
    batch_coupled: bool
    seq_coupled: bool
    noisy: bool

    @property
    def name(self) -> str:
        return " > ".join(part.name for part in self.module.parts)


def make_case(rng: random.Random) -> Case:
    sequence = rng.random() < 0.4
    recipes = rng.choices(APART, k=rng.randint(1, 3))
    if sequence:
        recipes += rng.choices(ALONG, k=rng.randint(0, 2))
    mixing = rng.random() < 0.3
    leaking = sequence and rng.random() < 0.3
    recipes += rng.choices(MIXING, k=1) if mixing else []
    recipes += rng.choices(LEAKING, k=1) if leaking else []
    rng.shuffle(recipes)
    recipes.append(APART[0])  # so that something is computed
    parts = [Part(name, function, make() if make else None) for name, function, make in recipes]
    noisy = rng.random() < 0.1
    if noisy:
        parts.append(Part("noise", lambda layer, h, m: layer(h), nn.Dropout(0.3)))
    module = Generated(parts, rng.choice(["tensor", "tensor", "tuple", "dict"])).eval()
    if noisy:
        module.parts[-1].train()
    return Case(module, sequence, mixing, leaking, noisy)


@dataclass
class Tally:
    """Combinations of module, dtype, mode and size, each compared with eager twice."""

    combinations: int = 0
    mismatches: int = 0
    uncoupled: int = 0
    padded_replays: int = 0
    coupled_modules: int = 0
    couplings_missed: int = 0

    def add(self, other: Tally) -> None:
        for name, count in asdict(other).items():
            setattr(self, name, getattr(self, name) + count)


def close(ours: Any, theirs: Any, dtype: torch.dtype) -> bool:
    """By norm, each tensor of two results."""
    a, b = _tensors(ours), _tensors(theirs)
    return len(a) == len(b) and all(
        _near(p, q, TOLERANCE[dtype]) for p, q in zip(a, b, strict=True)
    )


def _near(p: Tensor, q: Tensor, tolerance: float) -> bool:
    if p.shape != q.shape or p.dtype != q.dtype:
        return False
    gap, size = (p.double() - q.double()).norm(), q.double().norm()
    return bool(gap <= tolerance * size + 1e-6)


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return list(result.values() if isinstance(result, dict) else result)


@contextlib.contextmanager
def mode(name: str, device: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode() if name == "inference" else torch.no_grad())
        if name == "autocast":
            stack.enter_context(torch.autocast(device, torch.bfloat16))
        yield


def try_case(
    case: Case, dtype: torch.dtype, mode_name: str, rng: random.Random, device: str
) -> Tally:
    """One cache over a walk of sizes in random order, twice; each call beside the eager twin."""
    module = copy.deepcopy(case.module).to(device, dtype)
    twin = copy.deepcopy(module)
    buckets: Any = rng.choice(GRIDS if case.sequence else ROW_BUCKETS)
    shapes: Any = {"x": BOTH, "mask": BOTH} if case.sequence else None
    tops = [max(b) for b in buckets.values()] if case.sequence else [max(buckets)]
    sizes = [_sizes(tops, rng) for _ in range(SIZES)]
    cache = GraphCache(module, buckets, dynamic_shapes=shapes)
    used = torch.bfloat16 if mode_name == "autocast" else dtype
    tally = Tally(combinations=len(sizes))
    apart = not (case.batch_coupled or case.seq_coupled)
    with mode(mode_name, device):
        for checked in (False, True):
            for size in sizes:
                args = arguments(case, size, dtype, device)
                before = cache.stats()
                ours = cache(*args)
                if case.noisy:
                    right = repeatable(cache, args, used)
                else:
                    right = close(ours, twin(*args), used) and same_state(module, twin)
                tally.mismatches += not right
                if checked and apart:
                    tally.uncoupled += 1
                    tally.padded_replays += padded_replay(before, cache.stats())
    if not apart:
        tally.coupled_modules = 1
        tally.couplings_missed = missed(case, cache, arguments(case, sizes[0], dtype, device))
    cache._check()
    return tally


def _sizes(tops: list[int], rng: random.Random) -> tuple[int, ...]:
    """One in ten above the largest bucket."""
    beyond = rng.random() < 0.1
    return tuple(rng.randint(1, top * 2 if beyond else top) for top in tops)


def arguments(case: Case, size: tuple[int, ...], dtype: torch.dtype, device: str) -> list[Tensor]:
    """Rows of about unit size, in one layout or another; a ragged mask with at least one entry."""
    x = torch.randn(*size, WIDTH, device=device, dtype=dtype)
    if size[0] % 3 == 0:
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    if not case.sequence:
        return [x]
    lengths = torch.randint(1, size[1] + 1, (size[0],), device=device)
    return [x, torch.arange(size[1], device=device) < lengths[:, None]]


def repeatable(cache: GraphCache, args: list[Tensor], dtype: torch.dtype) -> bool:
    """Equal draws under equal seeds, and others under others, once the size has its graph: a padded
    one draws for its padded rows too, so its draws are not eager's.
    """
    for _ in range(3):
        cache(*args)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(cache(*args))
    return close(runs[0], runs[1], dtype) and not close(runs[0], runs[2], dtype)


def same_state(module: nn.Module, twin: nn.Module) -> bool:
    pairs = zip(module.buffers(), twin.buffers(), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


def padded_replay(before: Any, after: Any) -> bool:
    """Whether the calls between were served by replays alone, of larger sizes than their own."""
    padded = after.padded_elements - before.padded_elements
    real = after.real_elements - before.real_elements
    return after.eager == before.eager and after.captures == before.captures and padded > real


def missed(case: Case, cache: GraphCache, args: list[Tensor]) -> bool:
    """Whether a coupled dim counts as neutral."""
    dims = cache.probe(*args).dims
    return (case.batch_coupled and dims["batch"].neutral) or (
        case.seq_coupled and dims["seq"].neutral
    )


def run(seed: int, modules: int, device: str) -> Tally:
    """A tally of so many modules, in two dtypes and two modes each; the first mismatch raises."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    total = Tally()
    for _ in range(modules):
        case = make_case(rng)
        for dtype in rng.sample(list(TOLERANCE), 2):
            modes = ["no_grad", "inference", *(["autocast"] if dtype is torch.float32 else [])]
            for mode_name in rng.sample(modes, 2):
                tally = try_case(case, dtype, mode_name, rng, device)
                what = f"seed {seed}: {case.name}, {dtype}, {mode_name}: {tally}"
                assert tally.mismatches == 0, what
                assert tally.couplings_missed == 0, what
                total.add(tally)
    return total


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--device", default="cpu")
    options.add_argument("--seeds", type=int, default=13)
    options.add_argument("--modules", type=int, default=5)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    whole = Tally()
    for number in range(chosen.seeds):
        whole.add(run(number, chosen.modules, chosen.device))
    print(json.dumps(asdict(whole) | {"device": chosen.device, "torch": torch.__version__}))
