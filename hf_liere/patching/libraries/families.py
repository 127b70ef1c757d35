"""
The diffusers models that can be patched: where each computes its rotations, with which frequencies, and which
attention modules receive them. diffusers passes finished cos and sin: frequencies are computed here as the model does,
and coordinates read from cos and sin wherever these tell them. `diffusion_patch` compares both with the model's own.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...probing.module_inspection import device_of
from ...probing.planes import Planes
from .rotations import find_coordinates


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
        coordinates: (rope, …) → (…, N, A) coordinates for the arguments of the rotary module, where they may exceed
            half a turn of the slowest plane; else `None`, and [`find_coordinates`] reads them from cos and sin.
        example: (model) → arguments of the rotary module for a few tokens, by name.
        heads_first: Whether queries and keys are (B, H, N, D), not (B, N, H, D), when attention has normalised them.
        text: Where tokens of text stand in the rotations: `"first"`; `"separate"` if they have rotations of their own;
            `"unrotated_first"` or `"unrotated_last"`, in attention modules that join them before the norm.
        in_place: Whether attention writes the rotated queries and keys over the others, which no gradient of cos and
            sin allows: they are rotated where they are normalised.
        argument_of_scale: The argument by which a model divides its coordinates by the size of training.
        timesteps: Those of a clean image and of noise, as the model takes them; `None` if they do not tell the level of
            noise.
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
    argument_of_scale: str | None = None
    timesteps: tuple[float, float] | None = (0.0, 1000.0)

    @property
    def rotates(self) -> bool:
        return self.planes is not None

    def parts(self, given: Any) -> tuple:
        """The part for images and, where text is separate, the part for text."""
        return tuple(given) if self.text == "separate" else (given,)

    def place(self, planes: Planes, turns: Any, rope: Any, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        """(…, N, A) coordinates of every part of what a rotary module returned for these arguments."""
        if self.coordinates is not None:
            return [self.coordinates(rope, *args, **kwargs)]
        return [find_coordinates(turn, planes) for turn in self.parts(turns)]

    def find_attentions(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """(name, module) of the attention modules that receive rotations."""
        for part, names in self.attentions:
            for index, block in enumerate(getattr(model, part, None) or ()):
                for name in names.split():
                    if (attention := getattr(block, name, None)) is not None:
                        yield f"{part}.{index}.{name}", attention


def geometric_planes(
    channels: Sequence[int], theta: float | Sequence[float] = 10000.0, pairing: str = "adjacent"
) -> Planes:
    """RoPE's planes of several axes, one after the other: ω_i = θ^(−2i/d) for the d channels of an axis, and its θ."""
    thetas = theta if isinstance(theta, Sequence) else [theta] * len(channels)
    spectra = [[base ** (-index / count) for index in range(0, count, 2)] for count, base in zip(channels, thetas)]
    numbers = [axis for axis, spectrum in enumerate(spectra) for _ in spectrum]
    return Planes.from_pairing(sum(spectra, []), numbers, pairing)


def _place_ltx(rope: Any, *args: Any, **options: Any) -> torch.Tensor:
    given = inspect.signature(rope.forward).bind(*args, **options)
    given.apply_defaults()
    hidden_states, *sizes, video_coords = given.arguments.values()
    if video_coords is None:
        grid = rope._prepare_video_coords(len(hidden_states), *sizes, hidden_states.device)
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


def _few_ids(model: Any) -> dict:
    axes = len(getattr(model, "axes_dims", None) or model.config.axes_dims_rope)
    return {"ids": torch.arange(5 * axes).view(5, axes) % 7}


# 8 latents on every axis: more than a patch has.
FEW_LATENTS = {"hidden_states": torch.zeros(1, 1, 8, 8, 8)}
STREAMS = (("transformer_blocks", "attn"), ("single_transformer_blocks", "attn"))
FLUX = DiffusionFamily(
    rope="pos_embed",
    attentions=STREAMS,
    planes=lambda model: geometric_planes(model.pos_embed.axes_dim, model.pos_embed.theta),
    coordinates=lambda rope, ids: ids.float(),  # (N, A)
    example=_few_ids,
    text="first",
    timesteps=(0.0, 1.0),
)
FAMILIES = {
    "FluxTransformer2DModel": FLUX,
    "Flux2Transformer2DModel": FLUX,
    "QwenImageTransformer2DModel": replace(
        FLUX,
        attentions=STREAMS[:1],
        coordinates=None,
        example=lambda model: {"video_fhw": [[(1, 2, 3), (1, 3, 2)]], "max_txt_seq_len": 4, "device": device_of(model)},
        text="separate",
    ),
    "ZImageTransformer2DModel": DiffusionFamily(
        rope="rope_embedder",
        attentions=tuple(
            (part, "attention") for part in ("noise_refiner", "context_refiner", "siglip_refiner", "layers")
        ),
        argument="freqs_cis",
        planes=lambda model: geometric_planes(model.rope_embedder.axes_dims, model.rope_embedder.theta),
        coordinates=FLUX.coordinates,
        example=_few_ids,
        timesteps=(1.0, 0.0),
    ),
    "WanTransformer3DModel": DiffusionFamily(
        rope="rope",
        attentions=(("blocks", "attn1"),),
        argument="rotary_emb",
        planes=lambda model: geometric_planes((model.rope.t_dim, model.rope.h_dim, model.rope.w_dim)),
        example=lambda model: FEW_LATENTS,
    ),
    "HunyuanVideoTransformer3DModel": DiffusionFamily(
        rope="rope",
        attentions=STREAMS,
        planes=lambda model: geometric_planes(model.rope.rope_dim, model.rope.theta),
        example=lambda model: FEW_LATENTS,
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
            [10000.0 * getattr(model.rope, f"{axis}_ntk_factor") for axis in "thw"],
            pairing="halves",
        ),
        example=lambda model: {**FEW_LATENTS, "fps": 12},
        heads_first=True,
        timesteps=None,
    ),
    "CogVideoXTransformer3DModel": DiffusionFamily(
        rope=None,
        # As the pipelines compute them (`get_3d_rotary_pos_embed`): a quarter of the channels for time.
        planes=lambda model: geometric_planes([model.config.attention_head_dim // 8 * count for count in (2, 3, 3)]),
        heads_first=True,
        text="unrotated_first",
        in_place=True,
    ),
    "SD3Transformer2DModel": DiffusionFamily(
        rope=None,
        attentions=(("transformer_blocks", "attn attn2"),),
        argument="joint_attention_kwargs",
        heads_first=True,
    ),
    "PixArtTransformer2DModel": DiffusionFamily(rope=None, argument="cross_attention_kwargs", heads_first=True),
}
