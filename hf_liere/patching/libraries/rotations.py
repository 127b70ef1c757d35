"""
The parameters of learned rotations in models of other libraries, which start at the pretrained rotation, or at none.

Learned frequencies turn the model's own cos and sin further: R(p, ω′) = R(p, ω) R(p, ω′ − ω), so that whatever computed
them, in float64 or from a table, the start has the same bits. Blocks rotate queries and keys where attention normalises
them, and the model's own rotation becomes the identity.
"""

import math
from typing import Any

import torch
from transformers import initialization as init

from ...encoding.positions import TokenPositions
from ...fast.dispatch import working_dtype
from ...layer.rotary_embedding import LieRotaryEmbedding
from ...probing.coordinate_probe import split_cos_sin
from ...probing.planes import Planes
from ...probing.tables import Tables
from ...rotation.learned_rotations import LearnedRotations
from ...rotation.model_basis import rotate_one
from ...rotation.rotation import TokenRotation
from ..carrying import Turn
from .schedules import Schedule, ScheduleInput


class LearnedFrequencies(Tables, LearnedRotations):
    """
    RoPE with learned frequencies in attention modules of some indices, which all have the same planes at the start:
    plane i rotates with ω_i exp(δ_i), δ = 0 at first.

    Attributes:
        log_factors: (layers or 1, turning planes), the δ.
    """

    def __init__(self, planes: Planes, layers: list[int], config: Any):
        super().__init__()
        if config.block_size not in (None, 2):
            raise ValueError(f"block_size={config.block_size}: rope_mixed rotates planes, its only block_size is 2.")
        self.config, self.style = config, str(planes.style)
        self.place = {layer: 0 if config.share_layers else place for place, layer in enumerate(layers)}
        self.log_factors = self.new_parameter(len(set(self.place.values())), len(planes.turning))
        frequencies = torch.tensor(planes.speeds, dtype=torch.float32)  # (planes,), also in a model of half types
        # (turning planes,), (planes,)
        self.set_tables(frequencies=frequencies, turning=torch.tensor(planes.turning), axes=torch.tensor(planes.axes))
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
        frequencies = self.frequencies.to(device, dtype)  # (planes,)
        axes = self.axes.to(device)
        # e^δ − 1, exactly 0 at the start
        change = torch.zeros_like(frequencies)
        if layer in self.place:
            turning = self.log_factors[self.place[layer]].to(device, dtype).expm1()  # (turning planes,)
            change = change.index_copy(0, self.turning.to(device), turning)  # (planes,)
        factor: torch.Tensor | float = 1.0
        if schedule is not None:
            learned, same_axis = frequencies * (change + 1), axes == axes.unsqueeze(-1)  # (planes,), (planes, planes)
            ranks, channels = same_axis.tril(-1).sum(-1), 2 * same_axis.sum(-1)  # (planes,) each
            multipliers, factor = schedule(ScheduleInput(learned, axes, ranks, channels, size, noise_level, layer))
            # e^δ m − 1, exactly e^δ − 1 where the schedule changes nothing
            change = change * multipliers + (multipliers - 1)
        angles = coordinates.to(dtype).index_select(-1, axes) * (frequencies * change)  # (…, N, planes)
        return turn_further(turn, angles, self.style, factor)


def turn_further(turn: Turn, angles: torch.Tensor, style: str, factor: torch.Tensor | float = 1.0) -> Turn:
    """A rotation turned by (…, N, planes) angles and multiplied by a factor; an angle of 0 leaves the same bits."""
    if isinstance(turn, torch.Tensor):
        real = turn.real.dtype
        return turn * torch.complex((angles.cos() * factor).to(real), (angles.sin() * factor).to(real))
    cos, sin = turn
    planes = [(x * factor).to(cos.dtype) for x in (angles.cos(), angles.sin())]  # 2 × (…, N, planes)
    if style == "adjacent":
        more_cos, more_sin = (x.repeat_interleave(2, dim=-1) for x in planes)  # (…, N, D) each
    else:
        more_cos, more_sin = (torch.cat([x, x], dim=-1) for x in planes)
    return cos * more_cos - sin * more_sin, sin * more_cos + cos * more_sin


def identity_turn(turn: Turn) -> Turn:
    """The rotation by 0, in the form of another one."""
    if isinstance(turn, torch.Tensor):
        return torch.ones_like(turn)
    return torch.ones_like(turn[0]), torch.zeros_like(turn[1])


def planes_along(planes: Planes, axis: int) -> list[tuple[float, int]]:
    """(frequency, plane) of those that turn along an axis, the slowest first."""
    return sorted((planes.speeds[plane], plane) for plane in planes.turning if planes.axes[plane] == axis)


def find_coordinates(turn: Turn, planes: Planes) -> torch.Tensor:
    """
    Recovers (…, N, A) coordinates from a model's cos and sin. On each axis the slowest plane turns less than half a
    turn, so it is unambiguous; faster planes refine it.
    """
    cos, sin = split_cos_sin(turn)
    dtype, places = working_dtype(cos.device), []
    for axis in range(planes.num_axes):
        speeds = planes_along(planes, axis)
        place: torch.Tensor | float = 0.0
        for speed, plane in (speeds[0], speeds[len(speeds) // 2], speeds[-1]):
            channel = plane if isinstance(turn, torch.Tensor) else (planes.pairs or ())[plane][0]
            angle = torch.atan2(sin[..., channel].to(dtype), cos[..., channel].to(dtype))  # (…, N)
            place = place + (torch.remainder(angle - place * speed + math.pi, 2 * math.pi) - math.pi) / speed
        places.append(place)
    found = torch.stack(places, dim=-1).float()  # (…, N, A)
    # Half types tell no fractions, and tables of cos and sin, which are rounded with a model, contain none.
    return found.round() if cos.dtype in (torch.float16, torch.bfloat16) else found


def turn_error(turn: Turn, planes: Planes, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How far a model's own rotation is from that of some planes at (…, N, A) places, and how far rounding goes."""
    angles = planes.angles(places.to(working_dtype(places.device)))
    found = split_cos_sin(turn)
    tokens = found[0].shape[:-1]
    # Models compute angles in float32, and may round cos and sin to half types.
    rounded = 1e-2 if found[0].dtype in (torch.float16, torch.bfloat16) else 1e-4
    tolerance = rounded + 2e-6 * angles.abs().max()
    if tokens.numel() == angles.shape[:-1].numel():
        known = split_cos_sin(turn_further(identity_turn(turn), angles.reshape(*tokens, -1), str(planes.style)))
        if all(x.shape == y.shape for x, y in zip(found, known)):
            return torch.stack([(x - y).abs().max() for x, y in zip(found, known)]).max(), tolerance
    return tolerance + math.inf, tolerance


def require_known(turn: Turn, planes: Planes, places: torch.Tensor, label: str, library: str) -> None:
    """Raise `ValueError` if a model's own rotation is not that of some planes at (…, N, A) places."""
    off, tolerance = turn_error(turn, planes, places)
    if not off <= tolerance:
        raise ValueError(
            f"{label} computes other rotations than the releases of {library} that are known here do; nothing was "
            "changed."
        )


class StateRotations(Tables, LearnedRotations):
    """
    R(p) = exp(Σ_a p_a A_a) of queries and keys, where attention normalises them.

    Attributes:
        encoding: The `RotaryEncoding` with the parameters.
        place: The place of every attention module that learns.
        order: (D,) the model's channel at every place of a head; `None` if the order is the model's.
    """

    def __init__(self, encoding: Any, config: Any, heads: int, layers: list[int], order: torch.Tensor | None = None):
        super().__init__()
        self.config, self.encoding, self.heads = config, encoding, heads
        self.place = {layer: place for place, layer in enumerate(layers)}
        self.set_tables(order=order)

    @classmethod
    def from_planes(
        cls, planes: Planes, config: Any, heads: int, head_dim: int, layers: list[int], label: str
    ) -> "StateRotations":
        """
        Blocks of the encoding that `config` names, which start as the planes of the pretrained rotation: those of every
        attention module or of all, and of a head or of all heads in a row; with `compose` they start at the identity.
        Raises `ValueError`, with the `label` of the model, if the planes do not make such blocks.
        """
        frequencies = planes.frequencies if planes.frequencies.shape[1] == 1 else planes.frequencies[:, layers]
        # (A, layers or 1, heads or 1, planes)
        frequencies = frequencies.unflatten(-1, (-1, head_dim // 2)).flatten(2, 3)
        start: dict[str, Any] = {"rotary_init": "zeros"} if config.compose else {"frequencies": frequencies}
        try:
            rotary = LieRotaryEmbedding(
                heads,
                head_dim,
                config.num_axes or planes.num_axes,
                config.position_encoding,
                config.block_size,
                num_layers=len(layers),
                pairing=(planes.pairs or ())[: head_dim // 2],
                share_heads=config.share_heads,
                share_layers=config.share_layers,
                **start,
            )
        except ValueError as error:
            raise ValueError(f"{label}: {error}") from error
        return cls(rotary.encoding, config, heads, layers, rotary.order)

    def reset_parameters(self) -> None:
        self.encoding.reset_parameters()

    def forward(self, layer: int | None, positions: TokenPositions, dtype: torch.dtype) -> Any:
        """Returns the rotation of an attention layer in `dtype`, or those of all layers, by `place`, for `None`."""
        if layer is None:
            return list(self.encoding(positions, dtype))
        return next(iter(self.encoding(positions, dtype, self.place[layer])))

    def rotate(self, rotation: TokenRotation, states: torch.Tensor, heads_first: bool) -> torch.Tensor:
        """
        R(p) applied to queries or keys, (B, N, H · D), (B, N, H, D) or, with `heads_first`, (B, H, N, D); the layout is
        kept.
        """
        flat = states.ndim == 3
        heads = states.unflatten(-1, (self.heads, -1)) if flat else states
        heads = heads.transpose(1, 2) if flat or not heads_first else heads  # (B, H, N, D)
        if self.order is None:
            heads = rotate_one(rotation, heads, self.heads)
        else:
            order = self.order.to(heads.device)
            # Blocks are contiguous.
            heads = rotate_one(rotation, heads.index_select(-1, order), self.heads).index_select(-1, order.argsort())
        heads = heads.transpose(1, 2) if flat or not heads_first else heads
        return heads.flatten(-2) if flat else heads
