"""Learned rotations as a layer for anybody's attention: queries, keys and the positions of their tokens."""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from ..encoding.folding import build_encoding, fold_encoding
from ..encoding.given_positions import check_coordinates, warn_of_units
from ..encoding.kinds import ENCODINGS, generators_commute, needs_exponential, orientations_of
from ..encoding.positions import GridPositions, TokenPositions
from ..encoding.rotary_fields import EncodingConfig
from ..encoding.starts import check_start, start_at
from ..fast.dispatch import values_are_unknown
from ..probing.planes import channel_pairs
from ..probing.tables import Tables
from ..registers import check_name
from ..rotation.grouped_rotation import Rotation, SharedRotation
from ..rotation.model_basis import rotate_one, rotate_pair
from ..rotation.projections import check_foldable, fold_into, reorder_channels
from ..rotation.rotation import BlockRotation, PlaneRotation, TokenRotation


class LieRotaryEmbedding(Tables):
    r"""
    R(p) q and R(p) k with R(p) = exp(Σ_a p_a A_a) and learned skew-symmetric A_a (LieRE eq. 4, ComRoPE eq. 3). Call it
    after the query and key projections of an attention.

    ```python
    import torch
    from hf_liere import LieRotaryEmbedding
    query, key, positions = torch.randn(2, 8, 9, 64), torch.randn(2, 2, 9, 64), torch.rand(9, 3)
    rotary = LieRotaryEmbedding(num_heads=8, head_dim=64, num_axes=3, num_key_value_heads=2)
    query, key = rotary(query, key, positions)  # (B, 8, N, 64), (B, 2, N, 64); (N, 3) or (B, N, 3)
    query, key = rotary(query, key, positions, positions + 1)  # keys of other tokens than the queries
    key = rotary.rotate(key, positions)  # a key that a cache keeps
    ```

    Layers may have one module each, or share one that computes the rotations of all layers with fewer operations:

    ```python
    rotary = LieRotaryEmbedding(num_heads=8, head_dim=64, num_axes=3, num_key_value_heads=2, num_layers=12)
    rotations = rotary.rotations(positions, query.dtype)
    query, key = rotary(query, key, rotations, layer=3)
    ```

    Rotations start at those of any RoPE with its `frequencies` and `pairing`; `like` of the public class finds both.

    Train its parameters, see `rotary_parameters`, in float32 and without weight decay.

    Args:
        num_heads: Number of query heads.
        head_dim: Channels of a head.
        num_axes: Number A of axes of a position, 1 to 6.
        position_encoding: A rotary encoding of [`RotaryFields`], such as `"liere"`, `"rope_mixed"` or `"comrope_ld"`,
            or a list of those that share a head.
        block_size: Size b of the diagonal blocks of the generators; `None` means that of [`RotaryFields`].
        num_key_value_heads: Number of key heads, a divisor of `num_heads`; `None` means `num_heads`. Generators belong
            to key heads: queries use those of the key head that they attend to.
        num_layers: Number of layers with separate generators.
        frequencies: Start: radians per unit of every coordinate, (A, planes), (A, num_key_value_heads, planes) or
            (A, num_layers, num_key_value_heads, planes), or (planes,) with one axis. `requires_grad_(False)` keeps
            them. Channels that have no plane are never rotated. `None` starts as `rotary_init` says.
        pairing: The channels of plane i of K: `"adjacent"` is 2i and 2i + 1 (GPT-J, diffusers), `"halves"` is i and
            i + K (GPT-NeoX, Llama); or a list of (c, d), where c becomes c·cos − d·sin. A block of b channels is made
            of b/2 consecutive planes; those of ComRoPE are reordered so that each block has planes of one axis.
        round_angles: Round angles, their cos and sin, and products with queries and keys to float32, as most
            implementations of RoPE do: the same bits as theirs, and less exact for distant positions. For planes only.
        hidden_size: Channels of the `states` that `content_positions` reads; `None` means those of all query heads.
        fields: Other fields of [`RotaryFields`].

    Attributes:
        encoding: The [`RotaryEncoding`] with the parameters, of the class that the models use.
        order: (head_dim,) the channel at every place where blocks are contiguous, and channels that are never rotated
            come last; `None` if that is the order of the channels.

    Raises:
        TypeError: for fields that are not in [`RotaryFields`].
        ValueError: if key heads do not divide query heads, or the encoding does not support these sizes, pairs of
            channels or frequencies.
    """

    # Units are looked at once, at the first call outside of a graph.
    has_seen_positions = False

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_axes: int,
        position_encoding: str | list = "liere",
        block_size: int | None = None,
        *,
        num_key_value_heads: int | None = None,
        num_layers: int = 1,
        frequencies: torch.Tensor | None = None,
        pairing: str | Sequence[tuple[int, int]] = "adjacent",
        round_angles: bool = False,
        hidden_size: int | None = None,
        **fields,
    ):
        super().__init__()
        num_key_value_heads = num_heads if num_key_value_heads is None else num_key_value_heads
        if min(num_heads, num_key_value_heads) < 1 or num_heads % num_key_value_heads:
            raise ValueError(f"num_heads={num_heads} must be a multiple of num_key_value_heads={num_key_value_heads}.")
        if isinstance(position_encoding, str):
            check_name("position_encoding", position_encoding, ENCODINGS)
        self.num_heads, self.num_key_value_heads, self.head_dim = num_heads, num_key_value_heads, head_dim
        self.num_axes, self.num_layers = num_axes, num_layers
        pairs = None
        if frequencies is not None:
            check_start("shares" if isinstance(position_encoding, list) else position_encoding, fields)
            fields["rotary_init"] = "zeros"
            pairs = channel_pairs(pairing, head_dim, frequencies.shape[-1])
        elif pairing != "adjacent":
            pairs = channel_pairs(pairing, head_dim, None)
        try:
            self.config = EncodingConfig(
                position_encoding=position_encoding,
                block_size=block_size,
                num_axes=num_axes,
                num_hidden_layers=num_layers,
                num_attention_heads=num_key_value_heads,
                head_dim=head_dim if pairs is None else 2 * len(pairs),
                round_angles=round_angles,
                hidden_size=hidden_size or num_heads * head_dim if fields.get("content_positions") else None,
                **fields,
            )
        except StrictDataclassError as error:
            raise ValueError(str(error.__cause__ or error)) from None
        self.encoding = build_encoding(self.config, num_axes)
        order = channels = list(range(head_dim))
        if pairs is not None:
            planes = range(len(pairs)) if frequencies is None else start_at(self.encoding, frequencies)
            order = [channel for plane in planes for channel in pairs[plane]]
            order += [channel for channel in channels if channel not in order]
        partial_width = self.config.head_dim < head_dim
        self._set_order(torch.tensor(order, device="cpu") if order != channels or partial_width else None)

    def _set_order(self, order: torch.Tensor | None) -> None:
        self.set_tables(order=order, inverse=None if order is None else order.argsort())

    def rotary_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of generators and multipliers: train them without weight decay."""
        return self.named_parameters()

    def rotations(self, positions: torch.Tensor | TokenPositions, dtype: torch.dtype | None = None) -> list[Rotation]:
        """
        The rotation of every layer. `forward` and `rotate` accept the list instead of positions. Do not change its
        tensors: the next call may return them again.

        Args:
            positions: (N, A) or (B, N, A) coordinates of the tokens in any unit, floating point; or a grid of patches
                from [`grid_positions`], with faster rotations, which inference keeps for the next call.
            dtype: That of the queries and keys, float32 if `None`. Half types allow less exact rotations.

        Raises:
            ValueError: if positions are of another type, have another number of axes, or are not floating point or
                not finite.
        """
        return list(self.encoding(self._check_positions(positions), dtype))

    def moved(
        self,
        positions: torch.Tensor | TokenPositions,
        states: torch.Tensor,
        *,
        layer: int | None = None,
        visible: torch.Tensor | None = None,
        past: torch.Tensor | None = None,
    ) -> TokenPositions:
        """
        Positions that tokens choose by (B, N, hidden_size) states, see `content_positions`; other methods accept them.
        Tokens that are false in (1 or B, N) `visible` stay, and add nothing to a sum; it continues `past`, the `total`
        of the positions before. Raises `ValueError` as `forward`.
        """
        content, placed = self.encoding.content, self._check_positions(positions)
        size = None if content is None else content.weight.shape[-1]
        if content is None or states.ndim != 3 or states.shape[1:] != (placed.shape[-2], size):
            raise ValueError(
                f"states of shape {tuple(states.shape)} cannot move {placed.shape[-2]} tokens; accepted: (batch, "
                f"tokens, hidden_size={size}), with content_positions."
            )
        return content(states, placed, self._check_layer(layer), visible, past)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        positions: torch.Tensor | TokenPositions | Sequence[Rotation],
        key_positions: torch.Tensor | TokenPositions | Sequence[Rotation] | None = None,
        *,
        layer: int | None = None,
        states: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        R(p) q and R(p′) k, in the shapes and types of query and key.

        Args:
            query: (B, num_heads, N, head_dim).
            key: (B, num_key_value_heads, M, head_dim).
            positions: Positions p of the queries' tokens, as for [`rotations`]; or its result.
            key_positions: Positions p′ of the keys' tokens, likewise; `None` if they are the same tokens.
            layer: The layer whose generators are used; required if `num_layers` is above 1.
            states: With `content_positions`, the (B, N, hidden_size) states of the queries' tokens; or `positions` are
                [`moved`] by them.

        Raises:
            ValueError: if shapes or types do not fit, positions are not finite or not of an accepted type, or `layer`
                or `states` are missing.
        """
        if states is not None:
            positions = self.moved(positions, states, layer=layer)
        self._check_states("query", query, (self.num_heads,))
        self._check_states("key", key, (self.num_key_value_heads,))
        rotation = key_rotation = self._rotation(positions, layer, query)
        if key_positions is not None:
            key_rotation = self._rotation(key_positions, layer, key)
        elif key.shape[2] != query.shape[2]:
            raise ValueError(
                f"There are {query.shape[2]} queries and {key.shape[2]} keys: pass the keys' own key_positions."
            )
        if rotation is key_rotation and query.shape == key.shape and query.dtype == key.dtype:
            return self._in_order(partial(rotate_pair, rotation), query, key)
        return self._rotate_one(rotation, query), self._rotate_one(key_rotation, key)

    def rotate(
        self,
        states: torch.Tensor,
        positions: torch.Tensor | TokenPositions | Sequence[Rotation],
        *,
        layer: int | None = None,
    ) -> torch.Tensor:
        """
        R(p) x of queries or keys alone, for example of keys before they enter a cache.

        Args:
            states: (B, num_heads, N, head_dim) queries or (B, num_key_value_heads, N, head_dim) keys.
            positions, layer: As in `forward`.

        Returns:
            The same shape and type.

        Raises:
            ValueError: as `forward`.
        """
        self._check_states("states", states, (self.num_heads, self.num_key_value_heads))
        return self._rotate_one(self._rotation(positions, layer, states), states)

    def _rotate_one(self, rotation: TokenRotation, states: torch.Tensor) -> torch.Tensor:
        return self._in_order(lambda states: (rotate_one(rotation, states, self.num_key_value_heads),), states)[0]

    def _in_order(self, rotate: Callable, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """A function of (B, H, N, D) states applied to their rotated channels, in the order of blocks."""
        if self.order is None:
            return rotate(*states)
        width, ordered = self.config.head_dim, [x.index_select(-1, self.order) for x in states]
        rotated = rotate(*(x[..., :width] for x in ordered))
        if width < self.head_dim:
            rotated = [torch.cat([x, whole[..., width:]], dim=-1) for x, whole in zip(rotated, ordered)]
        return tuple(x.index_select(-1, self.inverse) for x in rotated)

    def undo(
        self,
        output: torch.Tensor,
        positions: torch.Tensor | TokenPositions | Sequence[Rotation],
        *,
        layer: int | None = None,
    ) -> torch.Tensor:
        """
        R(p)ᵀ x: what attention returns for values that [`rotate`] rotated, in the frame of each query's token. Token i
        then receives Σⱼ wᵢⱼ R(pᵢ)ᵀR(pⱼ) vⱼ (GTA, Miyato et al., ICLR 2024, eqs. 4–6).

        Args:
            output: (B, num_heads, N, head_dim).
            positions, layer: Those of the queries, as in `forward`.

        Returns:
            The same shape and type.

        Raises:
            ValueError: as `forward`, or if the rotations are folded.
        """
        self._check_states("output", output, (self.num_heads,))
        if self.config.folded_grids is not None:
            raise ValueError("These rotations are folded into the projections of queries and keys, not into values.")
        return self._rotate_one(self._rotation(positions, layer, output).transpose(), output)

    @torch.no_grad()
    def fold(
        self, q_proj: nn.Linear | Sequence[nn.Linear], k_proj: nn.Linear | Sequence[nn.Linear]
    ) -> "LieRotaryEmbedding":
        """
        For inference: put the basis of commuting rotations into the projections, in place and permanently, so that they
        cost as much as RoPE; of `liere_product` the basis that acts first, and a constant matrix for each further axis
        remains. The order of channels of another `pairing` folds as well. Attention scores stay the same up to
        rounding; queries and keys do not. Keys rotated before folding do not fit queries rotated after it.

        Args:
            q_proj: The linear layer that computes the queries, or one for each of `num_layers` layers.
            k_proj: The same for the keys.

        Returns:
            The module itself.

        Raises:
            ValueError: if the generators do not commute, the module is folded already, or a projection has another
                width or is more than a linear layer. Then nothing is changed.
        """
        encoding, config = self.encoding, self.config
        if config.folded_grids is not None:
            raise ValueError("The rotations are folded already.")
        if config.content_positions is not None:
            raise ValueError(f"content_positions={config.content_positions!r}: every input has other rotations.")
        if needs_exponential(config) or not (generators_commute(config) or encoding.in_basis):
            raise ValueError(
                f"The generators of {config.position_encoding} with block_size={config.block_size} do not commute, so "
                "no basis of the projections makes their rotations cheaper; keep the result of rotations(positions) "
                "instead."
            )
        layers = [self._projections(*given) for given in (("q_proj", q_proj), ("k_proj", k_proj))]
        check_foldable([projection for projections in layers for projection in projections])
        if self.order is not None:
            if config.head_dim < self.head_dim and encoding.in_basis:
                raise ValueError(
                    f"{self.head_dim - config.head_dim} channels of a head are never rotated, so no basis folds."
                )
            for projection in (projection for projections in layers for projection in projections):
                reorder_channels(projection, self.order)
        elif not encoding.in_basis:
            # Rotations of planes of neighbouring channels have nothing to fold.
            return self
        self._set_order(None)
        self.config = copy.deepcopy(config)
        self.config.folded_grids = []
        if encoding.in_basis:
            for projections, basis in zip(zip(*layers), encoding.bases()):
                fold_into(projections, basis)
            self.encoding = fold_encoding(encoding, self.config, {})
        return self.eval()

    def train(self, mode: bool = True) -> "LieRotaryEmbedding":
        """Raises `ValueError` if the rotations are folded."""
        if mode and self.config.folded_grids is not None:
            raise ValueError("These rotations are folded into projections, which is for inference.")
        return super().train(mode)

    def extra_repr(self) -> str:
        config = self.config
        return (
            f"num_heads={self.num_heads}, num_key_value_heads={self.num_key_value_heads}, head_dim={self.head_dim}, "
            f"num_axes={self.num_axes}, position_encoding={config.position_encoding!r}, block_size={config.block_size}"
        )

    def _projections(self, name: str, given: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
        """The projection of every layer, checked for number and width."""
        projections = [given] if isinstance(given, nn.Module) else list(given)
        heads = self.num_heads if name == "q_proj" else self.num_key_value_heads
        if len(projections) != self.num_layers:
            raise ValueError(f"{name}: {len(projections)} projections were given for num_layers={self.num_layers}.")
        for projection in projections:
            width = getattr(projection, "out_features", None)
            if width != heads * self.head_dim:
                raise ValueError(
                    f"{name} has out_features={width}; {heads} heads of {self.head_dim} channels are rotated."
                )
        return projections

    def _check_positions(self, positions: torch.Tensor | TokenPositions) -> TokenPositions:
        """Return positions of tokens, or raise `ValueError`."""
        if getattr(positions, "total", None) is not None:
            return positions
        if isinstance(positions, torch.Tensor):
            positions = TokenPositions(positions)
        if not isinstance(positions, TokenPositions):
            raise ValueError(
                f"positions are a {type(positions).__name__}; accepted are a floating point tensor of shape (tokens, "
                f"{self.num_axes}) or (batch, tokens, {self.num_axes}), the result of grid_positions or, for "
                "queries and keys, that of rotations(positions) of this module."
            )
        is_grid = isinstance(positions, GridPositions)
        if not is_grid:
            check_coordinates(positions.coordinates)
        elif orientations_of(self.config):
            raise ValueError(
                "positions are those of a grid of patches; with rotary_init='so3' they are orientations, rotation "
                "vectors of shape (tokens, 3) or (batch, tokens, 3)."
            )
        if len(positions.shape) not in (2, 3) or positions.shape[-1] != self.num_axes:
            raise ValueError(
                f"positions of shape {tuple(positions.shape)} must be (tokens, {self.num_axes}) or (batch, tokens, "
                f"{self.num_axes}), with a coordinate for each of num_axes={self.num_axes}."
            )
        if not (is_grid or self.has_seen_positions or values_are_unknown(positions.coordinates)):
            self.has_seen_positions = True
            warn_of_units(self.config, positions.coordinates, self.encoding)
        return positions

    def _check_layer(self, layer: int | None) -> int:
        layer = 0 if layer is None and self.num_layers == 1 else layer
        if layer is None or not 0 <= layer < self.num_layers:
            raise ValueError(
                f"layer={layer}: this module has rotations of {self.num_layers} layers; accepted: 0 … "
                f"{self.num_layers - 1}, the one that calls it."
            )
        return layer

    def _rotation(
        self, positions: torch.Tensor | TokenPositions | Sequence[Rotation], layer: int | None, states: torch.Tensor
    ) -> Any:
        """The rotation of a layer for (B, H, N, D) states."""
        layer, rotation = self._check_layer(layer), None
        if self.encoding.content is not None and getattr(positions, "total", None) is None:
            raise ValueError("content_positions need states: pass states=, or positions that `moved` returned.")
        if isinstance(positions, (list, tuple)) and len(positions) == self.num_layers:
            rotation = positions[layer]
        if isinstance(rotation, (PlaneRotation, BlockRotation, SharedRotation)):
            samples, tokens = rotation.num_samples(), rotation.num_tokens()
        else:
            positions, rotation = self._check_positions(positions), None
            *batch, tokens, _ = positions.shape
            samples = batch[0] if batch else 1
        if tokens != states.shape[2] or samples not in (1, states.shape[0]):
            raise ValueError(
                f"There are positions of {tokens} tokens in {samples} samples, but states of shape "
                f"{tuple(states.shape)}: {states.shape[2]} tokens in 1 or {states.shape[0]} samples are needed."
            )
        return next(iter(self.encoding(positions, states.dtype, layer))) if rotation is None else rotation

    def _check_states(self, name: str, states: torch.Tensor, heads: tuple[int, ...]) -> None:
        if states.ndim != 4 or states.shape[1] not in heads or states.shape[3] != self.head_dim:
            raise ValueError(
                f"{name} of shape {tuple(states.shape)} must be (batch, {' or '.join(map(str, sorted(set(heads))))} "
                f"heads, tokens, head_dim={self.head_dim})."
            )
        if not states.is_floating_point():
            raise ValueError(f"{name} are {states.dtype}; a floating point type is needed.")
