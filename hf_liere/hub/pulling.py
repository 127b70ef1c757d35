"""
Pulling a checkpoint from the Hub: the files of one commit, each compared with the hash that the Hub lists for it.

The client checks the length of a download, not its content. `pull` does; without a connection it takes what is in the
local cache, whose file names are the hashes.
"""

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.utils import filter_repo_objects
from transformers.utils import logging

from ..storage.client import HubError, UnreachableError, remote_digests, retrying, translate_hub_errors
from ..storage.saved_weights import differing_files, file_digest
from ..storage.targets import new_directory


logger = logging.get_logger(__name__)

# States for resuming a training are not needed to load a model.
IGNORED = ["last-checkpoint/*", "checkpoint-*/*", "runs/*"]


@dataclass(frozen=True)
class Pulled:
    """A folder that holds the files of one commit, their hashes compared."""

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
    Download a repository, or one folder of it, and check every file. Nothing in it is executed.

    Args:
        repo_id: Repository on the Hub.
        folder: Where to put the files, a folder that does not exist or is empty; `None` leaves them in the cache.
        revision: Branch, tag or commit.
        path: Folder of the repository to take alone; `None` means everything but states of training.
        api: Client with endpoint and token; `None` means those of the environment.
        cache_dir: Cache of the Hub; `None` means the environment's.

    Returns:
        The folder and the commit that `revision` stood for: pin it where the code of the checkpoint is to be trusted.

    Raises:
        FileExistsError: if the folder holds something.
        InputError: if nothing can be written beside it.
        HubError: if the Hub refuses or delivers a file twice with a wrong hash, or the folder cannot be filled.
        UnreachableError: if it cannot be reached and the cache does not hold everything.
    """
    api = api or HfApi()
    if folder is None:
        return _pull_to_cache(api, repo_id, revision, path, cache_dir)
    with new_directory(folder) as partial:
        pulled = _pull_to_cache(api, repo_id, revision, path, cache_dir)
        try:
            shutil.copytree(pulled.folder, partial, dirs_exist_ok=True)
        except OSError as error:
            raise HubError(f"{folder} cannot be written: {error.strerror or error}.") from None
    return replace(pulled, folder=Path(folder))


def _pull_to_cache(api: HfApi, repo_id: str, revision: str, path: str | None, cache_dir) -> Pulled:
    with translate_hub_errors(api, repo_id, revision):
        snapshot = _checked_snapshot(api, repo_id, revision, path, cache_dir)
    source = snapshot if path is None else snapshot / path
    if not source.is_dir():
        raise HubError(f"{repo_id} at {snapshot.name} on {api.endpoint} has no folder {path!r}.")
    return Pulled(source, commit=snapshot.name)


def _checked_snapshot(api: HfApi, repo_id: str, revision: str, path: str | None, cache_dir) -> Path:
    def download(revision: str, **options) -> Path:
        options |= {"revision": revision, "token": api.token, "endpoint": api.endpoint, "cache_dir": cache_dir}
        return Path(retrying(lambda: snapshot_download(repo_id, **options)))

    snapshot, commit, digests = None, None, {}
    while snapshot is None or snapshot.name != commit:
        try:
            commit, digests = _listing(api, repo_id, revision, path)
        except UnreachableError as unreachable:
            return _cached_snapshot(repo_id, revision, path, cache_dir, unreachable)
        # Asked for by the name that was given, which the cache then knows offline; the branch may move in between.
        snapshot = download(revision, **_patterns(path))
    wrong = differing_files(snapshot, digests, digests)
    if wrong:
        logger.warning(f"{', '.join(wrong)} of {repo_id} arrived damaged or incomplete; downloading again.")
        _forget(snapshot, wrong)
        download(commit, allow_patterns=wrong, force_download=True)
        wrong = differing_files(snapshot, digests, digests)
    if wrong:
        _forget(snapshot, wrong)
        raise HubError(
            f"{', '.join(wrong)} of {repo_id} at {commit} arrived twice with another content than {api.endpoint} lists "
            "(SHA mismatch); the damaged copies were deleted from the cache."
        )
    return snapshot


def _listing(api: HfApi, repo_id: str, revision: str, path: str | None) -> tuple[str, dict[str, str]]:
    with translate_hub_errors(api, repo_id, revision):
        # Few attempts: where the endpoint is down, a user whose cache holds everything should not wait long.
        commit = retrying(lambda: api.model_info(repo_id, revision=revision), attempts=2).sha
        digests = retrying(lambda: remote_digests(api, repo_id, commit))
    return commit, {name: digests[name] for name in filter_repo_objects(digests, **_patterns(path))}


def _patterns(path: str | None) -> dict[str, list[str]]:
    return {"ignore_patterns": IGNORED} if path is None else {"allow_patterns": [f"{path}/*"]}


def _cached_snapshot(repo_id: str, revision: str, path: str | None, cache_dir, unreachable: UnreachableError) -> Path:
    try:
        snapshot = Path(
            snapshot_download(repo_id, revision=revision, local_files_only=True, cache_dir=cache_dir, **_patterns(path))
        )
    except OSError:
        raise unreachable from None
    files = [file for file in sorted(snapshot.rglob("*")) if file.is_file()]
    wrong = [str(file.relative_to(snapshot)) for file in files if not _is_intact(file)]
    if wrong:
        raise HubError(f"{', '.join(wrong)} of {repo_id} in the local cache is damaged; pull again with a connection.")
    logger.warning(f"The Hub was not asked; {repo_id} comes from the local cache, commit {snapshot.name}.")
    return snapshot


def _is_intact(file: Path) -> bool:
    """Whether a file in the cache has the hash that its blob is named after."""
    # The blob may itself be a link to a store that repositories share, whose file names are not hashes.
    name = Path(os.readlink(file)).name if file.is_symlink() else ""
    kind = {64: "sha256", 40: "git"}.get(len(name))
    return kind is None or file_digest(file, kind) == f"{kind}:{name}"


def _forget(snapshot: Path, names: list[str]) -> None:
    for name in names:
        link = snapshot / name
        while link.is_symlink():
            target = link.parent / os.readlink(link)
            link.unlink()
            link = target
        link.unlink(missing_ok=True)
