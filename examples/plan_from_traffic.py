"""Record traffic, plan buckets for it, use them, and start again from the saved plan.

python examples/plan_from_traffic.py [--calls N] [--plan plan.json]
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

import torch

from graphcache import CostModel, GraphCache, plan_buckets

BOTH = {0: "batch", 1: "seq"}
DIMS = {"ids": BOTH, "mask": BOTH}


class Encoder(torch.nn.Module):
    """A small transformer over token ids; the mask is True at real tokens."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(1000, width)
        layer = torch.nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        blocked = torch.where(mask, 0.0, float("-inf"))
        hidden = self.layers(self.embed(ids), src_key_padding_mask=blocked)
        keep = mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * keep).sum(1) / keep.sum(1)


def batches(calls: int, device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches as a service sees them: mostly small and short, sometimes not."""
    rng, made = random.Random(0), []
    for _ in range(calls):
        batch = min(32, 1 + int(rng.expovariate(1 / 5)))
        seq = min(64, 6 + int(rng.lognormvariate(2.4, 0.6)))
        ids = torch.randint(1000, (batch, seq), device=device)
        made.append((ids, torch.ones(batch, seq, dtype=torch.bool, device=device)))
    return made


def serve(cache: GraphCache, stream: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The largest difference from eager, relative to the largest value."""
    worst = 0.0
    with torch.inference_mode():
        for ids, mask in stream:
            eager = cache.module(ids, mask)
            worst = max(worst, float((cache(ids, mask) - eager).abs().max() / eager.abs().max()))
    return worst


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--calls", type=int, default=150)
    options.add_argument("--plan", type=Path, default=Path(tempfile.gettempdir()) / "plan.json")
    arguments = options.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model, stream = Encoder().to(device).eval(), batches(arguments.calls, device)

    by_habit = {"batch": [1, 2, 4, 8, 16, 32], "seq": [8, 16, 32, 64]}
    fast = GraphCache(model, by_habit, dynamic_shapes=DIMS)
    difference = serve(fast, stream)
    print(f"by habit    {fast.stats().padding_overhead:6.1%} padding, {difference:.0e} from eager")

    measured = {"batch": [1, 8, 32], "seq": [8, 32, 64]}
    costs = CostModel.measure(fast, measured, sample=stream[0], progress=False)
    plan = plan_buckets(
        fast.traffic, costs, max_graphs=16, align={"seq": 8}, limits={"batch": 32, "seq": 64}
    )
    print(f"\n{plan}\n\n{plan.compare({'by habit': by_habit})}\n")

    before = fast.stats()
    fast.rebucket(plan)
    difference = serve(fast, stream)
    after = fast.stats()
    padded = after.padded_elements - before.padded_elements
    real = after.real_elements - before.real_elements
    print(f"planned     {padded / real - 1:6.1%} padding, {difference:.0e} from eager")

    plan.save(arguments.plan)
    again = GraphCache(model, str(arguments.plan), dynamic_shapes=DIMS)
    again.warmup(sample=stream[0], progress=False)
    difference = serve(again, stream)
    stats = again.stats()
    print(f"restarted   {stats.padding_overhead:6.1%} padding, {difference:.0e} from eager, "
          f"{stats.warmup_captures} graphs, {stats.eager} eager runs")  # fmt: skip


if __name__ == "__main__":
    main()
