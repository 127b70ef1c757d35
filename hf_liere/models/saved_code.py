"""Saves the code that a checkpoint needs beside its weights, the only place where transformers looks for it."""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING


# Of the mixin, whose classes have another base as well.
if TYPE_CHECKING:
    from transformers import PreTrainedConfig as SavedBase
else:
    SavedBase = object

# The package's folder, or that of a checkpoint's code, which is written in the same way when the model is saved again.
MODELS = Path(__file__).parent
RELATIVE_IMPORT = re.compile(r"^(\s*from )\.+(?:\w+\.)*(\w+)(?= import)", re.MULTILINE)


class SavesItsCode(SavedBase):
    """Mixin of configurations and processors: `save_pretrained` writes the modules that `auto_map` names."""

    auto_map: dict

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs):
        """As in the base class, with the code of `auto_map`."""
        # References of a downloaded checkpoint start with the name of its repository.
        places = {name: place.rpartition("--")[2] for name, place in self.auto_map.items() if isinstance(place, str)}
        names = {path.stem for path in MODELS.rglob("*.py")}
        ours = {name: place for name, place in places.items() if place.partition(".")[0] in names}
        self.auto_map = {**self.auto_map, **ours}
        saved = super().save_pretrained(save_directory)
        write_code(ours.values(), save_directory)
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)
        return saved


def write_code(references: Iterable[str], folder: str | os.PathLike) -> None:
    """Write the modules of references side by side into one folder: transformers imports nothing else."""
    for path, text in find_code(references, MODELS.rglob("*.py")):
        (Path(folder) / path.name).write_text(RELATIVE_IMPORT.sub(r"\1.\2", text), encoding="utf-8")


def find_code(references: Iterable[str], files: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    """
    Those of the files, with their texts, that references such as `"modeling_liere.LieREViTModel"` name, and all that
    these import from each other.
    """
    files, wanted = {path.stem: path for path in files}, [reference.partition(".")[0] for reference in references]
    while wanted:
        # Each file is found once; names that are not among the files belong to others.
        path = files.pop(wanted.pop(), None)
        if path is not None and path.is_file():
            text = path.read_text("utf-8", "surrogateescape")
            wanted += [imported for _, imported in RELATIVE_IMPORT.findall(text)]
            yield path, text
