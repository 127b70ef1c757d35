"""The base of all rotary encodings: parameters, starting values, and the rotations of every layer."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn
from transformers import initialization as init
from transformers.utils import logging

from ..rotation.dispatch import working_dtype
from ..rotation.exponential import layer_block_rotations, plane_rotations, skew
from ..rotation.rotation import BlockRotation, GroupedRotation, PlaneRotation, Rotation
from ..rotation.scaling_and_squaring import Rays
from .positions import GroupedPositions, TokenPositions
from .rotation_cache import RotationCache


logger = logging.get_logger(__name__)

ALL_LAYERS = slice(None)


class LearnedRotations(nn.Module):
    """Parameters of rotations, which must not be rounded to half types; `config` names the encoding."""

    @staticmethod
    def new_parameter(*shape: int) -> nn.Parameter:
        """In the default dtype, but at least float32: rounded generators rotate distant patches wrongly."""
        return nn.Parameter(torch.empty(shape, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32)))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "LearnedRotations":
        before = {parameter.dtype for parameter in self.parameters()}
        result = super()._apply(fn, recurse)
        rounded = ({parameter.dtype for parameter in self.parameters()} - before) & {torch.float16, torch.bfloat16}
        if rounded:
            logger.warning_once(
                f"The generators of {self.config.position_encoding} were rounded to {rounded.pop()}: rotations of "
                "distant patches are off by up to 0.1 on a 64 × 64 grid. Keep them in float32: load the model with "
                "from_pretrained(…, dtype=…), which keeps them, or train it with autocast."
            )
        return result

    @property
    def rotation_dtype(self) -> torch.dtype:
        """float64 for float64 parameters, else float32; attention casts rotations when it applies them."""
        is_double = any(parameter.dtype == torch.float64 for parameter in self.parameters())
        return torch.float64 if is_double else torch.float32


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
        if layer is None:
            return self.cache.rotations(self, positions.settle(), dtype)
        return [next(iter(self.cache.rotations(self, positions.settle(), dtype, self._select_layer(layer))))]

    def _rotate_groups(self, groups: tuple[TokenPositions, ...], dtype: torch.dtype | None) -> list[Iterable[Rotation]]:
        """The rotations of every layer for each group of tokens, computed together."""
        coordinates = [group.locate().coordinates for group in groups]  # (N, A) each
        lengths, together = [len(group) for group in coordinates], TokenPositions(torch.cat(coordinates))
        return list(zip(*(rotation.split(lengths) for rotation in self.forward(together, dtype))))

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
        coordinates = self.working_coordinates(positions)  # (B · N, A)
        layers, heads, blocks = entries.shape[1:4]
        if self.block_size == 2:
            planes = self.planes(positions, entries.squeeze(-1))  # (1 or B, H, N, planes, 2) per layer
            return self.repeat_for_layers([PlaneRotation(layer) for layer in planes])
        generators = skew(entries.flatten(2, 3), self.block_size)  # (A, layers, H · blocks, b, b)
        # (H · blocks, B · N, b, b) per layer
        rotations = layer_block_rotations(coordinates, generators, self.rotation_dtype, rays, dtype)
        return self.repeat_for_layers([BlockRotation(self.to_tokens(layer, positions, heads)) for layer in rotations])

    def planes(self, positions: TokenPositions, frequencies: torch.Tensor) -> list[torch.Tensor]:
        """cos and sin of (A, layers, heads, planes) frequencies: (1 or B, heads, N, planes, 2) for every layer."""
        coordinates, heads = self.working_coordinates(positions), frequencies.shape[2]
        # The angles of one layer fit into a core's cache.
        angles = (
            plane_rotations(coordinates, layer, self.rotation_dtype)  # (H · planes, B · N, 2)
            for layer in frequencies.flatten(2).unbind(1)
        )
        return [self.to_tokens(layer, positions, heads) for layer in angles]

    def working_coordinates(self, positions: TokenPositions) -> torch.Tensor:
        """(B · N, A) coordinates in the working dtype."""
        coordinates = positions.coordinates
        return coordinates.to(working_dtype(coordinates.device)).reshape(-1, self.num_axes)

    @staticmethod
    def to_tokens(rotations: torch.Tensor, positions: TokenPositions, heads: int) -> torch.Tensor:
        """(H · K, B · N, …) → (1 or B, H, N, K, …)."""
        batch, tokens = positions.coordinates.shape[:-2] or (1,), positions.coordinates.shape[-2]
        # Tokens come before heads in memory, as in queries and keys.
        by_token = rotations.transpose(0, 1).contiguous()  # (B · N, H · K, …)
        return by_token.unflatten(1, (heads, -1)).unflatten(0, (*batch, tokens)).transpose(1, 2)  # (1 or B, H, N, K, …)

    def repeat_for_layers(self, rotations: list[Rotation]) -> list[Rotation]:
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
            spectrum = geometric_frequencies if name == "frequencies" else golden_gate_frequencies
            # (A, layers or 1, heads or 1, planes)
            frequencies = spectrum(self.config, self.num_axes, self.layers, self.heads, self.num_planes)
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
            frequencies: (A, layers or 1, heads or 1, planes), possible for this encoding.
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


def golden_gate_frequencies(config, num_axes: int, layers: int, heads: int, planes: int) -> torch.Tensor:
    """
    Golden gate RoPE's spectrum (Xiong, jerryxio.ng/posts/nd-rope): plane i
    of head h rotates with ω_i d_hi, where the ω are `min_frequency` … `max_frequency` in geometric progression after
    `unrotated_share` of the planes with ω = 0, and the unit vector d of the n-th plane of a layer, n = 1 … heads ·
    planes, has the direction of Φ⁻¹(n g⁻ᵃ mod 1), a = 1 … A: normal quantiles of the Kronecker sequence of the
    golden ratio's generalisation g, the root of g^(A+1) = g + 1, so that directions are spread evenly.

    We did not have its text: that n counts the planes of all heads of a layer and starts at 1 is second-hand. The
    defaults of `min_frequency` and `max_frequency` are ours, the band of RoPE-Mixed's spectrum with θ = 10.

    Returns:
        (A, layers, heads, planes) in float64 on the CPU, the same in every layer.
    """
    unrotated, real = round(config.unrotated_share * planes), {"dtype": torch.float64, "device": "cpu"}
    steps = torch.linspace(0, 1, planes - unrotated, **real)
    ratio = config.max_frequency / config.min_frequency
    magnitudes = torch.cat([steps.new_zeros(unrotated), config.min_frequency * ratio**steps])  # (planes,)
    golden = 2.0
    for _ in range(64):
        golden = (1 + golden) ** (1 / (num_axes + 1))
    exponents = torch.arange(1, num_axes + 1, **real).unsqueeze(-1)  # (A, 1)
    shares = torch.arange(1, heads * planes + 1, **real) * golden**-exponents % 1  # (A, heads · planes)
    directions = nn.functional.normalize(torch.erfinv(2 * shares - 1), dim=0).unflatten(1, (1, heads, planes))
    return (directions * magnitudes).expand(num_axes, layers, heads, planes)
