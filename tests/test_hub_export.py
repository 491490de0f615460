"""From a run of train.py to a folder to publish: the same model, all of it or nothing, and no secrets."""

import io
import json
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import timm.models
import torch
import yaml
from hub_runs import KWARGS, SECRET, edit_json, load, tree, write_about, write_run
from safetensors.torch import load_file, save_file

from timm_ssog import hub
from timm_ssog.__main__ import main
from timm_ssog.analysis import ode_report

VALIDATE = {
    "model": f"local-dir:{SECRET}",
    "top1": 51.5,
    "top1_err": 48.5,
    "top5": 99.0,
    "top5_err": 1.0,
    "img_size": 32,
    "crop_pct": 0.95,
    "interpolation": "bilinear",
    "param_count": 0.03,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run and out/model, its export; not to be changed."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("finished")
    write_run(path / "run")
    hub.export(path / "run", path / "out/model", about=write_about(path / "about.yaml"))
    return path


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """Both, to be changed."""
    return Path(shutil.copytree(finished, tmp_path, dirs_exist_ok=True))


@pytest.fixture
def exported(copied: Path) -> Path:
    """The export alone."""
    return copied / "out/model"


def assert_same(model: Any, other: Any, *sizes: tuple[int, int], channels: int = 3) -> None:
    assert model.state_dict().keys() == other.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    for size in sizes or ((32, 32), (48, 16)):
        images = torch.randn(2, channels, *size)
        assert torch.equal(model(images), other(images))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("vit_ssog_tiny", {}),
        ("vit_ssog_tiny", {"model_kwargs": {"mixer": "attention", "drop_path_rate": 0.1}, "gp": "max"}),
        ("vit_ssog_tiny", {"input_size": [1, 32, 32], "mean": [0.1], "model_kwargs": {"kernel_coords": "cells"}}),
        ("vit_ssog_small_looped", {"model_kwargs": {"loops": 3, "loop_norms": True, "input_injection": "add"}}),
        ("vit_ssog_tiny_ode", {"model_kwargs": {"solver": "midpoint", "solver_steps": 2, "jitter": True}}),
        ("vit_ssog_tiny_ode", {"model_kwargs": {"solver": "bosh3", "per_sample": True, "horizon": 0.5}}),
    ],
)
def test_exported_folder_is_the_trained_model(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    _, average = write_run(tmp_path / "run", name, **changes)
    if "gp" in changes:
        average.global_pool = changes["gp"]
    out = tmp_path / f"{name}.test"
    assert hub.export(tmp_path / "run", out, about=write_about(tmp_path / "about.yaml")) == out
    channels = changes.get("input_size", [3])[0]
    loaded = load(out)
    assert_same(loaded, average, channels=channels)
    assert loaded.pretrained_cfg["mean"] == changes.get("mean", [0.4, 0.5, 0.6])
    assert loaded.pretrained_cfg["interpolation"] == "bilinear"
    # what a later release could read differently is spelled out
    spelt_out = json.loads((out / "config.json").read_text())["model_args"]
    options = {"ssog": ["steering", "amplitude", "kernel_coords"]}.get(
        changes.get("model_kwargs", {}).get("mixer", "ssog"), []
    )
    options += {"looped": ["loops", "input_injection"], "ode": ["horizon", "solver", "solver_steps", "rtol"]}.get(
        name.rpartition("_")[2], []
    )
    assert set(options) <= set(spelt_out)
    assert not [path for path in tree(out) if path.endswith((".bin", ".pth", ".tar", ".pt"))]
    assert not [path for path, content in tree(out).items() if SECRET.encode() in content]
    # and it can be changed at loading like any timm model
    torch.manual_seed(1)
    other = load(out, num_classes=7, in_chans=2, img_size=48)
    assert other(torch.randn(1, 2, 48, 48)).shape == (1, 7)
    if "_ode" in name:
        average.set_solver("dopri5", rtol=1e-2)
        assert_same(load(out, solver="dopri5", rtol=1e-2), average)


@pytest.mark.parametrize(
    ("changes", "average", "expected"),
    [
        ({}, None, True),
        ({"model_ema_force_cpu": True}, None, False),
        ({"val_split": ""}, None, False),
        ({"val_split": ""}, True, True),
        ({}, False, False),
        ({"ema": False}, None, False),
    ],
)
def test_the_average_is_exported_where_the_metric_is_its(
    tmp_path: Path, changes: dict[str, Any], average: bool | None, expected: bool
) -> None:
    models = write_run(tmp_path / "run", **changes)
    hub.export(tmp_path / "run", tmp_path / "out", average=average)
    assert_same(load(tmp_path / "out"), models[expected])
    facts = json.loads((tmp_path / "out/run/checkpoint.json").read_text())
    split, metric = ("train", "loss") if changes.get("val_split") == "" else ("validation", "top1")
    assert (facts["average"], facts["split"], facts["metric"]) == (expected, split, metric)
    said = "the moving average (decay 0.5) of those after epoch" in (tmp_path / "out/README.md").read_text()
    assert said == expected


@pytest.mark.parametrize(("which", "epoch"), [("best", 1), ("last", 1), ("checkpoint-0.pth.tar", 0)])
def test_checkpoints_by_name(tmp_path: Path, which: str, epoch: int) -> None:
    write_run(tmp_path / "run")
    hub.export(tmp_path / "run", tmp_path / "out", checkpoint=which)
    facts = json.loads((tmp_path / "out/run/checkpoint.json").read_text())
    assert (facts["epoch"], facts["value"]) == (epoch, 50.25 + epoch)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrower_weights(tmp_path: Path, dtype: str) -> None:
    _, average = write_run(tmp_path / "run")
    hub.export(tmp_path / "run", tmp_path / "out", dtype=dtype)
    stored = load_file(tmp_path / "out/model.safetensors")
    assert stored["head.weight"].dtype == getattr(torch, dtype)
    assert_same(load(tmp_path / "out"), average.to(getattr(torch, dtype)).float())


def test_a_compiled_run_of_another_size(tmp_path: Path) -> None:
    """torch.compile prefixes names; newer releases of train.py build for --img-size without saying so."""
    _, average = write_run(tmp_path / "run")
    path = tmp_path / "run/model_best.pth.tar"
    content = torch.load(path, weights_only=False)
    average.set_input_size(48)
    content["state_dict_ema"] = {f"_orig_mod.{name}": tensor for name, tensor in average.state_dict().items()}
    torch.save(content, path)
    hub.export(tmp_path / "run", tmp_path / "out")
    loaded = load(tmp_path / "out")
    assert loaded.patch_embed.img_size == (48, 48)
    assert_same(loaded, average)


def test_a_resumed_run_and_its_summary(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    path = tmp_path / "run/summary.csv"
    header, first, second = path.read_text().splitlines()
    path.write_text("\n".join([header, "0,9,9,9,9,9", "1,9,9,9,9,9", header, first, second, ""]))
    hub.export(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out/run/summary.csv").read_text().splitlines() == [header, first, second]


def test_a_finetuned_checkpoint_of_this_package(tmp_path: Path) -> None:
    """train.py --model local-dir:…: the architecture and its options are those of that folder."""
    write_run(tmp_path / "run")
    base = hub.export(tmp_path / "run", tmp_path / "base")
    _, average = write_run(tmp_path / "second", f"local-dir:{base}", model_kwargs={"img_size": 32})
    edited = yaml.safe_load((tmp_path / "second/args.yaml").read_text())
    edited["model_kwargs"] = {}
    (tmp_path / "second/args.yaml").write_text(yaml.safe_dump(edited))
    out = hub.export(tmp_path / "second", tmp_path / "out")
    assert_same(load(out), average)
    assert json.loads((out / "config.json").read_text())["architecture"] == "vit_ssog_tiny"
    assert yaml.safe_load((out / "run/train_args.yaml").read_text())["model"] == "vit_ssog_tiny"
    assert str(tmp_path).encode() not in b"".join(tree(out).values())


def test_results_and_benchmark_of_timms_scripts(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "at32.json").write_text(json.dumps(VALIDATE))
    row = {**VALIDATE, "img_size": 48, "top1": 49.0}
    (tmp_path / "at48.csv").write_text(",".join(row) + "\n" + ",".join(map(str, row.values())) + "\n")
    speed = {"infer_samples_per_sec": 12.5, "infer_step_time": 80.0, "infer_batch_size": 1, "infer_img_size": 32}
    (tmp_path / "speed.json").write_text(json.dumps([{**speed, "param_count": 0.03, "model": SECRET}]))
    about = write_about(tmp_path / "about.yaml", benchmark_hardware="a typewriter")
    results = {"test": [tmp_path / "at32.json", tmp_path / "at48.csv"], "test@64x32": tmp_path / "at32.json"}
    out = hub.export(
        tmp_path / "run", tmp_path / "out", about=about, results=results, benchmark=tmp_path / "speed.json"
    )
    card = (out / "README.md").read_text()
    assert "| test | 32 | 51.5 | 99.0 |\n| test | 48 | 49.0 | 99.0 |\n| test | 64 x 32 | 51.5 | 99.0 |" in card
    own = [row["own_size"] for row in json.loads((out / "run/results.json").read_text())]
    assert own == [True, False, False], "an image as wide as the model's own, but higher, is of another size"
    assert "| 32 | 1 | 12.5 | 80.0 |" in card
    assert "on a typewriter" in card
    assert SECRET.encode() not in b"".join(tree(out).values())
    for split, message in (("test@32x64", "64 px wide, its file says 32 px"), ("test@32", "got 'test@32'")):
        with pytest.raises(ValueError, match=message):
            hub.export(tmp_path / "run", tmp_path / "other", results={split: tmp_path / "at32.json"})

    def grow(row: dict[str, Any]) -> None:
        row["param_count"] = 5.7

    edit_json(tmp_path / "at32.json", grow)
    with pytest.raises(ValueError, match=r"5\.7 M parameters, this one has 0\.03 M"):
        hub.export(tmp_path / "run", tmp_path / "other", results=results)
    assert not (tmp_path / "other").exists()


def test_the_verdict_of_a_continuous_model_is_on_its_card(tmp_path: Path) -> None:
    settings = {"solver": "midpoint", "solver_steps": 2}
    write_run(tmp_path / "run", "vit_ssog_tiny_ode", model_kwargs=settings)
    model = load(hub.export(tmp_path / "run", tmp_path / "out"))
    images = torch.randn(4, *model.pretrained_cfg["input_size"])
    report = ode_report(model, images, model(images).argmax(1), steps=(2,), solvers=("midpoint",))
    (tmp_path / "report.json").write_text(json.dumps({**report.to_dict(), "author": SECRET}))
    out = hub.export(tmp_path / "run", tmp_path / "out", ode_report=tmp_path / "report.json")
    card = (out / "README.md").read_text()
    assert report.verdict in card
    assert "| midpoint | 2 | 4 | 100.0 |" in card
    assert SECRET.encode() not in b"".join(tree(out).values())
    write_run(tmp_path / "discrete")
    with pytest.raises(ValueError, match="this is a VitSsog: omit ode_report"):
        hub.export(tmp_path / "discrete", tmp_path / "other", ode_report=tmp_path / "report.json")
    edit_json(tmp_path / "report.json", lambda content: content.update(trained="rk4 x 3"))
    with pytest.raises(ValueError, match="solved with rk4 x 3, this one has midpoint x 2"):
        hub.export(tmp_path / "run", tmp_path / "other", ode_report=tmp_path / "report.json")
    edit_json(tmp_path / "report.json", lambda content: content.pop("rows"))
    with pytest.raises(ValueError, match="is not the JSON of timm_ssog"):
        hub.export(tmp_path / "run", tmp_path / "other", ode_report=tmp_path / "report.json")
    assert not (tmp_path / "other").exists()


class Payload:
    """What unpickling would run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def poison(run: Path) -> None:
    path = run / "model_best.pth.tar"
    content = torch.load(path, weights_only=False)
    torch.save({**content, "args": Payload(run / "pwned")}, path)


def poison_old_format(run: Path) -> None:
    (run / "model_best.pth.tar").write_bytes(pickle.dumps({"state_dict": Payload(run / "pwned")}, protocol=2))


def cut_off(run: Path) -> None:
    path = run / "model_best.pth.tar"
    path.write_bytes(path.read_bytes()[:20_000])


def no_checkpoint(run: Path) -> None:
    (run / "model_best.pth.tar").unlink()


def no_summary(run: Path) -> None:
    (run / "summary.csv").unlink()


def half_a_summary(run: Path) -> None:
    text = (run / "summary.csv").read_text()
    (run / "summary.csv").write_text(text[:-12])


def other_summary(run: Path) -> None:
    text = (run / "summary.csv").read_text()
    (run / "summary.csv").write_text(text.replace("51.25", "88.0"))


def change_args(**changes: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        options = yaml.safe_load((run / "args.yaml").read_text())
        (run / "args.yaml").write_text(yaml.safe_dump({**options, **changes}))

    return change


def diverge(run: Path) -> None:
    path = run / "model_best.pth.tar"
    content = torch.load(path, weights_only=False)
    content["state_dict_ema"]["head.bias"][0] = torch.nan
    torch.save(content, path)


def metric_of_nan(run: Path) -> None:
    path = run / "model_best.pth.tar"
    torch.save({**torch.load(path, weights_only=False), "metric": float("nan")}, path)


def no_yaml(run: Path) -> None:
    (run / "args.yaml").write_text("model: [\n")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (poison, "is refused: it is truncated, or holds more than tensors"),
        (poison_old_format, "is refused: it is truncated, or holds more than tensors"),
        (cut_off, "can't be read; it is truncated"),
        (no_checkpoint, r"no checkpoint model_best.*checkpoint-0\.pth\.tar, checkpoint-1\.pth\.tar, last\.pth\.tar"),
        (no_summary, r"summary\.csv does not exist. Expected the output folder of timm's train\.py"),
        (half_a_summary, r"summary\.csv, line 3: expected 6 numbers"),
        (other_summary, r"no row with epoch 1 and eval_top1 51\.25"),
        (change_args(model="resnet18", model_kwargs={}), "one of the vit_ssog models, got one of resnet18"),
        (change_args(model=None), "does not name a model"),
        (change_args(model_kwargs={**KWARGS, "depth": 3}), "does not fit the model that args.yaml describes"),
        (change_args(model_kwargs={**KWARGS, "depht": 2}), "unexpected keyword argument 'depht'"),
        (diverge, r"head\.bias of the checkpoint is NaN or infinite in 1 of 5 values"),
        (metric_of_nan, "a metric of NaN: the run had diverged"),
        (no_yaml, r"args\.yaml is not the YAML that train\.py writes"),
    ],
)
def test_damaged_runs_leave_everything_as_it_was(
    copied: Path, tmp_path: Path, damage: Callable[[Path], None], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tree(copied / "out/model")
    damage(tmp_path / "run")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        hub.export(tmp_path / "run", tmp_path / "out/model")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out/new")]) == 2
    assert "timm_ssog: " in capsys.readouterr().err
    assert tree(tmp_path / "out/model") == old
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]
    assert not (tmp_path / "run/pwned").exists()


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("folder.save_for_hf", OSError("No space left on device")),
        ("exporting.measure", KeyboardInterrupt()),
        ("exporting.render_card", ValueError("a gap")),
    ],
)
def test_whatever_fails_nothing_is_half_written(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    old = tree(copied / "out/model")

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(f"timm_ssog.hub.{step}", fail)
    for name in ("model", "new"):
        with pytest.raises(type(error)):
            hub.export(tmp_path / "run", tmp_path / "out" / name)
    assert tree(tmp_path / "out/model") == old
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]


def test_old_folder_comes_back_if_the_new_one_cannot_take_its_place(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tree(copied / "out/model")
    rename = Path.rename

    def refuse_new(path: Path, target: Path) -> Path:
        if path.suffix == ".new":
            raise OSError("Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse_new)
    with pytest.raises(OSError, match="Input/output"):
        hub.export(tmp_path / "run", tmp_path / "out/model")
    assert tree(tmp_path / "out/model") == old
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]


def test_files_that_no_export_wrote_are_not_deleted(copied: Path, exported: Path) -> None:
    (exported / "published.json").write_text("{}")
    hub.export(copied / "run", exported)
    assert (exported / "published.json").read_text() == "{}"
    (exported / "notes.txt").write_text("precious")
    before = tree(exported)
    with pytest.raises(FileExistsError, match=r"would delete what does not belong to it: notes\.txt"):
        hub.export(copied / "run", exported)
    assert tree(exported) == before


def test_a_link_to_a_folder_stays_one(copied: Path, exported: Path) -> None:
    link = copied / "link"
    link.symlink_to(exported, target_is_directory=True)
    (exported / "README.md").write_text("old")
    hub.export(copied / "run", link)
    assert link.is_symlink()
    assert (exported / "README.md").read_text() != "old"
    assert sorted(path.name for path in (copied / "out").iterdir()) == ["model"]


def test_only_an_earlier_export_is_replaced(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("precious")
    with pytest.raises(FileExistsError, match=r"not an earlier export and holds thesis\.tex"):
        hub.export(tmp_path / "run", tmp_path / "mine")
    with pytest.raises(FileExistsError, match="must be a folder"):
        hub.export(tmp_path / "run", tmp_path / "mine/thesis.tex")
    assert tree(tmp_path / "mine") == {"thesis.tex": b"precious"}
    # a folder that waits with its card.yaml is for this
    (tmp_path / "new").mkdir()
    write_about(tmp_path / "new/card.yaml")
    out = hub.export(tmp_path / "run", tmp_path / "new")
    assert "# vit_ssog_tiny.test" in (out / "README.md").read_text()
    first = tree(out)
    assert tree(hub.export(tmp_path / "run", out)) == first


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = write_run(tmp_path / "run")
    about = str(write_about(tmp_path / "about.yaml"))
    (tmp_path / "r.json").write_text(json.dumps(VALIDATE))
    out = str(tmp_path / "out")
    arguments = ["--no-ema", "--checkpoint", "last", "--about", about, "--results", f"test={tmp_path / 'r.json'}"]
    assert main(["export", str(tmp_path / "run"), out, *arguments]) == 0
    captured = capsys.readouterr()
    assert f'timm.create_model("local-dir:{out}", pretrained=True)' in captured.out
    steps = ["reading", "building", "writing", "loading", "counting", "rendering"]
    assert [line.split()[1] for line in captured.err.splitlines() if line.startswith("timm_ssog: ")] == steps
    assert_same(load(tmp_path / "out"), model)
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path / "run"), out, "--results", "r.json"])
    assert "must be SPLIT=FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"licence": "mit"}, r"must be one of .*got 'licence'. Did you mean 'license'\?"),
        ({"license": "apache2"}, r"got 'apache2'. Did you mean 'apache-2\.0'\?"),
        ({"license": "other"}, "needs license_name and license_link"),
        ({"dataset": "mnist"}, "must be a mapping of name, id, description, splits, got 'mnist'"),
        ({"dataset": {"title": "x"}}, "got 'title'"),
        ({"label_names": ["a", "b"]}, "must name the model's 5 classes, got 2"),
        ({"label_names": "abcde"}, "must be a list of strings"),
    ],
)
def test_what_is_written_by_hand_is_checked(
    finished: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    about = write_about(tmp_path / "about.yaml", **changes)
    with pytest.raises(ValueError, match=message):
        hub.export(finished / "run", tmp_path / "out", about=about)
    assert not (tmp_path / "out").exists()


def test_label_names_reach_the_model(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    about = write_about(tmp_path / "about.yaml", label_names=list("abcde"))
    assert load(hub.export(tmp_path / "run", tmp_path / "out", about=about)).pretrained_cfg["label_names"] == list(
        "abcde"
    )


def test_any_flipped_byte_of_the_weights_is_an_error(exported: Path) -> None:
    path = exported / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    generator = random.Random(0)
    for position in [header, len(whole) - 1, *(generator.randrange(header, len(whole)) for _ in range(8))]:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"The weights of .* are not those that were published: expected sha256"):
            load(exported)
        with pytest.raises(ValueError, match="are not those that were published"):
            load(exported, num_classes=7, in_chans=1, img_size=64)
    path.write_bytes(whole)
    load(exported)


@pytest.mark.parametrize("length", [0, 7, 100, 5000, -1])
def test_truncated_weights_are_an_error(exported: Path, length: int) -> None:
    path = exported / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(Exception, match=r"(?i)header|incomplete|buffer"):
        load(exported)


def test_replaced_tensors_and_options_are_errors(exported: Path) -> None:
    # copies, because older safetensors map the file that is overwritten below
    state = {name: tensor.clone() for name, tensor in load_file(exported / "model.safetensors").items()}
    names = [f"blocks.{block}.mixer.offset" for block in (0, 1)]
    swapped = {**state, names[0]: state[names[1]], names[1]: state[names[0]]}
    save_file(swapped, exported / "model.safetensors")
    with pytest.raises(ValueError, match="The weights of"):
        load(exported)
    save_file(state, exported / "model.safetensors")
    load(exported, kernel_coords="cells")  # asked for, not edited

    def edit(config: dict[str, Any]) -> None:
        config["model_args"]["kernel_coords"] = "cells"

    edit_json(exported / "config.json", edit)
    with pytest.raises(ValueError, match=r"The architecture and model_args in config\.json of"):
        load(exported)
    load(exported, pretrained_cfg_overlay={"notes": None})


def test_what_becomes_of_a_published_model_is_not_checked(exported: Path, tmp_path: Path) -> None:
    for pretrained in (True, False):
        model: Any = timm.create_model(f"local-dir:{exported}", pretrained=pretrained)
        assert "notes" not in model.pretrained_cfg
        with torch.no_grad():
            model.head.bias.add_(1)
        folder = tmp_path / f"tuned-{pretrained}"
        timm.models.save_for_hf(model, str(folder), safe_serialization=True)
        assert_same(load(folder), model.eval())
    features: Any = load(exported, features_only=True, out_indices=(0, 1))
    assert "notes" not in features.pretrained_cfg
    # nor are other weights under the name of a published architecture
    save_file(model.state_dict(), tmp_path / "other.safetensors")
    overlay = {"file": str(tmp_path / "other.safetensors"), "notes": ("weights sha256 0", "kept"), "num_classes": 5}
    other: Any = timm.create_model(
        "vit_ssog_tiny", pretrained=True, num_classes=5, pretrained_cfg_overlay=overlay, **KWARGS
    )
    assert_same(other.eval(), model)
    assert other.pretrained_cfg["notes"] == ["kept"]


def test_a_pickle_beside_the_weights_is_not_read(exported: Path) -> None:
    for name in ("pytorch_model.bin", "model.pth"):
        (exported / name).write_bytes(pickle.dumps(Payload(exported / "pwned"), protocol=2))
    load(exported)
    (exported / "model.safetensors").unlink()
    with pytest.raises((pickle.UnpicklingError, RuntimeError)):
        load(exported)
    assert not (exported / "pwned").exists()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda config: config.update(architecture="vit_ssog_huge"), RuntimeError, "Unknown model .vit_ssog_huge"),
        (lambda config: config["model_args"].update(window=7), TypeError, "unexpected keyword argument 'window'"),
    ],
)
def test_configs_that_do_not_fit(exported: Path, change: Any, error: type[Exception], message: str) -> None:
    edit_json(exported / "config.json", change)
    with pytest.raises(error, match=message):
        load(exported)


def test_checkpoints_are_read_by_no_other_reader(tmp_path: Path) -> None:
    """A zip whose pickle names a function beside the tensors: refused by the reader, not by luck."""
    write_run(tmp_path / "run")
    path = tmp_path / "run/model_best.pth.tar"
    buffer = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(buffer, "w") as new:
        for entry in old.namelist():
            content = old.read(entry)
            new.writestr(
                entry, pickle.dumps(Payload(tmp_path / "pwned"), protocol=2) if entry.endswith("data.pkl") else content
            )
    path.write_bytes(buffer.getvalue())
    with pytest.raises(ValueError, match="could be code"):
        hub.export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "pwned").exists()
