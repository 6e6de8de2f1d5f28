"""Code that looks at sizes: branches on them, lengths beside them, masks indexed by them."""

import pytest
import torch
from zoo import ELSEWHERE

from graphcache import GraphCache

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def no_grad():
    with torch.inference_mode():
        yield


def above(limit):
    """Other values above a size: as `if x.shape[0] > 1: y = self.norm(y)`."""
    return lambda x: x * 3 if x.shape[0] > limit else x * 2


def serves(cache, function, *calls):
    for call in calls:
        torch.testing.assert_close(cache(*call), function(*call))


@pytest.mark.parametrize("verify", ["capture", 1.0])
@pytest.mark.parametrize("buckets", [[1, 4, 8], [4, 8], [8]])
def test_a_branch_on_size_one_is_seen_by_the_probe(buckets, verify):
    """By padding and by pieces of one row."""
    branch = above(1)
    cache = GraphCache(branch, buckets, verify=verify)
    serves(cache, branch, *((torch.ones(n, 1),) for n in (9, 3, 1, 17, 1, 2, 16, 24)))
    assert set(cache.stats().fallbacks) <= {"over-max", "unsupported-output"}
    assert cache.stats().splits == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 2)[:, :4],
        lambda x: torch.nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 4)),
        lambda x: x / min(4, x.shape[1]),
        lambda x: x[:, -4:],
        lambda x: x * torch.full((1,), min(4.0, x.shape[1]), device=x.device),
    ],
    ids=["at most 4", "multiples of 4", "by at most 4", "the last 4", "a number up to 4"],
)
@pytest.mark.parametrize("first", [4, 8, 10])
def test_a_result_that_follows_a_size_in_part_only(function, first, device):
    """Linear between the sizes of the probe and of the first call, and not below them."""
    cache = GraphCache(
        function, {"b": [4], "s": [8, 16]}, dynamic_shapes=({0: "b", 1: "s"},), backend="auto"
    )
    x = torch.randn(3, 16, 5, device=device)
    for n in (first, 1, 2, 3, 5, 4, 7, 8, 9, 13):
        torch.testing.assert_close(cache(x[:, :n]), function(x[:, :n]))


def test_a_plain_value_that_follows_a_size_in_part_only():
    """Of the same type and value at both sizes of the probe."""
    cache = GraphCache(lambda x: (x * 2, min(4, len(x))), [8])
    for n in (5, 6, 3, 2):
        assert cache(torch.ones(n, 4))[1] == min(4, n)


def test_a_size_that_the_module_refuses_is_refused():
    """What eager raises at some sizes of a bucket is raised, though the graph would serve them."""
    cache = GraphCache(
        lambda x: x * x[:, 5:6], {"b": [4], "s": [8]}, dynamic_shapes=({0: "b", 1: "s"},)
    )
    for n in (8, 7, 3, 6, 2):
        x = torch.randn(3, n)
        if n > 5:
            torch.testing.assert_close(cache(x), x * x[:, 5:6])
        else:
            with pytest.raises(RuntimeError):
                cache(x)


def test_a_branch_above_every_bucket_shows_at_the_first_cut():
    """Each piece takes the branch of small sizes, and the whole call the other."""
    branch = above(8)
    cache = GraphCache(branch, [4, 8])
    serves(cache, branch, *((torch.ones(n, 1),) for n in (3, 5, 9, 17, 8, 9)))
    assert cache.stats().fallbacks == {"over-max": 3}
    assert "differs from eager" in cache.explain(torch.ones(9, 1)).detail


def test_a_shadowed_call_that_differs_is_answered_by_eager():
    """A number of another module is frozen, which nothing else finds. Counted once, not as a
    replay.
    """
    ELSEWHERE.scale = 2.0

    def scaled(x):
        return x * ELSEWHERE.scale

    cache = GraphCache(scaled, [8, 16], verify=1.0)
    serves(cache, scaled, (torch.ones(7, 1),), (torch.ones(5, 1),), (torch.ones(20, 1),))
    ELSEWHERE.scale = 3.0
    serves(cache, scaled, *((torch.ones(n, 1),) for n in (20, 7, 7, 20)))
    stats = cache.stats()
    assert stats.fallbacks == {"verify-mismatch": 4}
    assert (stats.calls, stats.splits, stats.eager) == (7, 1, 4)
    assert stats.captures + stats.replays + stats.eager == stats.calls + 1


def pooled(h, n):
    """A mean over lengths, with no mask but what the lengths say."""
    keep = torch.arange(h.shape[1], device=h.device)[None] < n[:, None]
    return (h * keep[..., None]).sum(1) / n[:, None]


def with_lengths(batch, seq):
    n = torch.randint(1, seq + 1, (batch,))
    n[0] = seq
    return torch.randn(batch, seq, 3), n


@pytest.mark.parametrize("first", [4, 5, 6, 8, 12, 16])
def test_lengths_beside_a_padded_dim_may_fill_it(first):
    """Whatever the first call was: the probe cuts the lengths along with the rows."""
    both = {"h": {0: "batch", 1: "seq"}, "n": {0: "batch"}}
    buckets = {"batch": [2, 4], "seq": [8, 16]}
    cache = GraphCache(pooled, buckets, dynamic_shapes=both)
    calls = [with_lengths(b, s) for s in (first, 3, 7, 13, 16) for b in (1, 3, 2)]
    serves(cache, pooled, *calls)
    assert cache.stats().eager == 0


def test_lengths_are_warmed_up_at_every_bucket():
    both = {"h": {0: "batch", 1: "seq"}, "n": {0: "batch"}}
    cache = GraphCache(pooled, {"batch": [2, 4], "seq": [8, 16]}, dynamic_shapes=both)
    cache.warmup(sample=with_lengths(1, 12), progress=False)
    assert cache.stats().graphs == 4
    serves(cache, pooled, with_lengths(3, 13))
    assert cache.stats().replays == 1


def indexed(x, mask):
    """As masks are built in transformers: by an index of the batch's own length."""
    return x * mask[torch.arange(x.shape[0])]


def test_a_mask_indexed_by_the_batch_follows_it():
    """Cut to fewer rows of x it still works, so only more rows tell that it must grow along."""
    cache = GraphCache(indexed, [4, 8])
    serves(cache, indexed, *((torch.randn(n, 2), torch.rand(n, 2)) for n in (3, 5, 2, 8)))
    assert cache.stats().eager == 0
    assert cache.stats().graphs == 2


def test_a_table_of_the_batchs_length_is_left_alone():
    """Indexed by values, it is as long by chance."""

    def looked_up(index, table):
        return table[index]

    cache = GraphCache(looked_up, [4, 8])
    table = torch.randn(3, 2)
    serves(cache, looked_up, *((torch.randint(3, (n,)), table) for n in (3, 2, 7, 1)))
    assert cache.stats().eager == 0


@pytest.mark.parametrize("sizes", [((7, 64), (2, 30), (7, 60)), ((2, 30), (7, 60), (7, 64))])
def test_a_module_that_takes_no_small_sizes_is_probed_at_a_large_one(sizes):
    conv = torch.nn.Conv1d(4, 4, 9)
    dims = {"input": {0: "batch", 2: "time"}}
    cache = GraphCache(conv, {"batch": [2, 8], "time": [4, 16, 64]}, dynamic_shapes=dims)
    for batch, time in sizes:
        x = torch.randn(batch, 4, time)
        torch.testing.assert_close(cache(x), conv(x))
    assert cache.stats().eager == 0
