"""Uploads an adapter to the hub, with a model card."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from torch import nn

from peftc.adapters.checkpoints import write_configuration
from peftc.adapters.files import path_of, read_description
from peftc.adapters.hub import upload
from peftc.adapters.model_card import Evaluation, model_card
from peftc.adapters.saving import save
from peftc.diagnostics import Diagnostic, PeftcError

CARD = "README.md"
_STATES = ("checkpoint-*", "optimizer.*", "scheduler.*", "scaler.*", "rng_state*")
_OF_TRAINING = (*_STATES, "trainer_state.json", "training_args.bin", ".*")


def push(
    model: nn.Module | str | PathLike[str],
    repo_id: str,
    *,
    name: str | None = None,
    evaluation: Evaluation | None = None,
    tags: Sequence[str] = (),
    license: str | None = None,
    datasets: Sequence[str] = (),
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    create_pr: bool = False,
) -> str:
    """Uploads an adapter to the Hugging Face hub, with a model card that is made from it.

    The card has the base, the spec, the counts of parameters and the evaluation, and metadata by
    which the hub lists it under its base (`library_name: peftc`). `from_pretrained(repo_id)` loads
    it.

    Args:
        model: a compiled model, or the folder of a saved adapter, whose other files are uploaded,
            too, except for those of training. Its README.md stays as it is.
        repo_id: of the repository, which is made if there is none.
        name: as in `save`.
        evaluation: numbers by the names of metrics.
        tags: of the card, besides `peftc`.
        license: of the adapter, as the hub names it.
        datasets: their hub ids.
        private: whether a new repository is private.
        token: of the hub; by default the one that `hf auth login` has stored.
        revision: the branch.
        commit_message: of the upload.
        create_pr: opens a pull request.

    Returns:
        The address of the commit.

    Raises:
        PeftcError: P582 (the hub refuses it); as `save` for a model, P520-P522 for a folder.
    """
    if not isinstance(repo_id, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
        message = f"`repo_id` is the name of a repository, not {repo_id!r}"
        raise PeftcError(Diagnostic("P545", message, help='peftc.push(model, "user/name")'))
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "adapter"
        if isinstance(model, nn.Module):
            save(model, folder, name)
            write_configuration(model, folder)
        else:
            read_description(path_of(model))
            shutil.copytree(path_of(model), folder, ignore=shutil.ignore_patterns(*_OF_TRAINING))
        if not (folder / CARD).exists():
            card = model_card(read_description(folder), repo_id, evaluation or {}, tags, license, datasets)
            (folder / CARD).write_text(card, encoding="utf-8")
        return upload(
            folder,
            repo_id,
            token=token,
            private=private,
            revision=revision,
            commit_message=commit_message,
            create_pr=create_pr,
        )
