"""The `dynamic_shapes` argument, in torch.export's form."""

import pytest
import torch
from torch.export import Dim

from graphcache.dims import DynamicDims
from graphcache.errors import BucketError
from graphcache.signature import flatten


def match(dims, arguments):
    return dims.match(flatten(arguments, []))


X, M = torch.ones(3, 4, 2), torch.ones(3, 4)


@pytest.mark.parametrize(
    "shapes",
    [
        {"x": {0: "batch", 1: "seq"}, "mask": {0: "batch", 1: "seq"}},
        {"x": ("batch", "seq", None), "mask": ("batch", "seq")},
        {"x": ["batch", "seq", None], "mask": {1: "seq", 0: "batch"}},
        {"x": {0: Dim("batch"), 1: Dim("seq", max=64)}, "mask": {0: Dim("batch"), 1: Dim("seq")}},
        {"x": (Dim("batch"), Dim("seq"), Dim.STATIC), "mask": (Dim("batch"), "seq")},
        ({0: "batch", 1: "seq"}, {0: "batch", 1: "seq"}),
        [{0: "batch", 1: "seq"}, {0: "batch", 1: "seq"}],
        {"x": {0: "batch", 1: "seq", 2: 2}, "mask": {0: "batch", 1: "seq"}},
    ],
)
def test_every_form_names_the_same_dims(shapes):
    """By name or position, dicts or sequences, strings or Dims; None and ints are static."""
    dims = DynamicDims(shapes, ("x", "mask"))
    assert dims.names == ("batch", "seq")
    assert not dims.implicit
    found = {path: sorted(axes) for path, axes in match(dims, {"x": X, "mask": M})}
    assert found == {"x": [(0, "batch"), (1, "seq")], "mask": [(0, "batch"), (1, "seq")]}


def test_none_means_one_dim_called_batch():
    """Implicit, and nothing is named."""
    dims = DynamicDims(None, ("x",))
    assert dims.implicit
    assert dims.names == ("batch",)
    assert match(dims, {"x": X}) == [("x", [])]


def test_entries_are_nested_as_the_argument_is():
    """Dicts, lists and tuples inside an argument, with dotted paths."""
    shapes = {"batch": {"ids": {0: "n"}, "parts": [{0: "n"}, None, ({1: "m"},)]}}
    dims = DynamicDims(shapes, ("batch",))
    arguments = {"batch": {"ids": M, "parts": [M, M, (M,)], "extra": M}}
    assert match(dims, arguments) == [
        ("batch.ids", [(0, "n")]),
        ("batch.parts.0", [(0, "n")]),
        ("batch.parts.1", []),
        ("batch.parts.2.0", [(1, "m")]),
        ("batch.extra", []),
    ]


def test_entries_for_absent_optional_arguments_are_fine():
    """An entry that the call has no tensor for is passed over."""
    dims = DynamicDims({"x": {0: "batch"}, "mask": {0: "batch"}}, ("x", "mask"))
    assert match(dims, {"x": X}) == [("x", [(0, "batch")])]
    assert match(dims, {"x": X, "mask": None}) == [("x", [(0, "batch")])]


def test_a_parameter_that_forward_lacks_is_refused():
    """The text lists what there is."""
    with pytest.raises(
        BucketError,
        match=r"`dynamic_shapes` names \['y'\], but forward's parameters are \['x', 'mask'\]",
    ):
        DynamicDims({"y": {0: "batch"}}, ("x", "mask"))


def test_a_forward_with_keywords_of_any_name_takes_any_entry():
    """**kwargs may hold it."""
    assert DynamicDims({"y": {0: "batch"}}, ("x",), open_ended=True).names == ("batch",)


@pytest.mark.parametrize("shapes", [{}, {"x": None}, {"x": {}}, {"x": {0: None}}, (None,)])
def test_shapes_that_name_no_dim_are_refused(shapes):
    """None says "batch"; an empty spec says nothing."""
    with pytest.raises(BucketError, match=r"`dynamic_shapes` names no dim; name one"):
        DynamicDims(shapes, ("x",))


@pytest.mark.parametrize("value", [1.5, object(), b"batch"])
def test_a_dim_that_is_neither_string_nor_dim_is_refused(value):
    """The text says what to pass."""
    with pytest.raises(BucketError, match=r"name each dynamic dim with a string or torch\.export"):
        DynamicDims({"x": {0: value}}, ("x",))


def test_dims_are_named_in_the_order_of_first_mention():
    """Free-form buckets follow this order."""
    shapes = {"x": {1: "seq"}, "mask": {0: "batch", 1: "seq"}}
    assert DynamicDims(shapes, ("x", "mask")).names == ("seq", "batch")
