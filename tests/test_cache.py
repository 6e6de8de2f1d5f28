"""The LRU of graphs: no way out of it leaks one, and sweeps do not flush what is used."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from graphcache.cache import HALF_LIFE, Entry, GraphLRU
from graphcache.graphs.recorded import RecordedGraph
from graphcache.signature import LEAF, Signature

SIGNATURE = Signature((), (), LEAF, (), 0)


def key_of(n):
    return (SIGNATURE, (n,))


def entry_of(n):
    graph = RecordedGraph([], [], 0)
    return Entry(key_of(n), graph, [], LEAF, [], [], [], False)


class Releases(list):
    """A release callback that does what the owner does: marks the entry dead, and remembers it."""

    def __call__(self, entry):
        assert entry.alive, "released twice"
        entry.alive = False
        self.append(entry)


def filled(maxsize, count):
    """A cache with entries 0 to count - 1, the last one used last."""
    released = Releases()
    cache = GraphLRU(maxsize, released)
    for n in range(count):
        entry = entry_of(n)
        cache.tick += 1
        entry.last_used = cache.tick
        cache[key_of(n)] = entry
    return cache, released


class TestWaysOut:
    def test_overwriting_releases_the_old_entry(self):
        """The new entry stays, the old one is released once."""
        cache, released = filled(4, 2)
        old, new = cache[key_of(1)], entry_of(1)
        cache[key_of(1)] = new
        assert released == [old]
        assert cache[key_of(1)] is new
        assert len(cache) == 2

    def test_putting_the_same_entry_again_releases_nothing(self):
        """An entry that stays is not released."""
        cache, released = filled(4, 2)
        cache[key_of(1)] = cache[key_of(1)]
        assert released == []
        cache.check()

    def test_del_releases(self):
        """`del cache[key]`."""
        cache, released = filled(4, 2)
        gone = cache[key_of(0)]
        del cache[key_of(0)]
        assert released == [gone]
        assert key_of(0) not in cache

    def test_pop_releases_and_returns(self):
        """`pop(key)`, and `pop(key, default)` of an absent key releases nothing."""
        cache, released = filled(4, 2)
        gone = cache[key_of(0)]
        assert cache.pop(key_of(0)) is gone
        assert cache.pop(key_of(0), None) is None
        assert released == [gone]
        with pytest.raises(KeyError):
            cache.pop(key_of(0))

    def test_popitem_takes_the_least_recently_used(self):
        """The order is that of `last_used`, not of insertion."""
        cache, released = filled(4, 3)
        cache[key_of(0)].last_used = 99
        key, entry = cache.popitem()
        assert key == key_of(1) == entry.key
        assert released == [entry]

    def test_popitem_of_an_empty_cache_is_a_key_error(self):
        """With the class in its text."""
        with pytest.raises(KeyError, match="GraphLRU is empty"):
            GraphLRU(2, Releases()).popitem()

    def test_clear_releases_every_entry_once(self):
        """cachetools' own clear would leak them all."""
        cache, released = filled(4, 3)
        entries = list(cache.entries())
        cache.clear()
        assert sorted(e.key[1] for e in released) == [(0,), (1,), (2,)]
        assert {id(e) for e in released} == {id(e) for e in entries}
        assert len(cache) == 0
        assert cache.currsize == 0

    def test_an_insertion_above_the_bound_evicts_the_least_recently_used(self):
        """The bound holds, and the evicted entry is released."""
        cache, released = filled(3, 3)
        cache[key_of(0)].last_used = 50
        cache[key_of(9)] = entry_of(9)
        assert [e.key for e in released] == [key_of(1)]
        assert len(cache) == 3

    def test_setdefault_and_update_go_the_same_ways(self):
        """The mapping protocol's other writers do not leak either."""
        cache, released = filled(2, 2)
        kept = cache[key_of(0)]
        assert cache.setdefault(key_of(0), entry_of(0)) is kept
        assert released == []
        cache.update({key_of(0): entry_of(0)})
        assert released == [kept]

    def test_what_check_asserts_can_fail(self):
        """A dead entry in the cache breaks invariant I4, and `check` says so."""
        cache, _ = filled(4, 2)
        cache.check()
        cache[key_of(0)].alive = False
        with pytest.raises(AssertionError):
            cache.check()


class TestAdmission:
    def test_a_key_used_once_does_not_outweigh_entries_used_twice(self):
        """A sweep of sizes that come once never flushes hot graphs."""
        cache, released = filled(2, 2)
        for entry in cache.entries():
            entry.uses = 2.0
        for n in range(10, 40):
            assert cache.count_use(key_of(n)) == 1
            assert not cache.outweighs(cache.uses(key_of(n)))
        assert released == []

    def test_a_key_used_more_than_the_victim_outweighs_it(self):
        """The victim is the least recently used one, whatever the others' uses."""
        cache, _ = filled(2, 2)
        cache[key_of(0)].uses, cache[key_of(1)].uses = 2.0, 50.0
        assert [cache.count_use(key_of(7)) for _ in range(3)] == [1, 2, 3]
        assert cache.victim() is cache[key_of(0)]
        assert cache.outweighs(cache.uses(key_of(7)))

    def test_equal_use_does_not_outweigh(self):
        """The count must exceed the victim's, so that two keys do not take turns."""
        cache, _ = filled(1, 1)
        cache[key_of(0)].uses = 2.0
        cache.count_use(key_of(7))
        cache.count_use(key_of(7))
        assert not cache.outweighs(cache.uses(key_of(7)))

    def test_an_empty_cache_admits_anything(self):
        """Nothing would leave."""
        cache = GraphLRU(2, Releases())
        assert cache.outweighs(cache.uses(key_of(1)))
        assert cache.has_room()
        assert cache.victim() is None

    def test_uses_decay_by_half_over_the_half_life(self):
        """Old popularity fades: entries and waiting keys alike."""
        cache, _ = filled(2, 2)
        cache[key_of(0)].uses = 8.0
        for _ in range(4):
            cache.count_use(key_of(7))
        cache.tick += HALF_LIFE
        assert cache.count_use(key_of(7)) == 4 // 2 + 1
        assert cache[key_of(0)].uses == 4.0
        cache.tick += 2 * HALF_LIFE
        assert cache.count_use(key_of(7)) == 3 // 4 + 1
        assert cache[key_of(0)].uses == 1.0

    def test_a_key_that_gets_its_graph_waits_no_more(self):
        """Its count starts anew after an eviction."""
        cache, _ = filled(2, 0)
        cache.count_use(key_of(7))
        cache[key_of(7)] = entry_of(7)
        del cache[key_of(7)]
        assert cache.count_use(key_of(7)) == 1


class LRUMachine(RuleBasedStateMachine):
    """A plain dict of (key -> entry) beside the cache; every entry that leaves is released once."""

    keys = st.integers(0, 7)

    def __init__(self):
        super().__init__()
        self.released = Releases()
        self.cache = GraphLRU(4, self.released)
        self.model = {}
        self.gone = []

    def touch(self, entry):
        self.cache.tick += 1
        entry.last_used = self.cache.tick
        entry.uses += 1

    def oldest(self):
        return min(self.model, key=lambda n: self.model[n].last_used)

    def leave(self, n):
        self.gone.append(self.model.pop(n))

    @rule(n=keys)
    def insert_or_overwrite(self, n):
        entry = entry_of(n)
        if n not in self.model and len(self.model) == 4:
            self.leave(self.oldest())
        elif n in self.model:
            self.leave(n)
        self.touch(entry)
        self.cache[key_of(n)] = entry
        self.model[n] = entry

    @rule(n=keys)
    def use(self, n):
        entry = self.cache.get(key_of(n))
        assert entry is self.model.get(n)
        if entry is None:
            self.cache.count_use(key_of(n))
        else:
            self.touch(entry)

    @rule(n=keys)
    def put_back(self, n):
        if n in self.model:
            self.cache[key_of(n)] = self.model[n]

    @rule(n=keys)
    def delete(self, n):
        if n in self.model:
            self.leave(n)
            del self.cache[key_of(n)]
        else:
            with pytest.raises(KeyError):
                del self.cache[key_of(n)]

    @rule(n=keys)
    def pop(self, n):
        expected = self.model.get(n)
        if expected is not None:
            self.leave(n)
        assert self.cache.pop(key_of(n), None) is expected

    @precondition(lambda self: self.model)
    @rule()
    def popitem(self):
        n = self.oldest()
        self.leave(n)
        assert self.cache.popitem()[0] == key_of(n)

    @rule()
    def clear(self):
        for n in list(self.model):
            self.leave(n)
        self.cache.clear()

    @rule(halves=st.integers(1, 3))
    def age(self, halves):
        self.cache.tick += halves * HALF_LIFE

    @invariant()
    def the_cache_holds_what_the_model_holds(self):
        assert {key[1][0]: entry for key, entry in self.cache.items()} == self.model
        self.cache.check()

    @invariant()
    def every_entry_that_left_was_released_exactly_once(self):
        assert sorted(map(id, self.released)) == sorted(map(id, self.gone))
        assert not any(entry.alive for entry in self.released)


LRUMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLRUMachine = LRUMachine.TestCase
