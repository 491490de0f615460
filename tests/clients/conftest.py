from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

DEPTHS: dict[str, tuple[str, dict[str, Any]]] = {
    "discrete": ("vit_ssog_tiny", {}),
    "looped": ("vit_ssog_tiny_looped", {"loops": 2, "loop_norms": True, "loop_embed": True}),
    "continuous": ("vit_ssog_tiny_ode", {"horizon": 4.0, "solver_steps": 4}),
}


@pytest.fixture(params=DEPTHS)
def model(request: pytest.FixtureRequest, build: Callable[..., Any]) -> Any:
    """Two blocks on a 4 x 4 grid, in each of the three depths, with no parameter zero."""
    name, options = DEPTHS[request.param]
    model = build(name, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 32, 32)


@pytest.fixture
def train() -> Callable[[nn.Module, Tensor], None]:
    """Takes a step of gradient descent on the parameters that need gradients."""

    def step(model: nn.Module, images: Tensor) -> None:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        nn.functional.cross_entropy(model(images), torch.arange(len(images))).backward()
        optimizer.step()

    return step
