"""What only CUDA shows: pools, streams, the generator, failed captures. Those meant to fail run in
processes of their own.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from torch import nn

from graphcache import GraphCache, Reason
from graphcache.compare import close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def mlp(width: int = 64, depth: int = 3) -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers).cuda().eval()


def in_a_process(*parts: str) -> str:
    """Run code that may poison its process; returns what it printed, fails with its error."""
    code = "\n".join(map(textwrap.dedent, parts))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


PREAMBLE = """
import torch
from torch import nn
from graphcache import GraphCache
class Waits(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048))
    def forward(self, x):
        y = self.inner(torch.nn.functional.dropout(x, 0.5, training=True))
        torch.cuda.current_stream().synchronize()
        return y + 1
module = Waits().cuda()
x = torch.randn(4096, 2048, device="cuda")
torch.randn(4, device="cuda")
"""


def test_a_failed_capture_leaves_stream_generator_grad_mode_and_memory_as_they_were():
    """After a capture that fails, draws, eager, other captures work, and reserved memory is back
    (I9).
    """
    out = in_a_process(
        PREAMBLE,
        """
        with torch.no_grad():
            module(x); torch.cuda.synchronize(); torch.cuda.empty_cache()
            cache = GraphCache(module, buckets=[4096])
            import threading, time
            # keeps the process-wide sync check away, so that the capture itself must fail
            threading.Thread(target=time.sleep, args=(20,), daemon=True).start()
            torch.cuda.manual_seed(7); before = torch.cuda.get_rng_state()
            inner = GraphCache(module.inner, buckets=[4096])  # the libraries' workspaces stay
            inner(x); inner.reset()
            module(x); torch.cuda.synchronize(); torch.cuda.empty_cache()
            reserved, stream = torch.cuda.memory_reserved(), torch.cuda.current_stream()
            y = cache(x)
            del y
            torch.cuda.synchronize(); torch.cuda.empty_cache()
            print(cache.stats().fallbacks, cache.stats().failures)
            assert cache.stats().failures == 1 and cache.stats().eager == 1, cache.stats()
            assert torch.cuda.current_stream() == stream
            grown = torch.cuda.memory_reserved() - reserved
            print("grown", grown)
            assert grown <= 4 * 2**20, grown
            assert torch.randn(100, device="cuda").isfinite().all()
            other = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).cuda()
            fast = GraphCache(other, buckets=[8])
            z = torch.randn(5, 64, device="cuda")
            a, b = fast(z), fast(z)
            assert fast.stats().captures == 0 or not torch.equal(a, b)
            plain = GraphCache(nn.Linear(64, 64).cuda().eval(), buckets=[8])
            torch.testing.assert_close(plain(z), plain.module(z))
            torch.testing.assert_close(plain(z), plain.module(z))
            assert plain.stats().replays == 1
            cache(x); assert cache.stats().failures == 1 and cache.stats().eager == 2  # remembered
        assert torch.is_grad_enabled()
        print("healed")
        """,
    )
    assert "healed" in out


def test_a_second_failed_capture_beside_live_graphs_harms_none_of_them():
    """Graphs of the same pool that live through a failed capture still give eager's numbers."""
    out = in_a_process(
        PREAMBLE,
        """
        import threading, time
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
        class Moody(nn.Module):
            def __init__(self):
                super().__init__(); self.inner = nn.Linear(256, 256)
            def forward(self, x):
                y = self.inner(x)
                if x.shape[0] == 64: torch.cuda.current_stream().synchronize()
                return y.relu()
        m = Moody().cuda().eval(); cache = GraphCache(m, buckets=[8, 16, 64])
        z = torch.randn(64, 256, device="cuda")
        with torch.no_grad():
            for n in (5, 12, 60, 5, 12, 60, 7, 3):
                torch.testing.assert_close(cache(z[:n]), m(z[:n]))
        stats = cache.stats()
        print(stats)
        assert stats.failures == 1 and stats.replays >= 4, stats
        print("fine")
        """,
    )
    assert "fine" in out


def test_a_wait_that_only_the_debug_mode_sees_is_found_before_the_capture():
    """With no other thread alive, `Stream.synchronize()` or an unlisted wait is `host-sync`,
    without a failed capture.
    """
    out = in_a_process(
        """
        import torch, threading
        from torch import nn
        from graphcache import GraphCache
        class Inverts(nn.Module):
            def forward(self, x): return torch.linalg.inv(x)
        assert threading.active_count() == 1
        cache = GraphCache(Inverts(), buckets=[4])
        x = torch.eye(8, device="cuda").repeat(4, 1, 1)
        with torch.no_grad(): cache(x); cache(x)
        print(cache.stats().fallbacks)
        assert cache.stats().fallbacks == {"host-sync": 2}, cache.stats()
        assert cache.stats().failures == 0
        assert torch.cuda.get_sync_debug_mode() == 0
        x.sum().item()
        print("found")
        """
    )
    assert "found" in out


def test_results_are_right_on_every_stream_without_synchronising():
    """Callers on changing streams get their own numbers; the streams are ordered by the cache."""
    module = mlp(256)
    cache = GraphCache(module, buckets=[16, 64])
    streams = [torch.cuda.Stream() for _ in range(3)]
    with torch.inference_mode():
        cache.warmup(sample=torch.randn(4, 256, device="cuda"), progress=False)
        torch.cuda.synchronize()
        for round_ in range(60):
            n = 1 + (round_ * 7) % 64
            stream = streams[round_ % 3]
            with torch.cuda.stream(stream):
                x = torch.full((n, 256), float(round_), device="cuda")
                got, expected = cache(x), module(x)
            stream.synchronize()
            assert close(got, expected), round_
    assert cache.stats().eager == 0


def test_threads_with_streams_of_their_own_get_their_own_results():
    """Six threads, each on its own stream, one cache: every result is the caller's, and at most one
    capture per key.
    """
    module = mlp()
    cache = GraphCache(module, buckets=[4, 8])
    wrong: list[str] = []

    def work(seed: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.inference_mode():
            for i in range(50):
                x = torch.full((1 + (seed + i) % 8, 64), float(seed * 100 + i), device="cuda")
                if not close(cache(x), module(x)):
                    wrong.append(f"{seed} {i}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    stats = cache.stats()
    assert stats.captures <= 2
    assert stats.replays + stats.captures + stats.eager == 300


def test_captures_succeed_while_another_thread_waits_and_copies():
    """Another thread's reads, copies, pinning and waits neither fail nor break captures here."""
    stop, errors, turns = threading.Event(), [], []

    def busy() -> None:
        x = torch.ones(1000, device="cuda")
        try:
            while not stop.is_set():
                assert x.sum().item() == 1000
                x.cpu()
                torch.empty(1000).pin_memory().to("cuda", non_blocking=True)
                torch.cuda.current_stream().synchronize()
                turns.append(1)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        module = mlp()
        with torch.inference_mode():
            for _ in range(3):
                cache = GraphCache(module, buckets=[2, 4, 8, 16])
                cache.warmup(sample=torch.randn(2, 64, device="cuda"), progress=False)
                assert cache.stats().warmup_captures == 4
                x = torch.randn(3, 64, device="cuda")
                assert close(cache(x), module(x))
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert turns


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_padded_replay_is_bitwise_eager_on_the_padded_input(dtype: torch.dtype):
    """The real rows of a replay are those of eager run on the padded input, bit for bit."""
    module = mlp(128).to(dtype)
    cache = GraphCache(module, buckets=[8, 32])
    with torch.inference_mode():
        for n in (1, 3, 8, 9, 31):
            x = torch.randn(n, 128, device="cuda", dtype=dtype)
            bucket = 8 if n <= 8 else 32
            padded = torch.cat([x, x[-1:].expand(bucket - n, -1)])
            assert torch.equal(cache(x), module(padded)[:n])
    assert cache.stats().eager == 0


def test_evictions_and_recaptures_add_no_memory():
    """Rounds of eviction and recapture between two buckets leave reserved memory where it was."""
    module = mlp(256)
    cache = GraphCache(module, buckets=[8, 64], max_graphs=1)
    x = torch.randn(64, 256, device="cuda")
    levels = []
    with torch.inference_mode():
        for _ in range(30):
            for n in (8, 64):
                cache.warmup([n], sample=x[:n], progress=False)
                assert close(cache(x[:n]), module(x[:n]))
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            levels.append(torch.cuda.memory_reserved())
    assert cache.stats().evictions >= 58
    assert levels[-1] <= levels[2]


def test_a_byte_bound_flushes_the_generation_and_results_stay_right():
    """Over `max_bytes` the pool starts anew; graphs come back at their next use and `graph_bytes`
    stays below.
    """
    module = mlp(1024, depth=4)
    free = GraphCache(module, buckets=[64, 4096])
    x = torch.randn(4096, 1024, device="cuda")
    with torch.inference_mode():
        free.warmup(sample=x, progress=False)
        need = free.stats().graph_bytes
        free.reset()
        cache = GraphCache(module, buckets=[64, 2048, 4096], max_bytes=need)
        for n in (4096, 64, 2048, 64, 4096, 2000, 2048, 2048, 64):
            assert close(cache(x[:n]), module(x[:n]))
            assert cache.stats().graph_bytes <= need
    assert cache.stats().replays > 0


def test_reset_gives_the_memory_back():
    """After `reset()` what the graphs reserved is back, but for the library's workspace."""
    module = mlp(1024, depth=4)
    x = torch.randn(8192, 1024, device="cuda")
    with torch.inference_mode():
        warm = GraphCache(
            module, buckets=[8192]
        )  # cuBLAS keeps its workspace of the capture stream
        warm(x)
        warm.reset()
        del warm
        gc.collect()
        module(x)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        cache = GraphCache(module, buckets=[8192])
        cache(x)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() > before
        cache.reset()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= before + 2 * 2**20


def test_graph_bytes_are_the_allocator_s_segments_and_the_static_inputs():
    """I7: the accounted bytes equal the pool's segments plus the static inputs' storages."""
    module = mlp(512)
    cache = GraphCache(module, buckets=[32, 256])
    with torch.inference_mode():
        cache.warmup(sample=torch.randn(8, 512, device="cuda"), progress=False)
    statics = (32 + 256) * 512 * 4
    pool = cache._miss.backend._pool
    segments = [s for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] == pool]
    assert segments
    assert cache.stats().graph_bytes == statics + sum(s["total_size"] for s in segments)


def test_hundreds_of_caches_come_and_go():
    """Caches dropped without `reset()`, by the collector or at once, leave nothing behind."""
    out = in_a_process(
        """
        import gc, torch
        from torch import nn
        from graphcache import GraphCache
        kinds = [
            lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)).cuda().eval(),
            lambda: (lambda x: x - x.mean(0)),
            lambda: (lambda x: x.softmax(1) * 2),
        ]
        for turn in range(400):
            cache = GraphCache(kinds[turn % 3](), buckets=[4, 8])
            with torch.no_grad():
                for n in (3, 8, 1, 5):
                    x = torch.randn(n, 4, device="cuda")
                    torch.testing.assert_close(cache(x), cache.module(x))
            if turn % 7 == 0:
                gc.collect()
            if turn == 100:
                torch.cuda.synchronize(); torch.cuda.empty_cache()
                level = torch.cuda.memory_reserved()
        del cache
        gc.collect(); torch.cuda.synchronize(); torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= level + 2 * 2**20, level
        print("gone")
        """
    )
    assert "gone" in out


def test_draws_follow_the_seed_and_the_probe_leaves_the_generator_alone():
    """Dropout draws anew on each replay, repeats under the seed, and no trial or capture moves the
    generator.
    """
    module = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).cuda().train()
    cache = GraphCache(module, buckets=[16])
    x = torch.randn(16, 64, device="cuda")
    with torch.no_grad():
        torch.manual_seed(5)
        state = torch.cuda.get_rng_state()
        cache.warmup(sample=x, progress=False)
        assert torch.equal(state, torch.cuda.get_rng_state())
        first = [cache(x) for _ in range(3)]
        torch.manual_seed(5)
        second = [cache(x) for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[1])


def test_a_view_is_read_in_time_or_raises():
    """outputs="view": no copy; a read after the next call raises and names the cure."""
    module = mlp()
    cache = GraphCache(module, buckets=[8], outputs="view")
    with torch.inference_mode():
        x = torch.randn(5, 64, device="cuda")
        cache(x)
        first = cache(x)
        assert close(first.clone(), module(x))
        second = cache(x * 2)
        with pytest.raises(RuntimeError, match="overwritten by a later call"):
            first.clone()
        assert close(second.clone(), module(x * 2))


@pytest.mark.parametrize("pinned", [False, True])
def test_cpu_inputs_of_a_module_that_moves_them_are_served(pinned: bool):
    """A module that accepts CPU inputs on a GPU is served by graphs, its inputs copied straight
    into static memory.
    """

    class Moves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x.to(self.layer.weight.device)).relu()

    module = Moves().cuda().eval()
    cache = GraphCache(module, buckets=[8])
    with torch.inference_mode():
        for n in (3, 8, 5):
            x = torch.randn(n, 16)
            x = x.pin_memory() if pinned else x
            got = cache(x)
            assert got.device.type == "cuda"
            assert close(got, module(x))
    assert cache.stats().eager == 0
    strict = nn.Linear(16, 16).cuda().eval()
    fast = GraphCache(strict, buckets=[8])
    with torch.inference_mode(), pytest.raises(RuntimeError):
        fast(torch.randn(3, 16))
    with torch.inference_mode():
        x = torch.randn(3, 16, device="cuda")
        assert close(fast(x), strict(x))


def test_a_replaced_weight_whose_memory_is_given_back_is_noticed_before_the_launch():
    """A replay on unmapped memory would end the CUDA context: the freed storage must be known
    first.
    """
    module = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU()).cuda().eval()
    cache = GraphCache(module, buckets=[8])
    x = torch.randn(5, 4096, device="cuda")
    with torch.inference_mode():
        cache(x)
        for _ in range(3):
            module[0].weight.data = torch.randn(4096, 4096, device="cuda")
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            assert close(cache(x), module(x))
    assert cache.stats().recaptures == 3


def test_a_caller_that_captures_gets_the_module_in_its_own_graph():
    """Inside torch.cuda.graph the cache runs the module plainly: `nested-capture`, and the outer
    graph is right.
    """
    module = mlp()
    cache = GraphCache(module, buckets=[8])
    x = torch.randn(5, 64, device="cuda")
    with torch.no_grad():
        cache(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = cache(x)
        x.mul_(2)
        graph.replay()
        torch.cuda.synchronize()
        assert close(y, module(x))
    assert cache.stats().fallbacks == {Reason.NESTED_CAPTURE: 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_resnet50_is_never_refused(dtype: torch.dtype):
    """An ordinary uncoupled model: every size is served by graphs, within the dtype's norm."""
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    module = (
        torchvision.models.resnet50().eval().cuda().to(dtype).to(memory_format=torch.channels_last)
    )
    cache = GraphCache(module, buckets=[2, 4, 8])
    with torch.inference_mode():
        for n in (1, 2, 3, 5, 8, 11):
            x = torch.randn(n, 3, 64, 64, device="cuda", dtype=dtype).to(
                memory_format=torch.channels_last
            )
            assert close(cache(x), module(x)), n
    assert cache.stats().eager == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_vit_is_never_refused(dtype: torch.dtype):
    """ViT-Base at 224 x 224 pixels."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    module = transformers.ViTModel(transformers.ViTConfig()).cuda().eval().to(dtype)
    cache = GraphCache(module, buckets=[2, 4, 8])
    with torch.inference_mode():
        for n in (1, 2, 3, 5, 8, 11):
            x = torch.randn(n, 3, 224, 224, device="cuda", dtype=dtype)
            assert close(cache(x).last_hidden_state, module(x).last_hidden_state), n
    assert cache.stats().eager == 0


# Hidden size, layers, heads, intermediate size.
ENCODERS = {"MiniLM": (384, 6, 12, 1536), "BERT": (768, 12, 12, 3072)}


@pytest.mark.parametrize("form", ENCODERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_encoder_with_ragged_masks_is_never_refused(form: str, dtype: torch.dtype):
    """Both dims padded, masks ragged: served by graphs throughout, within the dtype's norm."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    hidden, layers, heads, intermediate = ENCODERS[form]
    config = transformers.BertConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=intermediate,
    )  # fmt: skip
    net = transformers.BertModel(config, add_pooling_layer=False).cuda().eval().to(dtype)

    def encode(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = net(input_ids=ids, attention_mask=mask).last_hidden_state
        keep = mask[..., None].to(hidden.dtype)
        return (hidden * keep).sum(1) / keep.sum(1)

    dims = {"ids": {0: "batch", 1: "seq"}, "mask": {0: "batch", 1: "seq"}}
    cache = GraphCache(encode, {"batch": [2, 8], "seq": [16, 64]}, dynamic_shapes=dims)
    with torch.inference_mode():
        for n, length in ((1, 7), (2, 16), (5, 41), (8, 64), (3, 12), (20, 30)):
            ids = torch.randint(5, 30000, (n, length), device="cuda")
            mask = torch.ones(n, length, dtype=torch.long, device="cuda")
            for i in range(1, n):
                mask[i, max(1, length - 3 * i) :] = 0
            assert close(cache(ids, mask), encode(ids, mask)), (n, length)
    assert cache.stats().eager == 0


def test_random_operations_of_other_threads_are_safe_once_sealed():
    """After warmup and seal nothing is captured, which is what makes them raise."""
    stop, errors, turns = threading.Event(), [], []

    def draws() -> None:
        try:
            while not stop.is_set():
                torch.randn(100, device="cuda").sum().item()
                turns.append(1)
        except Exception as error:
            errors.append(error)

    module = nn.Sequential(mlp(), nn.Dropout(0.5)).train().cuda()
    cache = GraphCache(module, buckets=[2, 4, 8])
    with torch.inference_mode():
        cache.warmup(sample=torch.randn(2, 64, device="cuda"), progress=False)
        cache.seal()
        thread = threading.Thread(target=draws)
        thread.start()
        try:
            for n in (1, 2, 3, 5, 8, 9, 20) * 30:  # above 8 nothing is admitted any more
                assert cache(torch.randn(n, 64, device="cuda")).shape[0] == n
        finally:
            stop.set()
            thread.join()
    assert not errors
    assert turns
    stats = cache.stats()
    assert stats.captures == 0
    assert stats.replays == 150
