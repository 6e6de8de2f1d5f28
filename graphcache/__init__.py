"""CUDA graphs for variable shapes, for any PyTorch module, never silently wrong.

`GraphCache(module, buckets=[8, 16, 32])(x)` returns what `module(x)` returns, usually by one graph
replay.
"""

from graphcache.checking import Report, check
from graphcache.errors import BucketError, CaptureError, GraphCacheError
from graphcache.planning.cost import CostModel
from graphcache.planning.plan import Plan
from graphcache.planning.planner import plan_buckets
from graphcache.planning.profile import TrafficProfile
from graphcache.reasons import Reason
from graphcache.runtime import GraphCache
from graphcache.stats import Stats
from graphcache.version import __version__

__all__ = [
    "BucketError",
    "CaptureError",
    "CostModel",
    "GraphCache",
    "GraphCacheError",
    "Plan",
    "Reason",
    "Report",
    "Stats",
    "TrafficProfile",
    "__version__",
    "check",
    "plan_buckets",
]
