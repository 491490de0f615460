"""How the examples score a classifier."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn


class Batches(Protocol):
    """A loader of torch or timm: a number of batches of images and labels."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]: ...


@torch.inference_mode()
def accuracy(model: nn.Module, loader: Batches, amp: bool = False) -> float:
    """Share of images that a model classifies correctly, in percent."""
    model.eval()
    device = next(model.parameters()).device
    right = total = 0
    for images, labels in loader:
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            logits = model(images.to(device))
        right += int((logits.argmax(-1) == labels.to(device)).sum())
        total += len(labels)
    return 100 * right / total


@torch.no_grad()
def loss_on(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Cross-entropy of one batch, in evaluation mode."""
    model.eval()
    device = next(model.parameters()).device
    return float(nn.functional.cross_entropy(model(images.to(device)), labels.to(device)))
