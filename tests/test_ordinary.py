"""Ordinary models that couple nothing are never refused, in any precision, at any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphcache import GraphCache

transformers = pytest.importorskip("transformers")

TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
TOKENS = {name: {0: "batch", 1: "seq"} for name in ("input_ids", "attention_mask")}


@pytest.fixture(autouse=True)
def _inference() -> Any:
    with torch.inference_mode():
        yield


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 10))


def gru() -> nn.Module:
    return nn.GRU(32, 64, num_layers=2, batch_first=True)


def encoder() -> nn.Module:
    """MiniLM's form, and BERT's, in small."""
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=48, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=96, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.BertModel(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        image_size=32, patch_size=8,
    )  # fmt: skip
    return transformers.ViTModel(config)


def resnet() -> nn.Module:
    """Bottleneck blocks as in ResNet-50, in small."""
    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[32, 64], depths=[2, 2], num_labels=10
    )
    return transformers.ResNetForImageClassification(config)


def rows(n: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    return {"input": torch.randn(n, 64, dtype=dtype, device=device)}


def steps(n: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    return {"input": torch.randn(n, 7, 32, dtype=dtype, device=device)}


def images(n: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(n, 3, 32, 32, dtype=dtype, device=device)}


def texts(n: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Texts of ragged lengths, the longest as long as the batch is wide."""
    longest = 3 + 5 * n % 29
    lengths = torch.randint(1, longest + 1, (n, 1), device=device)
    lengths[0] = longest
    places = torch.arange(longest, device=device)
    ids = torch.randint(1, 100, (n, longest), device=device)
    return {"input_ids": ids, "attention_mask": (places < lengths).long()}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., dict[str, Tensor]], Any, Any]] = {
    "mlp": (mlp, rows, [2, 4, 8], None),
    "gru": (gru, steps, [2, 4, 8], None),
    "vit": (vit, images, [2, 4, 8], None),
    "resnet": (resnet, images, [2, 4, 8], None),
    "encoder, batch": (encoder, texts, [2, 4, 8], None),
    "encoder, both": (encoder, texts, {"batch": [2, 4, 8], "seq": [16, 32]}, TOKENS),
}


@pytest.mark.filterwarnings("ignore:RNN module weights")  # cuDNN takes no flat ones in bfloat16
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_an_ordinary_model_is_never_refused(name: str, dtype: torch.dtype, device: str) -> None:
    """Padded, exact and split calls equal eager's, and none runs eagerly."""
    make, inputs, buckets, shapes = MODELS[name]
    torch.manual_seed(0)
    model = make().to(device, dtype).eval()
    cache = GraphCache(model, buckets, dynamic_shapes=shapes)
    for n in (3, 1, 4, 7, 5, 11):
        call = inputs(n, dtype, device)
        for ours, theirs in zip(tensors(cache(**call)), tensors(model(**call)), strict=True):
            gap = (ours.double() - theirs.double()).norm() / theirs.double().norm()
            assert gap <= TOLERANCE[dtype], f"{name} at {n}: {gap}"
    stats = cache.stats()
    assert stats.eager == 0, stats.fallbacks
    assert stats.splits == 1


def tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    values = result.values() if hasattr(result, "values") else result
    return [value for value in values if isinstance(value, Tensor)]
