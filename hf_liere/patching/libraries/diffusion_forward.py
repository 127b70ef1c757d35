"""
The forward pass of a patched transformer of diffusers.

Coordinates travel behind the channels of the model's own cos, so whatever the model does with it (concatenation,
padding, checkpointing) is done with the coordinates. A hook on every attention module takes them off, and turns cos and
sin to the frequencies of its layer; or hooks on the norms of queries and keys rotate these by blocks, and the model's
own rotation becomes the identity.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...encoding.given_positions import check_coordinates, require_tensors
from ...encoding.positions import TokenPositions
from ...fast.dispatch import product_dtype, require
from ...probing.module_inspection import View
from ...probing.planes import Planes
from ..carrying import Turn, carry, take_off
from ..composed import check_shape, rotate_planes
from ..patched_forward import place_grid
from ..tower_patch import AttentionPass, Pass
from .rotations import find_coordinates, identity_turn, turn_error


# By stream and part, the modules that make queries and keys: the norm if there is one, else the projection.
STATE_MODULES = {
    "image": {"query": ("norm_q", "to_q"), "key": ("norm_k", "to_k")},
    "text": {"query": ("norm_added_q", "add_q_proj"), "key": ("norm_added_k", "add_k_proj")},
}
# The entry of the dictionary in which a model passes positions on to attention that are not those of its RoPE.
POSITIONS = "rotary_positions"


def state_module(attention: nn.Module, stream: str, part: str) -> nn.Module | None:
    """The last module before queries or keys of a stream are rotated."""
    found = (getattr(attention, name, None) for name in STATE_MODULES[stream][part])
    return next((module for module in found if module is not None), None)


class CarryingRope(View):
    """A rotary object that is not a module, with coordinates behind its output."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return carry_coordinates(self.tower, self.base, args, kwargs, self.base(*args, **kwargs))


def carry_places(turn: Turn, coordinates: torch.Tensor) -> Turn:
    """A rotation with coordinates, and the noise level of the forward pass or 0, behind its channels."""
    carrier = turn if isinstance(turn, torch.Tensor) else turn[0]
    coordinates = coordinates.reshape(*carrier.shape[:-1], -1)
    current = NoiseLevel.current()
    level = coordinates.new_zeros(()) if current is None else current.level.to(coordinates)
    return carry(turn, torch.cat([coordinates, level.expand(*coordinates.shape[:-1], 1)], dim=-1))  # (…, N, A + 1)


def take_places(carrier: Turn, layer: int, planes: Planes) -> tuple[Turn, torch.Tensor, torch.Tensor]:
    """The inverse of [`carry_places`]: the rotation, its (…, N, A) coordinates, and the noise level."""
    channels = planes.num_planes * (1 if isinstance(carrier, torch.Tensor) else 2)
    turn, carried = take_off(carrier, f"Attention layer {layer}", channels, planes.num_axes + 1)  # (…, N, A + 1)
    return turn, carried[..., :-1], carried[..., -1].flatten()[0]


@dataclass(eq=False)
class NoiseLevel(Pass):
    """A forward pass of a model whose schedule reads the noise level."""

    level: torch.Tensor


def record_noise_level(model: Any, options: dict) -> None:
    """Keeps the noise level that a schedule reads, from the arguments of a model."""
    patch = model.rotary_patch
    if not patch.reads_level:
        return
    level = torch.as_tensor(options["t"] if "t" in options else options["timestep"]).float().flatten()  # (B,)
    if patch.noise_level is not None:
        level = patch.noise_level(level)
    else:
        clean, noise = patch.family.timesteps
        level = (level - clean) / (noise - clean)
    first = level[0]
    if len(level) > 1:
        sentence = "The samples have different noise levels, {}; a schedule needs one."
        first = first * require((level == first).all(), sentence, level)
    NoiseLevel(model, first).begin()


def carry_coordinates(tower: Any, rope: Any, args: tuple, kwargs: dict, output: Any) -> Any:
    """Forward hook of a rotary module: coordinates travel behind its output."""
    family = tower.rotary_patch.family
    coordinates = family.place(tower.rotary_patch.planes, output, rope, *args, **kwargs)
    carried = tuple(map(carry_places, family.parts(output), coordinates))
    return carried if family.text == "separate" else carried[0]


def carry_argument(model: Any, options: dict) -> None:
    """Lets coordinates travel behind the rotations among the arguments of a model."""
    patch = model.rotary_patch
    turn = options.get(patch.family.argument)
    if turn is None:
        raise RuntimeError(f"{type(model).__name__} got no {patch.family.argument}, so it would not rotate: pass it.")
    coordinates = find_coordinates(turn, patch.planes)  # (N, A)
    sentence = (
        "The given rotations are not those of one coordinate on every axis times the frequencies that diffusers' "
        "pipelines use for this model (off by {}); unpatch the model."
    )
    off, tolerance = turn_error(turn, patch.planes, coordinates)
    options[patch.family.argument] = carry_places(turn, coordinates * require(off <= tolerance, sentence, off))


def carry_positions(model: Any, options: dict) -> None:
    """Lets positions travel among the arguments that a model which does not rotate passes to attention."""
    patch = model.rotary_patch
    latents = options["hidden_states"]  # (B, C, height, width)
    grid = tuple(size // model.config.patch_size for size in latents.shape[-2:])
    argument, positions = patch.family.argument, place_grid(model, grid, latents.device)
    # In a function, because hooks that move inputs between devices would call methods of the positions.
    options[argument] = {**(options.get(argument) or {}), POSITIONS: lambda: positions}


def carry_given(model: Any, options: dict) -> None:
    """Lets positions of images travel, which a model gets or a pipeline passes on to attention; text is at 0."""
    images, text, name = options["hidden_states"], options["encoder_hidden_states"], "joint_attention_kwargs"
    options[name] = inner = dict(options.get(name) or {})
    given, config = options.pop(POSITIONS, inner.pop(POSITIONS, None)), model.rotary_patch.config
    if given is None and config.num_axes is None:
        return
    if given is not None:
        require_tensors(rotary_positions=given)
        check_coordinates(given)
    axes = config.num_axes or model.rotary_patch.planes.num_axes
    check_shape(model, given, len(images), images.shape[1], axes)
    positions = nn.functional.pad(given.to(images.device), (0, 0, text.shape[1], 0))  # (1 or B, text + N, A)
    inner[POSITIONS] = lambda: [positions]


def take_rows(numbers: torch.Tensor, stream: str, tokens: int) -> torch.Tensor:
    """(…, tokens, C) numbers of a stream, of those of text and then images."""
    return numbers[..., :tokens, :] if stream == "text" else numbers[..., -tokens:, :]


def drop_positions(attention: nn.Module, options: dict) -> None:
    """For an attention module that does not rotate and gets the arguments of one that does."""
    options.pop(POSITIONS, None)


def prepare_attention(tower: Any, layer: int, attention: nn.Module, options: dict) -> None:
    """Replaces what travelled among the arguments of an attention module by the rotation of its layer."""
    patch, encoding = tower.rotary_patch, tower.rotary_encoding
    rotates = patch.rotates_states(encoding, layer)
    given, own = options.pop(POSITIONS, lambda: None)(), None
    if patch.family.rotates and (turns := options.get(patch.family.argument)) is not None:
        parts = [take_places(turn, layer, patch.planes) for turn in patch.family.parts(turns)]
        if patch.turns:
            given = turns = _turn_parts(tower, layer, parts, attention, options)
        else:
            # Wan's cos has a dimension for heads.
            given = given or [places.squeeze(2) if places.ndim == 4 else places for _, places, _ in parts]
            turns = [turn for turn, *_ in parts]
            own = turns[0] if patch.config.compose else None
        turns = [identity_turn(turn) for turn in turns] if rotates else turns
        options[patch.family.argument] = tuple(turns) if patch.family.text == "separate" else turns[0]
    if rotates:
        patch.hook_outputs(tower, layer, attention)
        DiffusionPass(attention, layer, tower, given, options, own).begin()


def _turn_parts(tower: Any, layer: int, parts: list, attention: nn.Module, options: dict) -> list[Turn]:
    """The rotations of images, and of text where it has its own, with the frequencies of a layer."""
    patch, size = tower.rotary_patch, None
    if patch.schedule is not None:
        if getattr(getattr(attention, "processor", None), "_parallel_config", None) is not None:
            raise RuntimeError("A schedule needs the size of the image, but this device has some of its tokens.")
        if patch.reads_level and options.get("kv_cache_mode") is not None:
            raise RuntimeError(
                "Cached keys have the frequencies of another noise level than the schedule gives queries."
            )
        places = parts[0][1].flatten(0, -2)  # (N, A), of images
        size = places.amax(0) - places.amin(0) + 1  # (A,)
    return [
        tower.rotary_encoding(layer, turn, places, patch.schedule, size, level if patch.reads_level else None)
        for turn, places, level in parts
    ]


class DiffusionPass(AttentionPass):
    """
    One call, with these arguments, of an attention module whose queries and keys are rotated where they are normalised.

    Attributes:
        given: The rotation of images; or their (…, N, A) coordinates, and those of text; or the positions of a grid.
        pending: The (stream, part) that are not rotated yet.
        own: The model's own (text + N, D) cos and sin, which rotate first, with `compose`.
    """

    def __init__(
        self, attention: nn.Module, layer: int, tower: Any, given: Any, options: dict, own: Turn | None = None
    ):
        super().__init__(attention, layer)
        if options.get("ip_hidden_states") is not None:
            raise RuntimeError(
                "The queries of an IP-Adapter are those before the rotation, which this patch replaces: unpatch the "
                "model, or patch it with position_encoding='rope_mixed'."
            )
        self.tower, self.given, self.own = tower, given, own
        self.dtype, self.device = product_dtype(options["hidden_states"]), options["hidden_states"].device
        streams = tower.rotary_patch.streams(attention)
        self.pending = {(stream, part) for stream in streams for part in STATE_MODULES[stream]}
        self.rotations: dict[str, Any] = {}

    def rotate(self, stream: str, part: str, states: torch.Tensor) -> torch.Tensor:
        """R(p) of the queries or keys of a stream."""
        self.pending.discard((stream, part))
        encoding, family = self.tower.rotary_encoding, self.tower.rotary_patch.family
        tokens = states.shape[2 if family.heads_first and states.ndim == 4 else 1]
        if self.tower.rotary_patch.turns:
            missing = tokens - self.given[0][0].shape[-2]
            text, image = states.split([missing, tokens - missing], dim=2)  # (B, H, …, D) each
            cos, sin = (x[..., ::2] for x in self.given[0])  # (N, planes) each
            # In float32, as diffusers does it.
            return torch.cat([text, rotate_planes(cos, sin, image.float()).to(states.dtype)], dim=2)
        if stream not in self.rotations:
            self.rotations[stream] = encoding(self.layer, self._place(stream, tokens), self.dtype).to(self.device)
        if self.own is not None:
            cos, sin = (take_rows(x, stream, tokens)[..., ::2] for x in self.own)  # (tokens, planes) each
            heads_first = states.float().transpose(1, 2)  # (B, H, tokens, D)
            states = rotate_planes(cos, sin, heads_first).transpose(1, 2).to(states.dtype)
        rotated = encoding.rotate(self.rotations[stream], states, family.heads_first)
        return rotated.clone() if family.in_place and rotated.requires_grad else rotated

    def _place(self, stream: str, tokens: int) -> TokenPositions:
        """The positions of the tokens of a stream; tokens without a position are at 0, where nothing rotates."""
        if self.given is None:
            raise RuntimeError(f"Attention layer {self.layer} ran outside its model: the positions are unknown.")
        text, positions = self.tower.rotary_patch.family.text, self.given
        if not isinstance(positions, TokenPositions):
            coordinates = self.given[stream == "text" and text == "separate"]  # (…, N, A)
            if text == "first":
                coordinates = take_rows(coordinates, stream, tokens)
            elif text != "separate":
                missing = max(tokens - coordinates.shape[-2], 0)
                rows = (missing, 0) if text == "unrotated_first" else (0, missing)
                coordinates = nn.functional.pad(coordinates, (0, 0, *rows))  # (…, tokens, A)
            positions = TokenPositions(coordinates)
        if positions.shape[-2] != tokens:
            raise RuntimeError(f"Attention sees {tokens} tokens, but the places of {positions.shape[-2]} are known.")
        return positions


def rotate_states(
    layer: int, stream: str, part: str, module: nn.Module, args: tuple, output: torch.Tensor
) -> torch.Tensor:
    """Forward hook of the module that makes the queries or keys of a stream."""
    rotated: torch.Tensor = DiffusionPass.find(layer, module).rotate(stream, part, output)
    return rotated


def finish_attention(attention: nn.Module, args: tuple, output: Any) -> None:
    """Forward hook of an attention module whose queries and keys are rotated, also called when it fails."""
    current = DiffusionPass.end(attention)
    if output is not None and current is not None and current.pending:
        raise RuntimeError(
            f"{type(attention).__name__} of layer {current.layer} made {sorted(current.pending)} in another way than "
            "when it was patched (fused projections, or a cache?), so these are not rotated; unpatch the model first."
        )
