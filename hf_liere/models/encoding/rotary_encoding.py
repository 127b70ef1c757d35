"""The base of all rotary encodings: parameters, starting values, and the rotations of every layer."""

import math
from collections.abc import Iterable
from typing import TypeVar

import torch
from transformers import initialization as init

from ..fast.closed_forms import CLOSED_FORMS, plane_rotations
from ..fast.dispatch import values_are_unknown, working_dtype
from ..fast.exponentials import layer_block_rotations
from ..fast.scaling_and_squaring import Rays
from ..rotation.bases import skew
from ..rotation.grouped_rotation import GroupedRotation, Rotation
from ..rotation.learned_rotations import LearnedRotations
from ..rotation.rotation import BlockRotation, PlaneRotation
from .encoding_traits import FREQUENCIES
from .positions import GridPositions, GroupedPositions, TokenPositions
from .rotation_cache import RotationCache


Kind = TypeVar("Kind", bound=Rotation)
ALL_LAYERS = slice(None)


@FREQUENCIES.offer("frequencies")
def geometric_frequencies(config, num_axes: int, layers: int, heads: int, planes: int) -> torch.Tensor:
    """
    RoPE-Mixed's initial spectrum (RoPE-ViT §3.2): the planes of a head form one group per axis, plane i of q in a group
    rotates with θ^(−i/q), and the groups' directions are random and orthonormal, drawn for every layer and head.

    Returns:
        (A, layers, heads, planes).
    """
    group_size = math.ceil(planes / num_axes)
    plane = torch.arange(planes)  # (planes,)
    magnitudes = config.rope_theta ** -((plane % group_size) / group_size)  # (planes,)
    # torch has no QR decomposition of half types. (layers, heads, A, A)
    directions, _ = torch.linalg.qr(torch.randn(layers, heads, num_axes, num_axes, dtype=torch.float32))
    return (directions[..., plane // group_size] * magnitudes).permute(2, 0, 1, 3)


class RotaryEncoding(LearnedRotations):
    """
    R(p) = exp(Σ_a p_a A_a) (LieRE eq. 4, ComRoPE eq. 3) for all layers at once, with block-diagonal skew-symmetric A_a.

    Subclasses define the parameters and compute the generators' free entries from them. The parameters of all layers
    live here, outside of the layers, in one tensor of shape (…, layers or 1, heads or 1, blocks, …) per kind.

    Args:
        config: A [`LieREConfig`] whose `position_encoding` is rotary.
        num_axes: Number A of axes of a position.
    """

    # Whether rotations act in bases that fold into weights, see [`commuting_encodings.EncodingInBasis`].
    in_basis = False

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
        Free entries of the generators, see [`bases.skew`]: (A, layers or 1, heads or 1, blocks, b(b−1)/2), on
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
        # Shared generators are those of every layer.
        layers = ALL_LAYERS if layer is None or self.layers == 1 else slice(layer, layer + 1)
        rotations = self._find_rotations(positions, dtype, layers)
        return rotations if layer is None else [next(iter(rotations))]

    def _find_rotations(
        self, positions: TokenPositions, dtype: torch.dtype | None, layers: slice
    ) -> Iterable[Rotation]:
        """[`layer_rotations`] of positions, or in inference what the cache has of a grid."""
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

    @staticmethod
    def closed_forms(config) -> list:
        """What computes the blocks of a configuration without a general exponential."""
        return [form for size, form in CLOSED_FORMS.items() if size == config.block_size]

    @classmethod
    def folded_class(cls, config) -> "type[RotaryEncoding]":
        """The class for a folded model: this one if its rotations cost only cos and sin."""
        return cls

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
