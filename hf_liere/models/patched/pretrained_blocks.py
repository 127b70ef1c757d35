"""
Learned blocks inside models with RoPE: generators of LieRE and ComRoPE that start as the planes of the pretrained
rotation, b/2 planes in a block of b channels.
"""

import torch
from torch import nn
from transformers import initialization as init

from ..encoding.encoding_traits import ENCODING_TRAITS
from ..encoding.positions import TokenPositions
from ..encoding.rotary_embedding import LieRotaryEmbedding
from ..rotation.dispatch import product_dtype
from ..rotation.model_basis import rotate_one, rotate_pair
from ..rotation.rotation import Rotation
from .pretrained_rope import PretrainedRope
from .rope_layout import RopeLayout, RopeTower, frequency_buffers
from .rope_pairs import HeadPlanes
from .vision_towers import projected_widths, projections


class PretrainedBlocks(PretrainedRope):
    """
    R(p) = exp(Σ_a p_a A_a) of every key head and layer, for blocks of channels that are brought next to each other.

    Attributes:
        heads: Numbers of query and of key heads.
        rotary: The [`LieRotaryEmbedding`] with the parameters, for channels in the order of `order`.
        order: (head_dim,) the model's channel at every place; the two of a plane are neighbours, and those that nothing
            rotates are last.
        inverse: (head_dim,) the place of every channel of the model.
    """

    def __init__(self, tower: RopeTower, layers: list[int], config, head_planes: HeadPlanes):
        super().__init__(tower, layers, config)
        layout = _common_layout(tower, layers, config.share_layers)
        heads, key_heads = self.heads = _common_heads(tower, layers, head_planes.head_dim)
        self.head_planes = head_planes
        self.rotary = LieRotaryEmbedding(
            heads,
            2 * layout.num_planes,
            layout.num_axes,
            config.position_encoding,
            config.block_size,
            num_key_value_heads=key_heads,
            num_layers=len(layers),
            share_heads=config.share_heads,
            share_layers=config.share_layers,
            rotary_init="zeros",
        )
        self.planes = order_of_planes(layout, config.position_encoding, self.rotary.config.block_size, tower.shown)
        for name in ("order", "inverse"):
            self.register_buffer(name, torch.empty(0), persistent=False)
        self.reset_parameters(tower.rope)

    @torch.no_grad()
    def reset_parameters(self, rope: nn.Module) -> None:
        super().reset_parameters(rope)
        rotated = [channel for plane in self.planes for channel in self.head_planes.pairs[plane]]
        device = "cpu" if self.order.is_meta else self.order.device
        self.order = torch.tensor([*rotated, *self.head_planes.still], device=device)
        self.inverse = self.order.argsort()
        if not any(rope._buffers[name].is_meta for name in frequency_buffers(rope)):
            for name, values in self.starting_values(rope).items():
                init.copy_(getattr(self.rotary.encoding, name), values.to(getattr(self.rotary.encoding, name)))

    def starting_values(self, rope: nn.Module) -> dict[str, torch.Tensor]:
        """Parameters of the encoding with which it rotates the planes as the pretrained model does."""
        encoding, of_layers = self.rotary.encoding, []
        every_axis = torch.arange(encoding.num_axes).unsqueeze(-1)
        for layer in self.layers[: encoding.layers]:
            planes, order = self.layouts[self.layout_of_layer[layer]], list(self.planes)
            serves = planes.axes.cpu()[order] == every_axis  # (A, planes)
            of_layers.append(serves * planes.of_rope(rope).cpu()[order])
        frequencies = torch.stack(of_layers, dim=1).unsqueeze(2)  # (A, layers, 1, planes)
        return encoding.parameters_for_planes(frequencies.expand(-1, -1, encoding.heads, -1))

    def forward(
        self, layer: int, cos: torch.Tensor, coordinates: torch.Tensor, rope: nn.Module, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Rotation | None]:
        """As [`PretrainedRope.forward`]: tokens before those with coordinates are not rotated."""
        if layer not in self.place:
            return self.unchanged(layer, cos, coordinates, rope)
        layout = self.layouts[self.layout_of_layer[layer]].layout
        still = cos.new_full((*coordinates.shape[:-1], len(layout.planes)), layout.factor)
        prefix = states.shape[-2] - coordinates.shape[-2]
        # Where the generators are, unless they are offloaded: then they come to the coordinates.
        device = next(self.rotary.parameters()).device
        coordinates = coordinates if device.type == "meta" else coordinates.to(device)
        positions = TokenPositions(nn.functional.pad(coordinates, (0, 0, prefix, 0)) if prefix else coordinates)
        rotations = self.rotary.encoding(positions, product_dtype(states), self.place[layer])
        return still, torch.zeros_like(still), next(iter(rotations))

    def rotated(
        self, rotation: Rotation, part: str, before: torch.Tensor, states: torch.Tensor, state_dims: int
    ) -> torch.Tensor:
        """
        Queries, keys, or both and values, by a rotation, in the layout that they have.

        Args:
            part: `"query"`, `"key"` or `"all"` for queries, keys and values after one another.
            before: What the module that made `states` was given.
            states: (…, N, H · D), (…, N, H, D) or (…, H, N, D).
            state_dims: Dimensions of what attention sees, that is of (…, N, hidden_size).
        """
        rotation, order, inverse = (x.to(states.device) for x in (rotation, self.order, self.inverse))
        tokens, head_dim = rotation.num_tokens(), self.head_planes.head_dim
        flat = states.ndim == state_dims
        if flat and part == "all":
            heads, key_heads = (count * head_dim for count in self.heads)
            query, key, value = states.split([heads, key_heads, states.shape[-1] - heads - key_heads], dim=-1)
            query, key = (_heads_first(x.unflatten(-1, (-1, head_dim)), state_dims) for x in (query, key))
            query, key = self._rotate_channels(rotation, order, inverse, query, key)
            query, key = (_tokens_first(x, state_dims).flatten(-2) for x in (query, key))
            return torch.cat([query, key, value], dim=-1)
        heads = states.unflatten(-1, (-1, head_dim)) if flat else states
        tokens_first = flat or _is_tokens_first(heads, before, tokens)
        heads = _heads_first(heads, state_dims) if tokens_first else heads
        (heads,) = self._rotate_channels(rotation, order, inverse, heads)
        heads = _tokens_first(heads, state_dims) if tokens_first else heads
        return heads.flatten(-2) if flat else heads

    def _rotate_channels(
        self, rotation: Rotation, order: torch.Tensor, inverse: torch.Tensor, *states: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """(B, H, N, head_dim) → the same with the rotation of the channels that are rotated."""
        ordered, width = [x.index_select(-1, order) for x in states], self.rotary.head_dim
        rotated = [x[..., :width] for x in ordered]
        if len(states) == 2 and self.heads[0] == self.heads[1]:
            rotated = rotate_pair(rotation, *rotated)
        else:
            rotated = [rotate_one(rotation, x, self.rotary.num_key_value_heads) for x in rotated]
        if width < len(order):
            rotated = [torch.cat([x, whole[..., width:]], dim=-1) for x, whole in zip(rotated, ordered)]
        return tuple(x.index_select(-1, inverse) for x in rotated)


def _heads_first(states: torch.Tensor, state_dims: int) -> torch.Tensor:
    """(…, N, H, D) → (B, H, N, D)."""
    states = states.transpose(-3, -2)
    return states.unsqueeze(0) if state_dims == 2 else states


def _tokens_first(states: torch.Tensor, state_dims: int) -> torch.Tensor:
    """The inverse of [`_heads_first`]."""
    states = states.squeeze(0) if state_dims == 2 else states
    return states.transpose(-3, -2)


def _is_tokens_first(states: torch.Tensor, before: torch.Tensor, tokens: int) -> bool:
    """Whether (…, N, H, D) rather than (…, H, N, D): a norm is given a view of projected tokens, if N = H."""
    if states.shape[-3] != states.shape[-2]:
        return states.shape[-3] == tokens
    return before.stride(-3) >= before.stride(-2)


def projected_states(attention: nn.Module, reads_keys: bool) -> dict[str, nn.Module]:
    """
    The last modules before queries and keys are rotated, by part, see [`PretrainedBlocks.rotated`].

    Args:
        reads_keys: Whether the keys are those of another module, which has rotated them.
    """
    parts = ("query",) if reads_keys else ("query", "key")
    norms = [getattr(attention, f"{part[0]}_norm", None) for part in parts]
    if all(isinstance(norm, nn.Module) for norm in norms):
        return dict(zip(parts, norms))
    found = projections(attention, reads_keys)
    return dict(zip(parts, found)) if len(found) == len(parts) else {"all": found[0]}


def _common_layout(tower: RopeTower, layers: list[int], share_layers: bool) -> RopeLayout:
    layouts = [tower.layouts[layer] for layer in layers]
    if len({(layout.planes, layout.axes) for layout in layouts}) > 1:
        raise ValueError(
            f"The attention layers of {tower.shown} pair channels differently, and blocks of all are of the same "
            "channels; name equal ones in layers."
        )
    if share_layers and len({(layout.buffer, layout.factor) for layout in layouts}) > 1:
        raise ValueError(
            f"share_layers=True: the attention layers of {tower.shown} rotate with different frequencies, "
            f"{sorted({layout.buffer for layout in layouts})}."
        )
    return layouts[0]


def _common_heads(tower: RopeTower, layers: list[int], head_dim: int) -> tuple[int, int]:
    """
    Numbers of query and key heads.

    Raises:
        ValueError: if the widths of the projections are not those of heads of so many channels.
    """
    found = set()
    for layer in layers:
        name, attention = tower.attentions[layer]
        heads, widths = projected_widths(attention, head_dim)
        if widths[0] != (heads or 0) * head_dim or not widths[-1] or widths[-1] % head_dim:
            raise ValueError(
                f"{name} ({type(attention).__name__}) has {heads} heads of {head_dim} channels, and projects to widths "
                f"{widths}: blocks need projections to the heads; accepted: position_encoding='rope_mixed'."
            )
        found.add((widths[0] // head_dim, int(widths[-1]) // head_dim))
    if len(found) > 1:
        raise ValueError(
            f"The layers of {tower.shown} have different numbers of heads, {sorted(found)}; name equal ones."
        )
    return found.pop()


def order_of_planes(layout: RopeLayout, position_encoding: str, block_size: int, shown: str) -> tuple[int, ...]:
    """
    The planes of a head in an order in which b/2 after another make a block that the encoding has: of any axes for
    LieRE and Cayley-STRING, of one axis for ComRoPE-LD (eq. 10), of axis j mod A in block j for ComRoPE-AP (eq. 8).

    Raises:
        ValueError: if there is none.
    """
    axis_of_plane = [layout.axes[channels[0]] for channels in layout.channels_of_planes()]
    of_axis = [[p for p, axis in enumerate(axis_of_plane) if axis == a] for a in range(layout.num_axes)]
    counts, size = [len(planes) for planes in of_axis], block_size // 2
    if block_size % 2:
        raise ValueError(f"block_size={block_size}: a block is made of planes, two channels each; pass an even size.")
    traits = ENCODING_TRAITS[position_encoding]
    if not traits.proportional:
        if sum(counts) % size:
            raise ValueError(
                f"block_size={block_size} does not divide the {2 * sum(counts)} rotated channels of {shown}."
            )
        return tuple(range(sum(counts)))
    blocks = [[planes[i : i + size] for i in range(0, len(planes), size)] for planes in of_axis]
    if any(count % size for count in counts):
        raise ValueError(
            f"block_size={block_size}: {shown} rotates {counts} planes by its axes, and a block of {position_encoding} "
            f"has {size} of one axis; accepted are sizes that divide twice these numbers, and liere for any axes."
        )
    if traits.serves_one_axis and len(set(counts)) > 1:
        raise ValueError(
            f"{shown} rotates {counts} planes by its axes, but {position_encoding} has as many blocks of each; "
            "accepted: comrope_ld, liere and cayley_string."
        )
    if traits.serves_one_axis:
        # Blocks of the axes in turn.
        blocks = [[block] for of_axes in zip(*blocks) for block in of_axes]
    return tuple(plane for blocks_of_axis in blocks for block in blocks_of_axis for plane in block)
