"""
Learned blocks inside models with RoPE: generators and bases that start as the planes of the pretrained
rotation, b/2 planes in a block of b channels.
"""

import math

import torch
from torch import nn
from transformers import initialization as init

from ..encoding.positions import TokenPositions
from ..encoding.rotary_embedding import LieRotaryEmbedding
from ..encoding.starting_values import order_planes
from ..rotation.dispatch import product_dtype
from ..rotation.model_basis import rotate_one, rotate_pair
from .attention_probe import Probe
from .coordinate_probe import frequency_buffers
from .pretrained_rope import PretrainedRope, TokensRotation
from .rope_layout import RopeTower
from .rope_pairs import find_pairs_of_layers
from .state_makers import RotatedChannels, StateMaker, find_makers


class PretrainedBlocks(PretrainedRope):
    """
    R(p) = exp(Σ_a p_a A_a) of every key head and layer, on channels that are reordered so that blocks are contiguous.

    Attributes:
        rotary: The [`LieRotaryEmbedding`] with the parameters.
        makers: By attention module, and by name of a module inside that makes queries or keys, its
            [`RotatedChannels`].
    """

    def __init__(self, tower: RopeTower, layers: list[int], config):
        super().__init__(tower, layers, config)
        layout = tower.layouts[layers[0]]
        if config.share_layers:
            _require_equal_start(tower, layers)
        pairs = find_pairs_of_layers(tower, layers)
        found = {layer: find_makers(Probe.of(tower, layer), pairs[layer]) for layer in self.place}
        heads, key_heads = _require_common_heads(tower, {layer: found[layer] for layer in layers})
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
        axes = [layout.axes[channel] for channel in layout.first_channels()]
        self.planes = order_planes(axes, config.position_encoding, self.rotary.encoding.block_size, tower.label)
        distinct = list(dict.fromkeys(maker for makers in found.values() for maker in makers))
        self.channels = nn.ModuleList(RotatedChannels(maker, self.planes) for maker in distinct)
        self.makers = {
            layer: {maker.name: distinct.index(maker) for maker in makers} for layer, makers in found.items()
        }
        self.reset_parameters(tower.module)

    @torch.no_grad()
    def reset_parameters(self, module: nn.Module) -> None:
        super().reset_parameters(module)
        for channels in self.channels:
            channels.reset_parameters()
        ropes = [module.get_submodule(name) for name in self.rope_names]
        if not any(rope._buffers[name].is_meta for rope in ropes for name in frequency_buffers(rope)):
            for name, values in self.compute_start(module).items():
                init.copy_(getattr(self.rotary.encoding, name), values.to(getattr(self.rotary.encoding, name)))

    def compute_start(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Parameters with which the encoding rotates the planes as the pretrained model does."""
        encoding, layer_frequencies = self.rotary.encoding, []
        every_axis = torch.arange(encoding.num_axes).unsqueeze(-1)  # (A, 1)
        for layer in self.layers[: encoding.layers]:
            planes, order = self.layouts[self.layout_of_layer[layer]], list(self.planes)
            serves = planes.axes.cpu()[order] == every_axis  # (A, planes)
            rope = module.get_submodule(planes.layout.rope_name)
            layer_frequencies.append(serves * planes.read_frequencies(rope).cpu()[order])
        frequencies = torch.stack(layer_frequencies, dim=1).unsqueeze(2)  # (A, layers, 1, planes)
        return encoding.parameters_for_planes(frequencies.expand(-1, -1, encoding.heads, -1))

    def compute_rotation(self, layer: int, coordinates: torch.Tensor, states: torch.Tensor) -> TokensRotation:
        """R(p); tokens before those with coordinates are not rotated. The model's own rotation becomes the identity."""
        # Hidden states are (N, hidden_size), (B, N, hidden_size) or a grid of tokens, (B, …, hidden_size).
        samples = states.shape[0] if states.ndim > 2 else 1
        tokens = math.prod(states.shape[min(1, states.ndim - 2) : -1])
        prefix = tokens - coordinates.shape[-2]
        # Coordinates move to the generators, unless these are offloaded and move to the coordinates.
        device = next(self.rotary.parameters()).device
        coordinates = coordinates if device.type == "meta" else coordinates.to(device)
        # (…, prefix + N, A)
        positions = TokenPositions(nn.functional.pad(coordinates, (0, 0, prefix, 0)) if prefix else coordinates)
        rotations = self.rotary.encoding(positions, product_dtype(states), self.place[layer])
        return TokensRotation(next(iter(rotations)), samples, tokens)

    def rotate(self, rotation: TokensRotation, layer: int, name: str, states: torch.Tensor) -> torch.Tensor:
        """R(p) applied to the queries and keys in what a module inside an attention module returns."""
        channels = self.channels[self.makers[layer][name]]
        taken, others = channels.take(states, rotation.samples, rotation.tokens)  # (B, H, N, rotated channels) each
        moved = rotation.rotation.to(states.device)
        if len(taken) == 2 and taken[0].shape == taken[1].shape:
            rotated = rotate_pair(moved, *taken)
        else:
            rotated = [rotate_one(moved, x, self.rotary.num_key_value_heads) for x in taken]
        return channels.put(list(rotated), others, states)


def _require_equal_start(tower: RopeTower, layers: list[int]) -> None:
    """Layers that share their generators must start at the same rotation."""
    starts = {}
    for layer in layers:
        layout, rope = tower.layouts[layer], tower.rope(layer)
        values = rope._buffers[layout.buffer]
        kept = (layout.buffer, layout.factor, None if values.is_meta else tuple(values.flatten().tolist()))
        starts[kept] = layout.buffer
    if len(starts) > 1:
        raise ValueError(
            f"share_layers=True: the attention layers of {tower.label} rotate with different frequencies, "
            f"{sorted(starts.values())}."
        )


def _require_common_heads(tower: RopeTower, found: dict[int, list[StateMaker]]) -> tuple[int, int]:
    """
    Numbers of query and key heads.

    Raises:
        ValueError: if layers have different ones.
    """
    heads = {tuple(count for maker in makers for count in maker.heads) for makers in found.values()}
    if len(heads) > 1:
        raise ValueError(
            f"The layers of {tower.label} have different numbers of heads, {sorted(heads)}; name equal ones."
        )
    query_heads, key_heads = heads.pop()
    return query_heads, key_heads
