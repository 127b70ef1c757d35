"""Checks of what the caller gives: tensors, and positions in place of those of a grid."""

import math
from typing import Any

import torch
from transformers.utils import logging

from ..fast.dispatch import batches_layers, values_are_unknown, working_dtype
from ..rotation.exponential import skew
from .kinds import orientations_of
from .positions import TokenPositions, needs_spacing


logger = logging.get_logger(__name__)
# Tokens among which neighbours are looked for.
NEIGHBOURS = 512


def place_given(
    config,
    coordinates: torch.Tensor,
    batch_size: int,
    num_tokens: int,
    visible: torch.Tensor | None = None,
) -> TokenPositions:
    """
    Checks and scales the user's coordinates of `num_tokens` input tokens, or of all tokens, and adds class and register
    tokens. Coordinates of hidden tokens, false in (B, N) `visible`, are ignored. Raises `ValueError` as [`check_shape`]
    and [`check_coordinates`], or if the model does not use positions.
    """
    if not config.uses_positions:
        raise ValueError(f"positions were given, but position_encoding={config.position_encoding!r} has no rotations.")
    num_prefix_tokens = config.num_prefix_tokens
    accepted = num_prefix_tokens if config.places_prefix else 0
    check_shape(coordinates, batch_size, num_tokens, config.num_axes, accepted)
    coordinates = zero_hidden(coordinates, visible)  # (…, N or P + N, A)
    check_coordinates(coordinates)
    warn_of_units(config, coordinates)
    if (scale := getattr(config, "position_scale", None)) is not None:
        coordinates = coordinates.to(working_dtype(coordinates.device))
        origin, scale = (coordinates.new_tensor(config.by_axis(f"position_{name}")) for name in ("origin", "scale"))
        coordinates = (coordinates - origin) * scale  # (…, N or P + N, A)
    if coordinates.shape[-2] > num_tokens:
        return TokenPositions(coordinates, num_prefix_tokens)
    return TokenPositions.from_coordinates(coordinates, *config.prefix)


def check_shape(
    positions: torch.Tensor, batch_size: int, num_patches: int, num_axes: int, num_prefix_tokens: int = 0
) -> None:
    """
    Raises `ValueError` if the user's `positions` are not (N, A), (1, N, A) or (B, N, A), with N patches, or these after
    P class and register tokens.
    """
    require_tensors(positions=positions)
    accepted = ((num_patches, num_axes), (batch_size, num_patches, num_axes))
    batches, tokens = positions.shape[:-2], positions.shape[-2:]
    if batches not in ((), (1,), (batch_size,)) or tokens not in (
        (num_patches, num_axes),
        (num_prefix_tokens + num_patches, num_axes),
    ):
        prefix = f"patch tokens, or these after {num_prefix_tokens} class and register tokens"
        raise ValueError(
            f"positions of shape {tuple(positions.shape)} do not match the input: accepted are {accepted[0]} (patches, "
            f"axes) and {accepted[1]} (batch, patches, axes), {prefix if num_prefix_tokens else 'patch tokens only'}."
        )


def check_coordinates(positions: torch.Tensor) -> None:
    """Raises `ValueError` if the user's `positions` are not floating point or, where no device waits, not finite."""
    if not positions.is_floating_point():
        raise ValueError(f"positions are {positions.dtype}; a floating point type is needed.")
    is_checked = not values_are_unknown(positions) and not batches_layers(positions.device)
    if is_checked and not torch.isfinite(positions).all():
        raise ValueError(f"positions contain {(~torch.isfinite(positions)).sum().item()} values that are not finite.")


@torch.no_grad()
def warn_of_units(config, positions: torch.Tensor, encoding: Any = None) -> None:
    """
    Warns of orientations in degrees; and, given the encoding of a layer, of positions whose neighbours are further
    apart than half a turn of most channels, or which their type rounds to others.
    """
    if not positions.numel() or values_are_unknown(positions, *(encoding.parameters() if encoding else ())):
        return
    if orientations := orientations_of(config):
        if any((positions[..., axes].norm(dim=-1) > 2 * math.pi).any() for axes in orientations):
            logger.warning_once(
                "Some rotation vectors are longer than 2π, a full turn: their length is an angle in radians. "
                "torch.deg2rad converts degrees."
            )
    elif encoding is not None:
        entries = encoding.entries(positions.device)[:, 0].flatten(1, 2)  # (A, blocks of all heads, b(b−1)/2)
        generators = skew(entries.to("cpu", torch.float64), encoding.block_size)  # (A, blocks of all heads, b, b)
        places = positions.reshape(-1, *positions.shape[-2:])[0, :NEIGHBOURS].to("cpu", torch.float64)  # (N, A)
        distances = torch.cdist(places, places, compute_mode="donot_use_mm_for_euclid_dist")  # (N, N)
        nearest, other = distances.where(distances > 0, math.inf).min(dim=1)  # (N,) each
        token = nearest.where(nearest.isfinite(), math.nan).nanmedian(0).indices
        step, extent = places[other[token]] - places[token], (places.amax(0) - places.amin(0)).max()  # (A,)
        if extent > 1 and torch.linalg.svdvals(torch.tensordot(step, generators, 1)).median() > math.pi:
            logger.warning_once(
                f"Neighbouring tokens are {nearest[token]:.3g} apart, at which most channels turn by more than half a "
                f"turn: divide positions by their range, here {extent:.3g}, or lower rotary_init_scale."
            )
        largest = positions.abs().flatten(0, -2).amax(0).to("cpu", torch.float64)  # (A,)
        spacing = torch.finfo(positions.dtype).eps * 2 ** (largest.log2().ceil() - 1)  # (A,), below the largest
        rate = torch.linalg.svdvals(generators).amax((1, 2))  # (A,)
        if (spacing * rate.where(rate > 0, 1.0) > 1).any():
            logger.warning_once(
                f"Positions in {positions.dtype} up to {largest.max():.3g} are {spacing.max():.3g} apart, so that "
                "neighbours may have the same: subtract a common origin in float64, before other types round them."
            )


def zero_hidden(values: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    """
    (…, N, C) values of tokens, with or without prefix tokens, and zeros where (B, N) `visible` is false: the values
    there, even infinity and NaN, reach neither outputs nor gradients. Values that samples share are zero where all
    samples hide them.
    """
    if visible is None:
        return values
    visible = visible.to(values.device, torch.bool)  # (B, N)
    if values.ndim == 2 or values.shape[0] != len(visible):
        visible = visible.any(dim=0)  # (N,)
    visible = torch.nn.functional.pad(visible, (values.shape[-2] - visible.shape[-1], 0), value=True)  # (…, N)
    return values.masked_fill(~visible.unsqueeze(-1), 0)  # (…, N, C)


def refuse_spacing(config, spacing: torch.Tensor | None, frame_times: torch.Tensor | None, positions) -> None:
    """Raises `ValueError` for a spacing or times that would have no effect."""
    for name, value in (("spacing", spacing), ("frame_times", frame_times)):
        if value is None:
            continue
        if not needs_spacing(config):
            raise ValueError(
                f"{name} was given, but coordinates={config.coordinates!r} do not depend on it: accepted with "
                "coordinates='physical'."
            )
        if positions is not None:
            raise ValueError(f"{name} and positions were both given; positions alone place the patches.")


def require_tensors(**given: object) -> None:
    """Raises `ValueError` if one of the given values is something else than a tensor or `None`."""
    for name, value in given.items():
        if value is not None and not isinstance(value, torch.Tensor):
            raise ValueError(
                f"{name} is a {type(value).__name__}; a tensor is needed: torch.as_tensor makes one of numbers, and a "
                "processor, such as AutoImageProcessor, of images."
            )
