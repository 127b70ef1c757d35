"""
Learned rotations inside models with RoPE, starting at the pretrained rotation exp(Σ_a p_a A_a), whose A_a consist of
planes that rotate with the pretrained frequencies ω. `pretrained_patch` attaches them.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from ..encoding.content_positions import ContentPositions
from ..probing.coordinate_probe import CoordinateProbe, Turn, read_frequencies
from ..probing.module_inspection import find_indexers
from ..probing.rope_layout import RopeLayout, RopeTower
from ..probing.tables import Tables
from ..rotation.learned_rotations import LearnedRotations
from .head_share import HeadShare
from .tower_patch import Pass


@dataclass(eq=False)
class GridPass(Pass):
    """A forward pass of a tower with constant rotations: the patches per axis of the input to its rotary module."""

    grid: tuple[int, ...]


class RopePlanes(Tables):
    """cos and sin of one [`RopeLayout`] from angles, bit for bit as the rotary module's own."""

    def __init__(self, layout: RopeLayout):
        super().__init__()
        self.layout, first = layout, layout.channels
        self.channels: torch.Tensor
        of_axes = [first[layout.axes.index(axis)] for axis in range(layout.num_axes)]
        with torch.device("cpu"):
            self.set_tables(
                frequencies=torch.tensor(layout.frequencies),  # (planes,)
                channels=torch.tensor(layout.planes),  # (D,)
                first_channels=torch.tensor(first),  # (planes,)
                axis_channels=torch.tensor(of_axes),  # (A,)
                axes=torch.tensor(layout.axes),  # (planes,)
            )

    def read_frequencies(self, rope: nn.Module) -> torch.Tensor:
        """(planes,) pretrained frequencies, in float32 as rotary modules read them, or float64."""
        values = read_frequencies(rope, self.layout.buffer, self.frequencies.device)
        return values.flatten().index_select(0, self.frequencies)  # (planes,)

    def forward(self, numbers: torch.Tensor, own: Turn, factors: torch.Tensor | float = 1.0) -> Turn:
        """
        (…, N, planes + 1) angles, to be multiplied by `factors`, and the factor of cos and sin → (…, N, D) cos and sin,
        or cos + i sin, of the type of `own`.
        """
        channels = self.channels.to(numbers.device)
        angles, factor = numbers[..., :-1] * factors, numbers[..., -1:]
        if isinstance(own, torch.Tensor):
            rotations = (torch.polar(torch.ones_like(angles), angles) * factor).index_select(-1, channels)  # (…, N, D)
            return rotations.mT.contiguous().mT if self.layout.is_transposed else rotations
        # Joined, so that compiled graphs compute them once, and not for every channel of every head.
        planes = (torch.cat([angles.cos(), angles.sin()], dim=-1) * factor).to(own[0].dtype)  # (…, N, 2 · planes)
        cos, sin = (x.index_select(-1, channels) for x in planes.chunk(2, dim=-1))
        return cos, sin  # 2 × (…, N, D)

    def identity(self, own: Turn, is_scaled: bool = True) -> Turn:
        """cos and sin of angles of zero, times the attention factor if that is not applied elsewhere."""
        factor = self.layout.factor if is_scaled else 1.0
        if isinstance(own, torch.Tensor):
            return torch.full_like(own, factor)
        return torch.full_like(own[0], factor), torch.zeros_like(own[1])


class PretrainedRope(LearnedRotations):
    """
    Base class of the learned rotations of a [`RopeTower`]. Decides what rotary modules pass on to the attention layers
    with the indices `layers`.

    Attributes:
        place: The place in `layers` of every attention module that learns, and of those that read its keys.
        layout_of: By name of a rotary module and type of layers, the index in `layouts` of what it computes.
        rows: For the same modules, the name of the parameters of their group, and their row there if layers have
            separate ones; see [`group_layers`].
        share: The heads of this process, if tensor parallelism divides them.
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
        # Of what travels to every attention module, D and C of [`carrying`].
        self.widths = [
            (len(each.planes), (config.num_axes or each.num_axes) if self.rotates_states else each.num_planes + 1)
            for each in tower.layouts
        ]
        self.has_prefix = tower.has_prefix
        self.share: HeadShare | None = None
        # Whether attention modules read the model's own cos and sin.
        are_fixed = config.compose or len(self.place) < len(tower.attentions)
        self.reads_own = are_fixed or self.has_prefix or any(find_indexers(each) for _, each in tower.attentions)
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

    def add_content(self, tower: RopeTower, heads: int) -> None:
        """What moves the tokens of layers with so many key heads, if the configuration says so."""
        if self.config.content_positions is not None:
            axes = self.config.num_axes or max(layout.num_axes for layout in tower.layouts)
            parts = tower.attentions[self.layers[0]][1].modules()
            width = next(part.in_features for part in parts if hasattr(part, "in_features"))
            self.content = ContentPositions(self.config.content_positions, len(self.layers), heads, axes, width)

    def measure(self, layout: int, rope: nn.Module, /, *arguments, **options) -> tuple[torch.Tensor, torch.Tensor]:
        """
        The arguments of a rotary module → (…, N, A) coordinates of tokens, and (…, N, planes + 1) their angles and the
        factor of cos and sin, in float32.
        """
        planes = self.layouts[layout]
        found = self.probes[self.rope_names.index(planes.layout.rope_name)](*arguments, **options)  # (…, N, D)
        frequencies = planes.read_frequencies(rope).to(found.device)  # (planes,)
        angles = found.index_select(-1, planes.first_channels.to(found.device)) * frequencies  # (…, N, planes)
        coordinates = found.index_select(-1, planes.axis_channels.to(found.device))
        return coordinates, nn.functional.pad(angles, (0, 1), value=planes.layout.factor)

    def forward(self, layer: int, own: Turn, numbers: torch.Tensor, states: torch.Tensor) -> tuple[Turn, Any]:
        """
        For an attention module that learns, (…, N, D) cos and sin, and what rotates queries and keys before these, or
        `None`; from the model's `own` cos and sin, the `numbers` of [`measure`], coordinates if it `rotates_states`,
        else angles, and (…, prefix + N, hidden_size) `states`.
        """
        raise NotImplementedError

    def split_heads(self, share: HeadShare) -> None:
        """Rotate the heads of this process alone from now on. Raises `ValueError` if heads cannot be divided so."""
        self.share = share

    @torch.no_grad()
    def reset_parameters(self, module: nn.Module) -> None:
        """Restore the initial values after a construction without values; loaded parameters stay."""
        for factors in self.parameters():
            init.zeros_(factors)


class PretrainedPlanes(PretrainedRope):
    """
    RoPE with learned frequencies in every layer: plane i rotates with ω_i exp(δ_i), δ = 0 at the start.

    Attributes:
        log_factors: (layers or 1, planes), the δ. Layers of other widths, in the order of their first layer, have
            `log_factors_1`, `log_factors_2` and so on.
    """

    def __init__(self, tower: RopeTower, layers: list[int], config):
        super().__init__(tower, layers, config)
        if config.block_size not in (None, 2):
            raise ValueError(f"block_size={config.block_size}: rope_mixed rotates planes, its only block_size is 2.")
        for name, members in self.group_layers("log_factors", lambda layer: tower.layouts[layer].num_planes):
            count = tower.layouts[members[0]].num_planes
            setattr(self, name, self.new_parameter(1 if config.share_layers else len(members), count))
        self.add_content(tower, 1)
        self.reset_parameters(tower.module)

    def forward(self, layer: int, own: Turn, numbers: torch.Tensor, states: torch.Tensor) -> tuple[Turn, None]:
        factors = self.factors(layer).to(numbers.device)
        return self.layouts[self.layout_of_layer[layer]](numbers, own, factors), None

    def factors(self, layer: int) -> torch.Tensor:
        """(planes,) e^δ of a layer that learns."""
        name, row = self.rows[layer]
        values = getattr(self, name)  # (layers or 1, planes)
        if self.share is not None:
            values = self.share.take(values, values.shape)
        return values[0 if self.config.share_layers else row].exp()
