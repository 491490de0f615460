"""Gradients of two processes, each with half of a batch, against those of one process with all of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import timm_ssog  # noqa: F401 - registers the models, in the spawned processes too

MODELS: dict[str, dict[str, Any]] = {
    "discrete": {"model_name": "vit_ssog_tiny", "depth": 2},
    "looped": {"model_name": "vit_ssog_tiny_looped", "loops": 3, "loop_norms": True, "loop_embed": True},
    "fixed step": {"model_name": "vit_ssog_tiny_ode", "horizon": 3.0},
    "adjoint": {"model_name": "vit_ssog_tiny_ode", "horizon": 3.0, "adjoint": True},
    "per sample": {"model_name": "vit_ssog_tiny_ode", "horizon": 3.0, "solver": "bosh3", "per_sample": True},
}

SHARDED = [name for name in MODELS if name != "adjoint"]

IMAGES = 4

needs_gloo = pytest.mark.skipif(not distributed.is_gloo_available(), reason="this torch has no gloo")


def build(options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(img_size=32, patch_size=8, embed_dim=32, num_heads=2, num_classes=5, **options)


def gradients(model: nn.Module, run: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    nn.functional.cross_entropy(run(images), labels).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(IMAGES, 3, 32, 32, generator=generator), torch.arange(IMAGES)


def distribute(rank: int, folder: str, work: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.save(work(), f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def in_two_processes(folder: Path, work: Callable[[], Any]) -> list[Any]:
    """What both return, each of which knows its rank."""
    torch.multiprocessing.spawn(distribute, (str(folder), work), nprocs=2)  # type: ignore[attr-defined]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def replicated() -> dict[str, dict[str, Tensor]]:
    images, labels = (part.chunk(2)[distributed.get_rank()] for part in batch())
    made = {}
    for name, options in MODELS.items():
        model = build(options)
        made[name] = gradients(model, DistributedDataParallel(model), images, labels)
    return made


@needs_gloo
def test_two_processes_train_as_one_does(tmp_path: Path):
    first, second = in_two_processes(tmp_path, replicated)
    for name, options in MODELS.items():
        model = build(options)
        expected = gradients(model, model, *batch())
        assert len(expected) == len(list(model.parameters()))
        for parameter, gradient in expected.items():
            assert torch.equal(first[name][parameter], second[name][parameter])
            error = (first[name][parameter] - gradient).norm()
            assert error <= 1e-4 * gradient.norm() + 1e-8, (name, parameter, float(error), float(gradient.norm()))


def sharded() -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    images, labels = (part.chunk(2)[distributed.get_rank()] for part in batch())
    mesh = distributed.device_mesh.init_device_mesh("cpu", (2,))
    made = {}
    for name in SHARDED:
        model = build(MODELS[name])
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        made[name] = loss.detach(), {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    return made


@needs_gloo
def test_two_processes_with_half_of_every_block_each_train_as_one_does(tmp_path: Path):
    made = in_two_processes(tmp_path, sharded)
    for name in SHARDED:
        model = build(MODELS[name])
        images, labels = batch()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        mean = torch.stack([of_rank[name][0] for of_rank in made]).mean()
        torch.testing.assert_close(mean, loss.detach(), rtol=1e-6, atol=1e-6)
        for _, of_rank in (of_rank[name] for of_rank in made):
            for parameter, gradient in model.named_parameters():
                torch.testing.assert_close(
                    of_rank[parameter], gradient.grad, rtol=1e-4, atol=1e-6, msg=f"{name} {parameter}"
                )
