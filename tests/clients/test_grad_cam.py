"""grad-cam: saliency maps from a block (tokens on their grid) and from the final norm (tokens in a row, as in ViT)."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

grad_cam = pytest.importorskip("pytorch_grad_cam")


def from_grid(tokens: Tensor) -> Tensor:
    return tokens.permute(0, 3, 1, 2)


def from_row(tokens: Tensor) -> Tensor:
    """As the README describes for `norm`."""
    return tokens.mT.unflatten(2, (4, 6))


@pytest.mark.parametrize("method", ["GradCAM", "HiResCAM", "EigenCAM", "ScoreCAM"])
@pytest.mark.parametrize("layer", ["block", "norm"])
def test_maps_have_the_size_of_the_image(model: Any, method: str, layer: str) -> None:
    target, reshape = (model.blocks[-1].norm1, from_grid) if layer == "block" else (model.norm, from_row)
    images = torch.randn(2, 3, 32, 48)
    with getattr(grad_cam, method)(model, [target], reshape_transform=reshape) as cam:
        maps = cam(input_tensor=images, targets=None)
    assert maps.shape == (2, 32, 48)
    assert np.isfinite(maps).all()
    assert maps.max() > 0
