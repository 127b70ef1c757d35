"""
Learned blocks inside models with RoPE: generators and bases that start as the planes of the pretrained
rotation, b/2 planes in a block of b channels.
"""

import copy
import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from ..encoding.folding import build_encoding
from ..encoding.positions import TokenPositions
from ..encoding.rotary_encoding import RotaryEncoding
from ..encoding.starts import order_planes, start_at
from ..fast.dispatch import product_dtype
from ..layer.rotary_embedding import LieRotaryEmbedding
from ..probing.attention_probe import Probe
from ..probing.coordinate_probe import Turn, frequency_buffers, split_cos_sin
from ..probing.planes import Planes
from ..probing.rope_layout import RopeTower
from ..probing.rope_pairs import find_pairs
from ..probing.state_makers import RotatedChannels, StateMaker, find_makers
from ..rotation.model_basis import rotate_one, rotate_pair
from ..rotation.rotation import TokenRotation
from .composed import rotate_planes
from .head_share import HeadShare
from .pretrained_rope import GridPass, PretrainedRope


@dataclass(frozen=True)
class TokensRotation:
    """The rotation of the queries and keys of an attention module, and their numbers of samples and tokens."""

    rotation: TokenRotation
    samples: int
    tokens: int
    # By name of a module inside that is called for queries and for keys, the calls so far.
    calls: dict[str, int]
    # cos and sin of [`rotate_planes`], which comes first.
    own: tuple[torch.Tensor, torch.Tensor] | None = None


class PretrainedBlocks(PretrainedRope):
    """
    R(p) = exp(Σ_a p_a A_a) of every key head and layer, on channels that are reordered so that blocks are contiguous;
    with `compose`, R(p) of any encoding behind the model's own rotation of the same channels.

    Attributes:
        rotary: The [`LieRotaryEmbedding`] with the parameters. Layers with other heads or planes, in the order of their
            first layer, have `rotary_1`, `rotary_2` and so on.
        orders: By name of a rotation, the planes of a head in the order in which its blocks contain them.
        makers: By attention module, by name of a module inside that makes queries or keys, and by its call, the index
            of its [`RotatedChannels`].
        local: By name of a rotation, an encoding with the shapes of this process's heads, if processes divide them.
    """

    rotates_states = True

    def __init__(self, tower: RopeTower, layers: list[int], config):
        super().__init__(tower, layers, config)
        probes = {layer: Probe.of(tower, layer) for layer in self.place}
        found = {layer: find_makers(probe, find_pairs(probe)) for layer, probe in probes.items()}
        # Of queries and keys.
        heads = {layer: tuple(count for maker in found[layer] for count in maker.heads) for layer in layers}
        self.orders: dict[str, tuple[int, ...]] = {}
        for name, members in self.group_layers("rotary", lambda layer: (heads[layer], tower.layouts[layer].axes)):
            layout = tower.layouts[members[0]]
            query_heads, key_heads = heads[members[0]]
            rotary = LieRotaryEmbedding(
                query_heads,
                2 * layout.num_planes,
                config.num_axes or layout.num_axes,
                config.position_encoding,
                config.block_size,
                num_key_value_heads=key_heads,
                num_layers=len(members),
                share_heads=config.share_heads,
                share_layers=config.share_layers,
                rotary_init="zeros",
                folded_grids=config.folded_grids,
            )
            # Rotations behind the model's own need no planes of certain axes.
            axes = [0] * layout.num_planes if config.compose else list(layout.axes)
            self.orders[name] = order_planes(axes, config.position_encoding, rotary.encoding.block_size, tower.label)
            self.add_module(name, rotary)
        self.makers: dict[int, dict[str, dict[int | None, int]]] = {layer: {} for layer in found}
        indices: dict[tuple, int] = {}
        for layer, maker in [(layer, maker) for layer, makers in found.items() for maker in makers]:
            piece = (maker, self.orders[self.rows[layer][0]])
            self.makers[layer].setdefault(maker.name, {})[maker.call] = indices.setdefault(piece, len(indices))
        self.channels = nn.ModuleList(RotatedChannels(*piece) for piece in indices)
        self.local: dict[str, RotaryEncoding] = {}
        self.add_content(tower, heads[layers[0]][-1])
        self.reset_parameters(tower.module)

    @torch.no_grad()
    def reset_parameters(self, module: nn.Module) -> None:
        ropes = [module.get_submodule(name) for name in self.rope_names]
        is_set = self.config.compose or self.config.folded_grids is not None
        for group in self.orders if self.config.compose else ():
            self.get_submodule(group).encoding.reset_parameters()
        if not is_set and not any(rope._buffers[name].is_meta for rope in ropes for name in frequency_buffers(rope)):
            for group in self.orders:
                members = [layer for layer in self.layers if self.rows[layer][0] == group]
                frequencies = torch.cat([self._read_planes(module, layer).frequencies for layer in members], dim=1)
                start_at(self.get_submodule(group).encoding, frequencies, self.label)

    def split_heads(self, share: HeadShare) -> None:
        for name in self.orders:
            rotary = self.get_submodule(name)
            config = copy.deepcopy(rotary.config)
            if config.num_attention_heads > 1:
                config.num_attention_heads = share.count(config.num_attention_heads, self.label)
            with torch.device("meta"):
                self.local[name] = build_encoding(config, rotary.num_axes)
        for channels in self.channels:
            channels.follow(_choose_channels(channels.maker, share))
        super().split_heads(share)

    def _read_planes(self, module: nn.Module, layer: int) -> Planes:
        """The planes that a layer of the pretrained model rotates."""
        planes = self.layouts[self.layout_of_layer[layer]]
        speeds = planes.read_frequencies(module.get_submodule(planes.layout.rope_name))  # (planes,)
        return Planes.from_pairing(speeds, planes.layout.axes, "adjacent", planes.layout.num_axes)

    def forward(
        self, layer: int, own: Turn, numbers: torch.Tensor, states: torch.Tensor
    ) -> tuple[Turn, TokensRotation]:
        """The model's own rotation becomes the identity; with `compose`, it comes first, with the attention factor."""
        planes, rotation = self.layouts[self.layout_of_layer[layer]], self.compute_rotation(layer, numbers, states)
        if not self.config.compose:
            return planes.identity(own), rotation
        first = planes.first_channels.to(states.device)
        cos, sin = (x.index_select(-1, first) for x in split_cos_sin(own))  # (…, N, planes) each
        return planes.identity(own, is_scaled=False), replace(rotation, own=(cos, sin))

    def compute_rotation(self, layer: int, coordinates: torch.Tensor, states: torch.Tensor) -> TokensRotation:
        """R(p) of (…, N, A or heads · A) coordinates; tokens before those that have some are not rotated."""
        # Hidden states are (N, hidden_size), (B, N, hidden_size) or a grid of tokens, (B, …, hidden_size).
        samples = states.shape[0] if states.ndim > 2 else 1
        tokens = math.prod(states.shape[min(1, states.ndim - 2) : -1])
        prefix = tokens - coordinates.shape[-2]
        # Coordinates move to the generators, unless these are offloaded and move to the coordinates.
        name, row = self.rows[layer]
        rotary = self.get_submodule(name)
        device = next(rotary.parameters()).device
        coordinates = coordinates if device.type == "meta" else coordinates.to(device)
        # (…, prefix + N, A)
        coordinates = nn.functional.pad(coordinates, (0, 0, prefix, 0)) if prefix else coordinates
        current = GridPass.current()
        positions = TokenPositions(coordinates, prefix, None if current is None else current.grid)
        positions.heads = coordinates.shape[-1] // rotary.num_axes
        encoding = (
            rotary.encoding if self.share is None else partial(self.share.call, self.local[name], rotary.encoding)
        )
        rotations = encoding(positions, product_dtype(states), row)
        return TokensRotation(next(iter(rotations)), samples, tokens, {})

    def rotate(self, rotation: TokensRotation, layer: int, channels_index: int, states: torch.Tensor) -> torch.Tensor:
        """R(p) applied to the queries and keys in what a module inside an attention module returns."""
        channels = self.channels[channels_index]
        taken, others = channels.take(states, rotation.samples, rotation.tokens)  # (B, H, N, rotated channels) each
        if rotation.own is not None:
            taken = [rotate_planes(*rotation.own, x) for x in taken]
        moved = rotation.rotation.to(states.device)
        if len(taken) == 2 and taken[0].shape == taken[1].shape:
            rotated = rotate_pair(moved, *taken)
        else:
            name, _ = self.rows[layer]
            key_heads = self.local.get(name, self.get_submodule(name).encoding).config.num_attention_heads
            rotated = [rotate_one(moved, x, key_heads) for x in taken]
        return channels.put(list(rotated), others, states)


def _choose_channels(maker: StateMaker, share: HeadShare) -> StateMaker:
    """The channels of this process's heads, in a module that makes queries or keys."""
    # Multi-head latent attention has one head of keys, which stays whole.
    if maker.heads == (1,):
        return maker
    width = maker.width // share.size
    first = width * share.rank
    moved = [[[(c - first, d - first) for c, d in head] for head in part] for part in maker.places]
    inside = [[head for head in part if all(0 <= c < width for pair in head for c in pair)] for part in moved]
    if [len(part) for part in inside] != [share.count(heads, maker.name) for heads in maker.heads]:
        raise ValueError(
            f"{maker.name} makes queries or keys whose channels tensor parallelism divides otherwise than by heads; "
            "accepted: position_encoding='rope_mixed'."
        )
    return replace(maker, width=width, places=tuple(tuple(map(tuple, part)) for part in inside))
