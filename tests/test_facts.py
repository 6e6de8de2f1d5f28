"""What trial runs teach about a signature: refusals, followers of the batch, facts by dim."""

import pytest
import torch
from torch import nn

from graphcache import GraphCache
from graphcache.call import Binder, Call, Reading
from graphcache.dims import DynamicDims
from graphcache.facts import Facts, Learner
from graphcache.graphs.recorded import RecordedBackend
from graphcache.modes import Modes
from graphcache.padding import OutputAxis
from graphcache.probe import DimFacts
from graphcache.reasons import Reason

CPU = torch.device("cpu")


def learn(function, *args):
    """A learner for a function, and its reading of a call."""
    binder = Binder(function)
    reading = Reading(
        Call(binder, args, {}), DynamicDims(None, binder.parameters), {}, Modes(CPU), False, 0
    )
    return Learner(function, None, RecordedBackend(), {}, False, Modes(CPU)), reading


class TestFollowers:
    """Which other tensors of equal length follow the batch (design, 2.1)."""

    @pytest.mark.parametrize(
        ("function", "others", "follows"),
        [
            (lambda x, y: x + y, [torch.randn(6, 3)], {"y": True}),
            (lambda x, y: x * y[:, None], [torch.randn(6)], {"y": True}),
            (lambda x, table: x @ table.T, [torch.randn(6, 3)], {"table": False}),
            (lambda x, table: table[x[:, 0].long() % 2] + x, [torch.randn(6, 3)], {"table": False}),
            (lambda x, y: (x * 2, y * 2), [torch.randn(6, 3)], {"y": True}),
            (lambda x, y: torch.cat([x, y], 1), [torch.randn(6, 3)], {"y": True}),
            (lambda x, m: x.masked_fill(m[:, None], 0), [torch.rand(6) > 0.5], {"m": True}),
            (
                lambda x, y, table: (x + y) @ table.T,
                [torch.randn(6, 3), torch.randn(6, 3)],
                {"y": True, "table": False},
            ),
        ],
    )
    def test_each_tensor_of_equal_length_is_told_apart(self, function, others, follows):
        """Rows that go with the batch, and tables that have its length by chance."""
        learner, reading = learn(function, torch.randn(6, 3), *others)
        assert reading.candidates == list(follows)
        assert learner.followers(reading) == follows

    @pytest.mark.parametrize("n", [1, 2, 3])
    def test_short_batches_are_told_apart_as_well(self, n):
        """No axis of length 1 may broadcast the answer away."""
        learner, reading = learn(lambda x, y: x + y, torch.randn(n, 3), torch.randn(n, 3))
        assert learner.followers(reading) == {"y": True}
        learner, reading = learn(lambda x, t: x @ t.T, torch.randn(n, 3), torch.randn(n, 3))
        assert learner.followers(reading) == {"t": False}

    def test_a_table_of_equal_length_by_chance_is_never_padded_into_the_answer(self):
        """Through the cache, at sizes where the lengths are equal and where they are not."""
        cache = GraphCache(lambda x, table: x @ table.T, [4, 16])
        for n, m in ((6, 6), (6, 6), (5, 6), (16, 16), (3, 7)):
            x, table = torch.randn(n, 3), torch.randn(m, 3)
            torch.testing.assert_close(cache(x, table), x @ table.T)

    def test_followers_are_settled_once_by_argument_name(self):
        """After equal lengths once, an unequal length is static, and results stay right."""
        cache = GraphCache(lambda x, y: x + y, [4, 8])
        for n, m in ((3, 3), (5, 5), (3, 1), (1, 1), (8, 8)):
            x, y = torch.randn(n, 2), torch.randn(m, 2)
            torch.testing.assert_close(cache(x, y), x + y)


class TestFirstLook:
    def test_an_ordinary_module_is_not_refused(self):
        """Nothing drawn, written or aliased."""
        learner, reading = learn(lambda x: x * 2, torch.randn(3, 2))
        facts, reads = learner.first_look(reading)
        assert facts == Facts()
        assert reads == []

    @pytest.mark.parametrize(
        ("function", "reason"),
        [
            (lambda x: x * x.sum().item(), Reason.HOST_SYNC),
            (lambda x: x[x > 0], Reason.DYNAMIC_OUTPUT),
            (lambda x: x.add_(1) * 2, Reason.INPUT_MUTATED),
            (lambda x: x[:, :1], Reason.UNSUPPORTED_OUTPUT),
        ],
    )
    def test_what_a_capture_could_not_hold_is_refused_for_good(self, function, reason):
        """With its reason, and the caller's tensor is as it was."""
        x = torch.ones(3, 2)
        learner, reading = learn(function, x)
        facts, _ = learner.first_look(reading)
        assert facts.refused.reason == reason
        assert torch.equal(x, torch.ones(3, 2))

    def test_draws_writes_and_aliases_are_noted(self):
        """They forbid splitting."""
        total = torch.zeros(2)
        for function, name in (
            (lambda x: x + torch.rand(2), "draws"),
            (lambda x: total.add_(x.sum(0)) * x, "writes"),
            (lambda x: (x, x * 2), "aliases"),
        ):
            learner, reading = learn(function, torch.randn(3, 2))
            facts, _ = learner.first_look(reading)
            noted = {n for n in ("draws", "writes", "aliases") if getattr(facts, n)}
            assert noted == {name}
            assert facts.refused is None

    def test_the_modules_own_error_passes_through(self):
        """Eager raises it to the caller."""
        learner, reading = learn(lambda x: x @ torch.ones(7, 1), torch.randn(3, 2))
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            learner.first_look(reading)

    def test_a_module_that_always_refuses_is_tried_once(self):
        """Later calls do not run trials again: the module runs once a call."""
        calls = []

        class Peek(nn.Module):
            def forward(self, x):
                calls.append(1)
                return x * x.sum().item()

        cache = GraphCache(Peek(), [4])
        x = torch.ones(3, 2)
        cache(x)
        first = len(calls)
        for _ in range(3):
            cache(x)
        assert len(calls) == first + 3
        assert cache.stats().fallbacks == {"host-sync": 4}


class TestFacts:
    COUPLED = DimFacts(False, "coupled", Reason.BATCH_COUPLED)

    def test_before_a_probe_every_dim_may_be_padded(self):
        """And none may be split."""
        facts = Facts()
        assert facts.unpadded((3, 4)) == frozenset()
        assert not facts.splittable(0)
        assert facts.axes() == []
        assert facts.fills(2) == [{}, {}]

    def test_dims_that_are_not_neutral_or_too_small_keep_their_size(self):
        """By call."""
        facts = Facts(dims=(self.COUPLED, DimFacts(True, smallest=2)))
        assert facts.unpadded((3, 4)) == {0}
        assert facts.unpadded((3, 1)) == {0, 1}
        assert facts.why_unpadded(0).reason == Reason.BATCH_COUPLED
        assert facts.why_unpadded(1).reason == Reason.UNSUPPORTED_OUTPUT

    def test_axes_and_fills_are_gathered_over_the_dims(self):
        """Each output is cut along every dim it follows; each input filled by dim."""
        rows, columns = OutputAxis(0, 0, 1, 0), OutputAxis(1, 1, 1, 0)
        facts = Facts(
            dims=(
                DimFacts(True, axes=[[rows], []], fills={0: 0}),
                DimFacts(True, axes=[[columns], []], fills={0: "repeat", 1: 1}),
            )
        )
        assert facts.axes() == [[rows, columns], []]
        assert facts.fills(3) == [{0: 0, 1: "repeat"}, {1: 1}, {}]
