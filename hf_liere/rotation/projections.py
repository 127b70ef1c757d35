"""Query and key projections in the basis of commuting rotations: on the fly in training, folded for inference."""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch import nn

from ..fast.dispatch import in_forward_mode
from .bases import basis_gradients, to_basis
from .grouped_rotation import Rotation


# torch has no public name for hooks of all modules; without this private one, assume that there are none.
_has_global_hooks = getattr(nn.modules.module, "_has_any_global_hook", lambda: False)
# That of a head, or of each of its shares, `None` without one, with its number of channels.
Basis: TypeAlias = "torch.Tensor | tuple[tuple[torch.Tensor | None, int], ...]"
HOOKS = ("forward", "forward_pre", "backward", "backward_pre")


def project(projection: nn.Module, hidden_states: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Query or key projection (B, N, H · D), in the basis of a rotation."""
    if _obstacle(projection) is None and not _has_global_hooks() and not in_forward_mode():
        weight = projection.weight
        if weight.device == hidden_states.device:
            # Cheaper than changing the basis of all tokens.
            return _LinearInBasis.apply(hidden_states, weight, projection.bias, rotation.basis)
    assert rotation.basis is not None, "the projection is in the basis of the rotation"
    projected = projection(hidden_states)  # (B, N, H · D)
    head_dim = rotation.basis.shape[1] * rotation.basis.shape[-1]
    states = projected.unflatten(-1, (-1, head_dim)).transpose(1, 2)  # (B, H, N, D)
    return rotation.change_basis(states).transpose(1, 2).reshape(projected.shape)


def check_foldable(projections: Iterable[nn.Module]) -> None:
    """Raises `ValueError` if a projection is more than a weight and a bias, see [`LieREAttention`]."""
    for projection in projections:
        if obstacle := _obstacle(projection):
            raise ValueError(
                f"Rotations fold into plain linear layers, not into {obstacle}: merge adapters, make pruning and "
                "parametrizations permanent and remove hooks first; quantize, offload and shard afterwards."
            )


@torch.no_grad()
def fold_into(projections: Sequence[nn.Module], basis: Basis, output: nn.Module | None = None) -> None:
    """
    Change the weights of query, key or value projections to the eigenbasis of their rotations, permanently.

    Args:
        projections: Linear layers to (heads · head_dim) channels.
        basis: As for [`to_folded`].
        output: Linear layer from as many channels, which takes rotated values in this basis.

    Raises:
        ValueError: as [`check_foldable`].
    """
    check_foldable([*projections, *([] if output is None else [output])])
    for projection in projections:
        for parameter in (projection.weight, projection.bias):
            if parameter is not None:
                parameter.copy_(to_folded(parameter, basis))
    if output is not None:
        output.weight.copy_(to_folded(output.weight.T, basis).T)


def to_folded(rows: torch.Tensor, basis: Basis) -> torch.Tensor:
    """
    (H · D, …) channels of all heads in the basis of their rotations. Those that odd blocks do not rotate go to the end
    of a head.

    Args:
        basis: (1 or key heads, blocks, b, b); a key head serves a group of neighbouring query heads. Of shares of a
            head, the basis of each or `None`, and its number of channels.
    """
    if isinstance(basis, tuple):
        widths = [width for _, width in basis]
        shares = rows.unflatten(0, (-1, sum(widths))).split(widths, dim=1)  # (H, width, …) each
        folded = [
            share if own is None else to_folded(share.flatten(0, 1), own).view_as(share)
            for share, (own, _) in zip(shares, basis)
        ]
        return torch.cat(folded, dim=1).flatten(0, 1)
    key_heads, blocks, size, _ = basis.shape
    channels = torch.arange(blocks * size, device=basis.device).view(blocks, size)  # (blocks, b)
    in_planes = size - size % 2
    order = torch.cat([channels[:, :in_planes].flatten(), channels[:, in_planes:].flatten()])  # (D,)
    if key_heads > 1:
        basis = basis.repeat_interleave(len(rows) // len(order) // key_heads, dim=0)
    return _reorder(to_basis(rows, basis), order)


@torch.no_grad()
def reorder_channels(projection: nn.Module, order: torch.Tensor) -> None:
    """Put the (D,) channels `order` of every head one after the other."""
    for parameter in (projection.weight, projection.bias):
        if parameter is not None:
            parameter.copy_(_reorder(parameter, order))


def _reorder(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """(H · D, …), the (D,) channels of every head in this order."""
    return rows.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1)


def _obstacle(projection: nn.Module) -> str | None:
    """Why a projection is more than a weight and a bias, or `None` if it is not."""
    if type(projection) is not nn.Linear:
        # Adapters, quantized layers, parametrizations and FSDP2 change the class.
        return type(projection).__name__
    if any(getattr(projection, f"_{kind}_hooks") for kind in HOOKS):
        # Pruning and DeepSpeed compute or gather the weight in hooks.
        return "a Linear with hooks"
    if "forward" in projection.__dict__:
        # accelerate loads offloaded weights this way.
        return "a Linear whose forward was replaced"
    parameters = projection._parameters
    if len(parameters) != 2 or "weight" not in parameters or "bias" not in parameters:
        return f"a Linear with the parameters {sorted(parameters)}"
    for parameter in parameters.values():
        if parameter is not None and type(parameter) is not nn.Parameter:
            # Quantized or sharded.
            return f"a Linear with a {type(parameter).__name__} for its weight or bias"
    return None


class _LinearInBasis(torch.autograd.Function):
    """Uᵀ (W x + b). The backward pass computes Uᵀ W again: saving it would take 5% of a step's memory."""

    generate_vmap_rule = True

    @staticmethod
    def forward(hidden_states, weight, bias, basis):
        bias = None if bias is None else to_basis(bias, basis)
        return nn.functional.linear(hidden_states, to_basis(weight, basis), bias)

    @staticmethod
    def setup_context(ctx, inputs, output):
        hidden_states, weight, bias, basis = inputs
        ctx.save_for_backward(hidden_states, weight, bias if ctx.needs_input_grad[3] else None, basis)

    @staticmethod
    def backward(ctx, gradient):
        hidden_states, weight, bias, basis = ctx.saved_tensors
        back = basis.transpose(-1, -2)  # (1 or H, blocks, b, b)
        hidden_gradient = weight_gradient = bias_gradient = basis_gradient = None
        rows = gradient.flatten(0, -2)  # (B · N, H · D)
        # (H · D, channels), the gradient of Uᵀ W.
        product = (rows.T @ hidden_states.flatten(0, -2).to(rows.dtype)) if any(ctx.needs_input_grad[1::2]) else None
        if ctx.needs_input_grad[0]:
            hidden_gradient = (gradient @ to_basis(weight, basis).to(gradient.dtype)).to(hidden_states.dtype)
        if ctx.needs_input_grad[1]:
            weight_gradient = to_basis(product, back).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            bias_gradient = to_basis(rows.sum(0), back).to(weight.dtype)
        if ctx.needs_input_grad[3]:
            basis_gradient = basis_gradients(weight, product, basis)
            if bias is not None:
                basis_gradient = basis_gradient + basis_gradients(bias, rows.sum(0), basis)
        return hidden_gradient, weight_gradient, bias_gradient, basis_gradient
