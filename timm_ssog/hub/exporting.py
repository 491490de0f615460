"""From the output folder of train.py to a folder that can be published, all of it or nothing."""

import csv
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

import timm
import torch
import yaml

from timm_ssog import OdeVitSsog, VitSsog
from timm_ssog.analysis import OdeRow
from timm_ssog.errors import require_choice
from timm_ssog.hub.card import ABOUT, RECORD, check_about, read_about, render_card
from timm_ssog.hub.folder import (
    PUBLISHED_FACTS,
    WEIGHTS,
    replacing,
    require_same_when_loaded,
    write_json,
    write_model,
)
from timm_ssog.hub.measure import certificate, measure
from timm_ssog.hub.options import unseen_options
from timm_ssog.hub.run import BEST, TrainedWeights, TrainRun, read_run, read_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# rates of random noise in training: not part of the learned function, and an obstacle to adaptive solvers
_TRAINING_ARGUMENTS = ("jitter", "drop_rate", "drop_path_rate", "drop_block_rate")

_RESULT_FIELDS = ("top1", "top1_err", "top5", "top5_err", "img_size", "crop_pct", "interpolation", "param_count")
_BENCHMARK_FIELDS = ("infer_samples_per_sec", "infer_step_time", "infer_batch_size", "infer_img_size", "param_count")

# what an earlier export may hold: files written here and by a push, and those that a file manager leaves
_WRITTEN = {WEIGHTS, "config.json", "README.md", "run", ABOUT, RECORD, ".DS_Store"}

Paths = str | Path | Sequence[str | Path]


def export(
    run_dir: str | Path,
    out_dir: str | Path,
    *,
    checkpoint: str = BEST,
    average: bool | None = None,
    dtype: str = "float32",
    about: str | Path | None = None,
    results: Mapping[str, Paths] | None = None,
    benchmark: Paths | None = None,
    ode_report: str | Path | None = None,
    on_progress: Callable[[str], None] = lambda step: None,
) -> Path:
    """Turn a run of timm's train.py into a folder to publish: model.safetensors, config.json and a README.md card.

    The folder is loaded again and compared with the checkpoint, bit for bit, before it takes its place. If anything
    fails, nothing is half-written and an older folder stays as it was. Pickles are read only as tensors and never
    written.

    Args:
        run_dir: Output folder of train.py.
        out_dir: Folder to write; an earlier export there is replaced.
        checkpoint: ``"best"``, ``"last"`` or the name of a checkpoint in ``run_dir``.
        average: Export the moving average of the weights; by default only if it is what the run's metric measured.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``, of the weights in the file.
        about: YAML with what can't be measured (data, licence, limits); by default card.yaml of an earlier export.
        results: Files of validate.py's ``--results-file``, CSV or JSON, by split. They give only the width of the
            images; of other shapes than the model's own, the split says it: ``"test@128x96"``, height first.
        benchmark: Files of benchmark.py's ``--results-file``.
        ode_report: File with the JSON of `timm_ssog.analysis.ode_report` of a continuous model, whose verdict the card
            shows.
        on_progress: Called with a line before each step.

    Returns:
        ``out_dir``.

    Raises:
        FileNotFoundError: if the run, the checkpoint or a named file does not exist.
        FileExistsError: if ``out_dir`` exists and is not an earlier export.
        ValueError: if the run is damaged, is of another model, or does not fit the results.
    """
    require_choice("dtype", dtype, tuple(DTYPES))
    out = Path(out_dir).resolve()
    _require_replaceable(out)
    on_progress(f"reading {run_dir}")
    run = read_run(run_dir)
    weights = read_weights(run, checkpoint, average)
    about_file = Path(about) if about is not None else out / ABOUT
    has_about = about is not None or about_file.exists()
    facts = read_about(about_file) if has_about else {}
    about_text = about_file.read_bytes() if has_about else b""

    on_progress(f"building {run.options['model']}, epoch {weights.epoch} of {weights.file}")
    model, arguments = build_trained(run, weights)
    check_about(facts, model.num_classes)
    model.to(DTYPES[dtype])
    with replacing(out) as folder:
        on_progress(f"writing {WEIGHTS} and config.json")
        config = write_model(folder, model, arguments, run.options, **{key: facts.get(key) for key in PUBLISHED_FACTS})
        on_progress("loading them again, to compare")
        model.float()
        require_same_when_loaded(folder, model)
        on_progress("counting operations, certifying")
        _write_run(folder, run, weights, config, dtype)
        input_size = tuple(config["pretrained_cfg"]["input_size"])
        write_json(folder / "run/measured.json", measure(model, input_size))
        (folder / "run/certificate.json").write_text(certificate(model, input_size).to_json() + "\n", encoding="utf-8")
        parameters = sum(parameter.numel() for parameter in model.parameters())
        if results:
            write_json(folder / "run/results.json", _read_results(results, input_size, parameters))
        if ode_report is not None:
            write_json(folder / "run/ode_report.json", _read_ode_report(ode_report, model))
        if benchmark:
            write_json(folder / "run/benchmark.json", _read_rows(benchmark, _BENCHMARK_FIELDS, parameters))
        (folder / ABOUT).write_bytes(about_text)
        if (out / RECORD).exists():
            shutil.copyfile(out / RECORD, folder / RECORD)
        on_progress("rendering README.md")
        (folder / "README.md").write_text(render_card(folder), encoding="utf-8")
    return Path(out_dir)


def build_trained(run: TrainRun, weights: TrainedWeights) -> tuple[VitSsog, dict[str, Any]]:
    """Build the model of a run as train.py did, with its weights, in eval mode.

    Channels, classes and the grid are read from the weights, because releases of train.py derive them differently.

    Returns:
        The model, and the arguments that build it.

    Raises:
        ValueError: if it is not one of this package's models, or the weights belong to another model.
    """
    state = weights.state_dict
    arguments = {
        key: value
        for key, value in {"global_pool": run.options.get("gp"), **(run.options.get("model_kwargs") or {})}.items()
        if value is not None and key not in _TRAINING_ARGUMENTS and not key.endswith("_drop_rate")
    }
    for key, name, axis in (("in_chans", "patch_embed.proj.weight", 1), ("num_classes", "head.weight", 0)):
        arguments[key] = state[name].shape[axis] if name in state else 0
    name = run.options["model"]
    if "vit_ssog" not in name and ":" not in name:
        raise ValueError(
            f"Expected a run of one of the vit_ssog models, got one of {name}: timm.models.push_to_hf_hub publishes "
            f"other models."
        )
    try:
        model: Any = timm.create_model(name, pretrained=False, **arguments)
        grid = state["pos_embed"].shape[1:3] if "pos_embed" in state else None
        if grid is not None and model.pos_embed is not None and model.pos_embed.shape[1:3] != grid:
            patch = model.patch_embed.patch_size
            arguments["img_size"] = [grid[0] * patch[0], grid[1] * patch[1]]
            model = timm.create_model(name, pretrained=False, **arguments)
        if not isinstance(model, VitSsog):
            raise ValueError(f"Expected a run of one of the vit_ssog models, got one of {name}.")
        model.load_state_dict(state)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"{run.folder / weights.file} does not fit the model that args.yaml describes ({name} with "
            f"{arguments}): {error}"
        ) from error
    # if a run started from a published model, timm knows the arguments that were published
    return model.eval(), {**getattr(model, "_model_args", {}), **arguments, **unseen_options(model)}


def _write_run(folder: Path, run: TrainRun, weights: TrainedWeights, config: dict[str, Any], dtype: str) -> None:
    (folder / "run").mkdir()
    arguments = {k: v for k, v in config.get("model_args", {}).items() if k not in ("in_chans", "global_pool")}
    options = {
        **run.public_options,
        "model": config["architecture"],
        "model_kwargs": {**arguments, **(run.options.get("model_kwargs") or {})},
    }
    text = yaml.safe_dump(options, sort_keys=False)
    (folder / "run/train_args.yaml").write_text(text, encoding="utf-8")
    rows = {int(row["epoch"]): row for row in run.epochs}  # of an epoch that ran twice, the later row
    rows[weights.epoch] = weights.summary
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    with (folder / "run/summary.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, "epoch": epoch} for epoch, row in sorted(rows.items()))
    facts = {
        "file": weights.file,
        "epoch": weights.epoch,
        "metric": weights.metric,
        "value": weights.value,
        "split": weights.split,
        "average": weights.is_average,
        "dtype": dtype,
        "bytes": (folder / WEIGHTS).stat().st_size,
        "sha256": hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest(),
    }
    write_json(folder / "run/checkpoint.json", facts)


def _read_results(results: Mapping[str, Paths], input_size: Sequence[int], parameters: int) -> list[dict[str, Any]]:
    """Rows of validate.py with their split, and their height where the split says it."""
    rows = []
    for name, files in results.items():
        split, at, size = name.partition("@")
        match = re.fullmatch(r"(\d+)x(\d+)", size)
        if not split or (at and not match):
            raise ValueError(f"results must be by split, or by split and size as in test@128x96, got {name!r}.")
        for row in _read_rows(files, _RESULT_FIELDS, parameters):
            own_size, height = row["img_size"] == input_size[-1], {}
            if match:
                if row["img_size"] != int(match[2]):
                    raise ValueError(
                        f"{name!r} says that images are {match[2]} px wide, its file says {row['img_size']} px; the "
                        f"height comes first, as in train.py's and validate.py's --input-size."
                    )
                own_size = (int(match[1]), int(match[2])) == tuple(input_size[1:])
                height = {"height": int(match[1])}
            rows.append({"split": split, "own_size": own_size, **row, **height})
    return rows


def _read_rows(files: Paths, fields: Sequence[str], parameters: int) -> list[dict[str, Any]]:
    """Rows of a results file of timm's scripts, with the fields that may be published."""
    rows = []
    for path in [files] if isinstance(files, (str, Path)) else files:
        text = Path(path).read_text(encoding="utf-8")
        try:
            content = json.loads(text) if text.lstrip()[:1] in ("[", "{") else list(csv.DictReader(text.splitlines()))
        except ValueError as error:
            raise ValueError(f"{path} is neither the JSON nor the CSV of timm's --results-file: {error}") from error
        found = content if isinstance(content, list) else [content]
        if not found or not all(isinstance(row, dict) for row in found):
            raise ValueError(f"{path} holds no results: it is not a --results-file of a timm script.")
        for row in found:
            missing = [field for field in fields if row.get(field) is None]
            if missing:
                raise ValueError(f"{path} lacks {', '.join(missing)}: it is not a --results-file of a timm script.")
            kept = {field: _number(row[field]) for field in fields}
            if kept["param_count"] != round(parameters / 1e6, 2):
                raise ValueError(
                    f"{path} is about a model of {row['param_count']} M parameters, this one has "
                    f"{parameters / 1e6:.2f} M: it belongs to another checkpoint."
                )
            rows.append(kept)
    return rows


def _read_ode_report(path: str | Path, model: VitSsog) -> dict[str, Any]:
    """The parts of an `OdeReport` that a card shows."""
    if not isinstance(model, OdeVitSsog):
        raise ValueError(f"{path} is about continuous depth, but this is a {type(model).__name__}: omit ode_report.")
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        kept = {key: content[key] for key in ("trained", "verdict", "converges", "step_errors")}
        rows = [{field.name: row[field.name] for field in fields_of(OdeRow)} for row in content["rows"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not the JSON of timm_ssog.analysis.ode_report(…).to_dict() ({error!r}): write that to a file."
        ) from error
    setting = f"{model.solver} x {model.num_steps}"
    if model.is_fixed_step and kept["trained"] != setting:
        raise ValueError(f"{path} is about a model solved with {kept['trained']}, this one has {setting}.")
    return {**kept, "rows": rows}


def _number(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    return int(number) if number.is_integer() and "." not in value else number


def _require_replaceable(out: Path) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise FileExistsError(f"OUT_DIR must be a folder to write, and {out} is a file.")
    names = {path.name for path in out.iterdir()}
    if names - {ABOUT} and not (out / "run" / "checkpoint.json").exists():
        raise FileExistsError(
            f"{out} is not an earlier export and holds {', '.join(sorted(names)[:5])}: name a folder that does not "
            f"exist, or one with only card.yaml."
        )
    foreign = names - _WRITTEN
    if foreign:
        raise FileExistsError(
            f"{out} is an earlier export, and a new one would delete what does not belong to it: "
            f"{', '.join(sorted(foreign))}. Move that elsewhere, or name another folder."
        )
