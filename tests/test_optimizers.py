"""timm's optimizers: which parameters they decay, and which ones Muon treats as weight matrices."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.optim import create_optimizer_v2
from torch import nn

MODELS: dict[str, dict[str, Any]] = {
    "vit_ssog_tiny": {},
    "vit_ssog_tiny_looped": {"loops": 8, "loop_norms": True, "loop_embed": True},
    "vit_ssog_tiny_ode": {"solver_steps": 2},
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, build: Callable[..., Any]) -> Any:
    # from four heads on, (heads, components, 2) is large enough that Muon treats it as a matrix
    return build(request.param, embed_dim=64, num_heads=4, **MODELS[request.param])


@pytest.mark.parametrize("layer_decay", [None, 0.7])
def test_muon_takes_weight_matrices_only(model: Any, layer_decay: float | None) -> None:
    optimizer = create_optimizer_v2(
        model, "muon", lr=1e-3, weight_decay=0.05, layer_decay=layer_decay, fallback_no_weight_decay=True
    )
    model(torch.randn(4, 3, 32, 32)).square().sum().backward()
    optimizer.step()
    taken = {name for name, parameter in model.named_parameters() if optimizer.state[parameter]["use_muon"]}
    matrices = {
        f"{name}.weight" for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))
    }
    assert taken == matrices


def test_kernels_and_embeddings_are_not_decayed(model: Any) -> None:
    optimizer = create_optimizer_v2(model, "sgd", lr=0.1, weight_decay=0.5)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    decayed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert decayed == {name for name in before if before[name].dim() in (2, 4) and name.endswith(".weight")}
