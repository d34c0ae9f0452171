"""Models in the habits of the Hugging Face hub: a folder with a card, and a repository made of it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from allmlp.data.inputs import FILE, TOKENIZERS, carry_inputs, read_inputs
from allmlp.errors import UserError, one_line, require
from allmlp.files import write_atomically
from allmlp.models.model import Model
from allmlp.weights.card import README, card
from allmlp.weights.folder import CONFIG, WEIGHTS, save

FILES = (README, CONFIG, WEIGHTS, FILE, *TOKENIZERS)
"""What belongs to a model; a run's checkpoints and logs stay where they are."""


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
    """Write `model` to `folder` with a card that says what it is.

    `run` is the folder of the run that trained it: its inputs and tokenizer come along, and the card tells data, recipe
    and results. With `push_to_hub` the folder goes to the hub as `repo_id`, with the options of `push_to_hub`.
    """
    path, trained = Path(folder), None if run is None else Path(run)
    if trained is not None and not trained.is_dir():
        raise UserError(f"{trained} is not the folder of a run")
    save(model, path)
    try:
        if trained is not None and trained.resolve() != path.resolve():
            carry_inputs(trained, path)
        inputs = read_inputs(path) if (path / FILE).is_file() else None
        text = card(model.spec, repo_id or path.resolve().name, inputs, trained, license)
        write_atomically(path / README, lambda file: file.write_text(text, encoding="utf8"))
    except OSError as reason:
        raise UserError(f"cannot write to {path}: {one_line(reason)}") from reason
    if push_to_hub:
        upload(path, repo_id or path.resolve().name, **hub)
    return path


def push_to_hub(
    model: Model,
    repo_id: str,
    *,
    run: str | os.PathLike[str] | None = None,
    license: str | None = None,
    **hub: Any,
) -> str:
    """Publish `model` on the Hugging Face hub as `repo_id` ("ORGANISATION/NAME"), and return where it is.

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
    commit_message: str = "A model of allmlp",
    branch: str | None = None,
    create_pr: bool = False,
) -> str:
    """Make the repository where there is none, and put the files of a model in it in one commit."""
    api = require("huggingface_hub", "hub").HfApi(token=token)
    try:
        repository = api.create_repo(repo_id=repo_id, private=private, exist_ok=True).repo_id
        if branch is not None and not create_pr:
            api.create_branch(repo_id=repository, branch=branch, exist_ok=True)
        done = api.upload_folder(
            repo_id=repository,
            folder_path=str(folder),
            allow_patterns=list(FILES),
            commit_message=commit_message,
            revision=branch,
            create_pr=create_pr,
        )
    except Exception as reason:  # it reports missing rights, names and networks in a dozen types
        raise UserError(
            f"cannot push to {repo_id} on the hub: {one_line(reason)}; log in with `hf auth login`, or give token="
        ) from None
    return str(done)
