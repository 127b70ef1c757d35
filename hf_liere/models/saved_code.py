"""The code that a checkpoint needs, written beside its weights in the one folder where transformers looks for it."""

import os
import re
from collections.abc import Iterable
from pathlib import Path


# The folder of the package, or of a checkpoint's code, which is written in the same way when it is saved again.
MODELS = Path(__file__).parent
RELATIVE_IMPORT = re.compile(r"^(\s*from )\.+(?:\w+\.)*(\w+)(?= import)", re.MULTILINE)


class SavesItsCode:
    """Configurations and processors whose `save_pretrained` writes the modules that their `auto_map` names."""

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs):
        """As of the base class."""
        # Those of a downloaded checkpoint begin with the name of its repository.
        places = {name: place.rpartition("--")[2] for name, place in self.auto_map.items() if isinstance(place, str)}
        ours = {name: place for name, place in places.items() if place.partition(".")[0] in _files()}
        self.auto_map = {**self.auto_map, **ours}
        saved = super().save_pretrained(save_directory)
        write_code(ours.values(), save_directory)
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)
        return saved


def write_code(references: Iterable[str], folder: str | os.PathLike) -> None:
    """
    Write the modules of references such as `"modeling_liere.LieREViTModel"`, and all that they import from each other,
    as files side by side: transformers copies and imports nothing else.
    """
    files, wanted, written = _files(), [reference.partition(".")[0] for reference in references], set()
    while wanted:
        name = wanted.pop()
        if name not in written:
            written.add(name)
            text = files[name].read_text(encoding="utf-8")
            wanted += [imported for _, imported in RELATIVE_IMPORT.findall(text)]
            (Path(folder) / f"{name}.py").write_text(RELATIVE_IMPORT.sub(r"\1.\2", text), encoding="utf-8")


def _files() -> dict[str, Path]:
    return {path.stem: path for path in MODELS.rglob("*.py")}
