"""Bugs planted in the package, one at a time: a check of the kind used in these tests must fail on
each.

So the tests themselves are tested. Every check passes on the package as it is, and raises
AssertionError on the package with the bug.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import BY_NAME, Twin, assert_cut_same, assert_same, padded

from graphcache import (
    GraphCache,
    callplan,
    capture,
    facts,
    generators,
    miss,
    preflight,
    serving,
)
from graphcache.buckets import BucketSet
from graphcache.callplan import CallPlan
from graphcache.capture import Capturer
from graphcache.facts import Facts, Learner
from graphcache.modes import Modes
from graphcache.probe import DimFacts, Probe
from graphcache.serving import Server
from graphcache.signature import Plain
from graphcache.splitting import SplitPlan
from graphcache.stats import Ledger
from graphcache.store import GraphStore
from graphcache.watch import Watch

Check = Callable[[], None]
Plant = Callable[[pytest.MonkeyPatch], None]


# Checks: small, deterministic, each of one promise.


def calls(name: str, *sizes: Any, **options: Any) -> Twin:
    member = BY_NAME[name]
    options.setdefault("buckets", member.buckets)
    twin = Twin(GraphCache(member.build("cpu"), dynamic_shapes=member.dynamic_shapes, **options))
    for size in sizes:
        args, kwargs = member.arguments("cpu", *(size if isinstance(size, tuple) else (size,)))
        twin(*args, **kwargs)
    return twin


def smaller_calls_after_larger_ones() -> None:
    """Tails hold their fill, whatever was there before."""
    calls("attention", (4, 8), (3, 5), (4, 8), (3, 5), (4, 8), (4, 7))


def old_results_are_held() -> None:
    """By `Twin`, which keeps every result to the end."""
    calls("mlp", 8, 7, 8, 6, 3, 4)


def sizes_of_results() -> None:
    calls("many_to_many", 3, 5, 8, 1)


def several_inputs() -> None:
    calls("many_to_many", 3, 4)
    calls("nested", 3, 4)


def bits_of_the_padded_run() -> None:
    """Bitwise equal to eager on the padded input."""
    member = BY_NAME["mlp"]
    cache = GraphCache(member.build("cpu"), [8])
    for n in (8, 3, 5):
        args, kwargs = member.arguments("cpu", n)
        longer, named = padded(member, args, kwargs, (n,), (8,))
        assert_cut_same(cache(*args, **kwargs), cache.module(*longer, **named))


def weights_swapped_while_the_old_ones_live() -> None:
    twin = calls("mlp", 3)
    for module in (twin.cache.module, twin.eager):
        module.old = module[0].weight.data
        module[0].weight.data = torch.ones_like(module[0].weight)
    twin(torch.randn(3, 4))


def training_flags_flipped() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    twin = Twin(GraphCache(module.eval(), [8]))
    for mode in (False, True, False, True):
        twin.cache.train(mode)
        twin.eager.train(mode)
        twin(torch.randn(8, 4))


def batch_statistics_padded() -> None:
    twin = Twin(GraphCache(Centred(), [8]))
    for n in (8, 5, 2, 8, 5):
        twin(torch.randn(n, 3))


def statistics_written() -> None:
    """Running statistics advance once a call."""
    twin = Twin(GraphCache(nn.BatchNorm1d(3).train(), [8]))
    for n in (8, 8, 5, 8):
        twin(torch.randn(n, 3))
        assert_same(twin.cache.module.state_dict(), twin.eager.state_dict())


def draws_repeat() -> None:
    """The draws after a capturing call are those after an eager one."""
    module, after = nn.Dropout(0.5).train(), []
    for call in (module, GraphCache(module, [8])):
        torch.manual_seed(2)
        after.append((call(torch.ones(8, 4)), torch.rand(4)))
    assert_same(after[0], after[1])


def plain_arguments_vary() -> None:
    twin = Twin(GraphCache(Scaled(), [4]))
    for k in (1, 2.5, True, 1, 1.0, 2.5):
        twin(torch.arange(6).view(3, 2), k)


def autocast_varies() -> None:
    cache = GraphCache(BY_NAME["mlp"].build("cpu"), [4])
    for enabled in (False, True, False):
        x = torch.randn(3, 4)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert_same(cache(x), cache.module(x))


def calls_above_every_bucket() -> None:
    calls("mlp", 20, 17, 9)
    calls("many_to_many", 21)


def graphs_evicted() -> None:
    calls(
        "mlp", *(1, 2, 4, 8, 8, 8, 2, 2, 2, 2, 4, 4, 4, 4, 4, 1), max_graphs=1, buckets=[1, 2, 4, 8]
    )


def inputs_of_full_buckets() -> None:
    """An input that fits exactly is still the caller's."""
    member = BY_NAME["mlp"]
    cache = GraphCache(member.build("cpu"), [4])
    first = torch.randn(4, 4)
    before = first.clone()
    for x in (first, torch.randn(4, 4)):
        assert_same(cache(x), cache.module(x))
    assert torch.equal(first, before)


def tables_of_equal_length() -> None:
    class Near(nn.Module):
        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return (x @ table.T).softmax(-1)

    twin = Twin(GraphCache(Near(), [4]))
    for n in (3, 4, 2):
        twin(torch.randn(n, 2), torch.randn(3, 2))


def hooks_added() -> None:
    twin = calls("mlp", 3)
    for module in (twin.cache.module, twin.eager):
        module[0].register_forward_hook(lambda layer, args, result: result * 3)
    twin(torch.randn(3, 4))


def lists_of_results() -> None:
    calls("nested", 3, 4, 2)
    calls("model_output", 3, 4)
    calls("dataclass", 3, 4)


def gradients_asked_for() -> None:
    cache = GraphCache(BY_NAME["mlp"].build("cpu"), [4])
    x = torch.randn(3, 4)
    with torch.enable_grad():
        assert_same(cache(x), cache.module(x))


def sealed() -> None:
    cache = GraphCache(BY_NAME["mlp"].build("cpu"), [2, 4])
    cache(torch.randn(2, 4))
    cache.seal()
    cache(torch.randn(4, 4))
    assert cache.stats().captures == 1


def layouts_vary() -> None:
    cache = GraphCache(BY_NAME["mlp"].build("cpu"), [4])
    for x in (torch.randn(3, 4), torch.randn(4, 3).t(), torch.randn(1, 4).expand(3, 4)):
        assert_same(cache(x), cache.module(x))


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Scaled(nn.Module):
    def forward(self, x: Tensor, k: Any) -> Tensor:
        return x * k


# Bugs.


def refill_not_done(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(callplan, "tails", lambda *args: [])


def refill_only_once(patch: pytest.MonkeyPatch) -> None:
    """As if no other call had ever written to the static inputs."""
    original = CallPlan.fill

    def fill(self: CallPlan, leaves: Any) -> None:
        if getattr(self, "filled", False):
            self.entry.filled_for = self
        original(self, leaves)
        self.filled = True

    patch.setattr(CallPlan, "fill", fill)


def refill_with_the_wrong_value(patch: pytest.MonkeyPatch) -> None:
    original = Facts.fills

    def fills(self: Facts, count: int) -> Any:
        turned = {0: 1}
        return [{d: turned.get(f, f) for d, f in found.items()} for found in original(self, count)]

    patch.setattr(Facts, "fills", fills)


def outputs_not_cloned(patch: pytest.MonkeyPatch) -> None:
    original = CallPlan.__init__

    def init(self: CallPlan, *args: Any) -> None:
        original(self, *args)
        self._give = lambda view: view

    patch.setattr(CallPlan, "__init__", init)


def without_the_check_of_the_graph(patch: pytest.MonkeyPatch) -> None:
    """It would refuse the graph, and eager would answer right."""
    patch.setattr(Capturer, "check", lambda self, entry, facts: None)


def outputs_not_cut(patch: pytest.MonkeyPatch) -> None:
    without_the_check_of_the_graph(patch)
    patch.setattr(callplan, "cut", lambda output, axes, sizes: output)


def outputs_cut_at_the_wrong_end(patch: pytest.MonkeyPatch) -> None:
    without_the_check_of_the_graph(patch)

    def cut(output: Tensor, axes: Any, sizes: Any) -> Tensor:
        for axis, dim, scale, offset in axes:
            size = scale * sizes[dim] + offset
            output = output.narrow(axis, output.shape[axis] - size, size)
        return output

    patch.setattr(callplan, "cut", cut)


def results_swapped(patch: pytest.MonkeyPatch) -> None:
    original = CallPlan.result
    patch.setattr(
        CallPlan, "result", lambda self, outputs, leaves: original(self, outputs[::-1], leaves)
    )


def inputs_in_the_wrong_slots(patch: pytest.MonkeyPatch) -> None:
    def fill(self: CallPlan, leaves: Any) -> None:
        for place, leaf in zip(self.heads, [*leaves[1:], *leaves[:1]], strict=True):
            if place.shape == leaf.shape:
                place.copy_(leaf)

    patch.setattr(CallPlan, "fill", fill)


def only_the_first_row_copied(patch: pytest.MonkeyPatch) -> None:
    def fill(self: CallPlan, leaves: Any) -> None:
        for place, leaf in zip(self.heads, leaves, strict=True):
            place[:1].copy_(leaf[:1])

    patch.setattr(CallPlan, "fill", fill)


def no_replay(patch: pytest.MonkeyPatch) -> None:
    def run(self: CallPlan, leaves: Any, lend: bool = True) -> Any:
        self.fill(leaves)
        return [view.clone() for view in self.views]

    patch.setattr(CallPlan, "run", run)


def no_watch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Watch, "same", lambda self: True)


def modes_of_the_module_not_numbered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Watch, "_number", lambda self, modules, slots: 0)


def hooks_not_refused(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(miss, "refuse_hooks", lambda watch: None)
    patch.setattr(Watch, "same", lambda self: True)


def probe_trusts_everything(patch: pytest.MonkeyPatch) -> None:
    def settle(self: Probe, days: Any, *others: Any) -> DimFacts:
        return self._trust(days[0])

    patch.setattr(Probe, "_settle", settle)
    without_the_check_of_the_graph(patch)


def state_of_trials_not_undone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(preflight.Observer, "undo", lambda self: [])


def state_of_captures_not_undone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(capture, "storage_bytes", lambda tensor: torch.empty(0))


def generators_not_restored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(generators.RandomStates, "restore", lambda self: None)


def plain_values_not_in_the_key(patch: pytest.MonkeyPatch) -> None:
    original = serving.call_key
    patch.setattr(
        serving,
        "call_key",
        lambda *args: tuple(p for p in original(*args) if not isinstance(p, Plain)),
    )


def kinds_of_plain_values_not_in_the_key(patch: pytest.MonkeyPatch) -> None:
    """1 and True and 1.0 compare equal, and hash alike."""
    original = serving.call_key
    patch.setattr(
        serving,
        "call_key",
        lambda *args: tuple(
            (float(p.text or p.value) if isinstance(p, Plain) else p) for p in original(*args)
        ),
    )


def modes_not_in_the_key(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Modes, "kernels", lambda self: ())


def grad_mode_not_asked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Watch, "needs_grad", lambda self: False)


def without_the_comparison_of_cuts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Server, "_compare_cut", lambda self, *call: None)


def pieces_joined_in_reverse(patch: pytest.MonkeyPatch) -> None:
    original = SplitPlan.join
    patch.setattr(SplitPlan, "join", lambda self, results: original(self, results[::-1]))
    without_the_comparison_of_cuts(patch)


def a_piece_lost(patch: pytest.MonkeyPatch) -> None:
    original = SplitPlan.join
    patch.setattr(SplitPlan, "join", lambda self, results: original(self, results[:-1]))
    without_the_comparison_of_cuts(patch)


def splits_counted_as_calls(patch: pytest.MonkeyPatch) -> None:
    original = Server._in_pieces

    def in_pieces(self: Any, *call: Any) -> Any:
        self.ledger.calls += 1
        return original(self, *call)

    patch.setattr(Server, "_in_pieces", in_pieces)


def captures_counted_twice(patch: pytest.MonkeyPatch) -> None:
    original = Ledger.served

    def served(self: Ledger, *counts: Any) -> None:
        self.replays += counts[-1]
        original(self, *counts)

    patch.setattr(Ledger, "served", served)


def plans_outlive_their_graphs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Server, "forget", lambda self, entry: None)


def smallest_bucket_not_taken(patch: pytest.MonkeyPatch) -> None:
    """A bucket that does not hold the call."""
    patch.setattr(BucketSet, "choose", lambda self, sizes, unpadded=frozenset(): self.corners[0])


def callers_tensors_captured(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Capturer, "_static_inputs", lambda self, reading, bucket: list(reading.call.tensors)
    )


def followers_left_alone(patch: pytest.MonkeyPatch) -> None:
    """Every tensor as long as the batch is taken for one that follows it, and nothing is tried."""
    patch.setattr(
        Learner, "followers", lambda self, reading: dict.fromkeys(reading.candidates, True)
    )
    probe_trusts_everything(patch)


def seal_not_heeded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GraphStore, "refuse_sealed", lambda self: None)


def axes_told_for_one_output_only(patch: pytest.MonkeyPatch) -> None:
    without_the_check_of_the_graph(patch)
    original = Facts.axes

    def axes(self: Facts) -> Any:
        return [found if i == 0 else [] for i, found in enumerate(original(self))]

    patch.setattr(facts.Facts, "axes", axes)


PLANTED: list[tuple[Plant, Check]] = [
    (refill_not_done, smaller_calls_after_larger_ones),
    (refill_only_once, smaller_calls_after_larger_ones),
    (refill_with_the_wrong_value, smaller_calls_after_larger_ones),
    (outputs_not_cloned, old_results_are_held),
    (outputs_not_cut, sizes_of_results),
    (outputs_cut_at_the_wrong_end, sizes_of_results),
    (results_swapped, lists_of_results),
    (inputs_in_the_wrong_slots, several_inputs),
    (only_the_first_row_copied, bits_of_the_padded_run),
    (only_the_first_row_copied, old_results_are_held),
    (no_replay, old_results_are_held),
    (no_watch, weights_swapped_while_the_old_ones_live),
    (no_watch, training_flags_flipped),
    (modes_of_the_module_not_numbered, training_flags_flipped),
    (hooks_not_refused, hooks_added),
    (probe_trusts_everything, batch_statistics_padded),
    (probe_trusts_everything, smaller_calls_after_larger_ones),
    (state_of_trials_not_undone, statistics_written),
    (state_of_captures_not_undone, statistics_written),
    (generators_not_restored, draws_repeat),
    (plain_values_not_in_the_key, plain_arguments_vary),
    (kinds_of_plain_values_not_in_the_key, plain_arguments_vary),
    (modes_not_in_the_key, autocast_varies),
    (grad_mode_not_asked, gradients_asked_for),
    (pieces_joined_in_reverse, calls_above_every_bucket),
    (a_piece_lost, calls_above_every_bucket),
    (splits_counted_as_calls, calls_above_every_bucket),
    (captures_counted_twice, old_results_are_held),
    (plans_outlive_their_graphs, graphs_evicted),
    (callers_tensors_captured, inputs_of_full_buckets),
    (followers_left_alone, tables_of_equal_length),
    (seal_not_heeded, sealed),
    (axes_told_for_one_output_only, sizes_of_results),
]
CHECKS = [*dict.fromkeys(check for _, check in PLANTED), layouts_vary]


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_each_check_passes_on_the_package_as_it_is(check: Check) -> None:
    """Else a failure under a planted bug would prove nothing."""
    check()


@pytest.mark.parametrize(
    ("plant", "check"), PLANTED, ids=lambda function: getattr(function, "__name__", "")
)
def test_a_planted_bug_makes_its_check_fail(
    plant: Plant, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an AssertionError of the check or of `_check()`, not by an accident elsewhere.

    The comparison of a graph's first padded call with eager would answer several of these bugs by
    running eagerly; it is left out here, so that the bug itself must show.
    """
    for comparing in ("compare", "compare_alike"):
        monkeypatch.setattr(Capturer, comparing, lambda *_: None)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check()
