"""captum: attributions to pixels and to tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor

captum = pytest.importorskip("captum.attr")


def test_integrated_gradients_add_up_to_the_logit(model: Any, images: Tensor) -> None:
    pixels, errors = captum.IntegratedGradients(model).attribute(
        images, target=1, n_steps=100, internal_batch_size=50, return_convergence_delta=True
    )
    assert pixels.shape == images.shape
    difference = (model(images) - model(torch.zeros_like(images)))[:, 1]
    torch.testing.assert_close(pixels.sum((1, 2, 3)).float(), difference, rtol=0.02, atol=2e-3)
    assert errors.abs().max() < 0.02


@pytest.mark.parametrize("method", ["Saliency", "InputXGradient"])
def test_gradients_are_those_of_autograd(model: Any, images: Tensor, method: str) -> None:
    images.requires_grad_()
    (gradient,) = torch.autograd.grad(model(images)[:, 2].sum(), images)
    expected = gradient.abs() if method == "Saliency" else gradient * images.detach()
    torch.testing.assert_close(getattr(captum, method)(model).attribute(images, target=2), expected)


def test_tokens_are_attributed_at_the_final_norm(model: Any, images: Tensor) -> None:
    tokens = captum.LayerGradientXActivation(model, model.norm).attribute(images, target=0)
    assert tokens.shape == (2, 16, 32)
    # after the norm there is only the mean over tokens and a linear layer
    torch.testing.assert_close(tokens.sum((1, 2)) + model.head.bias[0], model(images)[:, 0])


def test_occlusion(model: Any, images: Tensor) -> None:
    drops = captum.Occlusion(model).attribute(images, (3, 8, 8), strides=(3, 8, 8), target=0, perturbations_per_eval=4)
    assert drops.shape == images.shape
    occluded = images.clone()
    occluded[:, :, 8:16, :8] = 0
    expected = (model(images) - model(occluded))[:, 0].detach()
    torch.testing.assert_close(drops[:, 0, 8, 0].float(), expected, rtol=1e-3, atol=1e-5)
