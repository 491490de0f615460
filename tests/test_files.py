"""Replaced files are the old ones or the new ones, never half of one."""

import os
from pathlib import Path
from typing import Any

import pytest

from timm_ssog.files import replace_file


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.json"
    replace_file(path, "old")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            replace_file(path, "new")
    assert path.read_text() == "old"
    replace_file(path, "new ÿ")
    assert path.read_text(encoding="utf-8") == "new ÿ"
    assert list(tmp_path.iterdir()) == [path]
