"""`check`: every finding with its reason, operation and line; nothing for ordinary models."""

import functools
import importlib
import inspect
import random
import sys
import sysconfig
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from graphcache import GraphCache, Reason, check
from graphcache.checking import Report
from graphcache.errors import Finding
from graphcache.frames import user_line

HERE = Path(__file__).name


def line_of(function, text):
    """Where `text` stands in a function of this file, as reports give it."""
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


class Layer(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act = act

    def forward(self, x):
        return self.act(self.linear(x))


def reads(x):
    return x + 1 if x.sum().item() > 0 else x


def lists(x):
    return x * len(x.tolist())


def copies(x):
    return x * x.cpu().sum()


def decides(x):
    if x.sum() > 0:
        return x + 1
    return x


def counts(x):
    return x[x[:, 0] > 0]


def draws(x):
    return x * random.random()


FAULTS = {
    "item": (reads, ".item()", Reason.HOST_SYNC),
    "tolist": (lists, ".tolist()", Reason.HOST_SYNC),
    "cpu": (copies, ".cpu()", Reason.HOST_COPY),
    "if": (decides, "if x.sum()", Reason.HOST_SYNC),
    "mask": (counts, "x[x[", Reason.DYNAMIC_OUTPUT),
    "random": (draws, "random.random()", Reason.GENERATOR),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_third_layer_is_found_at_its_line(name):
    act, text, reason = FAULTS[name]
    net = nn.Sequential(Layer(torch.relu), Layer(torch.relu), Layer(act), Layer(torch.relu))
    report = check(net, torch.randn(3, 4))
    found = report.findings[0]
    assert not report.ok
    assert found.reason == reason
    assert found.line.endswith(f"{HERE}:{line_of(act, text)}")
    assert found.line in str(report)
    assert reason.remedy in str(report)


def test_all_faults_are_listed_in_their_order_each_once():
    """Not only the first one, and one in a loop once."""

    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            for _ in range(3):
                x = x + len(x.tolist())
            x = x + x.cpu()
            return x * x.sum().item()

    found = [str(finding.reason) for finding in check(Many(), torch.randn(3, 4)).findings]
    assert found == ["host-sync", "host-copy", "host-sync", "state-written"]


def test_a_changed_attribute_is_named():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.steps, self.kept = 0, {}

        def forward(self, x):
            self.steps += 1
            self.kept["last"] = 1
            return x + 1

    net = Counting()
    (found,) = check(net, torch.ones(3, 4)).findings
    assert "`steps`" in found.what
    assert "`last`" in found.what
    assert (net.steps, net.kept) == (0, {})


def test_a_coupling_is_a_finding_and_in_the_table():
    report = check(nn.BatchNorm1d(4), torch.randn(3, 4))
    (found,) = report.findings
    assert found.reason == Reason.BATCH_COUPLED
    assert "dim batch" in found.what
    assert not report.probe.dims["batch"].neutral
    assert "batch-coupled" in str(report).splitlines()[-1]


def test_an_error_of_the_module_is_a_finding():
    (found,) = check(nn.Linear(4, 2), torch.randn(3, 5)).findings
    assert found.reason == Reason.CAPTURE_FAILED
    assert "mat1 and mat2" in found.what


def test_a_cache_is_checked_under_its_own_dims():
    """A mean over a length, neutral once the mask is there to hold the columns out."""

    def mean(x, mask):
        weight = mask.unsqueeze(-1).to(x.dtype)
        return (x * weight).sum(1) / weight.sum(1)

    both = {0: "batch", 1: "seq"}
    options = {"buckets": {"batch": [8], "seq": [16]}, "dynamic_shapes": {"x": both, "mask": both}}
    x, mask = torch.randn(3, 5, 4), torch.ones(3, 5, dtype=torch.bool)
    assert check(GraphCache(mean, **options), x, mask).ok
    plain = {"buckets": {"seq": [16]}, "dynamic_shapes": {"x": {1: "seq"}}}
    (found,) = check(GraphCache(lambda x: x.mean(1), **plain), x).findings
    assert found.reason == Reason.PAD_NOT_NEUTRAL


def test_keyword_arguments_and_exact_caches():
    assert check(nn.Linear(4, 2), input=torch.ones(3, 4)).ok
    assert check(GraphCache(nn.Linear(4, 2)), torch.ones(3, 4)).ok


@pytest.mark.parametrize(
    "make",
    [
        lambda: (nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)), torch.randn(3, 4)),
        lambda: (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), torch.randn(2, 3, 8, 8)),
        lambda: (nn.GRU(4, 4, batch_first=True), torch.randn(3, 5, 4)),
        lambda: (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(3, 5, 8)),
        lambda: (nn.Sequential(nn.Dropout(), nn.Linear(4, 2)).train(), torch.randn(3, 4)),
    ],
    ids=["mlp", "conv", "gru", "encoder", "dropout"],
)
def test_ordinary_modules_have_no_finding(make):
    module, x = make()
    if not isinstance(module[0] if isinstance(module, nn.Sequential) else module, nn.Dropout):
        module.eval()
    report = check(module, x)
    assert report.findings == ()
    assert report.ok


def test_everything_is_as_before():
    """Parameters, buffers, generators; nothing stays in a cache that was passed but its graph."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()).train()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    x = torch.randn(3, 4)
    state = torch.get_rng_state()
    check(net, x)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_report_prints_as_a_table():
    findings = (
        Finding(Reason.HOST_SYNC, "aten::item", "model.py:3"),
        Finding(Reason.HOOKS, "Linear has forward hooks"),
    )
    assert str(Report("Net", findings)).splitlines() == [
        "Net: 2 findings",
        "host-sync: aten::item",
        "    at model.py:3",
        f"    to do: {Reason.HOST_SYNC.remedy}",
        "hooks: Linear has forward hooks",
        f"    to do: {Reason.HOOKS.remedy}",
    ]
    assert str(Report("Net")) == "Net: no findings"


class Positions(nn.Module):
    """Adds a table of 16 positions over axis 1."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(16, 4)

    def forward(self, x):
        return x + self.table(torch.arange(x.shape[1]))


BOTH = ({0: "batch", 1: "seq"},)


@pytest.mark.parametrize("length", [6, 12])
@pytest.mark.parametrize("lengths", [[8, 32], [8, 16, 32], [32]])
def test_the_largest_bucket_is_tried_too(lengths, length):
    """A table of positions that ends before it: one finding, of that bucket, whatever bucket the
    sample has, and none of the dim that is not at fault.
    """
    cache = GraphCache(Positions(), {"batch": [4], "seq": lengths}, dynamic_shapes=BOTH)
    (found,) = check(cache, torch.randn(3, length, 4)).findings
    assert found.reason == Reason.CAPTURE_FAILED
    assert found.what.startswith("bucket (4, 32): IndexError: ")
    assert "out of range for a dimension of size 16" in found.what


def test_each_outermost_corner_of_a_list_is_tried():
    """(64, 4) holds the most, and (2, 32) alone is too long for the table."""
    cache = GraphCache(Positions(), [(4, 8), (2, 32), (64, 4)], dynamic_shapes=BOTH)
    (found,) = check(cache, torch.randn(2, 6, 4)).findings
    assert found.what.startswith("bucket (2, 32): IndexError: ")
    assert "test_checking.py:" in found.what


def test_a_table_as_long_as_the_largest_bucket_is_no_finding():
    cache = GraphCache(Positions(), {"batch": [4], "seq": [8, 16]}, dynamic_shapes=BOTH)
    report = check(cache, torch.randn(3, 6, 4))
    assert report.ok
    assert all(facts.neutral for facts in report.probe.dims.values())


def test_a_coupling_is_told_beside_a_bucket_that_cannot_be_captured():
    """Both stand in the way, and each has its own finding."""

    class Coupled(Positions):
        def forward(self, x):
            return super().forward(x).softmax(0)

    cache = GraphCache(Coupled(), {"batch": [4], "seq": [8, 32]}, dynamic_shapes=BOTH)
    coupled, short = check(cache, torch.randn(3, 6, 4)).findings
    assert (coupled.reason, short.reason) == (Reason.BATCH_COUPLED, Reason.CAPTURE_FAILED)
    assert "dim batch" in coupled.what
    assert "bucket (4, 32)" in short.what


class TestRemedies:
    """`model.eval()` is the remedy of a coupling only where the model is not in that mode."""

    class Coupled(nn.Module):
        def forward(self, x):
            return x.softmax(0)

    def test_eval_is_no_remedy_in_eval_mode(self):
        report = check(self.Coupled().eval(), torch.randn(3, 4))
        (found,) = report.findings
        assert report.remedy(found).startswith("only exact sizes can have graphs")
        assert f"to do: {report.remedy(found)}" in str(report)
        assert Reason.BATCH_COUPLED.remedy not in str(report)

    def test_nor_for_a_bound_method_or_under_a_cache(self):
        module = self.Coupled().eval()
        assert check(module.forward, torch.randn(3, 4)).evaluating
        assert check(GraphCache(module, [8]), torch.randn(3, 4)).evaluating

    def test_it_is_where_one_part_is_in_training_mode(self):
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
        module[1].train()
        report = check(module, torch.randn(3, 4))
        assert report.remedy(report.findings[0]) == Reason.BATCH_COUPLED.remedy

    def test_a_plain_function_may_hold_a_model_in_any_mode(self):
        report = check(lambda x: x.softmax(0), torch.randn(3, 4))
        assert report.remedy(report.findings[0]) == Reason.BATCH_COUPLED.remedy

    def test_other_reasons_keep_theirs(self):
        found = Finding(Reason.HOST_SYNC, "aten::item")
        assert Report("Net", (found,), evaluating=True).remedy(found) == Reason.HOST_SYNC.remedy


def test_a_line_of_pythons_own_library_is_nobodys():
    """The line that calls it is."""

    def forward(x):
        return functools.reduce(lambda total, value: total * float(value), [x.sum()], x)

    (found,) = check(forward, torch.ones(3, 4)).findings
    assert found.line.startswith(__file__)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """An installed package with a function and a module that read a value."""
    home = tmp_path / "site-packages"
    home.mkdir()
    (home / "borrowed.py").write_text(
        "import torch\n"
        "def total(x):\n"
        "    return x.sum().item()\n"
        "class Model(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x * total(x)\n"
    )
    monkeypatch.syspath_prepend(home)
    yield importlib.import_module("borrowed")
    sys.modules.pop("borrowed")


def test_the_users_own_line_comes_before_that_of_an_installed_package(installed):
    """The user can change only their own."""

    def forward(x):
        return x * installed.total(x)

    (found,) = check(forward, torch.ones(3, 4)).findings
    assert found.line == f"{__file__}:{line_of(forward, 'installed.total')}"


def test_an_installed_models_line_is_named_and_not_that_of_the_check(installed):
    """Its innermost."""
    (found,) = check(installed.Model(), torch.ones(3, 4)).findings
    assert found.line == f"{installed.__file__}:3"


def test_a_console_script_is_nobodys_code():
    """Where nobody's is on the stack, none is named: a thread of its own has no caller."""
    script = f"{sysconfig.get_path('scripts')}/graphcache"
    code = compile("lines.append(user_line())", script, "exec")
    lines = []
    thread = threading.Thread(target=exec, args=(code, {"lines": lines, "user_line": user_line}))
    thread.start()
    thread.join()
    assert lines == [""]


@pytest.mark.parametrize("sizes", [(30, 10), (10, 30)], ids=str)
def test_a_bucket_beyond_a_table_is_refused_alone_whatever_call_comes_first(sizes):
    cache = GraphCache(Positions(), {"batch": [4], "seq": [12, 32]}, dynamic_shapes=BOTH)
    with torch.no_grad():
        for n in (*sizes, *sizes):
            x = torch.randn(3, min(n, 16), 4)
            torch.testing.assert_close(cache(x), cache.module(x))
    assert cache.stats().fallbacks == {"capture-failed": 2}
    assert (cache.stats().captures, cache.stats().replays) == (1, 1)
    assert cache.traffic.counts == {(3, 10): 2, (3, 16): 2}


def test_probing_a_call_beyond_a_table_spoils_nothing():
    cache = GraphCache(Positions(), {"batch": [4], "seq": [12, 32]}, dynamic_shapes=BOTH)
    assert all(facts.neutral for facts in cache.probe(torch.randn(3, 14, 4)).dims.values())
    with torch.no_grad():
        assert cache.explain(torch.randn(3, 10, 4)).action == "capture"
