"""Digests of published weights: they turn a damaged or replaced file into an error instead of a wrong model.

A checkpoint's config.json holds them among the ``notes`` of its ``pretrained_cfg``, the only field that timm passes on
to the model unread. They are checked where timm lets a model look at a checkpoint before loading it, and then removed
from the model: they describe the published weights, not those it will be trained or saved with.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

WEIGHTS = "weights sha256 "
"""Prefix of the note with the digest of all tensors."""

ARGUMENTS = "model_args sha256 "
"""Prefix of the note with the digest of the model's architecture and arguments."""


def weights_digest(state_dict: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of all tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state_dict.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def arguments_digest(architecture: str, model_args: Mapping[str, Any]) -> str:
    """SHA-256 over everything that decides what the weights compute; tuples count as lists, as in JSON."""
    return hashlib.sha256(json.dumps([architecture, model_args], sort_keys=True).encode()).hexdigest()


def digest_notes(state_dict: Mapping[str, Tensor], architecture: str, model_args: Mapping[str, Any]) -> list[str]:
    """The notes to publish with weights."""
    return [WEIGHTS + weights_digest(state_dict), ARGUMENTS + arguments_digest(architecture, model_args)]


def check_digests(
    state_dict: Mapping[str, Any], pretrained_cfg: Mapping[str, Any], model_args: Mapping[str, Any]
) -> None:
    """Raise unless a checkpoint and its configuration are those that were published; without notes there is no check.

    Args:
        state_dict: As read from the file.
        pretrained_cfg: Configuration of the model, with its notes. Weights from elsewhere are not checked.
        model_args: As in config.json; empty where timm does not pass them on.

    Raises:
        ValueError: if a digest is not the published one.
    """
    is_published = pretrained_cfg.get("source") in ("hf-hub", "local-dir") or (
        pretrained_cfg.get("hf_hub_id") and not pretrained_cfg.get("file") and not pretrained_cfg.get("state_dict")
    )
    if not is_published:
        return
    architecture = str(pretrained_cfg.get("architecture") or "")
    where = pretrained_cfg.get("hf_hub_id") or pretrained_cfg.get("file")
    for note in pretrained_cfg.get("notes") or ():
        if note.startswith(WEIGHTS):
            what, expected, got = "weights", note.removeprefix(WEIGHTS), weights_digest(state_dict)
            remedy = (
                "The file was damaged or replaced: remove it (for the Hub, the repository's folder in its cache) and "
                "download it again."
            )
        elif note.startswith(ARGUMENTS) and model_args:
            what, expected = "architecture and model_args in config.json", note.removeprefix(ARGUMENTS)
            got = arguments_digest(architecture, model_args)
            remedy = (
                "config.json was edited or damaged: download it again; to load with other options, pass them instead."
            )
        else:
            continue
        if got != expected:
            raise ValueError(
                f"The {what} of {where} are not those that were published: expected sha256 {expected}, got {got}. "
                f"{remedy} (pretrained_cfg_overlay={{'notes': None}} loads without this check.)"
            )


def without_digests(pretrained_cfg: dict[str, Any]) -> None:
    """Remove the digests from a model's configuration, in place, and leave its other notes."""
    if pretrained_cfg.get("notes"):
        kept = [note for note in pretrained_cfg["notes"] if not note.startswith((WEIGHTS, ARGUMENTS))]
        pretrained_cfg["notes"] = kept
        if not kept:
            del pretrained_cfg["notes"]
