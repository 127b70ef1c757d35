"""A saved model or adapter: its files, each read once, and the hashes of files and weights."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils.sha import git_hash, sha_fileobj
from safetensors import SafetensorError, safe_open

from .loading import CheckpointError, explain, join_names, parse_json, refuse_diffusers, shards


CONFIG = "config.json"
# Files of rotations that are saved without their model.
ADAPTER_CONFIG = "rotary_config.json"
ADAPTER_WEIGHTS = "rotary.safetensors"
PEFT_CONFIG = "adapter_config.json"
# The classes of an adapter of peft, which are not in the configuration of its base.
LABELS = "labels.json"
WEIGHTS = "model.safetensors"
# Maps tensors to files if the weights are split.
WEIGHTS_INDEX = "model.safetensors.index.json"


class SavedModel:
    """
    A folder with a saved model or adapter.

    It keeps what it has read, so that card, commit and checks describe the same model even if a training run saves into
    the folder meanwhile. A new `SavedModel` reads the files again.
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        self.folder = Path(folder)
        self._contents: dict[str, bytes] = {}

    @classmethod
    def at(cls, folder: "ModelFolder") -> "SavedModel":
        """The saved model in a folder; a `SavedModel` is returned as it is, with what it has read."""
        return folder if isinstance(folder, SavedModel) else cls(folder)

    def __str__(self) -> str:
        return str(self.folder)

    def has(self, name: str) -> bool:
        return name in self._contents or (self.folder / name).exists()

    def read(self, name: str) -> bytes:
        """The content of a small file. Raises `ValueError` if it cannot be read or is a link out of the folder."""
        if name not in self._contents:
            path = require_own_file(self.folder / name)
            try:
                self._contents[name] = path.read_bytes()
            except OSError as error:
                raise ValueError(f"{path} cannot be read: {error.strerror}.") from None
        return self._contents[name]

    def read_json(self, name: str) -> dict[str, Any]:
        """The object in a json file, empty without it. Raises `ValueError` as [`read`], or if it is anything else."""
        return parse_json(self.read(name), self.folder / name) if self.has(name) else {}

    @cached_property
    def kind(self) -> str:
        """A `"model"`, `"rotations"` of `save_rotary`, or an adapter of `"peft"`. Raises `ValueError` for several."""

        def present(*names: str) -> list[str]:
            return [name for name in names if (self.folder / name).is_file()]

        complete, adapter = present(CONFIG, WEIGHTS, WEIGHTS_INDEX), present(ADAPTER_CONFIG, ADAPTER_WEIGHTS)
        if adapter and complete:
            raise ValueError(
                f"{self} contains a complete model ({', '.join(complete)}) and an adapter ({', '.join(adapter)}): move "
                "the adapter's files into another folder, and name the folder that you mean."
            )
        of_peft = present(PEFT_CONFIG) and not complete
        return "peft" if of_peft else "rotations" if adapter else "model"

    @property
    def configuration(self) -> dict[str, Any]:
        """The configuration of the model or of the rotations; empty if there is none."""
        return self.read_json(CONFIG if self.kind == "model" else ADAPTER_CONFIG)

    @property
    def architecture(self) -> str | None:
        """The name of the model's class in its configuration."""
        named = self.configuration.get("architectures")
        first = next(iter(named), None) if isinstance(named, list) else named
        return None if first is None else str(first)

    @cached_property
    def weight_files(self) -> list[Path]:
        """The safetensors files of the model or adapter, without those of another model beside it."""
        if not self.folder.is_dir():
            what = "is a file" if self.folder.exists() else "does not exist"
            raise ValueError(f"{self} {what}; accepted: the folder of a saved model.")
        refuse_diffusers(self.folder)
        # transformers also looks for the single file first.
        if self.has(WEIGHTS_INDEX) and not (self.folder / WEIGHTS).is_file():
            return shards(self.folder / WEIGHTS_INDEX)
        first = {"model": WEIGHTS, "rotations": ADAPTER_WEIGHTS, "peft": "adapter_model.safetensors"}[self.kind]
        if not (self.folder / first).is_file():
            raise ValueError(f"{self} contains no {first}: it is not a saved {self.kind}.")
        return [path for name in (first, ADAPTER_WEIGHTS) if (path := self.folder / name).is_file()]

    @cached_property
    def _headers(self) -> dict[str, tuple[Path, torch.Size]]:
        """The file and the shape of each tensor, by name."""
        tensors: dict[str, tuple[Path, torch.Size]] = {}
        for path in self.weight_files:
            with open_weights(path) as file:
                tensors |= {name: (path, torch.Size(file.get_slice(name).get_shape())) for name in file.keys()}
        return tensors

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the weights, by name."""
        return {name: shape for name, (_, shape) in self._headers.items()}

    @property
    def parameters(self) -> int:
        """Number of values in the weights; our models save parameters only."""
        return sum(shape.numel() for shape in self.shapes.values())

    @cached_property
    def _weights(self) -> tuple[str, list[str]]:
        """Digest, and names of tensors with NaN or infinity, in one pass with one tensor in memory at a time."""
        digest, nonfinite = hashlib.sha256(), []
        for name, (path, _) in sorted(self._headers.items()):
            with open_weights(path) as file:
                tensor = file.get_tensor(name)
            _update(digest, name, tensor)
            if tensor.is_floating_point() and not tensor.float().isfinite().all():
                nonfinite.append(name)
        return digest.hexdigest(), nonfinite

    @property
    def digest(self) -> str:
        """[`weights_digest`] of the weights. Raises `ValueError` if there are none, or they cannot be read."""
        return self._weights[0]

    def require_finite_weights(self) -> None:
        """Raise `ValueError` for infinite or NaN weights."""
        if wrong := self._weights[1]:
            raise ValueError(f"The weights in {self} contain values that are infinite or NaN: {join_names(wrong, 5)}.")


ModelFolder = SavedModel | str | os.PathLike


@contextmanager
def open_weights(path: str | os.PathLike) -> Iterator[Any]:
    """An open safetensors file. Raises [`CheckpointError`] if it cannot be read."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        reason = explain(error).removesuffix(".")
        raise CheckpointError(f"{path} cannot be read: {reason}; accepted: a file of safetensors.") from None


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over name, dtype, shape and bytes of all tensors ordered by name, independent of shards and files."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        _update(digest, name, tensors[name])
    return digest.hexdigest()


def _update(digest: "hashlib._Hash", name: str, tensor: torch.Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def first_line(error: Exception) -> str:
    """The first line of another library's error, as part of a sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def require_own_file(path: Path) -> Path:
    """Return a file. Raises `ValueError` if it is a link out of its folder; snapshots may link to the Hub's cache."""
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


def file_digest(path: Path, kind: str) -> str:
    """Hash of a file as the Hub lists it: `"sha256:…"` in LFS and Xet, else `"git:…"`, the SHA-1 of a git blob."""
    with path.open("rb") as file:
        return f"sha256:{sha_fileobj(file).hex()}" if kind == "sha256" else f"git:{git_hash(file.read())}"


def differing_files(folder: Path, digests: Mapping[str, str]) -> list[str]:
    """The files of `digests` that are missing from a folder, or whose hash differs."""
    present = {name: folder / name for name in digests if (folder / name).is_file()}
    found = {name: file_digest(path, digests[name].partition(":")[0]) for name, path in present.items()}
    return [name for name, digest in digests.items() if found.get(name) != digest]
