"""From the name of a trained ViT and an image folder to a folder with a converted model, whole or not at all."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import create_dataset, create_transform, resolve_data_config
from torch import Tensor
from torch.utils.data import DataLoader, Subset

import timm_ssog
from timm_ssog import VitSsog, WarmStartReport
from timm_ssog.conversion import read_teacher, student_options
from timm_ssog.errors import require_positive_int
from timm_ssog.hub.folder import (
    PUBLISHED_FACTS,
    WEIGHTS,
    replacing,
    require_same_when_loaded,
    write_json,
    write_model,
)
from timm_ssog.hub.options import unseen_options

REPORT = "warm_start.json"
"""File name of the report, beside the weights."""

_WRITTEN = {WEIGHTS, "config.json", REPORT, ".DS_Store"}


def convert(
    teacher: str,
    out_dir: str | Path,
    data_dir: str | Path,
    *,
    model: str | None = None,
    images: int = 2000,
    refit: bool = False,
    align_epochs: int = 0,
    val_split: str | None = None,
    num_classes: int | None = None,
    batch_size: int = 32,
    workers: int = 2,
    device: str = "cpu",
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda step: None,
) -> WarmStartReport:
    """Convert a trained ViT and write a folder that timm loads: model.safetensors, config.json and the report.

    Preprocessing (size, normalisation, crop) and class names are the teacher's, for the images here and in config.json.

    Args:
        teacher: Anything that `timm.create_model` takes with ``pretrained=True``.
        out_dir: Folder to write; an earlier conversion there is replaced.
        data_dir: Image folder, with one folder per class, in ``train`` if that exists.
        model: Name of the student; by default the discrete one of the teacher's width, or ``vit_ssog_small``.
        images: Images to read the teacher's attention on, drawn at random; all if there are fewer.
        refit: As in `timm_ssog.warm_start`.
        align_epochs: As in `timm_ssog.warm_start`.
        val_split: Split of ``data_dir`` with labelled images to measure top-1 on, classes in the teacher's order.
        num_classes: Classes of the student, for a new head to train; the teacher's head if omitted.
        batch_size: Images per batch.
        workers: Processes that read images.
        device: Device to compute on.
        seed: Seed for choosing images and for the fits.
        on_progress: Called with a line before each step.

    Returns:
        The report.

    Raises:
        FileExistsError: if ``out_dir`` exists and is not an earlier conversion.
        FileNotFoundError: if there is no ``data_dir``.
        ValueError: as `timm_ssog.warm_start`, or if a count is below one.
    """
    out, data = Path(out_dir).resolve(), Path(data_dir)
    for name, count in (("images", images), ("batch_size", batch_size)):
        require_positive_int(name, count)
    _require_replaceable(out)
    if not data.is_dir():
        raise FileNotFoundError(f"{data} does not exist. Expected a folder of images, with one folder per class.")
    on_progress(f"loading {teacher}")
    source: Any = timm.create_model(teacher, pretrained=True).to(device).eval()
    seen = read_teacher(source)
    options = student_options(seen)
    if num_classes is not None:
        options["num_classes"] = num_classes
    name = model or _named_by_width(options["embed_dim"])
    if name.endswith(("_looped", "_ode")):
        options["depth"] = 1
    student = _create_student(name, options, seed)
    config = _preprocessing(source, seen.image_size)
    student.pretrained_cfg.update(config)  # type: ignore[union-attr]

    labelled = None
    if val_split is not None:
        labelled = DataLoader(_images(data, val_split, config), batch_size, num_workers=workers)
    chosen = _chosen(_images(data, "train", config), images, seed)
    on_progress(f"converting to {name} on {len(chosen)} images of {data}")
    report = timm_ssog.warm_start(
        student,
        source,
        DataLoader(chosen, batch_size, num_workers=workers),
        refit=refit,
        align_epochs=align_epochs,
        labelled=labelled,
        seed=seed,
        on_progress=on_progress,
    )
    student.eval()
    facts = {key: _of_config(source, key) for key in PUBLISHED_FACTS if key != "tag"}
    if num_classes is not None:
        facts.pop("label_names")
    with replacing(out) as folder:
        on_progress(f"writing {WEIGHTS} and config.json")
        arguments = {**options, **unseen_options(student)}
        write_model(folder, student, arguments, {}, **facts)
        require_same_when_loaded(folder, student)
        write_json(folder / REPORT, {"teacher": teacher, "model": name, **report.to_dict()})
    return report


def _named_by_width(width: int) -> str:
    return {192: "vit_ssog_tiny", 384: "vit_ssog_small", 768: "vit_ssog_base"}.get(width, "vit_ssog_small")


def _create_student(name: str, options: Mapping[str, Any], seed: int) -> VitSsog:
    if not name.startswith("vit_ssog"):
        raise ValueError(f"The student must be one of the vit_ssog models, got {name}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        student: Any = timm.create_model(name, **options)
    return student


def _of_config(model: Any, key: str) -> Any:
    return model.pretrained_cfg.get(key) or None


def _preprocessing(teacher: Any, image_size: tuple[int, int]) -> dict[str, Any]:
    config = resolve_data_config({}, model=teacher)
    return {**config, "input_size": (config["input_size"][0], *image_size)}


def _images(data: Path, split: str, config: Mapping[str, Any]) -> Any:
    modes = {1: "L", 3: "RGB"}
    dataset: Any = create_dataset(
        "", root=str(data), split=split, input_img_mode=modes.get(config["input_size"][0], "RGB")
    )
    dataset.transform = create_transform(**config, is_training=False)
    return dataset


def _chosen(dataset: Any, count: int, seed: int) -> "Subset[tuple[Tensor, int]]":
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))
    return Subset(dataset, order[:count].tolist())


def _require_replaceable(out: Path) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise FileExistsError(f"OUT_DIR must be a folder to write, and {out} is a file.")
    names = {path.name for path in out.iterdir()}
    if names and (REPORT not in names or names - _WRITTEN):
        raise FileExistsError(
            f"{out} is not an earlier conversion, or holds other files too: {', '.join(sorted(names)[:5])}. Name a "
            f"folder that does not exist."
        )
