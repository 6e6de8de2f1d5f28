"""The CPU recorder: the hazards of a CUDA graph but streams, pools and the CUDA generator."""

import copy
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphcache import GraphCache
from graphcache.compare import same_bits
from graphcache.errors import CaptureError
from graphcache.graphs.recorded import RecordedBackend
from graphcache.preflight import as_captured


def record(function, *inputs):
    """Record one run of `function` on copies of `inputs`: the graph and its static inputs."""
    statics = [tensor.clone() for tensor in inputs]

    def run():
        with as_captured():
            result = function(*statics)
        return list(result) if isinstance(result, (tuple, list)) else [result]

    return RecordedBackend().capture(run), statics


def replay(graph, statics, *inputs):
    """The graph's results for other inputs, as copies."""
    for static, tensor in zip(statics, inputs, strict=True):
        static.copy_(tensor)
    graph.replay()
    return [output.clone() for output in graph.outputs]


def eager(function, *inputs):
    """Eager's results, with "capturing?" answered yes, as the design compares."""
    with as_captured():
        result = function(*inputs)
    return list(result) if isinstance(result, (tuple, list)) else [result]


def assert_bitwise(ours, theirs):
    assert len(ours) == len(theirs)
    assert all(map(same_bits, ours, theirs))


class Attention(nn.Module):
    """Self-attention with a key padding mask, through PyTorch's own module."""

    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    """A recurrent layer, results and last state."""

    def __init__(self, kind):
        super().__init__()
        self.inner = kind(4, 5, num_layers=2, batch_first=True)

    def forward(self, x):
        out, state = self.inner(x)
        return [out, *state] if isinstance(state, tuple) else [out, state]


class InPlace(nn.Module):
    """Metadata and values changed in place, through views of views."""

    def forward(self, x):
        y = x * 2
        y.transpose_(0, 1)
        y[1].add_(1)
        y.t_().mul_(3)
        z = y.view(-1)[2:6]
        z.clamp_(max=0.5)
        y.squeeze_().unsqueeze_(0)
        y.unsqueeze_(-1).squeeze_(-1)
        return y


class Indexing(nn.Module):
    """Indexed reads and writes in place."""

    def forward(self, x, index):
        y = torch.zeros(8, x.shape[1])
        y[index] = x
        y.index_add_(0, index, x)
        y[:, 0] = x.sum()
        y[0, 1:] += x[0, 1:]
        y.masked_fill_(y > 1, 0.25)
        return y, y[index.flip(0)]


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.EmbeddingBag(10, 4, mode="mean")

    def forward(self, index, offsets):
        return self.inner(index, offsets)


class Split(nn.Module):
    """Several results of one operation, some unused, and a view as a result."""

    def forward(self, x):
        first, _, third = x.split(2, 1)
        values, order = x.sort(1)
        return [first + third, values, order, x.mul(2).t()]


ZOO = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2)), [(5, 6)]),
    "gru": (lambda: Recurrent(nn.GRU), [(3, 7, 4)]),
    "lstm": (lambda: Recurrent(nn.LSTM), [(3, 7, 4)]),
    "rnn": (lambda: Recurrent(nn.RNN), [(3, 7, 4)]),
    "attention": (lambda: Attention().eval(), [(2, 5, 8)]),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(),
        [(2, 5, 8)],
    ),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(6), nn.Softmax(-1)), [(5, 6)]),
    "batch norm in eval": (lambda: nn.BatchNorm1d(6).eval(), [(5, 6)]),
    "in place": (InPlace, [(3, 4)]),
    "several results": (Split, [(5, 6)]),
}


@pytest.mark.parametrize("name", ZOO)
def test_a_replay_is_bitwise_equal_to_eager(name):
    """For new values of the same shape, three times interleaved."""
    torch.manual_seed(0)
    make, shapes = ZOO[name]
    module = make()
    graph, statics = record(module, *(torch.randn(shape) for shape in shapes))
    for _ in range(3):
        inputs = [torch.randn(shape) for shape in shapes]
        assert_bitwise(replay(graph, statics, *inputs), eager(module, *inputs))


def test_a_channels_last_convolution_is_bitwise_equal_and_keeps_its_layout():
    """The statics keep the input's strides, and so does the result."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    module = module.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    graph, statics = record(module, x)
    assert statics[0].stride() == x.stride()
    other = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    (ours,) = replay(graph, statics, other)
    (theirs,) = eager(module, other)
    assert_bitwise([ours], [theirs])
    assert graph.outputs[0].stride() == theirs.stride()


def test_batch_norm_in_training_is_bitwise_equal_and_advances_its_statistics_once_a_replay():
    """Results and running statistics follow eager's, replay by replay."""
    torch.manual_seed(0)
    module = nn.BatchNorm1d(4)
    reference = copy.deepcopy(module)
    graph, statics = record(module, torch.randn(6, 4))
    module.load_state_dict(reference.state_dict())  # the recorded run advanced them, too
    for _ in range(3):
        x = torch.randn(6, 4)
        assert_bitwise(replay(graph, statics, x), eager(reference, x))
        assert_bitwise(list(module.buffers()), list(reference.buffers()))
    assert module.num_batches_tracked == 3


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_an_encoder_with_a_padding_mask_gives_eagers_result_at_padded_positions():
    """PyTorch's fast path zeroes them; a recording that takes another path must not differ."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    module = nn.TransformerEncoder(layer, 2).eval()
    cache = GraphCache(module, [2])
    x, mask = torch.randn(2, 5, 8), torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 3:] = True
    with torch.inference_mode():
        for _ in range(2):
            expected = module(x, src_key_padding_mask=mask)
            torch.testing.assert_close(cache(x, src_key_padding_mask=mask), expected)


def test_an_embedding_bag_is_bitwise_equal_to_eager():
    """Also with other offsets, which are data."""
    torch.manual_seed(0)
    module = Bag()
    graph, statics = record(module, torch.randint(10, (7,)), torch.tensor([0, 2, 5]))
    for offsets in ([0, 2, 5], [0, 1, 6], [0, 3, 3]):
        inputs = torch.randint(10, (7,)), torch.tensor(offsets)
        assert_bitwise(replay(graph, statics, *inputs), eager(module, *inputs))


def test_indexing_in_place_is_bitwise_equal_to_eager():
    """`y[index] = x`, `index_add_`, slices and masked fills, with other indices."""
    torch.manual_seed(0)
    graph, statics = record(Indexing(), torch.randn(3, 4), torch.tensor([0, 2, 5]))
    for index in ([0, 2, 5], [7, 1, 0], [4, 3, 6]):
        inputs = torch.randn(3, 4), torch.tensor(index)
        assert_bitwise(replay(graph, statics, *inputs), eager(Indexing(), *inputs))


def test_autocast_is_recorded_and_not_applied_again():
    """The casts of the recorded run are replayed, whatever autocast the replay runs under."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    x = torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph, statics = record(module, x)
        expected = eager(module, x)
        assert_bitwise(replay(graph, statics, x), expected)
    assert_bitwise(replay(graph, statics, x), expected)
    assert expected[0].dtype != torch.float64


def test_a_python_branch_and_a_number_are_frozen_at_capture():
    """What Python decided once is decided for every replay, as in a real graph."""
    setting = {"double": True, "shift": 1.0}

    def function(x):
        return x * 2 + setting["shift"] if setting["double"] else x - setting["shift"]

    graph, statics = record(function, torch.ones(2))
    setting.update(double=False, shift=5.0)
    (frozen,) = replay(graph, statics, torch.full((2,), 3.0))
    assert frozen.tolist() == [7.0, 7.0]
    assert function(torch.full((2,), 3.0)).tolist() == [-2.0, -2.0]


def test_no_python_of_the_module_runs_in_a_replay():
    """A replay is the operations alone."""
    calls = []

    def function(x):
        calls.append(1)
        return x + 1

    graph, statics = record(function, torch.ones(2))
    replay(graph, statics, torch.zeros(2))
    assert len(calls) == 1


READS = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    'to("cpu")': lambda x: x.to("cpu"),
    'to(device="cpu")': lambda x: x.to(device="cpu"),
    "str": str,
    "repr": repr,
    "format": lambda x: f"{x.sum()}",
    "numpy": lambda x: x.numpy(),
    "numpy force": lambda x: x.numpy(force=True),
    "np.asarray": np.asarray,
    "dlpack": lambda x: x.__dlpack__(),
    "np.from_dlpack": np.from_dlpack,
    "to_dlpack": lambda x: torch.utils.dlpack.to_dlpack(x),
    "bool": lambda x: bool(x.sum() > 0),
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x.sum()),
    "index": lambda x: [0, 1, 2][x.sum().long()],
    "in": lambda x: 1.0 in x,
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "mask write": lambda x: x.clone().__setitem__(x > 0, torch.ones(4)),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "one_hot": lambda x: F.one_hot(x.long()),
    "inv": lambda x: torch.linalg.inv(x.view(2, 2) + 5 * torch.eye(2)),
    "svd": lambda x: torch.linalg.svd(x.view(2, 2)),
}


@pytest.mark.parametrize("name", READS)
def test_a_host_read_is_refused(name):
    """Each read that would break a capture on a GPU raises here, and names what it was."""

    def function(x):
        READS[name](x)
        return x + 1

    with pytest.raises(CaptureError, match=r"cannot be recorded: "):
        record(function, torch.ones(4))


ALLOWED = {
    "to(x.device)": lambda x: x.to(x.device),
    "to(dtype)": lambda x: x.to(torch.float64),
    "masked fill": lambda x: x.clone().masked_fill_(x > 0, 0.5),
    "mask fill by index": lambda x: x.clone().__setitem__(x > 0, 0.5),
    "shape": lambda x: [x.shape, x.size(0), len(x), x.numel()],
    "where": lambda x: torch.where(x > 0, x, 0),
    "multinomial": lambda x: torch.multinomial(x, 2),
    "isin": lambda x: torch.isin(x, x),
    "repeat_interleave with a size": lambda x: x.repeat_interleave(x.long(), output_size=4),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_a_capture_allows_is_not_refused(name):
    """A refusal of harmless code would send whole models to eager."""

    def function(x):
        ALLOWED[name](x)
        return x + 1

    graph, statics = record(function, torch.ones(4))
    (out,) = replay(graph, statics, torch.ones(4))
    assert out.tolist() == [2.0] * 4


def test_a_refused_capture_leaves_no_mode_behind():
    """After the error the process computes and reads as before."""
    with pytest.raises(CaptureError):
        record(lambda x: x.tolist(), torch.ones(2))
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0
    assert torch.ones(2).tolist() == [1.0, 1.0]


def test_the_outputs_are_overwritten_by_the_next_replay():
    """Static outputs are the graph's memory, not the caller's."""
    graph, statics = record(lambda x: x * 2, torch.ones(2))
    graph.replay()
    kept = graph.outputs[0]
    assert kept.tolist() == [2.0, 2.0]
    replay(graph, statics, torch.full((2,), 5.0))
    assert kept.tolist() == [10.0, 10.0]


def test_addresses_stay_fixed_over_replays():
    """Invariant I1, for static inputs and outputs."""
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    graph, statics = record(module, torch.randn(3, 4))
    before = [tensor.data_ptr() for tensor in (*statics, *graph.outputs)]
    for _ in range(3):
        replay(graph, statics, torch.randn(3, 4))
    assert [tensor.data_ptr() for tensor in (*statics, *graph.outputs)] == before


def test_weights_changed_in_place_are_read_by_the_next_replay():
    """A replay reads the weight's address, as a kernel does."""
    module = nn.Linear(4, 2)
    graph, statics = record(module, torch.ones(3, 4))
    with torch.no_grad():
        module.weight.normal_()
        module.bias.fill_(0.5)
    x = torch.randn(3, 4)
    assert_bitwise(replay(graph, statics, x), eager(module, x))


def test_a_weight_put_in_place_of_another_is_not_seen():
    """The hazard that the watch exists for: the old address is frozen."""
    module = nn.Linear(4, 2)
    x = torch.ones(3, 4)
    graph, statics = record(module, x)
    old = eager(module, x)
    module.weight = nn.Parameter(torch.zeros(2, 4))
    assert_bitwise(replay(graph, statics, x), old)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout(x, 0.5),
        lambda x: x + torch.randn(4, 3),
        lambda x: x + torch.rand_like(x),
        torch.bernoulli,
        lambda x: x[torch.randperm(4)],
        lambda x: torch.multinomial(x, 2),
        lambda x: x.clone().normal_() + x.clone().uniform_(),
        lambda x: F.gumbel_softmax(x),
        lambda x: torch.normal(x, 1.0) + torch.randint(9, (4, 3)),
    ],
)
def test_random_operations_draw_anew_and_as_eager_does_for_the_same_seed(function):
    """Three replays give three draws; from one seed they are eager's, in order, to the bit."""
    x = torch.linspace(0.1, 1, 12).view(4, 3)
    graph, statics = record(function, x)
    torch.manual_seed(7)
    ours = [replay(graph, statics, x)[0] for _ in range(3)]
    torch.manual_seed(7)
    theirs = [eager(function, x)[0] for _ in range(3)]
    assert_bitwise(ours, theirs)
    assert len({tuple(out.flatten().tolist()) for out in ours}) > 1


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_training_step_is_bitwise_equal_to_eager(kind):
    """Forward, backward, clipping and the optimizer's update in one recording."""

    def make():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        if kind == "sgd":
            return module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        return module, torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)

    def step(module, optimizer, x, y):
        optimizer.zero_grad(set_to_none=False)
        loss = F.mse_loss(module(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    (module, optimizer), (reference, other) = make(), make()
    batches = [(torch.randn(6, 4), torch.randn(6, 1)) for _ in range(5)]
    for m, o in ((module, optimizer), (reference, other)):
        step(m, o, *batches[0])  # gradients and the optimizer's state come to be
    statics = [tensor.clone() for tensor in batches[0]]
    graph = RecordedBackend().capture(lambda: [step(module, optimizer, *statics)])
    step(reference, other, *batches[0])  # the recorded run was a step as well
    assert_bitwise(list(module.parameters()), list(reference.parameters()))
    for batch in batches[1:]:
        loss = replay(graph, statics, *batch)
        assert_bitwise(loss, [step(reference, other, *batch)])
        assert_bitwise(list(module.parameters()), list(reference.parameters()))


def test_constants_of_the_run_are_kept_and_not_made_again():
    """A tensor built from Python numbers in the run has its values in every replay."""

    def function(x):
        table = torch.tensor([1.0, 2.0, 3.0])
        table.mul_(x.sum())
        return x + table

    graph, statics = record(function, torch.ones(3))
    for value in (2.0, 3.0):
        x = torch.full((3,), value)
        assert_bitwise(replay(graph, statics, x), eager(function, x))


def test_memory_that_is_written_before_it_is_read_is_written_in_each_replay():
    """Buffers from `empty` and `zeros` accumulate nothing over replays."""

    def function(x):
        total = torch.zeros(3)
        for row in x:
            total += row
        scratch = torch.empty(3)
        scratch.copy_(total)
        return scratch, torch.zeros_like(x).add_(x)

    graph, statics = record(function, torch.ones(2, 3))
    for _ in range(3):
        x = torch.randn(2, 3)
        assert_bitwise(replay(graph, statics, x), eager(function, x))


def test_an_out_argument_is_written_in_each_replay():
    """`out=` variants write where they were told to."""

    def function(x):
        out = torch.empty(2, 3)
        torch.add(x, 1, out=out)
        return out

    graph, statics = record(function, torch.ones(2, 3))
    x = torch.randn(2, 3)
    assert_bitwise(replay(graph, statics, x), eager(function, x))


def test_the_pool_counts_what_live_graphs_hold():
    """Bytes grow with each capture, shrink with each retired graph, and end at 0."""
    backend = RecordedBackend()
    x = torch.ones(16, 4)
    first = backend.capture(lambda: [x * 2])
    assert first.nbytes == backend.pool_bytes() == 16 * 4 * 4
    second = backend.capture(lambda: [(x * 2).sum(0)])
    assert backend.pool_bytes() == first.nbytes + second.nbytes
    backend.retire(first)
    assert backend.pool_bytes() == second.nbytes
    assert first.outputs == []
    backend.flush()
    assert backend.pool_bytes() == 0


def test_what_is_lent_is_a_copy():
    """The recorder cannot guard memory, so a lent result stays valid."""
    backend = RecordedBackend()
    static = torch.ones(3)
    lent = backend.lend(static)
    backend.poison(lent)
    static.zero_()
    assert lent.tolist() == [1.0] * 3


def test_the_recorder_refuses_without_stopping_the_callers_other_threads():
    """Its modes are thread-local: another thread may read tensors during a capture."""
    read, begun, done = [], threading.Event(), threading.Event()

    def reads():
        begun.wait(10)
        read.append(torch.ones(2).tolist())
        done.set()

    def function(x):
        begun.set()
        assert done.wait(10)
        return x + 1

    threading.Thread(target=reads).start()
    record(function, torch.ones(2))
    assert read == [[1.0, 1.0]]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("inner", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_forward_in_a_mode_of_its_own_is_served(inner, mode):
    """What it makes in inference mode can be written to in that mode only."""
    linear = torch.nn.Linear(4, 4).requires_grad_(False)
    cache = GraphCache(inner()(lambda x: linear(x) * 2), [4, 8])
    with mode():
        for n in (3, 4, 7, 3):
            x = torch.randn(n, 4)
            torch.testing.assert_close(cache(x), linear(x) * 2)
    assert cache.stats().eager == 0
