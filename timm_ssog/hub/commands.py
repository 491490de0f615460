"""``python -m timm_ssog export``, ``python -m timm_ssog push`` and ``python -m timm_ssog warm-start``."""

import argparse
import sys
from collections.abc import Callable, Sequence

from timm_ssog.hub.exporting import DTYPES, export
from timm_ssog.hub.pushing import push
from timm_ssog.hub.run import BEST
from timm_ssog.hub.warm_starting import REPORT, convert


def export_command(arguments: Sequence[str]) -> int:
    """Export a run of train.py; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m timm_ssog export",
        description="Turn an output folder of timm's train.py into a folder to publish: safetensors, config and card.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="output folder of train.py")
    parser.add_argument("out_dir", metavar="OUT_DIR", help="folder to write; an earlier export there is replaced")
    parser.add_argument("--checkpoint", default=BEST, help="best (default), last, or the name of a checkpoint")
    parser.add_argument(
        "--ema",
        action=argparse.BooleanOptionalAction,
        help="export the moving average of the weights (default: if it is what the run's metric measured)",
    )
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="dtype of the weights (default: float32)")
    parser.add_argument("--about", metavar="YAML", help="data, licence and limits (default: OUT_DIR/card.yaml)")
    parser.add_argument(
        "--results",
        metavar="SPLIT=FILE",
        action="append",
        default=[],
        help="a --results-file of validate.py, and its split, with height and width if they differ (test@128x96=FILE); "
        "may be repeated",
    )
    parser.add_argument(
        "--benchmark", metavar="FILE", action="append", help="a --results-file of benchmark.py; may be repeated"
    )
    parser.add_argument(
        "--ode-report", metavar="FILE", help="JSON of timm_ssog.analysis.ode_report, of a continuous model"
    )
    options = parser.parse_args(arguments)
    results: dict[str, list[str]] = {}
    for given in options.results:
        split, equals, file = given.partition("=")
        if not equals or not split or not file:
            parser.error(f"--results must be SPLIT=FILE, as in test=results.json, got {given!r}")
        results.setdefault(split, []).append(file)

    def run() -> None:
        export(
            options.run_dir,
            options.out_dir,
            checkpoint=options.checkpoint,
            average=options.ema,
            dtype=options.dtype,
            about=options.about,
            results=results,
            benchmark=options.benchmark,
            ode_report=options.ode_report,
            on_progress=_say,
        )
        print(f'done: timm.create_model("local-dir:{options.out_dir}", pretrained=True)')

    return _report(run)


def push_command(arguments: Sequence[str]) -> int:
    """Push an exported folder; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m timm_ssog push",
        description="Push an exported folder to the Hub at HF_ENDPOINT, then download and compare it.",
    )
    parser.add_argument("out_dir", metavar="OUT_DIR", help="folder that export wrote")
    parser.add_argument("repo_id", metavar="owner/name", help="repository; created if it does not exist")
    parser.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    parser.add_argument("--revision", default="main", help="branch; created if it does not exist (default: main)")
    parser.add_argument("--message", help="message of the commit")
    parser.add_argument("--replace-card", action="store_true", help="replace a README.md that export did not write")
    parser.add_argument("--dry-run", action="store_true", help="check everything, but send and change nothing")
    options = parser.parse_args(arguments)

    def run() -> None:
        published = push(
            options.out_dir,
            options.repo_id,
            private=options.private,
            revision=options.revision,
            message=options.message,
            replace_card=options.replace_card,
            dry_run=options.dry_run,
            on_progress=_say,
        )
        for name, digest in published.files.items():
            print(f"{digest}  {name}")
        print(published.row)
        if published.commit is None:
            print(f"dry run: would push these {len(published.files)} files to {options.repo_id}")
        else:
            print(f'done: timm.create_model("{published.source}", pretrained=True)')

    return _report(run)


def warm_start_command(arguments: Sequence[str]) -> int:
    """Convert a trained ViT; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m timm_ssog warm-start",
        description="Turn a trained ViT into a vit_ssog model in a folder that timm loads, with a report.",
    )
    parser.add_argument(
        "teacher", metavar="TEACHER", help="anything timm.create_model takes: a name, local-dir:, hf-hub:"
    )
    parser.add_argument("out_dir", metavar="OUT_DIR", help="folder to write; an earlier conversion there is replaced")
    parser.add_argument("--data-dir", required=True, metavar="DIR", help="image folder, with one folder per class")
    parser.add_argument("--model", help="the student (default: the discrete one of the teacher's width)")
    parser.add_argument("--images", type=int, default=2000, help="images to read the attention on (default: 2000)")
    parser.add_argument("--refit", action="store_true", help="refit linear maps, for use without further training")
    parser.add_argument(
        "--align",
        type=int,
        nargs="?",
        const=1,
        default=0,
        metavar="EPOCHS",
        help="train towards the teacher's states",
    )
    parser.add_argument("--val-split", metavar="NAME", help="split of DIR with the teacher's classes, for top-1")
    parser.add_argument("--num-classes", type=int, help="a new head with this many classes instead of the teacher's")
    parser.add_argument("--batch-size", type=int, default=32, help="images per batch (default: 32)")
    parser.add_argument("--workers", type=int, default=2, help="processes that read images (default: 2)")
    parser.add_argument("--device", default="cpu", help="device to compute on (default: cpu)")
    parser.add_argument("--seed", type=int, default=0, help="seed for choosing images and for the fits (default: 0)")
    options = parser.parse_args(arguments)

    def run() -> None:
        report = convert(
            options.teacher,
            options.out_dir,
            options.data_dir,
            model=options.model,
            images=options.images,
            refit=options.refit,
            align_epochs=options.align,
            val_split=options.val_split,
            num_classes=options.num_classes,
            batch_size=options.batch_size,
            workers=options.workers,
            device=options.device,
            seed=options.seed,
            on_progress=_say,
        )
        print(report)
        print(f'done: timm.create_model("local-dir:{options.out_dir}", pretrained=True); the report is in {REPORT}')

    return _report(run)


def _say(step: str) -> None:
    print(f"timm_ssog: {step}", file=sys.stderr, flush=True)


def _report(run: Callable[[], None]) -> int:
    try:
        run()
    except (ValueError, OSError, RuntimeError) as error:
        print(f"timm_ssog: {error}", file=sys.stderr)
        return 2
    return 0
