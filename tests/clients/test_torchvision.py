"""torchvision's feature extractor, and plain torch.fx: neither knows which functions timm leaves untraced."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx

extraction = pytest.importorskip("torchvision.models.feature_extraction")


@torch.no_grad()
def test_features_are_extracted(model: Any, images: Tensor) -> None:
    seen: list[Tensor] = []
    model.norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    expected = model(images)
    extractor = extraction.create_feature_extractor(model, {"norm": "tokens", "head": "logits"})
    features = extractor(images)
    assert features["tokens"].shape == (2, 16, 32)
    torch.testing.assert_close(features["tokens"], seen[0])
    torch.testing.assert_close(features["logits"], expected)
    assert "blocks.1.mlp.fc2" in extraction.get_graph_node_names(model)[1]


@torch.no_grad()
def test_plain_fx_traces(model: Any, images: Tensor) -> None:
    traced = fx.symbolic_trace(model)
    torch.testing.assert_close(traced(images), model(images))
    taller = torch.randn(1, 3, 48, 32)
    torch.testing.assert_close(traced(taller), model(taller))


def test_a_traced_model_trains(model: Any, images: Tensor) -> None:
    fx.symbolic_trace(model)(images).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
