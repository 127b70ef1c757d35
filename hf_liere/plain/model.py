"""Transformers from `pixel_values` to logits: read `LieREViTModel`, patches, positions, rotations, layers, pooling."""

import itertools
import math
from contextlib import suppress
from functools import partial
from importlib.util import find_spec

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneConfigMixin, BackboneMixin, filter_output_hidden_states
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BackboneOutput,
    BaseModelOutputWithPooling,
    ImageClassifierOutput,
    MaskedImageModelingOutput,
    TokenClassifierOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from .encodings import ENCODINGS, LieRotary, grid_positions, patch_indices, rotate, working_dtype


class LieREConfig(PreTrainedConfig):
    """Sizes and switches. A checkpoint's config.json states them all; the documentation of hf_liere explains them."""

    has_no_defaults_at_init = True

    def __post_init__(self, **kwargs):
        # Fields that a file states only where the encoding or its start has them.
        for name in ("min_frequency", "max_frequency", "unrotated_share", "axial_layout", "spins"):
            kwargs.setdefault(name, None)
        super().__post_init__(**kwargs)
        names, version = ("none", "absolute", *ENCODINGS), self.format_version
        if self.position_encoding not in names or self.folded_grids is not None or version > 1:
            raise ValueError(
                f"position_encoding={self.position_encoding!r}, folded_grids={self.folded_grids} and format_version="
                f"{version} need the package hf_liere; accepted without it: {', '.join(names)}, not folded, version 1."
            )

    def extents(self, size: str, frames: str) -> tuple[int, ...]:
        """Rows and columns, after the frames of a clip, of a field for pixels and one for frames."""
        sides, length = getattr(self, size), [getattr(self, frames)] if hasattr(self, frames) else []
        return (*length, *((sides, sides) if isinstance(sides, int) else sides))

    @property
    def patch_shape(self) -> tuple[int, ...]:
        return self.extents("patch_size", "tubelet_size")

    @property
    def train_grid(self) -> tuple[int, ...]:
        """Patches per axis of a training input."""
        return tuple(size // patch for size, patch in zip(self.extents("image_size", "num_frames"), self.patch_shape))

    @property
    def num_axes(self) -> int:
        return len(self.patch_shape)

    @property
    def num_prefix_tokens(self) -> int:
        """Class and register tokens."""
        return int(self.use_class_token) + self.num_register_tokens

    @property
    def steps(self) -> list[float] | None:
        """Distances of neighbouring training patches on the axes; `None` for tokens, which have no grid."""
        name = "unit" if self.coordinates == "physical" else self.coordinates
        ends = torch.tensor([[0.0], [1.0]], dtype=torch.float64).expand(2, self.num_axes)
        return grid_positions(self.train_grid, name, self.train_grid, ends).diff(dim=0)[0].tolist() if name else None


class LieREViTConfig(BackboneConfigMixin, LieREConfig):
    """Images."""

    model_type = "liere_vit"

    def __post_init__(self, out_indices=None, out_features=None, **kwargs):
        super().__post_init__(**kwargs)
        self.stage_names = ["stem"] + [f"stage{index}" for index in range(1, self.num_hidden_layers + 1)]
        self.set_output_features_output_indices(out_indices=out_indices, out_features=out_features)


class LieREVideoConfig(LieREConfig):
    """Clips and volumes."""

    model_type = "liere_video"


class LieRETokensConfig(LieREConfig):
    """Tokens with features and positions, which are moved by `position_origin` and multiplied by `position_scale`."""

    model_type = "liere_tokens"
    num_axes: int = 1
    coordinates: str | None = None


def make_rotary(config) -> LieRotary | None:
    """The rotations of all layers; `None` for encodings without rotations."""
    if config.position_encoding not in ENCODINGS:
        return None
    kind = ENCODINGS[config.position_encoding]
    names = ["share_heads", "rotary_init", "rotary_init_scale", "rope_theta", *kind.fields_of(config.rotary_init)]
    sizes = config.num_attention_heads, config.head_dim, config.num_axes, config.block_size
    num_layers = 1 if config.share_layers else config.num_hidden_layers
    return kind(*sizes, num_layers=num_layers, **{name: getattr(config, name) for name in names})


class LieREAttention(nn.Module):
    """
    Self-attention of R(p) q and R(p) k. With `rotate_values` it rotates values too, and token i receives
    R(pᵢ)ᵀ Σⱼ wᵢⱼ R(pⱼ) vⱼ (GTA, eqs. 4–6).
    """

    is_causal = False

    def __init__(self, config):
        super().__init__()
        self.config, self.head_dim, self.scaling = config, config.head_dim, config.head_dim**-0.5
        width = config.num_attention_heads * config.head_dim
        for name in ("q_proj", "k_proj", "v_proj"):
            self.add_module(name, nn.Linear(config.hidden_size, width, bias=config.qkv_bias))
        self.o_proj = nn.Linear(width, config.hidden_size)

    def forward(self, hidden_states, rotation=None, attention_mask=None, **kwargs):
        """(B, N, hidden_size) states and the (1 or B, 1 or H, N, blocks, b, b) rotation of this layer."""
        states = (projection(hidden_states) for projection in (self.q_proj, self.k_proj, self.v_proj))
        query, key, value = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in states)  # (B, H, N, D)
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
            value = rotate(value, rotation) if self.config.rotate_values else value
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        kwargs |= {"scaling": self.scaling, "dropout": self.config.attention_probs_dropout_prob * self.training}
        attended, weights = attend(self, query, key, value, attention_mask, **kwargs)  # (B, N, H, D)
        if rotation is not None and self.config.rotate_values:
            attended = rotate(attended.transpose(1, 2), rotation.mT).transpose(1, 2)
        return self.o_proj(attended.flatten(2)), weights  # (B, N, hidden_size), (B, H, N, N) or None


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    weights = query @ key.mT * scaling  # (B, H, N, N)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        attention_mask = torch.where(attention_mask, 0.0, torch.finfo(weights.dtype).min)
    weights = weights if attention_mask is None else weights + attention_mask
    weights = weights.to(torch.promote_types(query.dtype, torch.float32)).softmax(dim=-1).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class LieREMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.activation = ACT2FN[config.hidden_act]
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.dropout = nn.Dropout(config.mlp_dropout_prob)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states):
        return self.fc2(self.dropout(self.activation(self.fc1(hidden_states))))  # (B, N, hidden_size)


class LieRELayerScale(nn.Module):
    """A learned factor per channel (CaiT, eq. 4)."""

    def __init__(self, config):
        super().__init__()
        self.scale = nn.Parameter(torch.full((config.hidden_size,), float(config.layerscale_value)))

    def forward(self, hidden_states):
        return hidden_states * self.scale  # (B, N, hidden_size)


class LieRELayer(GradientCheckpointingLayer):
    """Pre-norm transformer block."""

    def __init__(self, config, index: int):
        super().__init__()
        scaled = config.layerscale_value is not None
        self.layernorm_before = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = LieREAttention(config)
        self.layer_scale1 = LieRELayerScale(config) if scaled else nn.Identity()
        self.layernorm_after = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = LieREMLP(config)
        self.layer_scale2 = LieRELayerScale(config) if scaled else nn.Identity()
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.drop_rate = config.drop_path_rate * index / max(config.num_hidden_layers - 1, 1)

    def forward(self, hidden_states, rotation=None, attention_mask=None, **kwargs):
        """(B, N, hidden_size) states → the same shape."""
        attended, _ = self.attention(self.layernorm_before(hidden_states), rotation, attention_mask, **kwargs)
        hidden_states = hidden_states + self.drop_path(self.layer_scale1(self.dropout(attended)))
        transformed = self.mlp(self.layernorm_after(hidden_states))
        return hidden_states + self.drop_path(self.layer_scale2(self.dropout(transformed)))

    def drop_path(self, branch):
        """Stochastic depth: training drops the branch of random samples (Huang et al. 2016)."""
        return branch * nn.functional.dropout(branch.new_ones(len(branch), 1, 1), self.drop_rate, self.training)


class LieREEmbeddings(nn.Module):
    """
    Patches, or features of tokens, after class and register tokens; and a learned table of positions: one entry per
    patch of a training input and one for the class token, or `position_table_size` entries, read at coordinates.
    """

    def __init__(self, config, use_mask_token: bool = False):
        super().__init__()
        width, size, registers = config.hidden_size, config.position_table_size, config.num_register_tokens
        self.config = config
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width)) if config.use_class_token else None
        self.register_tokens = nn.Parameter(torch.zeros(1, registers, width)) if registers else None
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width)) if use_mask_token else None
        self.position_embeddings = None
        if config.use_absolute_position_embeddings:
            length = math.prod(size) if size else math.prod(config.train_grid) + int(config.use_class_token)
            self.position_embeddings = nn.Parameter(torch.zeros(1, length, width))
        if isinstance(config, LieRETokensConfig):
            self.feature_embeddings = nn.Linear(config.feature_size, width)
        else:
            convolution = {2: nn.Conv2d, 3: nn.Conv3d}[config.num_axes]
            projection = convolution(config.num_channels, width, config.patch_shape, config.patch_shape)
            self.patch_embeddings = nn.ModuleDict({"projection": projection})
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, inputs, grids, positions, bool_masked_pos, displacements):
        """
        (B, prefix + N, hidden_size) of pixels, patches or features.

        Args:
            grids: The grid of all samples, or of each; none for tokens.
            positions: (…, prefix + N, A) coordinates at which a table with `position_table_size` is read.
            bool_masked_pos: (B, N), true where the mask token replaces a patch.
            displacements: What [`draw_displacements`] returns for every grid; empty outside of training.
        """
        project = self.patch_embeddings["projection"] if grids else self.feature_embeddings
        inputs = inputs.to(project.weight.dtype)
        if inputs.ndim > 3:
            states = project(inputs).flatten(2).mT  # (B, N, hidden_size)
        else:
            weight = project.weight.movedim(1, -1).flatten(1)  # (hidden_size, patch pixels with channels last)
            states = nn.functional.linear(inputs, weight, project.bias)
        if bool_masked_pos is not None:
            states = torch.where(bool_masked_pos.bool().unsqueeze(-1), self.mask_token.to(states.dtype), states)
        table, size, cls_token = self.position_embeddings, self.config.position_table_size, self.cls_token
        if table is not None and size is None:
            states = states + padded([self.resize(table, each, displacements)[0] for each in grids], states.shape[1])
            cls_token = None if cls_token is None else cls_token + table[:, :1]
        prefix = [x.expand(len(states), -1, -1) for x in (cls_token, self.register_tokens) if x is not None]
        states = torch.cat([*prefix, states], dim=1)  # (B, prefix + N, hidden_size)
        if size is not None:
            states = states + read_table(table, tuple(size), positions)
        return self.dropout(states)

    def resize(self, table, grid, displacements):
        """The (1, N, hidden_size) part of a table for patches, for another grid and for patches that moved."""
        table = table[:, -math.prod(self.config.train_grid) :]
        fits, (moved, *_) = grid == self.config.train_grid, displacements.get(grid, [None])
        if not fits and self.config.position_table_resize == "truncate":
            table, fits = table[:, : math.prod(grid)], True
        if fits and moved is None:
            return table
        volume = table.mT.unflatten(-1, grid if fits else self.config.train_grid).float()  # (1, hidden_size, *grid)
        mode = "bicubic" if len(grid) == 2 else "trilinear"
        volume = volume if fits else nn.functional.interpolate(volume, size=grid, mode=mode)
        if moved is not None:
            # −1 and 1 are the outer borders of the first and last entry, and the last axis comes first.
            points = (2 * (patch_indices(grid, moved.device) + moved) + 1) / moved.new_tensor(grid) - 1
            points = points.flip(-1).view(1, *grid, len(grid)).to(volume)
            volume = nn.functional.grid_sample(volume, points, padding_mode="border", align_corners=False)
        return volume.flatten(2).mT.to(table.dtype)


def padded(rows, length: int):
    """(B, length, C) from (n, C) of each sample, or (1, length, C) from one for all."""
    return torch.stack([nn.functional.pad(each, (0, 0, 0, length - len(each))) for each in rows])


def read_table(table, size: tuple[int, ...], coordinates):
    """Multilinear interpolation at (…, N, A) coordinates, 0 at the first entry of an axis and 1 at the last."""
    values = 0.0
    for corner in itertools.product((0, 1), repeat=len(size)):
        weights, index = 1.0, 0
        for axis, step in enumerate(corner):
            place = (coordinates[..., axis] * (size[axis] - 1)).clamp(0, size[axis] - 1)
            first = place.floor().clamp(max=max(size[axis] - 2, 0))
            weights = weights * (place - first if step else 1 - (place - first))
            index = index * size[axis] + (first.long() + step).clamp(max=size[axis] - 1)
        values = values + table[0].float()[index] * weights.unsqueeze(-1).float()
    return values.to(table.dtype)  # (…, N, hidden_size)


def draw_displacements(config, grid, device):
    """
    How training moves the patches of a grid: ComRoPE's perturbation (eq. 11), (N, A) truncated normal draws in patches
    or `None`; and DINOv3's shift, and the factor of its jitter and rescaling about the middle, of the axes.
    """
    index, moved, shift, factor = patch_indices(grid, device), None, 0.0, 1.0
    if sigma := config.position_perturbation:
        quantiles = torch.empty_like(index).uniform_(-1, 1) * math.erf(0.5 / (sigma * math.sqrt(2)))
        moved = (torch.erfinv(quantiles) * sigma * math.sqrt(2)).clamp(-0.5, 0.5)
    if config.position_shift:
        shift = config.position_shift * index.new_empty(len(grid)).uniform_(-1, 1) * index.new_tensor(grid) / 2
    for largest, axes in ((config.position_jitter, len(grid)), (config.position_rescale, 1)):
        factor = factor if largest is None else factor * largest ** index.new_empty(axes).uniform_(-1, 1)
    return moved, shift, factor


def place_patches(config, grid, spacing, displacements, frame_times, device):
    """
    (N, A) coordinates of the patches of a grid, moved by its `displacements`; or (B, N, A) in `coordinates="physical"`:
    ½ + (i + ½ − n/2)·e with the extent e of a patch in `physical_unit`, from the (A,) or (B, A) spacing of pixels. The
    (T,) or (B, T) `frame_times` replace the spacing of the first axis; a tubelet is at the mean time of its frames.
    """
    indices = regular = patch_indices(grid, device)
    if frame_times is not None:
        times = frame_times.to(indices).view(-1, grid[0], config.patch_shape[0])  # (1 or B, tubelets, frames of each)
        step = (times[:, -1, -1:] - times[:, 0, :1]) / max(times[0].numel() - 1, 1)
        late = times.mean(-1) - (times[:, 0, :1] + times[:, -1, -1:]) / 2
        frames = late / (torch.where(step > 0, step, 1.0) * times.shape[-1]) + grid[0] / 2 - 0.5  # (1 or B, tubelets)
        late = frames.repeat_interleave(math.prod(grid[1:]), dim=1) - regular[:, 0]  # (1 or B, N)
        indices = indices + nn.functional.pad(late.unsqueeze(-1), (0, len(grid) - 1))
        samples = max(len(step), len(spacing) if spacing.ndim > 1 else 1)
        spacing = torch.cat([step.expand(samples, 1), spacing.to(step).expand(samples, -1)], dim=-1)  # (1 or B, A)
    middle, (moved, shift, factor) = indices.new_tensor(grid) / 2 - 0.5, displacements.get(grid, (None, 0.0, 1.0))
    indices = middle + (indices + (0.0 if moved is None else moved) - middle + shift) * factor
    if config.coordinates != "physical":
        return grid_positions(grid, config.coordinates, config.train_grid, indices)
    if spacing is None:
        raise ValueError("coordinates='physical' need spacing, the extents of a pixel on each axis; None was given.")
    patch, unit = (indices.new_tensor(x) for x in (config.patch_shape, config.physical_unit))
    return 0.5 + (indices + 0.5 - indices.new_tensor(grid) / 2) * (spacing.to(unit) * patch / unit).unsqueeze(-2)


def find_visible(mask):
    """(1 or B, N), true for tokens that a query attends to, of a mask of tokens or of pairs; `None` of others."""
    if not isinstance(mask, torch.Tensor) or mask.ndim == 2:
        return mask.bool() if isinstance(mask, torch.Tensor) else None
    attended = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return attended.flatten(1, 2).any(dim=1)


def select(mask, kept):
    """The (B, kept) tokens of a mask of tokens or of pairs."""
    if mask is None or mask.ndim == 2:
        return None if mask is None else mask.take_along_dim(kept, 1)
    columns = mask.take_along_dim(kept[:, None, None], 3)
    return columns if mask.shape[2] == 1 else columns.take_along_dim(kept[:, None, :, None], 2)


class LieREPreTrainedModel(PreTrainedModel):
    """Loading, saving and starts of all models."""

    config: LieREConfig
    base_model_prefix = "liere"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False
    _no_split_modules = ["LieREEmbeddings", "LieRELayer"]
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": LieRELayer, "attentions": LieREAttention}
    # A generator rounded to bfloat16 rotates distant patches by several degrees too far.
    _keep_in_fp32_modules_strict = ["rotary_encoding"]

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, LieREEmbeddings):
            std = self.config.token_initializer_range
            for parameter in (module.cls_token, module.register_tokens, module.position_embeddings):
                if parameter is not None and std is None:
                    init.trunc_normal_(parameter, std=self.config.initializer_range)
                elif parameter is not None:
                    init.normal_(parameter, std=std)
            if module.mask_token is not None:
                init.zeros_(module.mask_token)
        elif isinstance(module, LieRELayerScale):
            init.constant_(module.scale, self.config.layerscale_value)
        elif isinstance(module, LieRotary):
            module.reset_parameters()

    def post_init(self):
        super().post_init()
        # Some encodings have no parameters, and Transformers asks for those that it names.
        if not any("rotary_encoding." in name for name, _ in self.named_parameters()):
            self._keep_in_fp32_modules_strict = set()
        with suppress(ImportError):
            if not __name__.startswith("hf_liere") and find_spec("hf_liere") is not None:
                logging.get_logger(__name__).warning_once("`import hf_liere` first runs this model with fast kernels.")


class LieREViTModel(LieREPreTrainedModel):
    """The transformer on patches of images, or clips or tokens in subclasses, without a head."""

    config: LieREViTConfig

    def __init__(self, config, use_mask_token: bool = False):
        super().__init__(config)
        norm = partial(nn.LayerNorm, config.hidden_size, eps=config.layer_norm_eps)
        self.embeddings = LieREEmbeddings(config, use_mask_token)
        self.pre_layernorm = norm() if config.use_pre_layernorm else nn.Identity()
        self.rotary_encoding = make_rotary(config)
        self.layers = nn.ModuleList([LieRELayer(config, index) for index in range(config.num_hidden_layers)])
        self.layernorm = nn.Identity() if config.final_norm == "none" else norm()
        self.post_init()

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor,
        positions: torch.Tensor | None = None,
        bool_masked_pos: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        spacing: torch.Tensor | None = None,
        frame_times: torch.Tensor | None = None,
        pixel_attention_mask: torch.Tensor | None = None,
        spatial_shapes: torch.Tensor | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPooling:
        """
        Args:
            pixel_values: (B, C, H, W) images, (B, T, C, H, W) clips, or (B, N, patch pixels) patches of inputs of
                different sizes, with (B, A) `spatial_shapes`, the patches per axis of each.
            positions: (N, A) or (B, N, A) coordinates that replace the grid's; class and register tokens may be first.
            bool_masked_pos: (B, N), true where the mask token replaces a patch.
            attention_mask: (B, prefix + N), true for tokens to attend to, or a mask of pairs that is Boolean or added.
            spacing, frame_times: See [`place_patches`].
            pixel_attention_mask: Implied by `spatial_shapes`.
        """
        config, device, count = self.config, pixel_values.device, self.config.num_prefix_tokens
        if pixel_values.ndim == 5:
            pixel_values = pixel_values.transpose(1, 2)  # (B, C, T, H, W)
        grids, present = self.find_grids(pixel_values, attention_mask, spatial_shapes)
        num_tokens = pixel_values.shape[1] if pixel_values.ndim == 3 else math.prod(grids[0])
        if present is not None:
            # What padding contains, even NaN, must not reach other tokens.
            pixel_values = pixel_values.masked_fill(~present.unsqueeze(-1), 0.0)
            attention_mask = nn.functional.pad(present, (count, 0), value=True)  # (B, prefix + N)
        moved = {each: draw_displacements(config, each, device) for each in dict.fromkeys(grids) if self.training}
        if positions is not None:
            positions = self.read_positions(positions.to(device, working_dtype(device)), num_tokens, present)
        elif config.coordinates is not None:
            spacings = [spacing] * len(grids) if spacing is None or spacing.ndim == 1 or len(grids) == 1 else spacing
            placed = [place_patches(config, *each, moved, frame_times, device) for each in zip(grids, spacings)]
            positions = self.add_prefix(padded(placed, num_tokens) if present is not None else placed[0], num_tokens)
        states = self.embeddings(pixel_values, grids, positions, bool_masked_pos, moved)
        if self.rotary_encoding is not None and not config.rotate_prefix:
            positions = nn.functional.pad(positions[..., count:, :], (0, 0, count, 0))
        visible = find_visible(attention_mask)
        if self.training and getattr(config, "patch_dropout_prob", 0):
            kept = self.draw_kept(states, visible)  # (B, tokens)
            states = states.take_along_dim(kept.unsqueeze(-1), 1)
            visible, attention_mask = select(visible, kept), select(attention_mask, kept)
            if positions is not None:
                positions = positions.expand(len(states), -1, -1).take_along_dim(kept.unsqueeze(-1), 1)
        rotations = [None] if self.rotary_encoding is None else self.rotary_encoding.rotations(positions)
        states = self.pre_layernorm(states)
        mask = create_bidirectional_mask(config=config, inputs_embeds=states, attention_mask=attention_mask)
        for layer, rotation in zip(self.layers, itertools.cycle(rotations)):  # layers may share one
            states = layer(states, rotation, mask, **kwargs)  # (B, prefix + N, hidden_size)
        if config.final_norm == "pooled":
            return BaseModelOutputWithPooling(states, self.layernorm(self.pool(states, visible)))
        states = self.layernorm(states)
        return BaseModelOutputWithPooling(states, self.pool(states, visible))

    def find_grids(self, inputs, mask, shapes):
        """The grid of all samples, of each, or none for tokens; and (B, N), false for padding, or `None`."""
        if shapes is not None:
            present = torch.arange(inputs.shape[1], device=inputs.device) < shapes.to(inputs.device).prod(1, True)
            return [tuple(shape) for shape in shapes.tolist()], present
        if inputs.ndim == 3:
            return [], mask.bool() if mask is not None and mask.ndim == 2 else None
        sizes, patches = inputs.shape[2:], self.config.patch_shape
        if len(sizes) != len(patches) or any(size % patch for size, patch in zip(sizes, patches)):
            raise ValueError(f"An input of {tuple(sizes)} is not divisible into patches of {patches}.")
        return [tuple(size // patch for size, patch in zip(sizes, patches))], None

    def read_positions(self, positions, num_tokens: int, present):
        """(…, prefix + N, A) coordinates of those that the caller gives; what padding has does not matter."""
        if present is not None and positions.ndim == 3:
            hidden = nn.functional.pad(~present, (positions.shape[1] - num_tokens, 0))
            positions = positions.masked_fill(hidden.unsqueeze(-1), 0.0)
        if isinstance(self.config, LieRETokensConfig):
            origin, scale = (positions.new_tensor(x) for x in (self.config.position_origin, self.config.position_scale))
            positions = (positions - origin) * scale
        return self.add_prefix(positions, num_tokens)

    def add_prefix(self, positions, num_tokens: int):
        """Class and register tokens before the others, unless the caller placed them: (…, prefix + N, A)."""
        config, count = self.config, self.config.num_prefix_tokens
        if positions.shape[-2] not in (num_tokens, count + num_tokens) or positions.shape[-1] != config.num_axes:
            raise ValueError(
                f"positions of shape {tuple(positions.shape)} must be ({num_tokens}, {config.num_axes}) or (batch, "
                f"{num_tokens}, {config.num_axes})."
            )
        if positions.shape[-2] == count + num_tokens:
            return positions
        centre = 0.0 if config.coordinates == "centred_grid" else config.prefix_coordinate
        placed = config.rotate_prefix or config.position_table_size is not None
        return nn.functional.pad(positions, (0, 0, count, 0), value=centre if placed else 0.0)

    def draw_kept(self, states, visible):
        """(B, kept) tokens that patch dropout keeps: the prefix and random patches, hidden ones last (FLIP, §3)."""
        count, patches = self.config.num_prefix_tokens, states.shape[1] - self.config.num_prefix_tokens
        noise = torch.rand(len(states), patches, device=states.device)  # (B, N)
        noise = noise if visible is None else noise + (~visible[:, count:]).to(noise)
        left = max(1, patches - int(patches * self.config.patch_dropout_prob))
        kept = noise.argsort(1)[:, :left].sort(1).values + count
        return torch.cat([torch.arange(count, device=states.device).expand(len(states), -1), kept], 1)

    def pool(self, states, visible):
        """(B, hidden_size): the class token, or the mean of patches or of all tokens that (B, N) `visible` shows."""
        if self.config.pooling == "cls":
            return states[:, 0]
        first = self.config.num_prefix_tokens if self.config.pooling == "mean" else 0
        if visible is None:
            return states[:, first:].mean(dim=1)
        visible = visible[:, first:, None]
        return states[:, first:].masked_fill(~visible, 0.0).sum(dim=1) / visible.sum(dim=1)


class LieREVideoModel(LieREViTModel):
    config: LieREVideoConfig
    input_modalities = ("video",)


class LieRETokensModel(LieREViTModel):
    """Of (B, N, feature_size) features at (N, A) or (B, N, A) positions; (B, N) `attention_mask` hides padding."""

    config: LieRETokensConfig
    main_input_name = "inputs_embeds"
    input_modalities = ("time",)

    def forward(self, inputs_embeds, positions=None, attention_mask=None, **kwargs):
        return super().forward(inputs_embeds, positions, attention_mask=attention_mask, **kwargs)


class LieREViTForImageClassification(LieREPreTrainedModel):
    """A classifier on the pooled output: linear, or with one hidden layer."""

    config: LieREViTConfig
    model_class: type[LieREViTModel] = LieREViTModel

    def __init__(self, config):
        super().__init__(config)
        self.num_labels, hidden = config.num_labels, config.classifier_hidden_size
        self.liere = self.model_class(config)
        widths = [config.hidden_size, *([] if hidden is None else [hidden]), config.num_labels]
        linear = [nn.Linear(*sizes) for sizes in zip(widths, widths[1:])] if self.num_labels else [nn.Identity()]
        self.classifier = linear[0] if len(linear) == 1 else nn.Sequential(linear[0], nn.ReLU(), linear[1])
        self.post_init()

    @can_return_tuple
    def forward(self, pixel_values=None, positions=None, labels=None, **kwargs) -> ImageClassifierOutput:
        """As [`LieREViTModel.forward`]; (B,) class `labels`, or (B, num_labels) for independent binary losses."""
        outputs = self.liere(pixel_values, positions, **kwargs)
        logits = self.classifier(outputs.pooler_output)  # (B, num_labels)
        loss = None if labels is None else self.loss_function(labels, logits, self.config, **kwargs)
        return ImageClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)


class LieREVideoForVideoClassification(LieREViTForImageClassification):
    config: LieREVideoConfig
    input_modalities = ("video",)
    model_class = LieREVideoModel


class LieRETokensForSequenceClassification(LieREViTForImageClassification):
    config: LieRETokensConfig
    main_input_name = "inputs_embeds"
    input_modalities = ("time",)
    model_class = LieRETokensModel

    def forward(self, inputs_embeds=None, positions=None, attention_mask=None, labels=None, **kwargs):
        return super().forward(inputs_embeds, positions, labels, attention_mask=attention_mask, **kwargs)


class LieRETokensForTokenClassification(LieRETokensForSequenceClassification):
    """A classifier on every token; the loss ignores labels −100 and hidden tokens."""

    accepts_loss_kwargs = True

    @can_return_tuple
    def forward(self, inputs_embeds=None, positions=None, attention_mask=None, labels=None, **kwargs):
        outputs = self.liere(inputs_embeds, positions, attention_mask, **kwargs)
        logits = self.classifier(outputs.last_hidden_state[:, self.config.num_prefix_tokens :])  # (B, N, num_labels)
        if labels is not None and attention_mask is not None and attention_mask.ndim == 2:
            labels = labels.masked_fill(~attention_mask.bool(), -100)
        loss = None if labels is None else self.loss_function(logits, labels, self.config, **kwargs)  # logits first
        return TokenClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)


class LieREViTForMaskedImageModeling(LieREPreTrainedModel):
    """Predicts the pixels of masked patches; the loss is their mean absolute error (SimMIM §3.3)."""

    config: LieREViTConfig

    def __init__(self, config):
        super().__init__(config)
        self.liere = LieREViTModel(config, use_mask_token=True)
        self.decoder = nn.Linear(config.hidden_size, config.num_channels * math.prod(config.patch_shape))
        self.post_init()

    @can_return_tuple
    def forward(self, pixel_values, bool_masked_pos=None, positions=None, **kwargs) -> MaskedImageModelingOutput:
        outputs = self.liere(pixel_values, positions, bool_masked_pos, **kwargs)
        (height, width), channels = self.config.patch_shape, self.config.num_channels
        grid = pixel_values.shape[2] // height, pixel_values.shape[3] // width
        patches = self.decoder(outputs.last_hidden_state[:, self.config.num_prefix_tokens :])  # (B, N, patch pixels)
        patches = patches.view(-1, *grid, channels, height, width).permute(0, 3, 1, 4, 2, 5)
        reconstruction, loss = patches.reshape(pixel_values.shape), None  # (B, C, H, W)
        if bool_masked_pos is not None:
            mask = bool_masked_pos.view(-1, 1, *grid).bool().repeat_interleave(height, 2).repeat_interleave(width, 3)
            error = (pixel_values.to(reconstruction.dtype) - reconstruction).abs()
            loss = (error * mask).sum() / (mask.sum() + 1e-5) / channels
        return MaskedImageModelingOutput(loss, reconstruction, outputs.hidden_states, outputs.attentions)


class LieREViTBackbone(BackboneMixin, LieREViTModel):
    """Feature maps for detection and segmentation: (B, hidden_size, rows, columns) of each of `out_features`."""

    def __init__(self, config):
        super().__init__(config)
        self.num_features = [config.hidden_size] * (config.num_hidden_layers + 1)

    @can_return_tuple
    @filter_output_hidden_states
    def forward(self, pixel_values, positions=None, **kwargs) -> BackboneOutput:
        outputs = LieREViTModel.forward(self, pixel_values, positions=positions, **kwargs)
        (grid,), _ = self.find_grids(pixel_values, None, None)
        maps = ()
        for stage, states in zip(self.stage_names, outputs.hidden_states):
            if stage in self.out_features:
                states = self.layernorm(states) if self.config.apply_layernorm else states
                if self.config.reshape_hidden_states:
                    states = states[:, self.config.num_prefix_tokens :].mT.unflatten(-1, grid).contiguous()
                maps += (states,)
        return BackboneOutput(maps, outputs.hidden_states, outputs.attentions)
