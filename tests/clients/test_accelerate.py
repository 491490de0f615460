"""accelerate: weights that wait on the CPU, on the disk or nowhere until their module runs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

accelerate = pytest.importorskip("accelerate")
safetensors = pytest.importorskip("safetensors.torch")


@torch.no_grad()
def test_offloaded_to_the_cpu(model: Any, images: Tensor) -> None:
    expected = model(images)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)
    assert model.blocks[0].mixer.offset.is_meta
    torch.testing.assert_close(model(images), expected)
    torch.testing.assert_close(model(images), expected)


@torch.no_grad()
def test_offloaded_to_the_disk(model: Any, images: Tensor, tmp_path: Path) -> None:
    expected = model(images)
    accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"), offload_buffers=True)
    assert model.blocks[0].mixer.offset.is_meta
    torch.testing.assert_close(model(images), expected)


@pytest.mark.filterwarnings("ignore:The following device_map keys")
@torch.no_grad()
def test_one_block_on_the_disk(model: Any, images: Tensor, tmp_path: Path) -> None:
    expected = model(images)
    names = [name for name, _ in (*model.named_parameters(recurse=False), *model.named_children())]
    devices: dict[str, str] = {name: "cpu" for name in names if name != "blocks"}
    devices |= {"blocks.0": "cpu", "blocks.1": "disk"}
    accelerate.dispatch_model(model, devices, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    torch.testing.assert_close(model(images), expected)


@torch.no_grad()
def test_loaded_into_a_model_without_weights(build: Any, images: Tensor, tmp_path: Path) -> None:
    model = build(img_size=64)
    model.set_input_size(32)
    accelerate.Accelerator(cpu=True).save_model(model, str(tmp_path))
    with accelerate.init_empty_weights(include_buffers=True):
        empty = build(img_size=32)
    assert empty.pos_embed.is_meta
    # not load_checkpoint_and_dispatch with a device_map: from a state dict it loads parameters and buffers only
    empty.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"), assign=True)
    accelerate.dispatch_model(empty, {"": "cpu"}, force_hooks=True)
    torch.testing.assert_close(empty(images), model(images))


def test_prepared_for_training(model: Any, images: Tensor, train: Any) -> None:
    prepared = accelerate.Accelerator(cpu=True).prepare(model.train())
    before = model.blocks[0].mixer.offset.clone()
    train(prepared, images)
    assert not torch.equal(model.blocks[0].mixer.offset, before)
