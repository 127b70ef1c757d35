"""
Publishing a checkpoint on the Hub: one commit that holds exactly what a user needs, checked after it has happened.

    push("outputs/cifar10", "me/liere8-cifar10")    # or: hf-liere push outputs/cifar10 me/liere8-cifar10

The checkpoint is loaded and saved anew into a folder of its own (`stage`), so the repository gets safetensors, a
configuration whose `auto_map` is complete and the code that belongs to it, but no optimizer states or stray files. That
folder becomes one commit on top of the commit that was seen last; a commit of someone else in between is reported
instead of overwritten. What the Hub then lists is compared with the local hashes. The commit is downloaded; a process
without this package, tokens and connection loads it and has to give the same outputs.

`verify` stages a folder, too, and compares a repository with what would be pushed, before any code of it may run.
"""

import hashlib
import os
import site
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.utils import logging

from ..storage.client import (
    HubError,
    remote_digests,
    retrying,
    status_of,
    token_of,
    translate_hub_errors,
    wait_to_retry,
)
from ..storage.saved_weights import differing_files, file_digest, saved_weights_digest
from . import reload_check
from .cards import Card
from .contents import differences, require_known_code, require_same_weights
from .pulling import pull
from .staging import REPLACED, refuse_private, secret_scanner, stage


logger = logging.get_logger(__name__)

# What the process that runs the code of a commit gets of the environment, which may contain secrets under any name.
PASSED_VARIABLES = (
    *("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "SYSTEMROOT"),
    *("LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "TEMP", "TMP", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
)
# Outputs of two processes with the same weights and code: only the order of float32 sums may differ.
SAME_OUTPUTS = {"rtol": 1e-4, "atol": 1e-5}


@dataclass(frozen=True)
class Published:
    """
    A commit whose files were found on the Hub with the hashes they have here.

    `left` are other files of the repository; `reloaded` says whether a process without this package loaded the model
    and got the same outputs. An adapter is never loaded: that takes its base model.
    """

    repo_id: str
    commit: str
    url: str
    files: tuple[str, ...]
    left: tuple[str, ...] = ()
    reloaded: bool = False

    def __str__(self):
        checks = "hashes compared, " + ("loaded in a process of its own" if self.reloaded else "not loaded")
        left = f"; left there as they were: {', '.join(self.left)}" if self.left else ""
        return f"{self.url}: {len(self.files)} files, {checks}{left}"


class ConcurrentCommitError(HubError):
    """Someone else has committed since the commit that a push was based on; nothing was written."""


def push(
    folder: str | Path,
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
    Publish a saved model or adapter as one commit, and check what the Hub then holds.

    Args:
        folder: As for [`stage`]; its README.md is the card, unless `card` is given.
        repo_id, revision: Repository and branch, made if they do not exist.
        card: What [`cards.render`] makes of facts.
        message: Title of the commit.
        private: Whether a repository that is made here is private; `None` means as the account is set.
        parent_commit: The commit this push must come directly after; `None` means the newest.
        max_shard_size: Larger weights are split.
        reload: Whether the commit is downloaded and a process without this package loads it.
        api: Client with endpoint and token; `None` means those of the environment.

    Returns:
        The commit; where the branch holds the same files already, the one that is there.

    Raises:
        ValueError: before anything is sent: no card, private data, or not a complete model.
        ConcurrentCommitError: if someone else committed meanwhile.
        HubError: for whatever else the Hub refused, and if it does not hold or load what was sent.
    """
    api, folder = api or HfApi(), Path(folder)
    # Where it is missing, this is known before a large model is read.
    secret_scanner()
    with tempfile.TemporaryDirectory(prefix="hf_liere-") as temporary:
        staged = Path(temporary) / "checkpoint"
        model = stage(folder, staged, max_shard_size)
        card = card or Card.read(folder, saved_weights_digest(folder))
        card.write(staged)
        refuse_private(staged, api, [folder.resolve(), Path(temporary)])
        kind = "rotations" if model is None else type(model).__name__
        options = {"revision": revision, "private": private, "parent_commit": parent_commit, "api": api}
        published = publish(staged, repo_id, message=message or f"Publish {kind}", **options)
        if reload and model is not None:
            pulled = pull(repo_id, revision=published.commit, api=api, cache_dir=Path(temporary) / "hub")
            published = check_reload(model, published, pulled.folder)
    if card.license is None:
        logger.warning(
            "No licence was chosen for these weights, and the card says so; `hf-liere push --license NAME`, "
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
    Make a folder, as it is, one commit, and compare what the Hub lists with it.

    Weights, code, records, states and checkpoint folders in the repository that are not in the folder go with the same
    commit; other files there stay.

    Raises:
        ConcurrentCommitError, HubError: as [`push`].
    """
    api, folder = api or HfApi(), Path(folder)
    with translate_hub_errors(api, repo_id, revision):
        repo_id = ensure_repository(api, repo_id, private)
        if revision != "main":
            retrying(lambda: api.create_branch(repo_id, branch=revision, exist_ok=True))
        head = retrying(lambda: api.model_info(repo_id, revision=revision)).sha
        if parent_commit is not None and not head.startswith(parent_commit):
            raise ConcurrentCommitError(_concurrent(api, repo_id, revision, parent_commit))
        present = retrying(lambda: remote_digests(api, repo_id, head))
        files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        others = [name for name in present if name not in files and name != ".gitattributes"]
        obsolete = [name for name in others if REPLACED.search(name)]
        if obsolete or differing_files(folder, files, present):
            commit = commit_once(api, repo_id, files, obsolete, message, revision, head)
        else:
            logger.info(f"{repo_id} holds these files already, as commit {head}.")
            commit = head
        left = tuple(name for name in others if name not in obsolete)
        published = Published(repo_id, commit, f"{api.endpoint}/{repo_id}/tree/{commit}", tuple(files), left)
        compare(folder, published, api)
    return published


def ensure_repository(api: HfApi, repo_id: str, private: bool | None) -> str:
    """
    Make a repository, unless it exists; returns its name with its owner.

    Raises:
        HubError: without a token, with one that can only read, or if a private repository is asked for and this one
            exists and is public.
    """
    if token_of(api) is None:
        raise HubError(
            f"There is no token to push to {repo_id} on {api.endpoint}: run `hf auth login`, or set HF_TOKEN."
        )
    account = retrying(api.whoami)
    role = ((account.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise HubError(
            f"The token of {account['name']} on {api.endpoint} is read-only; pushing to {repo_id} takes one that may "
            "write."
        )
    repo_id = retrying(lambda: api.create_repo(repo_id, private=private, exist_ok=True)).repo_id
    if private and not retrying(lambda: api.model_info(repo_id)).private:
        raise HubError(
            f"{repo_id} on {api.endpoint} exists already and is public; make it private there, or push to another."
        )
    return repo_id


def commit_once(
    api: HfApi,
    repo_id: str,
    files: Mapping[str, Path],
    obsolete: Iterable[str],
    message: str,
    revision: str,
    parent: str,
) -> str:
    """
    The hash of one commit on top of `parent`, also where an answer of the Hub gets lost.

    The client does not repeat commits. Before repeating one, the history since `parent` is searched for it: the
    description holds a hash of what is committed.

    Raises:
        ConcurrentCommitError: if the branch has moved, and not by this commit.
    """
    contents = hashlib.sha256()
    for name, path in files.items():
        contents.update(f"{name} {file_digest(path, 'sha256')}\n".encode())
    description = f"Contents sha256:{contents.hexdigest()}"
    attempt = 0
    while True:
        attempt += 1
        operations = [CommitOperationAdd(name, path) for name, path in files.items()]
        operations += [CommitOperationDelete(name, is_folder=False) for name in obsolete]
        try:
            return api.create_commit(
                repo_id,
                operations,
                commit_message=message,
                commit_description=description,
                revision=revision,
                parent_commit=parent,
            ).oid
        except Exception as error:
            if status_of(error) != 412:
                wait_to_retry(error, attempt)
        landed = _commits_since(api, repo_id, revision, parent)
        for commit in landed:
            if (commit.title, commit.message) == (message, description):
                return commit.commit_id
        if landed:
            raise ConcurrentCommitError(_concurrent(api, repo_id, revision, parent))


def _commits_since(api: HfApi, repo_id: str, revision: str, parent: str) -> list:
    commits = retrying(lambda: api.list_repo_commits(repo_id, revision=revision))
    ids = [commit.commit_id for commit in commits]
    return commits[: ids.index(parent)] if parent in ids else commits


def _concurrent(api: HfApi, repo_id: str, revision: str, parent: str) -> str:
    newer = _commits_since(api, repo_id, revision, parent)
    shown = ", ".join(f"{commit.commit_id[:8]} {commit.title!r} by {', '.join(commit.authors)}" for commit in newer[:3])
    return (
        f"{repo_id} ({revision}) has moved on from commit {parent[:8]}: {shown}. Nothing was written; look at what is "
        "there and push again."
    )


def compare(folder: Path, published: Published, api: HfApi) -> None:
    """Raises [`HubError`] unless the Hub lists every file of the commit with the hash that it has in the folder."""
    listed = retrying(lambda: remote_digests(api, published.repo_id, published.commit))
    wrong = differing_files(folder, published.files, listed)
    if wrong:
        raise HubError(
            f"{published.repo_id} at {published.commit} does not hold what was pushed: {', '.join(wrong)} missing or "
            "different. Push again."
        )


def check_reload(model: PreTrainedModel, published: Published, folder: Path) -> Published:
    """
    Load the files of a commit in a process of its own, which runs their code and gets neither tokens nor a connection
    to the Hub, and compare its outputs; returns the commit marked as `reloaded`.

    Raises:
        HubError: if it does not load, or gives other outputs than the model here.
    """
    with tempfile.TemporaryDirectory(prefix="hf_liere-") as home:
        output = Path(home) / "outputs.safetensors"
        environment = {name: value for name, value in os.environ.items() if name.upper() in PASSED_VARIABLES}
        # Libraries that a user has installed for herself lie in her home.
        environment |= {"HOME": home, "HF_HOME": home, "HF_HUB_OFFLINE": "1", "PYTHONUSERBASE": site.getuserbase()}
        # Passed as text: run as a file, its folder would come first on the path and shadow modules of the same names.
        source = Path(reload_check.__file__).read_text(encoding="utf-8")
        command = [sys.executable, "-c", source, str(folder.resolve()), str(output)]
        process = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True)
        if process.returncode:
            reason = "\n".join(process.stderr.strip().splitlines()[-3:])
            raise HubError(f"{published.url} does not load: {reason}")
        theirs = load_file(output)
    ours = reload_check.outputs(model)
    different = [name for name in ours.keys() | theirs.keys() if not _close(ours.get(name), theirs.get(name))]
    if different:
        raise HubError(f"{published.url} gives other outputs than the model here: {different}.")
    return replace(published, reloaded=True)


def _close(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None or first.shape != second.shape:
        return False
    return torch.allclose(first, second, **SAME_OUTPUTS)


def verify(
    folder: str | Path, repo_id: str, *, revision: str = "main", run: bool = False, api: HfApi | None = None
) -> Published:
    """
    Compare a repository with what [`push`] would make of a folder: code, tensors, configuration, processor and records.

    Code may also be that of the folder itself, which another version of this package has saved.

    Args:
        folder, repo_id, revision: As for [`push`].
        run: Whether the model is loaded then, as [`check_reload`] does, with the code that was compared.

    Raises:
        HubError: which names what differs, or if the repository does not load or gives other outputs.
        ValueError: before anything is asked of the Hub, if the folder holds nothing that could be pushed.
    """
    api, folder = api or HfApi(), Path(folder)
    with tempfile.TemporaryDirectory(prefix="hf_liere-") as temporary:
        staged = Path(temporary) / "staged"
        model = stage(folder, staged)
        pulled = pull(repo_id, revision=revision, api=api, cache_dir=Path(temporary) / "hub")
        place = f"{repo_id} at {pulled.commit}"
        coded = require_known_code(pulled.folder, (staged, folder), place)
        require_same_weights(staged, pulled.folder, place)
        if differing := differences(staged, coded, pulled.folder, model and type(model.config)):
            raise HubError(f"{place} is not what a push of {folder} would make of it: {'; '.join(differing)}.")
        paths = sorted(path for path in pulled.folder.rglob("*") if path.is_file())
        files = tuple(path.relative_to(pulled.folder).as_posix() for path in paths)
        url = f"{api.endpoint}/{repo_id}/tree/{pulled.commit}"
        published = Published(repo_id, pulled.commit, url, files)
        if run and model is not None:
            published = check_reload(model, published, pulled.folder)
    return published
