"""Displacements of patches in training: ComRoPE's perturbation and DINOv3's augmentation of coordinates."""

import math

import torch

from .positions import patch_indices


def draw_perturbation(
    grid: tuple[int, ...], strength: float, device: torch.device | None, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """
    Random displacements of patches, ComRoPE eq. (11): normal with a standard deviation of `strength` patch extents,
    truncated to the patch (not clamped, which would put mass on its border).

    Every forward pass draws once for all samples of its batch, so that they share rotations; the equation does not
    say whether samples differ, and ComRoPE's code accepts both. That code halves the deviation, clamps, and perturbs no
    frames of videos; here all axes are perturbed. For other draws, pass `positions` to the model.

    Returns:
        (N, A) displacements in patch extents, in [−½, ½].
    """
    bound = math.erf(0.5 / (strength * math.sqrt(2)))
    # (N, A)
    quantiles = torch.rand(math.prod(grid), len(grid), device=device, dtype=dtype).mul(2).sub(1).mul(bound)
    return torch.erfinv(quantiles).mul(strength * math.sqrt(2)).clamp(-0.5, 0.5)


def draw_displacements(
    config,
    grid: tuple[int, ...],
    given: torch.Tensor | None,
    device: torch.device | None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """
    Draw the displacements of a forward pass in training.

    Args:
        config: A [`LieREConfig`] or a [`RotaryPatchConfig`].
        given: (…, N, A) displacements that the input has, for frames at irregular times, or `None`.

    Returns:
        Two displacements in patch extents, each possibly `None`: (N, A) from [`draw_perturbation`], which also act on a
        table of training patches, and (…, N, A) of everything together, which act on coordinates.
    """
    perturbed, placed = None, given
    if config.position_perturbation:
        perturbed = draw_perturbation(grid, config.position_perturbation, device, dtype)  # (N, A)
        placed = perturbed if given is None else given + perturbed  # (…, N, A)
    strengths = config.position_shift, config.position_jitter, config.position_rescale
    return perturbed, draw_augmentation(grid, placed, *strengths, device, dtype)


def draw_augmentation(
    grid: tuple[int, ...],
    offsets: torch.Tensor | None,
    shift: float,
    jitter: float | None,
    rescale: float | None,
    device: torch.device | None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor | None:
    """
    Displacements of patches as DINOv3 (§3.2 and its code) augments coordinates x that run from −1 to 1 over an input:
    x ← (x + s) · j · r, with one s_a ~ U[−shift, shift] and one j_a ~ exp U[−log jitter, log jitter] per axis, and one
    r ~ exp U[−log rescale, log rescale] for all axes. All patches share these numbers.

    Args:
        offsets: (…, N, A) displacements in patch extents to apply first, or `None`.
        shift: In half extents of the input; 0 for none.
        jitter, rescale: 1 and above; `None` for none.

    Returns:
        (…, N, A) displacements in patch extents, or `offsets` if there is nothing to draw.
    """
    if not shift and jitter is None and rescale is None:
        return offsets
    regular = patch_indices(grid, None, device, dtype)  # (N, A)
    half = regular.new_tensor(grid) / 2  # (A,)
    centre = half - 0.5
    placed = (regular if offsets is None else regular + offsets) - centre  # (…, N, A)
    if shift:
        placed = placed + _uniform(shift, len(grid), regular) * half
    if jitter is not None:
        placed = placed * _uniform(math.log(jitter), len(grid), regular).exp()
    if rescale is not None:
        placed = placed * _uniform(math.log(rescale), 1, regular).exp()
    return placed + centre - regular


def _uniform(bound: float, length: int, like: torch.Tensor) -> torch.Tensor:
    """(length,) numbers from U[−bound, bound], with the dtype and device of `like`."""
    return torch.rand(length, device=like.device, dtype=like.dtype).mul(2).sub(1).mul(bound)
