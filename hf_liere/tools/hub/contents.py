"""
Compares a repository with what a push would write: code, weights and every file that determines their use.

Nothing in a repository is executed here: its files are read, and our own class parses its configuration.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from ...storage.client import HubError
from ...storage.saved_code import find_code, read_references
from ...storage.saved_model import CONFIG, WEIGHTS_INDEX, SavedModel, first_line
from .cards import LEADERBOARD_FILE, PICTURE
from .pulling import files_by_name
from .staging import REPLACED


def require_known_code(theirs: SavedModel, known: Sequence[SavedModel], place: str) -> SavedModel:
    """
    Require that all code of a repository is also in one of the `known` folders and that no file refers to code of other
    repositories; returns the most similar known folder. Raises [`HubError`], naming the files of other code.
    """
    for name, references in _references(theirs.folder).items():
        if foreign := [reference for reference in references if "--" in reference]:
            raise HubError(
                f"{name} of {place} refers to code of another repository, {', '.join(foreign)}; accepted: code beside "
                "it. None of it was run."
            )
    # transformers also looks for code in the folders of a repository.
    code = {name: path.read_bytes() for name, path in files_by_name(theirs.folder).items() if path.suffix == ".py"}
    unknown, lacking = {}, {}
    for other in known:
        ours = {path.name: path.read_bytes() for path in other.folder.glob("*.py")}
        unknown[other] = sorted(name for name in code if ours.get(name) != code[name])
        lacking[other] = ours.keys() - code
    nearest = min(known, key=lambda other: (len(unknown[other]), len(lacking[other])))
    if unknown[nearest]:
        raise HubError(
            f"{place} contains code that neither this package nor the local folder has: {', '.join(unknown[nearest])}. "
            "None of it was run; read it before you do."
        )
    return nearest


def _references(folder: Path) -> dict[str, list[str]]:
    """The classes that transformers would import, by json file of a folder."""
    return {name: read_references(path) for name, path in files_by_name(folder).items() if path.suffix == ".json"}


def require_same_weights(ours: SavedModel, theirs: SavedModel, place: str) -> None:
    """Raise [`HubError`] unless two folders contain the same tensors by name, however these are split into files."""
    try:
        digests = [saved.digest[:12] for saved in (ours, theirs)]
    except ValueError:
        raise HubError(f"{place} contains no readable weights.") from None
    if ours.digest != theirs.digest:
        raise HubError(f"{place} has other weights ({digests[1]}…) than the local folder ({digests[0]}…).")


def differences(
    staged: SavedModel, coded: SavedModel, theirs: SavedModel, config_class: type[PreTrainedConfig] | None
) -> list[str]:
    """
    What a push of `staged` would change, except the card, in a folder with known code and the same weights: phrases.

    Code and `auto_map` are those of `coded`, which [`require_known_code`] returned. The class parses both
    configurations, so that equivalent ones of different transformers releases are equal; adapters have none.
    """
    there, ours = files_by_name(theirs.folder), files_by_name(staged.folder)
    found = [f"it lacks {path.name}" for path in sorted(coded.folder.glob("*.py")) if path.name not in there]
    weights = {*(path.name for path in (*staged.weight_files, *theirs.weight_files)), WEIGHTS_INDEX}
    for name, path in ours.items():
        if name in weights or path.suffix == ".py":
            continue
        if name not in there:
            found.append(f"it lacks {name}")
        elif path.suffix != ".json":
            if staged.read(name) != theirs.read(name):
                found.append(f"{name} differs")
        else:
            mine, other = (_settings(place, name, config_class) for place in (staged, theirs))
            if name == CONFIG:
                mine["auto_map"] = coded.configuration.get("auto_map")
            fields = sorted(field for field in mine.keys() | other if mine.get(field, ...) != other.get(field, ...))
            found += (f"{name} has {field} {_format(other, field)} for {_format(mine, field)}" for field in fields)
    kept = {*weights, *ours, PICTURE, LEADERBOARD_FILE, *(path.name for path in coded.folder.iterdir())}
    return found + [f"{name} would go" for name in obsolete_files(there, kept, theirs)]


def obsolete_files(names: Iterable[str], pushed: Collection[str], theirs: SavedModel) -> list[str]:
    """
    The files of a repository that a push deletes: earlier weights, records and states, and the code of json files that
    it replaces, with all that this code imports. `theirs` has the json files and the code at the repository's root.
    """
    others = [name for name in names if name not in pushed]
    replaced: set[str] = set()
    used: set[str] = set()
    for settings, references in _references(theirs.folder).items():
        if "/" not in settings:
            stays = settings in others and not REPLACED.search(settings)
            (used if stays else replaced).update(path.name for path in find_code(references, theirs.folder))
    return [name for name in others if REPLACED.search(name) or name in replaced - used]


def _settings(saved: SavedModel, name: str, config_class: type[PreTrainedConfig] | None) -> dict[str, Any]:
    content = saved.read_json(name)
    if name == CONFIG:
        assert config_class is not None, "a folder with a configuration has a class"
        try:
            # Keep the fields that the class does not write back, and the type, which the class defines.
            content |= config_class.from_dict(content).to_dict() | {"model_type": content.get("model_type")}
        except Exception as error:
            raise HubError(f"{name} there is not a {config_class.__name__}: {first_line(error)}") from None
    return {field: value for field, value in content.items() if field != "transformers_version"}


def _format(content: dict[str, Any], field: str) -> str:
    if field not in content:
        return "nothing"
    text = json.dumps(content[field], ensure_ascii=False, default=str)
    return text if len(text) <= 100 else f"{text[:100]}…"
