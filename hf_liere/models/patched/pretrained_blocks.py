"""
Learned blocks inside models with RoPE: generators and bases that start as the planes of the pretrained
rotation, b/2 planes in a block of b channels.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import initialization as init

from ..encoding.encoding_traits import ENCODING_TRAITS
from ..encoding.positions import TokenPositions
from ..encoding.rotary_embedding import LieRotaryEmbedding
from ..rotation.dispatch import product_dtype
from ..rotation.grouped_rotation import Rotation
from ..rotation.model_basis import rotate_one, rotate_pair
from ..rotation.rotation import TokenRotation
from .module_inspection import projections
from .pretrained_rope import PretrainedRope
from .rope_layout import RopeLayout, RopeTower, frequency_buffers
from .rope_pairs import HeadPlanes, Probe


class PretrainedBlocks(PretrainedRope):
    """
    R(p) = exp(Σ_a p_a A_a) of every key head and layer, on channels that are reordered so that blocks are contiguous.

    Attributes:
        heads: Numbers of query and of key heads.
        rotary: The [`LieRotaryEmbedding`] with the parameters, for channels in the order of `order`.
        order: (head_dim,) the model's channel at every place; the two of a plane are neighbours, and channels that are
            not rotated come last.
        tokens_first: By attention module, whether its norms of queries and keys get (…, N, H, D), not (…, H, N, D).
        inverse: (head_dim,) the place of every channel of the model.
    """

    def __init__(self, tower: RopeTower, layers: list[int], config, head_planes: HeadPlanes):
        super().__init__(tower, layers, config)
        layout = tower.layouts[layers[0]]
        starts = {(tower.layouts[index].buffer, tower.layouts[index].factor) for index in layers}
        if config.share_layers and len(starts) > 1:
            raise ValueError(
                f"share_layers=True: the attention layers of {tower.label} rotate with different frequencies, "
                f"{sorted({buffer for buffer, _ in starts})}."
            )
        shapes = {layer: _find_head_shape(Probe(tower, layer)) for layer in self.place}
        counts = {shapes[layer].heads for layer in layers}
        if len(counts) > 1:
            raise ValueError(
                f"The layers of {tower.label} have different numbers of heads, {sorted(counts)}; name equal ones."
            )
        heads, key_heads = self.heads = counts.pop()
        self.head_planes = head_planes
        self.tokens_first = {layer: shape.tokens_first for layer, shape in shapes.items()}
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
            relative_axis=config.relative_axis,
        )
        self.planes = order_planes(layout, config.position_encoding, self.rotary.encoding.block_size, tower.label)
        self.order: torch.Tensor
        for name in ("order", "inverse"):
            self.register_buffer(name, torch.empty(0), persistent=False)
        self.reset_parameters(tower.rope)

    @torch.no_grad()
    def reset_parameters(self, rope: nn.Module) -> None:
        super().reset_parameters(rope)
        rotated = [channel for plane in self.planes for channel in self.head_planes.pairs[plane]]
        device = "cpu" if self.order.is_meta else self.order.device
        self.order = torch.tensor([*rotated, *self.head_planes.unrotated], device=device)  # (head_dim,)
        self.inverse = self.order.argsort()  # (head_dim,)
        if not any(rope._buffers[name].is_meta for name in frequency_buffers(rope)):
            for name, values in self.compute_start(rope).items():
                init.copy_(getattr(self.rotary.encoding, name), values.to(getattr(self.rotary.encoding, name)))

    def compute_start(self, rope: nn.Module) -> dict[str, torch.Tensor]:
        """Parameters with which the encoding rotates the planes as the pretrained model does."""
        encoding, layer_frequencies = self.rotary.encoding, []
        every_axis = torch.arange(encoding.num_axes).unsqueeze(-1)  # (A, 1)
        for layer in self.layers[: encoding.layers]:
            planes, order = self.layouts[self.layout_of_layer[layer]], list(self.planes)
            serves = planes.axes.cpu()[order] == every_axis  # (A, planes)
            layer_frequencies.append(serves * planes.read_frequencies(rope).cpu()[order])
        frequencies = torch.stack(layer_frequencies, dim=1).unsqueeze(2)  # (A, layers, 1, planes)
        return encoding.parameters_for_planes(frequencies.expand(-1, -1, encoding.heads, -1))

    def forward(
        self, layer: int, cos: torch.Tensor, coordinates: torch.Tensor, rope: nn.Module, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Rotation | None]:
        """As [`PretrainedRope.forward`]; tokens before those with coordinates are not rotated."""
        if layer not in self.place:
            return self.compute_pretrained(layer, cos, coordinates, rope)
        layout = self.layouts[self.layout_of_layer[layer]].layout
        # The model's own rotation becomes the identity, times its factor.
        ones = cos.new_full((*coordinates.shape[:-1], len(layout.planes)), layout.factor)  # (…, N, D)
        prefix = states.shape[-2] - coordinates.shape[-2]
        # Coordinates move to the generators, unless these are offloaded and move to the coordinates.
        device = next(self.rotary.parameters()).device
        coordinates = coordinates if device.type == "meta" else coordinates.to(device)
        # (…, prefix + N, A)
        positions = TokenPositions(nn.functional.pad(coordinates, (0, 0, prefix, 0)) if prefix else coordinates)
        rotations = self.rotary.encoding(positions, product_dtype(states), self.place[layer])
        return ones, torch.zeros_like(ones), next(iter(rotations))

    def rotate(
        self, rotation: TokenRotation, layer: int, part: str, states: torch.Tensor, state_dims: int
    ) -> torch.Tensor:
        """
        R(p) applied to queries or keys in any layout; the layout is kept.

        Args:
            layer: Index of the attention module.
            part: `"query"`, `"key"`, or `"all"` for queries, then keys, then values, which are not rotated.
            states: (…, N, H · D), (…, N, H, D) or (…, H, N, D).
            state_dims: Number of dimensions of the hidden states, (…, N, hidden_size).
        """
        rotation = rotation.to(states.device)
        order, inverse = self.order.to(states.device), self.inverse.to(states.device)
        head_dim = self.head_planes.head_dim
        flat = states.ndim == state_dims
        if flat and part == "all":
            heads, key_heads = (count * head_dim for count in self.heads)
            query, key, value = states.split([heads, key_heads, states.shape[-1] - heads - key_heads], dim=-1)
            query, key = (_put_heads_first(x.unflatten(-1, (-1, head_dim)), state_dims) for x in (query, key))
            query, key = self._rotate_channels(rotation, order, inverse, query, key)  # (B, H, N, D) each
            query, key = (_put_tokens_first(x, state_dims).flatten(-2) for x in (query, key))  # (…, N, H · D) each
            return torch.cat([query, key, value], dim=-1)
        heads = states.unflatten(-1, (-1, head_dim)) if flat else states  # (…, N, H, D) or (…, H, N, D)
        tokens_first = flat or self.tokens_first[layer]
        heads = _put_heads_first(heads, state_dims) if tokens_first else heads  # (B, H, N, D)
        (heads,) = self._rotate_channels(rotation, order, inverse, heads)
        heads = _put_tokens_first(heads, state_dims) if tokens_first else heads
        return heads.flatten(-2) if flat else heads

    def _rotate_channels(
        self, rotation: TokenRotation, order: torch.Tensor, inverse: torch.Tensor, *states: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """(B, H, N, head_dim) states with their rotated channels multiplied by R(p)."""
        ordered, width = [x.index_select(-1, order) for x in states], self.rotary.head_dim
        rotated = [x[..., :width] for x in ordered]  # (B, H, N, rotated channels) each
        if len(states) == 2 and self.heads[0] == self.heads[1]:
            rotated = rotate_pair(rotation, *rotated)
        else:
            rotated = [rotate_one(rotation, x, self.rotary.num_key_value_heads) for x in rotated]
        if width < len(order):
            rotated = [torch.cat([x, whole[..., width:]], dim=-1) for x, whole in zip(rotated, ordered)]
        return tuple(x.index_select(-1, inverse) for x in rotated)


def _put_heads_first(states: torch.Tensor, state_dims: int) -> torch.Tensor:
    """(…, N, H, D) → (B, H, N, D)."""
    states = states.transpose(-3, -2)
    return states.unsqueeze(0) if state_dims == 2 else states


def _put_tokens_first(states: torch.Tensor, state_dims: int) -> torch.Tensor:
    """The inverse of [`_put_heads_first`]."""
    states = states.squeeze(0) if state_dims == 2 else states
    return states.transpose(-3, -2)


@dataclass(frozen=True)
class HeadShape:
    """
    What the modules make that [`find_state_modules`] returns.

    Attributes:
        heads: Numbers of query and of key heads; of a layer that reads keys, of query heads alone.
        tokens_first: As in [`PretrainedBlocks`].
    """

    heads: tuple[int, ...]
    tokens_first: bool


@torch.no_grad()
def _find_head_shape(probe: Probe) -> HeadShape:
    """
    Found by a call, because a projection may also make gates, and neither shape nor strides of (…, N, H, D) and
    (…, H, N, D) differ if N = H.

    Raises:
        ValueError: if one of the modules makes anything but heads, or runs more than once.
    """
    made: dict[str, list[torch.Tensor]] = {}
    modules = find_state_modules(probe.attention, probe.layer in probe.tower.sources)
    handles = [
        module.register_forward_hook(lambda module, args, output, part=part: made.setdefault(part, []).append(output))
        for part, module in modules.items()
    ]
    try:
        # With an angle of zero queries stay as they were made.
        query, key = (states[0] for states in probe.capture(*probe.make_quarters()))  # (H, N, D), (key H, N, D)
    finally:
        for handle in handles:
            handle.remove()
    widths = [sum(states.numel() for states in made.get(part, [])) / query[0].numel() for part in modules]
    if "all" in modules:
        widths = [len(query), (widths[0] - len(query)) / 2]
    # Keys of fewer heads may have been repeated.
    if widths[0] != len(query) or any(width < 1 or width % 1 or len(key) % width for width in widths[1:]):
        raise probe.make_error(
            f"has {len(query)} heads of {query.shape[-1]} channels, and before its rotation makes queries and keys of "
            f"{' and '.join(f'{width:g}' for width in widths)} heads"
        )
    first = made[next(iter(modules))][0].float().cpu()
    tokens_first = True
    if first.ndim >= 3 and first.shape[-1] == query.shape[-1]:
        states = first.reshape(first.shape[-3:])  # (N, H, D) or (H, N, D)
        tokens_first = states.shape != query.shape or (
            query.shape[0] == query.shape[1]
            and bool((states.transpose(0, 1) - query).abs().sum() < (states - query).abs().sum())
        )
    return HeadShape(tuple(int(width) for width in widths), tokens_first)


def find_state_modules(attention: nn.Module, reads_keys: bool) -> dict[str, nn.Module]:
    """
    The last modules before queries and keys are rotated, by part, see [`PretrainedBlocks.rotate`].

    Args:
        reads_keys: Whether another module makes and rotates the keys.
    """
    parts = ("query",) if reads_keys else ("query", "key")
    norms = [getattr(attention, f"{part[0]}_norm", None) for part in parts]
    if all(isinstance(norm, nn.Module) for norm in norms):
        return dict(zip(parts, norms))
    found = projections(attention, reads_keys)
    return dict(zip(parts, found)) if len(found) == len(parts) else {"all": found[0]}


def order_planes(layout: RopeLayout, position_encoding: str, block_size: int, label: str) -> tuple[int, ...]:
    """
    The planes of a head, ordered so that each run of b/2 makes a block of the encoding: of any axes for LieRE and
    encodings with a basis, of one axis for ComRoPE-LD (eq. 10), of axis j mod A in block j for ComRoPE-AP (eq. 8).

    Raises:
        ValueError: if there is no such order.
    """
    axis_of_plane = [layout.axes[channel] for channel in layout.first_channels()]
    planes_of_axis = [[p for p, axis in enumerate(axis_of_plane) if axis == a] for a in range(layout.num_axes)]
    counts, size = [len(planes) for planes in planes_of_axis], block_size // 2
    if block_size % 2:
        raise ValueError(f"block_size={block_size}: a block is made of planes, two channels each; pass an even size.")
    traits = ENCODING_TRAITS[position_encoding]
    if not traits.proportional:
        if sum(counts) % size:
            raise ValueError(
                f"block_size={block_size} does not divide the {2 * sum(counts)} rotated channels of {label}."
            )
        return tuple(range(sum(counts)))
    blocks = [[planes[i : i + size] for i in range(0, len(planes), size)] for planes in planes_of_axis]
    if any(count % size for count in counts):
        raise ValueError(
            f"block_size={block_size}: {label} rotates {counts} planes by its axes, and a block of {position_encoding} "
            f"has {size} of one axis; accepted: sizes that divide twice these numbers, and liere for any axes."
        )
    if traits.serves_one_axis:
        if len(set(counts)) > 1:
            raise ValueError(
                f"{label} rotates {counts} planes by its axes, but {position_encoding} needs equally many for each; "
                "accepted: comrope_ld, liere, cayley_string and liere_product."
            )
        # The axes take turns.
        blocks = [[block] for turn in zip(*blocks) for block in turn]
    return tuple(plane for blocks_of_axis in blocks for block in blocks_of_axis for plane in block)
