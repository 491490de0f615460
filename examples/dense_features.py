"""Dense features at high resolution: a small segmentation head on timm's features_only, used at a larger size.

Digits lie at random on a dark canvas, and every pixel gets the label of its digit or of the background. The backbone is
a trained classifier of single digits, by default the one in hub_cards/. It is trained further with the head at one
canvas size and tested at larger ones, where the digits keep their size and there are more of them. That is what
kernel_coords="cells" is for: kernels keep their reach in tokens. If larger images show the same things enlarged,
"relative" is right.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from digits import CLASSES, IMAGE_SIZE, MEAN, STD, digits
from loading import load_folder
from refusing import refuse, require, require_convergence, require_learning_rate
from scoring import loss_on
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import random_seed
from torch import Tensor, nn

from timm_ssog.errors import require_positive_int

CHECKPOINT = Path(__file__).parents[1] / "hub_cards" / "vit_ssog_tiny.mnist5k"
INK = 100
"""Pixels of a digit above this value, out of 255, have its label."""
BACKGROUND_WEIGHT = 0.2
"""Weight of a background pixel in the loss: most pixels are background, and learned first."""


class Segmenter(nn.Module):
    """Logits for every pixel from feature maps of a backbone."""

    def __init__(self, backbone: Any, classes: int, hidden: int = 64) -> None:
        """Put a head on a backbone.

        Args:
            backbone: Created with ``features_only=True``; its maps have one size.
            classes: Number of labels.
            hidden: Channels between the two layers of the head.
        """
        super().__init__()
        self.backbone = backbone
        patch = backbone.feature_info.reduction()[-1]
        self.head = nn.Sequential(
            nn.Conv2d(sum(backbone.feature_info.channels()), hidden, 1),
            nn.GELU(),
            nn.ConvTranspose2d(hidden, classes, patch, stride=patch),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, channels, height, width) to logits (batch, classes, height, width)."""
        return self.head(torch.cat(self.backbone(images), 1))


def scenes(split: str, side: int, count: int, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Canvases with digits on them, which may touch.

    Args:
        split: ``"train"`` or ``"test"``, of the digits.
        side: Side of the canvases in pixels; at least that of a digit.
        count: Number of canvases.
        generator: Draws digits and places.

    Returns:
        Normalised images (count, 1, side, side) and labels (count, side, side): 0 is background, 1 the digit 0.
    """
    pictures, names = digits(split)
    canvases = np.zeros((count, side, side), np.uint8)
    labels = np.zeros((count, side, side), np.int64)
    for canvas, label in zip(canvases, labels, strict=True):
        for _ in range(2 * (side // IMAGE_SIZE) ** 2):
            number = generator.integers(len(names))
            y, x = generator.integers(side - IMAGE_SIZE + 1, size=2)
            place = slice(y, y + IMAGE_SIZE), slice(x, x + IMAGE_SIZE)
            ink = pictures[number] > INK
            if (label[place][ink] > 0).any():
                continue
            canvas[place] = np.maximum(canvas[place], pictures[number])
            label[place][ink] = names[number] + 1
    images = (torch.from_numpy(canvases)[:, None] / 255 - MEAN[0]) / STD[0]
    return images, torch.from_numpy(labels)


def train(model: nn.Module, side: int, steps: int, batch: int, rate: float, generator: np.random.Generator) -> None:
    """Train on new scenes in every step."""
    optimizer = create_optimizer_v2(model, opt="adamw", lr=rate, weight_decay=0.05)
    scheduler, _ = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=1, step_on_epochs=False, updates_per_epoch=steps
    )
    assert scheduler is not None  # for schedules that timm does not know
    weight = torch.ones(CLASSES + 1)
    weight[0] = BACKGROUND_WEIGHT
    model.train()
    images = labels = torch.empty(0)
    for step in range(steps):
        images, labels = scenes("train", side, batch, generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels, weight=weight)
        loss.backward()
        optimizer.step()
        scheduler.step_update(num_updates=step + 1)
        require_convergence(loss.item(), f"step {step + 1}", rate)
        if (step + 1) % max(1, steps // 5) == 0:
            print(f"step {step + 1} of {steps}: loss {loss.item():.3f}", flush=True)
    require_convergence(loss_on(model, images, labels), f"step {steps}", rate)


@torch.inference_mode()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Share of correct pixels, and intersection over union averaged over the labels, in percent."""
    model.eval()
    predicted = torch.cat([model(image).argmax(1) for image in images.split(1)])
    confusion = torch.bincount((labels * (CLASSES + 1) + predicted).flatten(), minlength=(CLASSES + 1) ** 2)
    confusion = confusion.view(CLASSES + 1, CLASSES + 1).double()
    right = confusion.diagonal()
    union = confusion.sum(0) + confusion.sum(1) - right
    return 100 * float(right.sum() / confusion.sum()), 100 * float((right / union)[union > 0].mean())


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="folder of a classifier of digits")
    parser.add_argument("--kernel-coords", choices=("cells", "relative"), default="cells", help="default: cells")
    parser.add_argument("--side", type=int, default=64, help="side of the canvases to train on (default: 64)")
    parser.add_argument(
        "--test-sides",
        type=int,
        nargs="+",
        default=[64, 128, 256],
        help="sides to test on (default: 64 128 256)",
    )
    parser.add_argument("--steps", type=int, default=300, help="steps of training (default: 300)")
    parser.add_argument("--batch-size", type=int, default=8, help="canvases per batch (default: 8)")
    parser.add_argument("--images", type=int, default=20, help="canvases to test on, per size (default: 20)")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate of AdamW (default: 3e-3)")
    options = parser.parse_args(argv)
    require(parser, options, require_positive_int, "steps", "batch_size", "images")
    require(parser, options, require_learning_rate, "lr")
    for side in (options.side, *options.test_sides):
        if side < IMAGE_SIZE:
            parser.error(f"a canvas must have at least the {IMAGE_SIZE} px of a digit, got {side}")
    return options


def load_backbone(folder: Path, kernel_coords: str, sides: list[int]) -> Any:
    """The feature maps of a saved classifier of digits; refused unless it takes grey canvases of these sides."""
    backbone = load_folder(folder, features_only=True, kernel_coords=kernel_coords)
    if backbone.in_chans != 1:
        refuse(f"Expected a model of images with 1 channel, got {backbone.in_chans} in {folder}: name another folder.")
    patch = backbone.feature_info.reduction()[-1]
    for side in sides:
        if side % patch:
            refuse(f"--side and --test-sides must be multiples of the model's patch size {patch}, got {side}.")
    return backbone


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    random_seed(0)
    torch.set_num_threads(1)  # models of this size gain nothing from more
    backbone = load_backbone(options.model, options.kernel_coords, [options.side, *options.test_sides])
    model = Segmenter(backbone, CLASSES + 1)
    train(model, options.side, options.steps, options.batch_size, options.lr, np.random.default_rng(0))
    for side in options.test_sides:
        images, labels = scenes("test", side, options.images, np.random.default_rng(1))
        right, overlap = evaluate(model, images, labels)
        background = 100 * float((labels == 0).double().mean())
        print(f"{side} px: pixels right {right:.1f} % (background alone {background:.1f} %), mIoU {overlap:.1f} %")


if __name__ == "__main__":
    main()
