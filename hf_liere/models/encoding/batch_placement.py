"""The positions of a batch of inputs of different sizes, each distinct grid computed once."""

import torch

from ..fast.dispatch import in_portable_graph, values_are_unknown, working_dtype
from .grouped_positions import GroupedPositions
from .placement import Place, place_input
from .positions import CONVENTIONS, TokenPositions, needs_spacing
from .rotary_fields import DISPLACEMENTS


def place_batch(
    config,
    spatial_shapes: torch.Tensor,
    num_patches: int,
    device: torch.device,
    spacing: torch.Tensor | None,
    training: bool,
    needs_positions: bool,
    has_table: bool,
) -> tuple[list[Place], tuple[torch.Tensor, ...], TokenPositions | GroupedPositions | None]:
    """
    Place a batch of samples with (B, A) grids, padded to `num_patches`: the places of the distinct grids and the
    (samples,) indices of each, both empty if no table needs them, and the positions of all tokens.
    """
    needs_positions = needs_positions and config.uses_positions
    if not has_table and not needs_positions:
        return [], (), None
    drawn = training and any(getattr(config, name) != value for name, value in DISPLACEMENTS.items())
    by_grid = has_table or needs_spacing(config) or drawn
    if values_are_unknown(spatial_shapes) and not by_grid:
        shapes = spatial_shapes.to(device, working_dtype(device))  # (B, A)
        return [], (), place_shapes(config, shapes, num_patches)
    grids = distinct_grids(spatial_shapes, spacing, device)
    samples = tuple(indices for *_, indices in grids)  # (samples,) each
    places = [
        place_input(config, grid, len(indices), device, grid_spacing, None, training, needs_positions)
        for grid, grid_spacing, indices in grids
    ]
    placed = tuple(place.positions for place in places if place.positions is not None)
    return places, samples, GroupedPositions(placed, samples) if needs_positions else None


def distinct_grids(
    spatial_shapes: torch.Tensor, spacing: torch.Tensor | None, device: torch.device
) -> list[tuple[tuple[int, ...], torch.Tensor | None, torch.Tensor]]:
    """
    The grids of (B, A) patches per axis, each with the spacing and the (samples,) indices of its samples. Samples of
    different (A,) or (B, A) spacing do not share a grid.
    """
    if in_portable_graph():
        raise ValueError(
            "An exported graph would keep the spatial_shapes of its example; accepted there: inputs of one size, or "
            "coordinates of the grid alone, without a table and in evaluation mode."
        )
    spacing = None if spacing is None else torch.as_tensor(spacing)
    groups: dict[tuple, tuple[torch.Tensor | None, list[int]]] = {}
    for sample, grid in enumerate(map(tuple, spatial_shapes.tolist())):
        own = spacing[sample] if spacing is not None and spacing.ndim == 2 else spacing  # (A,)
        key = grid, None if own is None else tuple(own.tolist())
        groups.setdefault(key, (own, []))[1].append(sample)
    if not groups:
        # An empty batch gets one grid, so that its outputs have the usual types.
        axes = spatial_shapes.shape[1]
        groups[(1,) * axes, None] = None if spacing is None else spacing.new_ones(axes), []
    return [
        (grid, shared, torch.tensor(samples, dtype=torch.long, device=device))
        for (grid, _), (shared, samples) in groups.items()
    ]


def place_shapes(config, shapes: torch.Tensor, num_patches: int) -> TokenPositions:
    """
    [`place_patches`] for samples of (B, A) `shapes`, in the working type, by operations that do not depend on them.
    Positions of padding are arbitrary.
    """
    index = torch.arange(num_patches, device=shapes.device, dtype=shapes.dtype)  # (N,)
    strides = shapes.flip(-1).cumprod(-1).flip(-1).roll(-1, dims=-1)  # (B, A)
    strides = torch.cat([strides[:, :-1], torch.ones_like(strides[:, -1:])], dim=-1).unsqueeze(1)  # (B, 1, A)
    sizes, trained = shapes.unsqueeze(1), shapes.new_tensor(config.train_grid)  # (B, 1, A), (A,)
    indices = (index.view(1, -1, 1) / strides).floor().remainder(sizes)  # (B, N, A)
    patches = CONVENTIONS[config.coordinates].place(indices, sizes, trained, sizes[..., -1:])  # (B, N, A)
    return TokenPositions.from_coordinates(patches, *config.prefix)
