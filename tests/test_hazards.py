"""The operations that a capture cannot hold, told before they run."""

import contextlib
import copy
import io
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from graphcache import GraphCache
from graphcache.hazards import operation_hazard, written_tensors
from graphcache.hostreads import QUESTIONS, noticing_host_reads
from graphcache.reasons import Reason


class Listing(TorchDispatchMode):
    """Collects the hazards and the written tensors of every operation, and runs it."""

    def __init__(self):
        super().__init__()
        self.hazards, self.written = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        hazard = operation_hazard(func, args, kwargs or {})
        self.hazards += [hazard] if hazard else []
        self.written += written_tensors(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def hazards(run):
    found = []
    with noticing_host_reads(lambda *hazard: found.append(hazard)), Listing() as operations:
        run()
    return [*(hazard for hazard in found if hazard[0] not in QUESTIONS), *operations.hazards]


X = torch.tensor([[2.0, 0.0], [1.0, 3.0]])

SYNC = {
    "item": lambda: X[0, 0].item(),
    "float": lambda: float(X[0, 0]),
    "bool": lambda: bool(X[0, 0] > 0),
    "tolist": lambda: X.tolist(),
    "str": lambda: str(X),
    "format": lambda: f"{X[0, 0]:.2f}",
    "equal": lambda: torch.equal(X, X.clone()),
    "allclose": lambda: torch.allclose(X, X.clone()),
    "inv": lambda: torch.linalg.inv(X),
    "solve": lambda: torch.linalg.solve(X, X),
    "cholesky": lambda: torch.linalg.cholesky(X @ X.T),
    "svd": lambda: torch.linalg.svd(X),
    "eigh": lambda: torch.linalg.eigh(X @ X.T),
    "eigvals": lambda: torch.linalg.eigvals(X),
    "is_nonzero": lambda: torch.is_nonzero(X[0, 0]),
}
COPY = {
    "cpu": lambda: X.cpu(),
    'to("cpu")': lambda: X.to("cpu"),
    "numpy": lambda: X.numpy(),
    "dlpack": lambda: X.__dlpack__(),
}
SYNC |= {
    "tensor of a list of tensors": lambda: torch.tensor([X.max(), 1.0]),
    "tensor of lists of tensors": lambda: torch.tensor([[X.max()], [1.0]]),
    "as_tensor of tensors": lambda: torch.as_tensor((X.max(), X.min())),
    "new_tensor of tensors": lambda: X.new_tensor([X.max()]),
    "tensor_split by a tensor": lambda: torch.tensor_split(X, torch.tensor([1]), 1),
    "x.tensor_split by a tensor": lambda: X.tensor_split(torch.tensor(2)),
    "apply_": lambda: X.clone().apply_(abs),
    "map_": lambda: X.clone().map_(X, max),
}
COPY |= {
    "pickle": lambda: pickle.dumps(X),
    "torch.save": lambda: torch.save(X, io.BytesIO()),
    "new_tensor": lambda: X.new_tensor([1.0, 2.0]),
    "tensor for x.device": lambda: torch.tensor([1.0], device=X.device),
}
DYNAMIC = {
    "nonzero": lambda: X.nonzero(),
    "where of one argument": lambda: torch.where(X > 0),
    "boolean mask": lambda: X[X > 0],
    "boolean mask among indices": lambda: X[torch.tensor([True, False]), torch.tensor([0])],
    "masked write of a tensor": lambda: X.clone().__setitem__(X > 0, torch.ones(3)),
    "masked_select": lambda: X.masked_select(X > 0),
    "unique": lambda: X.unique(),
    "unique_consecutive": lambda: X.unique_consecutive(),
    "repeat_interleave": lambda: X.repeat_interleave(torch.tensor([1, 2]), 0),
    "bincount": lambda: torch.bincount(torch.tensor([1, 2])),
}
NONE = {
    "integer index": lambda: X[torch.tensor([1, 0])],
    "integer write": lambda: X.clone().__setitem__(torch.tensor([1]), 5.0),
    "index_select": lambda: X.index_select(0, torch.tensor([1])),
    "gather": lambda: X.gather(1, torch.tensor([[0], [1]])),
    "x[mask] = scalar": lambda: X.clone().__setitem__(X > 0, 1.0),
    "masked_fill": lambda: X.masked_fill(X > 0, 1.0),
    "where": lambda: torch.where(X > 0, X, 0),
    "repeat_interleave by a number": lambda: X.repeat_interleave(2, 0),
    "repeat_interleave with a size": lambda: X.repeat_interleave(
        torch.tensor([1, 2]), 0, output_size=3
    ),
    "multinomial": lambda: torch.multinomial(X + 1, 2),
    "randperm": lambda: torch.randperm(4),
    "isin": lambda: torch.isin(X, X),
    "to(dtype)": lambda: X.to(torch.float64),
    "to(x.device)": lambda: X.to(X.device),
    "softmax": lambda: X.softmax(-1),
    "tensor of numbers": lambda: torch.tensor([1.0, 2.0]),
    "tensor_split by numbers": lambda: torch.tensor_split(X, [1], 1),
    "deepcopy": lambda: copy.deepcopy(X),
    "embedding": lambda: F.embedding(torch.tensor([1]), X),
    "sort and topk": lambda: (X.sort(), X.topk(1)),
    "attention": lambda: F.scaled_dot_product_attention(X[None], X[None], X[None]),
    "shape": lambda: (X.shape, len(X), X.dim(), X.dtype, X.is_contiguous()),
}


@pytest.mark.parametrize("name", SYNC)
def test_what_waits_for_the_device_is_a_host_sync(name):
    """Each breaks a capture (design, section 7)."""
    assert Reason.HOST_SYNC in [reason for reason, _ in hazards(SYNC[name])]


@pytest.mark.parametrize("name", COPY)
def test_what_copies_through_the_host_is_a_host_copy(name):
    """Each breaks a capture or freezes a value."""
    assert Reason.HOST_COPY in [reason for reason, _ in hazards(COPY[name])]


@pytest.mark.parametrize("name", DYNAMIC)
def test_what_counts_on_the_host_is_a_dynamic_output(name):
    """The shape depends on data."""
    found = [reason for reason, _ in hazards(DYNAMIC[name])]
    assert Reason.DYNAMIC_OUTPUT in found or Reason.HOST_SYNC in found


@pytest.mark.parametrize("name", NONE)
def test_what_a_capture_allows_is_no_hazard(name):
    """A false find sends whole models to eager."""
    assert hazards(NONE[name]) == []


def test_a_hazard_names_its_operation():
    """The text of the log line begins with it."""
    assert (Reason.DYNAMIC_OUTPUT, "aten::nonzero") in hazards(lambda: X.nonzero())
    assert (Reason.HOST_SYNC, "Tensor.tolist()") in hazards(lambda: X.tolist())
    assert any("boolean mask" in text for _, text in hazards(lambda: X[X > 0]))


@pytest.mark.parametrize("factory", ["tensor", "as_tensor", "asarray"])
def test_a_tensor_made_on_the_host_for_the_device_is_a_host_copy(factory):
    """A pageable copy; told from the arguments alone. Made for "cpu" it stays there, but code that
    says `x.device` gets what the GPU would.
    """
    found = []
    with noticing_host_reads(lambda *hazard: found.append(hazard)):
        getattr(torch, factory)([1.0])
        getattr(torch, factory)([1.0], device="cpu")
        assert not found
        getattr(torch, factory)([1.0], device=X.device)
        assert found.pop()[0] is Reason.HOST_COPY
        with contextlib.suppress(
            AssertionError, RuntimeError
        ):  # no CUDA here, which is beside the point
            getattr(torch, factory)([1.0], device="cuda")
    assert found == [(Reason.HOST_COPY, f"torch.{factory}(..., device='cuda')")]


def test_what_replaced_a_stand_in_meanwhile_stays(monkeypatch):
    """As when torch imports Dynamo within a trial; it is heard in the next trial as well."""
    monkeypatch.setattr(torch, "manual_seed", torch.manual_seed)
    with noticing_host_reads(lambda *hazard: None):
        inner = torch.manual_seed
        torch.manual_seed = replacing = lambda seed: inner(seed)
    assert torch.manual_seed is replacing
    found = []
    with noticing_host_reads(lambda *hazard: found.append(hazard)):
        torch.manual_seed(0)
    assert torch.manual_seed is replacing
    assert found


def test_the_stand_ins_are_gone_after_the_run_and_act_in_one_thread_only():
    """Methods are what they were, and another thread's reads are its own business."""
    before = {name: getattr(torch.Tensor, name) for name in ("tolist", "to", "__repr__", "numpy")}
    found = []
    wait, told = threading.Event(), threading.Event()

    def reads() -> None:
        wait.wait(10)
        X.tolist()
        told.set()

    threading.Thread(target=reads).start()
    with noticing_host_reads(lambda *hazard: found.append(hazard)):
        wait.set()
        assert told.wait(10)
    assert not found
    assert all(getattr(torch.Tensor, name) is method for name, method in before.items())
    assert "tolist" not in vars(torch.Tensor)


WRITES = {
    "add_": lambda x: x.add_(1),
    "setitem": lambda x: x.__setitem__(0, 5.0),
    "copy_": lambda x: x.copy_(torch.ones(2, 2)),
    "out": lambda x: torch.add(torch.ones(2, 2), 1, out=x),
    "index_put": lambda x: x.index_put_((torch.tensor([0]),), torch.ones(2)),
    "a view": lambda x: x.view(-1)[1:].mul_(2),
    "normal_": lambda x: x.normal_(),
    "foreach": lambda x: torch._foreach_add_([x], 1.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_written_tensor_is_told_by_the_schema(name):
    """In-place operations, `out=`, views and lists of tensors."""
    x = torch.zeros(2, 2)
    with Listing() as seen:
        WRITES[name](x)
    storage = x.untyped_storage().data_ptr()
    assert storage in [tensor.untyped_storage().data_ptr() for tensor in seen.written]


def test_running_statistics_are_told_although_the_schema_is_silent():
    """BatchNorm in training writes them; in eval it does not."""
    for training in (True, False):
        mean, var = torch.zeros(2), torch.ones(2)
        with Listing() as seen:
            F.batch_norm(X, mean, var, training=training)
        found = [tensor.data_ptr() for tensor in seen.written]
        assert (mean.data_ptr() in found) is training
        assert (var.data_ptr() in found) is training


def test_pure_operations_write_nothing():
    """Nor do views."""
    with Listing() as seen:
        (X @ X).view(-1)[1:].sum()
    assert seen.written == []


@pytest.mark.parametrize("swallow", [False, True])
@pytest.mark.parametrize(
    "hand_over",
    [
        lambda x, pool: ThreadPoolExecutor(1).submit(x.mul, 2).result(),
        lambda x, pool: pool.apply(x.mul, (2,)),
        lambda x, pool: pool.map(x.mul, [2])[0],
    ],
    ids=["an executor", "a pool", "a pool's map"],
)
def test_work_handed_to_another_thread_is_refused_though_forward_catches_all(hand_over, swallow):
    """Its `except Exception` gets our refusal too; the finding stays."""

    def forward(x):
        try:
            return hand_over(x, pool)
        except Exception:
            if not swallow:
                raise
            return x * 0

    cache = GraphCache(forward, [8])
    with torch.no_grad(), ThreadPool(1) as pool:
        torch.testing.assert_close(cache(X), X * 2)
    assert cache.stats().fallbacks == {"opaque-code": 1}
