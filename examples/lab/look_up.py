"""The task that fixed kernels cannot do: find the token with the asked key, wherever it is, and return its value.

Each image is a grid of 3 x 3 tokens. The first one asks with a key, the others hold one key and one value each, in
random places. Content has to address content. Attention does that; SSoG, steered or not, looks where a token says, not
for what a token holds. A hybrid with a few blocks of attention solves the task.
"""

import argparse
from typing import Any

import above  # noqa: F401
import timm
import torch
from timm.utils import random_seed
from torch import Tensor
from torch.nn import functional as F

import timm_ssog  # noqa: F401  registers the models

KEYS, VALUES = 8, 4
STEPS = 600
BATCH = 64
RATE = 3e-3
SETTINGS: dict[str, dict[str, Any]] = {
    "fixed": {},
    "value": {"steering": "value"},
    "amplitude": {"steering": "amplitude"},
    "shift": {"steering": "shift"},
    "hybrid": {"mixer": "ssog*2+attention+ssog*2+attention"},
    "attention": {"mixer": "attention"},
}
MODEL: dict[str, Any] = {"embed_dim": 32, "depth": 6, "num_heads": 4, "mlp_ratio": 2.0, "num_classes": VALUES}
MODEL |= {"img_size": 3, "patch_size": 1, "in_chans": 2 * KEYS + VALUES}


def look_ups(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images (count, 2 * KEYS + VALUES, 3, 3) and the values (count,) that they ask for."""
    keys = torch.rand(count, KEYS, generator=generator).argsort(1)
    values = torch.randint(VALUES, (count, KEYS), generator=generator)
    asked = torch.randint(KEYS, (count,), generator=generator)
    asks = F.one_hot(KEYS + asked, 2 * KEYS + VALUES)
    holds = F.one_hot(keys, 2 * KEYS + VALUES) + F.one_hot(2 * KEYS + values, 2 * KEYS + VALUES)
    tokens = 4.0 * torch.cat([asks[:, None], holds], 1)
    return tokens.mT.reshape(count, -1, 3, 3), values[keys == asked[:, None]]


def top1(setting: str, seed: int = 0, steps: int = STEPS) -> float:
    """Train a model of a setting from scratch; the share of right answers in percent, on new images."""
    random_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = timm.create_model("vit_ssog_tiny", **MODEL, **SETTINGS[setting])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    for _ in range(steps):
        images, answers = look_ups(BATCH, generator)
        optimizer.zero_grad()
        F.cross_entropy(model(images), answers).backward()
        optimizer.step()
        schedule.step()
    images, answers = look_ups(1000, generator)
    with torch.inference_mode():
        return 100 * float((model.eval()(images).argmax(-1) == answers).float().mean())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="only these settings")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(f"Chance: {100 / VALUES:.0f} %")
    for setting in options.only:
        print(f"{setting}: {top1(setting):.1f} %", flush=True)


if __name__ == "__main__":
    main()
