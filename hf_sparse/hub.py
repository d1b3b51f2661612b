"""Plans on the Hugging Face Hub: what is fetched, what is published, and errors that say what to do next."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from huggingface_hub import CommitInfo, HfApi, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # re-exported without saying so

PLAN_FILES = ("plan.safetensors", "plan.json")  # the second says that the first is whole


def is_repo_id(name: str | os.PathLike[str]) -> bool:
    """Whether `name`, which is no folder here, can be a repository rather than a path."""
    text = os.fspath(name)
    if isinstance(name, os.PathLike) or text.startswith(("/", ".", "~")) or "/" not in text:
        return False
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True


def fetch_plan(
    repo_id: str,
    *,
    subfolder: str = "",
    revision: str | None = None,
    token: bool | str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    force_download: bool = False,
    local_files_only: bool = False,
) -> Path:
    """The folder in the Hub's cache with the two files of a plan, downloaded where the cache lacks them.

    Raises OSError that says why not and what to do: no such repository, revision or plan, a gated or private one,
    no connection.
    """
    try:
        for file in reversed(PLAN_FILES):
            path = hf_hub_download(
                repo_id,
                str(PurePosixPath(subfolder) / file),
                revision=revision,
                token=token,
                cache_dir=None if cache_dir is None else os.fspath(cache_dir),
                force_download=force_download,
                local_files_only=local_files_only,
            )
    except (HfHubHTTPError, EntryNotFoundError, HFValidationError) as error:
        raise OSError(f"plan: {_why(error, repo_id, revision)}") from error
    return Path(path).parent


def publish(
    folder: Path,
    repo_id: str,
    *,
    commit_message: str,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
) -> CommitInfo:
    """Uploads everything in `folder` to the model repository `repo_id`, made where there is none, in one commit: an
    upload that is interrupted publishes nothing.

    Raises OSError that says what to do next, ValueError for what is no repository id.
    """
    api = HfApi()
    try:
        validate_repo_id(repo_id)
        repo_id = api.create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/pr/"):
            api.create_branch(repo_id, branch=revision, token=token, exist_ok=True)
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message=commit_message,
            token=token,
            revision=revision,
            create_pr=create_pr,
        )
    except HFValidationError as error:
        raise ValueError(f"repo_id: got {repo_id!r}, expected 'user/name' ({error})") from error
    except Exception as error:  # what carries the requests has exceptions of its own, and has changed before
        raise OSError(
            f"repo_id: nothing was published in {repo_id}: {_why(error, repo_id, revision, writing=True)}"
        ) from error


def _why(error: Exception, repo_id: str, revision: str | None, writing: bool = False) -> str:
    log_in = "log in with `hf auth login`, or pass token="
    status = getattr(getattr(error, "response", None), "status_code", None)
    match error:
        case GatedRepoError():
            return f"{repo_id} is gated: accept its conditions on its page, then {log_in}"
        case RepositoryNotFoundError() if writing:
            return f"the Hub knows no such repository for this token, or the token is not valid: {log_in}"
        case RepositoryNotFoundError():
            return f"the Hub has no repository {repo_id}, or it is private: check the name; if it is private, {log_in}"
        case RevisionNotFoundError():
            return f"{repo_id} has no branch, tag or commit {revision!r}; without a revision its main branch is taken"
        case LocalEntryNotFoundError():
            return (
                f"the plan of {repo_id} is not in the cache and cannot be fetched: connect to the network, without "
                "local_files_only and HF_HUB_OFFLINE, or give a folder that holds a plan"
            )
        case EntryNotFoundError():
            return f"{repo_id} holds no plan ({PLAN_FILES[1]}): it is made by model.push_plan_to_hub({repo_id!r})"
        case LocalTokenNotFoundError():
            return f"there is no token: {log_in}"
        case _ if status == 401:
            return f"the Hub takes no upload without a valid token: {log_in}"
        case _ if status == 403:
            return (
                f"this token may not write there ({getattr(error, 'server_message', None) or 'status 403'}): {log_in}"
            )
    summary = str(error).partition("\n")[0] or type(error).__name__
    return f"{summary}; try again" + (": what has been uploaded already is not sent twice" if writing else "")
