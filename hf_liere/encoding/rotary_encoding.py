"""Rotary encodings: the rotations of every layer, those of recent grids, and LieRE, whose generators are free."""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

import torch

from ..fast.closed_forms import layer_plane_rotations
from ..fast.dispatch import batches_layers, in_forward_mode, values_are_unknown, working_dtype
from ..fast.scaling_and_squaring import Rays
from ..rotation.exponential import layer_block_rotations, skew
from ..rotation.grouped_rotation import GroupedRotation, Rotation
from ..rotation.learned_rotations import LearnedRotations
from ..rotation.rotation import BlockRotation, PlaneRotation
from .kinds import ENCODINGS, PLANES, EncodingTraits, start_of
from .positions import GroupedPositions, TokenPositions


# Enough for LieRE64 of a ViT-B at 224 pixels, 440 MiB.
CACHE_BYTES = 1 << 29


class _Entry(NamedTuple):
    """Rotations, and copies of the tensors that they were computed from."""

    sources: tuple[torch.Tensor, ...]
    rotations: list[Rotation]

    def num_bytes(self) -> int:
        distinct = {id(rotation): rotation for rotation in self.rotations}.values()
        tensors = [tensor for rotation in distinct for tensor in rotation if tensor is not None]
        return sum(tensor.nbytes for tensor in (*self.sources, *tensors))

    def fits(self, sources: tuple[torch.Tensor, ...]) -> bool:
        """Whether the rotations were computed from sources of these values."""
        return all(torch.equal(known, given) for known, given in zip(self.sources, sources))


class RotationCache:
    """
    Rotations of the grids that an encoding in evaluation mode was last called with while gradients were off; those
    stored first go first. Copies start empty, and the cache is not saved.

    It compares values, not versions of tensors, so any change of a generator computes the rotations again. It compares
    the encoding's `sources`, because replicas of `DataParallel` have no `parameters()`.
    """

    def __init__(self):
        self.stored: OrderedDict[tuple, _Entry] = OrderedDict()
        self.lock = threading.Lock()

    def __deepcopy__(self, memo) -> "RotationCache":
        return RotationCache()

    def __reduce__(self):
        return RotationCache, ()

    def clear(self) -> None:
        with self.lock:
            self.stored.clear()

    def rotations(
        self, encoding, positions: TokenPositions, dtype: torch.dtype | None, layers: slice
    ) -> Iterable[Rotation]:
        """Returns the rotations of `layers`; in inference, those that were stored for this grid."""
        facts = None if encoding.training or torch.is_grad_enabled() else positions.facts
        if facts is None:
            return encoding.layer_rotations(positions, dtype, layers)
        sources = encoding.sources(facts.device, layers)
        # Accelerators would wait for the comparison of values longer than they compute; folded models have constants.
        if in_forward_mode() or batches_layers(facts.device) or values_are_unknown(*sources):
            return encoding.layer_rotations(positions, dtype, layers)
        # Sources may be computed in another type than that of the parameters, which decides that of rotations.
        types = [encoding.model_dtype, *(parameter.dtype for parameter in encoding.parameters())]
        key = (facts, layers.start, dtype, *types, *((source.dtype, source.device) for source in sources))
        rotations = self.find(key, sources)
        if rotations is None:
            rotations = encoding.layer_rotations(positions, dtype, layers)
            # Above a bound they are computed layer by layer, when they are needed.
            if isinstance(rotations, list):
                self.store(key, sources, rotations)
        return rotations

    def find(self, key: tuple, sources: tuple[torch.Tensor, ...]) -> list[Rotation] | None:
        """The rotations stored under this key, if their sources had these values."""
        with self.lock:
            entry = self.stored.get(key)
        return entry.rotations if entry is not None and entry.fits(sources) else None

    def store(self, key: tuple, sources: tuple[torch.Tensor, ...], rotations: list[Rotation]) -> None:
        """Keep rotations, and of those stored before as many as there is room for, the newest."""
        entry = _Entry(tuple(source.clone() for source in sources), rotations)
        with self.lock:
            self.stored.pop(key, None)
            room = CACHE_BYTES - entry.num_bytes()
            while self.stored and sum(each.num_bytes() for each in self.stored.values()) > room:
                self.stored.popitem(last=False)
            if room >= 0:
                self.stored[key] = entry


Kind = TypeVar("Kind", bound=Rotation)
ALL_LAYERS = slice(None)
# All layers at once need fewer calls, but rotations of LieRE64 for ViT-B at 3,136 tokens take 7.4 GB.
ALL_LAYERS_BYTES = 1 << 30


class RotaryEncoding(EncodingTraits, LearnedRotations):
    """
    R(p) = exp(Σ_a p_a A_a) (LieRE eq. 4, ComRoPE eq. 3) for all layers at once, with block-diagonal skew-symmetric A_a.

    Subclasses define the parameters and compute the generators' free entries from them. The parameters of all layers
    live here, outside of the layers, in one tensor of shape (…, layers or 1, heads or 1, blocks, …) per kind.

    ```python
    from hf_liere import LieRotaryEmbedding, RotaryEncoding
    encoding = LieRotaryEmbedding(num_heads=8, head_dim=64, num_axes=2, block_size=4).encoding
    assert isinstance(encoding, RotaryEncoding)
    entries = encoding.entries("cpu")  # (2, 1, 8, 16, 6)
    ```

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
        # Shared generators are those of every layer.
        layers = ALL_LAYERS if layer is None or self.layers == 1 else slice(layer, layer + 1)
        rotations = self.cache.rotations(self, positions, dtype, layers)
        return rotations if layer is None else [next(iter(rotations))]

    def _rotate_groups(self, groups: tuple[TokenPositions, ...], dtype: torch.dtype | None) -> list[Iterable[Rotation]]:
        """The rotations of every layer for each group of tokens, computed together."""
        coordinates = [group.locate().coordinates for group in groups]  # (N, A) each
        lengths, together = [len(group) for group in coordinates], TokenPositions(torch.cat(coordinates))
        rotations = self.forward(together, dtype)
        return list(zip(*(each.split(lengths) for each in rotations if not isinstance(each, GroupedRotation))))

    def rotate_moved(
        self, positions: TokenPositions, moves: torch.Tensor, dtype: torch.dtype, layer: int, states: torch.Tensor
    ) -> Rotation:
        """R(p + g(x)) of a layer for the (B, N, hidden_size) `states` x that its attention reads."""
        moved = self.content(states, positions, layer, moves)
        rotation: Any = next(iter(self(moved, dtype, layer)))
        return rotation if moved.coordinates.device == states.device else rotation.to(states.device)

    def layer_rotations(
        self, positions: TokenPositions, dtype: torch.dtype | None = None, layers: slice = ALL_LAYERS
    ) -> Iterable[Rotation]:
        """As `forward`, for some or all layers, in the form that attention applies fastest; see LieRE's."""
        placed = positions.locate()
        return self.rotations_from(placed, self.entries(placed.coordinates.device)[:, layers], dtype)

    def rotations_from(
        self, positions: TokenPositions, entries: torch.Tensor, dtype: torch.dtype | None, rays: Rays | None = None
    ) -> list[Rotation]:
        """Planes or blocks in the basis of the model, for the layers that `entries` belong to."""
        if self.block_size == 2:
            planes = self.planes(positions, entries.squeeze(-1))  # (1 or B, H, N, planes, 2) per layer
            return self.repeat_for_layers([PlaneRotation(layer) for layer in planes])
        entries = positions.by_head(entries)  # (A or heads · A, layers, heads, blocks, …)
        coordinates, rotation_dtype = self.working_coordinates(positions), self.rotation_dtype  # (B · N, A)
        matrices = skew(entries.flatten(2, 3), self.block_size)  # (A, layers, H · blocks, b, b)
        # (B · N, H · blocks, b, b) per layer
        rotations = layer_block_rotations(coordinates, matrices, rotation_dtype, rays, dtype)
        heads = entries.shape[2]
        return self.repeat_for_layers([BlockRotation(self.to_tokens(layer, positions, heads)) for layer in rotations])

    def planes(self, positions: TokenPositions, frequencies: torch.Tensor) -> list[torch.Tensor]:
        """cos and sin of (A, layers, heads, planes) frequencies: (1 or B, heads, N, planes, 2) for every layer."""
        frequencies = positions.by_head(frequencies)  # (A or heads · A, layers, heads, planes)
        coordinates, heads = self.working_coordinates(positions), frequencies.shape[2]
        # (B · N, H · planes, 2) per layer
        rotations = layer_plane_rotations(coordinates, frequencies.flatten(2), self.rotation_dtype)
        return [self.to_tokens(layer, positions, heads) for layer in rotations]

    def axis_planes(self, positions: TokenPositions, frequencies: torch.Tensor) -> list[torch.Tensor]:
        """As [`planes`], for every axis alone, factor after factor of a product: (1 or B, heads, N, A · planes, 2)."""
        by_axis = torch.diag_embed(frequencies.movedim(0, -1)).movedim(-1, 0)  # (A, layers, heads, planes, A)
        return self.planes(positions, by_axis.transpose(-1, -2).flatten(3))

    @property
    def rotation_dtype(self) -> torch.dtype:
        """
        float64 for float64 parameters, or, without parameters, in a model of float64; else float32. Attention casts
        rotations when it applies them.
        """
        dtypes = {parameter.dtype for parameter in self.parameters()} or {self.model_dtype}
        return torch.float64 if torch.float64 in dtypes else torch.float32

    def working_coordinates(self, positions: TokenPositions) -> torch.Tensor:
        """(B · N, A or heads · A) coordinates in the working dtype."""
        coordinates = positions.coordinates
        if coordinates.dtype != torch.float64:
            coordinates = coordinates.to(working_dtype(coordinates.device))
        return coordinates.reshape(-1, self.num_axes * positions.heads)

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
        if self.config.rotary_init is not None:
            start_of(self.config).reset(self)

    @property
    def num_planes(self) -> int:
        """Number of planes per head in [`parameters_for_planes`]."""
        return self.num_blocks * (self.block_size // 2)

    def parameters_for_planes(self, frequencies: torch.Tensor) -> dict[str, torch.Tensor]:
        """
        Parameters by name with which the encoding rotates plane i of a head by Σ_a p_a f_ai, (A, layers or 1, heads or
        1, planes); planes are pairs of neighbouring channels, unless an encoding documents others. Raises as
        [`parameters_for_entries`].
        """
        return self.parameters_for_entries(self.to_blocks(frequencies))

    def parameters_for_entries(self, entries: torch.Tensor) -> dict[str, torch.Tensor]:
        """
        Parameters by name with which the generators have these free entries, (A, layers or 1, heads or 1, blocks,
        b(b−1)/2). Raises `ValueError` if the encoding does not have such generators, with the reason.
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
        """(…, blocks · ⌊b/2⌋) frequencies → (…, blocks, b(b−1)/2) entries of blocks that rotate these planes."""
        row = torch.arange(0, self.block_size - 1, 2, device=frequencies.device)  # (⌊b/2⌋,)
        in_plane = row * (2 * self.block_size - row - 1) // 2  # (⌊b/2⌋,), as indices: ONNX refuses a mask
        entries = frequencies.new_zeros(*frequencies.shape[:-1], self.num_blocks, self.num_entries)
        entries[..., in_plane] = frequencies.unflatten(-1, (self.num_blocks, self.block_size // 2))
        return entries


@ENCODINGS.add("liere")
class LieRE(RotaryEncoding):
    """
    Free generators for every axis (LieRE §4). With `block_size` 2 this is RoPE-Mixed (LieRE §5.4), which differs only
    in its initialisation and coordinates. The last head_dim mod b channels of a head are not rotated.

    Attributes:
        generators: Entries of the A_a as [`skew`] takes them, (A, layers or 1, heads or 1, blocks, b(b−1)/2); ViT-B:
            9,216 / 27,648 / 64,512 / 138,240 / 285,696 / 580,608 numbers for b = 2, 4, 8, 16, 32, 64 (LieRE Table 10).
    """

    description = "LieRE: rotations R(p) = exp(Σ pₐ Aₐ) with free skew-symmetric generators Aₐ"
    rotary_inits = ("uniform", "normal", "zeros", "frequencies")
    rope_theta = 10.0
    coordinates = "train_grid"
    commutes = False

    def __init__(self, config, num_axes: int):
        super().__init__(config, num_axes)
        shape = (num_axes, self.layers, self.heads, self.num_blocks, self.num_entries)
        self.generators = self.new_parameter(*shape)

    def entries(self, device: torch.device) -> torch.Tensor:
        return self.generators

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
        placed = positions.locate()
        rays = None if positions.facts is None else positions.facts.rays()
        entries = self.entries(placed.coordinates.device)  # (A, layers or 1, heads or 1, blocks, b(b−1)/2)
        num_layers = entries[:, layers].shape[1]
        elements = num_layers * self.heads * self.num_blocks * self.block_size**2 * placed.coordinates[..., 0].numel()
        # Half types of parameters are float32 in rotations.
        at_once = num_layers == 1 or elements * max(entries.itemsize, 4) <= ALL_LAYERS_BYTES
        chosen = entries[:, layers]  # (A, layers, heads, blocks, b(b−1)/2)
        if at_once:
            return self.rotations_from(placed, chosen, dtype, rays)
        # Copies, because frameworks that shard parameters free them when this module returns.
        parts = [part.clone() for part in chosen.split(1, dim=1)]
        return (self.rotations_from(placed, part, dtype, rays)[0] for part in parts)


@ENCODINGS.add("rope_mixed")
class RoPEMixed(LieRE):
    """Free generators of planes: learned frequencies of all axes (RoPE-ViT §3.2)."""

    description = "RoPE-Mixed: rotations of planes by learned frequencies of all axes"
    block_sizes = PLANES
    rotary_inits = ("frequencies", "uniform", "normal", "zeros")
    coordinates = "index"
    commutes = True
    pretrained = "planes"
