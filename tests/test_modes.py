"""Calls under every mode and setting of PyTorch: eager's result under the same one.

Modes that take turns in one cache never serve each other's graphs, and a call leaves each of them
as it found it.
"""

import collections
import contextlib
import copy
import functools
import multiprocessing
import os
import pickle
import subprocess
import sys

import pytest
import torch
import torch._dynamo  # replaces torch.manual_seed when it is first imported
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import Twin, assert_same

from graphcache import GraphCache
from graphcache.modes import Modes

SIZES = (3, 8, 11, 3)  # padded, exact, split, and padded once more


class Net(nn.Module):
    """Attention over two places, a matmul, and a tensor made in forward."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 24)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        q, k, v = self.qkv(x).view(-1, 1, 2, 4, 3).unbind(-1)
        y = F.scaled_dot_product_attention(q, k, v).reshape(-1, 8)
        made = torch.full((8,), 0.5, device=x.device)
        return self.head(torch.cat([y * made, y - made], -1).to(self.head.weight.dtype))


@contextlib.contextmanager
def setting(setter, value, before):
    """A process-wide setting for the length of a block."""
    setter(value)
    try:
        yield
    finally:
        setter(before)


def autocast(device, dtype, **options):
    return torch.autocast(torch.device(device).type, dtype, **options)


@contextlib.contextmanager
def cast_and_not(device):
    """An inner block that takes autocast back."""
    with autocast(device, torch.bfloat16), autocast(device, torch.bfloat16, enabled=False):
        yield


@contextlib.contextmanager
def cast_twice(device):
    """The inner dtype counts."""
    with autocast(device, torch.bfloat16), autocast(device, torch.float16):
        yield


@contextlib.contextmanager
def default_dtype(dtype):
    with setting(torch.set_default_dtype, dtype, torch.float32):
        yield


MODES = {
    "plain": lambda device: contextlib.nullcontext(),
    "no_grad": lambda device: torch.no_grad(),
    "inference": lambda device: torch.inference_mode(),
    "bfloat16 autocast": lambda device: autocast(device, torch.bfloat16),
    "float16 autocast": lambda device: autocast(device, torch.float16),
    "autocast without its cache": lambda device: autocast(
        device, torch.bfloat16, cache_enabled=False
    ),
    "autocast within autocast": cast_twice,
    "autocast taken back": cast_and_not,
    "float64 default": lambda device: default_dtype(torch.float64),
    "bfloat16 default": lambda device: default_dtype(torch.bfloat16),
    "deterministic": lambda device: setting(torch.use_deterministic_algorithms, True, False),
    "medium precision": lambda device: setting(
        torch.set_float32_matmul_precision, "medium", "highest"
    ),
    "no flash": lambda device: setting(torch.backends.cuda.enable_flash_sdp, False, True),
    "math attention": lambda device: sdpa_kernel(SDPBackend.MATH),
    "default device": lambda device: torch.device(device),
    "default device set": lambda device: setting(torch.set_default_device, device, None),
    "another default device": lambda device: torch.device("meta"),
    "anomaly": lambda device: torch.autograd.set_detect_anomaly(True),
    "saved tensors": lambda device: torch.autograd.graph.save_on_cpu(),
}

# Settings that let float32 be computed in fewer bits, where another shape may round otherwise.
ROUGH = {"medium precision"}


def state_of_modes():
    """All that a call might leave changed."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_cache_enabled(),
        *(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")),
        *(torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")),
        torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.is_anomaly_enabled(),
        torch.cuda.is_current_stream_capturing,
        torch.Tensor.tolist,
        torch.Tensor.item,
        torch.manual_seed,
        torch.get_num_threads(),
    )


@pytest.fixture(autouse=True)
def _all_modes_are_put_back():
    torch.set_float32_matmul_precision("highest")  # a process that never set it has it unset
    before = state_of_modes()
    yield
    assert state_of_modes() == before


@pytest.fixture
def twin(device):
    return make_twin(device)


def make_twin(device, **options):
    net = Net().to(device).eval().requires_grad_(False)
    return Twin(GraphCache(net, [4, 8], **options))


def calls(twin, device, sizes=SIZES, rough=False):
    for n in sizes:
        x = torch.randn(n, 4, device=device, dtype=torch.float32)
        if rough:
            torch.testing.assert_close(twin.cache(x), twin.eager(x), rtol=1e-2, atol=1e-2)
        else:
            twin(x)


@pytest.mark.parametrize("name", MODES)
def test_calls_equal_eagers_under_the_same_mode(name, twin, device):
    """In value and dtype, all by graphs, with modes left alone; in grad mode too, since nothing
    requires grad.
    """
    with MODES[name](device):
        within = state_of_modes()
        calls(twin, device, rough=name in ROUGH)
        assert state_of_modes() == within
    stats = twin.cache.stats()
    assert (stats.captures, stats.eager, stats.splits) == (2, 0, 1)


@pytest.mark.parametrize("name", [name for name in MODES if name != "plain"])
def test_a_mode_in_turn_with_none(name, twin, device):
    """No mode, the mode, no mode, the mode: bit for bit eager's at an exact size; the second round
    only replays.
    """
    x = torch.randn(8, 4, device=device)
    captures = []
    for mode in ("plain", name) * 2:
        with MODES[mode](device):
            assert_same(twin.cache(x), twin.eager(x), bitwise=True)
        captures.append(twin.cache.stats().captures)
    assert captures[0] == 1
    assert captures[1] == captures[2] == captures[3]
    assert twin.cache.stats().eager == 0


def test_all_modes_in_turn(twin, device):
    """There and back through all of them in one cache, which then has a graph for each that
    chooses kernels.
    """
    x = torch.randn(8, 4, device=device)
    captures = []
    for name in [*MODES, *reversed(MODES), *MODES]:
        with MODES[name](device):
            assert_same(twin.cache(x), twin.eager(x), bitwise=True)
        captures.append(twin.cache.stats().captures)
    assert captures[len(MODES) - 1] == captures[-1] <= len(MODES)
    assert twin.cache.stats().eager == 0


def test_a_cast_of_another_dtype_never_serves(twin, device):
    """bfloat16, float16 and none within each other."""
    x = torch.randn(8, 4, device=device)
    dtypes = []
    for _ in range(2):
        for dtype in (torch.bfloat16, torch.float16):
            with autocast(device, dtype):
                dtypes.append(twin.cache(x).dtype)
                with autocast(device, dtype, enabled=False):
                    dtypes.append(twin.cache(x).dtype)
    assert dtypes == [torch.bfloat16, torch.float32, torch.float16, torch.float32] * 2
    assert (twin.cache.stats().captures, twin.cache.stats().replays) == (3, 5)


@pytest.mark.parametrize("first", ["before", "inside"])
def test_weights_changed_within_one_autocast_block(first, device):
    """Eager would cast them once for the block; we give what a fresh block gives."""
    net = Net().to(device).eval()
    cache = GraphCache(net, [4, 8])
    x = torch.randn(3, 4, device=device)
    with torch.no_grad():
        if first == "before":
            with autocast(device, torch.bfloat16):
                cache(x)
        with autocast(device, torch.bfloat16):
            for _ in range(3):
                ours = cache(x)
                torch.clear_autocast_cache()
                assert_same(ours, net(x))
                torch.clear_autocast_cache()
                for weight in net.parameters():
                    weight.mul_(1.5)
    assert (cache.stats().captures, cache.stats().eager) == (1, 0)


def test_a_capture_leaves_no_casts_to_the_callers_block(device):
    """What eager casts in the block after a capture, and what it cast before, are its own."""
    net = Net().to(device).eval()
    cache = GraphCache(net, [4, 8])
    x = torch.randn(8, 4, device=device)
    with torch.no_grad(), autocast(device, torch.bfloat16):
        before = net(x)
        assert_same(cache(x), before)
        for weight in net.parameters():
            weight.mul_(2)
        torch.clear_autocast_cache()
        after = net(x)
        assert not torch.equal(after, before)
        assert_same(cache(x), after)


def test_gradients_after_a_capture_in_one_autocast_block(device):
    """Casts made in a trial run, without gradients, must not serve a call that needs them."""
    net = Net().to(device).eval()
    cache = GraphCache(net, [4, 8])
    x = torch.randn(3, 4, device=device)
    with autocast(device, torch.bfloat16):
        cache.warmup(sample=x, progress=False)
        cache(x).sum().backward()
    assert all(weight.grad is not None for weight in net.parameters())


def made_in(mode, make):
    with mode():
        return make()


GRAD_MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("weights", GRAD_MODES)
@pytest.mark.parametrize("inputs", GRAD_MODES)
def test_inputs_and_weights_of_one_mode_in_another(weights, inputs, device):
    """Inference tensors outside of inference mode and ordinary ones within, by the same graphs."""
    twin = made_in(weights, lambda: make_twin(device))
    for _ in range(2):
        for mode in GRAD_MODES:
            for n in (3, 8, 11):
                x = made_in(inputs, lambda n=n: torch.randn(n, 4, device=device))
                with mode():
                    twin(x)
    assert (twin.cache.stats().captures, twin.cache.stats().eager) == (2, 0)


@pytest.mark.parametrize("mode", GRAD_MODES)
def test_results_may_be_used_as_eagers_in_a_graph_of_gradients(mode, twin, device):
    """Those made outside of inference mode; the others raise what eager's raise."""
    x = torch.randn(3, 4, device=device)
    weight = torch.ones(4, device=device, requires_grad=True)
    with mode():
        ours, theirs = twin.cache(x), twin.eager(x)
    if theirs.is_inference():
        for result in (ours, theirs):
            with pytest.raises(RuntimeError, match="Inference tensors"):
                result * weight
        return
    (grad,) = torch.autograd.grad((ours * weight).sum(), weight)
    torch.testing.assert_close(grad, theirs.sum(0))


def test_modes_within_modes(twin, device):
    """Gradients on within off, and inference mode off within on."""
    with torch.no_grad(), torch.enable_grad():
        calls(twin, device)
    with torch.inference_mode(), torch.inference_mode(False):
        calls(twin, device)
    with torch.inference_mode(), torch.no_grad(), autocast(device, torch.bfloat16):
        calls(twin, device)
    assert (twin.cache.stats().captures, twin.cache.stats().eager) == (4, 0)


@pytest.mark.parametrize("name", MODES)
def test_a_call_that_raises_leaves_the_modes_alone(name, twin, device):
    """Cold and warm."""
    wrong = torch.randn(3, 5, device=device)
    with MODES[name](device):
        within = state_of_modes()
        for _ in range(2):
            with pytest.raises(RuntimeError):
                twin.cache(wrong)
            assert state_of_modes() == within
            calls(twin, device, (8,))


def changing(setter, value, before):
    """A module that sets something for the length of its own forward."""

    class Changing(nn.Module):
        def forward(self, x):
            setter(value)
            try:
                return x @ torch.ones(4, 4, device=x.device).to(x.dtype)
            finally:
                setter(before)

    return Changing()


@pytest.mark.parametrize(
    ("setter", "value", "before"),
    [
        (torch.set_grad_enabled, False, True),
        (torch.set_default_dtype, torch.float64, torch.float32),
        (torch.use_deterministic_algorithms, True, False),
        (torch.set_float32_matmul_precision, "high", "highest"),
        (torch.backends.cuda.enable_flash_sdp, False, True),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_module_that_sets_a_mode_for_itself(setter, value, before, device):
    twin = Twin(GraphCache(changing(setter, value, before).to(device), [4, 8]))
    calls(twin, device)


class CastsItself(nn.Module):
    """As models do that run a part in float32 whatever the caller says, or in half."""

    def __init__(self, enabled):
        super().__init__()
        self.inner, self.enabled = Net(), enabled

    def forward(self, x):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.enabled):
            return self.inner(x.float())


@pytest.mark.parametrize("enabled", [True, False])
def test_a_module_that_casts_by_itself(enabled, device):
    """Within autocast and without."""
    twin = Twin(GraphCache(CastsItself(enabled).to(device).requires_grad_(False), [4, 8]))
    for _ in range(2):
        for mode in ("plain", "bfloat16 autocast", "float16 autocast"):
            with MODES[mode](device):
                calls(twin, device, (3, 8, 3))
    assert twin.cache.stats().eager == 0


def test_a_profiler_around_calls(twin, device):
    """Captures and replays within it are right, and the cache serves on after it."""
    for _ in range(2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            calls(twin, device)
        assert any(event.key.startswith("aten::") for event in profiler.key_averages())
        calls(twin, device)
    assert (twin.cache.stats().captures, twin.cache.stats().eager) == (2, 0)


def serve_in_child(twin, results):
    """A used bucket, a new one, a split and another mode."""
    try:
        calls(twin, "cpu", (3, 8, 11))
        with torch.inference_mode(), autocast("cpu", torch.bfloat16):
            calls(twin, "cpu", (3, 8))
        results.put(twin.cache.stats().eager)
    except BaseException as error:
        results.put(repr(error))
        raise


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_uses_its_parents_cache():
    """Each then goes its own way. (A CUDA context does not outlive a fork.)"""
    twin = make_twin("cpu")
    calls(twin, "cpu", (3, 4))
    fork = multiprocessing.get_context("fork")
    results = fork.SimpleQueue()
    child = fork.Process(target=serve_in_child, args=(twin, results))
    child.start()
    child.join(30)
    alive = child.is_alive()
    if alive:
        child.kill()
        child.join()
    assert not alive
    assert results.get() == 0
    assert child.exitcode == 0
    calls(twin, "cpu")
    assert twin.cache.stats().captures == 2


def pickled(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("name", ["inference", "bfloat16 autocast"])
def test_a_copy_made_within_a_mode(copied, name, twin, device):
    """Has weights, keys and graphs of its own, and the options of the first."""
    calls(twin, device)
    with MODES[name](device):
        other = Twin(copied(twin.cache))
        calls(other, device)
    assert list(other.cache.state_dict()) == list(twin.eager.state_dict())
    assert (other.cache.stats().captures, other.cache.stats().splits) == (2, 1)
    for module in (other.cache, other.eager):
        module.head.weight = nn.Parameter(torch.zeros(4, 16, device=device), False)
    calls(other, device)
    calls(twin, device)
    assert twin.cache.stats().captures == 2


def test_the_keys_of_a_state_dict_are_the_modules(twin, device):
    """In any mode, and within a parent."""
    parent = nn.Sequential(twin.cache, nn.ReLU())
    plain = nn.Sequential(twin.eager, nn.ReLU())
    for name in ("plain", "inference", "bfloat16 autocast"):
        with MODES[name](device):
            calls(twin, device)
            assert_same(parent.state_dict(), plain.state_dict(), bitwise=True)


@pytest.mark.parametrize("name", ["inference", "bfloat16 autocast"])
def test_a_compiled_parent_in_a_mode(name, twin, device):
    """The cache is left out of it, and serves other callers beside it."""
    parent = nn.Sequential(twin.cache, nn.ReLU())
    compiled = torch.compile(parent, backend="eager")
    try:
        with MODES[name](device):
            for n in (3, 8, 3):
                x = torch.randn(n, 4, device=device, dtype=torch.float32)
                assert_same(compiled(x), twin.eager(x).relu())
                twin(x)
    finally:
        torch._dynamo.reset()
    assert (twin.cache.stats().captures, twin.cache.stats().replays) == (2, 1)


class Counting(TorchDispatchMode):
    """Counts the operations that it sees, by name."""

    def __init__(self):
        super().__init__()
        self.seen = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.name()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["plain", "inference", "bfloat16 autocast"])
def test_a_dispatch_mode_of_the_callers(name, twin, device):
    """Misses nothing that it would see of eager, cold and warm; graphs serve on after it."""
    x = torch.randn(3, 4, device=device)
    with MODES[name](device):
        for _ in range(2):
            results, counts = [], []
            for call in (twin.cache, twin.eager):
                with Counting() as counting:
                    results.append(call(x))
                counts.append(counting.seen)
            assert_same(*results)
            ours, theirs = counts
            assert theirs
            assert theirs <= ours
            calls(twin, device)
    assert twin.cache.stats().fallbacks == {"tracing": 2}


@pytest.mark.parametrize("warm", [True, False])
def test_fake_tensors_are_answered_by_fake_tensors(warm, twin, device):
    """And leave nothing fake behind."""
    if warm:
        calls(twin, device)
    for n in (3, 8, 11):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            x = mode.from_tensor(torch.randn(n, 4, device=device))
            assert twin.cache(x).shape == (n, 4)
            assert type(twin.cache(x)) is type(twin.eager(x))
    calls(twin, device)
    assert (twin.cache.stats().captures, twin.cache.stats().failures) == (2, 0)


@pytest.mark.parametrize("name", ["plain", "inference"])
@pytest.mark.parametrize("warm", [True, False])
def test_vmap_over_calls(name, warm, twin, device):
    """Over a batch of batches, with graphs before and after it."""
    x = torch.randn(2, 3, 4, device=device)
    with MODES[name](device):
        if warm:
            calls(twin, device)
        assert_same(torch.vmap(twin.cache)(x), torch.vmap(twin.eager)(x))
        calls(twin, device)
    assert set(twin.cache.stats().fallbacks) == {"tracing"}


def test_derivatives_by_functorch(twin, device):
    x = torch.randn(3, 4, device=device)
    calls(twin, device)
    ours, theirs = (
        [torch.func.jacrev(call)(x), torch.func.jacfwd(call)(x)]
        for call in (twin.cache, twin.eager)
    )
    assert_same(ours, theirs)
    calls(twin, device)


def test_an_input_that_asks_for_gradients_gets_them_between_graphs(twin, device):
    """In grad mode only, and in autocast as in none."""
    for name in ("plain", "no_grad", "bfloat16 autocast", "inference", "plain"):
        x = torch.randn(3, 4, device=device, requires_grad=True)
        with MODES[name](device):
            ours, theirs = twin.cache(x), twin.eager(x)
        assert_same(ours, theirs)
        if ours.requires_grad:
            grads = [torch.autograd.grad(y.float().sum(), x)[0] for y in (ours, theirs)]
            assert_same(*grads)
        with MODES[name](device):
            calls(twin, device)
    assert twin.cache.stats().fallbacks == {"grad": 3}


def test_precision_by_older_and_newer_settings_in_turn(device):
    """Bit for bit, though the older flags refuse to answer while a newer setting says more."""
    net = nn.Linear(512, 512, bias=False).to(device).requires_grad_(False)
    cache = GraphCache(net, [64])
    x = torch.randn(64, 512, device=device)
    matmul = (torch.backends.cuda if device == "cuda" else torch.backends.mkldnn).matmul
    changes = (
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.set_float32_matmul_precision("highest"),
        lambda: setattr(matmul, "fp32_precision", "tf32"),
        lambda: setattr(matmul, "fp32_precision", "ieee"),
    )
    seen = set()
    try:
        for change in (*changes, *changes):
            change()
            result = net(x)
            seen.add(result.sum().item())
            for _ in range(2):
                assert_same(cache(x), result)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert cache.stats().eager == 0
    assert device == "cpu" or len(seen) == 2


FIRST_ATTENTION = """
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attend
from graphcache import GraphCache

class Net(nn.Linear):
    def forward(self, x):
        return super().forward(attend(x, x, x))

cache = GraphCache(Net(8, 8).cuda().requires_grad_(False), [4])
for _ in range(3):
    cache(torch.randn(3, 2, 5, 8, device="cuda"))
print(cache.stats().captures)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_first_attention_of_a_process_changes_no_key():
    """PyTorch orders its attention backends then, which is a setting as well."""
    run = subprocess.run(
        [sys.executable, "-c", FIRST_ATTENTION], capture_output=True, text=True, check=True
    )
    assert run.stdout == "1\n"


def test_a_warmup_in_a_mode_serves_that_mode(twin, device):
    """Sealed: the mode's calls replay, those of another run eagerly."""
    with autocast(device, torch.bfloat16):
        twin.cache.warmup(sample=torch.randn(1, 4, device=device), progress=False)
    twin.cache.seal()
    for _ in range(2):
        with autocast(device, torch.bfloat16):
            calls(twin, device, (3, 8))
        calls(twin, device, (3, 8))
    stats = twin.cache.stats()
    assert (stats.warmup_captures, stats.captures, stats.replays) == (2, 0, 4)
    assert stats.fallbacks == {"not-admitted": 4}


def test_a_decorated_function_in_and_out_of_inference_mode(twin, device):
    """The decorators are the same modes."""
    serve = functools.partial(calls, twin, device)
    for decorate in (torch.inference_mode(), torch.no_grad(), torch.enable_grad()):
        decorate(serve)()
    assert (twin.cache.stats().captures, twin.cache.stats().eager) == (2, 0)


ATTENTION = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.OVERRIDEABLE,
]


def modes():
    return Modes(torch.device("cpu")).kernels()


class TestKey:
    @pytest.mark.parametrize(
        "change",
        [
            lambda: torch.autocast("cpu", dtype=torch.bfloat16),
            lambda: torch.device("meta"),
            lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
            lambda: setting(torch.use_deterministic_algorithms, True, False),
            lambda: setting(torch.set_float32_matmul_precision, "medium", "highest"),
            lambda: sdpa_kernel(SDPBackend.MATH),
            lambda: sdpa_kernel([SDPBackend.MATH, *ATTENTION], set_priority=True),
            lambda: setting(
                functools.partial(setattr, torch.backends.mkldnn.rnn, "fp32_precision"),
                "tf32",
                "ieee",
            ),
        ],
    )
    def test_settings_that_choose_kernels_are_part_of_the_key(self, change):
        """Autocast, default device and dtype, deterministic and matmul-precision settings."""
        with change():  # some settings are put back by another name of the same
            pass
        before = modes()
        with change():
            assert modes() != before
        assert modes() == before

    def test_autocast_to_another_dtype_is_another_mode(self):
        """fp16 and bf16 autocast take different graphs."""
        found = set()
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype=dtype):
                found.add(modes())
        assert len(found) == 2


def test_a_module_that_asks_for_gradients_is_answered_as_by_eager(device):
    """A graph answers no: calls with gradients enabled get none, others do."""

    def forward(x):
        return x * 2 if torch.is_grad_enabled() else x * 3

    cache, x = GraphCache(forward, [8]), torch.ones(3, 4, device=device)
    for _ in range(2):
        torch.testing.assert_close(cache(x), x * 2)
        with torch.no_grad():
            torch.testing.assert_close(cache(x), x * 3)
    assert cache.stats().fallbacks == {"grad": 2}


@pytest.mark.parametrize("asks", [lambda x: x.is_contiguous(), lambda x: x.stride(0) == x.shape[1]])
def test_a_module_that_asks_how_a_tensor_lies_is_answered_as_by_eager(asks, device):
    """In a graph it lies densely: inputs with gaps and overlaps get none, others do."""

    def forward(x):
        return x * 2 if asks(x) else x * 3

    cache, x = GraphCache(forward, [8]), torch.randn(6, 8, device=device)
    with torch.no_grad():
        for given in (x[:3, :4], x, x[:3, :4], x[::2], x[:1].expand(4, 8), x):
            torch.testing.assert_close(cache(given), forward(given))
    assert cache.stats().fallbacks == {"unsupported-input": 4}
    assert "has gaps" in cache.explain(x[::2]).detail


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_module_that_asks_for_inference_mode_is_answered_as_by_eager(mode, device):
    """Calls in it share graphs with others, so there is none."""

    def forward(x):
        return x * 2 if torch.is_inference_mode_enabled() else x * 3

    cache, x = GraphCache(forward, [8]), torch.ones(3, 4, device=device)
    for context in (mode, torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(cache(x), forward(x))
    assert cache.stats().fallbacks == {"opaque-code": 3}


def test_settings_are_read_once_an_operation_depends_on_them():
    """Those of attention by attention, cuDNN's by convolutions, all by unknown code."""
    for operations in ({"aten::_scaled_dot_product_flash_attention"}, {"mine::kernel"}):
        modes = Modes(torch.device("cpu"))
        modes.heed({"aten::addmm", "aten::relu"})
        plain = modes.everything()
        with sdpa_kernel(SDPBackend.MATH):
            assert modes.everything() == plain
        modes.heed(operations)
        before = modes.everything()
        with sdpa_kernel(SDPBackend.MATH):
            assert modes.everything() != before
        assert modes.everything() == before


def test_attention_behind_a_branch_is_heeded(device):
    """First seen in the trial of another form of call."""

    def forward(x, attend):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x) if attend else x * 2

    cache, x = GraphCache(forward, [8]), torch.randn(3, 2, 4, 8, device=device)
    with torch.no_grad():
        for attend in (False, True):
            cache(x, attend)
            with sdpa_kernel(SDPBackend.MATH):
                torch.testing.assert_close(cache(x, attend), forward(x, attend))
    assert cache.stats().graphs == 3  # without attention one serves both


@pytest.mark.gpu
def test_cudnn_settings_are_heeded_by_a_convolution():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    modes = Modes(torch.device("cuda"))
    modes.heed({"aten::addmm"})
    plain = modes.everything()
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        assert modes.everything() == plain
        modes.heed({"aten::convolution"})
        inside = modes.everything()
    assert modes.everything() != inside
