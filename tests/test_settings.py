"""Options, checked once; each fault has a text with the value and a cure."""

import numpy as np
import pytest
import torch
from torch import nn

from graphcache import GraphCache, GraphCacheError
from graphcache.settings import parse_bytes


def make(**options):
    return GraphCache(nn.Linear(2, 2), [4], **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"outputs": "clone"}, r"`outputs` is 'clone'; pass one of copy, view\."),
        ({"on_fallback": "ignore"}, r"`on_fallback` is 'ignore'; pass one of eager, warn, raise"),
        ({"backend": "cpu"}, r"`backend` is 'cpu'; pass one of auto, cuda, recorded"),
        ({"fill": ["mask"]}, r"`fill` is \['mask'\]; pass a dict from input names"),
        ({"fill": 0}, r"`fill` is 0; pass a dict"),
        ({"fill": []}, r"`fill` is \[\]; pass a dict"),
        ({"fill": {0: 1}}, r"`fill` has the key 0; pass names of inputs"),
        ({"max_graphs": 0}, r"`max_graphs` is 0; pass an integer of at least 1"),
        ({"max_graphs": 2.0}, r"`max_graphs` is 2\.0; pass an integer"),
        ({"max_signatures": -1}, r"`max_signatures` is -1; pass an integer"),
        ({"capture_after": True}, r"`capture_after` is True; pass an integer"),
        ({"verify": 0}, r"`verify` is 0; pass 'capture', 'off' or a fraction"),
        ({"verify": 1.5}, r"`verify` is 1\.5; pass 'capture', 'off' or a fraction"),
        ({"verify": "always"}, r"`verify` is 'always'; pass 'capture', 'off'"),
        ({"verify": True}, r"`verify` is True; pass 'capture', 'off'"),
        ({"verify": float("nan")}, r"`verify` is nan; pass"),
        ({"max_padding_ratio": 0.5}, r"`max_padding_ratio` is 0\.5; pass padded / real"),
        ({"max_padding_ratio": float("nan")}, r"`max_padding_ratio` is nan"),
        ({"max_bytes": 0}, r"`max_bytes` is 0; pass a positive number of bytes or text such as"),
        ({"max_bytes": -1}, r"`max_bytes` is -1; pass a positive number"),
        ({"max_bytes": "2 gigs"}, r"`max_bytes` is '2 gigs'; pass a positive number"),
        ({"max_bytes": "0GiB"}, r"`max_bytes` is '0GiB'; pass a positive number"),
        ({"max_bytes": True}, r"`max_bytes` is True; pass a positive number"),
        ({"fill": {"x": "zero"}}, r"`fill\['x'\]` is 'zero'; pass a number or 'repeat'"),
        ({"fill": {"x": None}}, r"`fill\['x'\]` is None; pass a number or 'repeat'"),
        ({"split": "rows"}, r"`split` is 'rows'"),
        ({"max_padding_ratio": "2"}, r"`max_padding_ratio` is '2'"),
    ],
)
def test_an_option_outside_its_values_is_refused(options, text):
    """A GraphCacheError with the option's name, the value and what to pass."""
    with pytest.raises(GraphCacheError, match=text):
        make(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"outputs": "view"},
        {"verify": 0.01},
        {"verify": 1},
        {"verify": "off"},
        {"max_padding_ratio": 1},
        {"fill": {"input": 0}},
        {"fill": {"input": "repeat"}},
        {"split": None},
        {"split": "batch"},
        {"max_graphs": 1, "max_signatures": 1, "capture_after": 3},
        {"max_bytes": "1.5MiB"},
    ],
)
def test_every_value_of_the_contract_is_taken(options):
    """Nothing of design.md section 2 is refused."""
    assert make(**options).stats().calls == 0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2GiB", 2**31),
        ("2 GiB", 2**31),
        ("1.5MiB", 3 * 2**19),
        ("10KB", 10_000),
        ("512", 512),
        ("512B", 512),
        (512, 512),
        (None, None),
        ("3MB", 3 * 10**6),
        ("1GB", 10**9),
        ("4KiB", 4096),
    ],
)
def test_bytes_are_read_from_numbers_and_text(text, value):
    """Binary and decimal units."""
    assert parse_bytes(text) == value


def test_the_share_of_shadowed_calls_is_the_fraction():
    """Nothing is shadowed under "capture" and "off"."""
    assert [make(verify=v)._settings.shadowed for v in ("capture", "off", 0.25)] == [0, 0, 0.25]


def test_fills_are_kept_as_they_were_given():
    """The caller's mapping may change later."""
    fills = {"input": 0}
    cache = make(fill=fills)
    fills["input"] = 1
    assert cache._settings.fill == {"input": 0}
    assert make(fill=None)._settings.fill == {}


@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 3, "seq": 4},
        3,
        3.0,
        None,
        (3,),
        "34",
        (3, 4.0),
        (3, True),
        (3, -4),
        (3, torch.tensor(4)),
    ],
)
def test_sizes_of_static_inputs_are_one_for_each_dim(sizes):
    """Plain numbers, in the order of the dims; the text names them."""
    dims = ({0: "batch", 1: "seq"},)
    cache = GraphCache(nn.Identity(), {"batch": [4], "seq": [8]}, dynamic_shapes=dims)
    text = "pass one size for each dynamic dim: batch, seq"
    with pytest.raises(GraphCacheError, match=text):
        cache.static_inputs(sizes, like=torch.ones(1, 1))


@pytest.mark.parametrize("sizes", [3, (3,), [3], torch.Size([3]), range(3, 4), np.int64(3)])
def test_sizes_of_static_inputs_may_be_any_sequence_or_a_number(sizes):
    assert make().static_inputs(sizes, like=torch.ones(1, 2))["input"].shape == (3, 2)
