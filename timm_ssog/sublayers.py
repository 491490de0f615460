"""Normalisation and activation layers by timm's names, tested before a model is built with them."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from timm.layers import LayerNorm, get_act_layer, get_norm_layer
from torch import nn

from timm_ssog.layers import CentreNorm

Layer = Callable[..., nn.Module]


def norm_class(norm_layer: Any, dim: int) -> Layer:
    """A function that builds the normalisation of a token's ``dim`` channels; LayerNorm if none is named.

    Raises:
        ValueError: if timm has no such layer, or it does not normalise the last dimension.
    """
    layer: Any = CentreNorm if norm_layer == "centrenorm" else _find("norm_layer", norm_layer, get_norm_layer)
    layer = layer or LayerNorm
    # all other sizes differ from dim, so that a layer for another dimension fails
    made = partial(layer, dim, device=None, dtype=None)
    _try("norm_layer", norm_layer, made, (1, dim + 1, 3, dim), "'layernorm', 'rmsnorm', 'centrenorm'")
    return layer


def act_class(act_layer: Any) -> Layer:
    """A function that builds the activation of the MLPs; GELU if none is named.

    Raises:
        ValueError: if timm has no such layer, or it does not keep the shape of its input.
    """
    layer = _find("act_layer", act_layer, get_act_layer) or nn.GELU
    _try("act_layer", act_layer, layer, (1, 1, 1, 4), "'gelu', 'relu', 'silu'")
    return layer


def _find(name: str, given: Any, find: Callable[[Any], Any]) -> Any:
    if given is not None and (isinstance(given, nn.Module) or not (isinstance(given, str) or callable(given))):
        raise ValueError(f"{name} must be the name of a timm layer, a class or a function, got {given!r}.")
    try:
        return find(given)
    except (KeyError, AssertionError) as error:
        raise ValueError(f"{name} must be the name of a timm layer or a class, got {given!r}.") from error


def _try(name: str, given: Any, layer: Layer, shape: tuple[int, ...], good: str) -> None:
    try:
        built = layer().eval()
        with torch.no_grad():
            came = built(torch.zeros(shape, device=next((p.device for p in built.parameters()), None))).shape
    except Exception as error:  # whatever a custom layer raises
        raise ValueError(
            f"{name} must work on tokens (batch, height, width, channels), as {good} do, got {given!r}, which fails: "
            f"{error}"
        ) from error
    if came != shape:
        raise ValueError(
            f"{name} must keep the shape of tokens (batch, height, width, channels), as {good} do, got {given!r}, "
            f"which turns {shape} into {tuple(came)}."
        )


def warn_of_other_layers(published: Mapping[str, Any], built: Mapping[str, Any], dim: int) -> None:
    """Warn if published weights fit in shape, but this model computes something else with them.

    Args:
        published: Arguments of the published model, as in config.json; empty if they are not known.
        built: Arguments of the model that loads the weights: ``norm_layer`` and ``act_layer`` as modules, other options
            as they are.
        dim: Channels.
    """
    for name, value in built.items() if published else ():
        theirs = published.get(name)
        if isinstance(value, nn.Module):
            layer = norm_class(theirs, dim) if name == "norm_layer" else act_class(theirs)
            ours, theirs = type(value).__name__, getattr(layer, "func", layer).__name__
        else:
            ours = value
        if theirs is not None and ours != theirs:
            warnings.warn(
                f"The weights were trained with {name}={theirs!r} and are loaded into a model with {ours!r}: their "
                f"shapes fit, but the model computes something else until it is trained again. Omit {name} to load "
                f"what was published.",
                stacklevel=2,
            )
