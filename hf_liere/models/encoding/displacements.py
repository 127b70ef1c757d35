"""Displacements of patches in training: ComRoPE's perturbation and DINOv3's augmentation of coordinates."""

import math

import torch

from ..fast.dispatch import working_dtype
from .positions import patch_indices


def draw_perturbation(grid: tuple[int, ...], strength: float, device: torch.device) -> torch.Tensor:
    """
    Random displacements of patches, ComRoPE eq. (11): normal with a standard deviation of `strength` patch extents,
    truncated to the patch (not clamped, which would put mass on its border).

    Every forward pass draws once for all samples of its batch, so that they share rotations; the equation does not
    say whether samples differ, and ComRoPE's code accepts both. That code halves the deviation, clamps, and perturbs no
    frames of videos; here all axes are perturbed. For other draws, pass `positions` to the model.

    Returns:
        (N, A) displacements in patch extents, in [−½, ½].
    """
    quantiles = _draw_uniform(math.erf(0.5 / (strength * math.sqrt(2))), device, math.prod(grid), len(grid))
    return torch.erfinv(quantiles).mul(strength * math.sqrt(2)).clamp(-0.5, 0.5)


def draw_displacements(
    config, grid: tuple[int, ...], given: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """
    Draw the displacements of a forward pass in training: those of [`draw_perturbation`], then those of DINOv3 (§3.2 and
    its code). It augments coordinates x that run from −1 to 1 over an input: x ← (x + s) · j · r, with one
    s_a ~ U[−shift, shift] and one j_a ~ exp U[−log jitter, log jitter] per axis, and one r ~ exp U[−log rescale, log
    rescale] for all axes. All patches share these numbers.

    Args:
        config: A [`LieREConfig`] or a [`RotaryPatchConfig`].
        given: (…, N, A) displacements that the input has, for frames at irregular times, or `None`.

    Returns:
        Two displacements in patch extents, each possibly `None`: (N, A) from [`draw_perturbation`], which also act on a
        table of training patches, and (…, N, A) of everything together, which act on coordinates.
    """
    perturbed, offsets = None, given
    if config.position_perturbation:
        perturbed = draw_perturbation(grid, config.position_perturbation, device)  # (N, A)
        offsets = perturbed if given is None else given + perturbed  # (…, N, A)
    shift, factors = config.position_shift, ((config.position_jitter, len(grid)), (config.position_rescale, 1))
    if not shift and all(largest is None for largest, _ in factors):
        return perturbed, offsets
    regular = patch_indices(grid, device)  # (N, A)
    half = regular.new_tensor(grid) / 2  # (A,)
    centre = half - 0.5
    placed = (regular if offsets is None else regular + offsets) - centre  # (…, N, A)
    if shift:
        placed = placed + _draw_uniform(shift, device, len(grid)) * half
    for largest, axes in factors:
        if largest is not None:
            placed = placed * _draw_uniform(math.log(largest), device, axes).exp()
    return perturbed, placed + centre - regular


def _draw_uniform(bound: float, device: torch.device, *shape: int) -> torch.Tensor:
    """Numbers from U[−bound, bound], in the working type."""
    return torch.rand(*shape, device=device, dtype=working_dtype(device)).mul(2).sub(1).mul(bound)
