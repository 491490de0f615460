"""fvcore: operations counted, against the formula of the mixing (DESIGN.md, section 1)."""

from typing import Any

import pytest
import timm
import torch

fvcore = pytest.importorskip("fvcore.nn")


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("size", [32, 192])
def test_the_mixing_is_counted_whole(batch: int, size: int) -> None:
    model = timm.create_model("vit_ssog_tiny", depth=2, img_size=size).eval()
    grid, width, components = size // 16, 192, 4
    count = fvcore.FlopCountAnalysis(model, torch.randn(batch, 3, size, size)).unsupported_ops_warnings(False)
    of_mixer = count.by_module_and_operator()["blocks.0.mixer"]
    tokens = batch * grid * grid
    assert of_mixer["matmul"] == tokens * components * (grid + grid) * width
    assert of_mixer["linear"] == tokens * 2 * width * width


def test_every_evaluation_is_counted(model: Any) -> None:
    # two blocks, each run twice: in loops, or in two steps of the midpoint rule
    runs = {"VitSsog": 1, "LoopedVitSsog": 2, "OdeVitSsog": 4}[type(model).__name__]
    count = fvcore.FlopCountAnalysis(model, torch.randn(2, 3, 32, 32)).unsupported_ops_warnings(False)
    of_mixer = count.by_module_and_operator()["blocks.1.mixer"]
    assert of_mixer["matmul"] == runs * 2 * 16 * 4 * (4 + 4) * 32
