"""Push and pull with the real huggingface_hub client, against a hub on 127.0.0.1."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import huggingface_hub.file_download
import pytest
import timm
import torch
import yaml
from hub_runs import ROOT, edit_json, load, tree, write_about, write_run
from hub_server import TOKEN, Hub
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError

from timm_ssog import hub, vit_ssog
from timm_ssog.__main__ import main

REPO = "acme/vit_ssog_tiny.test"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A running hub that this process's client uses as the Hub, as with HF_ENDPOINT set before its import."""
    with Hub(tmp_path / "xet").serving() as running:
        template = f"{running.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", running.url)
        for module in (huggingface_hub.constants, huggingface_hub.file_download):  # of clients below 1.0
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        # weights by plain HTTP, unless a test uses the xet client instead
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported folder; not to be changed."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("exported")
    write_run(path / "run")
    return hub.export(path / "run", path / "out", about=write_about(path / "about.yaml"))


@pytest.fixture
def out(folder: Path, tmp_path: Path) -> Path:
    """A copy of the exported folder."""
    return Path(shutil.copytree(folder, tmp_path / "out"))


def pull(source: str, cache: Path, **options: Any) -> Any:
    return timm.create_model(f"hf-hub:{source}", pretrained=True, cache_dir=cache, **options).eval()


def logits(model: Any, size: int = 32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        return model(torch.randn(2, model.in_chans, size, size, generator=generator))


def run_python(script: str, server: Hub, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh process, with a fresh cache below ``home``."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    env |= {"HF_ENDPOINT": server.url, "HF_HOME": str(home), "HF_TOKEN": TOKEN, "NO_PROXY": "127.0.0.1"}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=server.xet.parent,  # not the checkout: the current folder comes before all others
        env={**env, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


PULL = """
    import timm, torch

    torch.set_num_threads(1)
    answers = {}
    for key, source, options in JOBS:
        torch.manual_seed(0)
        model = timm.create_model(source, pretrained=True, **options).eval()
        images = torch.randn(2, model.in_chans, 32, 32, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            answers[key] = model(images)
    torch.save(answers, OUTPUT)
    """


def test_train_export_push_pull_is_bit_identical(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights through xet, as by default; pulled by a process that does not import this package."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
    jobs: list[tuple[str, str, dict[str, Any]]] = []
    expected: dict[str, torch.Tensor] = {}
    about = write_about(tmp_path / "about.yaml")
    for name in ("vit_ssog_tiny", "vit_ssog_tiny_looped", "vit_ssog_tiny_ode"):
        _, average = write_run(tmp_path / name, name)
        exported = hub.export(tmp_path / name, tmp_path / f"{name}.test", about=about)
        published = hub.push(exported, f"acme/{name}.test")
        changes: list[dict[str, Any]] = [{}]
        if name == "vit_ssog_tiny":
            changes += [{"num_classes": 3}, {"in_chans": 1}, {"img_size": 48}, {"num_classes": 0, "in_chans": 4}]
        if name == "vit_ssog_tiny_looped":
            changes.append({"loops": 5})
        if name == "vit_ssog_tiny_ode":
            changes.append({"solver": "bosh3", "rtol": 1e-2, "per_sample": True})
        for options in changes:
            key = f"{name} {options}"
            jobs.append((key, published.source if options else f"hf-hub:acme/{name}.test", options))
            torch.manual_seed(0)
            expected[key] = logits(load(exported, **options) if options else average)
    script = f"JOBS = {jobs!r}\nOUTPUT = {str(tmp_path / 'answers')!r}\n" + textwrap.dedent(PULL)
    result = run_python(script, server, tmp_path / "home")
    assert result.returncode == 0, result.stderr
    answers = torch.load(tmp_path / "answers")
    assert answers.keys() == expected.keys()
    for key, answer in answers.items():
        assert torch.equal(answer, expected[key]), key
    # the safetensors files went into xet's store, and no other file of weights was asked for
    assert list((tmp_path / "xet").rglob("*.mdb"))
    assert not [path for _, path in server.requests if "pytorch_model" in path]


def test_push_says_what_it_did(server: Hub, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(out), REPO]) == 0
    captured = capsys.readouterr()
    record = json.loads((out / "published.json").read_text())
    repository = server.repositories[REPO]
    assert repository.branches["main"] == record["commit"]
    assert not repository.private
    assert f'timm.create_model("hf-hub:{REPO}@{record["commit"]}", pretrained=True)' in captured.out
    assert [line.split()[1] for line in captured.err.splitlines() if line.startswith("timm_ssog:")] == [
        *("checking", "creating", "uploading", "downloading")
    ]
    # the files there are the files here, and the card names its repository
    assert repository.commits[record["commit"]] == {k: v for k, v in tree(out).items() if k != "published.json"}
    assert f'timm.create_model("hf-hub:{REPO}", pretrained=True)' in (out / "README.md").read_text()
    assert hub.render_card(out) == (out / "README.md").read_text()
    # again: the card there is our own
    assert main(["push", str(out), REPO]) == 0


def test_private_repositories_and_branches(server: Hub, out: Path, tmp_path: Path, monkeypatch: Any) -> None:
    hub.push(out, REPO)
    first = logits(pull(REPO, tmp_path / "a"))
    published = hub.push(out, "acme/secret", private=True, revision="v2")
    assert server.repositories["acme/secret"].private
    assert server.repositories["acme/secret"].branches["v2"] == published.commit
    assert "hf-hub:acme/secret@v2" in (out / "README.md").read_text()
    assert torch.equal(logits(pull("acme/secret@v2", tmp_path / "a")), first)
    with pytest.raises(EntryNotFoundError):
        pull("acme/secret", tmp_path / "a")  # there is nothing on main
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    with pytest.raises(RepositoryNotFoundError):
        pull("acme/secret@v2", tmp_path / "b")


def test_dry_run_sends_and_changes_nothing(server: Hub, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(out)
    assert main(["push", str(out), REPO, "--dry-run"]) == 0
    assert "dry run: would push these 9 files" in capsys.readouterr().out
    assert tree(out) == before
    assert not server.requests


def test_a_card_already_there(server: Hub, out: Path) -> None:
    repository = server.create(REPO)
    oid = repository.commit("main", {"README.md": b"---\nlicense: mit\n---\nBy hand.\n", "notes.txt": b"kept"})
    with pytest.raises(FileExistsError, match=r"has a README\.md that timm_ssog\.hub did not write.*--replace-card"):
        hub.push(out, REPO)
    assert repository.branches["main"] == oid
    published = hub.push(out, REPO, replace_card=True)
    files = repository.commits[str(published.commit)]
    assert files["README.md"] == (out / "README.md").read_bytes()
    assert files["notes.txt"] == b"kept"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda out: flip(out / "model.safetensors"), "was changed since its export"),
        (lambda out: (out / "model.safetensors").write_bytes(b"short"), r"model\.safetensors is damaged"),
        (lambda out: (out / "model.safetensors").unlink(), r"has no model\.safetensors"),
        (lambda out: (out / "pytorch_model.bin").touch(), r"holds pytorch_model\.bin, which could be pickles"),
        (lambda out: (out / "README.md").write_text("mine"), "not what its files render to"),
        (lambda out: edit_json(out / "config.json", lambda c: c["model_args"].update(depth=3)), "was changed since"),
        (lambda out: edit_json(out / "config.json", lambda c: c.update(architecture="x")), "which timm does not know"),
        (lambda out: (out / "config.json").write_text("{"), "is not what export writes"),
        (lambda out: edit_json(out / "run/checkpoint.json", lambda c: c.update(value=99.9)), "not what its files"),
        (lambda out: (out / "card.yaml").write_text("tag: test"), "lacks license, dataset.name, dataset.description"),
    ],
)
def test_unfit_folders_are_not_pushed(server: Hub, out: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(out)
    with pytest.raises(ValueError, match=message):
        hub.push(out, REPO)
    assert not server.requests


@pytest.mark.parametrize("name", ["vit", "a/b/c", "acme/", "acme/a..b", "acme/a b"])
def test_invalid_names(server: Hub, out: Path, name: str) -> None:
    with pytest.raises(ValueError, match="must be named owner/name"):
        hub.push(out, name)
    assert not server.requests


def test_a_hub_that_refuses_or_loses_bytes(server: Hub, out: Path, monkeypatch: Any) -> None:
    wrong = bytearray((out / "model.safetensors").read_bytes())
    wrong[-1] ^= 1
    server.corrupted[REPO, "model.safetensors"] = bytes(wrong)
    with pytest.raises(RuntimeError, match=r"model\.safetensors of .* is not what was sent: expected sha256"):
        hub.push(out, REPO)
    assert not (out / "published.json").exists()
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    with pytest.raises(RuntimeError, match=r"refused acme/other \(401\).*HF_TOKEN"):
        hub.push(out, "acme/other")
    assert not (out / "published.json").exists()


def test_an_outage_does_not_allow_replacing_a_card(server: Hub, out: Path, monkeypatch: Any) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise LocalEntryNotFoundError("503")

    monkeypatch.setattr("timm_ssog.hub.pushing.hf_hub_download", fail)
    with pytest.raises(RuntimeError, match=f"did not say whether {REPO} has a card: 503"):
        hub.push(out, REPO)
    assert not [path for _, path in server.requests if "/commit/" in path]
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert main(["push", str(out), REPO]) == 2


def test_missing_repository_revision_and_gate(server: Hub, out: Path, tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(RepositoryNotFoundError):
        pull("acme/none", tmp_path / "a")
    hub.push(out, REPO)
    with pytest.raises(RevisionNotFoundError):
        pull(f"{REPO}@v9", tmp_path / "a")
    assert torch.equal(logits(pull(REPO, tmp_path / "warm")), logits(load(out)))
    server.repositories[REPO].gated = True
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    with pytest.raises(GatedRepoError):
        pull(REPO, tmp_path / "a")


def test_offline_with_a_warm_cache(server: Hub, out: Path, tmp_path: Path) -> None:
    commit = hub.push(out, REPO).commit
    expected = logits(pull(f"{REPO}@{commit}", tmp_path / "warm"))
    pull(REPO, tmp_path / "warm")
    server.requests.clear()
    assert torch.equal(logits(pull(f"{REPO}@{commit}", tmp_path / "warm")), expected)
    assert not server.requests  # pinned and cached: nothing is asked
    answer = f"""
        import timm, torch
        model = timm.create_model("hf-hub:{REPO}", pretrained=True, cache_dir={str(tmp_path / "warm")!r}).eval()
        images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            torch.save(model(images), {str(tmp_path / "answer")!r})
        timm.create_model("hf-hub:{REPO}", pretrained=True, cache_dir={str(tmp_path / "cold")!r})
        """
    result = run_python(answer, server, tmp_path / "home", HF_HUB_OFFLINE="1")
    assert torch.equal(torch.load(tmp_path / "answer"), expected)
    assert result.returncode != 0
    assert "LocalEntryNotFoundError" in result.stderr
    assert not server.requests


def test_interrupted_download_is_resumed(server: Hub, out: Path, tmp_path: Path, monkeypatch: Any) -> None:
    hub.push(out, REPO)
    # the client resumes behind the last whole chunk, by default of ten million bytes
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 4096)
    server.ranges.clear()
    server.broken["model.safetensors"] = 20_000
    try:
        model = pull(REPO, tmp_path / "a")
    except OSError:  # of clients below 1.0, which resume when they are called again
        model = pull(REPO, tmp_path / "a")
    assert not server.broken
    assert [text.partition("-")[0] for text in server.ranges] == ["bytes=16384"]
    assert torch.equal(logits(model), logits(load(out)))


def test_corrupted_and_truncated_weights_from_the_hub(server: Hub, out: Path, tmp_path: Path) -> None:
    hub.push(out, REPO)
    whole = (out / "model.safetensors").read_bytes()
    wrong = bytearray(whole)
    wrong[-5] ^= 64
    server.corrupted[REPO, "model.safetensors"] = bytes(wrong)
    with pytest.raises(ValueError, match=f"The weights of {REPO} are not those that were published"):
        pull(REPO, tmp_path / "a")
    with pytest.raises(ValueError, match="download it again"):  # and from the cache
        pull(REPO, tmp_path / "a", num_classes=2)
    server.corrupted[REPO, "model.safetensors"] = whole[:-100]
    with pytest.raises((SafetensorError, OSError)):
        pull(REPO, tmp_path / "b")
    server.corrupted.clear()
    assert torch.equal(logits(pull(REPO, tmp_path / "c")), logits(load(out)))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"architecture": "vit_ssog_huge"}, RuntimeError, "Unknown model .vit_ssog_huge"),
        ({"model_args": {"window": 7}}, TypeError, "unexpected keyword argument 'window'"),
    ],
)
def test_configs_that_do_not_fit(
    server: Hub, out: Path, tmp_path: Path, change: Any, error: type[Exception], message: str
) -> None:
    hub.push(out, REPO)
    config = json.loads((out / "config.json").read_text())
    server.repositories[REPO].commit("main", {"config.json": json.dumps({**config, **change}).encode()})
    with pytest.raises(error, match=message):
        pull(REPO, tmp_path / "a")
    assert not [path for _, path in server.requests if path.endswith("main/model.safetensors")]


def test_no_weights_are_an_error_and_no_pickle(server: Hub, out: Path, tmp_path: Path) -> None:
    """Without hf_hub_filename in config.json, timm would take the pickle."""
    hub.push(out, REPO)
    repository = server.repositories[REPO]
    repository.commit("main", {"pytorch_model.bin": b"a pickle"})
    del repository.commits[repository.branches["main"]]["model.safetensors"]
    with pytest.raises(EntryNotFoundError):
        pull(REPO, tmp_path / "a")
    assert not [path for _, path in server.requests if path.endswith("pytorch_model.bin")]


DECLARED = """
    import timm, torch

    assert timm.list_pretrained("vit_ssog*") == ["vit_ssog_tiny.test"]
    assert timm.create_model("vit_ssog_small").pretrained_cfg["tag"] == "untrained"
    model = timm.create_model("vit_ssog_tiny.test", pretrained=True).eval()
    assert (model.num_classes, model.pretrained_cfg["crop_pct"]) == (7, 0.95)
    torch.save(model(torch.ones(1, 3, 224, 224)), OUTPUT)
    timm.create_model("vit_ssog_tiny", pretrained=True, num_classes=3)  # the default now
    """


def test_declaring_a_checkpoint_is_one_row(server: Hub, tmp_path: Path) -> None:
    shape = {"img_size": 224, "patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3}
    model, _ = write_run(
        tmp_path / "run", ema=False, model_kwargs=shape, num_classes=7, input_size=[3, 224, 224], std=[0.2, 0.3, 0.4]
    )
    options = yaml.safe_load((tmp_path / "run/args.yaml").read_text())
    (tmp_path / "run/args.yaml").write_text(yaml.safe_dump({**options, "model_kwargs": {}}))
    exported = hub.export(tmp_path / "run", tmp_path / "out", about=write_about(tmp_path / "about.yaml"))
    row = hub.push(exported, REPO).row

    package = Path(shutil.copytree(ROOT / "timm_ssog", tmp_path / "package/timm_ssog"))
    source = (package / "vit_ssog.py").read_text()
    first = '        "vit_ssog_tiny.untrained": _cfg(),\n'
    assert source.count(first) == 1
    (package / "vit_ssog.py").write_text(source.replace(first, f"{first}        {row}\n"))
    script = f"OUTPUT = {str(tmp_path / 'answer')!r}\n{textwrap.dedent(DECLARED)}"
    path = os.pathsep.join([str(package.parent), str(ROOT)])
    result = run_python(script, server, tmp_path / "home", PYTHONPATH=path, HF_HUB_DISABLE_XET="1")
    assert result.returncode == 0, result.stderr
    assert torch.equal(torch.load(tmp_path / "answer"), model(torch.ones(1, 3, 224, 224)))

    # and the row's own digest holds, whatever the repository says
    (cfg,) = eval(f"{{{row}}}", {"_cfg": vit_ssog._cfg}).values()
    wrong = bytearray((exported / "model.safetensors").read_bytes())
    wrong[-1] ^= 1
    server.corrupted[REPO, "model.safetensors"] = bytes(wrong)
    with pytest.raises(ValueError, match=f"The weights of {REPO}@.* are not those that were published"):
        timm.create_model("vit_ssog_tiny", pretrained=True, pretrained_cfg=cfg, cache_dir=tmp_path / "a")


def test_a_smaller_model_is_not_a_tag(server: Hub, out: Path) -> None:
    row = hub.push(out, REPO, dry_run=True).row
    assert row.startswith("No row: ")
    assert "embed_dim" in row
    assert f'timm.create_model("hf-hub:{REPO}@COMMIT", pretrained=True)' in row
