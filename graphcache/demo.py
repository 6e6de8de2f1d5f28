"""The demo: an encoder of MiniLM's shape serves a stream of batches, eagerly and by GraphCache.

Sizes are real or resemble an embedding service's; weights are random, which changes neither time
nor behaviour. On a CPU the recorder stands in for CUDA graphs, so the times there say nothing about
a GPU.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphcache.errors import GraphCacheError
from graphcache.planning.profile import read_sizes
from graphcache.runtime import GraphCache
from graphcache.stats import Stats

DIMS = ("batch", "seq")
ROWS = {"cpu": 16, "cuda": 1000}  # about 20 s on two cores; a GPU's calls take a few ms
VOCABULARY, POSITIONS, HIDDEN, LAYERS, HEADS, INTERMEDIATE = 30522, 512, 384, 6, 12, 1536
SEED = 0

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class DemoReport:
    """What one run of the demo measured.

    Times per call are medians over the stream's calls, each waited for, after every bucket was
    captured and every call made twice. Counts are those of the cache over all three passes,
    `captures` with those of its warmup. `largest_relative_difference` is the largest
    norm(fast - eager) / norm(eager) of a call, `largest_difference` the largest of an element.
    """

    backend: str
    device: str
    dtype: str
    stream: str
    calls_in_stream: int
    distinct_sizes: int
    buckets: dict[str, list[int]]
    eager_ms: float
    graphcache_ms: float
    warmup_seconds: float
    first_pass_seconds: float
    padding_overhead: float
    graphs: int
    captures: int
    replays: int
    eager_runs: int
    fallbacks: dict[str, int]
    graph_bytes: int
    largest_relative_difference: float
    largest_difference: float


class Layer(nn.Module):
    """One encoder layer, normalised after each half as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.attended = nn.LayerNorm(HIDDEN)
        self.wide, self.narrow = nn.Linear(HIDDEN, INTERMEDIATE), nn.Linear(INTERMEDIATE, HIDDEN)
        self.done = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        """Take x: (batch, seq, hidden) and bool keep: (batch, 1, 1, seq); return the like of x."""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        x = self.attended(x + self.out(attention.transpose(1, 2).flatten(2)))
        result: Tensor = self.done(x + self.narrow(F.gelu(self.wide(x))))
        return result


class Encoder(nn.Module):
    """Map ids and mask, both (batch, seq), to sentence embeddings (batch, 384) of norm 1.

    Args:
        positions: the longest sequence.
    """

    def __init__(self, positions: int = POSITIONS) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Embedding(positions, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x: Tensor = self.norm(self.tokens(ids) + self.positions.weight[: ids.shape[1]])
        keep = mask.bool()
        for layer in self.layers:
            x = layer(x, keep[:, None, None])
        weights = mask[..., None].to(x.dtype)
        mean = (x * weights).sum(1) / weights.sum(1).clamp(min=1)
        return F.normalize(mean, dim=-1)


def run(
    trace: str | Path | None = None, rows: int | None = None, progress: bool = False
) -> DemoReport:
    """Serve the stream and measure, on the CUDA device if there is one, else on the CPU.

    Buckets are powers of two in both dims; those that the stream uses are captured ahead.

    Args:
        trace: a CSV file with the columns batch and seq, one call a row; None: a built-in stream.
        rows: how many calls at most; None: what takes about half a minute.
        progress: show a progress bar of the captures.

    Raises:
        GraphCacheError: a trace that cannot be read or holds no call.

    Example:
        >>> run(rows=1).fallbacks
        {}
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = rows or ROWS[device.type]
    sizes = service_sizes(rows) if trace is None else _trace_sizes(trace, rows)
    used = {(_power(1, batch), _power(8, seq)) for batch, seq in sizes}
    buckets = {dim: sorted({corner[i] for corner in used}) for i, dim in enumerate(DIMS)}
    encoder = _encoder(device, buckets["seq"][-1])
    shapes = {name: dict(enumerate(DIMS)) for name in ("ids", "mask")}
    cache = GraphCache(encoder, buckets=buckets, dynamic_shapes=shapes)
    batches = _batches(sizes, device)
    with torch.inference_mode():
        warmup = _seconds(lambda: _warm(cache, used, batches, progress))
        measured = _measure(encoder, cache, batches)
    return DemoReport(
        **_machine(device),
        stream=str(trace or "built-in"),
        calls_in_stream=len(sizes),
        distinct_sizes=len(set(sizes)),
        buckets=buckets,
        warmup_seconds=warmup,
        **measured,
        **_counts(cache.stats()),
    )


def service_sizes(rows: int) -> list[tuple[int, int]]:
    """Draw sizes like an embedding service's: batch 1 to 32, median 7; seq 6 to 98, median 27.

    Example:
        >>> len(service_sizes(5))
        5
    """
    rng = random.Random(SEED)

    def draw(centre: float, low: int, high: int) -> int:
        return min(high, max(low, round(centre * rng.lognormvariate(0, 0.5))))

    return [(draw(7, 1, 32), draw(27, 6, 98)) for _ in range(rows)]


def _trace_sizes(trace: str | Path, rows: int) -> list[tuple[int, int]]:
    sizes = [(batch, seq) for batch, seq in itertools.islice(read_sizes(trace, DIMS), rows)]
    if not sizes:
        raise GraphCacheError(f"{trace}: no rows; pass a CSV file with one call a row.")
    return sizes


def _power(first: int, size: int) -> int:
    """The first of `first` and its doubles that holds `size`."""
    while first < size:
        first *= 2
    return first


def _encoder(device: torch.device, longest: int) -> Encoder:
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        encoder = Encoder(max(POSITIONS, longest))
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    return encoder.eval().to(device, dtype)


def _batches(sizes: Sequence[tuple[int, int]], device: torch.device) -> list[Batch]:
    """Random ids under ragged masks: the first row is full, the others are half to wholly full."""
    generator = torch.Generator().manual_seed(SEED)
    batches = []
    for batch, seq in sizes:
        lengths = torch.randint((seq + 1) // 2, seq + 1, (batch, 1), generator=generator)
        lengths[0] = seq
        mask = (torch.arange(seq) < lengths).long()
        ids = torch.randint(1, VOCABULARY, (batch, seq), generator=generator) * mask
        batches.append((ids.to(device), mask.to(device)))
    return batches


def _warm(
    cache: GraphCache, used: set[tuple[int, int]], batches: list[Batch], progress: bool
) -> None:
    """Probe a small call first: warmup would at the largest bucket, some 30 runs, 20 s on a CPU."""
    cache.probe(*min(batches, key=lambda batch: batch[0].numel()))
    cache.warmup(used, batches[0], progress)


def _measure(encoder: Encoder, cache: GraphCache, batches: list[Batch]) -> dict[str, Any]:
    """Serve every call once, compare it with eager, then time both on it, in turns."""
    first_pass = sum(_seconds(cache, *batch) for batch in batches)
    pairs = [(encoder(*batch).float(), cache(*batch).float()) for batch in batches]
    times = [(_seconds(encoder, *batch), _seconds(cache, *batch)) for batch in batches]
    return {
        "first_pass_seconds": first_pass,
        "eager_ms": 1e3 * median(eager for eager, _ in times),
        "graphcache_ms": 1e3 * median(fast for _, fast in times),
        "largest_relative_difference": _largest((f - e).norm() / e.norm() for e, f in pairs),
        "largest_difference": _largest((f - e).abs().max() for e, f in pairs),
    }


def _largest(differences: Iterable[Tensor]) -> float:
    """By torch, whose maximum keeps a NaN; Python's may lose it."""
    return float(torch.stack(list(differences)).max())


def _seconds(call: Callable[..., object], *args: Tensor) -> float:
    _wait()
    started = time.perf_counter()
    call(*args)
    _wait()
    return time.perf_counter() - started


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _machine(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return {"backend": "cuda", "device": name, "dtype": "float16"}
    return {"backend": "recorded", "device": "CPU", "dtype": "float32"}


def _counts(stats: Stats) -> dict[str, Any]:
    return {
        "padding_overhead": stats.padding_overhead,
        "graphs": stats.graphs,
        "captures": stats.captures + stats.warmup_captures,
        "replays": stats.replays,
        "eager_runs": stats.eager,
        "fallbacks": {str(reason): count for reason, count in stats.fallbacks.items()},
        "graph_bytes": stats.graph_bytes,
    }
