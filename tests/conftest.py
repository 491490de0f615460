import os
from collections.abc import Callable
from typing import Any

# in this process and those it starts: the models of the tests are too small for two threads, which on a busy machine
# spin for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import timm
import torch
from hypothesis import HealthCheck, settings

import timm_ssog  # noqa: F401  registers the models, whether the hook is installed or not

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

SMALL: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 2,
    "num_classes": 5,
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def build() -> Callable[..., Any]:
    """Builds a model as a user does, through timm, only small: a 4 x 4 grid, two blocks, two heads."""

    def create(name: str = "vit_ssog_tiny", **options: Any) -> Any:
        return timm.create_model(name, **{**SMALL, **options}).eval()

    return create
