"""Write the real digits as folders of PNG files, as timm's train.py and validate.py read them.

The 4,000 training images are split once more, so that a run can choose its best epoch on images that are neither
trained on nor tested on: DIR/train (3,600), DIR/validation (400) and DIR/test (1,000), each with one folder per class.
"""

import argparse
from pathlib import Path

from digits import digits
from PIL import Image
from refusing import refuse, require_place

VALIDATION = 10
"""One in this many training images of each class is kept for validation."""


def write_folder(root: Path) -> dict[str, int]:
    """Write all three splits to a folder that does not exist yet.

    Args:
        root: The folder.

    Returns:
        Number of images in each split.

    Raises:
        FileExistsError: if the folder already exists: old files in it would be trained on.
    """
    root.mkdir(parents=True)
    counts = {"train": 0, "validation": 0, "test": 0}
    for source in ("train", "test"):
        seen: dict[int, int] = {}
        for image, label in zip(*digits(source), strict=True):
            number = seen[int(label)] = seen.get(int(label), -1) + 1
            held_out = source == "train" and number % VALIDATION == VALIDATION - 1
            split = "validation" if held_out else source
            path = root / split / str(label) / f"{number:04}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
            counts[split] += 1
    return counts


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write them; must not exist yet")
    options = parser.parse_args(argv)
    require_place("DIR", options.directory)
    try:
        counts = write_folder(options.directory)
    except FileExistsError:
        refuse(f"DIR must not exist yet, and {options.directory} does: name another, or remove it.")
    print(", ".join(f"{split} {count}" for split, count in counts.items()), "in", options.directory)


if __name__ == "__main__":
    main()
