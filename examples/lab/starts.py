"""Initial weights other than a model's own, to measure what its own are worth."""

from torch import nn


def set_linear_std(model: nn.Module, std: float) -> None:
    """Draw the weights of all linear layers anew with this standard deviation; steering still starts at zero."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith("mixer.steer"):
            nn.init.normal_(module.weight, std=std)
