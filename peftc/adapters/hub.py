"""Adapters on the Hugging Face hub: uploads and downloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HFValidationError

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.models.names import error_summary

_NO_CHECKPOINTS = ["checkpoint-*", "_*", "**/checkpoint-*"]


def upload(
    folder: Path,
    repo_id: str,
    *,
    token: str | bool | None = None,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    commit_description: str | None = None,
    create_pr: bool = False,
    **_: Any,
) -> str:
    """Uploads the files of a folder to a repository, which is made if there is none.

    Returns: the address of the commit. Raises: P582.
    """
    try:
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            commit_message=commit_message or "Upload an adapter",
            commit_description=commit_description,
            create_pr=create_pr,
            ignore_patterns=_NO_CHECKPOINTS,
        )
    except (HFValidationError, OSError) as error:  # every HTTP error of the hub is an OSError
        raise _refusal(f"the adapter cannot be uploaded to `{repo_id}`", error) from error
    return commit.commit_url


def download(repo_id: str, revision: str | None, **options: Any) -> Path:
    """The folder of an adapter on the hub, in the cache. Raises: P582."""
    try:
        return Path(snapshot_download(repo_id, revision=revision, ignore_patterns=_NO_CHECKPOINTS, **options))
    except (HFValidationError, OSError) as error:
        raise _refusal(f"there is no folder `{repo_id}`, and the hub does not return it", error) from error


def _refusal(message: str, error: Exception) -> PeftcError:
    return PeftcError(Diagnostic("P582", message, notes=(error_summary(error),)))
