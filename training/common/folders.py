"""Files and folders of a run: their names, and whether they are there. Imports the standard library alone."""

import re
from collections.abc import Iterable
from pathlib import Path

from training.common.alone import import_alone


InputError = import_alone("hf_liere.errors").InputError

CONFIG_FILE = "run_config.json"
ENVIRONMENT_FILE = "environment.json"
WEIGHTS_FILE = "weights.json"
RESOLUTIONS_FILE = "resolutions.json"
EXAMPLES_FILE = "eval_examples.safetensors"
RESULTS_FILE = "eval_results.json"
STATE_FILE = "trainer_state.json"
# The folders of the models that a comparison trains.
MODEL_FOLDERS = ("patched", "unpatched")
# By its lock a run says that it uses a folder.
CLAIM = ".claim"
# A sweep writes the flags of a run into this file before it starts the run.
FLAGS_FILE = "flags.json"
# Records, metrics, model and processor that a run writes.
RUN_FILES = (
    *(CONFIG_FILE, ENVIRONMENT_FILE, EXAMPLES_FILE, RESOLUTIONS_FILE, WEIGHTS_FILE, STATE_FILE),
    *(RESULTS_FILE, "all_results.json", "train_results.json"),
    *"model.safetensors model.safetensors.index.json config.json lora rotary".split(),
    *"preprocessor_config.json tokenizer.json tokenizer_config.json".split(),
)


def last_complete_checkpoint(folder: str | Path) -> str | None:
    """The newest complete checkpoint of a run. Its state file is written last."""
    found = {}
    for path in Path(folder).glob("checkpoint-*"):
        match = re.fullmatch(r"checkpoint-(\d+)", path.name)
        if match and (path / STATE_FILE).is_file():
            found[int(match[1])] = path
    return str(found[max(found)]) if found else None


def require_files(names: Iterable[str]) -> None:
    """Raises [`InputError`] naming the first file that does not exist."""
    for name in names:
        if not Path(name).is_file():
            raise InputError(f"There is no file {name!r}.")


def require_folder(flag: str, folder: str) -> None:
    """Raises [`InputError`] if the value of a flag is not a folder."""
    if not Path(folder).is_dir():
        raise InputError(f"--{flag} {folder!r} is not a folder.")


def files_of_run(folder: Path) -> list[Path]:
    """The checkpoints and files of a run in its folder."""
    found = [path for path in folder.glob("checkpoint-*") if path.is_dir()]
    return found + [folder / name for name in RUN_FILES if (folder / name).exists()]


def require_no_run(folder: Path) -> None:
    """Raises [`InputError`] if a folder contains a run."""
    if found := files_of_run(folder):
        names = ", ".join(path.name for path in found[:5])
        raise InputError(
            f"--output_dir {str(folder)!r} contains another run ({names}); accepted: another folder, "
            "--resume_from_checkpoint last to resume it, or --overwrite_output_dir to delete it."
        )


def require_free(folder: str | Path, besides: tuple[str, ...] = ()) -> None:
    """
    Checks that a new run does not write among unrelated files.

    Args:
        besides: names that are allowed, in addition to hidden files.

    Raises:
        InputError: naming the files in the folder.
    """
    found = sorted(path.name for path in Path(folder).glob("*"))
    others = [name for name in found if name not in (FLAGS_FILE, *besides) and not name.startswith(".")]
    if others:
        raise InputError(
            f"--output_dir {str(folder)!r} contains other files ({', '.join(others[:5])}{' …' if others[5:] else ''}); "
            "accepted: a new or empty folder, or --overwrite_output_dir to write among them."
        )
