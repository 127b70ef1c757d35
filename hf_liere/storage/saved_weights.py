"""The files of a saved folder: which ones contain the weights, their hashes, and checks that they are intact."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .loading import join_names, shards


# Files of an adapter: rotations saved without their model.
ADAPTER_CONFIG = "rotary_config.json"
ADAPTER_WEIGHTS = "rotary.safetensors"
# Maps tensors to files if the weights are split.
WEIGHTS_INDEX = "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """
    Read a json file that contains an object.

    Raises:
        ValueError: naming the file, if it cannot be read or contains anything else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a json file: {error}.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} contains a {type(content).__name__}; accepted: a json object.")
    return content


def first_line(error: Exception) -> str:
    """The first line of another library's error, as part of a sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def require_folder(folder: Path) -> None:
    """Raise `ValueError` unless a folder exists."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"{folder} {what}; accepted: the folder of a saved model.")


def is_adapter(folder: Path) -> bool:
    """
    Whether a folder contains only rotations, as `save_rotary` writes them.

    Raises:
        ValueError: if it also contains a complete model or a peft adapter.
    """

    def present(*names: str) -> list[str]:
        return [name for name in names if (folder / name).is_file()]

    adapter, of_peft = present(ADAPTER_CONFIG, ADAPTER_WEIGHTS), present("adapter_config.json")
    complete = present("config.json", "model.safetensors", WEIGHTS_INDEX)
    if adapter and complete:
        raise ValueError(
            f"{folder} contains a complete model ({', '.join(complete)}) and an adapter ({', '.join(adapter)}): move "
            "the adapter's files into another folder, and name the folder that you mean."
        )
    if adapter and of_peft:
        raise ValueError(
            f"{folder} contains rotations ({', '.join(adapter)}) and an adapter of peft ({', '.join(of_peft)}), which "
            "would be left out: publish both with push_to_hub of peft, or move the rotations into another folder."
        )
    return bool(adapter)


def own_file(path: Path) -> Path:
    """
    Require that a file of a saved folder is not a link to another place on this machine; returns the file.

    Raises:
        ValueError: if it is a link out of the folder. Snapshots in the Hub's cache may link to its blobs.
    """
    folder, target = path.parent.resolve(), path.resolve()
    accepted = [folder]
    if snapshots := next((parent for parent in folder.parents if parent.name == "snapshots"), None):
        # A repository's blobs may be links to shared blobs.
        accepted += [snapshots.parent / "blobs", snapshots.parents[1] / "blobs"]
    if not any(target.is_relative_to(place) for place in accepted):
        raise ValueError(
            f"{path} is a link out of its folder, to {target}, which is not followed: replace it by the file, or "
            "remove it."
        )
    return path


def files_by_name(folder: Path) -> dict[str, Path]:
    """All files in a folder and the folders in it, by their names from there."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a saved model or adapter, without those of another model beside it."""
    require_folder(folder)
    index = folder / WEIGHTS_INDEX
    # transformers also looks for the single file first.
    if index.is_file() and not (folder / "model.safetensors").is_file():
        return shards(index)
    files = [folder / name for name in ("model.safetensors", ADAPTER_WEIGHTS) if (folder / name).is_file()]
    if not files:
        raise ValueError(f"{folder} contains no model.safetensors: it is not a saved model.")
    return files


def file_digest(path: Path, kind: str) -> str:
    """
    Hash of a file in the Hub's format.

    Args:
        kind: `"sha256"` (LFS and Xet) or `"git"` (SHA-1 of a git blob, for the other files).

    Returns:
        `"sha256:…"` or `"git:…"`, hexadecimal.
    """
    digest = hashlib.sha256() if kind == "sha256" else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return f"{kind}:{digest.hexdigest()}"


def differing_files(folder: Path, names: Iterable[str], digests: Mapping[str, str]) -> list[str]:
    """The files of `names` that are missing from a folder or from `digests`, or whose hash differs."""
    return [
        name
        for name in names
        if name not in digests
        or not (folder / name).is_file()
        or file_digest(folder / name, digests[name].partition(":")[0]) != digests[name]
    ]


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise ValueError(
            f"{path} is not a readable safetensors file ({reason}); it may be damaged or cut off."
        ) from None


def _saved_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in a folder, ordered by name, with one in memory at a time."""
    files: dict[str, Path] = {}
    for path in weight_files(folder):
        with _open(path) as file:
            files |= dict.fromkeys(file.keys(), path)
    for name in sorted(files):
        with _open(files[name]) as file:
            tensor = file.get_tensor(name)
        yield name, tensor


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over name, dtype, shape and bytes of all tensors ordered by name, independent of shards and files."""
    return _digest((name, tensors[name]) for name in sorted(tensors))


def saved_weights_digest(folder: str | Path) -> str:
    """
    [`weights_digest`] of the weights in a folder, one tensor in memory at a time.

    Raises:
        ValueError: if the folder contains no safetensors files, or an unreadable one.
    """
    return _digest(_saved_tensors(Path(folder)))


def _digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def saved_shapes(folder: Path) -> dict[str, torch.Size]:
    """Shapes of the tensors in a folder, by name."""
    shapes: dict[str, torch.Size] = {}
    for path in weight_files(folder):
        with _open(path) as file:
            shapes |= {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}
    return shapes


def saved_parameters(folder: Path) -> int:
    """Number of values in the weights of a folder; our models save parameters only."""
    return sum(shape.numel() for shape in saved_shapes(folder).values())


def require_finite_weights(folder: Path) -> None:
    """Raise `ValueError` for infinite or NaN weights."""
    numbers = ((name, tensor) for name, tensor in _saved_tensors(folder) if tensor.is_floating_point())
    if wrong := [name for name, tensor in numbers if not tensor.float().isfinite().all()]:
        raise ValueError(f"The weights in {folder} contain values that are infinite or NaN: {join_names(wrong, 5)}.")
