"""Saves the code that a checkpoint needs beside its weights, in one file: transformers looks for code nowhere else."""

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, ClassVar


# Classes with the mixin below have this base too; type checkers need to know.
if TYPE_CHECKING:
    from transformers import PreTrainedConfig as SavedBase
else:
    SavedBase = object

# The package's folder, or that of a checkpoint's code.
MODELS = Path(__file__).parent
# Every file of code that a save writes begins with this.
MARK = "# Code of hf_liere "
# References to our classes, also in checkpoints whose code is in many files.
OURS = re.compile(r"(?:configuration_liere|modeling_liere\w*|modeling_patched|video_processing_liere)\.(\w+)")
RELATIVE_IMPORT = re.compile(r"^\s*from \.+(?:\w+\.)*(\w+) import", re.MULTILINE)


class SavesItsCode(SavedBase):
    """Mixin of configurations and processors: `save_pretrained` writes the file that `auto_map` names."""

    auto_map: dict
    # The name of this file without its end, and of the file with `auto_map`.
    code_file = "modeling_liere"
    settings_file = "config.json"
    # Set by the package, see `bundles.make_code`. The code of a checkpoint saves itself.
    make_code: Callable[..., str] | None = None
    # For transformers 5.17: the code of a checkpoint may lack the encoding of a configuration without arguments.
    has_no_defaults_at_init: ClassVar[bool] = True

    @classmethod
    def use_package(cls, make_code: Callable[..., str]) -> None:
        """Save code of the package, which has every encoding: each configuration says for itself what it lacks."""
        cls.make_code = staticmethod(make_code)
        if "has_no_defaults_at_init" in vars(cls):
            del cls.has_no_defaults_at_init

    def parts(self) -> list:
        """
        The [`parts.Parts`] that an object uses.

        Raises:
            ValueError: if the code of a checkpoint lacks one.
        """
        return []

    def to_json_file(self, json_file_path: str | os.PathLike, *args, **kwargs) -> None:
        # The base classes cut an earlier file where a disk is full.
        path = Path(json_file_path)
        with TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
            super().to_json_file(Path(folder) / path.name, *args, **kwargs)
            os.replace(Path(folder) / path.name, path)

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs):
        """
        As in the base class, with the code of `auto_map`.

        Raises:
            FileExistsError: if the folder has another file in its place.
        """
        # References of a downloaded checkpoint start with the name of its repository.
        places = {name: place.rpartition("--")[2] for name, place in self.auto_map.items() if isinstance(place, str)}
        ours = {name: found[1] for name, place in places.items() if (found := OURS.fullmatch(place))}
        self.auto_map = {**self.auto_map, **{name: f"{self.code_file}.{cls}" for name, cls in ours.items()}}
        folder, classes = Path(save_directory), [kind.__name__ for kind in type(self).__mro__]
        if (make := type(self).make_code) is None:
            code = Path(__file__).read_text("utf-8")
        else:
            parts, package = self.parts(), __name__.partition(".")[0]
            code = make(self.code_file, [*classes, *ours.values()], parts)
            # Read where the file has a name that is not registered.
            if modules := {part.__module__ for part in parts if part.__module__.partition(".")[0] != package}:
                self.modules_of_parts = sorted(modules)
        path = folder / f"{self.code_file}.py"
        obsolete = find_replaced(folder, self.settings_file, path)
        saved = super().save_pretrained(save_directory)
        replace_file(path, code.encode())
        for file in obsolete:
            file.unlink()
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", folder.name), **kwargs)
        return saved


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that has its old content, or none, until it is complete."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def find_replaced(folder: Path, settings_file: str, new: Path) -> list[Path]:
    """
    The code of an earlier save of ours in a folder that a save of the file `new` no longer needs.

    Raises:
        FileExistsError: if one of these files, or a file in the place of the new one, is not of such a save or is a
            link.
    """
    needed: dict[bool, set[Path]] = {True: set(), False: set()}
    for settings in folder.glob("*.json"):
        for place in read_references(settings):
            is_replaced = settings.name == settings_file and OURS.fullmatch(place) is not None
            needed[is_replaced] |= find_code([place], folder)
    obsolete = needed[True] - needed[False] - {new}
    for path in sorted(obsolete | {new}):
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
