"""Fine-tune a model on your own image folder, with timm's parts: data, optimizer, schedule, checkpoint.

DATA has train/ and validation/, each with one folder per class. The model starts from random weights, or with
--pretrained from its own, with a new head if the classes differ. The weights of the best epoch are kept in a file that
timm.create_model loads. timm's train.py does the same with more augmentation, mixed precision and several GPUs.
"""

import argparse
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file
from timm.data import create_dataset, create_loader, resolve_data_config
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ParseKwargs, random_seed
from torch import nn
from training import accuracy


def datasets(data: Path) -> tuple[Any, Any]:
    """The images to train and to validate on.

    Raises:
        SystemExit: if a split is missing, or the two have different classes.
    """
    # without such a folder timm would use all images for both
    for split, names in {"train": ("train",), "validation": ("validation", "val")}.items():
        if not any((data / name).is_dir() for name in names):
            raise SystemExit(f"Expected {data / split} with one folder per class, but it does not exist: create it.")
    train, validation = (create_dataset("", root=str(data), split=split) for split in ("train", "validation"))
    seen, tested = (list(dataset.reader.class_to_idx) for dataset in (train, validation))  # type: ignore[union-attr]
    if seen != tested:
        raise SystemExit(
            f"Expected the same classes in train and validation of {data}, got {', '.join(seen)} and "
            f"{', '.join(tested)}: add or remove folders."
        )
    return train, validation


def train_epoch(model: nn.Module, loader: Any, optimizer: Any, scheduler: Any, updates: int) -> int:
    """Train for one epoch and return the number of updates so far, including earlier epochs."""
    device = next(model.parameters()).device
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images.to(device)), labels.to(device), label_smoothing=0.1).backward()
        optimizer.step()
        updates += 1
        scheduler.step_update(num_updates=updates)
    return updates


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, metavar="DATA", help="folder with train/ and validation/")
    parser.add_argument("out", type=Path, metavar="OUT.safetensors", help="checkpoint to write")
    parser.add_argument(
        "--model", default="vit_ssog_small", help="a timm name, local-dir: or hf-hub: (default: vit_ssog_small)"
    )
    parser.add_argument("--pretrained", action="store_true", help="start from the model's pretrained weights")
    parser.add_argument(
        "--model-kwargs", nargs="*", default={}, action=ParseKwargs, metavar="NAME=VALUE", help="options of the model"
    )
    parser.add_argument("--img-size", type=int, help="side of the images (default: that of the model)")
    parser.add_argument("--epochs", type=int, default=10, help="default: 10")
    parser.add_argument("--batch-size", type=int, default=32, help="images per batch (default: 32)")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate of AdamW (default: 1e-3)")
    parser.add_argument("--workers", type=int, default=0, help="processes that read images (default: 0)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help=f"default: {device}")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    options = parser.parse_args(argv)
    for name in ("epochs", "batch_size"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if options.out.suffix != ".safetensors":
        parser.error(f"OUT must end in .safetensors, got {options.out}")
    return options


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    random_seed(options.seed)
    train, validation = datasets(options.data)
    classes = len(train.reader.class_to_idx)
    model: Any = timm.create_model(
        options.model,
        pretrained=options.pretrained,
        num_classes=classes,
        **options.model_kwargs,
    ).to(options.device)
    side = options.img_size or model.patch_embed.img_size[0]
    channels = model.patch_embed.proj.in_channels
    train.input_img_mode = validation.input_img_mode = "L" if channels == 1 else "RGB"
    config = resolve_data_config({"input_size": (channels, side, side)}, model=model)
    common = {name: config[name] for name in ("input_size", "interpolation", "mean", "std", "crop_pct")}
    common |= {"batch_size": options.batch_size, "num_workers": options.workers, "use_prefetcher": False}
    loader = create_loader(train, is_training=True, scale=(0.5, 1.0), persistent_workers=False, **common)
    if not len(loader):
        raise SystemExit(
            f"Expected at least --batch-size {options.batch_size} images to train on, got {len(train)}: lower it."
        )
    tests = create_loader(validation, is_training=False, persistent_workers=False, **common)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=options.lr, weight_decay=0.05)
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched="cosine",
        num_epochs=options.epochs,
        warmup_epochs=options.epochs / 10,
        step_on_epochs=False,
        updates_per_epoch=len(loader),
    )
    best, updates = -1.0, 0
    for epoch in range(options.epochs):
        updates = train_epoch(model, loader, optimizer, scheduler, updates)
        top1 = accuracy(model, tests)
        print(f"epoch {epoch + 1} of {options.epochs}: top-1 {top1:.1f} %", flush=True)
        if top1 > best:
            best = top1
            options.out.parent.mkdir(parents=True, exist_ok=True)
            save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, options.out)
    kwargs = "".join(f", {name}={value!r}" for name, value in options.model_kwargs.items())
    print(f"best: {best:.1f} %")
    print(f"timm.create_model({options.model!r}, num_classes={classes}{kwargs}, checkpoint_path='{options.out}')")


if __name__ == "__main__":
    main()
