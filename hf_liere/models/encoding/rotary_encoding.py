"""The base of all rotary encodings: parameters, starting values, and the rotations of every layer."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import nn
from transformers import initialization as init
from transformers.utils import logging

from ..rotation.accumulation import RotationAccumulation
from ..rotation.closed_forms import plane_rotations
from ..rotation.dispatch import values_are_unknown, working_dtype
from ..rotation.exponential import layer_block_rotations, skew, skew_entries
from ..rotation.grouped_rotation import GroupedRotation, Rotation
from ..rotation.rotation import BlockRotation, PlaneRotation, RoundedPlaneRotation
from ..rotation.scaling_and_squaring import Rays
from ..rotation.spins import representation
from .batch_positions import GroupedPositions
from .positions import GridPositions, TokenPositions
from .rotation_cache import RotationCache
from .starting_values import FREQUENCIES


logger = logging.get_logger(__name__)

Kind = TypeVar("Kind", bound=Rotation)
ALL_LAYERS = slice(None)
# All layers at once need fewer calls, but rotations of LieRE64 for ViT-B at 3,136 tokens take 7.4 GB.
ALL_LAYERS_BYTES = 1 << 30


class LearnedRotations(nn.Module):
    """Parameters of rotations, which must not be rounded to half types; `config` names the encoding."""

    def __init__(self):
        super().__init__()
        # The type of the model, which fixed rotations have no parameter to show.
        self.model_dtype = torch.get_default_dtype()

    @staticmethod
    def new_parameter(*shape: int) -> nn.Parameter:
        """In the default dtype, but at least float32: rounded generators rotate distant patches wrongly."""
        return nn.Parameter(torch.empty(shape, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32)))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "LearnedRotations":
        before = {parameter.dtype for parameter in self.parameters()}
        result = super()._apply(fn, recurse)
        self.model_dtype = fn(torch.empty(0, dtype=self.model_dtype, device="cpu")).dtype
        rounded = ({parameter.dtype for parameter in self.parameters()} - before) & {torch.float16, torch.bfloat16}
        if rounded:
            logger.warning_once(
                f"The generators of {self.config.position_encoding} were rounded to {rounded.pop()}: rotations of "
                "distant patches are off by up to 0.1 on a 64 × 64 grid. Keep them in float32: from_pretrained(…, "
                "dtype=…) does so for models and autocast in training. Layers in float32 take queries of every type."
            )
        return result

    @property
    def rotation_dtype(self) -> torch.dtype:
        """
        float64 for float64 parameters, or, without parameters, in a model of float64; else float32. Attention casts
        rotations when it applies them.
        """
        dtypes = {parameter.dtype for parameter in self.parameters()} or {self.model_dtype}
        return torch.float64 if torch.float64 in dtypes else torch.float32


class RotaryEncoding(LearnedRotations):
    """
    R(p) = exp(Σ_a p_a A_a) (LieRE eq. 4, ComRoPE eq. 3) for all layers at once, with block-diagonal skew-symmetric A_a.

    Subclasses define the parameters and compute the generators' free entries from them. The parameters of all layers
    live here, outside of the layers, in one tensor of shape (…, layers or 1, heads or 1, blocks, …) per kind.

    Args:
        config: A [`LieREConfig`] whose `position_encoding` is rotary.
        num_axes: Number A of axes of a position.
    """

    def __init__(self, config, num_axes: int):
        super().__init__()
        self.config = config
        self.num_axes = num_axes
        self.num_layers = config.num_hidden_layers
        self.block_size = config.block_size
        self.num_blocks = config.head_dim // config.block_size
        self.num_entries = config.block_size * (config.block_size - 1) // 2
        self.layers = 1 if config.share_layers else config.num_hidden_layers
        self.heads = 1 if config.share_heads else config.num_attention_heads
        self.cache = RotationCache()

    def entries(self, device: torch.device) -> torch.Tensor:
        """
        Free entries of the generators, see [`exponential.skew`]: (A, layers or 1, heads or 1, blocks, b(b−1)/2), on
        `device` unless they are parameters.
        """
        raise NotImplementedError

    def sources(self, device: torch.device, layers: slice = ALL_LAYERS) -> tuple[torch.Tensor, ...]:
        """The tensors that determine the rotations of given positions: equal values give equal rotations."""
        return (self.entries(device)[:, layers],)

    def forward(
        self,
        positions: TokenPositions | GroupedPositions,
        dtype: torch.dtype | None = None,
        layer: int | None = None,
    ) -> Iterable[Rotation]:
        """
        One rotation per layer for all tokens; inference reuses those of recent grids, see [`RotationCache`].

        Args:
            dtype: That of the queries and keys to rotate, float32 if `None`. Half types allow less exact rotations,
                see [`exponential.block_rotations`].
            layer: Compute only the rotation of this layer.
        """
        if isinstance(positions, GroupedPositions):
            groups = zip(*self._rotate_groups(positions.groups, dtype))
            return [GroupedRotation(rotations, positions.samples) for rotations in groups]
        if self.config.rotary_init == "so3":
            self._warn_of_degrees(positions)
        layers = ALL_LAYERS if layer is None else self._select_layer(layer)
        rotations = self._find_rotations(positions.settle(), dtype, layers)
        return rotations if layer is None else [next(iter(rotations))]

    def _warn_of_degrees(self, positions: TokenPositions) -> None:
        vectors = positions.locate().coordinates.detach()
        if not values_are_unknown(vectors) and vectors.numel() and vectors.norm(dim=-1).max() > 2 * math.pi:
            logger.warning_once(
                "Some rotation vectors are longer than 2π, a full turn: their length is an angle in radians. "
                "torch.deg2rad converts degrees."
            )

    def _find_rotations(
        self, positions: TokenPositions, dtype: torch.dtype | None, layers: slice
    ) -> Iterable[Rotation]:
        """[`layer_rotations`] of settled positions, or in inference what the cache has of a grid."""
        if self.training or torch.is_grad_enabled() or not isinstance(positions, GridPositions):
            return self.layer_rotations(positions, dtype, layers)
        sources = self.sources(positions.facts.device, layers)
        if values_are_unknown(*sources):
            return self.layer_rotations(positions, dtype, layers)
        types = [(source.dtype, source.device) for source in sources]
        key = (positions.facts, layers.start, dtype or self.rotation_dtype, self.rotation_dtype, *types)
        rotations = self.cache.find(key, sources)
        if rotations is None:
            rotations = self.layer_rotations(positions, dtype, layers)
            # Above a bound this is a generator, which computes layer by layer.
            if isinstance(rotations, list):
                self.cache.store(key, sources, rotations)
        return rotations

    def _rotate_groups(self, groups: tuple[TokenPositions, ...], dtype: torch.dtype | None) -> list[Iterable[Rotation]]:
        """The rotations of every layer for each group of tokens, computed together."""
        coordinates = [group.locate().coordinates for group in groups]  # (N, A) each
        lengths, together = [len(group) for group in coordinates], TokenPositions(torch.cat(coordinates))
        rotations = self.forward(together, dtype)
        return list(zip(*(each.split(lengths) for each in rotations if not isinstance(each, GroupedRotation))))

    def _select_layer(self, layer: int) -> slice:
        """Where the generators of a layer are among those of all layers."""
        return slice(layer, layer + 1) if self.layers > 1 else ALL_LAYERS

    def layer_rotations(
        self, positions: TokenPositions, dtype: torch.dtype | None = None, layers: slice = ALL_LAYERS
    ) -> Iterable[Rotation]:
        """The rotations that `forward` returns, for some or all layers, in the form that attention applies fastest."""
        placed = positions.locate()
        return self.rotations_from(placed, self.entries(placed.coordinates.device)[:, layers], dtype)

    def rotations_from(
        self, positions: TokenPositions, entries: torch.Tensor, dtype: torch.dtype | None, rays: Rays | None = None
    ) -> list[Rotation]:
        """Planes or blocks in the basis of the model, for the layers that `entries` belong to."""
        if self.block_size == 2:
            planes = self.planes(positions, entries.squeeze(-1))  # (1 or B, H, N, planes, 2) per layer
            return self.repeat_for_layers([PlaneRotation(layer) for layer in planes])
        rotation_dtype, coordinates = self.rotation_dtype, self.working_coordinates(positions)  # (B · N, A)
        generators = skew(entries.flatten(2, 3), self.block_size)  # (A, layers, H · blocks, b, b)
        # (B · N, H · blocks, b, b) per layer
        rotations = layer_block_rotations(coordinates, generators, rotation_dtype, rays, dtype)
        heads = entries.shape[2]
        return self.repeat_for_layers([BlockRotation(self.to_tokens(layer, positions, heads)) for layer in rotations])

    def planes(self, positions: TokenPositions, frequencies: torch.Tensor) -> list[torch.Tensor]:
        """cos and sin of (A, layers, heads, planes) frequencies: (1 or B, heads, N, planes, 2) for every layer."""
        coordinates, heads = self.working_coordinates(positions), frequencies.shape[2]
        # The angles of one layer fit into a core's cache.
        angles = (
            plane_rotations(coordinates, layer, self.rotation_dtype).transpose(0, 1)  # (B · N, H · planes, 2)
            for layer in frequencies.flatten(2).unbind(1)
        )
        return [self.to_tokens(layer, positions, heads) for layer in angles]

    def axis_planes(self, positions: TokenPositions, frequencies: torch.Tensor) -> list[torch.Tensor]:
        """As [`planes`], for every axis alone, factor after factor of a product: (1 or B, heads, N, A · planes, 2)."""
        by_axis = torch.diag_embed(frequencies.movedim(0, -1)).movedim(-1, 0)  # (A, layers, heads, planes, A)
        return self.planes(positions, self.to_factors(by_axis.transpose(-1, -2), dim=3).flatten(3))

    def to_factors(self, values: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Values of every axis, in the order of the factors of a product, which starts at `relative_axis`."""
        first = self.config.relative_axis
        return values.roll(-first, dim) if first else values

    def working_coordinates(self, positions: TokenPositions) -> torch.Tensor:
        """(B · N, A) coordinates in the working dtype."""
        coordinates = positions.coordinates
        return coordinates.to(working_dtype(coordinates.device)).reshape(-1, self.num_axes)

    @staticmethod
    def to_tokens(rotations: torch.Tensor, positions: TokenPositions, heads: int) -> torch.Tensor:
        """(B · N, H · K, …) → (1 or B, H, N, K, …)."""
        batch, tokens = positions.coordinates.shape[:-2] or (1,), positions.coordinates.shape[-2]
        # Tokens come before heads in memory, as in queries and keys.
        return rotations.contiguous().unflatten(1, (heads, -1)).unflatten(0, (*batch, tokens)).transpose(1, 2)

    def repeat_for_layers(self, rotations: list[Kind]) -> list[Kind]:
        """Repeat shared rotations for every layer; rotations of selected layers are returned unchanged."""
        return rotations * (self.num_layers // self.layers if len(rotations) == self.layers else 1)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise all parameters by `rotary_init` and `rotary_init_scale`, unless a checkpoint provided them."""
        name, scale = self.config.rotary_init, self.config.rotary_init_scale
        if name == "uniform":
            init.uniform_(self.generators, 0.0, scale)
        elif name == "normal":
            init.normal_(self.generators, 0.0, scale)
        elif name == "zeros":
            init.zeros_(self.generators)
        elif name is not None:
            # (A, layers or 1, heads or 1, planes)
            frequencies = FREQUENCIES[name](self.config, self.num_axes, self.layers, self.heads, self.num_planes)
            for parameter, values in self.parameters_for_planes(frequencies * scale).items():
                init.copy_(getattr(self, parameter), values.to(getattr(self, parameter)))

    @property
    def num_planes(self) -> int:
        """Number of planes per head in [`parameters_for_planes`]."""
        return self.num_blocks * (self.block_size // 2)

    def parameters_for_planes(self, frequencies: torch.Tensor) -> dict[str, torch.Tensor]:
        """
        Parameters by name with which the encoding rotates plane i of a head by Σ_a p_a f_ai; planes are pairs of
        neighbouring channels, unless an encoding documents others.

        Args:
            frequencies: (A, layers or 1, heads or 1, planes).

        Raises:
            ValueError: as [`parameters_for_entries`].
        """
        return self.parameters_for_entries(self.to_blocks(frequencies))

    def parameters_for_entries(self, entries: torch.Tensor) -> dict[str, torch.Tensor]:
        """
        Parameters by name with which the generators have these free entries.

        Args:
            entries: (A, layers or 1, heads or 1, blocks, b(b−1)/2).

        Raises:
            ValueError: if the encoding does not have such generators, with the reason.
        """
        raise NotImplementedError

    @torch.no_grad()
    def scale_generators(self, factors: torch.Tensor) -> dict[str, torch.Tensor]:
        """The changed parameters by name, for generators multiplied by (A,) `factors`."""
        shape = (-1, *[1] * (self.generators.ndim - 1))
        return {"generators": self.generators * factors.to(self.generators).view(shape)}

    def plane_basis(self, device: torch.device) -> torch.Tensor | None:
        """(b, b) basis of a block, the planes of `parameters_for_planes` first; `None` for pairs of channels."""
        return None

    def to_blocks(self, frequencies: torch.Tensor) -> torch.Tensor:
        """(…, planes) frequencies → (…, blocks, b(b−1)/2) entries of blocks that rotate these planes."""
        row, column = torch.triu_indices(self.block_size, self.block_size, offset=1)  # (b(b−1)/2,)
        in_plane = (row % 2 == 0) & (column == row + 1)  # (b(b−1)/2,)
        entries = frequencies.new_zeros(*frequencies.shape[:-1], self.num_blocks, self.num_entries)
        entries[..., in_plane] = frequencies.unflatten(-1, (self.num_blocks, self.block_size // 2))
        return entries


class LieRE(RotaryEncoding):
    """
    Free generators for every axis (LieRE §4). With `block_size` 2 this is RoPE-Mixed (LieRE §5.4), which differs only
    in its initialisation and coordinates. The last head_dim mod b channels of a head are not rotated.

    Attributes:
        generators: (A, layers or 1, heads or 1, blocks, b(b−1)/2); ViT-B, 2-D: 9,216 / 27,648 / 64,512 / 138,240 /
            285,696 / 580,608 numbers for b = 2, 4, 8, 16, 32, 64 (LieRE Table 10).
    """

    def __init__(self, config, num_axes: int):
        super().__init__(config, num_axes)
        shape = (num_axes, self.layers, self.heads, self.num_blocks, self.num_entries)
        self.generators = self.new_parameter(*shape)
        self.rotation_accumulation = RotationAccumulation()

    def entries(self, device: torch.device) -> torch.Tensor:
        return self.generators

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.config.rotary_init != "so3":
            super().reset_parameters()
            return
        entries = skew_entries(representation(self.config.spins)).to(self.generators)  # (3, b(b−1)/2)
        init.copy_(self.generators, entries[:, None, None, None].expand_as(self.generators))

    def parameters_for_entries(self, entries: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"generators": entries}

    def _rotate_groups(self, groups: tuple[TokenPositions, ...], dtype: torch.dtype | None) -> list[Iterable[Rotation]]:
        # Each group may be a grid, which has multiples of positions and a place in the cache.
        return [self.forward(group, dtype) for group in groups]

    def layer_rotations(
        self, positions: TokenPositions, dtype: torch.dtype | None = None, layers: slice = ALL_LAYERS
    ) -> Iterable[Rotation]:
        """
        On a grid that starts at zero or has its middle there, rotations at multiples of a position are powers, and
        those at its negative multiples their transposes, see `scaling_and_squaring.Rays`.
        Above `ALL_LAYERS_BYTES`, each layer's rotations are computed when they are needed.
        """
        settled, rays, key = positions.settle(), None, None
        placed = settled.locate()
        entries = self.entries(placed.coordinates.device)  # (A, layers or 1, heads or 1, blocks, b(b−1)/2)
        num_layers = entries[:, layers].shape[1]
        elements = num_layers * self.heads * self.num_blocks * self.block_size**2 * placed.coordinates[..., 0].numel()
        at_once = num_layers == 1 or elements * self.rotation_dtype.itemsize <= ALL_LAYERS_BYTES
        if isinstance(settled, GridPositions):
            rays = settled.facts.rays
            key = (settled.facts, layers.start, dtype, self.rotation_dtype) if at_once else None

        # Graphs of torch 2.9 cannot evaluate this annotation on Python 3.10.
        def compute(entries: torch.Tensor) -> "Iterable[Rotation]":
            chosen = entries[:, layers]  # (A, layers, heads, blocks, b(b−1)/2)
            if at_once:
                return self.rotations_from(placed, chosen, dtype, rays)
            # Copies, because frameworks that shard parameters free them when this module returns.
            parts = [part.clone() for part in chosen.split(1, dim=1)]
            return (self.rotations_from(placed, part, dtype, rays)[0] for part in parts)

        # Replicas of `DataParallel` share the accumulation and have no parameters.
        return self.rotation_accumulation.rotations(key, entries, compute) if self._parameters else compute(entries)


class RoundedPlanes(LieRE):
    """
    Planes whose angles, cosines and sines are rounded to float32, as those of most rotary modules: with their
    frequencies, the same bits. Angles of RoPE-Mixed are p_1 f_1 + p_2 f_2 + … in this order.
    """

    def __init__(self, config, num_axes: int):
        if config.position_encoding not in ("rope_mixed", "liere") or config.block_size != 2:
            raise ValueError(
                f"round_angles=True is for planes, not for {config.position_encoding} with block_size="
                f"{config.block_size}; accepted: rope_mixed, and liere with block_size=2."
            )
        super().__init__(config, num_axes)

    def rotations_from(
        self, positions: TokenPositions, entries: torch.Tensor, dtype: torch.dtype | None, rays: Rays | None = None
    ) -> list[Rotation]:
        coordinates = positions.coordinates.float().reshape(-1, self.num_axes)  # (B · N, A)
        rotations: list[Rotation] = []
        for layer in entries.squeeze(-1).float().unbind(1):  # (A, heads, planes)
            products = (p.unsqueeze(-1) * f.flatten() for p, f in zip(coordinates.unbind(-1), layer))
            angles = functools.reduce(torch.add, products)  # (B · N, H · planes)
            planes = torch.stack([angles.cos(), angles.sin()], dim=-1)  # (B · N, H · planes, 2)
            rotations.append(RoundedPlaneRotation(self.to_tokens(planes, positions, layer.shape[1])))
        return self.repeat_for_layers(rotations)
