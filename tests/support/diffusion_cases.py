"""Transformers of diffusers with random weights: one table for the tests and for the page."""

import dataclasses
import math
from collections.abc import Callable

import diffusers
import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from library_checks import normal
from torch import nn

from hf_liere import RotaryPatchConfig


PLANES = RotaryPatchConfig(position_encoding="rope_mixed", rotary_init="pretrained")
BLOCKS = RotaryPatchConfig(position_encoding="liere", block_size=4, rotary_init="pretrained")
COMPOSED = RotaryPatchConfig(position_encoding="liere", block_size=4, compose=True)
PANELS = dataclasses.replace(COMPOSED, num_axes=2)
ZEROS = RotaryPatchConfig(position_encoding="liere", block_size=4)
HEADS = {"attention_head_dim": 16, "num_attention_heads": 2}


@dataclasses.dataclass
class Case:
    """
    Attributes:
        name: Of the class in diffusers.
        config: Of a small model.
        inputs: Makes its inputs, for an image or a clip of this many patches per axis.
        axes: Channels of a head for every axis; empty if the model does not rotate.
        thetas: The base of the frequencies, or one for every axis.
        set_base: Gives a model another base, and returns its inputs.
        blocks: Encodings of blocks of four channels that the model accepts.
    """

    name: str
    config: dict
    inputs: Callable[..., dict]
    axes: tuple[int, ...] = ()
    thetas: tuple[float, ...] = (10000.0,) * 4
    set_base: Callable[..., dict] | None = None
    blocks: tuple[str, ...] = ("liere", "comrope_ld")

    @property
    def rotates(self) -> bool:
        return bool(self.axes)

    def frequencies(self, theta: float | None = None) -> torch.Tensor:
        """The frequencies of the planes that rotate, for the model's base or for another one."""
        thetas = self.thetas if theta is None else (theta,) * 4
        if self.name.startswith("LTX"):
            # Five frequencies for each of three axes, which take turns, in the planes of both heads.
            found = [math.pi / 2 * thetas[0] ** (index / 4) for index in range(5) for _ in range(3)]
        else:
            found = [
                base ** (-i / channels) for base, channels in zip(thetas, self.axes) for i in range(0, channels, 2)
            ]
        return torch.tensor(found, dtype=torch.float64)

    def build(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        model = getattr(diffusers, self.name)(**self.config).eval()
        # Some weights start at zero or one, which would hide an error.
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim < 2 or not parameter.any():
                    parameter.add_(0.3 * torch.randn_like(parameter))
                if ".to_q." in name or ".to_k." in name:
                    parameter.mul_(2)
        return model


def ids(axes, rows, columns, first=0):
    """(rows · columns, axes) position ids, with different numbers on all axes but the last."""
    grid = torch.zeros(rows, columns, axes)
    grid[..., 0] = first
    grid[..., 1] += torch.arange(rows)[:, None]
    grid[..., 2] += torch.arange(columns)
    return grid.flatten(0, 1)


def flux(rows=3, columns=4):
    image = torch.cat([ids(3, rows, columns), ids(3, 2, 2, first=1)])
    return {
        "hidden_states": normal(2, len(image), 4),
        "encoder_hidden_states": normal(2, 5, 16, seed=2),
        "pooled_projections": normal(2, 8, seed=3),
        "timestep": torch.full((2,), 0.7),
        "img_ids": image,
        "txt_ids": torch.zeros(5, 3),
    }


def flux_in_panels():
    """The image in three panels, the last two on axes of their own."""
    positions = torch.eye(3)[torch.arange(16) // 6, 1:].expand(2, -1, -1)
    return flux() | {"joint_attention_kwargs": {"rotary_positions": positions}}


def flux2(rows=3, columns=4):
    text = torch.zeros(5, 4)
    text[:, 3] = torch.arange(5)
    image = torch.cat([ids(4, rows, columns), ids(4, 2, 2, first=10)])
    return {
        "hidden_states": normal(2, len(image), 4),
        "encoder_hidden_states": normal(2, 5, 16, seed=2),
        "timestep": torch.full((2,), 0.7),
        "guidance": torch.ones(2),
        "img_ids": image,
        "txt_ids": text,
    }


def qwen(rows=3, columns=4):
    return {
        "hidden_states": normal(2, rows * columns + 4, 4),
        "encoder_hidden_states": normal(2, 5, 16, seed=2),
        "encoder_hidden_states_mask": torch.tensor([[True] * 5, [True, True, True, False, False]]),
        "timestep": torch.full((2,), 0.7),
        "img_shapes": [[(1, rows, columns), (1, 2, 2)]] * 2,
    }


def z_image(rows=3, columns=4):
    return {
        "x": [normal(4, 1, 2 * rows, 2 * columns), normal(4, 1, 4, 4, seed=4)],
        "t": torch.full((2,), 0.3),
        "cap_feats": [normal(5, 16, seed=2), normal(3, 16, seed=3)],
    }


def wan(rows=3, columns=4):
    return {
        "hidden_states": normal(2, 4, 3, 2 * rows, 2 * columns),
        "encoder_hidden_states": normal(2, 5, 16, seed=2),
        "timestep": torch.full((2,), 700),
    }


def hunyuan(rows=3, columns=4):
    return {
        "hidden_states": normal(2, 4, 3, rows, columns),
        "encoder_hidden_states": normal(2, 5, 16, seed=2),
        "encoder_attention_mask": torch.tensor([[1] * 5, [1, 1, 1, 0, 0]]),
        "pooled_projections": normal(2, 8, seed=3),
        "timestep": torch.full((2,), 700),
        "guidance": torch.full((2,), 6000.0),
    }


def ltx(rows=3, columns=4):
    return {
        "hidden_states": normal(2, 3 * rows * columns, 4),
        "encoder_hidden_states": normal(2, 5, 16, seed=2),
        "encoder_attention_mask": torch.ones(2, 5, dtype=torch.long),
        "timestep": torch.full((2,), 700),
        "num_frames": 3,
        "height": rows,
        "width": columns,
        "rope_interpolation_scale": (8 / 25, 32, 32),
    }


def cosmos(rows=3, columns=4):
    return {
        "hidden_states": normal(2, 4, 3, 2 * rows, 2 * columns),
        "encoder_hidden_states": normal(2, 5, 16, seed=2),
        "timestep": torch.full((2,), 0.7),
        "fps": 30,
        "padding_mask": torch.zeros(1, 1, 2 * rows, 2 * columns),
    }


def cogvideox(rows=3, columns=4, theta=10000):
    rotations = get_3d_rotary_pos_embed(32, ((0, 0), (rows, columns)), (rows, columns), 3, theta)
    return {
        "hidden_states": normal(2, 3, 4, 2 * rows, 2 * columns),
        "encoder_hidden_states": normal(2, 5, 16, seed=2),
        "timestep": torch.full((2,), 700),
        "image_rotary_emb": rotations,
    }


def sd3(rows=3, columns=4):
    return {
        "hidden_states": normal(2, 4, 2 * rows, 2 * columns),
        "encoder_hidden_states": normal(2, 5, 16, seed=2),
        "pooled_projections": normal(2, 8, seed=3),
        "timestep": torch.full((2,), 700),
    }


def pixart(rows=3, columns=4):
    return {
        "hidden_states": normal(2, 4, 2 * rows, 2 * columns),
        "encoder_hidden_states": normal(2, 5, 16, seed=2),
        "timestep": torch.full((2,), 700),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def set_theta(name):
    def set_base(model, inputs, theta):
        getattr(model, name).theta = theta
        return inputs

    return set_base


def set_qwen_theta(model, inputs, theta):
    model.pos_embed = QwenEmbedRope(theta, model.pos_embed.axes_dim, scale_rope=True)
    return inputs


def set_wan_theta(model, inputs, theta):
    model.rope = WanRotaryPosEmbed(16, model.rope.patch_size, model.rope.max_seq_len, theta)
    return inputs


def set_cosmos_theta(model, inputs, theta):
    model.rope.t_ntk_factor = model.rope.h_ntk_factor = model.rope.w_ntk_factor = theta / 10000
    return inputs


def set_cogvideox_theta(model, inputs, theta):
    return cogvideox(theta=theta)


PATCHES = {"in_channels": 4, "out_channels": 4}
CASES = [
    Case(
        "FluxTransformer2DModel",
        {**HEADS, "in_channels": 4, "num_layers": 2, "num_single_layers": 2, "joint_attention_dim": 16}
        | {"pooled_projection_dim": 8, "axes_dims_rope": (4, 4, 8)},
        flux,
        axes=(4, 4, 8),
        set_base=set_theta("pos_embed"),
    ),
    Case(
        "Flux2Transformer2DModel",
        {**HEADS, "in_channels": 4, "num_layers": 2, "num_single_layers": 2, "joint_attention_dim": 16}
        | {"timestep_guidance_channels": 8, "axes_dims_rope": (4, 4, 4, 4)},
        flux2,
        axes=(4, 4, 4, 4),
        thetas=(2000.0,) * 4,
        set_base=set_theta("pos_embed"),
    ),
    Case(
        "QwenImageTransformer2DModel",
        {**HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 2, "joint_attention_dim": 16}
        | {"patch_size": 1, "axes_dims_rope": (4, 4, 8)},
        qwen,
        axes=(4, 4, 8),
        set_base=set_qwen_theta,
    ),
    Case(
        "ZImageTransformer2DModel",
        {"in_channels": 4, "dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2}
        | {"cap_feat_dim": 16, "axes_dims": [4, 4, 8], "axes_lens": [64, 32, 32]},
        z_image,
        axes=(4, 4, 8),
        thetas=(256.0,) * 3,
        set_base=set_theta("rope_embedder"),
    ),
    Case(
        "WanTransformer3DModel",
        {**HEADS, **PATCHES, "text_dim": 16, "freq_dim": 8, "ffn_dim": 32, "num_layers": 2}
        | {"cross_attn_norm": True, "rope_max_seq_len": 32},
        wan,
        axes=(8, 4, 4),
        set_base=set_wan_theta,
    ),
    Case(
        "HunyuanVideoTransformer3DModel",
        {**HEADS, **PATCHES, "num_layers": 2, "num_single_layers": 2, "num_refiner_layers": 1, "patch_size": 1}
        | {"text_embed_dim": 16, "pooled_projection_dim": 8, "rope_axes_dim": (4, 4, 8), "guidance_embeds": True},
        hunyuan,
        axes=(4, 4, 8),
        thetas=(256.0,) * 3,
        set_base=set_theta("rope"),
    ),
    Case(
        "LTXVideoTransformer3DModel",
        {**HEADS, **PATCHES, "cross_attention_dim": 32, "num_layers": 2, "caption_channels": 16},
        ltx,
        axes=(16,),
        set_base=set_theta("rope"),
        blocks=("liere",),
    ),
    Case(
        "CosmosTransformer3DModel",
        {**HEADS, **PATCHES, "num_layers": 2, "adaln_lora_dim": 4, "text_embed_dim": 16, "max_size": (4, 32, 32)}
        | {"extra_pos_embed_type": None},
        cosmos,
        axes=(8, 4, 4),
        # Twice as many frames as in training, by NTK.
        thetas=(10000.0 * 2 ** (8 / 6), 10000.0, 10000.0),
        set_base=set_cosmos_theta,
    ),
    Case(
        "CogVideoXTransformer3DModel",
        {**HEADS, **PATCHES, "num_layers": 2, "time_embed_dim": 8, "text_embed_dim": 16, "max_text_seq_length": 5}
        | {"sample_width": 8, "sample_height": 6, "attention_head_dim": 32, "use_rotary_positional_embeddings": True},
        cogvideox,
        axes=(8, 12, 12),
        set_base=set_cogvideox_theta,
    ),
    Case(
        "SD3Transformer2DModel",
        {**HEADS, **PATCHES, "sample_size": 8, "num_layers": 3, "joint_attention_dim": 16, "caption_projection_dim": 32}
        | {"pooled_projection_dim": 8, "pos_embed_max_size": 8, "qk_norm": "rms_norm", "dual_attention_layers": (0,)},
        sd3,
        blocks=(),
    ),
    Case(
        "PixArtTransformer2DModel",
        {**HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 2, "sample_size": 8, "caption_channels": 16}
        | {"cross_attention_dim": 32, "norm_num_groups": 1, "use_additional_conditions": False},
        pixart,
        blocks=(),
    ),
]
BY_NAME = {case.name: case for case in CASES}


def build(name):
    """The model of a case, whose name may have a suffix after a hyphen, and its inputs."""
    case = BY_NAME[name.partition("-")[0]]
    return case.build(), case.inputs()


def cogvideox_crop():
    """A crop of a larger image, as pipelines of CogVideoX 1.0 place it."""
    return cogvideox() | {"image_rotary_emb": get_3d_rotary_pos_embed(32, ((5, 3), (40, 60)), (3, 4), 3)}


def cogvideox_pairs():
    """Two frames in a token, as CogVideoX 1.5 has them."""
    options = {"grid_type": "slice", "max_size": (8, 8)}
    rotations = get_3d_rotary_pos_embed(32, None, (3, 4), 2, **options)
    return cogvideox() | {"hidden_states": normal(2, 4, 4, 6, 8), "image_rotary_emb": rotations}


def wan_image_to_video():
    context = {"encoder_hidden_states": normal(2, 512, 16), "encoder_hidden_states_image": normal(2, 3, 8)}
    return wan() | context


def z_image_omni():
    return {
        "x": [[normal(4, 1, 4, 4), normal(4, 1, 6, 8)]],
        "t": torch.full((1,), 0.3),
        "cap_feats": [[normal(5, 16), normal(3, 16)]],
        "siglip_feats": [[normal(2, 3, 12), None]],
        "image_noise_mask": [[0, 1]],
    }


def vary(name, inputs, **config):
    return dataclasses.replace(BY_NAME[name], config=BY_NAME[name].config | config, inputs=inputs)


# Other configurations of these classes and other forms of their inputs.
VARIANTS = {
    "layered": vary("QwenImageTransformer2DModel", qwen, use_layer3d_rope=True),
    "omni": vary("ZImageTransformer2DModel", z_image_omni, siglip_feat_dim=12),
    "image_to_video": vary("WanTransformer3DModel", wan_image_to_video, image_dim=8, added_kv_proj_dim=32),
    "token_replace": vary("HunyuanVideoTransformer3DModel", hunyuan, image_condition_type="token_replace"),
    "video_coords": vary("LTXVideoTransformer3DModel", lambda: ltx() | {"video_coords": normal(2, 3, 36).abs()}),
    "image": vary("CosmosTransformer3DModel", lambda: cosmos() | {"fps": None}),
    "crop": vary("CogVideoXTransformer3DModel", cogvideox_crop),
    "pairs_of_frames": vary("CogVideoXTransformer3DModel", cogvideox_pairs, patch_size_t=2),
    "without_norm": vary("SD3Transformer2DModel", sd3, qk_norm=None, dual_attention_layers=()),
}


def run(model, inputs):
    """The output, a tensor; of images of several sizes, their values in a row."""
    output = model(**inputs, return_dict=False)[0]
    return torch.cat([x.flatten() for x in output]) if isinstance(output, list) else output


def outputs(model, inputs):
    """As other modules of cases name it: all tensors of the output."""
    return [run(model, inputs)]


# The parts of a pipeline of FLUX that prompts and latents as tensors do without.
OTHER_PARTS = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))


def make_pipeline(transformer):
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipeline = diffusers.FluxPipeline(scheduler=scheduler, transformer=transformer, **OTHER_PARTS)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
