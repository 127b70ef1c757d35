"""
Pulling a checkpoint from the Hub: the files of one commit, each compared with the Hub's hash.

The client checks only the length of a download. Without a connection, `pull` uses the cache, whose names are hashes.
"""

import os
import shutil
from dataclasses import dataclass, replace
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import filter_repo_objects
from transformers.utils import logging

from ...storage.client import HubError, UnreachableError, require_inside, retry, translate_hub_errors
from ...storage.saved_model import differing_files, require_own_file
from ...storage.targets import new_directory


logger = logging.get_logger(__name__)

# States for resuming training are not needed to load a model.
IGNORED = ["last-checkpoint/*", "checkpoint-*/*", "runs/*"]


@dataclass(frozen=True)
class Pulled:
    """A folder with the files of one commit, whose hashes were compared."""

    folder: Path
    commit: str


def pull(
    repo_id: str,
    folder: str | Path | None = None,
    *,
    revision: str = "main",
    path: str | None = None,
    api: HfApi | None = None,
    cache_dir: str | Path | None = None,
) -> Pulled:
    """
    Download a repository, or one of its folders, and check every file. Nothing in it is executed.

    Args:
        repo_id: Repository on the Hub.
        folder: New or empty folder for the files; `None` leaves them in the cache.
        revision: Branch, tag or commit.
        path: The only folder of the repository to download; `None` means everything except training states.
        api: Client with endpoint and token; `None` means the environment's.
        cache_dir: Cache of the Hub; `None` means the environment's.

    Returns:
        The folder and the commit of `revision`: pin this commit to trust the checkpoint's code.

    Raises:
        FileExistsError: if the folder is not empty.
        InputError: if the parent of the folder is not writable.
        HubError: if the Hub refuses or sends a file twice with a wrong hash, the folder cannot be written, or `path`,
            `revision` or a file's name leads out of the repository.
        ValueError: if a file in the cache is a link out of it.
        UnreachableError: if the Hub cannot be reached and the cache is incomplete.
    """
    api, path = api or HfApi(), path if path is None else require_inside(path, "path")
    if folder is not None:
        with new_directory(folder) as partial:
            pulled = pull(repo_id, revision=revision, path=path, api=api, cache_dir=cache_dir)
            try:
                shutil.copytree(pulled.folder, partial, dirs_exist_ok=True)
            except OSError as error:
                raise HubError(f"{folder} cannot be written: {error.strerror or error}.") from None
        return replace(pulled, folder=Path(folder))
    patterns = {"ignore_patterns": IGNORED} if path is None else {"allow_patterns": [f"{escape(path)}/*"]}
    with translate_hub_errors(api, repo_id, revision):
        snapshot = _download_snapshot(api, repo_id, revision, patterns, cache_dir)
    source = snapshot if path is None else snapshot / path
    if not (source.is_dir() and source.resolve().is_relative_to(snapshot.resolve())):
        raise HubError(f"{repo_id} at {snapshot.name} on {api.endpoint} has no folder {path!r}.")
    for each in source.rglob("*"):
        require_own_file(each)
    return Pulled(source, commit=snapshot.name)


def files_by_name(folder: Path) -> dict[str, Path]:
    """All files in a folder and the folders in it, by their names from there."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def remote_digests(api: HfApi, repo_id: str, revision: str) -> dict[str, str]:
    """
    Hashes of all files of a revision by path, in the format of `saved_model.file_digest`. Raises [`HubError`] if one
    would be written elsewhere than in its repository.
    """
    entries = api.list_repo_tree(repo_id, revision=revision, recursive=True)
    files = [entry for entry in entries if isinstance(entry, RepoFile)]
    for file in files:
        require_inside(file.path, f"{repo_id} at {revision} lists a file that would be written elsewhere: path")
    return {file.path: f"sha256:{file.lfs.sha256}" if file.lfs else f"git:{file.blob_id}" for file in files}


def _download_snapshot(
    api: HfApi, repo_id: str, revision: str, patterns: dict[str, list[str]], cache_dir: str | Path | None
) -> Path:
    def download(revision: str, **options: Any) -> Path:
        return Path(retry(lambda: api.snapshot_download(repo_id, revision=revision, cache_dir=cache_dir, **options)))

    while True:
        try:
            with translate_hub_errors(api, repo_id, revision):
                # Few attempts: if the endpoint is down, a user with a complete cache should not wait long.
                commit = retry(lambda: api.model_info(repo_id, revision=revision), attempts=2).sha
                digests = retry(partial(remote_digests, api, repo_id, commit))
        except UnreachableError as unreachable:
            return _cached_snapshot(repo_id, unreachable, revision=revision, cache_dir=cache_dir, **patterns)
        # Download by the given name, so that the cache knows it offline; the branch may move in between.
        snapshot = download(revision, **patterns)
        if snapshot.name == commit:
            break
    digests = {name: digests[name] for name in filter_repo_objects(digests, **patterns)}
    if wrong := differing_files(snapshot, digests):
        logger.warning(f"{', '.join(wrong)} of {repo_id} arrived damaged or incomplete; downloading again.")
        _delete_from_cache(snapshot, wrong)
        download(commit, allow_patterns=wrong, force_download=True)
        wrong = differing_files(snapshot, digests)
    if wrong:
        _delete_from_cache(snapshot, wrong)
        raise HubError(
            f"{', '.join(wrong)} of {repo_id} at {commit} arrived twice with another content than {api.endpoint} lists "
            "(SHA mismatch); the damaged copies were deleted from the cache."
        )
    return snapshot


def _cached_snapshot(repo_id: str, unreachable: UnreachableError, **options: Any) -> Path:
    try:
        snapshot = Path(snapshot_download(repo_id, local_files_only=True, **options))
    except OSError:
        raise unreachable from None
    if wrong := differing_files(snapshot, _cached_digests(snapshot)):
        raise HubError(f"{', '.join(wrong)} of {repo_id} in the local cache is damaged; pull again with a connection.")
    logger.warning(f"The Hub was not asked; {repo_id} comes from the local cache, commit {snapshot.name}.")
    return snapshot


def _cached_digests(snapshot: Path) -> dict[str, str]:
    """Hashes of files in the cache, which are the names of their blobs."""
    blobs = {name: Path(os.readlink(path)).name for name, path in files_by_name(snapshot).items() if path.is_symlink()}
    # The blob may itself be a link to a shared store, whose file names are not hashes.
    kinds = {64: "sha256", 40: "git"}
    return {name: f"{kinds[len(blob)]}:{blob}" for name, blob in blobs.items() if len(blob) in kinds}


def _delete_from_cache(snapshot: Path, names: list[str]) -> None:
    for path in (snapshot / name for name in names):
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
