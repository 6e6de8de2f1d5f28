"""Trial runs: what they note, and that they leave no trace."""

import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from graphcache.errors import Fallback
from graphcache.frames import user_line
from graphcache.preflight import Origin, as_captured, observe
from graphcache.reasons import Reason
from graphcache.signature import LEAF
from graphcache.trials import in_trial

CPU = torch.device("cpu")


def look(function, *inputs, module=None):
    inputs = [tensor.clone() for tensor in inputs]
    return observe(lambda: function(*inputs), inputs, module, CPU)


X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])

OWN = torch.Generator()

HAZARDS = {
    "item": (lambda x: x * x.sum().item(), Reason.HOST_SYNC),
    "tolist": (lambda x: x * len(x.tolist()), Reason.HOST_SYNC),
    "str": (lambda x: x * len(str(x)), Reason.HOST_SYNC),
    "branch": (lambda x: x if x.sum() > 0 else x * 2, Reason.HOST_SYNC),
    "cpu": (lambda x: x.cpu() * 1, Reason.HOST_COPY),
    'to("cpu")': (lambda x: x.to("cpu") * 1, Reason.HOST_COPY),
    "numpy": (lambda x: torch.from_numpy(x.numpy()) * 1, Reason.HOST_COPY),
    "dlpack": (lambda x: torch.from_numpy(np.from_dlpack(x)) * 1, Reason.HOST_COPY),
    "mask": (lambda x: x[x > 1], Reason.DYNAMIC_OUTPUT),
    "nonzero": (lambda x: x.nonzero(), Reason.DYNAMIC_OUTPUT),
    "input written": (lambda x: x.add_(1) * 2, Reason.INPUT_MUTATED),
    "a view of the input written": (lambda x: x[0].zero_() * 2, Reason.INPUT_MUTATED),
    "own generator": (lambda x: x + torch.randn(2, 2, generator=OWN), Reason.GENERATOR),
    "random": (lambda x: x * random.random(), Reason.GENERATOR),
    "numpy.random": (lambda x: x * float(np.random.rand()), Reason.GENERATOR),
    "no ATen operation": (lambda x: x, Reason.OPAQUE_CODE),
    "synchronize": (lambda x: [torch.cuda.synchronize(), x * 2][1], Reason.HOST_SYNC),
}


@pytest.mark.parametrize("name", [n for n in HAZARDS if n != "synchronize"])
def test_a_hazard_is_noted_with_its_reason(name):
    """The run goes on, since all of it is harmless in eager."""
    function, reason = HAZARDS[name]
    seen = look(function, X)
    assert seen.hazard is not None
    assert seen.hazard.reason == reason
    assert len(seen.outputs) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU the original raises")
def test_a_wait_for_the_whole_device_is_noted_before_it_fails():
    """torch.cuda.synchronize() is fatal to a capture; on a CPU build it raises, as in eager."""
    original = torch.cuda.synchronize
    with pytest.raises((AssertionError, RuntimeError)):
        look(HAZARDS["synchronize"][0], X)
    assert torch.cuda.synchronize is original


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2 + 1,
        lambda x: x[torch.tensor([1, 0])],
        lambda x: x.clone().add_(1),
        lambda x: x + torch.tensor(1.0),
        lambda x: x + torch.tensor([1.0, 2.0]),
        lambda x: x + torch.randn(2, 2),
        lambda x: x.to(x.device, torch.float64),
    ],
)
def test_harmless_code_has_no_hazard(function):
    """Else a model that could be captured would run eagerly."""
    assert look(function, X).hazard is None


def test_the_first_hazard_is_kept_with_the_operation_and_the_users_source_line():
    """The line is in the caller's file, not in PyTorch or in the package."""

    def function(x):
        first = x.sum().item()
        return x.nonzero() * first

    line = function.__code__.co_firstlineno + 1
    seen = look(function, X)
    assert seen.hazard.reason == Reason.HOST_SYNC
    assert seen.hazard.detail.endswith(f"{Path(__file__).name}:{line}")
    assert "item" in seen.hazard.detail or "_local_scalar_dense" in seen.hazard.detail


def test_the_users_line_is_the_innermost_frame_of_theirs():
    """Called straight from here it is this very file."""
    assert Path(user_line().rsplit(":", 1)[0]) == Path(__file__)


class Writer(nn.Module):
    """Writes a buffer, an attribute and a list, and draws."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(2))
        self.weight = nn.Parameter(torch.ones(2))
        self.calls = 0
        self.log = []

    def forward(self, x):
        self.total += x.sum(0)
        return x * self.weight + torch.rand(2)


class Counter(Writer):
    def forward(self, x):
        self.calls += 1
        self.log.append(self.calls)
        self.last = x * 2
        return self.last


class TestUndo:
    def test_what_was_written_is_put_back_and_told(self):
        """Bytes of the buffer before and after; `written` holds what the run left."""
        module = Writer()
        seen = look(module, X, module=module)
        assert module.total.tolist() == [0.0, 0.0]
        assert [tensor.data_ptr() for tensor in seen.writes] == [module.total.data_ptr()]
        assert seen.written[0].view(torch.float32).tolist() == [4.0, 6.0]
        assert seen.draws
        assert seen.hazard is None

    def test_changed_attributes_are_put_back_and_refused(self):
        """A replay would not count, log or keep anything: `state-written`."""
        module = Counter()
        seen = look(module, X, module=module)
        assert seen.hazard.reason == Reason.STATE_WRITTEN
        assert (module.calls, module.log) == (0, [])
        assert not hasattr(module, "last")

    def test_every_generator_is_put_back(self):
        """torch's, Python's and numpy's."""

        def function(x):
            return x + torch.rand(2, 2) + random.random() + float(np.random.rand())

        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        seen = look(function, X)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
        assert np.random.get_state()[1].tolist() == before[2]
        assert seen.draws
        assert seen.hazard.reason == Reason.GENERATOR

    def test_all_is_undone_after_an_error_as_well(self):
        """The module's error passes through; state, attributes and generators are as before."""

        class Failing(Counter):
            def forward(self, x):
                self.total += 1
                self.calls += 1
                torch.rand(2)
                raise KeyError("no luck")

        module, before = Failing(), torch.get_rng_state()
        with pytest.raises(KeyError, match="no luck"):
            look(module, X, module=module)
        assert module.total.tolist() == [0.0, 0.0]
        assert module.calls == 0
        assert torch.equal(torch.get_rng_state(), before)
        assert torch._C._len_torch_dispatch_stack() == 0
        assert torch._C._len_torch_function_stack() == 0
        assert not in_trial()

    def test_batch_norms_statistics_are_put_back(self):
        """Its schema does not tell that they are written."""
        module = nn.BatchNorm1d(2).train()
        seen = look(module, X, module=module)
        assert module.running_mean.tolist() == [0.0, 0.0]
        assert module.running_var.tolist() == [1.0, 1.0]
        assert module.num_batches_tracked == 0
        assert len(seen.writes) == 3

    def test_a_tensor_outside_of_the_module_is_put_back(self):
        """Globals and closures are state, too."""
        outside = torch.zeros(2)
        seen = look(lambda x: outside.add_(x.sum()) * 1, X)
        assert outside.tolist() == [0.0, 0.0]
        assert len(seen.writes) == 1

    def test_gradients_are_left_alone(self):
        """A trial runs without grad mode, whatever the caller's is."""
        weight = torch.ones(2, requires_grad=True)
        with torch.enable_grad():
            seen = look(lambda x: x * weight, X)
        assert weight.grad is None
        assert not seen.outputs[0].requires_grad


class TestReading:
    def test_tensors_that_are_no_inputs_are_reads(self):
        """Weights, buffers and closures, each storage once; what the run makes is none."""
        weight, outside = torch.ones(2), torch.ones(2)
        seen = look(lambda x: (x * weight + outside) * weight.view(1, 2) + torch.ones(2), X)
        found = sorted(tensor.data_ptr() for tensor in seen.reads)
        assert found == sorted([weight.data_ptr(), outside.data_ptr()])

    def test_a_constant_made_in_the_run_is_no_read(self):
        """`torch.tensor(...)` announces itself by lift_fresh."""
        assert look(lambda x: x + torch.tensor([1.0, 2.0]), X).reads == []

    def test_the_origin_of_each_result_is_told(self):
        """Made by the run (each once), the input itself, a view of it, the state."""
        table = torch.ones(2)

        def function(x, y):
            made = x + y
            return made, y, x[0], table, made, y * table

        seen = look(function, X, X)
        assert seen.origins == [
            Origin("made", 0),
            Origin("input", 1),
            Origin("view", 0),
            Origin("state"),
            Origin("made", 0),
            Origin("made", 1),
        ]

    def test_the_tree_of_the_result_is_told(self):
        """Leaves and structure."""
        assert look(lambda x: x * 2, X).spec is LEAF
        assert len(look(lambda x: {"a": x * 2, "b": [x + 1]}, X).outputs) == 2

    def test_a_result_that_cannot_be_told_apart_is_refused(self):
        """`unsupported-output`, after the undo."""
        with pytest.raises(Fallback) as caught:
            look(lambda x: {x.sum().long()}, X)
        assert caught.value.reason == Reason.UNSUPPORTED_OUTPUT

    def test_drawing_is_told_from_the_generator_itself(self):
        """With and without."""
        assert look(lambda x: nn.functional.dropout(x, 0.5), X).draws
        assert not look(lambda x: x * 2, X).draws


class TestCapturing:
    def test_capturing_is_answered_yes_inside_and_as_before_outside(self):
        """transformers asks, and skips host checks when told so."""
        original = torch.cuda.is_current_stream_capturing
        seen = []
        look(lambda x: [seen.append(torch.cuda.is_current_stream_capturing()), x * 2][1], X)
        assert seen == [True]
        assert torch.cuda.is_current_stream_capturing is original
        assert not in_trial()

    def test_another_thread_is_answered_as_before(self):
        """Only this thread pretends."""
        answers = []

        def ask():
            answers.append(in_trial())
            try:
                answers.append(torch.cuda.is_current_stream_capturing())
            except (AssertionError, RuntimeError, AttributeError):
                answers.append(False)  # CPU builds raise

        with as_captured():
            worker = threading.Thread(target=ask)
            worker.start()
            worker.join()
            assert in_trial()
        assert answers == [False, False]

    def test_the_modes_of_a_capture(self):
        """No grad, inference mode off, no autocast cache; and back afterwards."""
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            with as_captured():
                assert not torch.is_grad_enabled()
                assert not torch.is_inference_mode_enabled()
                assert not torch.is_autocast_cache_enabled()
                assert torch.is_autocast_enabled("cpu")
                assert not (X * 2).is_inference()
            assert torch.is_inference_mode_enabled()
            assert torch.is_autocast_cache_enabled()

    def test_trials_nest(self):
        """A capture starts trials of its own; leaving the inner one leaves the outer one on."""
        with as_captured():
            with as_captured():
                assert in_trial()
            assert in_trial()
            assert torch.cuda.is_current_stream_capturing()
        assert not in_trial()
