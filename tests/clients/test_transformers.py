"""transformers: the backbone, which finds feature taps by name, and the wrapper that classifies."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch

transformers = pytest.importorskip("transformers")

NAMES = ["vit_ssog_tiny", "vit_ssog_tiny_looped", "vit_ssog_tiny_ode"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("indices", [[-1], [0, 2], [1, 3, 5], [2, -1]])
@torch.no_grad()
def test_the_backbone_returns_the_chosen_steps(name: str, indices: list[int]) -> None:
    config = transformers.TimmBackboneConfig(backbone=name, out_indices=indices)
    backbone = transformers.TimmBackbone(config).eval()
    assert backbone.channels == [192] * len(indices)
    assert len(set(backbone.stage_names)) == len(backbone.stage_names)

    model = timm.create_model(name).eval()
    of_backbone = backbone.state_dict()  # without everything after the last tap
    model.load_state_dict(
        {name.removeprefix("_backbone.model."): tensor for name, tensor in of_backbone.items()}, False
    )
    images = torch.randn(1, 3, 64, 48)
    expected = model.forward_intermediates(images, indices, intermediates_only=True, stop_early=True)
    for ours, theirs in zip(backbone(images).feature_maps, expected, strict=True):
        assert ours.shape == (1, 192, 4, 3)
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_wrapper_saves_and_loads(name: str, images: torch.Tensor, tmp_path: Path) -> None:
    options: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 2}
    config = transformers.TimmWrapperConfig(architecture=name, model_args=options, num_labels=5)
    wrapper = transformers.TimmWrapperForImageClassification(config).eval()
    wrapper.timm_model.set_input_size(64)  # the kernels' reference grid is still that of 32 px
    expected = wrapper(images).logits
    wrapper.config.model_args = {**options, "img_size": 64}
    wrapper.save_pretrained(tmp_path)
    again = transformers.TimmWrapperForImageClassification.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(images).logits, expected)
