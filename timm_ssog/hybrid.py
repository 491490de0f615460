"""Which mixer every block has: one for all of them, or a hybrid of several."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from timm_ssog.errors import did_you_mean, require_choice
from timm_ssog.layers import AttentionMixer, IdentityMixer, SeparableMixer
from timm_ssog.steering import AmplitudeSteeredMixer, ShiftSteeredMixer, ValueSteeredMixer

MIXERS = ("ssog", "attention", "identity")
STEERED: dict[str, type[SeparableMixer]] = {
    "none": SeparableMixer,
    "value": ValueSteeredMixer,
    "amplitude": AmplitudeSteeredMixer,
    "shift": ShiftSteeredMixer,
}


def mixer_names(mixer: str | Sequence[str], depth: int) -> list[str]:
    """The name of each block's mixer.

    Args:
        mixer: One name for all blocks, a name per block, or the short form ``"ssog*9+attention*3"``.
        depth: Blocks.

    Raises:
        ValueError: if there is no such mixer, or the names are not as many as the blocks.
    """
    expected = f"one of {', '.join(map(repr, MIXERS))}, a list of one per block, or short 'ssog*9+attention*3'"
    if isinstance(mixer, str) and mixer in MIXERS:
        return [mixer] * depth
    names: list[str] = []
    for part in mixer.split("+") if isinstance(mixer, str) else mixer if isinstance(mixer, list | tuple) else [mixer]:
        name, times, count = part.partition("*") if isinstance(part, str) else (part, "", "")
        if name not in MIXERS or (times and not (count.isdecimal() and int(count))):
            raise ValueError(f"mixer must be {expected}, got {mixer!r}.{did_you_mean(name, MIXERS)}")
        names += [name] * (int(count) if times else 1)
    if len(names) != depth:
        raise ValueError(f"mixer={mixer!r} names {len(names)} blocks, but the model has depth={depth}.")
    return names


def mixer_layers(
    mixer: str | Sequence[str], depth: int, num_heads: int, grid_size: tuple[int, int], steering: str, **kernels: Any
) -> list[Callable[..., nn.Module]]:
    """A function for each block that builds its mixer, given ``dim`` and the other options.

    Args:
        mixer: As in `mixer_names`.
        depth: Blocks.
        num_heads: Heads of a mixer that has heads.
        grid_size: Reference grid of SSoG mixers.
        steering: How their kernels listen to the content: ``"none"``, ``"value"``, ``"amplitude"`` or ``"shift"``.
        **kernels: Their other options.

    Raises:
        ValueError: as `mixer_names`, and if there is no such steering.
    """
    require_choice("steering", steering, tuple(STEERED))
    layers: dict[str, Callable[..., nn.Module]] = {
        "ssog": partial(STEERED[steering], num_heads=num_heads, grid_size=grid_size, **kernels),
        "attention": partial(AttentionMixer, num_heads=num_heads),
        "identity": IdentityMixer,
    }
    return [layers[name] for name in mixer_names(mixer, depth)]
