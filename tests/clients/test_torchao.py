"""torchao: linear layers in eight bits, which leaves the kernels and their grid as they are."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

quantization = pytest.importorskip("torchao.quantization")


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
@torch.no_grad()
def test_eight_bits_keep_the_function(model: Any, images: Tensor, config: str) -> None:
    expected = model(images)
    kernels = [copy.deepcopy(block.mixer.kernels(3, 5)) for block in model.blocks]
    quantization.quantize_(model, getattr(quantization, config)())
    assert type(model.blocks[0].mixer.value.weight) is not torch.nn.Parameter
    assert type(model.blocks[0].mlp.fc1.weight) is not torch.nn.Parameter
    for block, (rows, columns) in zip(model.blocks, kernels, strict=True):
        now = block.mixer.kernels(3, 5)
        assert torch.equal(now[0], rows)
        assert torch.equal(now[1], columns)
    quantized = model(images)
    assert not torch.equal(quantized, expected)
    torch.testing.assert_close(quantized, expected, rtol=0, atol=0.03 * float(expected.abs().max()))
