"""Shadow runs by eager."""

import pytest
import torch
from torch import nn
from zoo import ELSEWHERE

from graphcache import GraphCache
from graphcache.reasons import Reason
from graphcache.shadow import Shadow

X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def test_about_the_share_of_calls_is_shadowed():
    """All at 1, none at 0, a quarter at 0.25; the draws leave the user's generators alone."""
    before = torch.get_rng_state()
    assert sum(Shadow(1.0).due() for _ in range(50)) == 50
    assert sum(Shadow(0.0).due() for _ in range(50)) == 0
    shadow = Shadow(0.25)
    assert 200 < sum(shadow.due() for _ in range(1000)) < 300
    assert torch.equal(torch.get_rng_state(), before)


def test_an_equal_result_is_no_mismatch():
    """Within the norms."""
    assert Shadow(1.0).run(lambda x: x * 2, X * 2, (X,), {}) is None
    assert Shadow(1.0).run(lambda x: [x * 2, 1], [X * 2, 1], (X,), {}) is None


@pytest.mark.parametrize(
    "result", [X * 3, X, [X * 2], (X * 2).double(), torch.full((2, 2), float("nan"))]
)
def test_another_value_structure_or_dtype_is_a_mismatch(result):
    """`verify-mismatch`, with the shapes."""
    mismatch = Shadow(1.0).run(lambda x: x * 2, result, (X,), {})
    assert mismatch.reason == Reason.VERIFY_MISMATCH
    assert "(2, 2)" in mismatch.detail


class Stale(nn.Module):
    """Multiplies by what no watch sees."""

    def forward(self, x):
        return x * ELSEWHERE.scale


def test_a_key_whose_shadow_differs_is_quarantined(caplog):
    """It and later calls run eagerly with `verify-mismatch`, so they are right; it is logged."""
    ELSEWHERE.scale = 1.0
    cache = GraphCache(Stale(), [4], verify=1.0)
    cache(X)
    ELSEWHERE.scale = 5.0
    for _ in range(3):
        torch.testing.assert_close(cache(X), X * 5)
    stats = cache.stats()
    assert "verify-mismatch" in caplog.text
    assert stats.fallbacks == {"verify-mismatch": 3}
    assert stats.graphs == 0
    assert stats.captures + stats.replays + stats.eager == stats.calls == 4


def test_shadow_runs_are_counted_nowhere():
    """calls = captures + replays + eager, as without them."""
    cache = GraphCache(nn.Linear(2, 2).eval(), [4], verify=1.0)
    with torch.no_grad():
        for _ in range(3):
            cache(X)
    stats = cache.stats()
    assert (stats.calls, stats.captures, stats.replays, stats.eager) == (3, 1, 2, 0)


def test_modules_that_draw_or_write_are_not_shadowed():
    """A second run would change what they are."""
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5)).train()
    cache = GraphCache(module, [2], verify=1.0)
    with torch.no_grad():
        for _ in range(3):
            cache(X)
    assert module[0].num_batches_tracked == 3
    assert "verify-mismatch" not in cache.stats().fallbacks
