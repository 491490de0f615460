"""From a publishable folder to a repository on a Hub, verified by downloading it again."""

import dataclasses
import hashlib
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import HfApi, ModelCard, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models import is_model

from timm_ssog.digest import ARGUMENTS, WEIGHTS, digest_notes
from timm_ssog.files import replace_file
from timm_ssog.hub.card import ABOUT, RECORD, REPOSITORY, check_card, missing_from_card, render_card
from timm_ssog.hub.options import unseen_options

MARK = "<!-- Written by timm_ssog.hub"
"""Start of the text of this package's cards."""

_PICKLES = (".bin", ".pt", ".pth", ".tar", ".pkl", ".pickle", ".ckpt", ".npy", ".npz")


@dataclasses.dataclass(frozen=True)
class Published:
    """A folder as a repository holds it.

    Attributes:
        repo_id: ``owner/name``.
        revision: Branch.
        commit: Full name of the commit; None after a dry run.
        files: SHA-256 of each file.
        row: The row that declares it in ``default_cfgs`` of timm_ssog/vit_ssog.py, or why it can't be declared there.
    """

    repo_id: str
    revision: str
    commit: str | None
    files: dict[str, str]
    row: str

    @property
    def source(self) -> str:
        """The name for `timm.create_model`, pinned to the commit if there is one."""
        return f"hf-hub:{self.repo_id}@{self.commit or self.revision}"


def push(
    out_dir: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str = "main",
    token: str | None = None,
    message: str | None = None,
    replace_card: bool = False,
    dry_run: bool = False,
    on_progress: Callable[[str], None] = lambda step: None,
) -> Published:
    """Push an exported folder to the Hub at ``HF_ENDPOINT``, then download it into a fresh cache and compare.

    The repository and the branch are created if they do not exist. Other files in the repository stay. The card is
    first rendered again so that it names the repository. The commit is recorded in published.json.

    Args:
        out_dir: Folder that `export` wrote.
        repo_id: ``owner/name``.
        private: Make a new repository private; the owner's default if None. An existing one stays as it is.
        revision: Branch.
        token: Access token; by default that of ``hf auth login`` or ``HF_TOKEN``.
        message: Message of the commit.
        replace_card: Replace a README.md that this package did not write, which is an error otherwise.
        dry_run: Check everything that can be checked without a request, and change nothing.
        on_progress: Called with a line before each step.

    Returns:
        What was published.

    Raises:
        ValueError: if the folder is not fit to publish or was changed since its export, or the name is not valid.
        FileExistsError: if the repository has a card that this package did not write.
        RuntimeError: if the Hub refuses, or what it serves is not what was sent.
    """
    folder = Path(out_dir)
    on_progress(f"checking {folder}")
    if repo_id.count("/") != 1:
        raise ValueError(f"The repository must be named owner/name, got {repo_id!r}.")
    try:
        validate_repo_id(repo_id)
    except ValueError as error:
        raise ValueError(f"The repository must be named owner/name: {error}") from error
    config = _require_publishable(folder)
    if dry_run:
        files = _digests(folder)
        return Published(repo_id, revision, None, files, declaration(folder, repo_id, None, config))

    api = HfApi(token=token, library_name="timm-ssog")
    try:
        on_progress(f"creating {repo_id} on {api.endpoint}, if it does not exist")
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision != "main":
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        if not replace_card:
            _require_own_card(api, repo_id, revision)
        replace_file(folder / REPOSITORY, json.dumps({"repo_id": repo_id, "revision": revision}, indent=2) + "\n")
        replace_file(folder / "README.md", render_card(folder))
        files = _digests(folder)
        on_progress(f"uploading {len(files)} files")
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            commit_message=message or f"Upload {config['architecture']} with timm-ssog",
            allow_patterns=list(files),
        ).oid
        on_progress(f"downloading commit {commit[:12]} into a fresh cache, to compare")
        _require_same_on_hub(api, repo_id, commit, files)
    except HfHubHTTPError as error:
        raise RuntimeError(_explain(error, repo_id, api.endpoint)) from error
    except (ValueError, RuntimeError, OSError):
        raise
    except Exception as error:  # of the client's transport library, which changes between releases
        raise RuntimeError(
            f"{api.endpoint} can't be reached: {error}. Check the network and HF_ENDPOINT, and push again."
        ) from error
    published = Published(repo_id, revision, commit, files, declaration(folder, repo_id, commit, config))
    _record(folder, published, api.endpoint)
    return published


def declaration(folder: str | Path, repo_id: str, commit: str | None, config: dict[str, Any]) -> str:
    """The row of ``default_cfgs`` that makes a published checkpoint a tag of its architecture, or why there is none.

    A tag stands for weights of the architecture as registered. A model of another width, for example, is loaded by its
    address, whose config.json has the options.
    """
    address = f"hf-hub:{repo_id}@{commit or 'COMMIT'}"
    cfg = config["pretrained_cfg"]
    arguments = config.get("model_args", {})
    with torch.device("meta"):
        registered: Any = timm.create_model(config["architecture"])
    defaults = unseen_options(registered)
    changed = {
        key: value
        for key, value in arguments.items()
        if key not in ("in_chans", "num_classes")
        and not (key in defaults and value == defaults[key])
        and not (key == "global_pool" and value == "avg")
        and not (key == "img_size" and value in (224, [224, 224]))
    }
    if changed:
        return (
            f"No row: {', '.join(changed)} differ from the registered {config['architecture']}, so it can't be a tag. "
            f'Load it by its address: timm.create_model("{address}", pretrained=True)'
        )
    if not cfg.get("tag"):
        return f"No row: {ABOUT} gives it no tag."
    kept = ("num_classes", "input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode", "license")
    entries = {key: tuple(value) if isinstance(value, list) else value for key in kept if (value := cfg.get(key))}
    entries |= {
        "hf_hub_id": f"{repo_id}@{commit or 'COMMIT'}",
        "hf_hub_filename": cfg["hf_hub_filename"],
        "notes": tuple(note for note in cfg["notes"] if note.startswith(WEIGHTS)),
    }
    body = ", ".join(f"{key}={value!r}" for key, value in entries.items())
    return f'"{config["architecture"]}.{cfg["tag"]}": _cfg({body}),'.replace("'", '"')


def _require_publishable(folder: Path) -> dict[str, Any]:
    for name in ("model.safetensors", "config.json", "README.md", "run/checkpoint.json"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}: expected a folder that python -m timm_ssog export wrote.")
    pickles = [path.name for path in folder.rglob("*") if path.suffix in _PICKLES]
    if pickles:
        raise ValueError(f"{folder} holds {', '.join(pickles)}, which could be pickles: publish only safetensors.")
    lacking = missing_from_card(folder)
    if lacking:
        raise ValueError(
            f"The card would not say where the model comes from: {ABOUT} lacks {', '.join(lacking)}. Write them there "
            f"and export again."
        )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        architecture, notes = config["architecture"], config["pretrained_cfg"]["notes"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / 'config.json'} is not what export writes ({error!r}): export again.") from error
    if not is_model(architecture):
        raise ValueError(f"{folder / 'config.json'} is about {architecture!r}, which timm does not know.")
    try:
        state_dict = load_file(folder / "model.safetensors")
    except SafetensorError as error:
        raise ValueError(f"{folder / 'model.safetensors'} is damaged: {error}. Export again.") from error
    if digest_notes(state_dict, architecture, config.get("model_args", {})) != [
        note for note in notes if note.startswith((WEIGHTS, ARGUMENTS))
    ]:
        raise ValueError(f"{folder} was changed since its export: the digests in config.json fail. Export again.")
    if (folder / "README.md").read_text(encoding="utf-8") != render_card(folder):
        raise ValueError(
            f"{folder / 'README.md'} is not what its files render to: it or they were edited. Write your text into "
            f"{ABOUT} and export again."
        )
    check_card((folder / "README.md").read_text(encoding="utf-8"))
    return config


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file to publish, by its path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in names.items()
        if name != RECORD and not any(part.startswith(".") for part in name.split("/"))
    }


def _require_own_card(api: HfApi, repo_id: str, revision: str) -> None:
    with tempfile.TemporaryDirectory() as cache:
        try:
            path = hf_hub_download(
                repo_id, "README.md", revision=revision, cache_dir=cache, token=api.token, endpoint=api.endpoint
            )
        except EntryNotFoundError as error:
            if isinstance(error, LocalEntryNotFoundError):  # an outage, which says nothing about the repository
                raise RuntimeError(f"{api.endpoint} did not say whether {repo_id} has a card: {error}") from error
            return
        if MARK not in ModelCard.load(path).text:
            raise FileExistsError(
                f"{repo_id} has a README.md that timm_ssog.hub did not write. Copy what you want to keep into "
                f"{ABOUT}, then push with --replace-card."
            )


def _require_same_on_hub(api: HfApi, repo_id: str, commit: str, files: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as cache:
        for name, digest in files.items():
            path = hf_hub_download(
                repo_id, name, revision=commit, cache_dir=cache, token=api.token, endpoint=api.endpoint
            )
            got = hashlib.sha256(Path(path).read_bytes()).hexdigest()
            if got != digest:
                raise RuntimeError(
                    f"{name} of {repo_id}@{commit} is not what was sent: expected sha256 {digest}, got {got}. Don't "
                    f"use that commit; push again."
                )


def _explain(error: HfHubHTTPError, repo_id: str, endpoint: str) -> str:
    status = error.response.status_code if error.response is not None else None
    advice = {
        401: "Log in with `hf auth login`, or set HF_TOKEN.",
        403: "The token must have write access to that owner's repositories.",
        404: "Check the owner's name and HF_ENDPOINT.",
    }.get(status or 0, "Nothing is half-published: a commit is complete or absent. Try again.")
    said = re.sub(r"\s+", " ", str(error)).strip()
    return f"{endpoint} refused {repo_id} ({status}): {said} {advice}"


def _record(folder: Path, published: Published, endpoint: str) -> None:
    record = {
        "repo_id": published.repo_id,
        "revision": published.revision,
        "commit": published.commit,
        "endpoint": endpoint,
        "files": published.files,
        "row": published.row,
    }
    replace_file(folder / RECORD, json.dumps(record, indent=2) + "\n")
