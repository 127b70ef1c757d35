"""
Learned rotations inside models that rotate queries and keys by themselves (RoPE), starting at their pretrained
rotation. RoPE is exp(Σ_a p_a A_a) with A_a of planes that turn with the pretrained frequencies ω.

A forward pass: a hook on the rotary module hands on the coordinates of the tokens in the place of cos and sin, so that
whatever the model does with these (windows, slices of tokens) is done with the coordinates. A hook on every attention
module makes cos and sin of them with the frequencies of its layer.
"""

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from transformers import initialization as init

from .encodings import LearnedRotations
from .rope_layout import CoordinateProbe, RopeLayout, RopeTower, find_rope_towers
from .vision_towers import linear_layer, projections


class RopePlanes(nn.Module):
    """cos and sin of one [`RopeLayout`], from coordinates and frequencies, bit for bit as the rotary module's own."""

    def __init__(self, layout: RopeLayout):
        super().__init__()
        self.layout = layout
        for name in ("frequencies", "axes", "channels", "axis_channels"):
            self.register_buffer(name, torch.empty(0), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the buffers again, after a construction without values."""
        layout, first = self.layout, [channels[0] for channels in self.layout.channels_of_planes()]
        device = "cpu" if self.channels.is_meta else self.channels.device
        self.frequencies = torch.tensor([layout.frequencies[channel] for channel in first], device=device)
        self.axes = torch.tensor([layout.axes[channel] for channel in first], device=device)
        self.channels = torch.tensor(layout.planes, device=device)
        self.axis_channels = torch.tensor([layout.axes.index(a) for a in range(layout.num_axes)], device=device)

    def of_rope(self, rope: nn.Module) -> torch.Tensor:
        """(planes,) pretrained frequencies, in float32 as rotary modules read them, or float64."""
        values = rope._buffers[self.layout.buffer]
        values = values.to(self.frequencies.device, torch.promote_types(values.dtype, torch.float32))
        return values.flatten().index_select(0, self.frequencies)

    def forward(
        self, coordinates: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(…, N, A) coordinates and (planes,) frequencies → (…, N, D) cos and sin."""
        angles = coordinates.index_select(-1, self.axes) * frequencies  # (…, N, planes)
        factor = self.layout.factor
        return tuple((x * factor).to(dtype).index_select(-1, self.channels) for x in (angles.cos(), angles.sin()))


class PretrainedRope(LearnedRotations):
    """
    What all rotations of a [`RopeTower`] need: its coordinates, and its own cos and sin for layers that learn nothing.

    Args:
        tower: The rotary module and its attention modules.
        layers: Indices of the attention modules whose rotations are learned.
        config: A `RotaryPatchConfig`.
    """

    def __init__(self, tower: RopeTower, layers: list[int], config):
        super().__init__()
        self.config, self.layers = config, layers
        distinct = list(dict.fromkeys(tower.layouts))
        self.layouts = nn.ModuleList(RopePlanes(layout) for layout in distinct)
        self.layout_of_layer = [distinct.index(layout) for layout in tower.layouts]
        self.layout_of_type = {layout.layer_type: index for index, layout in enumerate(distinct)}
        self.probe = CoordinateProbe(tower.rope)

    def coordinates(self, layer_type: str | None, *arguments, **options) -> torch.Tensor:
        """The arguments of the rotary module → (…, N, A) coordinates of tokens, float32."""
        of_channels = self.probe(*arguments, **options)
        axis_channels = self.layouts[self.layout_of_type[layer_type]].axis_channels
        return of_channels.index_select(-1, axis_channels.to(of_channels.device))

    def reset_parameters(self) -> None:
        for module in (self.probe, *self.layouts):
            module.reset_parameters()


class PretrainedPlanes(PretrainedRope):
    """
    RoPE whose frequencies are learned in every layer: plane i turns with ω_i exp(δ_i), δ = 0 at the start.

    Attributes:
        log_factors: (layers or 1, planes), the δ.
    """

    def __init__(self, tower: RopeTower, layers: list[int], config):
        super().__init__(tower, layers, config)
        counts = {tower.layouts[layer].num_planes for layer in layers}
        if len(counts) > 1:
            raise ValueError(
                f"The attention layers of {tower.shown} have different numbers of planes, {sorted(counts)}; name "
                f"equal ones in layers: {[layout.num_planes for layout in tower.layouts]}."
            )
        self.log_factors = self.new_parameter(1 if config.share_layers else len(layers), counts.pop())
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        init.zeros_(self.log_factors)

    def forward(
        self, layer: int, cos: torch.Tensor, coordinates: torch.Tensor, rope: nn.Module
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of an attention module, in the type that the model made of its own."""
        planes = self.layouts[self.layout_of_layer[layer]]
        frequencies = planes.of_rope(rope)
        if layer in self.layers:
            rank = 0 if self.config.share_layers else self.layers.index(layer)
            frequencies = frequencies * self.log_factors[rank].to(frequencies.device).exp()
        # An angle in the type of the coordinates, as the model's own.
        return planes(coordinates, frequencies.to(coordinates.device), cos.dtype)


@dataclass
class RopePatch:
    """The state of a patched [`RopeTower`], stored on it as `rotary_patch`."""

    config: object
    attention_names: list[str]
    base: dict
    rope_name: str
    handles: list = field(default_factory=list)

    def detach(self, tower: nn.Module) -> None:
        """Undo [`RopePlan.attach`]."""
        for handle in self.handles:
            handle.remove()


@dataclass
class RopePlan:
    """A rotary patch of a model that rotates by itself, checked before anything is changed."""

    tower: RopeTower
    layers: list[int]
    config: object

    @property
    def attentions(self) -> list[tuple[str, nn.Module]]:
        return [self.tower.attentions[layer] for layer in self.layers]

    def build_encoding(self) -> PretrainedRope:
        return PretrainedPlanes(self.tower, self.layers, self.config)

    def base(self) -> dict:
        """What adapters for this tower say of the model that they belong to."""
        head_dim = len(self.tower.layouts[self.layers[0]].planes)
        widths = [getattr(linear_layer(part), "out_features", 0) for part in projections(self.attentions[0][1])]
        frequencies = []
        for layout in dict.fromkeys(self.tower.layouts):
            values = self.tower.rope._buffers[layout.buffer]
            frequencies.append(None if values.is_meta else [float(f"{x:.2g}") for x in values.flatten().tolist()])
        return {
            "heads": [width // head_dim for width in widths],
            "head_dim": head_dim,
            "train_grid": [],
            "frequencies": frequencies,
        }

    def attach(self, encoding: PretrainedRope) -> None:
        tower, module = self.tower, self.tower.module
        weight = next(self.attentions[0][1].parameters(), next(module.parameters()))
        prefix = len(tower.name) + 1 if tower.name else 0
        module.rotary_encoding = encoding.to(weight.device).train(module.training)
        handles = [tower.rope.register_forward_hook(partial(hand_on_coordinates, module), with_kwargs=True)]
        for layer, (_, attention) in enumerate(tower.attentions):
            hook = partial(rotate_as_layer, module, layer)
            handles.append(attention.register_forward_pre_hook(hook, with_kwargs=True))
        names = [name[prefix:] for name, _ in self.attentions]
        module.rotary_patch = RopePatch(self.config, names, self.base(), tower.rope_name, handles)


def plan_rope(model: nn.Module, config) -> list[RopePlan]:
    """
    Args:
        config: A `RotaryPatchConfig` with `rotary_init="pretrained"`.

    Raises:
        ValueError: if no module computes rotations that can be learned, or the configuration does not fit.
    """
    plans = []
    for tower in find_rope_towers(model, config.target):
        available = list(range(len(tower.attentions)))
        layers = available if config.layers is None else config.layers
        if not layers or set(layers) - set(available):
            raise ValueError(
                f"layers={layers} do not match: {tower.shown} has attention layers "
                f"{[f'{index}: {name}' for index, (name, _) in enumerate(tower.attentions)]}."
            )
        if hasattr(tower.module, "rotary_encoding"):
            raise ValueError(f"{tower.shown} has a rotary_encoding of its own; it would be overwritten.")
        plans.append(RopePlan(tower, layers, config))
    # What does not fit is noticed before a model is changed.
    for planned in plans:
        planned.build_encoding()
    return plans


def hand_on_coordinates(tower: nn.Module, rope: nn.Module, args, kwargs, output):
    """Forward hook of a rotary module: (…, N, A) channels of cos, for their type, and coordinates instead of sin."""
    layer_type = kwargs.get("layer_type", args[2] if len(args) > 2 else None)
    coordinates = tower.rotary_encoding.coordinates(layer_type, *args, **kwargs)
    return output[0][..., : coordinates.shape[-1]], coordinates


def rotate_as_layer(tower: nn.Module, layer: int, attention: nn.Module, args, kwargs):
    """Forward pre-hook of an attention module: cos and sin of its layer, from the coordinates."""
    position = None
    if "position_embeddings" in kwargs:
        cos, coordinates = kwargs["position_embeddings"]
    else:
        position = list(_argument_names(attention)).index("position_embeddings")
        cos, coordinates = args[position]
    encoding, rope = tower.rotary_encoding, tower.get_submodule(tower.rotary_patch.rope_name)
    num_axes = encoding.layouts[encoding.layout_of_layer[layer]].layout.num_axes
    if coordinates.shape[-1] != num_axes or coordinates.dtype != torch.float32:
        raise RuntimeError(
            f"{tower.rotary_patch.rope_name} handed on float32 coordinates of {num_axes} axes, but attention layer "
            f"{layer} got {coordinates.dtype} of shape {tuple(coordinates.shape)}: the model computes with cos and sin "
            "before attention, or they do not come from it; unpatch the model."
        )
    replaced = encoding(layer, cos, coordinates, rope)
    if position is None:
        return args, {**kwargs, "position_embeddings": replaced}
    return (*args[:position], replaced, *args[position + 1 :]), kwargs


def _argument_names(module: nn.Module) -> tuple[str, ...]:
    code = type(module).forward.__code__
    return code.co_varnames[1 : code.co_argcount]
