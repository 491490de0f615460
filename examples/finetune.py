"""Fine-tune a model on your own image folder, with timm's parts: data, optimizer, schedule, checkpoint.

DATA has train/ and validation/ (or val/), each with one folder per class. The model starts from random weights, or with
--pretrained from its own, with a new head if the classes differ. The weights of the best epoch are kept in a file that
timm.create_model loads. timm's train.py does the same with more augmentation, mixed precision and several GPUs.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from image_folder import datasets, require_batch
from loading import load_model
from refusing import refuse, refusing, require, require_convergence, require_learning_rate, require_place
from safetensors.torch import save as serialise
from scoring import accuracy, loss_on
from timm.data import create_loader, resolve_data_config, resolve_model_data_config
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ParseKwargs, random_seed
from torch import nn

from timm_ssog.errors import require_count, require_number, require_positive_int
from timm_ssog.files import replace_file

LAST_SEED = 2**32 - 1
"""The largest seed that NumPy takes."""


class ModelOptions(ParseKwargs):
    """timm's parser of NAME=VALUE, with an error instead of a traceback for what is neither."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        """Take the options; num_classes comes from the folders."""
        for value in values:
            name, equals, _ = value.partition("=")
            if not name.isidentifier() or not equals:
                parser.error(f"{option_string} takes NAME=VALUE, got {value!r}.")
            if name == "num_classes":
                parser.error(f"{option_string} takes no num_classes, got {value!r}: DATA has a folder for each class.")
        super().__call__(parser, namespace, values, option_string)


def create(options: argparse.Namespace, classes: int) -> tuple[Any, dict[str, Any]]:
    """The model, and the arguments that create it again."""
    if options.model_kwargs.get("features_only"):
        refuse("--model-kwargs must give a classifier, got features_only: omit it.")
    arguments = {"num_classes": classes, **options.model_kwargs}
    model = load_model(options.model, options.pretrained, "omit --pretrained", **arguments)
    # such models take images of one size only; the others take this size without a word
    if options.img_size and model.pretrained_cfg.get("fixed_input_size") and "img_size" not in arguments:
        arguments["img_size"] = options.img_size
        model = load_model(options.model, options.pretrained, "omit --pretrained", **arguments)
    return model, arguments


def input_size(model: Any, side: int | None, classes: int) -> tuple[int, int, int]:
    """Channels, height and width to train with; refused unless the model makes logits of such images."""
    config = resolve_model_data_config(model)
    height, width = getattr(getattr(model, "patch_embed", None), "img_size", None) or config["input_size"][1:]
    if side is not None:
        height = width = side
    size = (getattr(model, "in_chans", config["input_size"][0]), height, width)
    if size[0] not in (1, 3):
        refuse(f"Expected a model of grey (1) or colour images (3 channels), got in_chans={size[0]}: name another.")
    with refusing(f"use images of {height} x {width}", "Choose another --img-size."), torch.no_grad():
        logits = model.eval()(torch.zeros(1, *size))
    if logits.shape != (1, classes):
        refuse(
            f"Expected a model that gives {classes} logits per image, got {list(logits.shape[1:])}: omit global_pool."
        )
    return size


def train_epoch(model: nn.Module, loader: Any, optimizer: Any, scheduler: Any, epoch: int) -> float:
    """Train for one epoch.

    Returns:
        The loss of the last batch with the weights as trained, or the first loss that is not finite.
    """
    device = next(model.parameters()).device
    model.train()
    images = labels = torch.empty(0)
    for step, (images, labels) in enumerate(loader, epoch * len(loader) + 1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device), label_smoothing=0.1)
        if not loss.isfinite():
            return loss.item()
        loss.backward()
        optimizer.step()
        scheduler.step_update(num_updates=step)
    return loss_on(model, images, labels)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, metavar="DATA", help="folder with train/ and validation/ (or val/)")
    parser.add_argument("out", type=Path, metavar="OUT.safetensors", help="checkpoint to write")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    parser.add_argument(
        "--model", default="vit_ssog_small", help="a timm name, local-dir: or hf-hub: (default: vit_ssog_small)"
    )
    parser.add_argument("--pretrained", action="store_true", help="start from the model's pretrained weights")
    parser.add_argument(
        "--model-kwargs", nargs="*", default={}, action=ModelOptions, metavar="NAME=VALUE", help="options of the model"
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
    require(parser, options, require_positive_int, "epochs", "batch_size")
    if options.img_size is not None:
        require(parser, options, require_positive_int, "img_size")
    require(parser, options, require_learning_rate, "lr")
    require(parser, options, require_count, "workers")
    seeds = f"an integer from 0 to {LAST_SEED}"
    require(parser, options, lambda name, seed: require_number(name, seed, seeds, 0, LAST_SEED), "seed")
    if options.out.suffix != ".safetensors":
        parser.error(f"OUT must end in .safetensors, got {options.out}")
    return options


def require_out(out: Path, overwrite: bool) -> None:
    """Refuse a checkpoint that cannot be written, or would replace a file without --overwrite."""
    if out.is_dir():
        refuse(f"OUT must be a file, got {out}, which is a folder: name a file in it.")
    if out.exists() and not overwrite:
        refuse(f"OUT must not exist yet, and {out} does: name another, or add --overwrite to replace it.")
    require_place("OUT", out)


def require_device(device: str) -> None:
    """Refuse a device that cannot compute here."""
    with refusing(f"compute on --device {device}", "Use --device cpu, or a device of this machine."):
        torch.zeros(1, device=device).item()


def save(model: nn.Module, out: Path) -> None:
    with refusing(f"write {out}", "Name another OUT."):
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(out, serialise({name: tensor.contiguous() for name, tensor in model.state_dict().items()}))


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    require_out(options.out, options.overwrite)
    require_device(options.device)
    random_seed(options.seed)
    train, validation = datasets(options.data)
    require_batch(options.batch_size, len(train))
    classes = len(train.reader.class_to_idx)
    model, created = create(options, classes)
    size = input_size(model, options.img_size, classes)
    model.to(options.device)
    train.input_img_mode = validation.input_img_mode = "L" if size[0] == 1 else "RGB"
    config = resolve_data_config({"input_size": size}, model=model)
    common = {name: config[name] for name in ("input_size", "interpolation", "mean", "std", "crop_pct")}
    common |= {"batch_size": options.batch_size, "num_workers": options.workers, "use_prefetcher": False}
    loader = create_loader(train, is_training=True, scale=(0.5, 1.0), persistent_workers=False, **common)
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
    best, kept = -1.0, f"{options.out} was not written."
    for epoch in range(options.epochs):
        loss = train_epoch(model, loader, optimizer, scheduler, epoch)
        require_convergence(loss, f"epoch {epoch + 1}", options.lr, kept)
        top1 = accuracy(model, tests)
        print(f"epoch {epoch + 1} of {options.epochs}: top-1 {top1:.1f} %", flush=True)
        if top1 > best:
            best, kept = top1, f"{options.out} holds epoch {epoch + 1} (top-1 {top1:.1f} %)."
            save(model, options.out)
    if tuple(resolve_model_data_config(model)["input_size"]) != size:
        # so that evaluation resizes images as training did
        created["pretrained_cfg_overlay"] = {**created.get("pretrained_cfg_overlay", {}), "input_size": size}
    print(f"best: {best:.1f} %")
    kwargs = "".join(f", {name}={value!r}" for name, value in created.items())
    print(f"timm.create_model({options.model!r}{kwargs}, checkpoint_path={str(options.out)!r})")


if __name__ == "__main__":
    main()
