"""The faults that implementations of RoPE have: each turns a right rotation into the one that is computed instead."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from ...probing.planes import STYLES, Planes, pair_channels
from .rotation import STYLE_NAMES, Rotation
from .spectrum import compute_spectrum


HALF_TYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
# What is rounded in a product under autocast.
PRODUCT_TYPES = ("frequency_dtype", "position_dtype", "phase_dtype")


@dataclass(frozen=True)
class Fault:
    """
    Attributes:
        kind: Two faults of one kind exclude each other; a key of [`FIXES`].
        name: What is computed, and what should be.
        rotation: What such an implementation computes.
    """

    kind: str
    name: str
    rotation: Rotation


FIXES = {
    "pairs": "Rotate the channels that pairs in the file lists; halves are (i, i + n), adjacent ones (2i, 2i + 1).",
    "scaling": "Apply rope_type and its fields, in rope_parameters of config.json, to the frequencies.",
    "attention factor": "Multiply cos and sin once by the attention factor, which law in the file determines.",
    "base": "Read rope_theta from rope_parameters of config.json, for the type of layer.",
    "layer type": "Choose the frequencies by the type of each layer (layer_types in config.json).",
    "partial": "Rotate head_dim × partial_rotary_factor channels, and count the frequencies over these alone.",
    "place": "Rotate the channels of a head that pairs in the file lists.",
    "sections": "Assign planes to axes as axes in the file does (mrope_section, mrope_interleaved).",
    "axes": "Pass positions in the order of the columns in the file.",
    "offset": "The first token has position 0.",
    "direction": "Rotate by +p ω: (x, y) becomes (x cos − y sin, x sin + y cos).",
    "unrotated": "Rotate queries and keys.",
    "frequency type": "Keep frequencies in float32, as from_pretrained(dtype=…) does; .to(dtype) and .half() do not.",
    "position type": "Keep positions as integers until they are multiplied with frequencies in float32.",
    "phase type": "Multiply positions and frequencies in float32, with autocast off, and round cos and sin alone.",
    "output type": "This does not grow with the position, and is usual for states in a half type, not for finer ones.",
}


def find_faults(rotation: Rotation, thetas: Sequence[float], others: Mapping[str, Rotation]) -> Iterator[Fault]:
    """
    The faults that would change what is computed. `thetas` are other bases that an implementation may have used,
    `others` the other rotations of the model, by name.
    """
    for kind, find in _FINDERS.items():
        for name, changed in find(rotation):
            yield Fault(kind, name, changed)
    for kind, name, fields in _CHANGES:
        yield Fault(kind, name, replace(rotation, **fields))
    if rotation.law is not None:
        for theta in thetas:
            law = {**rotation.law, "rope_theta": theta}
            name = f"rope_theta {theta:g} instead of {rotation.law['rope_theta']:g}"
            yield Fault("base", name, rotation.turning_by(rotation.compute_law(rope_theta=theta), law=law))
    for name, other in others.items():
        same = other.planes.num_planes == rotation.planes.num_planes
        if same and name != rotation.name and not torch.equal(other.frequencies, rotation.frequencies):
            changed = rotation.turning_by(other.frequencies, law=other.law).with_planes(factor=other.planes.factor)
            yield Fault("layer type", f"frequencies of {name}", changed)


Found: TypeAlias = Iterator[tuple[str, Rotation]]


def _find_pairs(rotation: Rotation) -> Found:
    planes, style = rotation.planes, rotation.planes.style
    if style in STYLES:
        other = "adjacent" if style == "halves" else "halves"
        pairs = pair_channels(other, planes.num_planes, planes.first_channel)
        yield f"{STYLE_NAMES[other]} instead of {STYLE_NAMES[style]}", rotation.with_planes(pairs=pairs)


def _find_scaling(rotation: Rotation) -> Found:
    law = rotation.law
    if law is None or law["rope_type"] in ("default", "axial", "dynamic", "proportional"):
        return
    kind = law["rope_type"]
    plain = rotation.compute_law(rope_type="default")
    factor = law.get("factor", 1.0)
    other = f"linear scaling instead of {kind}", plain / factor
    if kind == "linear":
        other = "scaling applied twice (linear)", plain / factor**2
    for name, frequencies in ((f"scaling ignored ({kind})", plain), other):
        if not torch.equal(frequencies, rotation.frequencies):
            yield name, rotation.turning_by(frequencies)


def _find_factor(rotation: Rotation) -> Found:
    if (factor := rotation.planes.factor) != 1:
        yield f"attention factor ignored ({factor:.4g})", rotation.with_planes(factor=1.0)
        yield f"attention factor applied twice ({factor:.4g})", rotation.with_planes(factor=factor**2)


def _find_partial(rotation: Rotation) -> Found:
    law, head_dim, planes = rotation.law, rotation.head_dim, rotation.planes
    count = planes.num_planes
    if law is None or head_dim is None or 2 * count >= head_dim or planes.num_axes > 1 or planes.first_channel:
        return
    spectrum, _ = compute_spectrum({**law, "count": head_dim // 2})
    name = f"frequencies counted over all {head_dim} channels instead of the {2 * count} that rotate"
    yield name, rotation.turning_by(spectrum[:count])
    if planes.style in STYLES:
        whole = head_dim // 2
        yield (
            f"partial factor ignored: all {head_dim} channels rotate instead of {2 * count}",
            replace(
                rotation,
                planes=Planes.from_pairing(spectrum, (0,) * whole, planes.style, factor=planes.factor),
                frequency_of_plane=tuple(range(whole)),
                law={**law, "count": whole},
                channels=(*range(whole), *range(whole)),
            ),
        )


def _find_place(rotation: Rotation) -> Found:
    style, count = rotation.planes.style, rotation.planes.num_planes
    if style not in STYLES or rotation.head_dim in (None, 2 * count):
        return
    first = rotation.planes.first_channel
    start = 0 if first else rotation.head_dim - 2 * count
    name = f"the channels from {start} of each head rotate instead of those from {first}"
    yield name, rotation.with_planes(pairs=pair_channels(style, count, start))


def _find_sections(rotation: Rotation) -> Found:
    if rotation.planes.num_axes == 1:
        return
    axes, frequencies, count = rotation.planes.axes, rotation.frequency_of_plane, rotation.planes.num_planes
    if len(set(frequencies)) < count:
        # Every axis has the whole spectrum.
        planes = list(zip(axes, frequencies))
        for name, order in (
            ("axes interleaved instead of blocked", sorted(planes, key=lambda plane: plane[::-1])),
            ("axes blocked instead of interleaved", sorted(planes)),
        ):
            if order != planes:
                yield name, _assign(rotation, *zip(*order))
        return
    cycle = tuple(plane % rotation.planes.num_axes for plane in range(count))
    interleaved = tuple(a if plane // rotation.planes.num_axes < axes.count(a) else 0 for plane, a in enumerate(cycle))
    names = {tuple(sorted(axes)): "blocked", interleaved: "interleaved"}
    found = names.get(axes, "as in the file")
    names.setdefault(cycle, "in turn to the last plane")
    for order, name in names.items():
        if order != axes:
            yield f"sections {name} instead of {found}", _assign(rotation, order, frequencies)
    for axis in range(rotation.planes.num_axes):
        yield f"sections ignored: every plane reads axis {axis}", _assign(rotation, (axis,) * count, frequencies)


def _assign(rotation: Rotation, axes: tuple[int, ...], frequencies: tuple[int, ...]) -> Rotation:
    """With other axes, and the frequencies of these indices."""
    where = [rotation.frequency_of_plane.index(frequency) for frequency in frequencies]
    return rotation.turning_by(rotation.frequencies[where], axes, frequency_of_plane=tuple(frequencies))


def _find_axes(rotation: Rotation) -> Found:
    for order in itertools.permutations(range(rotation.planes.num_axes)):
        axes = tuple(order[axis] for axis in rotation.planes.axes)
        if axes != rotation.planes.axes:
            name = "axes exchanged" if rotation.planes.num_axes == 2 else f"axes in the order {order}"
            yield f"{name}: positions are read from other columns", rotation.turning_by(rotation.frequencies, axes)


_FINDERS: dict[str, Callable[[Rotation], Found]] = {
    "pairs": _find_pairs,
    "scaling": _find_scaling,
    "attention factor": _find_factor,
    "partial": _find_partial,
    "place": _find_place,
    "sections": _find_sections,
    "axes": _find_axes,
}
# The kind, the name and the changed fields of faults that no rotation excludes.
_CHANGES: list[tuple[str, str, dict[str, Any]]] = [
    ("offset", "positions one too large", {"offset": 1.0}),
    ("offset", "positions one too small", {"offset": -1.0}),
    ("direction", "opposite direction (sin has the wrong sign)", {"sign": -1}),
    ("direction", "opposite direction (sin has the wrong sign)", {"state_sign": -1}),
    ("unrotated", "queries are not rotated", {"unrotated": ("query",)}),
    ("unrotated", "keys are not rotated", {"unrotated": ("key",)}),
    ("unrotated", "queries and keys are not rotated", {"unrotated": ("query", "key")}),
]
_CHANGES += [
    (kind, name.format(f"rounded to {type_name}"), dict.fromkeys(fields, dtype))
    for kind, name, fields in (
        ("frequency type", "frequencies {}", ["frequency_dtype"]),
        ("position type", "positions {}", ["position_dtype"]),
        ("phase type", "phase {}", ["phase_dtype"]),
        ("phase type", "positions, frequencies and phase {} (a product under autocast)", PRODUCT_TYPES),
        ("output type", "cos and sin {}", ["output_dtype"]),
    )
    for dtype, type_name in HALF_TYPES.items()
]
