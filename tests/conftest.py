import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# in this process and those it starts: the models in the tests are too small for two threads, which would wait for each
# other on a busy machine
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import timm
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

import timm_ssog  # noqa: F401  registers the models, whether the hook is installed or not
from timm_ssog.layers import INIT_WIDTH

# the same few examples everywhere; `pytest --hypothesis-profile=long tests/test_hostile.py` looks for new ones
settings.register_profile(
    "short",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.register_profile("long", settings.get_profile("short"), derandomize=False, max_examples=1500, print_blob=True)
settings.load_profile("short")

EXAMPLES = Path(__file__).parents[1] / "examples"
LAB = EXAMPLES / "lab"
sys.path[:0] = [str(EXAMPLES), str(LAB)]  # for tests that import a script

Build = Callable[..., Any]

SIZE: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 2, "num_classes": 5}
SMALL: dict[str, Any] = {**SIZE, "depth": 2}


def enlarge(model: Any, weights: float) -> Any:
    """The model with linear maps ``weights`` times as large as timm's initial ones of 0.02, whatever their width."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.mul_(weights * min(1.0, module.in_features / INIT_WIDTH) ** 0.5)
    return model


def as_trained(model: Any) -> Any:
    """The model with blocks whose velocity bends and still lets fixed steps follow it."""
    enlarge(model.blocks, 4.0)
    return model


def photos(count: int = 2, size: int = 32, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same random images at every call."""
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1), dtype=dtype)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def build() -> Build:
    """Builds a model through timm, as a user does, but small: a 4 x 4 grid, two blocks, two heads."""

    def create(name: str = "vit_ssog_tiny", **options: Any) -> Any:
        return timm.create_model(name, **{**SMALL, **options}).eval()

    return create
