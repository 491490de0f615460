"""segmentation_models_pytorch: our models as the encoder of a dense prediction transformer."""

from typing import Any

import pytest
import torch

smp = pytest.importorskip("segmentation_models_pytorch")


def segmenter(name: str, **options: Any) -> Any:
    return smp.DPT(
        f"tu-{name}",
        encoder_weights=None,
        classes=3,
        decoder_intermediate_channels=(16,) * 4,
        decoder_fusion_channels=16,
        dynamic_img_size=True,
        decoder_readout="ignore",
        **options,
    )


@pytest.mark.parametrize("name", ["vit_ssog_tiny", "vit_ssog_tiny_looped", "vit_ssog_tiny_ode"])
@pytest.mark.parametrize("size", [(64, 64), (32, 96), (64, 32)])
def test_it_segments_images_of_any_shape(name: str, size: tuple[int, int]) -> None:
    model = segmenter(name)
    maps = model(torch.randn(2, 3, *size))
    assert maps.shape == (2, 3, *size)
    maps.square().mean().backward()
    encoder = model.encoder.model
    unused = [n for n, p in encoder.named_parameters() if p.grad is None]
    assert unused == ["norm.weight", "norm.bias", "head.weight", "head.bias"]  # as for timm's ViT


def test_taps_are_the_steps_of_depth() -> None:
    encoder = segmenter("vit_ssog_tiny_ode").encoder
    assert encoder.output_strides == [16] * 4
    assert encoder.out_channels == [192] * 4
    features, prefix_tokens = encoder(torch.randn(1, 3, 32, 48))
    assert [feature.shape for feature in features] == [(1, 192, 2, 3)] * 4
    assert prefix_tokens == [None] * 4
    with pytest.raises(ValueError, match="cannot exceed the number of blocks"):
        segmenter("vit_ssog_tiny_ode", solver_steps=3)
