"""Checkpoints of the official ComRoPE code for images and videos: CLIP's vision tower with learned rotations."""

import math
from collections.abc import Mapping

import torch

from ...rotation.exponential import skew_entries
from ...upgrades import ConversionError
from .base import Source, number_of_axes, number_of_heads, require_one_of


# Maps the official names of encodings to ours.
ENCODINGS = {
    "liere": "liere",
    "comrope-ap": "comrope_ap",
    "comrope-ld": "comrope_ld",
    "vanilla-rope": "axial_rope",
    "raw": "absolute",
    "none": "none",
}
# Defaults without an option or a position table.
DEFAULT_FRAMES, DEFAULT_PATCHES = 8, 14


class ComRoPESource(Source):
    kind = "comrope"
    names = {
        "embeddings.cls_token": "embeddings.class_embedding",
        "embeddings.patch_embeddings.projection": "embeddings.patch_embedding",
        "embeddings.position_embeddings": "embeddings.position_embedding",
        "pre_layernorm": "pre_layrnorm",
        "layers": "encoder.layers",
        "layernorm_before": "layer_norm1",
        "attention.o_proj": "self_attn.out_proj",
        "attention": "self_attn",
        "layernorm_after": "layer_norm2",
        "layernorm": "post_layernorm",
        "classifier": "classification_head",
    }

    @classmethod
    def stated_options(cls, source_config: Mapping) -> dict:
        options = super().stated_options(source_config)
        if source_config.get("custom_pe_type") is not None:
            options["position_encoding"] = source_config["custom_pe_type"]
        if options.get("position_encoding") != "liere":
            # All ComRoPE configurations contain it, but only liere uses it, and its default would give NaN generators.
            options.pop("scale_factor", None)
        return options

    def official(self, ours: str) -> str:
        prefix = "vision_model." if "vision_model.embeddings.class_embedding" in self.tensors else ""
        return super().official(ours) if ours.startswith("classifier") else prefix + super().official(ours)

    def read(self) -> None:
        class_token = self.take(self.official("embeddings.cls_token"), None)
        hidden_size, table_key = len(class_token), self.official("embeddings.position_embeddings")
        table = self.take(table_key, None, None, None, hidden_size) if table_key in self.tensors else None
        encoding, axes, found_heads = self._encoding(table)
        kernel = self.take(self.official("embeddings.patch_embeddings.projection.weight"), hidden_size, *[None] * 3)
        if axes == 3:
            kernel = kernel.unsqueeze(2)
        self.set_transformer(
            kernel,
            number_of_heads(self.options.num_attention_heads, found_heads, hidden_size),
            hidden_act=self.options.hidden_act,
            layer_norm_eps=self.options.layer_norm_eps,
            use_pre_layernorm=True,
            final_norm="pooled",
            pooling="cls",
        )
        self.made["embeddings.cls_token"] = class_token.view(1, 1, -1)
        # CLIP's patch projection has no bias.
        self.made["embeddings.patch_embeddings.projection.bias"] = torch.zeros(hidden_size)
        self.fields["position_encoding"] = encoding
        self.set_shape(self._image(table))
        coordinates = ("unit_width" if axes == 3 else "unit") if self.options.axis_scale else "index"
        places = {"coordinates": coordinates, "prefix_coordinate": self.options.cls_position}
        if encoding not in ("none", "absolute"):
            self.fields |= {"rotate_prefix": True, **places}
        if table is not None:
            table = _reorder(table, axes)
            self.fields |= {"use_absolute_position_embeddings": True, "position_table_size": list(table.shape[:-1])}
            self.fields |= places
            self.made["embeddings.position_embeddings"] = table.reshape(1, -1, hidden_size)
        if encoding == "axial_rope":
            self._set_powers()
        elif found_heads is not None:
            self._set_generators()

    def _attention(self, index: int, name: str) -> str:
        return self.official(f"layers.{index}.attention.{name}")

    def _encoding(self, table: torch.Tensor | None) -> tuple[str, int, int | None]:
        """Our name of the encoding, the number of axes, and for learned rotations the number of heads."""
        frequencies, multiplier = self._attention(0, "freqs"), self._attention(0, "multiplier")
        found_heads, found_axes, accepted = None, None, ("none", "vanilla-rope")
        if table is not None:
            found_axes, accepted = 3 if len(table) > 1 else None, ("raw", "none", "vanilla-rope")
        if frequencies in self.tensors:
            found_heads, axes, *_ = self.take(frequencies, None, None, None, None, None).shape
            accepted = ("comrope-ap",)
            if axes > 1:
                found_axes, accepted = axes, ("liere",)
            if multiplier in self.tensors:
                found_axes, accepted = self.take(multiplier, 1, None, None, 1, 1).shape[1], ("comrope-ld",)
        axes = number_of_axes(self.options.num_axes, found_axes)
        require_one_of("position_encoding", self.options.position_encoding, (None, *accepted))
        encoding = ENCODINGS[self.options.position_encoding or accepted[0]]
        if encoding in ("none", "absolute"):
            encoding = "none" if table is None else "absolute"
        return encoding, axes, found_heads

    def _image(self, table: torch.Tensor | None) -> tuple[int, ...]:
        """Extents of a training input, from a table (frames or 1, rows, columns, D) or the options."""
        size, frames, extent = self.options.image_size, self.options.num_frames, self.patch[-1]
        if table is not None:
            found_frames, rows, columns, _ = table.shape
            if size not in (None, rows * extent) or rows != columns:
                raise ConversionError(
                    f"A table of {tuple(table.shape)} does not fit image_size={size} in patches of {self.patch[-2:]}."
                )
            size, frames = rows * extent, found_frames
        size = size or DEFAULT_PATCHES * extent
        return (frames or DEFAULT_FRAMES, size, size)[-len(self.patch) :]

    def _set_powers(self) -> None:
        """Set the frequencies theta_base^j, j = 0, 1, …, of each axis."""
        self.require_planes()
        planes = self.head_dim // len(self.patch) // 2
        base = 10000.0 ** (-1 / planes) if self.options.theta_base is None else self.options.theta_base
        if not base > 0:
            raise ConversionError(f"theta_base={self.options.theta_base} must be positive.")
        # Beyond these powers, theta overflows or underflows although the frequencies do not.
        exponent = -planes * math.log(base)
        theta = math.exp(exponent) if abs(exponent) < 700 else None
        self.set_frequencies(base ** torch.arange(planes, dtype=torch.float64), theta, self.head_dim)

    def _set_generators(self) -> None:
        """Set the generators F − Fᵀ of all layers, and for comrope_ld the multipliers."""
        axes, depth, heads = len(self.patch), self.fields["num_hidden_layers"], self.fields["num_attention_heads"]
        encoding, any_shape = self.fields["position_encoding"], [None] * 5
        size = self.take(self._attention(0, "freqs"), *any_shape).shape[-1]
        blocks = self.head_dim // size
        self.fields["block_size"] = size
        shape = (heads, axes if encoding == "liere" else 1, blocks, size, size)
        matrices = [self.take(self._attention(index, "freqs"), *shape).float() for index in range(depth)]
        # (layers, heads, axes or 1, blocks, entries)
        entries = skew_entries(torch.stack([matrix - matrix.mT for matrix in matrices]))
        entries = entries.movedim(2, 0) / self.options.scale_factor if encoding == "liere" else entries.squeeze(2)
        self.made["rotary_encoding.generators"] = entries
        if encoding == "comrope_ld":
            shape = (1, axes, blocks, 1, 1)
            factors = [self.take(self._attention(index, "multiplier"), *shape) for index in range(depth)]
            factors = torch.stack(factors).view(depth, 1, axes, blocks).float().movedim(2, 0)
            self.made["rotary_encoding.multipliers"] = factors.repeat(1, 1, heads, 1)


def _reorder(table: torch.Tensor, axes: int) -> torch.Tensor:
    """(frames or 1, rows, columns, D) → (rows, 1, D), or (columns, rows, frames, D) read at (frame, row, column)."""
    # The official lookup passes (frame or the centre, row, column) to a sampler that expects the last axis first.
    table = table.permute(2, 1, 0, 3)
    if axes == 3:
        return table
    centre = (len(table) - 1) / 2
    return (table[math.floor(centre)] + table[math.ceil(centre)]) / 2
