"""
Whether a repository contains what a push would write: code, weights, and every file that says how they are used.

Nothing of a repository is executed here: its files are read, and its configuration is given to our own class.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from ..storage.client import HubError
from ..storage.saved_weights import WEIGHTS_INDEX, first_line, read_json, saved_weights_digest, weight_files
from .staging import REPLACED


CONFIG = "config.json"


def require_known_code(folder: Path, known: Sequence[Path], place: str) -> Path:
    """
    Make sure that all code in a folder is that of one of the `known` folders, and that no file refers to code of other
    repositories; returns the known folder that resembles it most.

    Raises:
        HubError: which names the files of code that this folder lacks or has otherwise.
    """
    for path, references in _references(folder):
        if foreign := [reference for reference in references if "--" in reference]:
            raise HubError(
                f"{path} of {place} refers to code of another repository, {', '.join(foreign)}; accepted: code beside "
                "it. None of it was run."
            )
    # transformers looks for code in folders of a repository, too.
    theirs = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.py")}
    unknown, lacking = {}, {}
    for other in known:
        ours = {path.name: path.read_bytes() for path in other.glob("*.py")}
        unknown[other] = sorted(name for name in theirs if ours.get(name) != theirs[name])
        lacking[other] = ours.keys() - theirs
    nearest = min(known, key=lambda other: (len(unknown[other]), len(lacking[other])))
    if unknown[nearest]:
        raise HubError(
            f"{place} contains code that neither this package nor the local folder has: {', '.join(unknown[nearest])}. "
            "None of it was run; read it before you do."
        )
    return nearest


def _references(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """The classes that the json files of a folder name for transformers to import, by file."""
    for path in sorted(folder.rglob("*.json")):
        try:
            content = read_json(path)
        except ValueError:
            # Nor can transformers read it.
            continue
        parts = [content.get("auto_map"), content.get("custom_pipelines")]
        yield path.relative_to(folder), [text for part in parts for text in _strings(part)]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def require_same_weights(ours: Path, theirs: Path, place: str) -> None:
    """Raises [`HubError`] unless two folders contain the same tensors under the same names, in whatever files."""
    try:
        digests = [saved_weights_digest(ours), saved_weights_digest(theirs)]
    except ValueError:
        raise HubError(f"{place} holds no weights that can be read.") from None
    if digests[0] != digests[1]:
        raise HubError(f"{place} holds other weights ({digests[1][:12]}…) than the local folder ({digests[0][:12]}…).")


def differences(staged: Path, coded: Path, theirs: Path, config_class: type[PreTrainedConfig] | None) -> list[str]:
    """
    What a push would change in a folder of known code and the same weights, but for the card: a phrase for each file
    and field.

    Args:
        staged: What would be pushed.
        coded: Whose code and `auto_map` count, as [`require_known_code`] found.
        config_class: Of the model, which reads both configurations, so that what an earlier release of transformers
            wrote otherwise is equal if it means the same; `None` for an adapter.
    """
    found = [f"it lacks {path.name}" for path in sorted(coded.glob("*.py")) if not (theirs / path.name).is_file()]
    weights = {*(path.name for path in (*weight_files(staged), *weight_files(theirs))), WEIGHTS_INDEX}
    for path in sorted(staged.iterdir()):
        name = path.name
        if name in weights or path.suffix == ".py":
            continue
        if not (theirs / name).is_file():
            found.append(f"it lacks {name}")
        elif path.suffix != ".json":
            if path.read_bytes() != (theirs / name).read_bytes():
                found.append(f"{name} is another")
        else:
            both = [_settings(place, name, config_class) for place in (staged, theirs)]
            if name == CONFIG:
                both[0]["auto_map"] = read_json(coded / CONFIG).get("auto_map")
            found += _differing_fields(name, *both)
    names = (path.relative_to(theirs).as_posix() for path in sorted(theirs.rglob("*")) if path.is_file())
    kept = {*weights, *(path.name for path in staged.iterdir())}
    return found + [f"{name} would go" for name in names if name not in kept and REPLACED.search(name)]


def _settings(folder: Path, name: str, config_class: type[PreTrainedConfig] | None) -> dict[str, Any]:
    content = read_json(folder / name)
    if name == CONFIG:
        try:
            # Fields that the class takes without keeping them stay as they are, as does the type, which it has itself.
            content |= config_class.from_dict(content).to_dict() | {"model_type": content.get("model_type")}
        except Exception as error:
            raise HubError(f"{name} there is no {config_class.__name__}: {first_line(error)}") from None
    return {field: value for field, value in content.items() if field != "transformers_version"}


def _differing_fields(name: str, ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    return [
        f"{name} has {field} {_shown(theirs, field)} for {_shown(ours, field)}"
        for field in sorted(ours.keys() | theirs)
        if ours.get(field, ...) != theirs.get(field, ...)
    ]


def _shown(content: dict[str, Any], field: str) -> str:
    if field not in content:
        return "nothing"
    text = json.dumps(content[field], ensure_ascii=False, default=str)
    return text if len(text) <= 100 else f"{text[:100]}…"
