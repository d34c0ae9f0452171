"""The Hugging Face Hub: save a model with a model card, and upload it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from allmlp.data.preprocessing import PREPROCESSING_FILE, TOKENIZER_FILES, copy_preprocessing, known_preprocessing
from allmlp.errors import UserError, one_line, require
from allmlp.files import write_text_atomically
from allmlp.models.model import Model
from allmlp.weights.folder import CONFIG, WEIGHTS, save
from allmlp.weights.model_card import README, card

FILES = (README, CONFIG, WEIGHTS, PREPROCESSING_FILE, *TOKENIZER_FILES)
"""The files of a model that are uploaded; checkpoints and logs of a run are not."""


def save_pretrained(
    model: Model,
    folder: str | os.PathLike[str],
    *,
    run: str | os.PathLike[str] | None = None,
    repo_id: str | None = None,
    license: str | None = None,
    push_to_hub: bool = False,
    **hub: Any,
) -> Path:
    """Save `model` as `folder` with a model card.

    >>> allmlp.save_pretrained(model, "my_model", run="runs/cifar10", license="apache-2.0")

    `run` is the folder of the run that trained the model: its preprocessing and tokenizer are copied, and the card
    lists data, recipe and results. With `push_to_hub=True` the folder is uploaded as `repo_id`, with the options of
    `push_to_hub`.
    """
    path, trained = Path(folder), None if run is None else Path(run)
    if trained is not None and not trained.is_dir():
        raise UserError(f"{trained} is not the folder of a run")
    save(model, path)
    try:
        if trained is not None and trained.resolve() != path.resolve():
            copy_preprocessing(trained, path)
        text = card(model.spec, repo_id or path.resolve().name, known_preprocessing(path), trained, license)
        write_text_atomically(path / README, text)
    except OSError as reason:
        raise UserError(f"cannot write to {path}: {one_line(reason)}") from reason
    if push_to_hub:
        upload(path, repo_id or path.resolve().name, **hub)
    return path


def push_to_hub(
    model: Model, repo_id: str, *, run: str | os.PathLike[str] | None = None, license: str | None = None, **hub: Any
) -> str:
    """Upload `model` to the Hugging Face Hub as `repo_id` ("ORGANIZATION/NAME"); returns the URL.

    >>> allmlp.push_to_hub(model, "me/cifar10-gmlp", run="runs/cifar10", private=True)

    The options are token, private, commit_message, branch and create_pr; `run` and `license` as in `save_pretrained`.
    """
    require("huggingface_hub", "hub")
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, folder, run=run, repo_id=repo_id, license=license)
        return upload(Path(folder), repo_id, **hub)


def upload(
    folder: Path,
    repo_id: str,
    token: str | bool | None = None,
    private: bool | None = None,
    commit_message: str = "Upload model with allmlp",
    branch: str | None = None,
    create_pr: bool = False,
) -> str:
    """Create the repository if it does not exist, and upload the files of a model in one commit."""
    api = require("huggingface_hub", "hub").HfApi(token=token)
    try:
        repository = api.create_repo(repo_id=repo_id, private=private, exist_ok=True).repo_id
        if branch is not None and not create_pr:
            api.create_branch(repo_id=repository, branch=branch, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=str(folder),
            allow_patterns=list(FILES),
            commit_message=commit_message,
            revision=branch,
            create_pr=create_pr,
        )
    except Exception as reason:  # the library raises many types for missing names, networks and permissions
        raise UserError(
            f"cannot push to {repo_id} on the Hub: {one_line(reason)}; log in with `hf auth login`, or pass token="
        ) from None
    return str(commit)  # its URL
