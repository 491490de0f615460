"""The checkpoints kept in hub_cards/: their cards say what they are, and they are what their cards say."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import yaml
from hub_runs import ROOT, edit_json, load, tree, write_about, write_run
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file
from timm.data import create_transform, resolve_model_data_config

from timm_ssog import OdeVitSsog, certify, hub, vit_ssog
from timm_ssog.digest import digest_notes
from timm_ssog.hub.card import check_card

CARDS = ROOT / "hub_cards"
FOLDERS = sorted(path.parent for path in CARDS.glob("*/card.yaml"))
DIGITS = CARDS / "vit_ssog_tiny.mnist5k"


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_the_template_here_is_the_one_in_the_package() -> None:
    assert (CARDS / "template.md").read_text() == (ROOT / "timm_ssog/hub/template.md").read_text()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_card_is_rendered_from_the_files_beside_it(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    assert text == hub.render_card(folder)
    assert "card.yaml" in text.split("# ")[0]
    about, config = yaml.safe_load((folder / "card.yaml").read_text()), read(folder / "config.json")
    assert folder.name == f"{config['architecture']}.{about['tag']}"
    # as the Hub reads it
    card = ModelCard.load(folder / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("timm", "image-classification")
    assert card.data.license == about["license"]
    results = {
        (row["split"], metric): row[metric]
        for row in read(folder / "run/results.json")
        if row["own_size"]
        for metric in ("top1", "top5")
    }
    said = {
        (r.dataset_split, "top1" if "top-1" in str(r.metric_name) else "top5"): r.metric_value
        for r in card.data.eval_results or []
    }
    assert said == results


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_figures_are_those_of_the_model(folder: Path) -> None:
    assert (folder / "model.safetensors").stat().st_size < 2_000_000
    model = load(folder)
    measured, certificate = read(folder / "run/measured.json"), read(folder / "run/certificate.json")
    _, height, width = model.pretrained_cfg["input_size"]
    assert measured["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert certificate["velocity_bound"] == pytest.approx(certify(model, (height, width)).velocity_bound, rel=1e-6)
    config = read(folder / "config.json")
    notes = digest_notes(load_file(folder / "model.safetensors"), config["architecture"], config["model_args"])
    assert config["pretrained_cfg"]["notes"] == notes
    # by hand, for the discrete SSoG model: embedding, blocks, head
    rows, columns = (size // patch for size, patch in zip((height, width), model.patch_embed.patch_size, strict=True))
    tokens, dim, components = rows * columns, model.embed_dim, model.blocks[0].mixer.offset.shape[1]
    hidden = model.blocks[0].mlp.fc1.out_features
    block = 2 * tokens * dim**2 + 2 * tokens * dim * hidden + components * tokens * (rows + columns) * dim
    embedding = tokens * model.patch_embed.proj.weight[0].numel() * dim
    macs = len(model.blocks) * block + embedding + dim * model.num_classes
    assert measured["gmacs"][f"{height}x{width}"] == pytest.approx(macs / 1e9, rel=1e-6)


def test_digits_are_classified_as_well_as_the_card_says() -> None:
    from digits import digits

    images, labels = digits("test")
    model = load(DIGITS)
    config = resolve_model_data_config(model)
    for row in read(DIGITS / "run/results.json"):
        size = row["img_size"]
        if size not in (32, 48):
            continue  # the others would take too long
        transform: Any = create_transform(**{**config, "input_size": (1, size, size)})
        batch = torch.stack([transform(Image.fromarray(image)) for image in images])
        with torch.inference_mode():
            logits = torch.cat([model(part) for part in batch.split(100)])
        ranked = logits.argsort(-1, descending=True) == torch.as_tensor(labels)[:, None]
        # an image on the border between two digits may change sides if sums round differently
        assert 100 * ranked[:, 0].float().mean().item() == pytest.approx(row["top1"], abs=0.11)
        assert 100 * ranked[:, :5].any(1).float().mean().item() == pytest.approx(row["top5"], abs=0.11)


def test_advertised_checkpoints_exist() -> None:
    """A row with weights stands for a folder here that was pushed and whose commit was compared."""
    pushed = {}
    for record in CARDS.glob("*/published.json"):
        published = read(record)
        if not published["row"].startswith("No row"):
            pushed[record.parent.name] = f"{published['repo_id']}@{published['commit']}"
    assert timm.list_pretrained("vit_ssog*") == sorted(pushed)
    for architecture, default in vit_ssog.default_cfgs.items():
        for tag, cfg in default.cfgs.items():
            assert cfg.hf_hub_id == pushed.get(f"{architecture}.{tag}")
            assert not cfg.url
            assert not cfg.file


@pytest.mark.parametrize(
    "name", [name for name in timm.list_models("vit_ssog*") if not timm.list_pretrained(f"{name}.*")]
)
def test_without_weights_timm_says_so(name: str) -> None:
    shape: dict[str, Any] = {"img_size": 32, "embed_dim": 32, "num_heads": 2}
    with pytest.raises(RuntimeError, match=f"No pretrained weights exist for {name}"):
        timm.create_model(name, pretrained=True, **shape)


@pytest.mark.parametrize(
    ("name", "kwargs", "said"),
    [
        ("vit_ssog_tiny_ode", {"solver": "midpoint", "solver_steps": 3}, "`midpoint` with 3 steps: 6 evaluations of"),
        (
            "vit_ssog_tiny_ode",
            {"solver": "bosh3", "horizon": 1.0, "per_sample": True},
            "atol 0.001, each image solved by itself",
        ),
        ("vit_ssog_tiny_looped", {"loops": 3}, "1 block, looped 3 times"),
        (
            "vit_ssog_tiny",
            {"mixer": "attention"},
            "There is none: dot-product self-attention is not globally Lipschitz",
        ),
        ("vit_ssog_tiny", {"norm_layer": "centrenorm"}, "practically informative"),
    ],
)
def test_cards_of_other_models(tmp_path: Path, name: str, kwargs: dict[str, Any], said: str) -> None:
    write_run(tmp_path / "run", name, model_kwargs=kwargs)
    out = hub.export(tmp_path / "run", tmp_path / "out", about=write_about(tmp_path / "about.yaml"))
    card = (out / "README.md").read_text()
    assert said in card
    assert ("## Solver" in card) == isinstance(load(out), OdeVitSsog)
    assert "validation top-1 accuracy, %: 51.25" in card
    assert "opt adamw, lr 0.001, batch_size 4, smoothing 0.1, hflip 0.0, seed 0." in card
    assert ModelCard(card).data.eval_results[0].metric_value == 51.25  # type: ignore[index]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: text.replace("license: apache-2.0", "license: apache"), "license in the card must be one of"),
        (lambda text: text.replace("library_name: timm\n", ""), "lack library_name"),
        (lambda text: text.replace("value: 97.6", "value: about 98"), "must be a number, got 'about 98'"),
        (lambda text: text + "\nAccuracy: nan\n", "has a gap: 'Accuracy: nan'"),
        (lambda text: text + "\nSee {{ source }}.\n", "has a gap: 'See"),
        (lambda text: text.replace("  results:", "  result:"), "Invalid `model_index`"),
    ],
)
def test_cards_with_holes_are_refused(edit: Any, message: str) -> None:
    text = (DIGITS / "README.md").read_text()
    check_card(text)
    with pytest.raises(ValueError, match=message):
        check_card(edit(text))


def test_a_changed_figure_changes_the_card(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DIGITS, tmp_path / "copy"))
    before = hub.render_card(folder)

    def better(results: list[dict[str, Any]]) -> None:
        results[0]["top1"] = 99.9

    edit_json(folder / "run/results.json", better)
    after = hub.render_card(folder)
    assert after != before
    assert after.count("99.9") == before.count("99.9") + 2  # the table and the model-index
    (folder / "run/measured.json").unlink()
    with pytest.raises(ValueError, match=r"measured\.json can't be read"):
        hub.render_card(folder)


def test_nothing_published_names_the_machine_it_comes_from() -> None:
    for folder in FOLDERS:
        for name, content in tree(folder).items():
            if name != "model.safetensors":
                text = content.decode()
                assert not [
                    word for word in ("/home/", "/root", "/work", "/tmp", "localhost", "127.0.0") if word in text
                ]


def test_folder_of_digits_that_the_checkpoint_was_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import digit_folder

    whole = digit_folder.digits
    monkeypatch.setattr(digit_folder, "digits", lambda split: [part[:200] for part in whole(split)])
    assert digit_folder.write_folder(tmp_path / "digits") == {"train": 180, "validation": 20, "test": 200}
    images = [path.read_bytes() for path in (tmp_path / "digits").rglob("*.png")]
    assert len(set(images)) == len(images) == 400
    assert {path.name for path in (tmp_path / "digits/test").iterdir()} == set("0123456789")
    with pytest.raises(FileExistsError):
        digit_folder.write_folder(tmp_path / "digits")
