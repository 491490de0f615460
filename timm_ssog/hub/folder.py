"""A folder that timm loads a model from, written whole or not at all: weights, config.json and their digests."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import resolve_data_config
from timm.models import save_for_hf

from timm_ssog import VitSsog
from timm_ssog.digest import digest_notes

WEIGHTS = "model.safetensors"

PUBLISHED_FACTS = ("tag", "license", "label_names")
"""Facts that `write_model` takes and that are neither in the weights nor in the options."""


def write_model(
    folder: Path,
    model: Any,
    arguments: dict[str, Any],
    options: Mapping[str, Any],
    tag: str | None = None,
    license: str | None = None,
    label_names: list[str] | None = None,
) -> dict[str, Any]:
    """Write weights and config.json.

    Args:
        folder: Folder to write to.
        model: The model.
        arguments: Arguments that build it, besides its name.
        options: Options of train.py, for image size, normalisation and crop; else those of the model.
        tag: Tag of the weights.
        license: Licence of the weights.
        label_names: Names of the classes, in their order.

    Returns:
        The content of config.json.
    """
    data_config = resolve_data_config({**options, "in_chans": model.in_chans}, model=model)
    data_config["input_size"] = (model.in_chans, *data_config["input_size"][1:])
    for key in ("mean", "std"):  # of the default, three channels
        if len(data_config[key]) not in (1, model.in_chans):
            data_config[key] = (sum(data_config[key]) / len(data_config[key]),) * model.in_chans
    model.pretrained_cfg.update(data_config)
    save_for_hf(model, str(folder), model_args=arguments, safe_serialization=True)
    (folder / WEIGHTS).chmod(0o666 & ~umask())  # safetensors makes its files private
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    # transformers' wrapper passes the number of classes itself; timm takes it from the configuration
    config.get("model_args", {}).pop("num_classes", None)
    if label_names:
        config["label_names"] = label_names
    state_dict = model.state_dict()
    config["pretrained_cfg"] |= {
        "tag": tag,
        "license": license,
        # without it, timm asks for a pickle first and uses it if the safetensors file is not available
        "hf_hub_filename": WEIGHTS,
        "notes": digest_notes(state_dict, config["architecture"], config.get("model_args", {})),
    }
    config["pretrained_cfg"] = {key: value for key, value in config["pretrained_cfg"].items() if value is not None}
    write_json(path, config)
    return config


@torch.no_grad()
def require_same_when_loaded(folder: Path, model: VitSsog) -> None:
    """Raise a ValueError unless timm loads the model in eval mode from the folder, bit for bit."""
    loaded: Any = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    channels, height, width = loaded.pretrained_cfg["input_size"]
    images = torch.randn(2, channels, height, width, generator=torch.Generator().manual_seed(0))
    state = model.state_dict()
    same_state = loaded.state_dict().keys() == state.keys() and all(
        torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items()
    )
    if not same_state or not torch.equal(loaded(images), model(images)):
        raise ValueError(
            "The exported folder does not load as the trained model; nothing was written. Please report this with the "
            "run's args.yaml."
        )


def write_json(path: Path, content: Any) -> None:
    """Write JSON with finite numbers only."""
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` that takes its place if all goes well, and is removed if not."""
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".new", dir=out.parent))
    old = folder.with_suffix(".old")
    try:
        yield folder
        folder.chmod(0o777 & ~umask())  # mkdtemp's folders are private
        if out.exists():
            out.rename(old)
        try:
            folder.rename(out)
        except BaseException:
            if old.exists():
                old.rename(out)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def umask() -> int:
    """The permissions that the system removes from new files."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
