"""How the examples create a model that a user names, and say so if timm cannot."""

import difflib
from pathlib import Path
from typing import Any

import timm
from refusing import refuse, refusing

import timm_ssog  # noqa: F401  registers the models


def load_model(
    name: str, pretrained: bool = False, weightless: str = "name a model that has some", /, **options: Any
) -> Any:
    """Create a model through timm.

    Args:
        name: A name in timm, ``local-dir:FOLDER`` or ``hf-hub:OWNER/NAME``.
        pretrained: Whether to load its weights.
        weightless: What to do if it has none.
        options: Options of the model.

    Raises:
        SystemExit: with status 2, after a sentence, if there is no such model, or none with these options.
    """
    if ":" not in name and not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=1)
        hint = f" Did you mean {near[0]}?" if near else " python -m timm_ssog info lists the models of this package."
        refuse(f"Expected a model's name in timm, local-dir:FOLDER or hf-hub:OWNER/NAME, got {name!r}.{hint}")
    if pretrained and ":" not in name and not timm.is_model_pretrained(name):
        refuse(f"There are no pretrained weights of {name}: {weightless}.")
    given = ", ".join(f"{option}={value!r}" for option, value in options.items())
    remedy = "Check the name and the options."
    if name.startswith("local-dir:"):
        folder = Path(name.removeprefix("local-dir:"))
        if not (folder / "config.json").is_file():
            refuse(f"{folder} holds no model (config.json): name a folder such as those that `make demo` writes.")
        remedy = "Check the options, and config.json and model.safetensors in that folder; or save the model again."
    with refusing(f"create {name}{' with ' if given else ''}{given}", remedy):
        return timm.create_model(name, pretrained=pretrained, **options)


def load_folder(folder: Path, **options: Any) -> Any:
    """Load a model with its weights from a folder; otherwise as `load_model`."""
    return load_model(f"local-dir:{folder}", True, **options)
