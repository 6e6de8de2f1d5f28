"""Traffic profiles."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphcache import GraphCacheError, TrafficProfile
from graphcache.planning import profile as planning

counts = st.dictionaries(st.tuples(st.integers(1, 9), st.integers(1, 9)), st.integers(1, 5))


def profile_of(recorded):
    profile = TrafficProfile(("batch", "seq"))
    for sizes, count in recorded.items():
        profile.record(sizes, count)
    return profile


@given(recorded=counts)
def test_what_is_recorded_is_counted(recorded):
    """Sizes to count; a total; a length of distinct sizes."""
    profile = profile_of(recorded)
    assert profile.counts == recorded
    assert profile.total == sum(recorded.values())
    assert len(profile) == len(recorded)


@given(a=counts, b=counts, c=counts)
def test_merging_is_associative_and_adds(a, b, c):
    """(a + b) + c == a + (b + c), count by count."""
    left, right, tail = profile_of(a), profile_of(a), profile_of(b)
    left.merge(profile_of(b))
    left.merge(profile_of(c))
    tail.merge(profile_of(c))
    right.merge(tail)
    assert left.counts == right.counts
    assert left.total == sum(map(sum, (d.values() for d in (a, b, c))))


@given(recorded=counts)
def test_json_and_csv_are_round_trips(recorded, tmp_path_factory):
    """Saved and loaded, written and read."""
    folder = tmp_path_factory.mktemp("profile")
    profile = profile_of(recorded)
    profile.save(folder / "p.json")
    again = TrafficProfile.load(folder / "p.json")
    assert (again.counts, again.dims) == (recorded, ("batch", "seq"))
    profile.to_csv(folder / "p.csv")
    assert TrafficProfile.from_csv(folder / "p.csv", dims=("batch", "seq")).counts == recorded


def test_an_int_is_short_for_a_tuple_of_one():
    """In one dim."""
    profile = TrafficProfile()
    profile.record(5)
    profile.record((5,), count=2)
    assert profile.counts == {(5,): 3}


def test_counts_are_a_copy():
    """Changing them changes nothing."""
    profile = TrafficProfile()
    profile.record(5)
    profile.counts[(5,)] = 99
    assert profile.counts == {(5,): 1}


def test_columns_are_read_by_name_and_others_are_ignored(tmp_path):
    """In the order of `dims`, not of the file."""
    path = tmp_path / "t.csv"
    path.write_text("seq,timestamp_s,batch,user\n41,0.1,5,a\n41,0.2,5,b\n7,0.3,1,a\n")
    profile = TrafficProfile.from_csv(path, dims=("batch", "seq"))
    assert profile.counts == {(5, 41): 2, (1, 7): 1}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("seq\n4\n", r"t\.csv: no column \['batch'\] among \['seq'\]"),
        ("batch\n4\nx\n", r"t\.csv:3: batch is 'x', not a positive integer"),
        ("batch\n0\n", r"t\.csv:2: batch is '0', not a positive integer"),
        ("batch\n-3\n", r"t\.csv:2: batch is '-3', not a positive integer"),
        ("batch\n2.5\n", r"t\.csv:2: batch is '2\.5', not a positive integer"),
        ("batch,seq\n,4\n", r"t\.csv:2: batch is '', not a positive integer"),
        ("seq,batch\n4\n", r"t\.csv:2: batch is missing; mend or remove the row"),
        ("", r"t\.csv is empty; its first line names the columns: batch"),
    ],
)
def test_a_faulty_csv_is_refused_with_file_and_line(tmp_path, text, error):
    """What is wrong, and what to do."""
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(GraphCacheError, match=error):
        TrafficProfile.from_csv(path)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("not json", "is no traffic profile"),
        ("[1, 2]", "is no traffic profile"),
        ("{}", "is no traffic profile"),
        (json.dumps({"version": 99, "dims": ["batch"], "counts": []}), "version 99"),
        (
            json.dumps({"version": 1, "dims": ["batch"], "counts": [[5]]}),
            "is no traffic profile|sizes",
        ),
        (json.dumps({"version": 1, "dims": ["batch"], "counts": [5]}), "is no traffic profile"),
    ],
)
def test_a_faulty_file_is_refused(tmp_path, text, error):
    """Not JSON, not a profile, another version, rows that are none."""
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(GraphCacheError, match=error):
        TrafficProfile.load(path)


def test_sizes_and_merges_of_other_dims_are_refused():
    """The text names both."""
    profile = TrafficProfile(("batch", "seq"))
    with pytest.raises(GraphCacheError, match=r"sizes 5 for the dims batch, seq; pass one size"):
        profile.record(5)
    with pytest.raises(GraphCacheError, match=r"cannot merge dims \('batch',\) into"):
        profile.merge(TrafficProfile())


calls = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=30)


def decayed(recorded, half_life):
    """Each call's weight at the end, one by one: it halves in each half-life."""
    total, counts = sum(count for _, count in recorded), {}
    seen = 0
    for size, count in recorded:
        seen += count
        counts[(size,)] = counts.get((size,), 0) + count * 0.5 ** ((total - seen) / half_life)
    return counts


def recording(recorded, half_life):
    profile = TrafficProfile(half_life=half_life)
    for size, count in recorded:
        profile.record(size, count)
    return profile


@given(recorded=calls, half_life=st.sampled_from([0.7, 3, 10, 4000]))
def test_earlier_calls_count_less(recorded, half_life):
    """By half in each half-life, as if every call were weighed anew; what counts nothing may go."""
    profile = recording(recorded, half_life)
    expected = decayed(recorded, half_life)
    assert profile.total == pytest.approx(sum(expected.values()))
    for key, count in expected.items():
        assert profile.counts.get(key, 0) == pytest.approx(count, rel=1e-6, abs=1e-5)


@given(a=calls, b=calls)
def test_merging_adds_decayed_counts_as_they_are_now(a, b):
    """Whatever half-life each has; the total too."""
    one, other = recording(a, 5), recording(b, 2)
    before = one.counts
    one.merge(other)
    for key in {*before, *other.counts}:
        together = before.get(key, 0) + other.counts.get(key, 0)
        assert one.counts[key] == pytest.approx(together)
    plain = TrafficProfile()
    plain.merge(other)
    assert plain.counts == pytest.approx(other.counts)


@given(recorded=calls)
def test_a_decaying_profile_goes_on_after_a_file(recorded, tmp_path_factory):
    """Counts, half-life, and what later calls do to them."""
    path = tmp_path_factory.mktemp("profile") / "p.json"
    profile = recording(recorded, 6)
    profile.save(path)
    again = TrafficProfile.load(path)
    assert again.half_life == 6
    assert again.counts == pytest.approx(profile.counts)
    for kept in (profile, again):
        kept.record(2, 5)
    assert again.counts == pytest.approx(profile.counts)


def test_long_streams_of_a_short_half_life_stay_finite():
    """Over a million half-lives only the last calls count, and old sizes go."""
    profile = TrafficProfile(half_life=0.5)
    for step in range(20_000):
        profile.record(1 + step % 50)
    profile.record(60, 10**7)
    profile.record(61)
    assert len(profile) <= 60
    assert profile.counts[(61,)] == 1
    assert profile.counts[(60,)] == pytest.approx(10**7 / 4)
    assert profile.total == pytest.approx(1 + 10**7 / 4)


def test_a_csv_has_decayed_counts_rounded(tmp_path):
    """A call of less than half is no row."""
    profile = TrafficProfile(half_life=1)
    profile.record(3, 4)
    profile.record(5)
    profile.record(7)
    assert profile.counts == {(3,): 1, (5,): 0.5, (7,): 1}
    profile.record(7)
    profile.to_csv(tmp_path / "p.csv")
    assert TrafficProfile.from_csv(tmp_path / "p.csv").counts == {(7,): 2}


@pytest.mark.parametrize("half_life", [0, -1, float("nan")])
def test_a_half_life_that_is_none_is_refused(half_life):
    """It says what to pass."""
    with pytest.raises(GraphCacheError, match="pass a positive number of calls, or None"):
        TrafficProfile(half_life=half_life)


def test_a_mapping_is_a_profile():
    """Of ints or tuples, numpy's too; named by its dims unless names are given."""
    assert planning.profile_of({3: 2, (5,): 1}).counts == {(3,): 2, (5,): 1}
    assert planning.profile_of({(np.int64(3), 4): 2}).dims == ("dim0", "dim1")
    assert planning.profile_of({np.int64(3): 2}, ("rows",)).dims == ("rows",)
    profile = TrafficProfile()
    assert planning.profile_of(profile) is profile
