"""Two processes, each with half of a batch, against one process with all of it."""

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import timm_ssog  # noqa: F401 - registers the models, in the spawned processes too
from timm_ssog.layers import Block

MODELS: dict[str, dict[str, Any]] = {
    "discrete": {"model_name": "vit_ssog_tiny", "depth": 2},
    "looped": {"model_name": "vit_ssog_tiny_looped", "loops": 3, "loop_norms": True, "loop_embed": True},
    "fixed step": {"model_name": "vit_ssog_tiny_ode", "horizon": 3.0},
    "adjoint": {"model_name": "vit_ssog_tiny_ode", "horizon": 3.0, "adjoint": True},
    "per sample": {"model_name": "vit_ssog_tiny_ode", "horizon": 3.0, "solver": "bosh3", "per_sample": True},
}

# the adjoint asks for the parameters before the block runs, when it has only its shard of them
SHARDED = [name for name in MODELS if name != "adjoint"]

IMAGES = 4


def build(options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return timm.create_model(img_size=32, patch_size=8, embed_dim=32, num_heads=2, num_classes=5, **options)


def gradients(model: nn.Module, run: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    nn.functional.cross_entropy(run(images), labels).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(IMAGES, 3, 32, 32, generator=generator), torch.arange(IMAGES)


def replicated(images: Tensor, labels: Tensor, options: dict[str, Any]) -> dict[str, Tensor]:
    model = build(options)
    return gradients(model, DistributedDataParallel(model), images, labels)


def sharded(images: Tensor, labels: Tensor, options: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    model = build(options)
    mesh = distributed.device_mesh.init_device_mesh("cpu", (2,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    return loss.detach(), {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


def sharded_flat(images: Tensor, labels: Tensor, options: dict[str, Any]) -> Tensor:
    """The loss after a step, by the older way to shard, which keeps the parameters of a block in one vector."""
    model = build(options)
    run = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(run.parameters(), lr=0.1)
    nn.functional.cross_entropy(run(images), labels).backward()
    optimizer.step()
    return nn.functional.cross_entropy(run(images), labels).detach()


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    images, labels = (part.chunk(2)[rank] for part in batch())
    made = {
        "replicated": {name: replicated(images, labels, options) for name, options in MODELS.items()},
        "sharded": {name: sharded(images, labels, MODELS[name]) for name in SHARDED},
        "sharded flat": {name: sharded_flat(images, labels, MODELS[name]) for name in SHARDED},
    }
    torch.save(made, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The result of two processes, each with half of the batch."""
    if not distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(work, (str(folder),), nprocs=2)  # type: ignore[attr-defined]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", MODELS)
def test_replicas_train_as_one_process_does(ranks: list[Any], name: str) -> None:
    first, second = (rank["replicated"][name] for rank in ranks)
    model = build(MODELS[name])
    expected = gradients(model, model, *batch())
    assert len(expected) == len(list(model.parameters()))
    for parameter, gradient in expected.items():
        assert torch.equal(first[parameter], second[parameter])
        error = (first[parameter] - gradient).norm()
        assert error <= 1e-4 * gradient.norm() + 1e-8, (parameter, float(error), float(gradient.norm()))


@pytest.mark.parametrize("name", SHARDED)
def test_sharded_blocks_train_as_one_process_does(ranks: list[Any], name: str) -> None:
    model = build(MODELS[name])
    images, labels = batch()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    losses, gradients = zip(*(rank["sharded"][name] for rank in ranks), strict=True)
    torch.testing.assert_close(torch.stack(losses).mean(), loss.detach(), rtol=1e-6, atol=1e-6)
    for of_rank in gradients:
        error = torch.stack([(of_rank[name] - p.grad).norm() for name, p in model.named_parameters()]).norm()
        total = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        assert error <= 1e-6 * total

    torch.optim.SGD(model.parameters(), lr=0.1).step()
    after = nn.functional.cross_entropy(model(images), labels).detach()
    mean = torch.stack([rank["sharded flat"][name] for rank in ranks]).mean()
    torch.testing.assert_close(mean, after, rtol=1e-6, atol=1e-6)
