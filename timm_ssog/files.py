"""Files that are replaced whole: an interruption leaves the old file or the new one."""

import os
from pathlib import Path


def replace_file(path: Path, content: str | bytes) -> None:
    """Put bytes, or a text in UTF-8, in place of what a file holds.

    Args:
        path: The file, in a folder that exists.
        content: What it is to hold.

    Raises:
        OSError: if the folder cannot be written; the file is then as it was.
    """
    # hidden, because folders to publish leave such files out, and each process has its own
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
