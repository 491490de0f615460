"""Which fixed-step solver should a continuous model train with? Twelve evaluations each, on real digits, several seeds.

One shared block over a horizon of 12, as registered. Beside the accuracy: how far the trained solver is from the exact
flow, and how accurate that flow is; a network that has adapted to its step grid loses accuracy under a better solver. A
second call resumes where the first one stopped.
"""

import time
from functools import partial
from typing import Any

import above  # noqa: F401
import markdown_table
import torch
from demo import EPOCHS, INPUT, SIZE
from digits import Digits, digit_loader
from runs import parse_counts, plus_minus, provenance, results_file, run_all, run_options
from scoring import accuracy
from timm.utils import random_seed
from training import MODEL, RECIPE, create_model, train

from timm_ssog.analysis import ode_report

CONTINUOUS: dict[str, Any] = {
    "name": "vit_ssog_tiny_ode",
    "depth": 1,
    "horizon": 12.0,
    # as the models were when these solvers were compared; examples/lab/flow.py has what came of it
    "pre_norm": False,
    "flow_penalty": "none",
}

SOLVERS: dict[str, dict[str, Any]] = {
    "rk4 x 3": {"solver": "rk4", "solver_steps": 3},
    "midpoint x 6": {"solver": "midpoint", "solver_steps": 6},
    "heun x 6": {"solver": "heun", "solver_steps": 6},
    "euler x 12": {"solver": "euler", "solver_steps": 12},
    "rk4 x 3, jitter": {"solver": "rk4", "solver_steps": 3, "jitter": True},
    "midpoint x 6, jitter": {"solver": "midpoint", "solver_steps": 6, "jitter": True},
}
"""Settings of equal cost: twelve evaluations of the velocity; jitter adds those of one more step in training."""

FINE_STEPS = 48
"""Steps of rk4 for measuring the accuracy of the exact flow."""


def run(setting: str, seed: int, epochs: int, limit: int | None) -> dict[str, Any]:
    """Train and test one solver with one seed.

    Args:
        setting: A name in `SOLVERS`.
        seed: Of the weights, the order of the images and their shifts.
        epochs: Passes over the training images.
        limit: Use only so many training and test images; all if None.

    Returns:
        The record of the run, as it goes into the results.
    """
    torch.set_num_threads(1)
    random_seed(seed)
    model: Any = create_model(**INPUT, **CONTINUOUS, **SOLVERS[setting])
    loader = digit_loader("train", SIZE, batch_size=RECIPE["batch_size"], limit=limit)
    start = time.perf_counter()
    train(model, loader, epochs)
    seconds = time.perf_counter() - start
    images, labels = next(iter(digit_loader("test", SIZE, batch_size=limit or len(Digits("test")))))
    report = ode_report(model.eval(), images, labels, steps=(FINE_STEPS,), solvers=("rk4",))
    return {
        "setting": setting,
        "options": {**CONTINUOUS, **SOLVERS[setting]},
        "seed": seed,
        "accuracy": accuracy(model, digit_loader("test", SIZE, limit=limit)),
        "exact_accuracy": 100 * (report.rows[0].accuracy or 0.0),
        "drift": report.trained_drift,
        "flips": 100 * report.trained_flips,
        "train_seconds": round(seconds, 1),
        **provenance(),
    }


def table(runs: list[dict[str, Any]]) -> str:
    """A Markdown table of the solvers: means over seeds, and their spread."""
    rows = []
    for setting in SOLVERS:
        of_setting = [record for record in runs if record["setting"] == setting]
        if of_setting:
            *cells, flips = (
                plus_minus([record[figure] for record in of_setting], digits)
                for figure, digits in (("accuracy", 1), ("exact_accuracy", 1), ("drift", 2), ("flips", 1))
            )
            rows.append([setting, len(of_setting), *cells, f"{flips} %"])
    figures = ["top-1", "top-1 of the exact flow", "drift, logit spreads", "predictions that differ"]
    return markdown_table.table(["solver", "seeds", *figures], rows)


def main(argv: list[str] | None = None) -> None:
    options = parse_counts(run_options(__doc__, SOLVERS), argv)
    epochs, limit = (1, 50) if options.quick else (EPOCHS, None)
    output = results_file(options, "solvers")
    model = {key: {**MODEL, **INPUT}[key] for key in ("img_size", "patch_size", "embed_dim", "num_heads", "mlp_ratio")}
    recipe = {**RECIPE, **model, "epochs": epochs, "train_images": len(Digits("train", limit=limit))}
    settings = list(options.only or SOLVERS)
    runs = run_all(
        output, recipe, settings, seeds=options.seeds, run=partial(run, epochs=epochs, limit=limit), jobs=options.jobs
    )
    print(f"{table(runs)}\n\nEvery run: {output}")


if __name__ == "__main__":
    main()
