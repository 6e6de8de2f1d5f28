"""What a CUDA kernel asserts is found before the kernel runs."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphcache import GraphCache
from graphcache.bounds import refuse_out_of_range

TABLE = torch.arange(12.0).reshape(4, 3)


class Guard(TorchDispatchMode):
    """Checks every operation and never runs one that indexes: what raises is the check."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        refuse_out_of_range(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def ints(*values):
    return torch.tensor(values)


# Each takes an index that is in range as 3 and out of range as 4 along the first axis of TABLE.
OPERATIONS = {
    "nll_loss": lambda i: nn.functional.nll_loss(TABLE.T[:2].log_softmax(1), i),
    "index": lambda i: TABLE[i],
    "index, second axis": lambda i: TABLE.T[:, i],
    "two indices": lambda i: TABLE[i, ints(2, 0)],
    "mask and index": lambda i: TABLE.expand(2, 4, 3)[ints(1, 0).bool(), i[1:]],
    "index_put": lambda i: TABLE.clone().index_put_((i,), torch.tensor(1.0)),
    "embedding": lambda i: nn.functional.embedding(i, TABLE),
    "embedding_bag": lambda i: nn.functional.embedding_bag(i[None], TABLE),
    "gather": lambda i: TABLE.gather(0, i[:, None]),
    "index_select": lambda i: TABLE.index_select(0, i),
    "index_add": lambda i: TABLE.index_add(0, i, torch.ones(2, 3)),
    "index_copy": lambda i: TABLE.index_copy(0, i, torch.ones(2, 3)),
    "index_fill": lambda i: TABLE.clone().index_fill_(0, i, 1.0),
    "scatter": lambda i: TABLE.scatter(0, i[:, None], 1.0),
    "scatter_add": lambda i: TABLE.scatter_add(0, i[:, None], torch.ones(2, 1)),
    "take": lambda i: TABLE[:, 0].contiguous().take(i),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_out_of_range_is_refused_by_the_check_itself(name):
    """The message is the check's, so the kernel was not reached."""
    with Guard(), pytest.raises(IndexError, match=r"index (4|-5) is out of range for a dim"):
        OPERATIONS[name](ints(1, 4))


@pytest.mark.parametrize("name", OPERATIONS)
def test_in_range_passes_and_changes_nothing(name):
    with Guard():
        got = OPERATIONS[name](ints(1, 3))
    torch.testing.assert_close(got, OPERATIONS[name](ints(1, 3)))


def test_negative_indices_count_from_the_end_where_the_operation_lets_them():
    with Guard():
        assert torch.equal(TABLE[ints(-4)], TABLE[:1])
        with pytest.raises(IndexError, match="index -5"):
            TABLE[ints(-5)]
        with pytest.raises(IndexError, match="index -1"):
            TABLE.gather(0, ints(-1)[:, None])


def test_empty_indices_and_masks_pass():
    with Guard():
        assert TABLE[torch.empty(0, dtype=torch.long)].shape == (0, 3)
        assert TABLE[ints(0, 1, 0, 1).bool()].shape == (2, 3)


class Positions(nn.Module):
    """A table of 6 positions, which no bucket of 8 fits."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 4)

    def forward(self, x):
        return x + self.table(torch.arange(x.shape[1]))


def test_a_bucket_beyond_the_table_of_positions_is_refused_not_run():
    """The longest texts fit the module, the bucket above them does not."""
    net = Positions()
    cache = GraphCache(net, {"seq": [4, 8]}, dynamic_shapes={"x": {1: "seq"}})
    with torch.no_grad():
        for n in (3, 4, 5, 6):
            x = torch.randn(2, n, 4)
            torch.testing.assert_close(cache(x), net(x))
    assert cache.stats().replays + cache.stats().captures >= 1
    assert set(cache.stats().fallbacks) <= {"capture-failed", "pad-not-neutral"}


P = torch.tensor([[0.25, 0.5, 1.0]])
# Each takes what may be a probability, or is none.
DRAWS = {
    "bernoulli": lambda p: p.bernoulli(),
    "bernoulli_, by a tensor": lambda p: torch.zeros(1, 3).bernoulli_(p),
    "multinomial": lambda p: p.multinomial(1),
    "poisson": lambda p: torch.poisson(p),
    "binary_cross_entropy": lambda p: nn.functional.binary_cross_entropy(p, torch.ones(1, 3)),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("wrong", [-0.5, torch.nan, torch.inf])
def test_what_is_no_probability_raises(name, wrong):
    """As the operation itself does on the CPU, with a text of ours."""
    with Guard():
        DRAWS[name](P)
    with Guard(), pytest.raises(RuntimeError, match="are no probabilities"):
        DRAWS[name](P * wrong)


def test_dropout_fills_memory_that_may_hold_anything():
    """Its probability is a number; what was in the memory is nobody's."""
    with Guard():
        torch.full((3,), torch.nan).bernoulli_(0.5)
        torch.full((3,), torch.nan).bernoulli_()
        nn.functional.dropout(P, 0.5, training=True)


def test_an_assertion_of_forward_raises():
    with Guard():
        torch._assert_async(torch.tensor(True))
    with Guard(), pytest.raises(RuntimeError, match="rows must be positive"):
        torch._assert_async(torch.tensor(False), "rows must be positive")


def test_rows_that_must_be_probabilities_are_padded_by_such(device):
    """Garbage would be none; rows of the call are."""

    class Choice(nn.Module):
        def forward(self, x):
            return nn.functional.binary_cross_entropy(x.sigmoid(), x.sigmoid(), reduction="none")

    cache, x = GraphCache(Choice().to(device), [8]), torch.randn(5, 3, device=device)
    with torch.no_grad():
        torch.testing.assert_close(cache(x), cache.module(x))
    assert cache.stats().eager == 0
