"""The model card: rendered from the files of a publishable folder, so that it states only what was measured."""

import csv
import json
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from timm_ssog.certificates import INFORMATIVE_GROWTH
from timm_ssog.errors import require_choice

ABOUT = "card.yaml"
"""What can't be measured: the source of the data, licence, limits. Written by hand, checked here."""

REPOSITORY = "run/repository.json"
"""Where a folder was last pushed, so that its card can say how to load it."""

TEMPLATE = "template.md"

ABOUT_KEYS = (
    *("tag", "description", "license", "license_name", "license_link", "dataset", "label_names", "limits"),
    *("citation", "benchmark_hardware"),
)
DATASET_KEYS = ("name", "id", "description", "splits")

LICENSES = (
    *("apache-2.0", "mit", "bsd", "bsd-2-clause", "bsd-3-clause", "cc0-1.0", "cc-by-2.0", "cc-by-3.0", "cc-by-4.0"),
    *("cc-by-sa-3.0", "cc-by-sa-4.0", "cc-by-nc-2.0", "cc-by-nc-3.0", "cc-by-nc-4.0", "cc-by-nc-sa-2.0"),
    *("cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0", "cc-by-nc-nd-3.0", "cc-by-nc-nd-4.0", "cc-by-nd-4.0", "gpl-2.0", "gpl-3.0"),
    *("agpl-3.0", "lgpl-2.1", "lgpl-3.0", "mpl-2.0", "epl-2.0", "eupl-1.2", "isc", "unlicense", "wtfpl", "zlib"),
    *("openrail", "bigscience-openrail-m", "cdla-permissive-2.0", "odc-by", "odbl", "unknown", "other"),
)
"""Licences of models, by the Hub's names; ``"other"`` needs a name and a link."""

_AUGMENTATIONS = ("hflip", "vflip", "scale", "ratio", "color_jitter", "aa", "reprob")
_RATES = ("drop", "drop_path", "smoothing", "mixup", "cutmix", "vflip", "color_jitter", "reprob")
RECIPE = (
    *("opt", "lr", "lr_base", "weight_decay", "layer_decay", "clip_grad", "batch_size", "grad_accum_steps", "sched"),
    *("warmup_epochs", "drop", "drop_path", "smoothing", "mixup", "cutmix", *_AUGMENTATIONS, "no_aug", "amp"),
    *("amp_dtype", "model_dtype", "pretrained", "seed"),
)
"""Options of train.py that a card states; the others are in the file beside it."""

RECORD = "published.json"
"""Where a folder records the commits it was pushed as; not uploaded, because no commit can hold its own name."""

_METRICS = {"top1": "top-1 accuracy, %", "top5": "top-5 accuracy, %", "loss": "loss"}
_CITATION = """\
@misc{ssog,
  title = {Beyond Quadratic Attention: Separable Gaussian Operators for ODE Vision Transformers},
  howpublished = {arXiv preprint}
}

@misc{rw2019timm,
  author = {Ross Wightman},
  title = {PyTorch Image Models},
  year = {2019},
  publisher = {GitHub},
  journal = {GitHub repository},
  doi = {10.5281/zenodo.4414861},
  howpublished = {\\url{https://github.com/huggingface/pytorch-image-models}}
}"""


def check_about(about: Mapping[str, Any], num_classes: int | None = None) -> None:
    """Raise unless a card.yaml has only entries that a card uses, each of the right type.

    Raises:
        ValueError: names the entry, what came, and what is expected.
    """
    for key in about:
        require_choice(f"An entry of {ABOUT}", key, ABOUT_KEYS)
    dataset = about.get("dataset", {})
    if not isinstance(dataset, Mapping) or not isinstance(dataset.get("splits", {}), Mapping):
        raise ValueError(f"dataset in {ABOUT} must be a mapping of {', '.join(DATASET_KEYS)}, got {dataset!r}.")
    for key in dataset:
        require_choice(f"An entry of dataset in {ABOUT}", key, DATASET_KEYS)
    if about.get("license") is not None:
        require_choice(f"license in {ABOUT}", about["license"], LICENSES)
        if about["license"] == "other" and not (about.get("license_name") and about.get("license_link")):
            raise ValueError(f"license 'other' in {ABOUT} needs license_name and license_link beside it.")
    names = about.get("label_names")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"label_names in {ABOUT} must be a list of strings, in the order of classes, got {names!r}.")
    if names is not None and num_classes is not None and len(names) != num_classes:
        raise ValueError(f"label_names in {ABOUT} must name the model's {num_classes} classes, got {len(names)}.")


def missing_from_card(folder: str | Path) -> list[str]:
    """Entries that a folder's card.yaml lacks for a card fit to publish; empty if there are none."""
    about = _read_about(Path(folder))
    missing = [] if about.get("license") else ["license"]
    return missing + [f"dataset.{key}" for key in ("name", "description") if not about.get("dataset", {}).get(key)]


def render_card(folder: str | Path) -> str:
    """Render the README.md of a publishable folder from its other files.

    Raises:
        ValueError: if a file is missing or damaged, or does not contain a figure of the card.
    """
    folder = Path(folder)
    about = _read_about(folder)
    check_about(about)
    config, measured, weights = (
        _read_json(folder / name) for name in ("config.json", "run/measured.json", "run/checkpoint.json")
    )
    name = f"{config['architecture']}.{about['tag']}" if about.get("tag") else config["architecture"]
    results = _read_json(folder / "run/results.json") if (folder / "run/results.json").exists() else []
    source = "local-dir:PATH_OF_THIS_FOLDER"
    if (folder / REPOSITORY).exists():
        repository = _read_json(folder / REPOSITORY)
        branch = "" if repository["revision"] == "main" else f"@{repository['revision']}"
        source = f"hf-hub:{repository['repo_id']}{branch}"
    eval_results = _eval_results(about, weights, results)
    options = _read_yaml(folder / "run/train_args.yaml")
    data = ModelCardData(
        model_name=name if eval_results else None,
        library_name="timm",
        pipeline_tag="image-classification",
        tags=["image-classification", "timm", "ssog"],
        license=about.get("license"),
        license_name=about.get("license_name"),
        license_link=about.get("license_link"),
        datasets=about.get("dataset", {}).get("id"),
        metrics=["accuracy"],
        eval_results=eval_results or None,
    )
    values = {
        "name": name,
        "about": about,
        "dataset": about.get("dataset", {}),
        "config": config,
        "pretrained": config["pretrained_cfg"],
        "model_args": config.get("model_args", {}),
        "measured": measured,
        "weights": weights,
        "outcome": f"{_METRICS.get(weights['metric'], weights['metric'])}: {weights['value']:.4g}",
        "recipe": _recipe(options),
        "decay": options.get("model_ema_decay"),
        "epochs": _count_epochs(folder),
        "results": results,
        "benchmark": _read_json(folder / "run/benchmark.json") if (folder / "run/benchmark.json").exists() else [],
        "certificate": _certificate(folder),
        "ode_report": _read_json(folder / "run/ode_report.json") if (folder / "run/ode_report.json").exists() else None,
        "source": source,
        "citation": about.get("citation") or _CITATION,
    }
    template = resources.files("timm_ssog.hub").joinpath(TEMPLATE).read_text(encoding="utf-8")
    wanted = jinja2.meta.find_undeclared_variables(jinja2.Environment().parse(template))
    if wanted - values.keys() - {"card_data"}:
        raise ValueError(f"The card's template asks for {sorted(wanted - values.keys())}, which nothing measures.")
    # no value from a file may be treated as part of the template
    text = str(ModelCard.from_template(data, template_str=template, **values))
    text = re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"
    check_card(text)
    return text


def check_card(text: str) -> None:
    """Raise unless the Hub and its readers can use a card: its metadata parse, and its text has no gaps.

    Raises:
        ValueError: says what is wrong.
    """
    card = ModelCard(text)  # parses the metadata, including the model-index
    if card.data.license is not None:
        require_choice("license in the card", card.data.license, LICENSES)
    for key in ("library_name", "pipeline_tag", "tags"):
        if not card.data.get(key):
            raise ValueError(f"The card's metadata lack {key}.")
    for result in card.data.eval_results or []:
        if not isinstance(result.metric_value, (int, float)):
            raise ValueError(f"The card's {result.metric_name} must be a number, got {result.metric_value!r}.")
    hole = re.search(r"\{\{|\{%|\bNone\b|\bnan\b|\bTODO\b|\[More Information Needed\]", card.text)
    if hole:
        line = card.text[: hole.start()].count("\n")
        raise ValueError(f"The card has a gap: {card.text.splitlines()[line].strip()!r}.")


def _eval_results(about: dict[str, Any], weights: dict[str, Any], results: list[dict[str, Any]]) -> list[EvalResult]:
    """Results at the model's own size for the model-index: those of validate.py, or else that of the run itself."""
    dataset = about.get("dataset", {})
    if not dataset.get("name"):
        return []
    shared: dict[str, Any] = {
        "task_type": "image-classification",
        "task_name": "Image Classification",
        "dataset_type": dataset.get("id") or re.sub(r"[^a-z0-9]+", "-", dataset["name"].lower()).strip("-"),
        "dataset_name": dataset["name"],
        "metric_type": "accuracy",
    }
    own = [row for row in results if row["own_size"]]
    figures = [(row["split"], key, row[key]) for row in own for key in ("top1", "top5")]
    if not figures and weights["metric"] in ("top1", "top5") and weights["split"] == "validation":
        figures = [("validation", weights["metric"], weights["value"])]
    return [
        EvalResult(**shared, dataset_split=split, metric_name=f"{split} {_METRICS[key]}", metric_value=value)
        for split, key, value in figures
    ]


def _certificate(folder: Path) -> dict[str, Any]:
    """The parts of a certificate that a card shows, from the JSON and not from a new computation."""
    certificate = _read_json(folder / "run/certificate.json")
    certificate["informative_growth"] = INFORMATIVE_GROWTH
    if certificate["reason"] is None:
        norms = [block["operator"]["value"] for block in certificate["blocks"] if block["operator"]]
        certificate["largest_operator_norm"] = max(norms) if norms else 1.0
    return certificate


def _recipe(options: dict[str, Any]) -> list[str]:
    """The options of train.py that make up a recipe, as far as they are on."""
    off = {name for name in _RATES if not options.get(name)} | {name for name in RECIPE if options.get(name) is False}
    off |= {"amp_dtype"} if not options.get("amp") else set()
    off |= {"lr_base"} if options.get("lr") is not None else set()
    off |= {"grad_accum_steps"} if options.get("grad_accum_steps") == 1 else set()
    off |= set(_AUGMENTATIONS) if options.get("no_aug") else set()
    named = {name: options[name] for name in RECIPE if options.get(name) not in (None, "") and name not in off}
    texts = []
    for name, value in named.items():
        said = " to ".join(map(str, value)) if isinstance(value, list) else str(value)
        texts.append(name if value is True else f"{name} {said}")
    return texts


def _count_epochs(folder: Path) -> int:
    with (folder / "run/summary.csv").open(newline="", encoding="utf-8") as file:
        return sum(1 for _ in csv.DictReader(file))


def _read_about(folder: Path) -> dict[str, Any]:
    return _read_yaml(folder / ABOUT) if (folder / ABOUT).exists() else {}


def read_about(path: Path) -> dict[str, Any]:
    """Read a card.yaml and check it.

    Raises:
        ValueError: if it is not a YAML mapping, or has an entry that no card uses.
    """
    about = _read_yaml(path)
    check_about(about)
    return about


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} can't be read as YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a YAML mapping, got {type(content).__name__}.")
    return content


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} can't be read as JSON: {error}. python -m timm_ssog export writes publishable folders."
        ) from error
