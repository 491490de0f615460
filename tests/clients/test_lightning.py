"""Lightning: training with its own averages of weights, which include buffers."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

lightning = pytest.importorskip("lightning.pytorch")
callbacks = pytest.importorskip("lightning.pytorch.callbacks")


class Training(lightning.LightningModule):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.model(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(model: Any, steps: int, callback: Any = None) -> Any:
    generator = torch.Generator().manual_seed(1)
    batches = torch.utils.data.TensorDataset(torch.randn(8, 3, 32, 32, generator=generator), torch.arange(8) % 5)
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        callbacks=[] if callback is None else [callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Training(model), torch.utils.data.DataLoader(batches, batch_size=4))
    return model.eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["vit_ssog_tiny", "vit_ssog_tiny_looped", "vit_ssog_tiny_ode"])
def test_an_average_is_that_of_the_weights_and_nothing_else(build: Any, images: Tensor, name: str) -> None:
    model, decay = build(name, img_size=112), 0.9  # a grid of 14 x 14, which in integers decays to 13
    after_one, after_two = (fit(copy.deepcopy(model), steps) for steps in (1, 2))
    expected = copy.deepcopy(model)
    with torch.no_grad():
        for weight, first, second in zip(*(m.parameters() for m in (expected, after_one, after_two)), strict=True):
            weight.copy_(torch.lerp(first, second, 1 - decay))  # the first update copies

    averaged = fit(copy.deepcopy(model), 2, callbacks.EMAWeightAveraging(decay=decay))
    for ours, theirs in zip(averaged.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(averaged(images), expected(images))
