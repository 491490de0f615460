"""Output folders as timm's train.py leaves them, written by timm's own saver, and what tests do with them."""

import argparse
import json
from pathlib import Path
from typing import Any

import timm
import torch
import yaml
from timm.utils import CheckpointSaver, ModelEmaV3, update_summary

ROOT = Path(__file__).parents[1]

SECRET = "/home/somebody/secret"
"""In every path of a run: what must not be published."""

KWARGS: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}

ABOUT: dict[str, Any] = {
    "tag": "test",
    "license": "apache-2.0",
    "dataset": {"name": "Noise", "description": "Not even images."},
}


def write_run(folder: Path, model_name: str = "vit_ssog_tiny", ema: bool = True, **changes: Any) -> Any:
    """Write a run of two epochs, the second one better, with weights that differ from any initial ones.

    Args:
        folder: Folder to write to.
        model_name: As for ``--model``.
        ema: Run with ``--model-ema``.
        **changes: Options of train.py.

    Returns:
        The model of the second epoch, and its moving average (or None), both in eval mode.
    """
    folder.mkdir(parents=True)
    kwargs = {**KWARGS, **({} if "_looped" not in model_name and "_ode" not in model_name else {"depth": 1})}
    options: dict[str, Any] = {
        "model": model_name,
        "num_classes": 5,
        "in_chans": None,
        "input_size": [3, 32, 32],
        "gp": None,
        "model_kwargs": kwargs,
        "mean": [0.4, 0.5, 0.6],
        "std": [0.2],
        "interpolation": "bilinear",
        "crop_pct": 0.95,
        "opt": "adamw",
        "lr": 0.001,
        "epochs": 2,
        "batch_size": 4,
        "seed": 0,
        "smoothing": 0.1,
        "hflip": 0.0,
        "model_ema": ema,
        "model_ema_force_cpu": False,
        "model_ema_decay": 0.5,
        "eval_metric": "top1",
        "val_split": "validation",
        "data_dir": f"{SECRET}/data",
        "output": SECRET,
        "initial_checkpoint": SECRET,
        "wandb_project": SECRET,
        "log_wandb": False,
        **changes,
    }
    options["model_kwargs"] = {**kwargs, **changes.get("model_kwargs", {})}
    (folder / "args.yaml").write_text(yaml.safe_dump(options))
    channels = options["in_chans"] or options["input_size"][0]
    model: Any = timm.create_model(
        model_name, num_classes=options["num_classes"], in_chans=channels, **options["model_kwargs"]
    )
    average = ModelEmaV3(model, decay=0.5) if ema else None
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    validates = bool(options["val_split"])
    saver = CheckpointSaver(
        model,
        optimizer,
        argparse.Namespace(**options),
        average,
        checkpoint_dir=str(folder),
        recovery_dir=str(folder),
        decreasing=not validates,
    )
    for epoch in range(2):
        model.train()
        optimizer.zero_grad()
        model(torch.randn(2, channels, 32, 32)).square().sum().backward()
        optimizer.step()
        if average is not None:
            average.update(model)
        metrics = {"loss": 2.0 - epoch, "top1": 50.25 + epoch, "top5": 100.0}
        update_summary(
            epoch, {"loss": 1.5 - epoch}, metrics if validates else None, str(folder / "summary.csv"), lr=0.001
        )
        saver.save_checkpoint(epoch, metrics[options["eval_metric"]] if validates else 1.5 - epoch)
    return model.eval(), None if average is None else average.module.eval()


def write_about(path: Path, **changes: Any) -> Path:
    path.write_text(yaml.safe_dump({**ABOUT, **changes}))
    return path


def load(folder: Path, **options: Any) -> Any:
    return timm.create_model(f"local-dir:{folder}", pretrained=True, **options).eval()


def edit_json(path: Path, change: Any) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
