"""From a trained ViT to a published SSoG model, on your own image folder.

DATA has train/ and validation/ (or val/), each with one folder per class. If the classes are new to the teacher, it
first gets a head for them, by ridge regression on its features (no training). Then follows the warm start: convert,
fine-tune with timm's distillation, write a folder that timm loads. `python -m timm_ssog warm-start` does only the
conversion; train.py with recipes/warm_start.yaml does the training at scale.
"""

import argparse
from copy import copy
from pathlib import Path
from typing import Any

import torch
from image_folder import datasets, require_batch
from loading import load_model
from refusing import needing, refuse, refusing, require, require_convergence, require_learning_rate, require_place
from scoring import accuracy, loss_on
from timm.data import create_loader, create_transform, resolve_data_config
from timm.models import save_for_hf
from torch.utils.data import DataLoader

import timm_ssog
from timm_ssog.conversion import read_teacher, student_options
from timm_ssog.errors import require_count, require_positive_int

with needing("timm.task", "pip install --upgrade timm"):
    from timm.task import LogitDistillationTask


@torch.no_grad()
def fit_head(teacher: Any, batches: DataLoader[Any], classes: int, ridge: float = 1e-2) -> None:
    """Give a teacher a head for these classes: one-hot labels by ridge regression on its pooled features.

    Args:
        teacher: The teacher; its head is replaced.
        batches: Images and labels.
        classes: Number of classes.
        ridge: Ridge, over the mean square of the features.
    """
    features, labels = [], []
    for images, targets in batches:
        features.append(teacher.forward_head(teacher.forward_features(images), pre_logits=True))
        labels.append(targets)
    x, wanted = torch.cat(features).double(), torch.nn.functional.one_hot(torch.cat(labels), classes).double()
    centred, mean = x - x.mean(0), wanted.mean(0)
    gram = centred.T @ centred
    gram += ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    weight = torch.linalg.solve(gram, centred.T @ (wanted - mean)).T
    scale = 10.0  # one-hot targets make flat softmaxes, which teach little
    teacher.reset_classifier(classes)
    teacher.head.weight.copy_(scale * weight)
    teacher.head.bias.copy_(scale * (mean - weight @ x.mean(0)))


def seen_by(dataset: Any, transform: Any) -> Any:
    """A dataset of the same images with its own transform."""
    dataset = copy(dataset)
    dataset.transform = transform
    return dataset


def finetune(student: Any, teacher: Any, loader: Any, epochs: int, rate: float) -> None:
    """Train with timm's logit distillation; both models must carry the normalisation of the loader's images."""
    task = LogitDistillationTask(
        student,
        teacher,
        criterion=torch.nn.CrossEntropyLoss(),
        distill_loss_weight=0.9,
        task_loss_weight=0.1,
        temperature=2.0,
        verbose=False,
    )
    optimizer = torch.optim.AdamW(student.parameters(), lr=rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, epochs * len(loader)))
    task.train()
    images = labels = torch.empty(0)
    for epoch in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = task(images, labels)["loss"]
            loss.backward()
            optimizer.step()
            schedule.step()
            require_convergence(loss.item(), f"epoch {epoch + 1}", rate)
        require_convergence(loss_on(student, images, labels), f"epoch {epoch + 1}", rate)
        task.train()
        print(f"epoch {epoch + 1} of {epochs}")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", metavar="TEACHER", help="a trained ViT: a timm name, local-dir: or hf-hub:")
    parser.add_argument("data", type=Path, metavar="DATA", help="folder with train/ and validation/ (or val/)")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace the files of an earlier run in OUT")
    parser.add_argument("--model", default="vit_ssog_small", help="the student (default: vit_ssog_small)")
    parser.add_argument("--epochs", type=int, default=4, help="epochs of fine-tuning (default: 4)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of fine-tuning (default: 1e-3)")
    parser.add_argument("--batch-size", type=int, default=32, help="images per batch (default: 32)")
    parser.add_argument("--keep-head", action="store_true", help="DATA has the teacher's classes, in its order")
    options = parser.parse_args(argv)
    require(parser, options, require_count, "epochs")
    require(parser, options, require_positive_int, "batch_size")
    require(parser, options, require_learning_rate, "lr")
    return options


def require_out(out: Path, overwrite: bool) -> None:
    """Refuse a folder that cannot be written, or has files that --overwrite does not allow to replace."""
    if out.exists() and not out.is_dir():
        refuse(f"OUT must be a folder, got {out}, which is a file: name another.")
    require_place("OUT", out)
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        refuse(f"OUT must be empty, and {out} has files: name another, or add --overwrite to replace an earlier run.")


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    require_out(options.out, options.overwrite)
    train, validation = datasets(options.data)
    if options.epochs:
        require_batch(options.batch_size, len(train))
    names = list(train.reader.class_to_idx)
    teacher: Any = load_model(options.teacher, True).eval()
    with refusing(f"convert {options.teacher}", "Name another TEACHER."):
        student_arguments = student_options(read_teacher(teacher))
    if options.keep_head and teacher.num_classes != len(names):
        refuse(
            f"--keep-head needs the teacher's {teacher.num_classes} classes in DATA, got {len(names)}: omit it, or add "
            f"folders."
        )
    config = resolve_data_config({}, model=teacher)
    for dataset in (train, validation):
        dataset.input_img_mode = "L" if teacher.in_chans == 1 else "RGB"
    transform = create_transform(**config, is_training=False)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = torch.utils.data.Subset(seen_by(train, transform), order)
    still = DataLoader(shuffled, options.batch_size)
    tests = DataLoader(seen_by(validation, transform), options.batch_size)
    if not options.keep_head:
        fit_head(teacher, still, len(names))
        student_arguments = student_options(read_teacher(teacher))

    student = load_model(options.model, **student_arguments)
    student.pretrained_cfg.update(config)
    with refusing(f"convert {options.teacher} to {options.model}", "Name another TEACHER or --model."):
        report = timm_ssog.warm_start(student, teacher, still, labelled=tests)
    print(report)
    loader = create_loader(
        train,
        input_size=config["input_size"],
        batch_size=options.batch_size,
        is_training=True,
        scale=(0.5, 1.0),
        interpolation=config["interpolation"],
        mean=config["mean"],
        std=config["std"],
        num_workers=0,
        persistent_workers=False,
        use_prefetcher=False,
    )
    if options.epochs:
        finetune(student, teacher, loader, options.epochs, options.lr)
    print(f"top-1 after {options.epochs} epochs: {accuracy(student, tests):.1f} %")
    labels = {"label_names": names}
    with refusing(f"write {options.out}", "Name another OUT."):
        out = str(options.out)
        save_for_hf(student, out, model_args=student_arguments, model_config=labels, safe_serialization=True)
    print(f'timm.create_model("local-dir:{options.out}", pretrained=True)')


if __name__ == "__main__":
    main()
