"""openerf: the effective receptive field of the token in the middle, by a hook on ``norm`` as for timm's ViT."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

openerf = pytest.importorskip("openerf")
image = pytest.importorskip("PIL.Image")


@pytest.mark.parametrize("target", ["norm", "forward_features"])
def test_the_field_is_that_of_the_token_in_the_middle(model: Any, tmp_path: Path, target: str) -> None:
    nn.init.normal_(model.norm.weight)  # the mean of a token after a plain LayerNorm doesn't depend on the image
    model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (3, 32, 32), "crop_pct": 1.0, "mean": (0.5,) * 3}
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    image.fromarray(pixels).save(tmp_path / "image.png")
    result = openerf.compute_erf(model, image_dir=tmp_path, target_layer=target, device="cpu", show_progress=False)

    std = torch.tensor(model.pretrained_cfg["std"]).view(3, 1, 1)
    normalised = (torch.from_numpy(pixels).permute(2, 0, 1) / 255 - 0.5) / std
    expected = field(model, normalised[None], row=1, column=1)
    np.testing.assert_allclose(result.erf_map, expected, atol=1e-5)


def field(model: Any, images: Tensor, row: int, column: int) -> np.ndarray:
    images.requires_grad_()
    tokens = model.forward_features(images).reshape(1, 4, 4, 32)
    (gradient,) = torch.autograd.grad(tokens[0, row, column].mean(), images)
    positive = gradient.mean((0, 1)).clamp(min=0)
    return (positive / positive.sum()).numpy()
