"""Training under autocast: in 200 steps all values are finite and something is learned."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

DEPTHS: dict[str, dict[str, Any]] = {
    "vit_ssog_tiny": {"depth": 1},
    "vit_ssog_tiny_looped": {"depth": 1, "loops": 2, "loop_norms": True},
    "vit_ssog_tiny_ode": {"depth": 1, "horizon": 2.0, "solver_steps": 1},
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", DEPTHS)
def test_training_stays_finite(build: Callable[..., Any], name: str, dtype: torch.dtype) -> None:
    model = build(name, embed_dim=16, img_size=16, num_components=2, **DEPTHS[name]).train()
    images, labels = torch.randn(10, 3, 16, 16), torch.arange(10) % 5
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    losses, updates = [], 0
    for _ in range(200):
        with torch.autocast("cpu", dtype=dtype):
            logits = model(images)
            assert logits.dtype == dtype
            loss = F.cross_entropy(logits.float(), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        updates += scaler.get_scale() >= before  # a smaller scale: a gradient overflowed, and the step was skipped
        losses.append(loss.item())
    assert torch.isfinite(torch.tensor(losses)).all()
    for parameter_name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all(), parameter_name
        assert torch.isfinite(parameter.grad).all(), parameter_name
    assert updates >= 190
    assert losses[-1] < losses[0] / 4
