"""Files that are written whole: an interruption leaves either the old or the new one."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace a file by a text."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
