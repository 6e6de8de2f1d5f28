"""What a call would do and why."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from graphcache import GraphCache, Reason
from graphcache.explain import Explanation, ProbeReport
from graphcache.padding import OutputAxis
from graphcache.probe import DimFacts


def ask(cache, *args, **kwargs):
    with torch.no_grad():
        return cache.explain(*args, **kwargs)


def rows(n, width=4):
    return torch.randn(n, width)


@pytest.fixture
def cache():
    return GraphCache(nn.Linear(4, 2).eval(), [8, 16])


class TestAnswers:
    def test_capture_then_replay(self, cache):
        """The bucket and sizes by name; asking changes nothing."""
        for _ in range(2):
            found = ask(cache, rows(5))
            assert (found.action, found.dims, found.sizes) == ("capture", ("batch",), (5,))
            assert found.bucket == (8,)
        assert cache.stats().calls == 0
        assert cache.stats().graphs == 0
        with torch.no_grad():
            cache(rows(5))
        assert ask(cache, rows(7)).action == "replay"
        assert ask(cache, rows(9)).action == "capture"

    def test_split_with_its_pieces(self, cache):
        """The buckets of the pieces."""
        found = ask(cache, rows(20))
        assert found.action == "split"
        assert found.pieces == ((16,), (8,))

    def test_gradients_are_told_with_the_remedy(self, cache):
        """`grad`, as the call itself would fall back."""
        found = cache.explain(rows(3))
        assert (found.action, found.reason) == ("eager", Reason.GRAD)
        assert "to do   call under `torch.inference_mode()` or `torch.no_grad()`" in str(found)

    @pytest.mark.parametrize(
        ("module", "x", "reason"),
        [
            (lambda x: x * x.sum().item(), rows(3), Reason.HOST_SYNC),
            (lambda x: x[x > 0], rows(3), Reason.DYNAMIC_OUTPUT),
            (lambda x: x * 2, rows(0), Reason.EMPTY),
            (lambda x: x.softmax(0), rows(3), Reason.BATCH_COUPLED),
            (lambda x: x.softmax(0), rows(30), Reason.OVER_MAX),
        ],
    )
    def test_eager_with_the_reason_that_the_call_then_has(self, module, x, reason):
        """The explanation and the counter agree."""
        cache = GraphCache(module, [8, 16])
        if reason == Reason.OVER_MAX:
            cache = GraphCache(module, [8, 16], split=None, dynamic_shapes={"x": {0: "batch"}})
        found = ask(cache, x)
        with torch.no_grad():
            cache(x)
        assert found.action == "eager"
        assert cache.stats().fallbacks == {found.reason: 1}
        if reason != Reason.OVER_MAX:
            assert found.reason == reason

    def test_a_cache_that_does_not_admit_yet_says_so(self):
        """capture_after=3: the next call runs eagerly, `not-admitted`."""
        cache = GraphCache(nn.Linear(4, 2).eval(), [8], capture_after=3)
        found = ask(cache, rows(3))
        with torch.no_grad():
            cache(rows(3))
        assert cache.stats().fallbacks == {"not-admitted": 1}
        assert (found.action, found.reason) == ("eager", "not-admitted")

    def test_a_sealed_cache_says_so(self, cache):
        """`not-admitted`: it will not capture."""
        with torch.no_grad():
            cache(rows(3))
        cache.seal()
        assert ask(cache, rows(3)).action == "replay"
        found = ask(cache, rows(9))
        assert (found.action, found.reason) == ("eager", "not-admitted")

    def test_an_exact_size_that_has_its_graph_is_a_replay(self):
        """A module that must not be padded, after its third use."""
        cache = GraphCache(lambda x: x.softmax(0), [8])
        for _ in range(3):
            cache(rows(5))
        assert ask(cache, rows(5)).action == "replay"

    def test_an_exact_size_about_to_be_captured_is_a_capture(self):
        """The third use captures, and the second does not."""
        cache = GraphCache(lambda x: x.softmax(0), [8])
        cache(rows(5))
        assert ask(cache, rows(5)).action == "eager"
        cache(rows(5))
        assert ask(cache, rows(5)).action == "capture"
        cache(rows(5))
        assert cache.stats().captures == 1

    def test_the_nearest_captured_key_and_its_differences_are_told(self, cache):
        """What a user must change to hit."""
        with torch.no_grad():
            cache(rows(5))
        module = cache.module
        found = ask(cache, rows(9))
        assert found.nearest == ("bucket: (16,), captured (8,)",)
        module.double()
        module.float()
        with torch.no_grad():
            cache(rows(5))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = ask(cache, rows(5))
        assert any(line.startswith("modes") for line in found.nearest)

    def test_wrong_inputs_are_an_answer_and_not_an_error(self, cache):
        """A width that eager would refuse."""
        found = ask(cache, rows(3, width=5))
        assert found.action == "eager"
        with torch.no_grad(), pytest.raises(RuntimeError, match="cannot be multiplied"):
            cache(rows(3, width=5))
        with torch.no_grad():
            assert cache(rows(3)).shape == (3, 2)


class TestPrinting:
    def test_an_explanation_prints_as_a_small_table(self):
        """A row for each thing known."""
        known = {"dims": ("batch", "seq"), "sizes": (5, 41), "bucket": (8, 64)}
        why = {"reason": Reason.BATCH_COUPLED, "detail": "rows move", "nearest": ("a: b", "c: d")}
        text = str(Explanation("eager", **known, **why))
        assert text.splitlines() == [
            "action  eager",
            "sizes   batch=5, seq=41",
            "bucket  batch=8, seq=64",
            "reason  batch-coupled: rows move",
            f"to do   {Reason.BATCH_COUPLED.remedy}",
            "differs a: b",
            "        c: d",
        ]

    def test_pieces_are_printed_as_a_sum(self):
        """16 + 8, with x between dims."""
        assert "pieces  16x4 + 8x4" in str(Explanation("split", pieces=((16, 4), (8, 4))))

    def test_a_reason_without_detail_prints_its_phrase(self):
        """The closed list's words."""
        assert "empty: a dynamic dim is 0" in str(Explanation("eager", reason=Reason.EMPTY))

    def test_a_probe_report_prints_a_line_for_each_dim(self):
        """Neutral or the reason, controls, independence, output axes."""
        report = ProbeReport(
            {
                "batch": DimFacts(True, axes=[[OutputAxis(0, 0, 1, 0)]], independent=True),
                "seq": DimFacts(False, "moved", Reason.PAD_NOT_NEUTRAL),
                "part": DimFacts(True, controls={"mask": 0}),
            }
        )
        head, batch, seq, part = str(report).splitlines()
        assert head.split() == ["dim", "padding", "controls", "rows", "independent", "outputs"]
        assert batch.split() == ["batch", "neutral", "-", "yes", "[0]"]
        assert seq.split() == ["seq", "pad-not-neutral", "-", "no", "-"]
        assert part.split() == ["part", "neutral", "mask=0", "no", "-"]

    def test_a_refused_probe_prints_its_reason(self):
        """Through the cache."""
        report = GraphCache(lambda x: x * x.sum().item(), [8]).probe(rows(3))
        assert report.refused == Reason.HOST_SYNC
        assert str(report).startswith("refused: host-sync: `.item()`")

    def test_columns_are_as_wide_as_what_they_hold(self):
        """Two spaces between neighbours, however long the names are."""
        masks = {"attention_mask_of_the_encoder": 0, "attention_mask_of_the_decoder": "repeat"}
        report = ProbeReport(
            {
                "batch": DimFacts(True, independent=True),
                "length_of_the_target": DimFacts(False, "", Reason.UNSUPPORTED_OUTPUT),
                "seq": DimFacts(True, controls=masks, axes=[[], []]),
            }
        )
        head, *lines = [re.split(" {2,}", line) for line in str(report).splitlines()]
        held = "attention_mask_of_the_encoder=0, attention_mask_of_the_decoder=repeat"
        assert head == ["dim", "padding", "controls", "rows independent", "outputs"]
        assert lines == [
            ["batch", "neutral", "-", "yes", "-"],
            ["length_of_the_target", "unsupported-output", "-", "no", "-"],
            ["seq", "neutral", held, "no", "[] []"],
        ]

    def test_a_remedy_is_told_once(self):
        """`over-max` has it in its own row."""
        cache = GraphCache(nn.Linear(4, 2).eval(), [8], split=None)
        assert str(ask(cache, rows(9))).count("add a bucket") == 1

    def test_readme_shows_what_its_code_prints(self, capsys):
        """The table under the code of two dims and a mask."""
        readme = (Path(__file__).parent.parent / "README.md").read_text()
        code, shown = re.search(
            r"```python\n([^`]*?print\(fast\.probe[^`]*)```.*?```text\n(.*?)```", readme, re.DOTALL
        ).groups()
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
        assert capsys.readouterr().out == shown
