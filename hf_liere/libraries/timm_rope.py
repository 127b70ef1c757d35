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


# By the name of the class, the frequencies of rows and of columns, (2, planes) or (2, layers, heads, planes). Planes of
# time, at 0 in an image, do not turn.
SPECTRA: dict[str, Callable[[Any], torch.Tensor]] = {
    "RotaryEmbeddingCat": lambda rope: torch.block_diag(rope.bands, rope.bands),
    "RotaryEmbeddingDinoV3": lambda rope: torch.block_diag(*[2 * math.pi / rope.periods.double()] * 2),
    "RotaryEmbeddingMixed": lambda rope: rope.freqs,
    "RotaryEmbeddingMRope": lambda rope: rope.inv_freq * torch.stack([rope.axis == 1, rope.axis == 2]),
}


def place_patches(rope: Any, shapes: torch.Tensor, length: int) -> torch.Tensor:
    """
    (B, N, 2) coordinates of patches in raster order, N = `length` with padding, whose coordinates are arbitrary, from
    (B, 2) patches per axis; in the order of the axes of the frequencies of `rope`, one of the classes in `SPECTRA`.
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
    values, cached = SPECTRA[name](module), getattr(module, "feat_shape", None)
    values = values if values.ndim == 4 else values[:, None, None]  # (2, layers or 1, heads or 1, planes)
    planes = Planes(values, pair_channels(pairing, values.shape[-1]))
    for shape in [tuple(cached)] if cached is not None else [grid, (2, 5)]:
        sin, cos = module.get_embed(shape=shape).chunk(2, dim=-1)  # ((layers, heads,) N, D) each
        places = place_patches(module, torch.tensor([shape], device=cos.device), math.prod(shape))[0]  # (N, 2)
        require_known((cos, sin), planes, places, f"{label}: {name}", "timm")
    return planes
