"""
The rotary modules of timm: the frequencies of their planes and the coordinates of their patches, computed here as timm
does and compared with the cos and sin of a model before it is patched.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..models.fast.dispatch import working_dtype
from ..models.probing.planes import Planes, pair_channels
from .rotations import require_known


def _on_both_axes(speeds: torch.Tensor, pairing: str) -> Planes:
    """Planes of the rows, then of the columns, with the same frequencies."""
    return Planes.from_pairing(speeds.repeat(2), [axis for axis in (0, 1) for _ in speeds], pairing)


# By the name of the class, its planes. Those of time, at 0 in an image, do not turn.
SPECTRA: dict[str, Callable[[Any, str], Planes]] = {
    "RotaryEmbeddingCat": lambda rope, pairing: _on_both_axes(rope.bands.double(), pairing),
    "RotaryEmbeddingDinoV3": lambda rope, pairing: _on_both_axes(2 * math.pi / rope.periods.double(), pairing),
    "RotaryEmbeddingMixed": lambda rope, pairing: Planes(rope.freqs, pair_channels(pairing, rope.freqs.shape[-1])),
    "RotaryEmbeddingMRope": lambda rope, pairing: Planes.from_pairing(
        rope.inv_freq * (rope.axis > 0), (rope.axis == 2).int().tolist(), pairing, num_axes=2
    ),
}


def place_patches(rope: Any, shapes: torch.Tensor, length: int) -> torch.Tensor:
    """
    Coordinates of patches in raster order, in the order of the axes of the frequencies; those of padding are arbitrary.

    Args:
        rope: One of the classes in `SPECTRA`.
        shapes: (B, 2) patches per axis of every sample.
        length: Number N of patches with padding.

    Returns:
        (B, N, 2).
    """
    dtype = working_dtype(shapes.device)
    index = torch.arange(length, device=shapes.device)  # (N,)
    columns, sizes = shapes[:, 1:], shapes.unsqueeze(1).to(dtype)  # (B, 1), (B, 1, 2)
    places = torch.stack([index // columns, index % columns], dim=-1).to(dtype)  # (B, N, 2)
    is_dino = type(rope).__name__ == "RotaryEmbeddingDinoV3"
    kind, offset = getattr(rope, "grid_type", "centered" if is_dino else "index"), getattr(rope, "grid_offset", 0.0)
    if kind == "centered":
        norm = rope.normalize_coords
        extents = sizes if norm == "separate" else getattr(sizes, f"a{norm}")(-1, keepdim=True)  # (B, 1, 1 or 2)
        places = (places + 0.5 + offset) / extents
    elif kind == "pixel":
        places = places * 2 / (sizes - 1).clamp(min=1) - 1
    else:
        places = places + offset
    if getattr(rope, "ref_feat_shape", None) is not None:
        places = places / sizes * sizes.new_tensor(rope.ref_feat_shape)
    places = 2 * places - 1 if kind == "centered" else places
    return places.flip(-1) if rope.grid_indexing == "xy" else places


@torch.no_grad()
def read_planes(rope: nn.Module, pairing: str, grid: tuple[int, int], label: str) -> Planes:
    """
    The planes of a rotary module, whose cos and sin for the grid of its model and for another one were compared with
    these. Raises `ValueError` if the module is of an unknown class, draws random coordinates, or computes other
    rotations.
    """
    name = type(rope).__name__
    module: Any = rope
    if name not in SPECTRA or not type(rope).__module__.startswith("timm."):
        raise ValueError(f"{label} rotates by a {name}; accepted: {', '.join(SPECTRA)}.")
    # What timm multiplies coordinates by, or adds to them, in training.
    neutral = {"shift": 0, "jitter": 1, "rescale": 1}
    drawn = {part: getattr(module, f"{part}_coords", None) for part in neutral}
    if any(value not in (None, neutral[part]) for part, value in drawn.items()):
        given, accepted = (
            ", ".join(f"rope_{part}_coords={value}" for part, value in each.items()) for each in (drawn, neutral)
        )
        raise ValueError(f"{label} draws random coordinates in training, {given}; accepted: {accepted}.")
    planes, cached = SPECTRA[name](module, pairing), getattr(module, "feat_shape", None)
    for shape in [tuple(cached)] if cached is not None else [grid, (2, 5)]:
        sin, cos = module.get_embed(shape=shape).chunk(2, dim=-1)  # ((layers, heads,) N, D) each
        places = place_patches(module, torch.tensor([shape], device=cos.device), math.prod(shape))[0]  # (N, 2)
        require_known((cos, sin), planes, places, f"{label}: {name}", "timm")
    return planes
