"""Cost models: interpolation, files, and what is refused."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphcache import GraphCacheError
from graphcache.planning.cost import CostModel

GRID = {(b, s): 100.0 + b * s for b in (1, 4, 8) for s in (8, 64)}
COSTS = Path(__file__).parents[2] / "shared" / "costs"


@given(batch=st.integers(1, 8), seq=st.integers(8, 64))
def test_bilinear_tables_are_met_everywhere(batch, seq):
    """100 + b * s is bilinear, so that interpolation is exact between its points."""
    cost = CostModel({"replay": GRID}, ("batch", "seq"))
    assert cost.replay([(batch, seq)])[0] == pytest.approx(100 + batch * seq)


@given(table=st.dictionaries(st.integers(1, 50), st.floats(0, 1e6), min_size=1, max_size=8))
def test_a_line_is_met_at_its_points_and_never_overshoots(table):
    """Between two points the cost lies between theirs."""
    cost = CostModel({"replay": {(n,): value for n, value in table.items()}})
    points = sorted(table)
    assert cost.replay([(n,) for n in points]).tolist() == pytest.approx([table[n] for n in points])
    for low, high in itertools.pairwise(points):
        between = cost.replay([(n,) for n in range(low, high + 1)])
        least, most = sorted((table[low], table[high]))
        assert np.all((between >= least * (1 - 1e-9)) & (between <= most * (1 + 1e-9)))


def test_beyond_the_table_launches_stay_and_slopes_go_on():
    """Below: the smallest; above: the last slope, unless it falls."""
    cost = CostModel({"replay": {(4,): 10.0, (8,): 12.0}, "eager": {(4,): 30.0, (8,): 20.0}})
    assert cost.replay([(1,), (16,)]).tolist() == [10.0, 16.0]
    assert cost.eager([(1,), (16,)]).tolist() == [30.0, 20.0]


def test_one_point_is_a_constant():
    """With one size measured, every size costs that."""
    assert CostModel({"replay": {(4,): 10.0}}).replay([(1,), (99,)]).tolist() == [10.0, 10.0]


def test_files_are_round_trips(tmp_path):
    """Saved and loaded; units by the columns' endings."""
    cost = CostModel({"replay": GRID, "nbytes": GRID}, ("batch", "seq"))
    cost.save(tmp_path / "c.json")
    again = CostModel.load(tmp_path / "c.json")
    assert (again.tables, again.dims) == (cost.tables, cost.dims)
    path = tmp_path / "c.csv"
    path.write_text("batch,replay_us,eager_us,capture_ms,note\n1,10,100,2,x\n2,11,90,3,y\n")
    read = CostModel.from_csv(path)
    assert read.tables["capture"] == {(1,): 2000.0, (2,): 3000.0}
    assert read.tables["replay"] == {(1,): 10.0, (2,): 11.0}


@pytest.mark.parametrize(
    ("tables", "dims", "error"),
    [
        ({}, ("batch",), r"the cost tables are \[\]; pass 'replay'"),
        ({"replay": {(1,): 1.0}, "x": {}}, ("batch",), "pass 'replay'"),
        ({"replay": {}}, ("batch",), "the replay table is empty"),
        ({"replay": {(1,): 1.0}}, ("batch", "seq"), "one size of each dim: batch, seq"),
        ({"replay": {(1,): float("nan")}}, ("batch",), "is nan; give a number"),
        ({"replay": {(1,): -1.0}}, ("batch",), "is -1.0; give a number"),
        ({"replay": {}}, ("a", "b"), "is empty"),
    ],
)
def test_faulty_tables_are_refused(tables, dims, error):
    """What is wrong, and what to give."""
    with pytest.raises(GraphCacheError, match=error):
        CostModel(tables, dims)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("batch,cost\n1,2\n", r"c\.csv: the columns are \['batch', 'cost'\]"),
        ("rows,replay_us\n1,2\n", r"c\.csv: the columns are"),
        ("batch,replay_us\n1,2\n2,x\n", r"c\.csv:3: could not convert .*; mend or remove"),
        ("batch,replay_us\n1,2\n2\n", r"c\.csv:3: .*; mend or remove"),
        ("", r"c\.csv: the columns are \[\]"),
    ],
)
def test_a_faulty_csv_is_refused_with_file_and_line(tmp_path, text, error):
    """Missing columns, values that are none."""
    (tmp_path / "c.csv").write_text(text)
    with pytest.raises(GraphCacheError, match=error):
        CostModel.from_csv(tmp_path / "c.csv")


@pytest.mark.parametrize(
    "text", ["x", "[]", "{}", '{"version": 9}', '{"version": 1, "dims": ["a"], "tables": {}}']
)
def test_a_faulty_file_is_refused(tmp_path, text):
    """Not JSON, no cost model, another version."""
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(GraphCacheError, match=r"c\.json is no cost model of version 1"):
        CostModel.load(tmp_path / "c.json")


def test_what_is_unknown_is_said():
    """Asked for eager costs that nobody measured."""
    with pytest.raises(GraphCacheError, match="no 'eager' costs are known, only replay"):
        CostModel({"replay": {(1,): 1.0}}).eager([(1,)])


@pytest.mark.skipif(not COSTS.exists(), reason="no cost tables beside the checkout")
def test_measured_tables_are_read():
    """Those of encoders and of a ResNet, at sizes in and between the measured ones."""
    cost = CostModel.from_csv(COSTS / "h200_minilm_encoder.csv", ("batch", "seq"))
    assert cost.replay([(1, 8)])[0] == 284.16
    low, between, high = cost.replay([(1, 8), (1, 12), (1, 16)])
    assert low < between < high
    resnet = CostModel.from_csv(COSTS / "h200_resnet50.csv")
    assert resnet.eager([(1,)])[0] == 3801.1


def test_tables_that_lack_combinations_are_read_by_their_elements():
    """Linear between volumes, and never falling with them."""
    cost = CostModel({"replay": {(1, 2): 10.0, (2, 3): 30.0, (4, 4): 20.0}}, ("a", "b"))
    assert cost.replay([(1, 2), (4, 1), (2, 3), (4, 4), (1, 1)]).tolist() == [10, 20, 30, 30, 10]


def test_a_model_of_a_function_asks_every_size_that_matters():
    """In one dim exactly at the sizes; in several at their combinations."""
    cost = CostModel.from_callable(lambda n: float(n * n), [(3,), (50,), (7,)], ("batch",))
    assert [cost((n,)) for n in (3, 7, 50)] == [9.0, 49.0, 2500.0]
    both = CostModel.from_callable(lambda s: float(s[0] * s[1]), [(1, 8), (4, 2)], ("a", "b"))
    assert both.tables["replay"] == {(1, 2): 2.0, (1, 8): 8.0, (4, 2): 8.0, (4, 8): 32.0}


def test_eager_of_an_unknown_is_infinite():
    """So that nothing is routed to it."""
    assert CostModel.from_table({8: 1.0}).eager_of((3,)) == float("inf")
    assert CostModel.from_table({8: 1.0}, eager={8: 5.0}).eager_of((3,)) == 5.0
