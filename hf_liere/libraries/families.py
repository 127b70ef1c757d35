"""
The transformers of diffusers that can be patched: where each computes its rotations, from which coordinates and
frequencies, and which attention modules receive them. diffusers passes finished cos and sin, so coordinates and
frequencies are computed here as the model does; `diffusion_patch` compares them with the model's own cos and sin.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..models.probing.module_inspection import device_of
from ..models.probing.planes import Planes


@dataclass(frozen=True)
class DiffusionFamily:
    """
    How the models of one class rotate.

    Attributes:
        rope: The attribute of the model that computes rotations; `None` if the pipeline passes them to the model, or if
            the model does not rotate.
        attentions: Parts of the model, and the name of the attention module in each of their blocks.
        argument: The argument by which attention receives rotations; for models that do not rotate, the dictionary
            that the model passes on to attention.
        planes: (model) → the planes of the channels that one cos and sin cover: a head, or all heads in a row.
        coordinates: (rope, …) → (…, N, A) coordinates for the arguments of the rotary module; a tuple where it returns
            several rotations, of images and of text.
        example: (model) → arguments of the rotary module for a few tokens, by name.
        heads_first: Whether queries and keys are (B, H, N, D), not (B, N, H, D), when attention has normalised them.
        text: Where tokens of text stand in the rotations: `"first"`; `"separate"` if they have rotations of their own;
            `"unrotated_first"` or `"unrotated_last"`, in attention modules that join them before the norm.
        in_place: Whether attention writes the rotated queries and keys over the others, which no gradient of cos and
            sin allows: they are rotated where they are normalised.
        cross: Another attention module of each block, which gets the same dictionary and does not rotate.
        argument_of_scale: The argument by which a model divides its coordinates by the size of training.
        noise_level: (timestep as the model takes it) → 1 for noise to 0 for a clean image; `None` where it is unknown.
    """

    rope: str | None
    attentions: tuple[tuple[str, str], ...] = (("transformer_blocks", "attn1"),)
    argument: str = "image_rotary_emb"
    planes: Callable[[Any], Planes] | None = None
    coordinates: Callable[..., Any] | None = None
    example: Callable[[Any], dict] | None = None
    heads_first: bool = False
    text: str = "unrotated_last"
    in_place: bool = False
    cross: str = ""
    argument_of_scale: str | None = None
    noise_level: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def rotates(self) -> bool:
        return self.planes is not None

    def parts(self, given: Any) -> tuple:
        """What belongs to images, and what to text where that is separate."""
        return tuple(given) if self.text == "separate" else (given,)

    def find_attentions(self, model: nn.Module, cross: bool = False) -> Iterator[tuple[str, nn.Module]]:
        """(name, module) of the attention modules that receive rotations, or of the others that get the dictionary."""
        for part, names in self.attentions:
            for index, block in enumerate(getattr(model, part, None) or ()):
                for name in (self.cross if cross else names).split():
                    attention = getattr(block, name, None)
                    if attention is not None:
                        yield f"{part}.{index}.{name}", attention


def geometric_planes(
    channels: Sequence[int], theta: float = 10000.0, factors: Sequence[float] = (), pairing: str = "adjacent"
) -> Planes:
    """RoPE's planes of several axes, one after the other: ω_i = (factor·θ)^(−2i/d) for the d channels of an axis."""
    thetas = [theta * factor for factor in factors] or [theta] * len(channels)
    spectra = [[base ** (-index / count) for index in range(0, count, 2)] for count, base in zip(channels, thetas)]
    numbers = [axis for axis, spectrum in enumerate(spectra) for _ in spectrum]
    return Planes.from_pairing(sum(spectra, []), numbers, pairing)


def grid_coordinates(starts: tuple[int, ...], sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """(N, A) indices of a grid, the first axis slowest."""
    axes = (torch.arange(first, first + size, device=device) for first, size in zip(starts, sizes))
    return torch.cartesian_prod(*axes).float()


def _patch_size(rope: Any) -> tuple[int, int, int]:
    size = rope.patch_size
    return tuple(size) if isinstance(size, (list, tuple)) else (rope.patch_size_t, size, size)


def _place_patches(rope: Any, hidden_states: torch.Tensor, fps: int | None = None) -> torch.Tensor:
    """(N, 3) indices of the patches of (B, C, frames, height, width) latents."""
    sizes = tuple(size // extent for size, extent in zip(hidden_states.shape[2:], _patch_size(rope)))
    coordinates = grid_coordinates((0, 0, 0), sizes, hidden_states.device)
    # Cosmos counts time in frames at the frame rate of training.
    return coordinates if fps is None else coordinates * coordinates.new_tensor([rope.base_fps / fps, 1.0, 1.0])


def _place_ltx(
    rope: Any,
    hidden_states: torch.Tensor,
    num_frames: int | None = None,
    height: int | None = None,
    width: int | None = None,
    rope_interpolation_scale: Any = None,
    video_coords: torch.Tensor | None = None,
) -> torch.Tensor:
    if video_coords is None:
        sizes = (len(hidden_states), num_frames, height, width, rope_interpolation_scale, hidden_states.device)
        grid = rope._prepare_video_coords(*sizes)
    else:
        base = video_coords.new_tensor([rope.base_num_frames, rope.base_height, rope.base_width])
        grid = video_coords.transpose(1, 2) / base
    return grid * 2 - 1  # (B, N, 3), from −1 to 1 at the base size


def _ltx_planes(model: Any) -> Planes:
    """Planes of all heads in a row: the three axes take turns, from π/2 to θπ/2; the rest of d/6 is not rotated."""
    rope = model.rope
    count = rope.dim // 6
    spectrum = [math.pi / 2 * rope.theta ** (index / max(count - 1, 1)) for index in range(count)]
    rest = rope.dim % 6 // 2
    frequencies = [0.0] * rest + [frequency for frequency in spectrum for _ in range(3)]
    return Planes.from_pairing(frequencies, (0,) * rest + (0, 1, 2) * count, "adjacent")


def _cogvideox_planes(model: Any) -> Planes:
    """As the pipelines compute them (`get_3d_rotary_pos_embed`): a quarter of the channels for time."""
    channels = model.config.attention_head_dim
    return geometric_planes((channels // 4, channels // 8 * 3, channels // 8 * 3))


def _place_qwen(
    rope: Any, video_fhw: Any, device: Any = None, max_txt_seq_len: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Coordinates of images, one after the other on the first axis, and of text, beyond their corner on all axes."""
    shapes = video_fhw[0] if isinstance(video_fhw, list) else video_fhw
    shapes = shapes if isinstance(shapes, list) else [shapes]
    # Layered models put the last image, the condition, before the others.
    layered, last = type(rope).__name__ == "QwenEmbedLayer3DRope", len(shapes) - 1
    images, corner = [], last if layered else 0
    for index, (frames, height, width) in enumerate(shapes):
        frame = -1 if layered and index == last else index
        starts = (height // 2 - height, width // 2 - width) if rope.scale_rope else (0, 0)
        images.append(grid_coordinates((frame, *starts), (frames, height, width), device))
        reach = (height // 2, width // 2) if rope.scale_rope else (height, width)
        corner = max(corner, *reach)
    text = torch.arange(corner, corner + int(max_txt_seq_len), device=device).float()  # (N_text,)
    return torch.cat(images), text.unsqueeze(-1).expand(-1, 3)  # (N_image, 3), (N_text, 3)


def _few_ids(model: Any) -> dict:
    axes = len(getattr(model, "axes_dims", None) or model.config.axes_dims_rope)
    return {"ids": torch.arange(5 * axes).view(5, axes) % 7}


def _few_latents(model: Any) -> dict:
    """Two patches on every axis."""
    return {"hidden_states": torch.zeros(1, 1, *(2 * size for size in _patch_size(model.rope)))}


FLUX: dict[str, Any] = {
    "rope": "pos_embed",
    "planes": lambda model: geometric_planes(model.pos_embed.axes_dim, model.pos_embed.theta),
    "coordinates": lambda rope, ids: ids.float(),  # (N, A)
    "example": _few_ids,
    "text": "first",
    "noise_level": lambda timestep: timestep,
}
STREAMS = (("transformer_blocks", "attn"), ("single_transformer_blocks", "attn"))
FAMILIES = {
    "FluxTransformer2DModel": DiffusionFamily(attentions=STREAMS, **FLUX),
    "Flux2Transformer2DModel": DiffusionFamily(attentions=STREAMS, **FLUX),
    "QwenImageTransformer2DModel": DiffusionFamily(
        rope="pos_embed",
        attentions=(("transformer_blocks", "attn"),),
        planes=FLUX["planes"],
        coordinates=_place_qwen,
        example=lambda model: {"video_fhw": [[(1, 2, 3), (1, 3, 2)]], "max_txt_seq_len": 4, "device": device_of(model)},
        text="separate",
        noise_level=FLUX["noise_level"],
    ),
    "ZImageTransformer2DModel": DiffusionFamily(
        rope="rope_embedder",
        attentions=tuple(
            (part, "attention") for part in ("noise_refiner", "context_refiner", "siglip_refiner", "layers")
        ),
        argument="freqs_cis",
        planes=lambda model: geometric_planes(model.rope_embedder.axes_dims, model.rope_embedder.theta),
        coordinates=FLUX["coordinates"],
        example=_few_ids,
        noise_level=lambda timestep: 1 - timestep,
    ),
    "WanTransformer3DModel": DiffusionFamily(
        rope="rope",
        attentions=(("blocks", "attn1"),),
        argument="rotary_emb",
        planes=lambda model: geometric_planes((model.rope.t_dim, model.rope.h_dim, model.rope.w_dim)),
        coordinates=_place_patches,
        example=_few_latents,
        noise_level=lambda timestep: timestep / 1000,
    ),
    "HunyuanVideoTransformer3DModel": DiffusionFamily(
        rope="rope",
        attentions=STREAMS,
        planes=lambda model: geometric_planes(model.rope.rope_dim, model.rope.theta),
        coordinates=_place_patches,
        example=_few_latents,
        noise_level=lambda timestep: timestep / 1000,
    ),
    "LTXVideoTransformer3DModel": DiffusionFamily(
        rope="rope",
        planes=_ltx_planes,
        coordinates=_place_ltx,
        example=lambda model: {"hidden_states": torch.zeros(1, 12, 1), "video_coords": torch.arange(36).view(1, 3, 12)},
        argument_of_scale="rope_interpolation_scale",
    ),
    "CosmosTransformer3DModel": DiffusionFamily(
        rope="rope",
        planes=lambda model: geometric_planes(
            (model.rope.dim_t, model.rope.dim_h, model.rope.dim_w),
            factors=(model.rope.t_ntk_factor, model.rope.h_ntk_factor, model.rope.w_ntk_factor),
            pairing="halves",
        ),
        coordinates=_place_patches,
        example=lambda model: {**_few_latents(model), "fps": 12},
        heads_first=True,
    ),
    "CogVideoXTransformer3DModel": DiffusionFamily(
        rope=None,
        planes=_cogvideox_planes,
        heads_first=True,
        text="unrotated_first",
        in_place=True,
        noise_level=lambda timestep: timestep / 1000,
    ),
    "SD3Transformer2DModel": DiffusionFamily(
        rope=None,
        attentions=(("transformer_blocks", "attn attn2"),),
        argument="joint_attention_kwargs",
        heads_first=True,
    ),
    "PixArtTransformer2DModel": DiffusionFamily(
        rope=None,
        argument="cross_attention_kwargs",
        heads_first=True,
        cross="attn2",
    ),
}
