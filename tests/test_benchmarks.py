"""The benchmarks that need no GPU run, and keep what they promise to keep."""

import importlib
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parent.parent


@pytest.fixture
def benchmark(monkeypatch):
    """Imports one by name; `benchmarks` is no part of the package."""
    monkeypatch.syspath_prepend(str(ROOT))
    yield lambda name: importlib.import_module(f"benchmarks.{name}")
    for name in [name for name in sys.modules if name.split(".")[0] == "benchmarks"]:
        del sys.modules[name]


@pytest.fixture
def padding_overhead(benchmark):
    return benchmark("padding_overhead")


def test_scaling_measures_every_step(benchmark, tmp_path):
    """With the smallest ones, on the recorder."""
    out = tmp_path / "out.json"
    options = ["--rounds", 3, "--calls", 5, "--most", 16, "--commit", "x", "--out", out]
    benchmark("scaling").main([*map(str, options)])
    found = json.loads(out.read_text())["results"]
    steps = {"graphs": 3, "inputs": 5, "shapes": 1, "layers": 2}
    assert {name: len(found[name]) for name in steps} == steps
    assert found["unseen"]["first"]["median"] > 0


def test_padding_overhead_runs_without_traces(padding_overhead, tmp_path, capsys):
    """On made-up ones, said so; the record has every score, and the plot is a picture."""
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    options = ["--traces", tmp_path / "none", "--rows", 200, "--commit", "x"]
    padding_overhead.main([*map(str, options), "--out", str(out), "--plot", str(plot)])
    record = json.loads(out.read_text())
    assert record["arguments"]["made_up"] is True
    traces = record["results"]["traces"]
    assert set(traces) == {"made_up_lengths", "made_up_batches"}
    for found in traces.values():
        assert found["held_out"].keys() >= {"planned 8", "planned 32", "powers of two"}
        assert found["hindsight"]["planned 8"]["graphs"] <= 8
    assert any("4,096 sizes" in name for name in record["results"]["seconds"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "made_up_lengths: 200 rows" in capsys.readouterr().out


def test_padding_overhead_reads_traces(padding_overhead, tmp_path):
    """Files that it does not know: every column but the time is a dim."""
    rows = "\n".join(f"{i},{i % 7 + 1},{i % 30 + 1}" for i in range(100))
    (tmp_path / "mine.csv").write_text(f"timestamp_s,rows,width\n{rows}\n")
    (trace,) = padding_overhead.recorded(tmp_path, None)
    assert (trace.name, trace.dims, len(trace.rows)) == ("mine", ("rows", "width"), 100)
    found = padding_overhead.compared(trace)
    assert found["planned_on"] == 10
    assert found["hindsight"]["planned 16"]["padding_overhead"] >= 0
