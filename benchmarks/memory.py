"""How much memory do the graphs of ResNet-50 add, and does eviction leak?

python -m benchmarks.memory [--out FILE]
fp16, channels_last, 224 x 224, graphs for batches 1, 2, 4, 8, 16, 32; reserved memory after
`empty_cache()`. Then 200 rounds of eviction and recapture between two buckets.
"""

from __future__ import annotations

import torch

from benchmarks.record import parser, write
from graphcache import GraphCache
from graphcache.compare import close

BATCHES = [1, 2, 4, 8, 16, 32]
MIB = 2**20


def reserved() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def main() -> None:
    import torchvision

    options = parser(__doc__ or "").parse_args()
    torch.manual_seed(0)
    module = (
        torchvision.models.resnet50().eval().cuda().half().to(memory_format=torch.channels_last)
    )
    image = torch.randn(32, 3, 224, 224, device="cuda", dtype=torch.half).to(
        memory_format=torch.channels_last
    )
    results = {}
    with torch.no_grad():
        module(image)
        before = reserved()
        cache = GraphCache(module, buckets=BATCHES)
        cache.warmup(sample=image, progress=False)
        added = reserved() - before
        results["graphs"] = cache.stats().graphs
        results["added_MiB"] = round(added / MIB, 1)
        results["graph_bytes_MiB"] = round(cache.stats().graph_bytes / MIB, 1)
        results["equal_to_eager"] = all(
            close(cache(image[:n]), module(image[:n])) for n in (1, 3, 7, 20, 32)
        )
        results["fallbacks"] = cache.stats().fallbacks
        cache.reset()
        small = GraphCache(torch.nn.Linear(256, 256).cuda().eval(), buckets=[8, 64], max_graphs=1)
        x = torch.randn(64, 256, device="cuda")
        levels = []
        for _ in range(200):
            small.warmup([8], sample=x[:8], progress=False)
            small.warmup([64], sample=x, progress=False)
            levels.append(reserved())
        stats = small.stats()
        results["rounds"] = {
            "captures": stats.warmup_captures,
            "evictions": stats.evictions,
            "growth_bytes_after_first_5": levels[-1] - levels[4],
        }
    write("memory", options, results)


if __name__ == "__main__":
    main()
