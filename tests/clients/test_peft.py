"""peft: low-rank updates of linear layers by name, and of the kernels' parameters by name."""

from typing import Any

import pytest
import torch
from torch import Tensor

peft = pytest.importorskip("peft")


def adapted(model: Any, **options: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=4, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["value", "proj", "fc1", "fc2"]},
        {"target_modules": "all-linear", "modules_to_save": ["head"]},
        {"target_modules": ["value"], "use_dora": True},
        {"target_modules": [], "target_parameters": ["mixer.offset"]},
        {"target_modules": [], "target_parameters": ["mixer.offset", "mixer.width"]},
    ],
    ids=["LoRA", "all linear layers", "DoRA", "offset", "offset and width"],
)
def test_an_adapter_trains_and_merges(model: Any, images: Tensor, train: Any, options: dict[str, Any]) -> None:
    expected = model(images).detach()
    lora = adapted(model, **options)
    torch.testing.assert_close(lora(images), expected)

    wanted = {name for name, parameter in lora.named_parameters() if parameter.requires_grad}
    assert wanted
    for _ in range(2):  # in the first, the half that starts at zero keeps the other from getting a gradient
        train(lora.train(), images)
    moved = lora.eval()(images).detach()
    assert not torch.allclose(moved, expected, atol=1e-5)
    with_gradient = {n for n, p in lora.named_parameters() if p.grad is not None and bool(p.grad.any())}
    assert with_gradient == wanted

    torch.testing.assert_close(lora.merge_and_unload()(images), moved, rtol=1e-4, atol=1e-5)
