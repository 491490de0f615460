"""From a trained ViT to a published SSoG model, on your own image folder.

DATA has train/ and validation/, each with one folder per class. If the classes are new to the teacher, it first gets a
head for them, by ridge regression on its features (no training). Then follows the warm start: convert, fine-tune with
timm's distillation, write a folder that timm loads. `python -m timm_ssog warm-start` does only the conversion;
train.py with recipes/warm_start.yaml does the training at scale.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import create_dataset, create_loader, create_transform, resolve_data_config
from timm.models import save_for_hf
from timm.task import LogitDistillationTask
from torch.utils.data import DataLoader
from training import accuracy

import timm_ssog
from timm_ssog.conversion import read_teacher, student_options


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
    for epoch in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = task(images, labels)["loss"]
            loss.backward()
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1} of {epochs}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", metavar="TEACHER", help="a trained ViT: a timm name, local-dir: or hf-hub:")
    parser.add_argument("data", type=Path, metavar="DATA", help="folder with train/ and validation/")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument("--model", default="vit_ssog_small", help="the student (default: vit_ssog_small)")
    parser.add_argument("--epochs", type=int, default=4, help="epochs of fine-tuning (default: 4)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of fine-tuning (default: 1e-3)")
    parser.add_argument("--batch-size", type=int, default=32, help="images per batch (default: 32)")
    parser.add_argument("--keep-head", action="store_true", help="DATA has the teacher's classes, in its order")
    options = parser.parse_args(argv)

    teacher: Any = timm.create_model(options.teacher, pretrained=True).eval()
    config = resolve_data_config({}, model=teacher)
    read = partial(create_dataset, "", root=str(options.data), input_img_mode="L" if teacher.in_chans == 1 else "RGB")
    splits: dict[str, Any] = {split: read(split=split) for split in ("train", "validation")}
    for dataset in splits.values():
        dataset.transform = create_transform(**config, is_training=False)
    order = torch.randperm(len(splits["train"]), generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = torch.utils.data.Subset(splits["train"], order)
    still, tests = DataLoader(shuffled, options.batch_size), DataLoader(splits["validation"], options.batch_size)
    names = list(splits["train"].reader.class_to_idx)
    if not options.keep_head:
        fit_head(teacher, still, len(names))

    student: Any = timm.create_model(options.model, **(arguments := student_options(read_teacher(teacher))))
    student.pretrained_cfg.update(config)
    report = timm_ssog.warm_start(student, teacher, still, labelled=tests)
    print(report)
    loader = create_loader(
        read(split="train"),  # type: ignore[arg-type]
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
    save_for_hf(student, str(options.out), model_args=arguments, model_config=labels, safe_serialization=True)
    print(f'timm.create_model("local-dir:{options.out}", pretrained=True)')


if __name__ == "__main__":
    main()
