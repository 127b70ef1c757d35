"""
Writes a folder that Hugging Face's `kernels` loads, with the code and the compiled kernels of this checkout.

    python .kernels/write.py outputs/kernels      # or: make kernels-folder

kernel-builder reads `build.toml`, `CARD.md` and `torch-ext`. `build` contains the variant for this system, under the
name of those that run with every torch from a version on. A variant for another system is written there.
"""

import hashlib
import json
import platform
import shutil
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hf_liere.errors import InputError
from hf_liere.kernels import cpu_library
from hf_liere.storage.targets import new_directory


HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent / "hf_liere"
NAME = "hf_liere_rotations"
# The oldest torch that the package supports.
TORCH = "29"


def write(folder: Path) -> Path:
    """
    Args:
        folder: A new or empty folder. It is written completely or not at all.

    Returns:
        The variant for this machine.

    Raises:
        InputError: if there are no compiled kernels.
        FileExistsError: if the folder is not empty.
    """
    if (library := cpu_library.library()) is None:
        raise InputError(f"There are no kernels to copy: {cpu_library.failure(8)}")
    system = f"{platform.machine().replace('arm64', 'aarch64')}-{platform.system().lower()}"
    variant = Path("build") / f"torch-stable-abi{TORCH}-cpu-{system}"
    with new_directory(folder) as partial:
        source = partial / "torch-ext" / NAME
        for name in ("build.toml", "CARD.md"):
            shutil.copy(HERE / name, partial / name)
        shutil.copytree(HERE / "torch-ext", partial / "torch-ext")
        for name in ("kernels", "rotation", "fast"):
            shutil.copytree(PACKAGE / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(source, partial / variant, ignore=shutil.ignore_patterns("*.cpp", "*.h"))
        (partial / variant / "metadata.json").write_text(json.dumps(metadata(source), indent=2) + "\n")
    print(f"{folder} contains {variant.name}; the fastest library here is {Path(library._name).name}.")
    return folder / variant


def metadata(source: Path) -> dict:
    """What `kernels` reads. The name of the module, and of its operators, differs for other code."""
    digest = hashlib.sha256()
    for path in sorted(source.rglob("*.*")):
        digest.update(path.read_bytes())
    identifier = f"_{NAME}_cpu_{digest.hexdigest()[:7]}"
    entry = {"name": NAME.replace("_", "-"), "id": identifier, "version": 1, "license": "Apache-2.0"}
    return entry | {"python-depends": [], "backend": {"type": "cpu"}}


if __name__ == "__main__":
    try:
        write(Path(sys.argv[1]))
    except (InputError, FileExistsError) as error:
        sys.exit(f"error: {error}")
