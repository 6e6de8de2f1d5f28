"""Traffic profiles."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphcache import GraphCacheError, TrafficProfile

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
        ("", r"t\.csv: no column \['batch'\] among None"),
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
