"""The options of a model that neither its weights nor its name contain."""

from typing import Any

from torch import nn

from timm_ssog import LoopedVitSsog, OdeVitSsog, VitSsog
from timm_ssog.layers import first_separable


def unseen_options(model: VitSsog) -> dict[str, Any]:
    """The options of a model whose values its weights do not show, under their names in `timm.create_model`.

    An export spells them out, so that a published model stays the same when a release changes their defaults.
    """
    options: dict[str, Any] = {"pre_norm": not isinstance(model.norm_pre, nn.Identity)}
    if mixer := first_separable(model.blocks):
        options["steering"] = mixer.steering
        options["amplitude"] = "convex" if mixer.convex else "signed"
        options["kernel_coords"] = "relative" if mixer.relative else "cells"
    if isinstance(model, LoopedVitSsog | OdeVitSsog):
        options |= {"flow_penalty": model.flow_penalty, "flow_weight": model.flow_weight}
    if isinstance(model, LoopedVitSsog):
        options |= {"loops": model.loops, "input_injection": "add" if model.inject_input else "none"}
    if isinstance(model, OdeVitSsog):
        names = ("solver", "rtol", "atol", "per_sample", "solver_steps")
        options |= {name: getattr(model.settings, name) for name in names}
        options["horizon"] = model.horizon
    return options
