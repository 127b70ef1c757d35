"""Attention whose queries and keys are rotated by the position of their token."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..rotation.rotation import Rotation, basis_gradients, to_basis


# torch has no public name for hooks of all modules; a release without this private one is taken to have none.
_has_global_hooks = getattr(nn.modules.module, "_has_any_global_hook", lambda: False)
HOOKS = ("forward", "forward_pre", "backward", "backward_pre")


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention that also returns its (B, H, N, N) weights."""
    weights = torch.matmul(query, key.transpose(-1, -2)) * scaling
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        weights = weights.masked_fill(~attention_mask, torch.finfo(weights.dtype).min)
    elif attention_mask is not None:
        weights = weights + attention_mask
    weights = nn.functional.softmax(weights, dim=-1, dtype=torch.promote_types(query.dtype, torch.float32))
    weights = nn.functional.dropout(weights.to(query.dtype), p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class LieREAttention(nn.Module):
    """
    Multi-head self-attention that rotates query and key before the attention function of the configuration.

    Commuting rotations are applied in the eigenbasis of their generators. The basis is multiplied into the weights of
    `q_proj` and `k_proj` where these are plain linear layers; with hooks, adapters, parametrizations, or weights that
    are quantized, offloaded or sharded, the modules are called as they are and their outputs are changed to the
    eigenbasis, which gives the same numbers up to rounding.

    Args:
        config: A [`LieREConfig`].
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.head_dim = config.head_dim
        self.scaling = config.head_dim**-0.5
        self.is_causal = False
        width = config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, config.hidden_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        rotation: Rotation | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(B, N, hidden_size) states and this layer's rotation → states and attention weights."""
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, self.config.num_attention_heads, self.head_dim)
        query = _project(self.q_proj, hidden_states, rotation).view(hidden_shape).transpose(1, 2)  # (B, H, N, D)
        key = _project(self.k_proj, hidden_states, rotation).view(hidden_shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        if rotation is not None:
            query, key = rotation.rotate(query, key)

        # Those of transformers do not take a batch without samples.
        implementation = self.config._attn_implementation if input_shape[0] else "eager"
        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        attended, weights = attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.config.attention_probs_dropout_prob if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(attended.flatten(2)), weights

    def fold(self, basis: torch.Tensor) -> None:
        """[`fold_into`] the query and key projections."""
        fold_into((self.q_proj, self.k_proj), basis)


def check_foldable(projections: Iterable[nn.Module]) -> None:
    """Raises `ValueError` if a projection computes anything but its weight and bias, see [`LieREAttention`]."""
    for projection in projections:
        if obstacle := _obstacle(projection):
            raise ValueError(
                f"Rotations fold into plain linear layers, not into {obstacle}: merge adapters, make pruning and "
                "parametrizations permanent and remove hooks first; quantize, offload and shard afterwards."
            )


@torch.no_grad()
def fold_into(projections: Sequence[nn.Module], basis: torch.Tensor) -> None:
    """
    Put the weights of query and key projections into the eigenbasis of their rotations, permanently; the channels that
    odd blocks leave without a plane go to the end of a head.

    Args:
        projections: Linear layers to (heads · head_dim) channels.
        basis: (1 or key heads, blocks, b, b); every key head is that of as many neighbouring query heads.

    Raises:
        ValueError: as [`check_foldable`].
    """
    check_foldable(projections)
    key_heads, blocks, size, _ = basis.shape
    channels = torch.arange(blocks * size, device=basis.device).view(blocks, size)
    in_planes = size - size % 2
    order = torch.cat([channels[:, :in_planes].flatten(), channels[:, in_planes:].flatten()])
    for projection in projections:
        heads = projection.out_features // len(order)
        basis_of_heads = basis if key_heads == 1 else basis.repeat_interleave(heads // key_heads, dim=0)
        for parameter in (projection.weight, projection.bias):
            if parameter is not None:
                changed = to_basis(parameter, basis_of_heads)
                parameter.copy_(changed.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1))


def _project(projection: nn.Module, hidden_states: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
    """Query or key projection, in the basis in which they are rotated."""
    if rotation is None or rotation.basis is None:
        return projection(hidden_states)
    if _obstacle(projection) is None and not _has_global_hooks():
        weight = projection.weight
        if weight.device == hidden_states.device:
            # Cheaper than changing the basis of all tokens.
            return _LinearInBasis.apply(hidden_states, weight, projection.bias, rotation.basis)
    projected = projection(hidden_states)
    head_dim = rotation.basis.shape[1] * rotation.basis.shape[-1]
    states = projected.unflatten(-1, (-1, head_dim)).transpose(1, 2)  # (B, H, N, D)
    return rotation.change_basis(states).transpose(1, 2).reshape(projected.shape)


def _obstacle(projection: nn.Module) -> str | None:
    """What makes a projection more than the weight and bias of a linear layer, or `None`: then these can be read."""
    if type(projection) is not nn.Linear:
        # Adapters, quantized layers, parametrizations and FSDP2 have classes of their own.
        return type(projection).__name__
    if any(getattr(projection, f"_{kind}_hooks") for kind in HOOKS):
        # Pruning and DeepSpeed compute or gather the weight in hooks.
        return "a Linear with hooks"
    if "forward" in projection.__dict__:
        # accelerate restores offloaded weights this way.
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
    """Uᵀ (W x + b). The backward pass changes the weight again: saving it would take 5% of a step's memory."""

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
        back = basis.transpose(-1, -2)
        hidden_gradient = weight_gradient = bias_gradient = basis_gradient = None
        rows = gradient.flatten(0, -2)
        of_rows = (rows.T @ hidden_states.flatten(0, -2).to(rows.dtype)) if any(ctx.needs_input_grad[1::2]) else None
        if ctx.needs_input_grad[0]:
            hidden_gradient = (gradient @ to_basis(weight, basis).to(gradient.dtype)).to(hidden_states.dtype)
        if ctx.needs_input_grad[1]:
            weight_gradient = to_basis(of_rows, back).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            bias_gradient = to_basis(rows.sum(0), back).to(weight.dtype)
        if ctx.needs_input_grad[3]:
            basis_gradient = basis_gradients(weight, of_rows, basis)
            if bias is not None:
                basis_gradient = basis_gradient + basis_gradients(bias, rows.sum(0), basis)
        return hidden_gradient, weight_gradient, bias_gradient, basis_gradient
