"""The rotations of a model, with or without weights: what each should compute, and the modules that compute it."""

import contextlib
import copy
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...errors import InputError, require_libraries
from ...patching.libraries.diffusion_patch import DiffusionTower
from ...patching.libraries.families import FAMILIES
from ...patching.libraries.library_patch import plan_library
from ...patching.libraries.rotations import LearnedFrequencies
from ...patching.rotary_patch import RotaryPatchConfig
from ...patching.tower_patch import patched_towers
from ...probing.attention_probe import Probe
from ...probing.coordinate_probe import TOKENS, CoordinateProbe, compute_cos_sin
from ...probing.module_inspection import takes
from ...probing.planes import Pairs, Planes
from ...probing.rope_layout import RopeLayout, RopeTower, find_rope_towers, group_ropes
from ...probing.rope_pairs import find_key_sources, find_pairs, rotates
from ...storage.loading import find_diffusers_config, translate_loading_errors
from ...storage.saved_model import ADAPTER_CONFIG
from .rotation import Rotation
from .spectrum import compute_spectrum, match_spectrum, read_law, recognise_law


# Where neither configuration nor image size says how far positions reach.
LONGEST_TEXT, LONGEST_GRID = 2048, 64
AS_THEY_ARE = "frequencies are taken as they are"
# Errors of modules that are called in a form which they do not take.
CALL_ERRORS = (AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError)


@dataclass
class FoundRotation:
    """
    One rotation of a model.

    Attributes:
        rotation: What it should compute.
        rope: Its rotary module, with values; the transformer itself in a model of diffusers, which is not called.
        layers: The attention modules that it serves, and whether each rotates; `None` where a call fails.
        remarks: What could not be found, or does not agree with the configuration.
        probe: One of its attention modules, with the arguments of its rotary module for a few tokens, of which only the
            form matters; the one that shows its pairs, if any does. `None` in a model of diffusers.
        differs: Whether the module's own frequencies differ from those of the configuration.
    """

    rotation: Rotation
    rope: nn.Module
    layers: dict[str, bool | None]
    remarks: list[str]
    probe: Any = None
    differs: bool = False

    @property
    def reads_pixels(self) -> bool:
        return not takes(self.rope, "position_ids")

    @torch.no_grad()
    def compute(
        self, place: torch.Tensor | tuple[int, int], rope: nn.Module, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        (N, D) cos and sin of the module's copy `rope` for states of a type, at (N, A) positions; of modules that read
        pixels, for an image of (height, width).
        """
        if isinstance(place, torch.Tensor):
            states, like = self.probe.arguments
            arguments = [states.to(dtype), _shape_as(place, like)]
        else:
            arguments = [torch.zeros(1, 3, *place, dtype=dtype)]
        return compute_cos_sin(rope, *arguments, **self.probe.options)

    def coordinates_of_image(self, size: tuple[int, int]) -> torch.Tensor:
        """(N, A), float64, of an image."""
        found = CoordinateProbe(self.rope)(torch.zeros(1, 3, *size), **self.probe.options)  # (…, N, D)
        planes = self.rotation.planes
        columns = [self.rotation.columns[planes.axes.index(axis)] for axis in range(planes.num_axes)]
        return found.flatten(0, -2)[:, columns].double()

    def image_size(self, grid: tuple[int, int]) -> tuple[int, int]:
        """(height, width) of an image with so many rows and columns of patches."""
        patch = self.rope.config.patch_size
        rows, columns = patch if isinstance(patch, (list, tuple)) else (patch, patch)
        return grid[0] * rows, grid[1] * columns


def _shape_as(positions: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(N, A) positions in the form of an argument that a module takes, see [`find_positions`]."""
    if like.shape[-1] == TOKENS:
        return positions.T.reshape(*like.shape[:-1], -1)  # (A, 1, N) or (1, N)
    return positions.reshape(*like.shape[:-2], -1, like.shape[-1])  # (1, N, A) or (N, A)


def find_rotations(model: nn.Module) -> tuple[list[FoundRotation], list[str]]:
    """
    The rotations of any model of transformers, which needs no values on the meta device, and the reasons why others
    cannot be described, where layers differ in nothing but their number only once. Raises `InputError` if the model is
    patched.
    """
    if any(patched_towers(model)):
        raise InputError(
            f"{type(model).__name__} has learned rotations: accepted are models with their own RoPE; hf-liere inspect "
            "shows what was learned."
        )
    found: list[FoundRotation] = []
    reasons: dict[str, str] = {}

    def refuse(reason: str) -> None:
        reasons.setdefault(re.sub(r"\d+", "", reason), reason)

    for target in group_ropes(dict(model.named_modules())):
        try:
            (tower,) = find_rope_towers(model, target)
        except CALL_ERRORS as error:
            refuse(str(error))
            continue
        with contextlib.suppress(ValueError):
            tower.sources = find_key_sources(tower)
        prefix = f"{tower.name}." if tower.name else ""
        for layout, rope, layers in _group_layers(model, tower, prefix):
            label = f"{prefix}{layout.rope_name}" + ("" if layout.layer_type is None else f":{layout.layer_type}")
            try:
                found.append(_read_layout(tower, rope, layout, label, layers))
            except CALL_ERRORS as error:
                refuse(f"{label} ({type(rope).__name__}): {error}")
    return found, list(reasons.values())


def _group_layers(
    model: nn.Module, tower: RopeTower, prefix: str
) -> Collection[tuple[RopeLayout, nn.Module, list[int]]]:
    """Layouts with their rotary modules and layers; one of every layer stands for those of others that are equal."""
    groups: dict[tuple, tuple[RopeLayout, nn.Module, list[int]]] = {}
    for layout in tower.distinct_layouts:
        rope = _with_values(model, f"{prefix}{layout.rope_name}", tower.module.get_submodule(layout.rope_name))
        values = tuple(rope._buffers[layout.buffer].flatten().tolist())
        layers = [index for index, other in enumerate(tower.layouts) if other == layout]
        key = type(rope), replace(layout, rope_name="*" if len(layers) == 1 else layout.rope_name), values
        groups.setdefault(key, (layout, rope, []))[2].extend(layers)
    return groups.values()


def _read_layout(tower: RopeTower, rope: nn.Module, layout: RopeLayout, label: str, layers: list[int]) -> FoundRotation:
    probe, pairs, head_dim, rotating = _examine_layers(tower, layers)
    axes, num_axes = _name_axes(layout, probe.arguments, probe.coordinates.flatten(0, -2))
    buffer = rope._buffers[layout.buffer].detach().double().flatten()  # (frequencies,)
    if buffer.isnan().any():
        raise ValueError("a model without weights does not compute its frequencies; --weights loads them")
    config = getattr(rope, "config", None)
    law, places, differs, remarks = _choose_spectrum(config, layout, buffer)
    indices = tuple(places[frequency] for frequency in layout.frequencies)
    spectrum, factor = (buffer, layout.factor) if law is None else compute_spectrum(law)
    plane_axes = [axes[axis] for axis in layout.axes]
    if tower.others:
        remarks.append("which attention modules use it is decided when the model runs")
    elif not any(state is not False for state in rotating.values()):
        remarks.append("no layer rotates by it")
    elif pairs is None:
        remarks.append("which channels attention rotates is unknown: it cannot be called alone, or moves channels")
    rotation = Rotation(
        name=label,
        planes=Planes.from_pairing(spectrum[list(indices)], plane_axes, pairs, num_axes, factor),
        channels=layout.planes,
        head_dim=head_dim,
        law=law,
        frequency_of_plane=indices,
        longest=_find_longest(config, law, num_axes),
    )
    return FoundRotation(rotation, rope, rotating, remarks, probe, differs)


def _name_axes(layout: RopeLayout, arguments: tuple, coordinates: torch.Tensor) -> tuple[list[int], int]:
    """By axis of a layout, the column of the positions that it reads, and the number of columns."""
    if len(arguments) == 1:
        return list(range(layout.num_axes)), layout.num_axes
    given = arguments[-1]
    by_axis = given.shape[-1] == TOKENS
    columns = (given.reshape(-1, TOKENS).T if by_axis else given.reshape(TOKENS, -1)).float()  # (N, A)
    found = []
    for axis in range(layout.num_axes):
        values = coordinates[:, layout.channels[layout.axes.index(axis)]]  # (N,)
        same = (columns == values[:, None]).all(0)  # (A,)
        if not same.any():
            raise ValueError("it multiplies frequencies with something else than positions")
        found.append(int(same.nonzero()[0]))
    return found, columns.shape[1]


def _choose_spectrum(
    config: object, layout: RopeLayout, buffer: torch.Tensor
) -> tuple[dict | None, list[int], bool, list[str]]:
    """
    The formula of the frequencies that a rotary module should have, or `None`; for each of its frequencies, the index
    in the spectrum of the formula; whether its own frequencies, or its factor, differ; and where they come from, if not
    from the configuration.
    """
    as_they_are, distinct = list(range(len(buffer))), buffer.unique()
    asked = read_law(config, layout.layer_type, len(buffer))
    if asked is None:
        laws = filter(None, [recognise_law(distinct.flip(0))])
        remark = "the configuration names no base: rope_theta is that of the module's own frequencies"
    else:
        # Axes may have the same frequencies, and half of a head an odd number of channels.
        counts = dict.fromkeys([len(buffer), len(distinct)])
        odd = ((count, dim) for count in counts for dim in ({}, {"dim": 2 * count - 1}))
        laws, remark = ({**asked, "count": count, **dim} for count, dim in odd), ""
    for law in laws:
        try:
            wanted, factor = compute_spectrum(law)
        except ValueError as error:
            return None, as_they_are, False, [f"{AS_THEY_ARE}: {error}"]
        if (indices := match_spectrum(wanted, buffer)) is not None:
            differs = asked is not None and abs(factor - layout.factor) > 1e-6 * factor
            return law, indices, differs, [remark] if remark else []
    unknown = [f"{AS_THEY_ARE}: they follow no formula known here"] if asked is None else []
    return asked, as_they_are, asked is not None, unknown


def _find_longest(config: object, law: dict | None, num_axes: int) -> int:
    length = getattr(config, "max_position_embeddings", None)
    if law is not None and law["rope_type"] == "longrope":
        length = law.get("original_max_position_embeddings", length)
    if isinstance(length, int) and length > 1:
        return length - 1
    image, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if isinstance(image, int) and isinstance(patch, int) and image > patch:
        return image // patch - 1
    return (LONGEST_TEXT if num_axes == 1 else LONGEST_GRID) - 1


def _examine_layers(
    tower: RopeTower, layers: list[int]
) -> tuple[Probe, Pairs | None, int | None, dict[str, bool | None]]:
    """The probe, pairs and width of a head of the first of these layers that shows them; whether each layer rotates."""
    shown: tuple[Probe, Pairs | None, int | None] = Probe.of(tower, layers[0]), None, None
    rotating: dict[str, bool | None] = {}
    known: dict[tuple, bool | None] = {}
    for layer in layers:
        name, attention = tower.attentions[layer]
        kind = _describe_kind(attention)
        if kind not in known:
            probe = Probe.of(tower, layer)
            try:
                known[kind] = rotates(probe)
                if known[kind] and shown[1] is None:
                    (query, _), _ = probe.rotate_quarter()
                    shown = probe, find_pairs(probe), query.shape[-1]
            except CALL_ERRORS:
                known.setdefault(kind, None)
        rotating[name] = known[kind]
    return *shown, rotating


def _describe_kind(attention: nn.Module) -> tuple:
    """Equal for attention modules that differ only in their weights and their number."""
    plain = {
        name: value
        for name, value in vars(attention).items()
        if isinstance(value, (bool, int, float, str, type(None))) and "idx" not in name and "index" not in name
    }
    shapes = tuple((name, tuple(value.shape)) for name, value in attention.named_parameters())
    return type(attention), tuple(sorted(plain.items(), key=str)), shapes


def _with_values(model: nn.Module, name: str, rope: nn.Module) -> nn.Module:
    """A rotary module on the CPU; one without values gets those that a new model has."""
    if not any(buffer is not None and buffer.is_meta for buffer in rope.buffers()):
        return copy.deepcopy(rope).cpu().eval()
    made = copy.deepcopy(rope).to_empty(device="cpu").eval()
    for buffer in made.buffers():
        buffer.fill_(float("nan"))
    parts = name.split(".")
    around = (model.get_submodule(".".join(parts[:length])) for length in range(len(parts)))
    *_, nearest = (module for module in around if isinstance(module, PreTrainedModel))
    with torch.device("cpu"), torch.no_grad():
        nearest._init_weights(made)
    return made


def find_diffusion_rotations(name: str, with_weights: bool, revision: str | None = None) -> Iterator[FoundRotation]:
    """
    The rotations of the transformers in a folder or repository of a model or pipeline: the planes of a head, and those
    of all heads in a row for LTX; `with_weights`, they are compared with the cos and sin that the model computes for a
    few tokens, and learned ones are read. Raises `InputError` if no transformer in it rotates, or how it rotates is not
    known.
    """
    require_libraries(f"Describing {name}", "diffusers", "diffusers")
    import diffusers

    content = find_diffusers_config(name, revision)
    assert content is not None, "a checkpoint of diffusers"
    # A pipeline lists the library and the class of each part.
    parts = {part: value[1] for part, value in content.items() if isinstance(value, list) and len(value) == 2}
    known = {part: kind for part, kind in {"": content["_class_name"], **parts}.items() if kind in FAMILIES}
    if not known:
        raise InputError(
            f"{name} contains the {content['_class_name']} of diffusers, and how it rotates is not known; accepted: "
            f"{', '.join(FAMILIES)}, and pipelines with one of them."
        )
    for part, kind in known.items():
        if not FAMILIES[kind].rotates:
            raise InputError(f"{name}: {kind} adds a table of sines and cosines and does not rotate queries and keys.")
        model_class, place = getattr(diffusers, kind), {"subfolder": part or None, "revision": revision}
        with translate_loading_errors(name, revision), torch.device("cpu" if with_weights else "meta"):
            if with_weights:
                model = model_class.from_pretrained(name, **place)
            else:
                model = model_class.from_config(model_class.load_config(name, **place))
        yield _read_diffusion(model.eval(), Path(name, part), part, with_weights)


def _read_diffusion(model: Any, folder: Path, part: str, with_weights: bool) -> FoundRotation:
    family, remarks = FAMILIES[str(DiffusionTower.find_kind(model))], []
    if any(patched_towers(model)):
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
