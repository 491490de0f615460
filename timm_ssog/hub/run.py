"""The output of a run of timm's train.py: its options, its metrics and its checkpoints."""

import argparse
import csv
import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from timm.models import clean_state_dict
from torch import Tensor

PUBLIC_OPTIONS = (
    *("model", "model_kwargs", "num_classes", "in_chans", "input_size", "img_size", "gp", "crop_pct", "mean", "std"),
    *("interpolation", "pretrained", "batch_size", "validation_batch_size", "grad_accum_steps", "channels_last"),
    *("amp", "amp_dtype", "model_dtype", "head_init_scale", "head_init_bias", "grad_checkpointing"),
    *("opt", "opt_eps", "opt_betas", "momentum", "weight_decay", "clip_grad", "clip_mode", "layer_decay", "opt_kwargs"),
    *("layer_decay_min_scale", "layer_decay_no_opt_scale"),
    *("sched", "sched_on_updates", "lr", "lr_base", "lr_base_size", "lr_base_scale", "lr_noise", "lr_noise_pct"),
    *("lr_noise_std", "lr_cycle_mul", "lr_cycle_decay", "lr_cycle_limit", "lr_k_decay", "warmup_lr", "min_lr"),
    *("epochs", "epoch_repeats", "decay_milestones", "decay_epochs", "warmup_epochs", "warmup_prefix"),
    *("cooldown_epochs", "patience_epochs", "decay_rate"),
    *("no_aug", "train_crop_mode", "scale", "ratio", "hflip", "vflip", "color_jitter", "color_jitter_prob"),
    *("grayscale_prob", "gaussian_blur_prob", "aa", "aug_repeats", "aug_splits", "jsd_loss", "bce_loss", "bce_sum"),
    *("bce_target_thresh", "bce_pos_weight", "reprob", "remode", "recount", "resplit", "mixup", "cutmix"),
    *("cutmix_minmax", "mixup_prob", "mixup_switch_prob", "mixup_mode", "mixup_off_epoch", "smoothing"),
    *("train_interpolation", "drop", "drop_path", "train_img_sizes", "train_batch_sizes", "train_size_probs"),
    *("train_size_schedule", "train_batches_per_epoch", "variable_batch_loss_scale"),
    *("model_ema", "model_ema_force_cpu", "model_ema_decay", "model_ema_warmup", "seed", "eval_metric"),
)
"""Options of train.py that say how a model was trained; the others are its author's folders, machines and logs."""

BEST, LAST = "best", "last"
_FILES = {BEST: "model_best.pth.tar", LAST: "last.pth.tar"}


@dataclass(frozen=True)
class TrainRun:
    """The output folder of one run of train.py.

    Attributes:
        folder: The folder.
        options: All options from args.yaml, with their defaults.
        epochs: Rows of summary.csv, in their order; an epoch that ran twice, after a resume, has two.
    """

    folder: Path
    options: dict[str, Any]
    epochs: tuple[dict[str, float], ...]

    @property
    def public_options(self) -> dict[str, Any]:
        """The options in `PUBLIC_OPTIONS`, as train.py's ``--config`` takes them."""
        return {name: self.options[name] for name in PUBLIC_OPTIONS if self.options.get(name) is not None}


@dataclass(frozen=True)
class TrainedWeights:
    """Weights of one epoch of a run.

    Attributes:
        file: Name of the checkpoint.
        epoch: Epoch, from 0.
        metric: Name of the metric, for example ``"top1"``.
        value: Its value.
        split: ``"validation"``, or ``"train"`` if the run did not validate.
        is_average: Whether they are the moving average of the weights.
        state_dict: The tensors.
        summary: The row of summary.csv with this epoch.
    """

    file: str
    epoch: int
    metric: str
    value: float
    split: str
    is_average: bool
    state_dict: dict[str, Tensor]
    summary: dict[str, float]


def read_run(folder: str | Path) -> TrainRun:
    """Read the output folder of train.py, without its checkpoints.

    Raises:
        FileNotFoundError: if it or one of its files does not exist; says what a folder of train.py holds.
        ValueError: if args.yaml or summary.csv is not what train.py writes.
    """
    folder = Path(folder)
    for path in (folder, folder / "args.yaml", folder / "summary.csv"):
        if not path.exists():
            raise FileNotFoundError(
                f"{path} does not exist. Expected the output folder of timm's train.py (--output and --experiment), "
                f"with args.yaml, summary.csv and checkpoints in it."
            )
    try:
        options = yaml.safe_load((folder / "args.yaml").read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{folder / 'args.yaml'} is not the YAML that train.py writes: {error}") from error
    if not isinstance(options, dict) or not isinstance(options.get("model"), str):
        raise ValueError(f"{folder / 'args.yaml'} does not name a model: it is not what train.py writes.")
    model_kwargs = options.get("model_kwargs")
    if model_kwargs is not None and not isinstance(model_kwargs, dict):
        raise ValueError(
            f"{folder / 'args.yaml'} must have a mapping of names to values as model_kwargs, got {model_kwargs!r}: it "
            f"is not what train.py writes."
        )
    return TrainRun(folder, options, _read_summary(folder / "summary.csv"))


def _read_summary(path: Path) -> tuple[dict[str, float], ...]:
    rows: list[dict[str, float]] = []
    header: list[str] = []
    with path.open(newline="", encoding="utf-8") as file:
        for line, cells in enumerate(csv.reader(file), start=1):
            if cells[:1] == ["epoch"]:  # again after every resume
                header = cells
                continue
            try:
                row = {name: float(cell) for name, cell in zip(header, cells, strict=True)}
            except ValueError:
                row = {}
            if "epoch" not in row:
                raise ValueError(
                    f"{path}, line {line}: expected {len(header)} numbers ({', '.join(header)}), got "
                    f"{','.join(cells)!r}. The run's disk may have been full; use an intact copy of the file."
                )
            rows.append(row)
    return tuple(rows)


def read_weights(run: TrainRun, checkpoint: str = BEST, average: bool | None = None) -> TrainedWeights:
    """Read the weights of a checkpoint. Nothing in it is executed: a pickle that holds more than tensors is an error.

    Args:
        run: The run.
        checkpoint: ``"best"``, ``"last"``, or the name of a checkpoint in the run's folder.
        average: Take the moving average of the weights. By default only if it is what the run's metric measured:
            with ``--model-ema``, validation, and no ``--model-ema-force-cpu``.

    Raises:
        FileNotFoundError: if there is no such checkpoint; lists those that exist.
        ValueError: if it can't be read safely, was not written by train.py, has no average, or does not belong to
            summary.csv.
    """
    path = run.folder / _FILES.get(checkpoint, checkpoint)
    if not path.is_file():
        there = ", ".join(sorted(file.name for file in run.folder.glob("*.pth.tar"))) or "none"
        raise FileNotFoundError(
            f"{run.folder} has no checkpoint {path.name}: expected 'best', 'last' or one of its files ({there}), got "
            f"{checkpoint!r}."
        )
    content = _load(path)
    try:
        state_dict, epoch, value = content["state_dict"], int(content["epoch"]), float(content["metric"])
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a checkpoint with a metric, as train.py writes them at the end of an epoch ({error!r}). "
            f"Take 'best' or 'last' rather than a recovery checkpoint."
        ) from error

    validates = bool(run.options.get("val_split", "validation"))
    has_average = content.get("state_dict_ema") is not None
    measured_average = has_average and validates and not run.options.get("model_ema_force_cpu")
    is_average = measured_average if average is None else average
    if is_average and not has_average:
        raise ValueError(f"{path} holds no moving average of the weights: the run had no --model-ema.")
    if math.isnan(value):
        raise ValueError(f"{path} has a metric of NaN: the run had diverged. Take an earlier checkpoint.")

    metric = run.options.get("eval_metric", "top1") if validates else "loss"
    split = "validation" if validates else "train"
    column = f"{'eval' if validates else 'train'}_{metric}"
    matching = [row for row in run.epochs if row["epoch"] == epoch and row.get(column) == value]
    if not matching:
        raise ValueError(
            f"{run.folder / 'summary.csv'} has no row with epoch {epoch} and {column} {value!r}, which {path.name} "
            f"claims: the two belong to different runs."
        )
    tensors = clean_state_dict(content["state_dict_ema"] if is_average else state_dict)
    return TrainedWeights(path.name, epoch, metric, value, split, is_average, tensors, matching[-1])


def _load(path: Path) -> dict[str, Any]:
    try:
        # train.py stores its options with the weights, as an argparse.Namespace
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} is refused: it is truncated, or holds more than tensors and options, which could be code. "
            f"{str(error).splitlines()[0]}"
        ) from error
    except (RuntimeError, OSError, EOFError) as error:
        raise ValueError(f"{path} can't be read; it is truncated or not a checkpoint: {error}") from error
    return content if isinstance(content, dict) else {}
