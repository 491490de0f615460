"""A user's image folder, checked before anything is trained on it."""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image
from refusing import refuse, refusing
from timm.data import create_dataset

SPLITS = {"train": ("train",), "validation": ("validation", "val")}
"""Names that a split's folder may have."""

NAMED = 5
"""Unreadable images that an error names."""


def datasets(data: Path) -> tuple[Any, Any]:
    """The images to train and to validate on.

    Raises:
        SystemExit: with status 2, after a sentence, if a split is missing, empty or damaged, or the two have different
            classes.
    """
    folders = [_folder(data, split) for split in SPLITS]
    train, validation = (_dataset(folder) for folder in folders)
    seen, tested = (list(dataset.reader.class_to_idx) for dataset in (train, validation))
    if seen != tested:
        refuse(
            f"Expected the same classes in train and validation of {data}, got {', '.join(seen)} and "
            f"{', '.join(tested)}: add or remove folders."
        )
    if len(seen) < 2:
        refuse(f"Expected at least two classes in {folders[0]}, got 1 ({seen[0]}): add a folder per class.")
    _require_readable([path for dataset in (train, validation) for path, _ in dataset.reader.samples])
    return train, validation


def require_batch(batch_size: int, images: int) -> None:
    """Refuse a batch size that leaves no batch to train on."""
    if batch_size > images:
        refuse(
            f"Expected at least --batch-size {batch_size} images to train on, got {images}: lower --batch-size or add "
            f"images."
        )


def _folder(data: Path, split: str) -> Path:
    # without such a folder timm would use all images for both splits
    found = next((data / name for name in SPLITS[split] if (data / name).is_dir()), None)
    if found is None:
        refuse(
            f"Expected {data / split} with one folder per class, but it does not exist: put your images into "
            f"{data / 'train'}/CLASS/ and {data / 'validation'}/CLASS/."
        )
    return found


def _dataset(folder: Path) -> Any:
    """timm's dataset of a split, in which every class has an image."""
    with refusing(f"read {folder}", f"Put your images into {folder}/CLASS/."):
        dataset: Any = create_dataset("", root=str(folder), split="train")
        files = [Path(path).relative_to(folder) for path, _ in dataset.reader.samples]
        if stray := next((path for path in files if len(path.parts) == 1), None):
            refuse(f"Expected images in one folder per class, got {folder / stray}: move it into {folder}/CLASS/.")
        filled = {path.parts[0] for path in files}
        for path in sorted(folder.iterdir()):
            if path.is_dir() and path.name not in filled and not path.name.startswith("."):
                refuse(f"Expected images in {path}, got none: add some, or remove the folder.")
        return dataset


def _require_readable(paths: Iterable[str]) -> None:
    broken = list(islice(_unreadable(paths), NAMED + 1))
    if broken:
        more = " and more" if len(broken) > NAMED else ""
        refuse(
            f"Expected images that can be read, got {'; '.join(broken[:NAMED])}{more}: remove or repair them. timm "
            f"would put other images in their place."
        )


def _unreadable(paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        try:
            with Image.open(path) as image:
                image.draft(image.mode, (1, 1))  # a JPEG is read to its end, but at an eighth of its size
                image.load()
        except Exception as error:  # decoders raise anything, and timm skips an image for any of it
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            yield path if path in reason else f"{path} ({reason})"
