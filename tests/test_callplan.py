"""Call plans: what serves one form of call from one graph."""

import pytest
import torch

from graphcache import GraphCache
from graphcache.cache import Entry
from graphcache.callplan import CallPlan, results
from graphcache.graphs.recorded import RecordedBackend
from graphcache.padding import OutputAxis, allocate
from graphcache.preflight import Origin
from graphcache.signature import LEAF, Input, Signature, flatten

ROWS = [OutputAxis(0, 0, 1, 0)]


def spec(name, width=2):
    return Input(name, torch.float32, torch.device("cpu"), (None, width), ((0, 0),), (0, 1))


def entry_of(function, names, bucket=4, origins=None, result=LEAF, state=None):
    """An entry over a recorded graph of `function` on static inputs of these names."""
    inputs = tuple(spec(name) for name in names)
    statics = [allocate(i, (bucket,)).zero_() for i in inputs]
    graph = RecordedBackend().capture(lambda: function(*statics))
    key = (Signature(inputs, tuple(range(len(inputs))), LEAF, (), 0), (bucket,))
    origins = origins or [Origin("made", i) for i in range(len(graph.outputs))]
    state = state or [None] * len(origins)
    return Entry(key, graph, statics, result, origins, state, [], False)


def plan_of(entry, n, fills=None, axes=None, slots=None, backend=None):
    count = len(entry.inputs)
    return CallPlan(
        entry,
        (n,),
        slots or list(range(count)),
        fills or [{}] * count,
        [ROWS] * len(entry.origins) if axes is None else axes,
        backend or RecordedBackend(),
        backend is not None,
    )


def serve(plan, *leaves):
    return plan.result(plan.run(leaves), leaves)


def rows(n, value=1.0):
    return torch.full((n, 2), value)


def test_a_call_is_copied_in_replayed_and_cut_back():
    """Interleaved sizes over one graph, each result the caller's own."""
    entry = entry_of(lambda x: [x * 2], ["x"])
    plans = {n: plan_of(entry, n) for n in (1, 3, 4)}
    kept = []
    for n in (4, 1, 3, 4, 1):
        x = torch.randn(n, 2)
        kept.append((serve(plans[n], x), x * 2))
    assert all(torch.equal(ours, theirs) for ours, theirs in kept)


def test_fills_are_restored_only_when_another_plan_left_the_tail_dirty():
    """Invariant I2 without paying on each call."""
    entry = entry_of(lambda x: [x.sum(0, keepdim=True)], ["x"])
    full, part = (plan_of(entry, n, [{0: 0}], [[]]) for n in (4, 2))
    assert serve(full, rows(4, 9.0)).tolist() == [[36.0, 36.0]]
    assert serve(part, rows(2)).tolist() == [[2.0, 2.0]]
    entry.inputs[0][2:] = 5.0  # behind the plan's back: it believes its fill is in place
    assert serve(part, rows(2)).tolist() == [[12.0, 12.0]]
    serve(full, rows(4, 9.0))
    assert serve(part, rows(2)).tolist() == [[2.0, 2.0]]


def test_repeat_follows_each_calls_last_row():
    """The fill is read from this call's rows, not from those of the first."""
    entry = entry_of(lambda x: [x.clone()], ["x"])
    plan = plan_of(entry, 2, [{0: "repeat"}], [[]])
    for value in (3.0, 8.0):
        out = serve(plan, torch.tensor([[1.0, 1.0], [value, value]]))
        assert out.tolist()[2:] == [[value, value]] * 2


def test_a_control_that_repeats_the_last_row_is_right_for_the_same_size_twice():
    """Through the cache: the last index of the call before must not stay in the tail."""

    def function(x, index):
        return x * index[-1]

    shapes = {"x": {0: "batch"}, "index": {0: "batch"}}
    cache = GraphCache(function, [8], dynamic_shapes=shapes)
    for last in (9, 3, 5):
        x, index = torch.randn(3, 2), torch.tensor([1, 2, last])
        torch.testing.assert_close(cache(x, index), function(x, index))


def test_numbers_and_repeated_rows_share_an_input():
    """Invariant I2 at the first call of a size, whose tails another size left dirty."""

    def function(ids, mask):
        return ids * mask, mask.clone()

    dims = {name: {0: "batch", 1: "seq"} for name in ("ids", "mask")}
    fill = {"ids": "repeat", "mask": 0}
    cache = GraphCache(function, [(4, 8)], dynamic_shapes=dims, fill=fill)
    for n, m in [(4, 8), (3, 5), (2, 7), (3, 5), (4, 6), (1, 8)]:
        ids, mask = torch.randint(1, 9, (n, m)), torch.ones(n, m, dtype=torch.long)
        assert all(map(torch.equal, cache(ids, mask), function(ids, mask)))
        (entry,) = cache._miss.store.graphs.entries()
        names = [spec.name for spec in entry.key[0].inputs]
        static = dict(zip(names, entry.inputs, strict=True))
        assert torch.equal(static["ids"][:, m:], static["ids"][:, m - 1 : m].expand(4, 8 - m))
        assert torch.equal(static["ids"][n:], static["ids"][n - 1 : n].expand(4 - n, 8))
        assert not static["mask"][:n, m:].any()


def test_static_inputs_that_change_places_are_read_before_they_are_written():
    """Integers repeat their last row, and here each is copied into the memory of the other."""

    def function(a, b):
        return a - 2 * b

    dims = {name: {0: "batch"} for name in "ab"}
    cache = GraphCache(function, [8], dynamic_shapes=dims)
    sample = (torch.arange(4), torch.arange(4))
    views = cache.static_inputs(5, like=sample)
    views["a"].copy_(torch.arange(5))
    views["b"].copy_(torch.arange(5) + 10)
    expected = function(views["b"].clone(), views["a"].clone())
    assert torch.equal(cache(views["b"], views["a"]), expected)
    views["a"].copy_(torch.arange(5))
    expected = function(views["a"].clone(), views["b"].clone())
    assert torch.equal(cache(views["a"], views["b"]), expected)
    assert cache.stats().eager == 0


def test_tensors_are_told_by_slot_not_by_order():
    """The signature's order is the parameters', the call's order the caller's."""
    entry = entry_of(lambda a, b: [a - b], ["a", "b"])
    plan = plan_of(entry, 3, slots=[1, 0])
    assert serve(plan, rows(3, 1.0), rows(3, 5.0)).tolist() == [[4.0, 4.0]] * 3


def test_results_that_are_inputs_are_the_callers_own_tensors():
    """By identity, whatever the slots."""
    result = flatten((torch.ones(1), {"x": torch.ones(1)}), [])
    entry = entry_of(
        lambda a, b: [a + b], ["a", "b"], origins=[Origin("input", 0), Origin("made", 0)],
        result=result,
    )  # fmt: skip
    plan = plan_of(entry, 2, slots=[1, 0])
    first, second = rows(2, 1.0), rows(2, 2.0)
    out = serve(plan, first, second)
    assert out[0] is second
    assert out[1]["x"].tolist() == [[3.0, 3.0]] * 2


def test_a_result_of_state_is_the_modules_own_tensor():
    """It is returned as it is, uncopied."""
    table = torch.ones(3)
    result = flatten([torch.ones(1), torch.ones(1)], [])
    entry = entry_of(
        lambda x: [x * 2], ["x"], origins=[Origin("made", 0), Origin("state")],
        result=result, state=[None, table],
    )  # fmt: skip
    out = serve(plan_of(entry, 2, axes=[ROWS, []]), rows(2))
    assert out[1].data_ptr() == table.data_ptr()


def test_one_tensor_returned_twice_is_one_object():
    """As in eager."""
    result = flatten([torch.ones(1), torch.ones(1)], [])
    origins = [Origin("made", 0), Origin("made", 0)]
    entry = entry_of(lambda x: [x * 2], ["x"], origins=origins, result=result)
    out = serve(plan_of(entry, 2), rows(2))
    assert out[0] is out[1]


def test_copies_share_no_memory_with_the_static_outputs():
    """Invariant I3."""
    entry = entry_of(lambda x: [x * 2], ["x"])
    out = serve(plan_of(entry, 4), rows(4))
    assert out.untyped_storage().data_ptr() != entry.graph.outputs[0].untyped_storage().data_ptr()


def test_lent_outputs_come_from_the_backend():
    """outputs="view": the plan asks `lend` for each."""
    lent = []
    entry = entry_of(lambda x: [x * 2], ["x"])
    backend = RecordedBackend()
    backend.lend = lambda view: lent.append(view) or view
    plan = plan_of(entry, 2, backend=backend)
    out = serve(plan, rows(2))
    assert plan.lends
    assert out is lent[0]
    assert out.untyped_storage().data_ptr() == entry.graph.outputs[0].untyped_storage().data_ptr()


def test_what_lies_in_place_is_not_copied_and_overlaps_are_freed():
    """Static inputs that were handed out: passed as they are, or shifted onto themselves."""
    entry = entry_of(lambda x: [x * 2], ["x"])
    entry.handed_out = True
    static = entry.inputs[0]
    static.copy_(torch.arange(8.0).view(4, 2))
    assert serve(plan_of(entry, 3), static[:3]).tolist() == (static[:3] * 2).tolist()
    expected = (static[1:4] * 2).tolist()
    assert serve(plan_of(entry, 3), static[1:4]).tolist() == expected


@pytest.mark.parametrize(("scale", "offset"), [(1, 0), (2, 1)])
def test_results_are_cut_along_their_axes(scale, offset):
    """scale * n + offset rows of the static output."""
    entry = entry_of(lambda x: [torch.cat([x] * scale + [x[:1]] * offset)], ["x"])
    made = dict(enumerate(entry.graph.outputs))
    views = results(entry, [[OutputAxis(0, 0, scale, offset)]], (3,), made)
    assert views[0].shape == (3 * scale + offset, 2)
    assert results(entry, (), (3,), made)[0].shape == entry.graph.outputs[0].shape


def test_elements_are_counted_for_the_stats():
    """Real and padded, of the dynamic dims."""
    plan = plan_of(entry_of(lambda x: [x * 2], ["x"]), 3)
    assert (plan.real, plan.padded, plan.bucket) == (3, 4, (4,))
