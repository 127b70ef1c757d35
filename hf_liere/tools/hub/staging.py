"""
Prepares the folder to publish: the model, loaded and saved again, with processor, records and code, without secrets.
"""

import json
import re
import shutil
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from transformers import PreTrainedModel

from ...auto import load_checkpoint, model_class
from ...errors import require_libraries
from ...plain import processor_code
from ...storage.client import TOKEN, token_in_use
from ...storage.saved_model import (
    ADAPTER_CONFIG,
    CONFIG,
    LABELS,
    PEFT_CONFIG,
    WEIGHTS_INDEX,
    SavedModel,
    require_own_file,
)
from .cards import LEADERBOARD_FILE, PICTURE
from .checked_facts import CONVERSION_FILE, PROCESSOR_CONFIGS, read_patch
from .pulling import files_by_name
from .secrets import PLACEHOLDER, VOCABULARIES, find_named_secret, readings


PROCESSOR_FILES = (*PROCESSOR_CONFIGS, *VOCABULARIES, "tokenizer_config.json", "special_tokens_map.json")
RECORD_FILES = (
    "run_config.json",
    "environment.json",
    "weights.json",
    "all_results.json",
    "eval_results.json",
    "train_results.json",
    CONVERSION_FILE,
)
TEXTS = (".jinja", ".json", ".md", ".py", ".txt", ".yaml")
STATES = (".bin", ".pt", ".pth")
# The files of a folder that staging reads, besides the weights.
COPIED_FILES = (ADAPTER_CONFIG, PEFT_CONFIG, LABELS, *PROCESSOR_FILES, *RECORD_FILES)
READ_FILES = (CONFIG, "generation_config.json", WEIGHTS_INDEX, *COPIED_FILES)
VIDEO_SETTINGS = "video_preprocessor_config.json"
VIDEO_PROCESSOR = "video_processing_liere.LieREVideoProcessor"
# Files of earlier pushes, ours or Trainer's. A new push deletes them, because they contradict the new weights.
REPLACED = re.compile(
    r"^(last-checkpoint|checkpoint-\d+|runs)/"
    r"|^(pytorch_model|model|adapter_(model|config)|rotary)[^/]*\.(bin|safetensors|json)$"
    r"|^(training_args|optimizer|scheduler|scaler)\.(bin|pt)$|^rng_state[^/]*\.pth$|^trainer_state\.json$"
    r"|^(video_)?preprocessor_config\.json$"
    rf"|^({'|'.join(map(re.escape, (*RECORD_FILES, LABELS, PICTURE, LEADERBOARD_FILE)))})$"
)


def stage(
    saved: SavedModel, target: Path, max_shard_size: str | int = "5GB"
) -> tuple[SavedModel, PreTrainedModel | None]:
    """
    Write the publishable files of a saved model or adapter, without a card, into a new folder; returns that and the
    loaded model, which is `None` for an adapter.

    Raises `ValueError` if the folder does not contain exactly one of our models, its weights do not match its
    configuration, a file is a link out of the folder or invalid, or weights or configuration have changed since they
    were first read.
    """
    for path in saved.weight_files:
        require_own_file(path)
    # Later changes of these files do not reach the copy.
    for name in filter(saved.has, READ_FILES):
        saved.read(name)
    saved.require_finite_weights()
    target.mkdir(parents=True, exist_ok=True)
    if saved.kind == "model":
        if not saved.has(CONFIG):
            raise ValueError(f"{saved} contains neither {CONFIG} nor {ADAPTER_CONFIG}: it is not a saved model.")
        model_class(saved.architecture)
        model, _ = load_checkpoint(saved.folder, dtype="auto")
        model.save_pretrained(target, max_shard_size=max_shard_size)
    else:
        model = None
        read_patch(saved)
        for path in saved.weight_files:
            shutil.copyfile(path, target / path.name)
    for name in filter(saved.has, COPIED_FILES):
        if name.endswith(".json"):
            saved.read_json(name)
        (target / name).write_bytes(saved.read(name))
    staged = SavedModel(target)
    require_copy(saved, staged)
    complete_video_processor(target)
    return staged, model


def require_copy(saved: SavedModel, staged: SavedModel) -> None:
    """Raise `ValueError` unless a copy has the weights of a saved model, and its configuration is still the same."""
    now = SavedModel(saved.folder)
    if now.configuration != saved.configuration or staged.digest != saved.digest != now.digest:
        raise ValueError(f"{saved} has changed since it was first read; push when no training run saves there.")
    if staged.digest != saved.digest:
        raise ValueError(
            f"Loading and saving changes the weights in {saved}, so figures measured with them would not apply to the "
            "published ones. Save the loaded model with save_pretrained and evaluate that."
        )


def write_code_for(theirs: SavedModel, folder: Path) -> list[SavedModel]:
    """The configuration of a repository with the code that this package saves with it; none if it is not ours."""
    try:
        model_class(theirs.architecture).config_class.from_dict(theirs.configuration).save_pretrained(folder)
    except Exception:
        # What is wrong with it is found when configurations are compared.
        return []
    if theirs.has(VIDEO_SETTINGS):
        shutil.copy(theirs.folder / VIDEO_SETTINGS, folder)
        complete_video_processor(folder)
    return [SavedModel(folder)]


def complete_video_processor(folder: Path) -> None:
    """Write the code of our video processor beside a processor file that names it, and refer to it there."""
    copied, (code_file, _, name) = SavedModel(folder), VIDEO_PROCESSOR.partition(".")
    content = copied.read_json(VIDEO_SETTINGS)
    if content.get("video_processor_type") == name:
        content["auto_map"] = {"AutoVideoProcessor": VIDEO_PROCESSOR}
        (folder / VIDEO_SETTINGS).write_text(json.dumps(content, indent=2) + "\n")
        (folder / f"{code_file}.py").write_text(processor_code(), "utf-8")


def refuse_private(folder: Path, api: HfApi, places: Iterable[Path] = ()) -> None:
    """
    Require that no file to publish contains a token, key or password, or a folder of this machine. Only the metadata of
    weights are searched, and training states not at all, because they are tensors. Raises `ValueError`, naming the file
    and the kind of secret, not the secret.
    """
    scanner = secret_scanner()
    known = {"a token": [token for token in [token_in_use(api)] if token]}
    known["a folder of this machine"] = [str(place) for place in (Path.home(), *places) if len(place.parts) > 2]
    for name, path in files_by_name(folder).items():
        if path.suffix in STATES:
            continue
        content = _read_searchable(path)
        try:
            text = content.decode("utf-8", errors="strict" if path.suffix in TEXTS else "replace")
        except UnicodeDecodeError:
            raise ValueError(f"{name} is not UTF-8 text, so nothing was published.") from None
        for reading in readings(text):
            found = [what for what, texts in known.items() if any(secret in reading for secret in texts)]
            if TOKEN.search(reading):
                found.append("a token")
            # Invisible patterns are only meaningful beside others.
            seen = (one for one in scanner.scan(reading.encode("utf-8", "replace")) if one.visible)
            found += [f"a secret ({one.rule_id})" for one in seen if not PLACEHOLDER.fullmatch(one.secret)]
            if path.suffix in TEXTS and (secret := find_named_secret(name, reading)):
                found.append(secret)
            if found:
                raise ValueError(f"{name} contains {found[0]}, so nothing was published; remove it there.")


@lru_cache(maxsize=1)
def secret_scanner() -> Any:
    """Kingfisher's patterns for the secrets of about a hundred services; compiling them takes seconds."""
    require_libraries("Publishing", "push", "kingfisher_sdk")
    from kingfisher_sdk import Rules, Scanner

    # Its cache would write to a folder of the user.
    return Scanner(Rules(cache=False))


def _read_searchable(path: Path) -> bytes:
    """The content of a file; only the header of safetensors."""
    with path.open("rb") as file:
        if path.suffix != ".safetensors":
            return file.read()
        # No more than the file contains, whatever length its first bytes give.
        return file.read(min(int.from_bytes(file.read(8), "little"), path.stat().st_size))
