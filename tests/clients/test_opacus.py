"""opacus: gradients of single samples, and a private training step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

opacus = pytest.importorskip("opacus")
validators = pytest.importorskip("opacus.validators")
grad_sample = pytest.importorskip("opacus.grad_sample")


def test_gradients_of_samples_are_those_of_each_alone(model: Any, images: Tensor) -> None:
    model.train()  # where the continuous model has its flow penalty
    labels = torch.tensor([1, 4])
    expected = []
    for image, label in zip(images, labels, strict=True):
        loss = nn.functional.cross_entropy(model(image[None]), label[None])
        expected.append(
            dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))
        )
    assert validators.ModuleValidator.validate(model, strict=True) == []
    wrapped = grad_sample.GradSampleModule(model)
    nn.functional.cross_entropy(wrapped(images), labels).backward()
    for name, parameter in model.named_parameters():
        alone = torch.stack([gradients[name] for gradients in expected])
        torch.testing.assert_close(parameter.grad_sample, alone, rtol=1e-3, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_a_private_step(model: Any) -> None:
    batches = torch.utils.data.TensorDataset(torch.randn(8, 3, 32, 32), torch.arange(8) % 5)
    before = model.blocks[0].mixer.offset.detach().clone()
    model, optimizer, loader = opacus.PrivacyEngine().make_private(
        module=model.train(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(batches, batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    for images, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    after = model._module.blocks[0].mixer.offset
    assert after.isfinite().all()
    assert not torch.equal(after, before)
