"""The demo serves what it says, equal to eager, and refuses traces that it cannot read."""

import statistics

import pytest
import torch

from graphcache import GraphCacheError, demo

BACKEND = "cuda" if torch.cuda.is_available() else "recorded"
SMALL = [(1, 5), (3, 9), (2, 16), (3, 9), (4, 12)]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    rows = [f"0.5,{seq},{batch}\n" for batch, seq in SMALL]
    path.write_text("".join(["timestamp_s,seq,batch\n", *rows]))
    return path


@pytest.fixture(scope="module")
def small_encoder():
    torch.manual_seed(0)
    return demo.Encoder(positions=32).eval()


class TestRun:
    def test_serves_every_call_of_a_trace_by_a_replay(self, trace):
        """Each of the three passes replays; warmup captured the buckets used, no others."""
        report = demo.run(trace)
        assert (report.calls_in_stream, report.distinct_sizes) == (5, 4)
        assert report.buckets == {"batch": [1, 2, 4], "seq": [8, 16]}
        assert (report.graphs, report.captures, report.replays) == (3, 3, 15)
        assert (report.eager_runs, report.fallbacks) == (0, {})
        assert (report.backend, report.stream) == (BACKEND, str(trace))

    def test_measures_times_and_differences(self, trace):
        """Times are positive, results are close to eager's, padding is counted."""
        report = demo.run(trace, rows=2)
        assert report.calls_in_stream == 2
        assert min(report.eager_ms, report.graphcache_ms, report.warmup_seconds) > 0
        assert report.graph_bytes > 0
        assert report.padding_overhead == pytest.approx((1 * 8 + 4 * 16) / (1 * 5 + 3 * 9) - 1)
        assert report.largest_relative_difference <= (1e-2 if BACKEND == "cuda" else 1e-3)
        assert report.largest_difference <= report.largest_relative_difference * 2

    def test_leaves_the_random_state_alone(self, trace):
        """The weights are drawn from a seed of the demo's own."""
        before = torch.random.get_rng_state()
        demo.run(trace, rows=1)
        assert torch.equal(torch.random.get_rng_state(), before)


class TestTrace:
    @pytest.mark.parametrize(
        ("content", "what", "remedy"),
        [
            (b"batch,tokens\n1,2\n", "no column \\['seq'\\]", "name the columns"),
            (b"batch,seq\n1,zero\n", ":2: seq is 'zero'", "mend or remove the row"),
            (b"batch,seq\n", "no rows", "one call a row"),
            (b"\xff\xfe\x00batch", "can't decode", "with the columns batch and seq"),
        ],
    )
    def test_names_file_and_remedy_of_what_it_cannot_read(self, tmp_path, content, what, remedy):
        path = tmp_path / "bad.csv"
        path.write_bytes(content)
        with pytest.raises(GraphCacheError, match=f"bad.csv.*{what}.*{remedy}"):
            demo.run(path)

    def test_names_a_file_that_is_not_there(self, tmp_path):
        with pytest.raises(GraphCacheError, match=r"none.csv.*No such file.*pass a CSV file"):
            demo.run(tmp_path / "none.csv")


class TestStream:
    def test_resembles_an_embedding_service(self):
        """Ranges are exact, medians near."""
        batches, seqs = zip(*demo.service_sizes(2000), strict=True)
        assert (min(batches), max(batches)) == (1, 32)
        assert (min(seqs), max(seqs)) == (6, 98)
        assert statistics.median(batches) == pytest.approx(7, abs=1)
        assert statistics.median(seqs) == pytest.approx(27, abs=2)

    def test_is_the_same_each_time_and_a_longer_one_continues_it(self):
        assert demo.service_sizes(20)[:10] == demo.service_sizes(10)

    def test_masks_are_ragged_and_never_empty(self):
        """Each call's first row is full; every row holds a token, even of sequences of one."""
        batches = demo._batches([(6, 1), (8, 40)], torch.device("cpu"))
        for ids, mask in batches:
            assert mask[0].all()
            assert mask.sum(1).min() >= 1
            assert not ids[mask == 0].any()
        assert len(set(batches[1][1].sum(1).tolist())) > 1


class TestEncoder:
    def test_has_the_shape_of_minilm(self):
        """22.5 million parameters, as in the published model less its token types and pooler."""
        encoder = demo.Encoder()
        count = sum(parameter.numel() for parameter in encoder.parameters())
        layer = 4 * 384 * 385 + 384 * 1536 * 2 + 1536 + 384 + 4 * 384
        assert count == (30522 + 512) * 384 + 2 * 384 + 6 * layer

    def test_gives_embeddings_of_norm_one(self, small_encoder):
        ids, mask = demo._batches([(3, 7)], torch.device("cpu"))[0]
        with torch.inference_mode():
            result = small_encoder(ids, mask)
        assert result.shape == (3, 384)
        torch.testing.assert_close(result.norm(dim=1), torch.ones(3))

    def test_ignores_what_is_masked(self, small_encoder):
        """Other ids under the mask, and more masked columns, change nothing."""
        ids, mask = torch.arange(1, 9).view(1, 8), torch.tensor([[1] * 5 + [0] * 3])
        other = torch.where(mask.bool(), ids, 77)
        with torch.inference_mode():
            expected = small_encoder(ids[:, :5], mask[:, :5])
            torch.testing.assert_close(small_encoder(ids, mask), expected)
            torch.testing.assert_close(small_encoder(other, mask), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_replays_are_faster_than_eager_on_a_gpu():
    """The point of the package, on the built-in stream."""
    report = demo.run(rows=100)
    assert report.fallbacks == {}
    assert report.graphcache_ms < report.eager_ms
