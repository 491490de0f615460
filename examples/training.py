"""The model and the recipe that the examples share, with timm's own optimizer, schedule, loss and task."""

from collections.abc import Callable
from typing import Any

import timm
import torch
from digits import CLASSES, IMAGE_SIZE, MEAN, STD
from refusing import needing
from scoring import Batches
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch import nn

import timm_ssog

with needing("timm.task", "pip install --upgrade timm"):
    from timm.task import ClassificationTask

MODEL: dict[str, Any] = {
    "img_size": IMAGE_SIZE,
    "patch_size": 2,
    "in_chans": 1,
    "num_classes": CLASSES,
    "embed_dim": 32,
    "depth": 4,
    "num_heads": 4,
    "mlp_ratio": 2.0,
    # what timm saves with the weights, so that a reloaded model knows its preprocessing
    "pretrained_cfg_overlay": {
        "input_size": (1, IMAGE_SIZE, IMAGE_SIZE),
        "mean": MEAN,
        "std": STD,
        "crop_pct": 1.0,
        "interpolation": "bicubic",
    },
}

RECIPE: dict[str, Any] = {
    "batch_size": 25,
    "optimizer": "adamw",
    "learning_rate": 4e-3,
    "weight_decay": 0.05,
    "schedule": "cosine",
    "warmup_epochs": 0.25,
    "label_smoothing": 0.1,
}


def create_model(name: str = "vit_ssog_tiny", **options: Any) -> timm_ssog.VitSsog:
    """Create a small model for the digits through timm: 14 x 14 tokens, four blocks of width 32."""
    return timm.create_model(name, **{**MODEL, **options})  # type: ignore[return-value]


def train(
    model: nn.Module,
    loader: Batches,
    epochs: int,
    recipe: dict[str, Any] = RECIPE,
    on_step: Callable[[float], None] | None = None,
    amp: bool = False,
) -> None:
    """Train a model on its device.

    Args:
        model: Maps images to logits.
        loader: Batches of images and labels.
        epochs: Passes over the loader.
        recipe: Optimizer, schedule and label smoothing, with the keys of `RECIPE`.
        on_step: Called with the loss after each step.
        amp: Whether the model runs under autocast, in bfloat16.

    Raises:
        ValueError: if the loader has no batch.
    """
    if not len(loader):
        raise ValueError("Expected at least one batch to train on, got none: is batch_size above the number of images?")
    task = ClassificationTask(model, criterion=LabelSmoothingCrossEntropy(recipe["label_smoothing"]), verbose=False)
    optimizer = create_optimizer_v2(
        model, opt=recipe["optimizer"], lr=recipe["learning_rate"], weight_decay=recipe["weight_decay"]
    )
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched=recipe["schedule"],
        num_epochs=epochs,
        warmup_epochs=recipe["warmup_epochs"],
        step_on_epochs=False,
        updates_per_epoch=len(loader),
    )
    assert scheduler is not None  # for schedules that timm does not know
    device = next(model.parameters()).device
    task.train()
    updates = 0
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                loss = task(images.to(device), labels.to(device))["loss"]
            loss.backward()
            optimizer.step()
            updates += 1
            scheduler.step_update(num_updates=updates)
            if on_step is not None:
                on_step(loss.item())
