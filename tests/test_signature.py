"""What a call is made of: round trips through the tree, and when two calls count as alike."""

import collections
import dataclasses
import enum
import itertools
import math
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphcache import GraphCache
from graphcache.call import Binder, Call, Reading
from graphcache.dims import DynamicDims
from graphcache.errors import Fallback
from graphcache.modes import Modes
from graphcache.reasons import Reason
from graphcache.signature import LEAF, Input, call_key, dim_order, flatten, unflatten

CPU = torch.device("cpu")


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Box:
    value: Any
    label: Any = "box"


@dataclasses.dataclass(frozen=True)
class FrozenBox:
    value: Any


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.floats(allow_nan=False, width=32),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.sampled_from(
        [Colour.RED, torch.float16, CPU, slice(1, 3), range(4), ..., 2j, torch.Size([2])]
    ),
)
tensors = st.integers(0, 3).map(lambda n: torch.full((n, 2), float(n)))
keys = st.one_of(st.text(max_size=2), st.integers(0, 5))


def containers(children):
    return st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(keys, children, max_size=3),
        st.dictionaries(keys, children, max_size=3).map(collections.OrderedDict),
        st.tuples(children, children).map(lambda pair: Pair(*pair)),
        children.map(Box),
        children.map(FrozenBox),
    )


trees = st.recursive(st.one_of(plain, tensors), containers, max_leaves=8)


def alike(a, b):
    """The same types, tensors by identity, everything else by value."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a is b
    if isinstance(a, dict):
        return list(a) == list(b) and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and type(a) is not torch.Size:
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, (Box, FrozenBox)):
        return alike(vars(a), vars(b))
    return a == b and str(a) == str(b)


class TestTree:
    @given(tree=trees)
    @settings(max_examples=150, deadline=None)
    def test_flatten_and_unflatten_are_a_round_trip(self, tree):
        """Over nested dict, list, tuple, namedtuple, dataclass and OrderedDict."""
        leaves = []
        spec = flatten(tree, leaves)
        hash(spec)
        assert alike(unflatten(spec, iter(leaves)), tree)

    @given(tree=trees)
    @settings(max_examples=60, deadline=None)
    def test_rebuilt_containers_are_new_objects(self, tree):
        """A result's list is the caller's to change."""
        leaves = []
        spec = flatten(tree, leaves)
        first, second = unflatten(spec, iter(leaves)), unflatten(spec, iter(leaves))
        if isinstance(first, (list, dict, Box)):
            assert first is not second

    @given(tree=trees)
    @settings(max_examples=60, deadline=None)
    def test_every_tensor_is_a_leaf_in_order(self, tree):
        """As many leaves as tensors, each the caller's own object."""
        leaves = []
        spec = flatten(tree, leaves)
        others = [torch.zeros(1) for _ in leaves]
        again = []
        assert flatten(unflatten(spec, iter(others)), again) == spec
        assert [id(t) for t in again] == [id(t) for t in others]

    def test_pytree_containers_of_torch_and_collections_are_rebuilt(self):
        """deque and defaultdict keep their type, maximum length and factory."""
        value = {
            "a": collections.deque([torch.ones(1), 2], maxlen=5),
            "b": collections.defaultdict(list, x=torch.zeros(1)),
        }
        leaves = []
        again = unflatten(flatten(value, leaves), iter(leaves))
        assert again["a"].maxlen == 5
        assert again["a"] == value["a"]
        assert again["b"].default_factory is list
        assert again["b"]["x"] is value["b"]["x"]

    def test_a_dataclass_without_a_value_for_a_field_is_rebuilt_without_it(self):
        """Fields that were never set stay unset."""

        @dataclasses.dataclass
        class Partial:
            a: Any
            b: Any = dataclasses.field(init=False)

        leaves = []
        again = unflatten(flatten(Partial(torch.ones(1)), leaves), iter(leaves))
        assert not hasattr(again, "b")
        assert again.a is leaves[0]

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            ({1, 2}, r"a value of type builtins\.set"),
            (object(), r"a value of type builtins\.object"),
            (lambda: None, r"a value of type builtins\.function"),
            ([bytearray(b"x")], r"a value of type builtins\.bytearray"),
            (Box, r"a value of type builtins\.type"),
        ],
    )
    def test_what_cannot_be_told_apart_is_refused_with_its_type(self, value, text):
        """`unsupported-input`, naming the type."""
        with pytest.raises(Fallback, match=text) as caught:
            flatten(value, [])
        assert caught.value.reason == Reason.UNSUPPORTED_INPUT

    def test_the_reason_for_a_result_is_unsupported_output(self):
        """The caller says which side it reads."""
        with pytest.raises(Fallback) as caught:
            flatten({1, 2}, [], Reason.UNSUPPORTED_OUTPUT)
        assert caught.value.reason == Reason.UNSUPPORTED_OUTPUT

    def test_a_tensor_subclass_is_refused_as_a_tensor(self):
        """Its operations are its own, so a graph of ATen operations is not known to be right."""

        class Marked(torch.Tensor):
            pass

        with pytest.raises(Fallback, match=r"a tensor of type .*Marked"):
            flatten(torch.ones(2).as_subclass(Marked), [])


DISTINCT = [
    1,
    1.0,
    True,
    "1",
    b"1",
    0,
    0.0,
    -0.0,
    False,
    None,
    "",
    1 + 0j,
    Colour.RED,
    Colour.BLUE,
    (1,),
    [1],
    {"a": 1},
    {"b": 1},
    (),
    [],
    {},
    float("inf"),
    float("nan"),
    slice(1, 2),
    range(1, 2),
    torch.float32,
    torch.Size([1]),
    Pair(1, 2),
    (1, 2),
    Box(1),
    FrozenBox(1),
]


class TestPlainValues:
    def test_values_of_another_type_or_value_are_told_apart(self):
        """1, 1.0 and True take different graphs, and so do 0.0 and -0.0 (by both readings)."""
        for a, b in itertools.combinations(DISTINCT, 2):
            assert flatten(a, []) != flatten(b, []), (a, b)
            assert call_key((a,), {}, []) != call_key((b,), {}, []), (a, b)

    @pytest.mark.parametrize("value", [math.nan, 0.1, -0.0, 1e300, 2j, Colour.RED, slice(0, 1)])
    def test_equal_values_are_one_key(self, value):
        """NaN equals itself here, or each call would miss."""
        assert flatten(value, []) == flatten(value, [])
        assert hash(call_key((value,), {}, [])) == hash(call_key((value,), {}, []))
        again = unflatten(flatten(value, []), iter(()))
        assert repr(again) == repr(value)

    def test_the_order_of_keywords_and_dict_keys_is_part_of_the_look_up(self):
        """A dict's order is what the module iterates over."""
        assert flatten({"a": 1, "b": 2}, []) != flatten({"b": 2, "a": 1}, [])

    def test_positional_and_keyword_arguments_have_different_look_up_keys(self):
        """They mean the same only after binding."""
        x = torch.ones(2)
        assert call_key((x,), {}, []) != call_key((), {"x": x}, [])
        assert call_key((x, 1), {}, []) != call_key((x,), {"k": 1}, [])


class TestCallKey:
    @pytest.mark.parametrize(
        "other",
        [
            torch.ones(3, 4),
            torch.ones(2, 4, dtype=torch.float64),
            torch.ones(4, 2).t(),
            torch.ones(2, 4, requires_grad=True),
            torch.ones(2, 4, 1),
            torch.ones(2, 4, device="meta"),
        ],
    )
    def test_shape_layout_dtype_device_and_grad_are_in_the_key(self, other):
        """Each difference is another plan."""
        assert call_key((torch.ones(2, 4),), {}, []) != call_key((other,), {}, [])

    def test_values_of_tensors_are_not_in_the_key(self):
        """Two tensors that look alike share a plan, nested or not."""
        a, b = torch.ones(2, 4), torch.zeros(2, 4)
        assert call_key((a,), {"m": [a]}, []) == call_key((b,), {"m": [b]}, [])

    def test_leaves_come_in_call_order(self):
        """Positional first, then keywords, nested in place."""
        a, b, c = (torch.full((1,), float(i)) for i in range(3))
        leaves = []
        call_key((a, [b]), {"k": {"x": c}}, leaves)
        assert [id(t) for t in leaves] == [id(a), id(b), id(c)]

    @pytest.mark.parametrize("layout", ["sparse", "csr"])
    def test_sparse_tensors_are_refused(self, layout):
        """`unsupported-input`, naming the layout."""
        dense = torch.eye(2)
        value = dense.to_sparse() if layout == "sparse" else sparse_csr(dense)
        with pytest.raises(Fallback, match=r"a tensor of layout torch\.sparse"):
            call_key((value,), {}, [])

    def test_nested_tensors_are_refused(self):
        """They have no strides either."""
        with pytest.raises(Fallback):
            call_key((nested([torch.ones(2), torch.ones(3)]),), {}, [])


def sparse_csr(dense):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dense.to_sparse_csr()


def nested(parts):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor(parts)


def signature(x, mask=None, k=1.0, state=0):
    """The signature of a call of forward(x, mask, k) with batch and seq dynamic."""
    binder = Binder(lambda x, mask=None, k=1.0: None)
    shapes = {"x": {0: "batch", 1: "seq"}, "mask": {0: "batch"}}
    dims = DynamicDims(shapes, binder.parameters)
    args = (x,) if mask is None else (x, mask)
    return Reading(Call(binder, args, {"k": k}), dims, {}, Modes(CPU), False, state).signature


sizes = st.integers(1, 4)
dtypes = st.sampled_from([torch.float32, torch.float64])
widths = st.integers(1, 2)
numbers = st.sampled_from([1, 1.0, True, 2.0])
calls = st.tuples(
    sizes, sizes, dtypes, widths, numbers, st.booleans(), st.booleans(), st.integers(0, 1)
)


def build(batch, seq, dtype, width, k, masked, turned, state):
    """A layout other than the plain one shows at sizes of 2 and more: an axis of 1 has none."""
    x = torch.ones(batch, seq, width + 1, dtype=dtype)
    if turned:
        batch, seq = batch + 1, seq + 1
        x = torch.ones(width + 1, seq, batch, dtype=dtype).permute(2, 1, 0)
    return signature(x, torch.ones(batch) if masked else None, k, state)


class TestSignature:
    @given(first=calls, second=calls)
    @settings(max_examples=200, deadline=None)
    def test_signatures_are_equal_exactly_if_everything_but_the_sizes_is(self, first, second):
        """dtype, static width, plain value and type, presence of a mask, layout, state."""

        def told(call):
            return (type(call[4]), *call[2:])

        equal = build(*first) == build(*second)
        assert equal == (told(first) == told(second))
        if equal:
            assert hash(build(*first)) == hash(build(*second))

    @given(first=calls, batch=sizes, seq=sizes)
    @settings(max_examples=100, deadline=None)
    def test_other_sizes_are_the_same_signature(self, first, batch, seq):
        """Two calls that differ in nothing but batch and seq share it, at size 1 as well."""
        assert build(*first) == build(batch, seq, *first[2:])

    def test_positional_and_keyword_calls_have_one_signature(self):
        """Bound to forward's parameters they are the same call."""
        binder = Binder(lambda x, mask=None: None)
        dims = DynamicDims(None, binder.parameters)
        x, mask = torch.ones(3, 2), torch.ones(3)
        readings = [
            Reading(Call(binder, args, kwargs), dims, {}, Modes(CPU), False, 0).signature
            for args, kwargs in (
                ((x, mask), {}),
                ((x,), {"mask": mask}),
                ((), {"mask": mask, "x": x}),
            )
        ]
        assert readings[0] == readings[1] == readings[2]


@pytest.mark.parametrize("name", ["typed", "pytree", "dataclass"])
def test_names_that_read_like_a_tag_are_names(name):
    """As a key of an argument and of a result."""
    cache = GraphCache(lambda given: {name: given[name] * 2, "other": given[name] + 1}, [8])
    x = torch.ones(3, 4)
    result = cache({name: x})
    assert list(result) == [name, "other"]
    assert torch.equal(result[name], x * 2)
    assert cache.stats().eager == 0


class TestLayout:
    @pytest.mark.parametrize(
        ("tensor", "order"),
        [
            (torch.ones(2, 3, 4), (0, 1, 2)),
            (torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), (0, 2, 3, 1)),
            (torch.ones(3, 2).t(), (1, 0)),
            (torch.ones(1, 3).expand(4, 3), (0, 1)),
            (torch.tensor(1.0), ()),
        ],
    )
    def test_the_order_of_axes_goes_from_the_slowest_to_the_fastest(self, tensor, order):
        """channels_last and transposed inputs keep theirs; expanded ones are dense."""
        assert dim_order(tensor) == order

    def test_an_input_knows_its_full_shape_at_a_bucket(self):
        """None stands on the dynamic axes only."""
        spec = Input("x", torch.float32, CPU, (None, 5, None), ((0, 0), (2, 1)), (0, 1, 2))
        assert spec.sizes((8, 16)) == [8, 5, 16]

    def test_a_tensor_alone_is_a_leaf(self):
        """The simplest tree."""
        leaves = []
        x = torch.nn.Parameter(torch.ones(1))
        assert flatten(x, leaves) is LEAF
        assert leaves[0] is x


class TestThroughTheCache:
    """Arguments that are hard to tell apart: eager's result, whatever serves it (invariant I10)."""

    @pytest.mark.parametrize(
        ("function", "value"),
        [
            (lambda x, k: x[:, k] * 2, slice(0, 1)),
            (lambda x, k: x * len(k), {1, 2}),
            (lambda x, k: k(x), torch.sin),
            (lambda x, k: x + k.to_dense(), torch.eye(3, 2).to_sparse()),
            (lambda x, k: x * len(k["a"]), {"a": bytearray(b"xy")}),
        ],
        ids=["slice", "set", "function", "sparse", "bytearray"],
    )
    def test_an_argument_out_of_the_ordinary_gives_eagers_result(self, function, value):
        """Captured, or eagerly with `unsupported-input`."""
        cache = GraphCache(function, [4])
        for _ in range(3):
            x = torch.randn(3, 2)
            torch.testing.assert_close(cache(x, value), function(x, value))
        assert set(cache.stats().fallbacks) <= {"unsupported-input", "opaque-code"}
