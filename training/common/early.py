"""
What a script answers before it imports torch and transformers, which takes seconds: its help, and mistakes that need no
model. What is uncertain here is left to the classes of arguments.
"""

import os
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

from training.common.alone import import_alone
from training.common.folders import (
    CLAIM,
    MODEL_FOLDERS,
    InputError,
    require_files,
    require_folder,
    require_free,
    require_no_run,
)
from training.common.help import answer_help, classes_of, read_flags, words_after
from training.common.recipes import read_recipe, require_keys, take_recipe, unknown_message


FOLDERS = ("image_folder", "video_folder", "text_folder")
FILES = ("train_files", "validation_files")
# Flags that bring flags of a task along.
WITH_TASKS = {"register", "dataset_name"}
# Flags of a run that goes on, or that deletes another one.
GOES_ON = {"resume_from_checkpoint", "resume_from_hub", "overwrite_output_dir"}


def answer_early(script: str) -> None:
    """Ends this process if its command line asks for the help of a script, or contains a mistake that shows at once."""
    answer_help(script)
    try:
        known = {flag.name for flag in read_flags(classes_of(Path(script)))}
    except LookupError:
        # Without transformers, the imports of the script say what to install.
        return
    try:
        refuse_mistakes(sys.argv[1:], known)
    except InputError as error:
        sys.exit(import_alone("hf_liere.errors").printable(f"error: {error}"))


def refuse_mistakes(arguments: list[str], known: Collection[str]) -> None:
    """
    Args:
        known: the names of the script's flags.

    Raises:
        InputError: for a recipe, flag, file or folder that does not exist, and for a folder with another run.
    """
    recipe, words = take_recipe(arguments)
    content = {} if recipe is None else read_recipe(Path(recipe))
    given = {*content, *(word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--"))}
    if given.isdisjoint(WITH_TASKS):
        require_keys(recipe or "", content, known)
        _require_flags(words, known)

    def values(name: str) -> list[str]:
        value = words_after(f"--{name}", words) or content.get(name, [])
        return list(map(str, value if isinstance(value, list) else [value]))

    for name in FOLDERS:
        for folder in values(name):
            require_folder(name, folder)
    for name in FILES:
        require_files(values(name))
    # The first process makes the folder. A claim says later whether the run there has ended.
    is_first = os.environ.get("RANK", "0") == "0"
    for folder in map(Path, values("output_dir") if is_first and GOES_ON.isdisjoint(given) else []):
        if not (folder / CLAIM).exists():
            require_no_run(folder)
            require_free(folder, besides=MODEL_FOLDERS)


def _require_flags(words: Iterable[str], known: Collection[str]) -> None:
    for word in words:
        name = word[2:].partition("=")[0].replace("-", "_")
        # Flags that are on by default have a second name.
        if word.startswith("--") and name not in known and name.removeprefix("no_") not in known:
            raise InputError(unknown_message("flag", word, known))
