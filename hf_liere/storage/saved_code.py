"""
Saves the code that a checkpoint needs beside its weights, because transformers looks for code nowhere else: the plain
model, the same for every checkpoint of a release, or a stub that imports the package, and files of users.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ..plain import MARK
from ..registers import UserFile
from ..version import __version__


# Classes with the mixin below have this base too; type checkers need to know.
if TYPE_CHECKING:
    from transformers import PreTrainedConfig as SavedBase
else:
    SavedBase = object

PACKAGE = Path(__file__).parents[1]
# References to our classes, also in checkpoints whose code is in many files.
OURS = re.compile(r"(?:configuration_liere|modeling_liere\w*|modeling_patched|video_processing_liere)\.(\w+)")
RELATIVE_IMPORT = re.compile(r"^\s*from \.+(?:\w+\.)*(\w+) import", re.MULTILINE)
# Outside of `try` transformers would advise to install what has the package's name elsewhere.
STUB = f"""\
{MARK}{__version__}, which this model needs.
try:
    from hf_liere import {{classes}}
except ImportError as error:
    raise ImportError("This model needs the package hf_liere: run `pip install .` in a clone of it.") from error
"""


class SavesItsCode(SavedBase):
    """Mixin of configurations and processors: `save_pretrained` writes the files that `auto_map` needs."""

    auto_map: dict
    # The name of the file in `auto_map` without its end, and of the file with `auto_map`.
    code_file = "modeling_liere"
    settings_file = "config.json"

    def user_files(self) -> list[UserFile]:
        """The files in which users registered what this object names."""
        return []

    def plain_code(self) -> dict[str, str] | None:
        """Text by name of the files that load without the package; `None` if what is saved needs it."""
        raise NotImplementedError

    def code(self) -> dict[str, str]:
        """Text by name of every file of code. Raises `ValueError` if a file of a user does not load alone."""
        if files := self.user_files():
            # Read where the file has a name that is not registered.
            self.modules_of_parts = [file.module for file in files]
        plain = None if files else self.plain_code()
        return stub_code(self, files) if plain is None else plain

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Code is saved here; transformers would copy the files of the package."""

    def to_json_file(self, json_file_path: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        # The base classes cut an earlier file where a disk is full.
        path = Path(json_file_path)
        with TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
            super().to_json_file(Path(folder) / path.name, *args, **kwargs)
            os.replace(Path(folder) / path.name, path)

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> Any:
        """
        As in the base class, with the code of `auto_map`.

        Raises:
            FileExistsError: if the folder has another file in the place of one of code.
        """
        # References of a downloaded checkpoint start with the name of its repository.
        places = {name: place.rpartition("--")[2] for name, place in self.auto_map.items() if isinstance(place, str)}
        ours = {name: found[1] for name, place in places.items() if (found := OURS.fullmatch(place))}
        self.auto_map = {**self.auto_map, **{name: f"{self.code_file}.{cls}" for name, cls in ours.items()}}
        folder, code = Path(save_directory), self.code()
        obsolete = find_replaced(folder, self.settings_file, {folder / name for name in code})
        saved = super().save_pretrained(save_directory)
        for name, text in code.items():
            replace_file(folder / name, text.encode())
        for file in obsolete:
            file.unlink()
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", folder.name), **kwargs)
        return saved


def stub_code(config: SavesItsCode, files: Sequence[UserFile]) -> dict[str, str]:
    """
    The code of a model that needs the package: an import of its classes, and the files of users. Raises `ValueError` if
    these do not load without other files of the user.
    """
    names = {file.module.rpartition(".")[2]: file.text for file in files}
    if taken := names.keys() & {config.code_file, "modeling_liere"}:
        raise ValueError(f"{', '.join(taken)}.py is the name of the code of checkpoints; accepted: any other name.")
    classes = {
        place.partition(".")[2]
        for place in config.auto_map.values()
        if isinstance(place, str) and OURS.fullmatch(place)
    }
    stub = STUB.format(classes=", ".join(sorted(classes))) + "".join(f"from .{name} import *\n" for name in names)
    if files:
        _load_alone(tuple(names.items()), tuple(file.path for file in files))
    return {f"{config.code_file}.py": stub} | {f"{name}.py": text for name, text in names.items()}


@cache
def _load_alone(texts: tuple[tuple[str, str], ...], paths: tuple[Path, ...]) -> None:
    """Imports the user's files, texts by name, in another process, without their folders."""
    own = {folder for path in paths for folder in path.resolve().parents if not folder.name.endswith("-packages")}
    places = [place for place in sys.path if Path(place).resolve() not in own]
    with TemporaryDirectory() as folder:
        lines = ["import importlib, sys", f"sys.path[:] = {[*places, str(PACKAGE.parent), str(Path(folder).parent)]!r}"]
        for name, text in texts:
            Path(folder, f"{name}.py").write_text(text, "utf-8")
            lines.append(f"importlib.import_module('{Path(folder).name}.{name}')")
        run = subprocess.run(
            [sys.executable, "-c", "\n".join(lines)], cwd=folder, capture_output=True, text=True, check=False
        )
    if run.returncode:
        raise ValueError(
            f"{', '.join(path.name for path in paths)} cannot be saved with a model, because alone it ends with: "
            f"{run.stderr.strip().splitlines()[-1]}. Accepted: a file that imports installed packages, and from "
            "hf_liere what it uses."
        )


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that has its old content, or none, until it is complete."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def find_replaced(folder: Path, settings_file: str, new: set[Path]) -> list[Path]:
    """
    The code of an earlier save of ours in a folder that a save of the files `new` no longer needs.

    Raises:
        FileExistsError: if one of these files, or a file in the place of a new one, is not of such a save or is a
            link.
    """
    needed: dict[bool, set[Path]] = {True: set(), False: set()}
    for settings in folder.glob("*.json"):
        for place in read_references(settings):
            is_replaced = settings.name == settings_file and OURS.fullmatch(place) is not None
            needed[is_replaced] |= find_code([place], folder)
    obsolete = needed[True] - needed[False] - new
    for path in sorted(obsolete | new):
        is_ours = path in needed[True] or (path.is_file() and read_code(path).startswith(MARK))
        if path.is_symlink() or (path.exists() and not is_ours):
            kind = "is a link" if path.is_symlink() else "is not the code of a saved model"
            raise FileExistsError(f"{path} {kind}, so nothing was saved; accepted: a folder without this file.")
    return sorted(obsolete)


def read_references(settings: Path) -> list[str]:
    """The classes that transformers would import for a json file."""
    try:
        content = json.loads(settings.read_text("utf-8"))
        values = [content.get("auto_map"), content.get("custom_pipelines")]
    except (AttributeError, OSError, RecursionError, ValueError):
        return []
    # The loop also visits what it appends.
    for value in values:
        values += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value for value in values if isinstance(value, str)]


def find_code(references: Iterable[str], folder: Path) -> set[Path]:
    """
    The files of a folder that references such as `"modeling_liere.LieREViTModel"` name, and all that these import from
    each other.
    """
    found: set[Path] = set()
    wanted = [reference.partition(".")[0] for reference in references]
    while wanted:
        # Names that are not those of files here belong to others.
        name = wanted.pop()
        path = folder / f"{name}.py"
        if name.isidentifier() and path.is_file() and path not in found:
            found.add(path)
            wanted += RELATIVE_IMPORT.findall(read_code(path))
    return found


def read_code(path: Path) -> str:
    return path.read_text("utf-8", "surrogateescape")
