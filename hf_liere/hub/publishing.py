"""
Publishing a checkpoint on the Hub: one commit that holds exactly what a user needs, checked after it has happened.

    push("outputs/cifar10", "me/liere8-cifar10")    # or: hf-liere push outputs/cifar10 me/liere8-cifar10

The checkpoint is loaded and saved anew into a folder of its own (`stage`), so the repository gets safetensors, a
configuration whose `auto_map` is complete and the code that belongs to it, but no optimizer states or stray files. That
folder becomes one commit on top of the commit that was seen last; a commit of someone else in between is reported
instead of overwritten. What the Hub then lists is compared with the local hashes, and a process without this package
loads the commit and has to give the same outputs.
"""

import hashlib
import json
import os
import re
import shutil
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

from ..auto import model_class
from ..models.rotary_patch import RotaryPatchConfig
from ..storage.client import (
    HubError,
    explained,
    file_digest,
    remote_digests,
    retrying,
    status_of,
    token_of,
    wait_to_retry,
    without_tokens,
)
from ..storage.saved_weights import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    first_line,
    read_json,
    require_finite,
    require_folder,
    saved_names,
    saved_weights_digest,
    weight_files,
    weights_digest,
)
from . import reload_check
from .cards import PICTURE, Card
from .checked_facts import CONVERSION_FILE
from .pulling import Pulled, pull


logger = logging.get_logger(__name__)

PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
)
RECORD_FILES = (
    "run_config.json",
    "environment.json",
    "weights.json",
    "all_results.json",
    "eval_results.json",
    "train_results.json",
    CONVERSION_FILE,
)
VIDEO_PROCESSOR = "video_processing_liere.LieREVideoProcessor"
# What earlier pushes of ours or of Trainer may have left in a repository and must not stay beside new weights, as do
# records, which tell of other weights.
REPLACED = re.compile(
    r"^(last-checkpoint|checkpoint-\d+|runs)/|^(pytorch_model|model|adapter_model|rotary)[^/]*\.(bin|safetensors|json)$"
    r"|^(training_args|optimizer|scheduler|scaler)\.(bin|pt)$|^rng_state[^/]*\.pth$|^trainer_state\.json$"
    r"|^(modeling|configuration|video_processing)_[a-z_]+\.py$|^(video_)?preprocessor_config\.json$"
    rf"|^({'|'.join(map(re.escape, (*RECORD_FILES, PICTURE)))})$"
)
PRIVATE = re.compile(r"\bhf_[A-Za-z0-9]{20,}")
# The code that travels with checkpoints.
MODELS_FOLDER = Path(__file__).resolve().parents[1] / "models"
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


def stage(folder: str | Path, target: str | Path, max_shard_size: str | int = "5GB") -> PreTrainedModel | None:
    """
    Write what is to be published of a saved model, complete or adapter alone, into another folder.

    Args:
        folder: Output of a training script, of `hf-liere convert`, of `save_pretrained` or of `save_rotary`.
        target: Folder that is made, without a card.
        max_shard_size: Larger weights are split into several files.

    Returns:
        The model as it was loaded; `None` for an adapter.

    Raises:
        ValueError: if the folder holds none of our models, its weights are not exactly those of its configuration, or
            a value of them or a file beside them means nothing.
    """
    folder, target = Path(folder), Path(target)
    require_finite(folder)
    target.mkdir(parents=True, exist_ok=True)
    if (folder / ADAPTER_CONFIG).is_file():
        model = None
        names = [ADAPTER_CONFIG, ADAPTER_WEIGHTS]
        check_adapter(folder)
    else:
        model, names = load_complete(folder), []
        model.save_pretrained(target, max_shard_size=max_shard_size)
        if saved_weights_digest(folder) != saved_weights_digest(target):
            raise ValueError(
                f"Loading and saving changes the weights in {folder}, so figures measured with them would not be "
                "those of what is published. Save the loaded model with save_pretrained and evaluate that."
            )
    for name in (*names, *PROCESSOR_FILES, *RECORD_FILES):
        if (folder / name).exists():
            if name.endswith(".json"):
                read_json(folder / name)
            try:
                shutil.copyfile(folder / name, target / name)
            except OSError as error:
                raise ValueError(f"{folder / name} cannot be read: {error.strerror}.") from None
    complete_video_processor(target)
    return model


def check_adapter(folder: Path) -> None:
    """
    Make sure that an adapter holds the generators that its configuration speaks of.

    Raises:
        ValueError: if its configuration means nothing, or tensors belong to no vision tower of it.
    """
    content, place = read_json(folder / ADAPTER_CONFIG), folder / ADAPTER_CONFIG
    base, patch = content.get("base"), content.get("rotary_patch")
    if not isinstance(base, list) or not base or not isinstance(patch, dict):
        raise ValueError(f"{place} was not written by save_rotary: it names no rotary_patch or no base.")
    try:
        RotaryPatchConfig.from_dict(patch)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place} holds no rotations of ours: {error}") from None
    names = saved_names(folder)
    found = {name.partition(".")[0] for name in names}
    if found != {str(index) for index in range(len(base))}:
        raise ValueError(
            f"{folder / ADAPTER_WEIGHTS} holds {', '.join(sorted(names)) or 'no tensors'}; {ADAPTER_CONFIG} speaks of "
            f"{len(base)} vision towers."
        )


def load_complete(folder: Path) -> PreTrainedModel:
    """
    The model in a folder, each of its weights accounted for.

    Raises:
        ValueError: if it is none of ours or cannot be loaded, or tensors are missing, left over or of another shape.
    """
    require_folder(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds neither config.json nor {ADAPTER_CONFIG}: it is no saved model.")
    weight_files(folder)
    architectures = read_json(folder / "config.json").get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else architectures
    loader = model_class(str(named))
    try:
        model, info = loader.from_pretrained(folder, output_loading_info=True)
    except Exception as error:
        # A strict configuration, a shape that no module has, a file cut off: each raises errors of its own.
        raise ValueError(f"{folder} does not load as {named}: {first_line(error)}") from None
    wrong = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
    if wrong:
        raise ValueError(f"The weights in {folder} are not those of its configuration: {wrong}.")
    return model


def complete_video_processor(folder: Path) -> None:
    """Put the code of the video processor beside a processor file that names it, and say so there."""
    path = folder / "video_preprocessor_config.json"
    if not path.is_file():
        return
    content = read_json(path)
    if content.get("video_processor_type") == VIDEO_PROCESSOR.rpartition(".")[2]:
        path.write_text(json.dumps(content | {"auto_map": {"AutoVideoProcessor": VIDEO_PROCESSOR}}, indent=2) + "\n")
        code = VIDEO_PROCESSOR.partition(".")[0] + ".py"
        shutil.copyfile(MODELS_FOLDER / code, folder / code)


def refuse_private(folder: Path, api: HfApi, places: Iterable[Path] = ()) -> None:
    """
    Make sure that no text file to be published holds a token or a folder of this machine.

    Raises:
        ValueError: which names the file, not what was found.
    """
    secrets = {"a token": [token for token in [token_of(api)] if token]}
    secrets["a folder of this machine"] = [str(place) for place in (Path.home(), *places) if len(place.parts) > 2]
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.suffix not in (".json", ".md", ".txt", ".py", ".yaml"):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{path.relative_to(folder)} is no text in UTF-8, so nothing was published.") from None
        found = [what for what, texts in secrets.items() if any(secret in text for secret in texts)]
        if PRIVATE.search(text):
            found.append("a token")
        if found:
            raise ValueError(f"{path.relative_to(folder)} holds {found[0]}, so nothing was published; remove it there.")


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
        repo_id: Repository, made if it does not exist.
        card: What [`cards.render`] makes of facts.
        revision: Branch, made if it does not exist.
        message: Title of the commit.
        private: Whether a repository that is made here is private; `None` means as the account is set.
        parent_commit: The commit this push must come directly after; `None` means the newest.
        max_shard_size: Larger weights are split.
        reload: Whether a process without this package loads the commit (it downloads everything once).
        api: Client with endpoint and token; `None` means those of the environment.

    Returns:
        The commit; where the branch holds the same files already, the one that is there.

    Raises:
        ValueError: before anything is sent: no card, private data, or not a complete model.
        ConcurrentCommitError: if someone else committed meanwhile.
        HubError: for whatever else the Hub refused, and if it does not hold or load what was sent.
    """
    api, folder = api or HfApi(), Path(folder)
    with tempfile.TemporaryDirectory(prefix="hf_liere-") as temporary:
        staged = Path(temporary) / "checkpoint"
        model = stage(folder, staged, max_shard_size)
        card = card or Card.read(folder, saved_weights_digest(folder))
        card.write(staged)
        refuse_private(staged, api, [folder.resolve(), Path(temporary)])
        kind = "rotations" if model is None else type(model).__name__
        published = publish(
            staged,
            repo_id,
            message=message or f"Publish {kind}",
            revision=revision,
            private=private,
            parent_commit=parent_commit,
            api=api,
        )
        if reload and model is not None:
            check_reload(model, published, api)
            published = replace(published, reloaded=True)
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
    with explained(api, repo_id, revision):
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
        if obsolete or differing_files_on_hub(files, present):
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
    Make a repository, unless it exists; its name with its owner.

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


def differing_files_on_hub(files: Mapping[str, Path], digests: Mapping[str, str]) -> list[str]:
    """Names of local files that the Hub does not hold, or holds with another hash."""
    return [
        name
        for name, path in files.items()
        if name not in digests or file_digest(path, digests[name].partition(":")[0]) != digests[name]
    ]


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
    wrong = differing_files_on_hub({name: folder / name for name in published.files}, listed)
    if wrong:
        raise HubError(
            f"{published.repo_id} at {published.commit} does not hold what was pushed: {', '.join(wrong)} missing or "
            "different. Push again."
        )


def check_reload(model: PreTrainedModel, published: Published, api: HfApi) -> None:
    """
    Load a commit in a process of its own, with an empty cache and the code of the commit, and compare its outputs.

    Raises:
        HubError: if it does not load, or gives other outputs than the model here.
    """
    with tempfile.TemporaryDirectory(prefix="hf_liere-") as home:
        output = Path(home) / "outputs.safetensors"
        environment = {**os.environ, "HF_HOME": home, "HF_ENDPOINT": api.endpoint, "HF_HUB_OFFLINE": "0"}
        for name in ("HF_HUB_CACHE", "HF_MODULES_CACHE", "HF_XET_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN"):
            environment.pop(name, None)
        token = token_of(api)
        if token:
            environment["HF_TOKEN"] = token
        # As text, because the folder of a script comes first on the path, and ours has modules of common names.
        source = Path(reload_check.__file__).read_text(encoding="utf-8")
        command = [sys.executable, "-c", source, published.repo_id, published.commit, str(output)]
        process = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True)
        if process.returncode:
            reason = "\n".join(process.stderr.strip().splitlines()[-3:])
            raise HubError(f"{published.url} was written but does not load: {without_tokens(api, reason)}")
        theirs = load_file(output)
    ours = reload_check.outputs(model)
    different = [name for name in ours.keys() | theirs.keys() if not _close(ours.get(name), theirs.get(name))]
    if different:
        raise HubError(f"{published.url} was written but gives other outputs than the model here: {different}.")


def _close(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None or first.shape != second.shape:
        return False
    return torch.allclose(first, second, **SAME_OUTPUTS)


def verify(folder: str | Path, repo_id: str, *, revision: str = "main", api: HfApi | None = None) -> Published:
    """
    Compare a published model or adapter with the local one: every tensor, then the outputs of a clean reload.

    Raises:
        HubError: if weights, processor or the configuration of an adapter differ, or the repository does not load or
            gives other outputs.
        ValueError: before anything is asked of the Hub, if the folder holds none of our models.
    """
    api, folder = api or HfApi(), Path(folder)
    ours = saved_weights_digest(folder)
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    model = check_adapter(folder) if is_adapter else load_complete(folder)
    with tempfile.TemporaryDirectory(prefix="hf_liere-") as temporary:
        pulled = pull(
            repo_id, Path(temporary) / "pulled", revision=revision, api=api, cache_dir=Path(temporary) / "hub"
        )
        commit = pulled.commit
        try:
            theirs = saved_weights_digest(pulled.folder)
        except ValueError:
            raise HubError(f"{repo_id} at {commit} holds no weights that can be read.") from None
        if ours != theirs:
            raise HubError(f"{repo_id} at {commit} holds other weights ({theirs[:12]}…) than {folder} ({ours[:12]}…).")
        # Outputs say nothing of how images become pixels, and those of an adapter nothing of its configuration.
        names = (ADAPTER_CONFIG, *PROCESSOR_FILES) if is_adapter else PROCESSOR_FILES
        if other := [name for name in names if (folder / name).is_file() and not _same_settings(folder, pulled, name)]:
            raise HubError(f"{repo_id} at {commit} holds no or another {', '.join(other)} than {folder}.")
        files = tuple(sorted(path.name for path in pulled.folder.iterdir()))
        published = Published(repo_id, commit, f"{api.endpoint}/{repo_id}/tree/{commit}", files)
        if model is not None:
            check_reload(model, published, api)
            published = replace(published, reloaded=True)
    return published


def _same_settings(folder: Path, pulled: Pulled, name: str) -> bool:
    """Whether a file is the same in both folders, but for the code that a push adds to the file of a processor."""
    both = [place / name for place in (folder, pulled.folder)]
    if not both[1].is_file():
        return False
    if not name.endswith(".json"):
        return both[0].read_bytes() == both[1].read_bytes()
    ours, theirs = ({key: value for key, value in read_json(path).items() if key != "auto_map"} for path in both)
    return ours == theirs


__all__ = [
    "ConcurrentCommitError",
    "Published",
    "publish",
    "push",
    "saved_weights_digest",
    "stage",
    "verify",
    "weight_files",
    "weights_digest",
]
