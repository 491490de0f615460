"""What makes a continuous model a flow: unit start and flow penalty, several seeds, and accuracy at fewer evaluations.

One shared block over a horizon of 12 on real digits, or with ``--images`` on a folder of images with ``train`` and
``test`` in it, such as CIFAR-10. Beside the accuracy: how far the trained solver is from the exact flow, how accurate
that flow is, and what other solvers make of the same weights. Looped models are Euler's method with step 1, so their
settings are trained as such and tested at other numbers of loops. A second call resumes where the first one stopped.
"""

import random
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import above  # noqa: F401
import markdown_table
import torch
from demo import EPOCHS, INPUT, SIZE
from digits import Digits, digit_loader
from runs import parse_counts, plus_minus, provenance, results_file, run_all, run_options
from starts import set_linear_std
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_dataset
from timm.utils import random_seed
from torch import Tensor
from torchvision.transforms import Compose, RandomCrop, RandomHorizontalFlip
from torchvision.transforms.functional import pil_to_tensor
from training import MODEL, RECIPE, create_model, train

import timm_ssog
from timm_ssog.analysis import Anytime, AnytimeRow, anytime
from timm_ssog.runge_kutta import TABLEAUS

CONTINUOUS: dict[str, Any] = {"name": "vit_ssog_tiny_ode", "depth": 1, "horizon": 12.0}
PLAIN: dict[str, Any] = {"pre_norm": False, "flow_penalty": "none"}
LOOPED: dict[str, Any] = {"name": "vit_ssog_tiny_looped", "depth": 1, "loops": 12}
NARROW: dict[str, Any] = {"embed_dim": 16, "num_heads": 2}

SETTINGS: dict[str, dict[str, Any]] = {
    "as registered": {},
    "plain": PLAIN,
    "unit start": {**PLAIN, "pre_norm": True},
    "no unit start": {"pre_norm": False},
    "error": {"flow_penalty": "error"},
    "kinetic": {"flow_penalty": "kinetic"},
    "weight 1": {"flow_weight": 1.0},
    "weight 2": {"flow_weight": 2.0},
    "weights of 0.02": {"std": 0.02},
    "weights of 0.02, plain": {**PLAIN, "std": 0.02},
    "weights of 0.02, weight 1": {"std": 0.02, "flow_weight": 1.0},
    "weights of 0.02, weight 2": {"std": 0.02, "flow_weight": 2.0},
    "centring norm": {**PLAIN, "norm_layer": "centrenorm"},
    "centring norm, error 0.2": {"norm_layer": "centrenorm", "flow_penalty": "error", "flow_weight": 0.2},
    "attention": {"mixer": "attention"},
    "attention, weight 2": {"mixer": "attention", "flow_weight": 2.0},
    "attention, plain": {**PLAIN, "mixer": "attention"},
    "narrow": NARROW,
    "narrow, plain": {**PLAIN, **NARROW},
    "loops": LOOPED,
    "loops, plain": {**LOOPED, **PLAIN},
    "loops, unit start": {**LOOPED, **PLAIN, "pre_norm": True},
    "loops, random": {**LOOPED, "random_loops": True},
    "narrow loops": {**LOOPED, **NARROW},
    "narrow loops, plain": {**LOOPED, **NARROW, **PLAIN},
    "narrow loops, unit start": {**LOOPED, **NARROW, **PLAIN, "pre_norm": True},
}
"""Changes to the registered continuous model.

Ours are ``std``, of the initial linear weights, and ``random_loops``, which draws the number of loops for each batch.
"""

ANYTIME_IMAGES = 200
"""Test images of the adaptive solves, which take them one by one."""

TRAINED = ("midpoint", 6)
"""The registered solver and its steps."""

FOLDER: dict[str, Any] = {
    "in_chans": 3,
    "patch_size": 4,
    "embed_dim": 96,
    "num_heads": 6,
    "pretrained_cfg_overlay": {"input_size": (3, SIZE, SIZE)},
}
FOLDER_RECIPE: dict[str, Any] = {**RECIPE, "batch_size": 50, "learning_rate": 2e-3}


class InMemory:
    """Batches of a folder of images read once, shuffled, cropped and flipped where they are to train on."""

    def __init__(self, folder: Path, split: str, batch_size: int, limit: int | None = None) -> None:
        """Read one split of a folder.

        Args:
            folder: Holds ``train`` and ``test``, and a folder of images for every class in each.
            split: ``"train"`` or ``"test"``.
            batch_size: Images per batch.
            limit: Take only so many images, evenly spread; all if None.
        """
        dataset: Any = create_dataset("", root=str(folder / split), split=split)
        taken = range(0, len(dataset), max(len(dataset) // limit, 1) if limit else 1)
        read = [dataset[index] for index in taken]
        pixels = [pil_to_tensor(image.convert("RGB").resize((SIZE, SIZE))) for image, _ in read]
        mean, std = (torch.tensor(of)[:, None, None] for of in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))
        self.images = (torch.stack(pixels) / 255 - mean) / std
        self.labels = torch.tensor([label for _, label in read])
        self.batch_size = batch_size
        self.augment = (
            Compose([RandomCrop(SIZE, padding=4, padding_mode="reflect"), RandomHorizontalFlip()])
            if split == "train"
            else None
        )

    def __len__(self) -> int:
        return len(self.labels) // self.batch_size if self.augment else -(-len(self.labels) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.labels)) if self.augment else torch.arange(len(self.labels))
        for chosen in order.split(self.batch_size)[: len(self)]:
            images = self.images[chosen]
            if self.augment:
                images = torch.stack([self.augment(image) for image in images])
            yield images, self.labels[chosen]


@torch.inference_mode()
def logits(model: Any, images: Tensor, **solver: Any) -> Tensor:
    """The model's logits for all images in one setting of its solver or its loops, batch by batch."""
    if "loops" in solver:
        model.set_loops(solver["loops"])
    elif solver:
        model.set_solver(**solver)
    return torch.cat([model(part) for part in images.split(250)])


def run(setting: str, seed: int, epochs: int, limit: int | None, folder: Path | None) -> dict[str, Any]:
    """Train and test one setting with one seed.

    Args:
        setting: A name in `SETTINGS`.
        seed: Of the weights, the order of the images and their shifts.
        epochs: Passes over the training images.
        limit: Use only so many training and test images; all if None.
        folder: Of images; the digits if None.

    Returns:
        The record of the run, as it goes into the results.
    """
    torch.set_num_threads(1)
    random_seed(seed)
    changes = {**SETTINGS[setting]}
    random_loops, std = changes.pop("random_loops", False), changes.pop("std", None)
    options = {**INPUT, **(FOLDER if folder else {}), **({} if "loops" in changes else CONTINUOUS), **changes}
    model: Any = create_model(**options)
    if std is not None:
        set_linear_std(model, std)
    recipe = FOLDER_RECIPE if folder else RECIPE
    if folder:
        loader: Any = InMemory(folder, "train", recipe["batch_size"], limit)
        test = InMemory(folder, "test", 250, limit)
        images, labels = test.images, test.labels
    else:
        loader = digit_loader("train", SIZE, batch_size=recipe["batch_size"], limit=limit)
        images, labels = next(iter(digit_loader("test", SIZE, batch_size=limit or len(Digits("test")))))
    draw = random.Random(seed)

    def redraw(_: float) -> None:
        if random_loops:
            model.set_loops(draw.randint(6, 18))

    start = time.perf_counter()
    train(model, loader, epochs, recipe, on_step=redraw)
    seconds = time.perf_counter() - start
    model.eval()

    def right(answers: Tensor) -> float:
        return 100 * float((answers.argmax(-1) == labels).float().mean())

    record: dict[str, Any] = {"setting": setting, "options": SETTINGS[setting], "seed": seed}
    if "loops" in options:
        by_loops = {str(loops): right(logits(model, images, loops=loops)) for loops in (4, 6, 8, 10, 12, 14, 18, 24)}
        record |= {"accuracy": by_loops["12"], "by_loops": by_loops}
    else:
        trained = {"solver": model.solver, "solver_steps": model.num_steps}
        own = logits(model, images, **trained)
        exact = logits(model, images, solver="rk4", solver_steps=48 if len(images) <= 1000 else 12)
        record |= {
            "accuracy": right(own),
            "exact_accuracy": right(exact),
            "drift": float((own - exact).square().mean().sqrt() / exact.std()),
            "flips": 100 * float((own.argmax(-1) != exact.argmax(-1)).float().mean()),
        }
        for name, solver in {
            "half": {"solver": "midpoint", "solver_steps": 3},
            "rk4 x 3": {"solver": "rk4", "solver_steps": 3},
        }.items():
            answers = logits(model, images, **solver)
            record[name] = {
                "accuracy": right(answers),
                "flips": 100 * float((answers.argmax(-1) != exact.argmax(-1)).float().mean()),
            }
        model.set_solver(**trained)
        record["anytime"] = anytime(model, images[:ANYTIME_IMAGES], labels[:ANYTIME_IMAGES]).to_dict()["rows"]
        measured = torch.cat([of.flatten() for of in timm_ssog.local_lipschitz(model, images[:8]).values()])
        record["largest_local_lipschitz"] = float(measured.max())
        if options.get("norm_layer") == "centrenorm":
            certificate = timm_ssog.certify(model, SIZE)
            record |= {"velocity_bound": certificate.velocity_bound, "log10_growth": certificate.log10_growth}
    return {**record, "train_seconds": round(seconds, 1), **provenance()}


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown tables: means over seeds and their spread, of continuous and of looped settings."""
    figures = (("accuracy", 1), ("exact_accuracy", 1), ("drift", 3), ("flips", 1), ("half", 1), ("rk4 x 3", 1))
    rows = []
    for setting in SETTINGS:
        of_setting = [record for record in runs if record["setting"] == setting and "flips" in record]
        if of_setting:
            cells = []
            for name, digits in figures:
                found = [record[name] for record in of_setting]
                values = [value["accuracy"] if isinstance(value, dict) else value for value in found]
                cells.append(plus_minus(values, digits))
            rows.append([setting, len(of_setting), *cells])
    names = ["top-1", "top-1 of the exact flow", "drift, logit spreads", "predictions that differ, %"]
    tables = [markdown_table.table(["setting", "seeds", *names, "midpoint x 3", "rk4 x 3"], rows)] if rows else []
    looped = [record for record in runs if "by_loops" in record]
    if looped:
        counts = list(looped[0]["by_loops"])
        rows = []
        for setting in SETTINGS:
            of_setting = [record["by_loops"] for record in looped if record["setting"] == setting]
            if of_setting:
                rows.append([setting, *(plus_minus([by_loops[count] for by_loops in of_setting]) for count in counts)])
        tables.append(markdown_table.table(["trained with 12 loops, tested with", *counts], rows))
    return "\n\n".join(tables)


def anytime_over_seeds(runs: list[dict[str, Any]], setting: str = "as registered") -> Anytime:
    """Accuracy against evaluations, as means over the seeds of a setting."""
    solved: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for record in runs:
        if record["setting"] == setting:
            for row in record["anytime"]:
                solved.setdefault((row["solver"], row["setting"]), []).append(row)
    rows = tuple(
        AnytimeRow(
            solver,
            of,
            statistics.mean(row["evaluations"] for row in same),
            min(row["least"] for row in same),
            max(row["most"] for row in same),
            *(statistics.mean(row[name] for row in same) for name in ("accuracy", "flips")),
        )
        for (solver, of), same in solved.items()
    )
    [trained] = [row for row in rows if (row.solver, row.setting) == TRAINED]
    return Anytime("{} x {}".format(*TRAINED), trained.evaluations, trained.accuracy, rows)


def anytime_table(runs: list[dict[str, Any]]) -> str:
    """A Markdown table of the accuracy after how many evaluations, by solver: means over seeds."""
    fixed = [row for row in anytime_over_seeds(runs).rows if row.solver in TABLEAUS]
    counts = sorted({row.least for row in fixed})
    table = []
    for solver in TABLEAUS:
        found = {row.least: f"{100 * row.accuracy:.1f}" for row in fixed if row.solver == solver}
        table.append([solver, *(found.get(count, "") for count in counts)])
    return markdown_table.table(["solver, evaluations", *map(str, counts)], table)


def main(argv: list[str] | None = None) -> None:
    parser = run_options(__doc__, SETTINGS)
    parser.add_argument("--epochs", type=int, help=f"default: {EPOCHS}, with --images 10")
    parser.add_argument("--images", type=Path, help="folder with train and test (default: the digits)")
    options = parse_counts(parser, argv, ("seeds", "jobs", "epochs"))
    if options.images and not all((options.images / split).is_dir() for split in ("train", "test")):
        parser.error(f"--images must name a folder with train and test in it, got {options.images}")
    epochs, limit = (1, 50) if options.quick else (options.epochs or (10 if options.images else EPOCHS), None)
    output = results_file(options, "flow-images" if options.images else "flow")
    options_of_model = {**MODEL, **INPUT, **(FOLDER if options.images else {})}
    model = {key: options_of_model[key] for key in ("img_size", "patch_size", "embed_dim", "num_heads", "mlp_ratio")}
    recipe = {**(FOLDER_RECIPE if options.images else RECIPE), **model, "epochs": epochs}
    if options.quick:
        recipe["limit"] = limit
    measured = partial(run, epochs=epochs, limit=limit, folder=options.images)
    runs = run_all(output, recipe, list(options.only or SETTINGS), seeds=options.seeds, run=measured, jobs=options.jobs)
    print(f"{table(runs)}\n\nEvery run: {output}")


if __name__ == "__main__":
    main()
