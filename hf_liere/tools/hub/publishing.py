"""
Publishing a checkpoint on the Hub: one commit with exactly what a user needs, checked afterwards.

    push("outputs/cifar10", "me/liere8-cifar10")    # or: hf-liere push outputs/cifar10 me/liere8-cifar10

`stage` loads the checkpoint and saves it again into a new folder: safetensors, a configuration with a complete
`auto_map` and its code, but no optimizer states or stray files. That folder becomes one commit on top of the newest
known commit; a commit by someone else in between is reported, not overwritten. The Hub's hashes are compared with the
local ones. A process without this package, tokens or a connection must load the commit and give the same outputs.

`verify` also stages a folder, and compares a repository with it before any code of the repository may run.
"""

import hashlib
import os
import re
import site
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.utils import logging

from ...storage.client import (
    HubError,
    retry,
    status_code,
    token_in_use,
    translate_hub_errors,
    wait_to_retry,
)
from ...storage.saved_model import ModelFolder, SavedModel, file_digest
from . import reload_check
from .cards import Card, has_card, push_card
from .contents import differences, obsolete_files, require_known_code, require_same_weights
from .pulling import files_by_name, pull, remote_digests
from .staging import refuse_private, secret_scanner, stage, write_code_for


logger = logging.get_logger(__name__)

# The environment variables that the process with the commit's code receives; any other could contain a secret.
PASSED_VARIABLES = (
    *("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "SYSTEMROOT"),
    *("LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "TEMP", "TMP", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
)
# Between processes with the same weights and code, only the order of float32 sums may differ.
SAME_OUTPUTS = {"rtol": 1e-4, "atol": 1e-5}


@dataclass(frozen=True)
class Published:
    """
    A commit whose files have the same hashes on the Hub and here.

    `left` lists the other files of the repository; `reloaded` is true if a process without this package loaded the
    model and got the same outputs. Adapters are not loaded, because that takes their base model.
    """

    repo_id: str
    commit: str
    url: str
    files: tuple[str, ...]
    left: tuple[str, ...] = ()
    reloaded: bool = False

    def __str__(self) -> str:
        checks = "hashes compared, " + ("loaded in a separate process" if self.reloaded else "not loaded")
        left = f"; left unchanged: {', '.join(self.left)}" if self.left else ""
        return f"{self.url}: {len(self.files)} files, {checks}{left}"


class ConcurrentCommitError(HubError):
    """The branch has newer commits than the one that a push was based on; nothing was written."""


def push(
    folder: ModelFolder,
    repo_id: str,
    *,
    card: Card | None = None,
    revision: str = "main",
    message: str | None = None,
    private: bool | None = None,
    parent_commit: str | None = None,
    max_shard_size: str | int = "5GB",
    reload: bool = True,
    api: HfApi | None = None,
) -> Published:
    """
    Publish a saved model or adapter as one commit, and check the result on the Hub.

    Args:
        folder: As for [`stage`]; its README.md is the card, else that of [`push_card`], unless `card` is given.
        repo_id, revision: Repository and branch, created if missing.
        card: Output of [`cards.render_card`].
        message: Title of the commit.
        private: Whether a new repository is private; `None` means the account's default.
        parent_commit: The required parent of the new commit; `None` means the newest commit.
        max_shard_size: Larger weights are split.
        reload: Whether to download the commit and load it in a process without this package.
        api: Client with endpoint and token; `None` means the environment's.

    Returns:
        The commit; if the branch already contains the same files, its newest commit.

    Raises:
        ValueError: before anything is sent: private data, or not a complete model.
        ConcurrentCommitError: if someone else committed meanwhile.
        HubError: if the Hub refuses a request, or the commit's files differ or do not load.
    """
    api, saved = api or HfApi(), SavedModel.at(folder)
    # Fail early if the scanner is missing, before reading a large model.
    secret_scanner()
    with tempfile.TemporaryDirectory(prefix="hf_liere-") as temporary:
        staged, model = stage(saved, Path(temporary) / "checkpoint", max_shard_size)
        card = card or (Card.read(saved) if has_card(saved) else push_card(saved, repo_id))
        card.require_weights(saved)
        card.write(staged.folder)
        refuse_private(staged.folder, api, [saved.folder.resolve(), Path(temporary)])
        kind = "rotations" if model is None else type(model).__name__
        options = {"revision": revision, "private": private, "parent_commit": parent_commit, "api": api}
        published = publish(staged.folder, repo_id, message=message or f"Publish {kind}", **options)
        if reload and model is not None:
            pulled = pull(repo_id, revision=published.commit, api=api, cache_dir=Path(temporary) / "hub")
            published = check_reload(model, published, pulled.folder)
    if card.license is None:
        logger.warning(
            "No licence was chosen for these weights, as the card says; `hf-liere push --license NAME`, "
            "--hub_license in training or `license` in the facts chooses one."
        )
    return published


def publish(
    folder: str | Path,
    repo_id: str,
    *,
    message: str,
    revision: str = "main",
    private: bool | None = None,
    parent_commit: str | None = None,
    api: HfApi | None = None,
) -> Published:
    """
    Commit a folder unchanged, and compare the Hub's list of files with it. The same commit deletes weights, code,
    records, states and checkpoint folders of earlier pushes. Raises the errors of the Hub that [`push`] raises.
    """
    api = api or HfApi()
    with translate_hub_errors(api, repo_id, revision):
        repo_id = ensure_repository(api, repo_id, private)
        if revision != "main":
            retry(lambda: api.create_branch(repo_id, branch=revision, exist_ok=True))
        head = retry(lambda: api.model_info(repo_id, revision=revision)).sha
        if parent_commit is not None and not head.startswith(parent_commit):
            newer = _commits_since(api, repo_id, revision, parent_commit)
            raise _has_moved_on(repo_id, revision, parent_commit, newer)
        present = retry(lambda: remote_digests(api, repo_id, head))
        # The client hashes each file here, and reads it once more to send it.
        files = {name: CommitOperationAdd(name, path) for name, path in files_by_name(Path(folder)).items()}
        obsolete = _obsolete_files(api, repo_id, head, present, files)
        # The client makes no commit if nothing changes.
        commit = commit_once(api, repo_id, files, obsolete, message, revision, head)
        left = tuple(name for name in present if name not in (*files, *obsolete, ".gitattributes"))
        published = Published(repo_id, commit, f"{api.endpoint}/{repo_id}/tree/{commit}", tuple(files), left)
        listed = retry(lambda: remote_digests(api, repo_id, commit))
        if wrong := [name for name, file in files.items() if not _has_digest(file, listed.get(name, ""))]:
            raise HubError(f"{repo_id} at {commit} differs from the push: {', '.join(wrong)}. Push again.")
    return published


def _has_digest(file: CommitOperationAdd, digest: str) -> bool:
    if digest.startswith("git:"):
        return digest == file_digest(Path(str(file.path_or_fileobj)), "git")
    return digest == f"sha256:{file.upload_info.sha256.hex()}"


def _obsolete_files(api: HfApi, repo_id: str, commit: str, names: Iterable[str], pushed: Collection[str]) -> list[str]:
    """[`obsolete_files`] of a commit, whose code and configurations are only downloaded if code would be left over."""
    with tempfile.TemporaryDirectory() as folder:
        if any(re.fullmatch(r"[^/]+\.py", name) for name in names if name not in pushed):
            wanted = [name for name in names if re.fullmatch(r"[^/]+\.py|[^/]*config\.json", name)]
            retry(lambda: api.snapshot_download(repo_id, revision=commit, allow_patterns=wanted, local_dir=folder))
        return obsolete_files(names, pushed, SavedModel(folder))


def ensure_repository(api: HfApi, repo_id: str, private: bool | None) -> str:
    """
    Create a repository unless it exists; returns its name with its owner. Raises [`HubError`] without a token that may
    write, or if `private` is true and the repository exists and is public.
    """
    if token_in_use(api) is None:
        raise HubError(f"No token to push to {repo_id} on {api.endpoint}: run `hf auth login`, or set HF_TOKEN.")
    account = retry(api.whoami)
    role = ((account.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise HubError(
            f"The token of {account['name']} on {api.endpoint} is read-only; pushing to {repo_id} needs write access."
        )
    repo_id = retry(lambda: api.create_repo(repo_id, private=private, exist_ok=True)).repo_id
    if private and not retry(lambda: api.model_info(repo_id)).private:
        raise HubError(
            f"{repo_id} on {api.endpoint} exists already and is public; make it private there, or push to another."
        )
    return repo_id


def commit_once(
    api: HfApi,
    repo_id: str,
    files: Mapping[str, CommitOperationAdd],
    obsolete: Iterable[str],
    message: str,
    revision: str,
    parent: str,
) -> str:
    """
    Make exactly one commit on top of `parent`, even if the Hub's answer gets lost; returns its hash. Raises
    [`ConcurrentCommitError`] if the branch has another newer commit.

    The client does not retry commits. Before retrying, search the history since `parent` for the commit, whose
    description contains a hash of its files.
    """
    contents = hashlib.sha256()
    for name, file in files.items():
        contents.update(f"{name} sha256:{file.upload_info.sha256.hex()}\n".encode())
    description = f"Contents sha256:{contents.hexdigest()}"
    attempt = 0
    while True:
        attempt += 1
        try:
            return api.create_commit(
                repo_id,
                [*files.values(), *(CommitOperationDelete(name, is_folder=False) for name in obsolete)],
                commit_message=message,
                commit_description=description,
                revision=revision,
                parent_commit=parent,
            ).oid
        except Exception as error:
            if status_code(error) != 412:
                wait_to_retry(error, attempt)
        landed = _commits_since(api, repo_id, revision, parent)
        for commit in landed:
            if (commit.title, commit.message) == (message, description):
                return commit.commit_id
        if landed:
            raise _has_moved_on(repo_id, revision, parent, landed)


def _commits_since(api: HfApi, repo_id: str, revision: str, parent: str) -> list:
    commits = retry(lambda: api.list_repo_commits(repo_id, revision=revision))
    ids = [commit.commit_id for commit in commits]
    return commits[: ids.index(parent)] if parent in ids else commits


def _has_moved_on(repo_id: str, revision: str, parent: str, newer: list) -> ConcurrentCommitError:
    shown = ", ".join(f"{commit.commit_id[:8]} {commit.title!r} by {', '.join(commit.authors)}" for commit in newer[:3])
    return ConcurrentCommitError(
        f"{repo_id} ({revision}) has moved on from commit {parent[:8]}: {shown}. Nothing was written; look at what is "
        "there and push again."
    )


def check_reload(model: PreTrainedModel, published: Published, folder: Path) -> Published:
    """
    Load a commit in a separate process, which runs its code without tokens or a connection to the Hub; returns the
    commit marked as `reloaded`. Raises [`HubError`] if it does not load, or gives other outputs than the model here.
    """
    with tempfile.TemporaryDirectory(prefix="hf_liere-") as home:
        output = Path(home) / "outputs.safetensors"
        environment = {name: value for name, value in os.environ.items() if name.upper() in PASSED_VARIABLES}
        # Libraries installed for one user are in the home directory.
        environment |= {"HOME": home, "HF_HOME": home, "HF_HUB_OFFLINE": "1", "PYTHONUSERBASE": site.getuserbase()}
        # Passed as text: running the file would put its folder first on the path and shadow modules of the same names.
        source = Path(reload_check.__file__).read_text(encoding="utf-8")
        command = [sys.executable, "-c", source, str(folder.resolve()), str(output)]
        process = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True)
        if process.returncode:
            reason = "\n".join(process.stderr.strip().splitlines()[-3:])
            raise HubError(f"{published.url} does not load: {reason}")
        theirs = load_file(output)
    try:
        torch.testing.assert_close(theirs, reload_check.outputs(model), **SAME_OUTPUTS)
    except AssertionError as error:
        found = " ".join(str(error).split())
        raise HubError(f"{published.url} gives other outputs than the model here: {found}") from None
    return replace(published, reloaded=True)


def verify(
    folder: ModelFolder, repo_id: str, *, revision: str = "main", run: bool = False, api: HfApi | None = None
) -> Published:
    """
    Compare a repository with what [`push`] would write: code, tensors, configuration, processor and records.

    The code may also be the folder's own, saved by another version of this package.

    Args:
        folder, repo_id, revision: As for [`push`].
        run: Whether to also load the model with the compared code, as [`check_reload`] does.

    Raises:
        HubError: naming the differences, or if the repository does not load or gives other outputs.
        ValueError: before any request, if the folder contains nothing that could be pushed.
    """
    api, saved = api or HfApi(), SavedModel.at(folder)
    with tempfile.TemporaryDirectory(prefix="hf_liere-") as temporary:
        staged, model = stage(saved, Path(temporary) / "staged")
        pulled = pull(repo_id, revision=revision, api=api, cache_dir=Path(temporary) / "hub")
        place = f"{repo_id} at {pulled.commit}"
        theirs = SavedModel(pulled.folder)
        written = write_code_for(theirs, Path(temporary) / "written")
        coded = require_known_code(theirs, (staged, saved, *written), place)
        require_same_weights(staged, theirs, place)
        if differing := differences(staged, coded, theirs, model and type(model.config)):
            raise HubError(f"{place} differs from what a push of {saved} would write: {'; '.join(differing)}.")
        url = f"{api.endpoint}/{repo_id}/tree/{pulled.commit}"
        published = Published(repo_id, pulled.commit, url, tuple(files_by_name(pulled.folder)))
        if run and model is not None:
            published = check_reload(model, published, pulled.folder)
    return published
