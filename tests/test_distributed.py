"""Gradients of two processes, each with half of a batch, against those of one process with all of it."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import timm_ssog  # noqa: F401 - registers the models, in the spawned processes too

MODELS: dict[str, dict[str, Any]] = {
    "discrete": {"model_name": "vit_ssog_tiny", "depth": 2},
    "looped": {"model_name": "vit_ssog_tiny_looped", "loops": 3, "loop_norms": True, "loop_embed": True},
    "fixed step": {"model_name": "vit_ssog_tiny_ode", "horizon": 3.0},
    "adjoint": {"model_name": "vit_ssog_tiny_ode", "horizon": 3.0, "adjoint": True},
    "per sample": {"model_name": "vit_ssog_tiny_ode", "horizon": 3.0, "solver": "bosh3", "per_sample": True},
}

IMAGES = 4


def build(options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(img_size=32, patch_size=8, embed_dim=32, num_heads=2, num_classes=5, **options)


def gradients(model: nn.Module, run: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    nn.functional.cross_entropy(run(images), labels).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(IMAGES, 3, 32, 32, generator=generator), torch.arange(IMAGES)


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    images, labels = (part.chunk(2)[rank] for part in batch())
    made = {}
    for name, options in MODELS.items():
        model = build(options)
        made[name] = gradients(model, DistributedDataParallel(model), images, labels)
    torch.save(made, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.skipif(not distributed.is_gloo_available(), reason="this torch has no gloo")
def test_two_processes_train_as_one_does(tmp_path: Path):
    torch.multiprocessing.spawn(work, (str(tmp_path),), nprocs=2)  # type: ignore[attr-defined]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for name, options in MODELS.items():
        model = build(options)
        expected = gradients(model, model, *batch())
        assert len(expected) == len(list(model.parameters()))
        for parameter, gradient in expected.items():
            assert torch.equal(first[name][parameter], second[name][parameter])
            error = (first[name][parameter] - gradient).norm()
            assert error <= 1e-4 * gradient.norm() + 1e-8, (name, parameter, float(error), float(gradient.norm()))
