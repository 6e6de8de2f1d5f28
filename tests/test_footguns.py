"""What works without a cache and is different with one; each with its way out.

| silent: a wrong or surprising result, no error            | way out                             |
| --------------------------------------------------------- | ----------------------------------- |
| a value of another Python module is frozen in the graph   | verify= finds it; an argument       |
| a Python branch on one is frozen as well                  | the same                            |
| what a function held by a submodule returns is frozen     | assign it anew; invalidate          |
| a branch on the size is that of the bucket                | verify= finds it; a bucket at it    |
| side effects of forward (printing) happen at capture      | return them                         |
| verify="off" pads through batch statistics                | the probe, verify="capture"         |
| verify="off" pads a mean over an unmasked length          | a mask, and fill= for it            |
| random numbers: padded rows draw too, so streams differ   | a bucket of the exact size          |
| static_inputs are overwritten by the bucket's other calls | write them right before each call   |
| outputs="view" on the CPU shows no late reads             | outputs="copy"; test on CUDA        |

| loud: an error, or eager with a reason                    | way out                             |
| --------------------------------------------------------- | ----------------------------------- |
| outputs="view" read after the next call raises (CUDA)     | clone it, or outputs="copy"         |
| weights rebound: a recapture each time                    | copy_ into them                     |
| train / eval flip: graphs of their own                    | warm up both, or flip rarely        |
| batch norm in training is never padded: `batch-coupled`   | eval(), or exact sizes              |
| a mean over an unmasked length: `pad-not-neutral`         | a mask                              |
| a float mask that nobody named: `pad-not-neutral`         | fill={"mask": 0}, or a bool mask    |
| gradients are needed: `grad`                              | torch.inference_mode()              |
| a number argument: a graph for each value                 | pass a tensor                       |
| a value read to the host: `host-sync`                     | torch.where                         |
| counting calls in a Python attribute: `state-written`     | a buffer                            |
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import BY_NAME, ELSEWHERE, assert_same

from graphcache import GraphCache


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    vars(ELSEWHERE).update(scale=1.0, double=False)
    with torch.no_grad():
        yield


def rows(n: int, device: str) -> Tensor:
    return torch.randn(n, 4, device=device)


def differs(ours: Tensor, theirs: Tensor) -> bool:
    return not torch.allclose(ours, theirs)


class BySetting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * ELSEWHERE.scale


class ByBranch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if ELSEWHERE.double else x * 1


class Mean(nn.Module):
    """x: (batch, seq, 4)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class MaskedMean(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


# Silent.


@pytest.mark.parametrize(
    ("module", "change"), [(BySetting, {"scale": 3.0}), (ByBranch, {"double": True})]
)
def test_a_value_of_another_module_read_by_forward_is_frozen(
    module: type[nn.Module], change: dict[str, Any], device: str
) -> None:
    """A value or a branch; eager would see the new one."""
    cache, x = GraphCache(module().to(device), [4]), rows(3, device)
    cache(x)
    vars(ELSEWHERE).update(change)
    assert differs(cache(x), cache.module(x))  # should be equal!


@pytest.mark.parametrize(
    ("module", "change"), [(BySetting, {"scale": 3.0}), (ByBranch, {"double": True})]
)
def test_a_frozen_value_is_found_by_verify_and_cured_by_invalidate(
    module: type[nn.Module], change: dict[str, Any], device: str
) -> None:
    """The key is quarantined at the first shadowed call; or say that something changed."""
    checked, x = GraphCache(module().to(device), [4], verify=1.0), rows(3, device)
    told = GraphCache(module().to(device), [4])
    checked(x)
    told(x)
    vars(ELSEWHERE).update(change)
    checked(x)
    told.invalidate()
    assert_same(checked(x), checked.module(x))
    assert_same(told(x), told.module(x))
    assert checked.stats().fallbacks == {"verify-mismatch": 2}
    assert told.stats().eager == 0


def test_a_value_passed_as_an_argument_is_part_of_the_key(device: str) -> None:
    cache, x = GraphCache(lambda x, scale: x * scale, [4]), rows(3, device)
    for scale in (1.0, 3.0, 1.0):
        ELSEWHERE.scale = scale
        assert_same(cache(x, ELSEWHERE.scale), x * scale)


@pytest.mark.parametrize("bound", [True, False])
def test_the_module_itself_or_its_bound_method_is_watched(bound: bool, device: str) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(1.0)).to(device).eval()
    cache, x = GraphCache(module.forward if bound else module, [4]), rows(3, device)
    cache(x)
    module.train()
    assert_same(cache(x), torch.zeros(3, 4, device=device))


class Configured(nn.Module):
    """Asks a function for its scale."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = self.fixed(scale)

    @staticmethod
    def fixed(scale: float) -> Any:
        return lambda: scale * ELSEWHERE.scale

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale()


def test_what_a_function_held_by_a_submodule_returns_is_frozen(device: str) -> None:
    """Functions are compared by identity."""
    cache, x = GraphCache(Configured(1.0).to(device), [4]), rows(3, device)
    cache(x)
    ELSEWHERE.scale = 3.0
    assert differs(cache(x), cache.module(x))  # should be equal!


def test_a_function_assigned_anew_is_noticed(device: str) -> None:
    cache, x = GraphCache(Configured(1.0).to(device), [4]), rows(3, device)
    cache(x)
    cache.module.scale = Configured.fixed(3.0)
    assert_same(cache(x), x * 3)


class BySize(nn.Module):
    """Another formula for more than `most` rows."""

    def __init__(self, most: int = 8) -> None:
        super().__init__()
        self.most = most

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if len(x) > self.most else x * 3


class AtOneSize(nn.Module):
    """Another formula at 5 rows alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if len(x) == 5 else x * 3


def test_a_branch_on_one_size_within_a_bucket_is_that_of_the_bucket(device: str) -> None:
    """Neither at an end of what the bucket serves nor at its first padded call."""
    cache = GraphCache(AtOneSize().to(device), [16])
    x = rows(12, device)
    assert_same(cache(x), cache.module(x))
    assert differs(cache(x[:5]), cache.module(x[:5]))  # should be equal!


@pytest.mark.parametrize("most", [1, 2, 5, 11])
def test_a_branch_on_the_size_shows_at_the_ends_of_a_bucket(device: str, most: int) -> None:
    """Every graph is compared with eager at the smallest size that its bucket serves."""
    cache = GraphCache(BySize(most).to(device), [16])
    x = rows(12, device)
    for n in (12, most, most + 1, 12):
        assert_same(cache(x[:n]), cache.module(x[:n]))


def test_a_branch_on_the_size_between_two_buckets_is_found(device: str) -> None:
    """The first padded call of each bucket is held against eager."""
    cache = GraphCache(BySize().to(device), [4, 16])
    x = rows(5, device)
    for n in (3, 5, 3, 5):
        assert_same(cache(x[:n]), cache.module(x[:n]))


def test_a_branch_on_the_size_is_found_by_verify_or_probed_where_it_shows(device: str) -> None:
    """Shadowed; with a bucket at the threshold; or if the first padded call crosses it."""
    small, large = rows(3, device), rows(5, device)
    checked = GraphCache(BySize().to(device), [4, 16], verify=1.0)
    for x in (small, large):
        checked(x)
    assert_same(checked(large), checked.module(large))
    split = GraphCache(BySize().to(device), [4, 8, 16])
    crossing = GraphCache(BySize().to(device), [4, 16])
    for cache in (split, crossing):
        for x in (large, small, large):
            assert_same(cache(x), cache.module(x))


def test_side_effects_of_forward_are_not_replayed(
    device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are those of the trials and of the capture, whose number is not promised."""

    def telling(x: Tensor) -> Tensor:
        print(len(x))
        return x * 2

    cache = GraphCache(telling, [4])
    cache(rows(4, device))
    assert capsys.readouterr().out
    cache(rows(4, device))
    assert not capsys.readouterr().out  # should be one more!


def test_lists_that_forward_appends_to_are_found(device: str) -> None:
    """Calls run eagerly, so that each appends once."""
    seen: list[int] = []

    def noting(x: Tensor) -> Tensor:
        seen.append(len(x))
        return x * 2

    cache = GraphCache(noting, [4])
    for _ in range(2):
        cache(rows(4, device))
    assert seen == [4, 4]
    assert cache.stats().fallbacks == {"state-written": 2}


def test_what_is_returned_needs_no_side_effect(device: str) -> None:
    cache, seen = GraphCache(lambda x: (x * 2, x.sum(1)), [4]), []
    for n in (4, 3, 4):
        seen.append(cache(rows(n, device))[1])
    assert [len(total) for total in seen] == [4, 3, 4]


def test_verify_off_pads_through_batch_statistics(device: str) -> None:
    shapes = {"x": {0: "batch"}}
    cache = GraphCache(Centred().to(device), [8], dynamic_shapes=shapes, verify="off")
    x = rows(3, device)
    assert differs(cache(x), cache.module(x))  # should be equal!


def test_the_probe_does_not_pad_through_batch_statistics(device: str) -> None:
    cache = GraphCache(Centred().to(device), [8])
    for _ in range(5):
        x = rows(3, device)
        assert_same(cache(x), cache.module(x))
    assert cache.stats().fallbacks == {"batch-coupled": 2}


def test_verify_off_pads_an_unmasked_mean(device: str) -> None:
    shapes = {"x": {0: "batch", 1: "seq"}}
    cache = GraphCache(Mean().to(device), [(4, 8)], dynamic_shapes=shapes, verify="off")
    x = torch.randn(4, 5, 4, device=device)
    assert differs(cache(x), cache.module(x))  # should be equal!


def test_verify_off_is_right_with_a_mask_and_its_fill(device: str) -> None:
    shapes = {"x": {0: "batch", 1: "seq"}, "mask": {0: "batch", 1: "seq"}}
    cache = GraphCache(
        MaskedMean().to(device),
        [(4, 8)],
        dynamic_shapes=shapes,
        verify="off",
        fill={"mask": 0},
    )
    for n, m in ((4, 8), (4, 5), (2, 3), (4, 8), (3, 7)):
        x = torch.randn(n, m, 4, device=device)
        mask = torch.ones(n, m, dtype=torch.bool, device=device)
        assert_same(cache(x, mask), cache.module(x, mask))
    assert cache.stats().eager == 0


def test_padded_rows_draw_random_numbers_too() -> None:
    """The generator is further on than eager's would be. On CUDA that depends on the kernel."""
    module = nn.Dropout(0.5).train()
    cache, x = GraphCache(module, [64]), torch.ones(3, 4)
    cache(x)
    states = []
    for call in (module, cache):
        torch.manual_seed(1)
        call(x)
        states.append(torch.rand(64))
    assert not torch.equal(states[0], states[1])  # should be equal!


def test_an_exact_bucket_draws_as_often_as_eager(device: str) -> None:
    """On the CPU also the same numbers."""
    module = nn.Dropout(0.5).train().to(device)
    cache, x = GraphCache(module, [3]), torch.ones(3, 4, device=device)
    cache(x)
    if device == "cpu":
        results = []
        for call in (module, cache):
            torch.manual_seed(1)
            results.append((call(x), call(x), torch.rand(8)))
        assert_same(results[0], results[1], bitwise=True)
    torch.manual_seed(1)
    first = cache(x)
    torch.manual_seed(1)
    assert torch.equal(cache(x), first)


def test_static_inputs_are_overwritten_by_other_calls(device: str) -> None:
    cache = GraphCache(BY_NAME["mlp"].build(device), [4])
    view = cache.static_inputs(3, like=rows(1, device))["input"]
    cache(rows(4, device))
    view.fill_(1.0)
    cache(rows(4, device))
    assert differs(view, torch.ones(3, 4, device=device))  # should be ones!


def test_static_inputs_written_right_before_the_call_are_right(device: str) -> None:
    cache = GraphCache(BY_NAME["mlp"].build(device), [4])
    view = cache.static_inputs(3, like=rows(1, device))["input"]
    cache(rows(2, device))
    for _ in range(3):
        cache(rows(4, device))
        x = rows(3, device)
        assert_same(cache(view.copy_(x)), cache.module(x))


# Loud.


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_view_read_after_the_next_call_raises() -> None:
    """And names the cure."""
    cache = GraphCache(BY_NAME["mlp"].build("cuda"), [4], outputs="view")
    late = cache(rows(3, "cuda"))
    cache(rows(4, "cuda"))
    with pytest.raises(RuntimeError, match=r"copy|clone"):
        late.sum()


def test_a_view_that_is_cloned_or_a_copy_may_be_read_at_any_time(device: str) -> None:
    for outputs in ("view", "copy"):
        cache = GraphCache(BY_NAME["mlp"].build(device), [4], outputs=outputs)
        x = rows(3, device)
        kept = cache(x).clone() if outputs == "view" else cache(x)
        cache(rows(4, device))
        assert_same(kept, cache.module(x))


def test_rebinding_a_weight_costs_a_recapture_each_time(device: str) -> None:
    """The result is right all the same."""
    cache = GraphCache(BY_NAME["mlp"].build(device), [4])
    for _ in range(3):
        x = rows(3, device)
        assert_same(cache(x), cache.module(x))
        fresh = torch.randn_like(cache.module[0].weight)
        cache.module[0].weight = nn.Parameter(fresh)
    assert cache.stats().replays == 0


def test_copying_into_a_weight_costs_no_recapture(device: str) -> None:
    cache = GraphCache(BY_NAME["mlp"].build(device), [4])
    for _ in range(3):
        x = rows(3, device)
        assert_same(cache(x), cache.module(x))
        cache.module[0].weight.copy_(torch.randn_like(cache.module[0].weight))
    assert (cache.stats().captures, cache.stats().replays) == (1, 2)


def test_a_flip_between_train_and_eval_takes_another_graph(device: str) -> None:
    """Right at once, and the graphs of both stay."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(1.0)).to(device)
    cache, x = GraphCache(module, [4]), rows(3, device)
    for mode in (False, True, False, True):
        cache.train(mode)
        assert_same(cache(x), module(x))
    assert (cache.stats().captures, cache.stats().replays) == (2, 2)


def test_both_modes_may_be_warmed(device: str) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(1.0)).to(device)
    cache, x = GraphCache(module, [4]), rows(3, device)
    for mode in (False, True):
        cache.train(mode)
        cache.warmup(sample=x, progress=False)
    for mode in (False, True):
        cache.train(mode)
        assert_same(cache(x), module(x))
    assert (cache.stats().captures, cache.stats().replays) == (0, 2)


def test_batch_norm_in_training_is_never_padded(device: str) -> None:
    cache = GraphCache(nn.BatchNorm1d(4).to(device).train(), [8])
    for _ in range(2):
        cache(rows(3, device))
    assert cache.stats().fallbacks == {"batch-coupled": 2}


def test_batch_norm_in_eval_is_padded(device: str) -> None:
    cache = GraphCache(nn.BatchNorm1d(4).to(device).eval(), [8])
    for n in (3, 5):
        x = rows(n, device)
        assert_same(cache(x), cache.module(x))
    assert cache.stats().eager == 0


def test_a_mean_over_an_unmasked_length_is_not_padded(device: str) -> None:
    cache = GraphCache(Mean().to(device), [(4, 8)], dynamic_shapes={"x": {0: "batch", 1: "seq"}})
    x = torch.randn(4, 5, 4, device=device)
    assert_same(cache(x), cache.module(x))
    assert cache.stats().fallbacks == {"pad-not-neutral": 1}


@pytest.mark.parametrize(
    ("dtype", "fill", "served"),
    [(torch.float32, None, False), (torch.float32, {"mask": 0}, True), (torch.bool, None, True)],
)
def test_a_float_mask_must_be_named_and_a_bool_mask_is_found(
    dtype: torch.dtype, fill: Any, served: bool, device: str
) -> None:
    shapes = {"x": {0: "batch", 1: "seq"}, "mask": {0: "batch", 1: "seq"}}
    cache = GraphCache(MaskedMean().to(device), [(4, 8)], dynamic_shapes=shapes, fill=fill)
    for n, m in ((4, 5), (4, 8), (4, 5)):
        x = torch.randn(n, m, 4, device=device)
        mask = torch.ones(n, m, device=device).to(dtype)
        assert_same(cache(x, mask), cache.module(x, mask))
    assert (cache.stats().eager == 0) == served
    assert set(cache.stats().fallbacks) <= {"pad-not-neutral"}


def test_needed_gradients_run_eagerly(device: str) -> None:
    cache, x = GraphCache(BY_NAME["mlp"].build(device), [4]), rows(3, device)
    with torch.enable_grad():
        assert cache(x).requires_grad
    assert cache.stats().fallbacks == {"grad": 1}


def test_inference_mode_needs_no_gradients(device: str) -> None:
    cache, x = GraphCache(BY_NAME["mlp"].build(device), [4]), rows(3, device)
    with torch.enable_grad(), torch.inference_mode():
        assert_same(cache(x), cache.module(x))
    assert cache.stats().captures == 1


def test_each_number_takes_a_graph(device: str) -> None:
    cache, x = GraphCache(lambda x, k: x * k, [4], max_signatures=3), rows(3, device)
    for k in range(5):
        assert_same(cache(x, float(k)), x * k)
    assert cache.stats().captures == 3
    assert cache.stats().fallbacks == {"too-many-keys": 2}


def test_a_number_passed_as_a_tensor_takes_one_graph(device: str) -> None:
    cache, x = GraphCache(lambda x, k: x * k, [4]), rows(3, device)
    for k in range(5):
        assert_same(cache(x, torch.tensor(float(k), device=device)), x * k)
    assert (cache.stats().captures, cache.stats().replays) == (1, 4)


def test_a_branch_on_a_value_runs_eagerly(device: str) -> None:
    cache = GraphCache(lambda x: x * 2 if x[0, 0] > 0 else x * 3, [4])
    for sign in (1.0, -1.0):
        x = torch.full((3, 4), sign, device=device)
        assert_same(cache(x), x * (2 if sign > 0 else 3))
    assert cache.stats().fallbacks == {"host-sync": 2}


def test_where_takes_the_place_of_a_branch(device: str) -> None:
    cache = GraphCache(lambda x: torch.where(x[0, 0] > 0, x * 2, x * 3), [4])
    for sign in (1.0, -1.0):
        x = torch.full((3, 4), sign, device=device)
        assert_same(cache(x), x * (2 if sign > 0 else 3))
    assert cache.stats().eager == 0


class Counting(nn.Module):
    def __init__(self, buffer: bool) -> None:
        super().__init__()
        if buffer:
            self.register_buffer("calls", torch.zeros(()))
        else:
            self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def test_a_count_in_a_python_attribute_runs_eagerly(device: str) -> None:
    cache, x = GraphCache(Counting(False).to(device), [4]), rows(3, device)
    for call in (1, 2, 3):
        assert_same(cache(x), x * call)
    assert cache.stats().fallbacks == {"state-written": 3}


def test_a_count_in_a_buffer_is_replayed(device: str) -> None:
    cache, x = GraphCache(Counting(True).to(device), [4]), rows(3, device)
    for call in (1, 2, 3):
        assert_same(cache(x), x * call)
    assert cache.stats().eager == 0


def test_a_coupling_at_one_value_is_not_seen(device: str) -> None:
    """The probe's garbage is hardly ever 3."""
    function = lambda x: x * (1 + (x == 3.0).any())  # noqa: E731
    cache, x = GraphCache(function, [4]), rows(10, device)
    cache(x)
    x[0, 0] = 3.0
    assert differs(cache(x), function(x))  # should be equal!
    checked = GraphCache(function, [4], verify=1.0)
    assert_same(checked(x), function(x))


class Listed(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.values = [1.0] * count

    def forward(self, x: Tensor) -> Tensor:
        return x * self.values[-1]


@pytest.mark.parametrize("count", [4096, 4097])
def test_the_end_of_a_very_long_list_is_not_watched(device: str, count: int) -> None:
    cache, x = GraphCache(Listed(count), [4]), rows(3, device)
    cache(x)
    cache.module.values[-1] = 2.0
    assert differs(cache(x), cache.module(x)) == (count > 4096)  # should never differ!


def test_results_share_no_memory_with_each_other(device: str) -> None:
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y[:, :2]

    whole, part = GraphCache(forward, [4])(rows(3, device))
    whole.zero_()
    assert bool(part.any())  # should be zeros!


def test_the_old_constructor_of_tensors_is_frozen_on_the_cpu() -> None:
    function = lambda x: x * torch.Tensor([x.max(), 1.0])  # noqa: E731
    cache, x = GraphCache(function, [4]), rows(4, "cpu")[:, :2]
    cache(x)
    assert differs(cache(x * 2), function(x * 2))  # should be equal!


def test_a_row_that_is_masked_throughout_averages_over_the_padding(device: str) -> None:
    def pooled(x: Tensor, mask: Tensor) -> Tensor:
        weights = torch.zeros_like(x).masked_fill(~mask, -1e9).softmax(1)
        return (weights * x).sum(1)

    dims = ({0: "batch", 1: "seq"},) * 2
    cache = GraphCache(pooled, {"batch": [3], "seq": [8]}, dynamic_shapes=dims)
    x, mask = rows(3, device)[:, :3] + 1, torch.ones(3, 3, dtype=torch.bool, device=device)
    assert_same(cache(x, mask), pooled(x, mask))
    mask[1] = False
    ours, theirs = cache(x, mask), pooled(x, mask)
    assert_same(ours[::2], theirs[::2])
    assert differs(ours[1], theirs[1])  # should be equal!


def test_indices_wrapped_by_the_size_wrap_at_the_bucket(device: str) -> None:
    def forward(x: Tensor, p: Tensor) -> Tensor:
        return x.gather(1, p % x.shape[1])

    dims = ({0: "batch", 1: "seq"},) * 2
    cache = GraphCache(forward, {"batch": [2], "seq": [8]}, dynamic_shapes=dims)
    x, p = torch.randn(2, 6, device=device), torch.arange(6, device=device).expand(2, 6)
    assert_same(cache(x, p), forward(x, p))
    assert differs(cache(x, p - 1), forward(x, p - 1))  # should be equal!


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(self.weight, "scale", 1.0)


def test_attributes_of_a_weight_are_not_compared(device: str) -> None:
    cache, x = GraphCache(Scaled(4, 4).to(device), [4]), rows(3, device)
    cache(x)
    cache.module.weight.scale = 2.0
    assert differs(cache(x), cache.module(x))  # should be equal!


class InC(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = ctypes.c_float(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.value


def test_values_that_live_in_c_are_not_compared(device: str) -> None:
    cache, x = GraphCache(InC(), [4]), rows(3, device)
    cache(x)
    cache.module.scale.value = 3.0
    assert differs(cache(x), cache.module(x))  # should be equal!


def test_attributes_of_arguments_are_not_compared(device: str) -> None:
    def scaled(x: Any) -> Tensor:
        return x * getattr(x, "scale", 1.0)

    cache, x = GraphCache(scaled, [4]), rows(3, device)
    cache(x)
    x.scale = 3.0
    assert differs(cache(x), scaled(x))  # should be equal!


def test_a_view_that_an_inputs_gaps_forbid_is_served(device: str) -> None:
    x = torch.randn(3, 8, device=device)[:, :4]
    with pytest.raises(RuntimeError):
        x.view(-1)
    cache = GraphCache(lambda x: x.view(-1) * 2)
    assert_same(cache(x), x.reshape(-1) * 2)


def test_what_a_threshold_hides_is_not_found(device: str) -> None:
    """Neither the first step nor those of the probe are late ones."""

    def late(x: Tensor, step: Tensor) -> Tensor:
        return torch.where(step > 500, x - x.mean(0), x)

    cache, x = GraphCache(late, [4]), rows(3, device)
    cache(x, torch.tensor(10, device=device))
    step = torch.tensor(900, device=device)
    assert differs(cache(x, step), late(x, step))  # should be equal!


def test_a_gate_in_a_part_of_a_matrix_is_not_opened(device: str) -> None:
    """Zeros beside other values may be a causal mask, which hides for good."""

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Parameter(torch.eye(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.mix[0, 0] * x + self.mix[0, 1] * x.mean(0)

    cache, x = GraphCache(Mixing().to(device), [4]), rows(3, device)
    cache(x)
    cache.module.mix.fill_(1)
    assert differs(cache(x), cache.module(x))  # should be equal!


SCALE = 1.0


def test_names_that_code_makes_up_are_not_followed(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scaled(x: Tensor) -> Tensor:
        return x * globals()["SCALE"]

    cache, x = GraphCache(scaled, [4]), rows(3, device)
    cache(x)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert differs(cache(x), scaled(x))  # should be equal!
