"""Small real images held in memory as pixels: the digits and CIFAR-10, with crops and flips drawn by a generator."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import above  # noqa: F401
import numpy as np
import torch
from digits import MEAN, STD, digits
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

SIZE = 32
CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True)
class Images:
    """Pixels (count, channels, 32, 32) of uint8 with labels (count,), and how they are normalised and augmented.

    Attributes:
        pixels: The images.
        labels: Their classes.
        mean: Mean of the pixels, scaled to 0..1, per channel.
        std: Their standard deviation.
        shift: Largest shift in training, in pixels.
        flip: Whether a mirrored image still belongs to its class.
    """

    pixels: Tensor
    labels: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]
    shift: int
    flip: bool

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int | None) -> "Images":
        """Only the first images, up to this number; all if None."""
        return Images(self.pixels[:count], self.labels[:count], self.mean, self.std, self.shift, self.flip)

    def normalised(self, pixels: Tensor) -> Tensor:
        """Pixels as a model takes them."""
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        return (pixels.float() / 255 - mean) / std


def digit_images(split: str) -> Images:
    """The digits with a margin of two pixels, so that they have 32 x 32; classes interleaved."""
    pixels, labels = digits(split)
    pixels = F.pad(torch.from_numpy(pixels)[:, None], (2, 2, 2, 2))
    return Images(pixels, torch.from_numpy(labels).long(), MEAN, STD, shift=2, flip=False)


def cifar_images(folder: Path, split: str, per_class: int) -> Images:
    """CIFAR-10 from an image folder, a folder per split and class in it; classes interleaved.

    Raises:
        SystemExit: if a class has fewer images.
    """
    classes = sorted(path for path in (folder / split).glob("*") if path.is_dir())
    files = [sorted(path.iterdir())[:per_class] for path in classes]
    if not classes or min(map(len, files)) < per_class:
        raise SystemExit(f"Expected {per_class} images of each class in {folder / split}/CLASS/.")
    order = [(path, label) for paths in zip(*files, strict=True) for label, path in enumerate(paths)]
    pixels = torch.stack([torch.from_numpy(np.array(Image.open(path).convert("RGB"))) for path, _ in order])
    labels = torch.tensor([label for _, label in order])
    return Images(pixels.permute(0, 3, 1, 2).contiguous(), labels, CIFAR_MEAN, CIFAR_STD, shift=4, flip=True)


class TrainingBatches:
    """Shuffled batches, each image shifted and perhaps mirrored, drawn by their own generator."""

    def __init__(self, images: Images, batch_size: int, seed: int) -> None:
        self.images, self.batch_size = images, min(batch_size, len(images))
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self.images) // self.batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.images), generator=self.generator)
        for number in range(len(self)):
            chosen = order[number * self.batch_size : (number + 1) * self.batch_size]
            yield self._augmented(self.images.pixels[chosen]), self.images.labels[chosen]

    def _augmented(self, pixels: Tensor) -> Tensor:
        shift = self.images.shift
        corners = torch.randint(2 * shift + 1, (len(pixels), 2), generator=self.generator).tolist()
        mirrored = torch.rand(len(pixels), generator=self.generator) < (0.5 if self.images.flip else 0.0)
        padded = F.pad(pixels, (shift, shift, shift, shift))
        crops = [image[:, y : y + SIZE, x : x + SIZE] for image, (y, x) in zip(padded, corners, strict=True)]
        batch = torch.stack(crops)
        return self.images.normalised(torch.where(mirrored[:, None, None, None], batch.flip(-1), batch))


class TestBatches:
    """Batches in order, enlarged to a size by bicubic interpolation."""

    def __init__(self, images: Images, size: int = SIZE, batch_size: int = 100) -> None:
        self.images, self.size, self.batch_size = images, size, batch_size

    def __len__(self) -> int:
        return -(-len(self.images) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self.images), self.batch_size):
            part = slice(start, start + self.batch_size)
            batch = self.images.normalised(self.images.pixels[part])
            if self.size != SIZE:
                batch = F.interpolate(batch, size=(self.size, self.size), mode="bicubic")
            yield batch, self.images.labels[part]
