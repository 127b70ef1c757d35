"""
Learned rotations inside models with RoPE, starting at the pretrained rotation exp(Σ_a p_a A_a), whose A_a consist of
planes that rotate with the pretrained frequencies ω. `pretrained_patch` attaches them.
"""

from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import initialization as init

from ..probing.coordinate_probe import CoordinateProbe, read_frequencies
from ..probing.rope_layout import RopeLayout, RopeTower
from ..rotation.rotation import LearnedRotations
from .tower_patch import PRETRAINED


# Larger than any cos, with or without a factor.
NO_COS = 1024.0
# (…, N, D) cos and sin, or cos + i sin.
PositionEmbeddings: TypeAlias = tuple[torch.Tensor, torch.Tensor] | torch.Tensor


class RopePlanes(nn.Module):
    """cos and sin of one [`RopeLayout`], from coordinates and frequencies, bit for bit as the rotary module's own."""

    def __init__(self, layout: RopeLayout):
        super().__init__()
        self.layout = layout
        self.channels: torch.Tensor
        for name in ("frequencies", "axes", "channels", "axis_channels"):
            self.register_buffer(name, torch.empty(0), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the buffers again, after a construction without values."""
        layout, first = self.layout, self.layout.first_channels()
        device = "cpu" if self.channels.is_meta else self.channels.device
        self.frequencies = torch.tensor([layout.frequencies[channel] for channel in first], device=device)  # (planes,)
        self.axes = torch.tensor(layout.axes_of_planes, device=device)  # (planes,)
        self.channels = torch.tensor(layout.planes, device=device)  # (D,)
        self.axis_channels = torch.tensor([layout.axes.index(a) for a in range(layout.num_axes)], device=device)  # (A,)

    def read_frequencies(self, rope: nn.Module) -> torch.Tensor:
        """(planes,) pretrained frequencies, in float32 as rotary modules read them, or float64."""
        values = read_frequencies(rope, self.layout.buffer, self.frequencies.device)
        return values.flatten().index_select(0, self.frequencies)  # (planes,)

    def forward(self, coordinates: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype) -> PositionEmbeddings:
        """(…, N, A) coordinates and (planes,) frequencies → (…, N, D) cos and sin, or cos + i sin."""
        axes, channels = self.axes.to(coordinates.device), self.channels.to(coordinates.device)
        angles = coordinates.index_select(-1, axes) * frequencies  # (…, N, planes)
        factor = self.layout.factor
        if self.layout.is_complex:
            rotations = (torch.polar(torch.ones_like(angles), angles) * factor).index_select(-1, channels)  # (…, N, D)
            return rotations.mT.contiguous().mT if self.layout.is_transposed else rotations
        cos, sin = ((x * factor).to(dtype).index_select(-1, channels) for x in (angles.cos(), angles.sin()))
        return cos, sin  # 2 × (…, N, D)

    def identity(self, coordinates: torch.Tensor, dtype: torch.dtype) -> PositionEmbeddings:
        """Of angles of zero: the factor alone."""
        ones = coordinates.new_full((*coordinates.shape[:-1], len(self.channels)), self.layout.factor)  # (…, N, D)
        if self.layout.is_complex:
            return torch.complex(ones, torch.zeros_like(ones))
        return ones.to(dtype), torch.zeros_like(ones, dtype=dtype)


class PretrainedRope(LearnedRotations):
    """
    The common base of rotations of a [`RopeTower`]: its coordinates, and pretrained cos and sin for fixed layers.

    Args:
        tower: The rotary module and its attention modules.
        layers: Indices of the attention modules whose rotations are learned.
        config: A `RotaryPatchConfig`.

    Attributes:
        place: The place in `layers` of every attention module that learns, and of those that read its keys.
        layout_of: By name of a rotary module and type of layers, the index in `layouts` of what it computes.
        rows: For the same modules, the name of the parameters of their group, and their row there if layers have
            separate ones; see [`group_layers`].
    """

    # Whether queries and keys are rotated where they are made, instead of by cos and sin.
    rotates_states = False

    def __init__(self, tower: RopeTower, layers: list[int], config):
        super().__init__()
        self.config, self.label, self.layers = config, tower.label, layers
        self.place = {layer: place for place, layer in enumerate(layers)}
        self.place |= {layer: self.place[source] for layer, source in tower.sources.items() if source in self.place}
        distinct = tower.distinct_layouts
        self.layouts = nn.ModuleList(RopePlanes(layout) for layout in distinct)
        self.layout_of = {(each.rope_name, each.layer_type): index for index, each in enumerate(distinct)}
        self.layout_of_layer = [distinct.index(layout) for layout in tower.layouts]
        self.may_differ, self.has_prefix = bool(tower.others), tower.has_prefix
        self.rope_names = list(dict.fromkeys(layout.rope_name for layout in distinct))
        self.probes = nn.ModuleList(CoordinateProbe(tower.module.get_submodule(name)) for name in self.rope_names)

    def group_layers(self, name: str, shape_of: Callable[[int], Hashable]) -> list[tuple[str, list[int]]]:
        """
        The layers that learn, by groups of one shape, with names for their parameters; the first one is `name`. This
        determines `rows`.
        """
        groups: dict[Hashable, list[int]] = {}
        for layer in self.layers:
            groups.setdefault(shape_of(layer), []).append(layer)
        named = [(f"{name}_{number}" if number else name, members) for number, members in enumerate(groups.values())]
        own = {layer: (group, row) for group, members in named for row, layer in enumerate(members)}
        self.rows = {layer: own[self.layers[place]] for layer, place in self.place.items()}
        return named

    def coordinates(self, layout: int, /, *arguments, **options) -> torch.Tensor:
        """The arguments of the rotary module → (…, N, A) coordinates of tokens, float32."""
        planes = self.layouts[layout]
        coordinates = self.probes[self.rope_names.index(planes.layout.rope_name)](*arguments, **options)  # (…, N, D)
        return coordinates.index_select(-1, planes.axis_channels.to(coordinates.device))

    def make_carrier(self, layout: int, dtype: torch.dtype, coordinates: torch.Tensor) -> PositionEmbeddings:
        """
        What goes to attention instead of cos and sin of this dtype: (…, N, A) coordinates for sin, and for cos as many
        channels as tell the index of the layout; coordinates alone for cos + i sin. In towers that put other cos and
        sin before them, both have all channels, and cos is one that no angle has.
        """
        planes = self.layouts[layout].layout
        if planes.is_complex:
            return coordinates
        if self.has_prefix:
            wide = coordinates[..., list(planes.axes)]  # (…, N, D)
            return torch.full_like(wide, NO_COS, dtype=dtype), wide
        return coordinates[..., :1].to(dtype).expand(*coordinates.shape[:-1], layout + 1), coordinates

    def forward(
        self,
        layer: int,
        layout: int,
        dtype: torch.dtype,
        coordinates: torch.Tensor,
        rope: nn.Module,
        states: torch.Tensor,
    ) -> tuple[PositionEmbeddings, Any]:
        """
        The rotations of an attention module, the model's own where they are not learned: (…, N, D) cos and sin, and
        what rotates queries and keys before these, or `None`.

        Args:
            layout: The index in `layouts` of what its rotary module computes.
            dtype: That of the model's own cos and sin.
            coordinates: (…, N, A), float32.
            rope: The rotary module.
            states: (…, prefix + N, hidden_size), the input of attention.
        """
        planes, learns = self.layouts[layout], layer in self.place
        if learns and self.rotates_states:
            return planes.identity(coordinates, dtype), self.compute_rotation(layer, coordinates, states)
        frequencies = planes.read_frequencies(rope)  # (planes,)
        frequencies = self.scale_frequencies(layer, frequencies) if learns else frequencies
        return planes(coordinates, frequencies.to(coordinates.device), dtype), None

    def reset_parameters(self, module: nn.Module) -> None:
        """Restore the initial values after a construction without values; loaded parameters stay."""
        for part in (*self.probes, *self.layouts):
            part.reset_parameters()


@PRETRAINED.offer("planes")
class PretrainedPlanes(PretrainedRope):
    """
    RoPE with learned frequencies in every layer: plane i rotates with ω_i exp(δ_i), δ = 0 at the start.

    Attributes:
        log_factors: (layers or 1, planes), the δ. Layers of other widths, in the order of their first layer, have
            `log_factors_1`, `log_factors_2` and so on.
    """

    # Tensor parallelism splits heads.
    rotates_heads_alike = True

    def __init__(self, tower: RopeTower, layers: list[int], config):
        super().__init__(tower, layers, config)
        if config.block_size not in (None, 2):
            raise ValueError(f"block_size={config.block_size}: rope_mixed rotates planes, its only block_size is 2.")
        for name, members in self.group_layers("log_factors", lambda layer: tower.layouts[layer].num_planes):
            count = tower.layouts[members[0]].num_planes
            setattr(self, name, self.new_parameter(1 if config.share_layers else len(members), count))
        self.reset_parameters(tower.module)

    @torch.no_grad()
    def reset_parameters(self, module: nn.Module) -> None:
        super().reset_parameters(module)
        for factors in self.parameters():
            init.zeros_(factors)

    def scale_frequencies(self, layer: int, frequencies: torch.Tensor) -> torch.Tensor:
        """The (planes,) frequencies of a layer that learns."""
        name, row = self.rows[layer]
        row = 0 if self.config.share_layers else row
        return frequencies * getattr(self, name)[row].to(frequencies.device).exp()
