"""
Test vectors: what every rotation of a model computes for known positions, in float64, as a file of safetensors that
`docs/reference/check_rope.md` describes. [`Rotation.describe`] returns what its metadata say of a rotation.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import replace

import torch
from safetensors.torch import save_file

from ...errors import InputError
from ...storage.saved_model import open_weights
from ...storage.targets import new_file
from .diagnosis import TENSORS, Diagnosis, Vectors, diagnose
from .rotation import STATES, STYLE_NAMES, Rotation


FORMAT, VERSION = "hf-liere-rope", "1"


def write_vectors(path: str | os.PathLike, model: str, vectors: Sequence[Vectors]) -> None:
    """Write the vectors of a model's rotations. Raises `FileExistsError` if `path` exists."""
    described = json.dumps([part.rotation.describe() for part in vectors])
    metadata = {"format": FORMAT, "version": VERSION, "model": model, "rotations": described}
    tensors: dict[str, torch.Tensor] = {}
    for part in vectors:
        tensors |= {f"{part.rotation.name}/{name}": value.contiguous() for name, value in part.describe().items()}
    with new_file(path) as partial:
        save_file(tensors, partial, metadata)


def read_tensors(path: str | os.PathLike) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors and the metadata of a file. Raises [`InputError`] if it is not a safetensors file."""
    with open_weights(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def read_vectors(path: str | os.PathLike) -> list[Vectors]:
    """
    The rotations that a file describes; results are computed again from positions, never read. Raises [`InputError`]
    if the file describes none, or a tensor is missing.
    """
    tensors, metadata = read_tensors(path)
    if metadata.get("format") != FORMAT or metadata.get("version") != VERSION:
        raise InputError(
            f"{path} has format {metadata.get('format')!r}, version {metadata.get('version')!r}: accepted are files "
            f"with the metadata that `hf-liere rope MODEL --vectors FOLDER` writes, {FORMAT!r}, {VERSION!r}. Without "
            "them, name the model, or the file of its test vectors, before --check."
        )
    vectors = []
    try:
        for description in json.loads(metadata["rotations"]):
            name = description["name"]
            rotation = Rotation.from_description(description, tensors[f"{name}/frequencies"])
            states = {state: tensors[f"{name}/{state}"].double() for state in STATES if f"{name}/{state}" in tensors}
            vectors.append(Vectors(rotation, tensors[f"{name}/positions"], states))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} is incomplete: {error!r}; keep all tensors of the vectors that you copy.") from None
    return vectors


def check_file(path: str | os.PathLike, vectors: Sequence[Vectors]) -> list[Diagnosis]:
    """
    Compare the results in a file with what is right. Raises `InputError` if the file contains no result of any
    rotation, one of none, or one that is not a table.

    Args:
        path: A file with `NAME/cos`, `NAME/sin`, `NAME/rotated_query`, `NAME/rotated_key` or some of these, in any
            type, for some of the rotations; names of tensors suffice where there is one rotation.
        vectors: The right results of all rotations of the model.
    """
    tensors, _ = read_tensors(path)
    if len(vectors) == 1:
        name = vectors[0].rotation.name
        tensors = {key if "/" in key else f"{name}/{key}": value for key, value in tensors.items()}
    names = {part.rotation.name: part for part in vectors}
    given: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        name, _, tensor = key.rpartition("/")
        if tensor in TENSORS:
            if name not in names:
                raise InputError(f"{path} contains {key!r}; accepted are rotations called {sorted(names)}.")
            if value.ndim < 2 or not value.is_floating_point():
                raise InputError(
                    f"{path} contains {key!r} of shape {tuple(value.shape)} and type {value.dtype}; accepted are "
                    "floating point numbers for every token and channel, (N, D)."
                )
            given.setdefault(name, {})[tensor] = value
    if not given:
        raise InputError(
            f"{path} contains {sorted(tensors)}; accepted are {', '.join(TENSORS)} of rotations called {sorted(names)}."
        )
    others = {name: part.rotation for name, part in names.items()}
    results = []
    for name, found in given.items():
        part = names[name]
        unknown = [tensor for tensor in found if tensor.startswith("rotated") and not part.states]
        compared = {tensor: value.flatten(0, -2) for tensor, value in found.items() if tensor not in unknown}
        remarks = _unify_layout(part.rotation, compared)
        diagnosis = diagnose(replace(part, tensors=compared), others)
        diagnosis.remarks += remarks
        if unknown:
            diagnosis.remarks.append(f"not compared: {', '.join(unknown)} (which channels rotate is unknown)")
        results.append(diagnosis)
    return results


def _unify_layout(rotation: Rotation, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Leave one column for each plane where cos and sin have another layout than the model's, in place; say if so."""
    names = [name for name in ("cos", "sin") if name in tensors and tensors[name].shape[1] % 2 == 0]
    count = rotation.planes.num_planes
    if not names or rotation.channels not in ((*range(count), *range(count)), tuple(i // 2 for i in range(2 * count))):
        return []
    is_halves = rotation.channels[1] == 1
    columns: dict[str, torch.Tensor] = {}
    for name in names:
        value = tensors[name]  # (N, D)
        halves, adjacent = value.chunk(2, 1), (value[:, 0::2], value[:, 1::2])
        given, wanted = (adjacent, halves) if is_halves else (halves, adjacent)
        if not torch.equal(*given) or torch.equal(*wanted):
            return []
        columns[name] = given[0]  # (N, planes)
    tensors |= columns
    given_style = STYLE_NAMES["adjacent" if is_halves else "halves"]
    return [f"cos and sin are laid out for {given_style}, in the model for the other"]
