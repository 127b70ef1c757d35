"""Output files and folders that appear under their name only when they are complete."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors import SafetensorError

from ..errors import InputError


@contextmanager
def new_directory(output: str | os.PathLike) -> Iterator[Path]:
    """
    A folder to fill; it becomes `output` when the block ends without an error. Raises `FileExistsError` if `output`
    exists and is not an empty directory, [`InputError`] if nothing can be written beside it.
    """
    output = Path(output)
    if output.is_symlink() or output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"{output} exists already and is not an empty directory.")
    with _temporary_folder(output) as partial:
        yield partial
        # Only their owner can read temporary folders.
        partial.chmod(0o755)
        os.replace(partial, output)


@contextmanager
def new_file(output: str | os.PathLike) -> Iterator[Path]:
    """
    A path to write to; the file, with others beside it, becomes `output` when the block ends without an error. Raises
    `FileExistsError` if `output` exists, [`InputError`] if nothing can be written beside it.
    """
    output = Path(output)
    if output.exists():
        raise FileExistsError(f"{output} exists.")
    with _temporary_folder(output) as partial:
        yield partial / output.name
        # Move the file itself last: once it exists, everything is complete.
        for path in sorted(partial.iterdir(), key=lambda path: path.name == output.name):
            os.replace(path, output.parent / path.name)


@contextmanager
def _temporary_folder(output: Path) -> Iterator[Path]:
    """A temporary folder on the file system of `output`; new parents that stay empty are removed again."""
    parents = [parent for parent in output.parents if not parent.exists()]
    try:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            folder = TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent, ignore_cleanup_errors=True)
        except OSError as error:
            raise InputError(f"{output} cannot be written: {error.strerror}.") from error
        try:
            with folder as partial:
                yield Path(partial)
        except SafetensorError as error:
            raise InputError(f"{output} cannot be written: {error}.") from error
    finally:
        for parent in parents:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
