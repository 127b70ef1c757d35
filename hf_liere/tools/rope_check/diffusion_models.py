"""The rotations of diffusers models, read from a configuration or with the weights."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import InputError, require_libraries
from ...libraries.diffusion_patch import DiffusionTower
from ...libraries.families import FAMILIES
from ...libraries.library_patch import plan_library
from ...libraries.rotations import LearnedFrequencies
from ...models.patched.rotary_patch import RotaryPatchConfig
from ...models.patched.tower_patch import patched_towers
from ...models.probing.planes import Planes
from ...storage.loading import find_diffusers_config, translate_loading_errors
from ...storage.saved_model import ADAPTER_CONFIG
from .reading import FoundRotation
from .rotation import Rotation


def find_diffusion_rotations(name: str, with_weights: bool, revision: str | None = None) -> Iterator[FoundRotation]:
    """
    The rotations of the transformers in a folder or repository of a model or pipeline: the planes of a head, and those
    of all heads in a row for LTX.

    Args:
        with_weights: Whether to load the weights, compare the frequencies with the cos and sin that the model computes
            for a few tokens, and read learned frequencies.

    Raises:
        InputError: if no transformer in it rotates, or how it rotates is not known.
    """
    require_libraries(f"Describing {name}", "diffusers", "diffusers")
    content = find_diffusers_config(name, revision)
    assert content is not None, "a checkpoint of diffusers"
    # A pipeline lists the library and the class of each part.
    parts = {part: value[1] for part, value in content.items() if isinstance(value, list) and len(value) == 2}
    classes = {"": content["_class_name"], **parts}
    known = {part: kind for part, kind in classes.items() if kind in FAMILIES}
    if not known:
        raise InputError(
            f"{name} contains the {content['_class_name']} of diffusers, and how it rotates is not known; accepted: "
            f"{', '.join(FAMILIES)}, and pipelines with one of them."
        )
    for part, kind in known.items():
        if not FAMILIES[kind].rotates:
            raise InputError(f"{name}: {kind} adds a table of sines and cosines and does not rotate queries and keys.")
        with translate_loading_errors(name, revision):
            model = _load(name, kind, part or None, revision, with_weights)
        yield _read(model, Path(name, part), part, with_weights)


def _load(name: str, kind: str, subfolder: str | None, revision: str | None, with_weights: bool) -> nn.Module:
    import diffusers

    model_class, place = getattr(diffusers, kind), {"subfolder": subfolder, "revision": revision}
    if with_weights:
        return model_class.from_pretrained(name, **place).eval()
    with torch.device("meta"):
        return model_class.from_config(model_class.load_config(name, **place)).eval()


def _read(model: Any, folder: Path, part: str, with_weights: bool) -> FoundRotation:
    family, remarks = FAMILIES[str(DiffusionTower.find_kind(model))], []
    if any(True for _ in patched_towers(model)):
        planes = model.rotary_patch.planes
        remarks = _describe_learned(planes, model.rotary_encoding)
    else:
        assert family.planes is not None, "a family that rotates"
        planes = family.planes(model)
        if with_weights:
            config = RotaryPatchConfig(position_encoding="rope_mixed", rotary_init="pretrained")
            plan_library(DiffusionTower, model, config)
        if (folder / ADAPTER_CONFIG).is_file():
            remarks.append(f"learned rotations lie beside the model ({ADAPTER_CONFIG}); --weights reads them")
    if with_weights:
        remarks.append("compared with the cos and sin that the model computes for a few tokens")
    name, turning = ".".join(filter(None, (part, family.rope or family.argument))), planes.turning
    pairs, order = tuple((planes.pairs or ())[plane] for plane in turning), tuple(range(len(turning)))
    chosen = replace(planes, frequencies=planes.frequencies[..., turning], pairs=pairs)
    rotation = Rotation(name, chosen, order, 2 * planes.num_planes, order)
    return FoundRotation(rotation, model, {layer: True for layer, _ in family.find_attentions(model)}, remarks)


def _describe_learned(planes: Planes, encoding: Any) -> list[str]:
    """Describes what the learned rotations of a patched model change."""
    if not isinstance(encoding, LearnedFrequencies):
        config = encoding.config
        return [f"{config.position_encoding} with blocks of {encoding.encoding.block_size} has replaced this rotation"]
    factors = encoding.log_factors.detach().double().exp()  # (layers or 1, rotated planes)
    axes = torch.tensor(planes.axes)[planes.turning]
    by_axis = (factors[:, axes == axis] for axis in range(planes.num_axes))
    shown = (f"{one.min():.3g} … {one.max():.3g} on axis {axis}" for axis, one in enumerate(by_axis))
    return [f"learned factors of these frequencies: {', '.join(shown)}"]
