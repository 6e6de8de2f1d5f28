"""Arguments and results that look like others and are not: names, keys, classes of containers."""

import collections
import dataclasses
import enum

import pytest
import torch

from graphcache import GraphCache

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


def ones(device, dtype=torch.float32):
    return torch.ones(3, 4, dtype=dtype, device=device)


def serves(function, *calls):
    """Each call twice, as eager does it, all by graphs; one graph for each of the calls."""
    cache = GraphCache(function, [8])
    for args, kwargs in calls:
        for _ in range(2):
            torch.testing.assert_close(cache(*args, **kwargs), function(*args, **kwargs))
    stats = cache.stats()
    assert (stats.captures, stats.replays, stats.eager) == (len(calls), len(calls), 0)


def test_a_keyword_called_args_is_no_positional_argument(device):
    """`*args` and `args=` in one call."""

    def function(x, *args, **kwargs):
        return x * args[0] + kwargs["args"]

    x = ones(device)
    serves(function, ((x, 2), {"args": 3}), ((x, 5), {"args": 3}), ((x, 5), {"args": 4}))


def test_a_keyword_may_have_the_name_of_a_positional_argument(device):
    """Of one that is positional only."""

    def function(x, k, /, **kwargs):
        return x * k + kwargs["k"]

    x = ones(device)
    serves(function, ((x, 2), {"k": 3}), ((x, 5), {"k": 3}), ((x, 5), {"k": 4}))


@pytest.mark.parametrize("keys", [(1, 1.0, True), (True, 1), (0.0, False, 0), (1.0, 1)])
def test_keys_that_are_equal_but_of_other_types_are_told_apart(keys, device):
    """They give results of other dtypes."""
    x = ones(device, torch.int64)
    serves(lambda x, d: x * next(iter(d)), *(((x, {key: 0}), {}) for key in keys))


@pytest.mark.parametrize("ranges", [(range(0, 3, 2), range(0, 4, 2)), (range(0), range(5, 5))])
def test_ranges_of_the_same_numbers_are_told_apart(ranges, device):
    """`range(0, 3, 2) == range(0, 4, 2)`."""
    assert ranges[0] == ranges[1]
    serves(lambda x, r: x * r.stop, *(((ones(device), r), {}) for r in ranges))


@dataclasses.dataclass
class Scaled:
    x: torch.Tensor
    scale = 1.0


def test_an_attribute_that_is_no_field_is_part_of_an_argument(device):
    """Set on the object, over a value of the class."""
    plain, changed = Scaled(ones(device)), Scaled(ones(device))
    changed.scale = 5.0
    serves(lambda s: s.x * s.scale, ((plain,), {}), ((changed,), {}))


class Pair(collections.namedtuple("Pair", "a b")):
    """Takes one value and computes the other."""

    def __new__(cls, a):
        return super().__new__(cls, a, a + 1)


def test_a_namedtuple_may_make_itself_in_its_own_way(device):
    """As an argument."""
    serves(lambda pair: pair.a + pair.b, ((Pair(ones(device)),), {}))


def test_a_namedtuple_that_makes_itself_in_its_own_way_may_be_a_result(device):
    cache = GraphCache(lambda x: Pair(x * 2), [8])
    for k in (1, 5):
        x = ones(device) * k
        out = cache(x)
        assert type(out) is Pair
        torch.testing.assert_close(tuple(out), (x * 2, x * 2 + 1))
    assert cache.stats().replays == 1


@dataclasses.dataclass
class Tagged:
    y: torch.Tensor

    def __post_init__(self):
        self.tag = "hello"


def test_a_result_keeps_what_its_post_init_set(device):
    """An attribute that is no field."""
    cache = GraphCache(lambda x: Tagged(x * 2), [8])
    for k in (1, 5):
        x = ones(device) * k
        out = cache(x)
        assert (type(out), out.tag) == (Tagged, "hello")
        torch.testing.assert_close(out.y, x * 2)
    assert cache.stats().replays == 1


@dataclasses.dataclass
class Output(collections.OrderedDict):
    """A dict and a dataclass, as results of Hugging Face's models are."""

    y: torch.Tensor = None

    def __post_init__(self):
        self["y"] = self.y


class Unhashable(enum.Enum):
    A = 1
    B = 2

    def __eq__(self, other):
        return self is other


REFUSED = {
    "a dict that is a dataclass": (
        lambda x: Output(x),
        lambda out: out["y"] * 2 + out.y,
        "unsupported-input",
    ),
    "an unhashable enum": (
        lambda x: (x, Unhashable.B),
        lambda pair: pair[0] * pair[1].value,
        "unsupported-input",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_rebuilt_or_told_apart_runs_eagerly(name, device):
    """And raises nothing."""
    make, function, reason = REFUSED[name]
    cache = GraphCache(function, [8])
    given = make(ones(device))
    for _ in range(2):
        torch.testing.assert_close(cache(given), function(given))
    assert cache.stats().fallbacks == {reason: 2}


def test_a_dict_that_is_a_dataclass_may_be_a_result(device):
    cache = GraphCache(lambda x: Output(x * 2), [8])
    for k in (1, 5):
        x = ones(device) * k
        out = cache(x)
        assert type(out) is Output
        assert out.y is out["y"]
        torch.testing.assert_close(out.y, x * 2)


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
def test_a_quantised_tensor_runs_eagerly():
    """No static input can be made like it."""

    def function(x):
        return x.dequantize() * 2

    cache = GraphCache(function, [8])
    for k in (1, 5):
        x = torch.quantize_per_tensor(torch.ones(3, 4) * k, 0.1, 0, torch.quint8)
        torch.testing.assert_close(cache(x), function(x))
    assert cache.stats().eager == 2


def test_one_tensor_passed_twice_is_not_two(device):
    """`a is b` in forward, at every place of the arguments."""

    def forward(a, b, c=None):
        return a * 2 if a is b else a * 3 if a is c else a + b

    x, y = ones(device), ones(device) * 2
    serves(forward, ((x, x), {}), ((x, y), {}), ((x, y), {"c": x}), ((x, y), {"c": y}))


def test_self_attention_stays_self_attention(device):
    """nn.MultiheadAttention asks whether its key is its query."""
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True).to(device).eval()
    cache = GraphCache(module, [4, 8])
    x, y = (torch.randn(3, 5, 8, device=device) for _ in range(2))
    for args in ((x, x, x), (x, y, y), (x, y, x), (y, x, x)):
        for ours, theirs in zip(cache(*args), module(*args), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert (cache.stats().eager, cache.stats().graphs) == (0, 3)
