"""
The parameters of learned rotations in models of other libraries, which start at the pretrained rotation, or at none.

Learned frequencies turn the model's own cos and sin further: R(p, ω′) = R(p, ω) R(p, ω′ − ω), so that whatever computed
them, in float64 or from a table, the start has the same bits. Blocks rotate queries and keys where attention normalises
them, and the model's own rotation becomes the identity.
"""

from typing import Any, TypeAlias

import torch
from transformers import initialization as init

from ..models.encoding.positions import TokenPositions
from ..models.encoding.rotary_embedding import LieRotaryEmbedding
from ..models.encoding.rotary_encoding import LearnedRotations
from ..models.encoding.starting_values import order_planes
from ..models.fast.dispatch import working_dtype
from ..models.rotation.model_basis import rotate_one
from ..models.rotation.rotation import TokenRotation
from .planes import ADJACENT, PlaneTable
from .schedules import Schedule, ScheduleInput


# Either complex numbers, or cos and sin.
Turn: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class PretrainedFrequencies(LearnedRotations):
    """
    RoPE with learned frequencies in every layer: plane i rotates with ω_i exp(δ_i), δ = 0 at the start.

    Args:
        table: The planes of every attention module.
        layers: Indices of the attention modules that learn.
        config: A `RotaryPatchConfig`.
        pairing: The two channels of a plane, `ADJACENT` or `HALVES`.

    Attributes:
        log_factors: (layers or 1, rotated planes), the δ.
    """

    def __init__(self, table: PlaneTable, layers: list[int], config: Any, pairing: str):
        super().__init__()
        if config.block_size not in (None, 2):
            raise ValueError(f"block_size={config.block_size}: rope_mixed rotates planes, its only block_size is 2.")
        self.config, self.table, self.pairing = config, table, pairing
        self.place = {layer: 0 if config.share_layers else place for place, layer in enumerate(layers)}
        axes = torch.tensor(table.axes)
        self.log_factors = self.new_parameter(len(set(self.place.values())), len(table.rotated))
        # The bits of float32 numbers: conversions of the model to half types leave integers as they are.
        bits = torch.tensor(table.frequencies, dtype=torch.float32).view(torch.int32)  # (planes,)
        same_axis = axes == axes.unsqueeze(-1)  # (planes, planes)
        self.register_buffer("frequency_bits", bits, persistent=False)
        self.register_buffer("rotated", torch.tensor(table.rotated), persistent=False)  # (rotated planes,)
        self.register_buffer("axes", axes, persistent=False)  # (planes,)
        self.register_buffer("ranks", same_axis.tril(-1).sum(-1), persistent=False)  # (planes,)
        self.register_buffer("channels", 2 * same_axis.sum(-1), persistent=False)  # (planes,)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        init.zeros_(self.log_factors)

    def forward(
        self,
        layer: int,
        turn: Turn,
        coordinates: torch.Tensor,
        schedule: Schedule | None = None,
        size: torch.Tensor | None = None,
        noise_level: torch.Tensor | None = None,
    ) -> Turn:
        """
        The rotation of an attention module, from the model's own.

        Args:
            layer: Index of the attention module.
            turn: (…, N, D) cos and sin, or (…, N, planes) complex numbers.
            coordinates: (…, N, A).
            size: (A,) tokens on every axis, if there is a schedule.
            noise_level: As in [`ScheduleInput`].
        """
        device, dtype = coordinates.device, working_dtype(coordinates.device)
        frequencies = self.frequency_bits.to(device).view(torch.float32).to(dtype)  # (planes,)
        # e^δ − 1, exactly 0 at the start
        change = torch.zeros_like(frequencies)
        if layer in self.place:
            rotated = self.log_factors[self.place[layer]].to(device, dtype).expm1()  # (rotated planes,)
            change = change.index_copy(0, self.rotated.to(device), rotated)  # (planes,)
        factor: torch.Tensor | float = 1.0
        if schedule is not None:
            axes, ranks, channels = (x.to(device) for x in (self.axes, self.ranks, self.channels))
            learned = frequencies * (change + 1)  # (planes,)
            multipliers, factor = schedule(ScheduleInput(learned, axes, ranks, channels, size, noise_level, layer))
            # e^δ m − 1, exactly e^δ − 1 where the schedule changes nothing
            change = change * multipliers + (multipliers - 1)
        angles = coordinates.to(dtype).index_select(-1, self.axes.to(device)) * (frequencies * change)  # (…, N, planes)
        return turn_further(turn, angles, self.pairing, factor)


def turn_further(turn: Turn, angles: torch.Tensor, pairing: str, factor: torch.Tensor | float = 1.0) -> Turn:
    """A rotation turned by (…, N, planes) angles and multiplied by a factor; an angle of 0 leaves the same bits."""
    if isinstance(turn, torch.Tensor):
        real = turn.real.dtype
        return turn * torch.complex((angles.cos() * factor).to(real), (angles.sin() * factor).to(real))
    cos, sin = turn
    planes = [(x * factor).to(cos.dtype) for x in (angles.cos(), angles.sin())]  # 2 × (…, N, planes)
    if pairing == ADJACENT:
        more_cos, more_sin = (x.repeat_interleave(2, dim=-1) for x in planes)  # (…, N, D) each
    else:
        more_cos, more_sin = (torch.cat([x, x], dim=-1) for x in planes)
    return cos * more_cos - sin * more_sin, sin * more_cos + cos * more_sin


def apply_turn(states: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """(B, H, N, D) queries or keys rotated by (N, D) cos and sin of adjacent channels, as diffusers does it."""
    cos, sin = turn
    real, imaginary = states.unflatten(-1, (-1, 2)).unbind(-1)  # (B, H, N, planes) each
    turned = torch.stack([-imaginary, real], dim=-1).flatten(-2)
    return (states.float() * cos + turned.float() * sin).to(states.dtype)


def identity_turn(turn: Turn) -> Turn:
    """The rotation by 0, in the form of another one."""
    if isinstance(turn, torch.Tensor):
        return torch.ones_like(turn)
    return torch.ones_like(turn[0]), torch.zeros_like(turn[1])


class StateRotations(LearnedRotations):
    """
    R(p) = exp(Σ_a p_a A_a) of queries and keys, where attention normalises them.

    Attributes:
        encoding: The `RotaryEncoding` with the parameters.
        place: The place of every attention module that learns.
        order: (heads or 1, D) the model's channel at every place of a head; empty if the order is the model's.
    """

    def __init__(self, encoding: Any, config: Any, heads: int, layers: list[int], order: torch.Tensor | None = None):
        super().__init__()
        self.config, self.encoding, self.heads = config, encoding, heads
        self.place = {layer: place for place, layer in enumerate(layers)}
        self.register_buffer("order", torch.empty(0, dtype=torch.long) if order is None else order, persistent=False)

    def reset_parameters(self) -> None:
        self.encoding.reset_parameters()

    def forward(self, layer: int | None, positions: TokenPositions, dtype: torch.dtype) -> Any:
        """The rotation of an attention module, for queries and keys of this type; `None`: a list, by `place`."""
        if layer is None:
            return list(self.encoding(positions, dtype))
        return next(iter(self.encoding(positions, dtype, self.place[layer])))

    def rotate(self, rotation: TokenRotation, states: torch.Tensor, heads_first: bool) -> torch.Tensor:
        """
        R(p) applied to queries or keys; the layout is kept.

        Args:
            states: (B, N, H · D), (B, N, H, D), or with `heads_first` (B, H, N, D).
        """
        flat = states.ndim == 3
        heads = states.unflatten(-1, (self.heads, -1)) if flat else states
        heads = heads.transpose(1, 2) if flat or not heads_first else heads  # (B, H, N, D)
        if self.order.numel():
            order = self.order.to(heads.device)
            heads = _select_channels(heads, order)  # blocks are contiguous
            heads = _select_channels(rotate_one(rotation, heads, self.heads), order.argsort(-1))
        else:
            heads = rotate_one(rotation, heads, self.heads)
        heads = heads.transpose(1, 2) if flat or not heads_first else heads
        return heads.flatten(-2) if flat else heads


def _select_channels(states: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The channels of (B, H, N, D) states in the order of every head, (H or 1, D)."""
    return states.gather(-1, order.unsqueeze(1).expand(states.shape))


def build_blocks(
    table: PlaneTable, layers: list[int], config: Any, heads: int, head_dim: int, pairing: str, label: str
) -> StateRotations:
    """
    Blocks of the encoding that `config` names, which start as the planes of the pretrained rotation.

    Args:
        table: The planes of one head, or of all heads in a row.
        label: The model, for messages.

    Raises:
        ValueError: if the planes do not make such blocks.
    """
    count = head_dim // 2
    starts = range(0, len(table.axes), count)
    if len(starts) not in (1, heads):
        raise ValueError(f"{label}: cos and sin of {len(table.axes)} planes do not fit {heads} heads of {head_dim}.")
    if config.share_heads and len(starts) > 1:
        raise ValueError(f"share_heads=True: the heads of {label} rotate with different frequencies.")
    rotary = LieRotaryEmbedding(
        heads,
        head_dim,
        table.num_axes,
        config.position_encoding,
        config.block_size,
        num_layers=len(layers),
        share_heads=config.share_heads,
        share_layers=config.share_layers,
        rotary_init="zeros",
        relative_axis=config.relative_axis,
    )
    encoding, orders, spectra = rotary.encoding, [], []
    for start in starts:
        axes = table.axes[start : start + count]
        planes = torch.tensor(order_planes(axes, config.position_encoding, encoding.block_size, label))  # (planes,)
        pairs = [2 * planes, 2 * planes + 1] if pairing == ADJACENT else [planes, planes + count]
        orders.append(torch.stack(pairs, dim=-1).flatten())  # (D,)
        serves = torch.tensor(axes)[planes] == torch.arange(table.num_axes).unsqueeze(-1)  # (A, planes)
        frequencies = torch.tensor(table.frequencies[start : start + count], dtype=torch.float64)
        spectra.append(serves * frequencies[planes])  # (A, planes)
    start_frequencies = torch.stack(spectra, dim=1).unsqueeze(1)  # (A, 1, heads or 1, planes)
    shape = (-1, encoding.layers, encoding.heads, -1)
    with torch.no_grad():
        for name, values in encoding.parameters_for_planes(start_frequencies.expand(shape)).items():
            init.copy_(getattr(encoding, name), values.to(getattr(encoding, name)))
    order = torch.stack(orders)  # (heads or 1, D)
    is_own = bool((order == torch.arange(head_dim)).all())
    return StateRotations(encoding, config, heads, layers, None if is_own else order)
