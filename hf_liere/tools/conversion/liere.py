"""Checkpoints of the official LieRE code for images and volumes, and its baselines without generators."""

import math
from collections.abc import Iterable

import torch

from ...rotation.exponential import skew_entries
from ...upgrades import ConversionError, sizes
from .base import Source, number_of_axes, require_one_of, square_root


OUTPUT = "layers.{}.attention.o_proj.weight"
OFFICIAL_GENERATORS = "position_encoder.generator_raw_params"
# These are the same in every official model.
HEAD_DIM = 64
HARD_WIRED = {
    "head_dim": HEAD_DIM,
    "qkv_bias": False,
    "layer_norm_eps": 1e-5,
    "hidden_dropout_prob": 0.1,
    "mlp_dropout_prob": 0.1,
    "final_norm": "pooled",
}


class LieRESource(Source):
    kind = "liere"
    names = {
        "embeddings.cls_token": "cls_token",
        "embeddings.patch_embeddings.projection": "to_patch_embedding.1",
        "embeddings.position_embeddings": "pos_embedding",
        "layers": "transformer.layers",
        "layernorm_before": "0.norm",
        "attention.qkv": "0.fn.to_qkv",
        "attention.o_proj": "0.fn.to_out.0",
        "layernorm_after": "1.norm",
        "mlp.fc1": "1.fn.net.0",
        "mlp.fc2": "1.fn.net.3",
        "layernorm": "mlp_head.0",
        "classifier": "mlp_head.1",
    }

    def read(self) -> None:
        require_one_of("pooling", self.options.pooling, ("cls", "mean"))
        require_one_of("layer_generators", self.options.layer_generators, ("official", "paper"))
        projection = self.take("to_patch_embedding.1.weight", None, None)
        hidden_size, volume = projection.shape
        axes = self._axes()
        missing = [name for name in ("patch_size", "image_size") if getattr(self.options, name) is None]
        if axes == 3 and missing:
            raise ConversionError(f"The shapes of a volume model do not tell all extents: please give {missing[0]}.")
        table = self.take("pos_embedding", 1, None, hidden_size)
        rows = len(self.take(self.official("layers.0.attention.qkv.weight"), None, hidden_size))
        if rows % (3 * HEAD_DIM):
            raise ConversionError(f"to_qkv has {rows} rows, not a multiple of 3 · 64: LieRE's heads are 64 wide.")
        # The official linear map reads a patch pixel by pixel, with channels as the fastest axis.
        kernel = projection.view(hidden_size, *self._patch(axes, volume), self.options.num_channels).movedim(-1, 1)
        pooling = "mean_all" if self.options.pooling == "mean" else "cls"
        self.set_transformer(kernel, rows // (3 * HEAD_DIM), pooling=pooling, **HARD_WIRED)
        # For every 2-D model, the official code builds a square table of the last axis; learned rotations ignore it.
        ignored = axes == 2 and OFFICIAL_GENERATORS in self.tensors
        self.set_shape(self.find_image(self.options.image_size, table.shape[1] - 1, is_square=ignored))
        self.split_qkv("weight", rows, hidden_size)
        if rows == 3 * hidden_size == 3 * HEAD_DIM and not self.has(OUTPUT.format(0)):
            # A single head as wide as the model has no output projection.
            for index in range(self.fields["num_hidden_layers"]):
                self.made[OUTPUT.format(index)] = torch.eye(HEAD_DIM)
                self.made[OUTPUT.format(index).replace("weight", "bias")] = torch.zeros(HEAD_DIM)
        if OFFICIAL_GENERATORS in self.tensors:
            require_one_of("position_encoding", self.options.position_encoding, (None, "liere", "rope_mixed"))
            self._set_generators(self.take(OFFICIAL_GENERATORS, axes, None, None, None, None))
            self.ignore("pos_embedding")
        else:
            self._set_fixed_encoding(table)

    def _axes(self) -> int:
        found = None
        if OFFICIAL_GENERATORS in self.tensors:
            found = len(self.take(OFFICIAL_GENERATORS, None, None, None, None, None))
        elif self.options.num_axes is None and isinstance(self.options.patch_size, Iterable):
            found = len(list(self.options.patch_size))
        return number_of_axes(self.options.num_axes, found)

    def _patch(self, axes: int, volume: int) -> tuple[int, ...]:
        """Extents of a patch of `volume` values."""
        extents, channels = self.options.patch_size, self.options.num_channels
        if extents is None:
            extents = square_root("patch_size", volume // channels)
        patch = sizes("patch_size", extents, axes)
        if math.prod(patch) * channels != volume:
            raise ConversionError(
                f"Patches of {patch} with {channels} channels have {math.prod(patch) * channels} values; the "
                f"checkpoint's have {volume}."
            )
        return patch

    def _set_generators(self, raw: torch.Tensor) -> None:
        """
        Set the generators from `raw` (axes, layers or 1, blocks of all heads, b, b). The official code uses its
        strictly upper triangle U: R(p) = exp(Σ p (U − Uᵀ)).
        """
        depth, heads = self.fields["num_hidden_layers"], self.fields["num_attention_heads"]
        axes, layers, count, size, columns = raw.shape
        if size != columns or size < 2 or layers not in (1, depth):
            raise ConversionError(
                f"Generators of shape {tuple(raw.shape)} must be (axes, 1 or {depth} layers, blocks, b, b) with b ≥ 2."
            )
        # The official position encoder divides the model's width, the official attention takes 64 channels per head.
        per_head = self.head_dim // size
        blocks = HEAD_DIM // size
        if per_head < 1 or per_head > blocks or count not in (per_head, per_head * heads):
            raise ConversionError(
                f"{count} generators of size {size} do not fit {heads} heads: expected {per_head} shared or "
                f"{per_head * heads} separate ones, and at most {blocks} in the {HEAD_DIM} channels of a head."
            )
        share_heads = heads > 1 and count == per_head
        share_layers = layers == 1 or self.options.layer_generators == "official"
        entries = -skew_entries(raw.transpose(-1, -2)).float()
        if share_layers:
            entries = entries[:, :1]
        entries = entries.unflatten(2, (1 if share_heads else heads, per_head))
        # Channels without a block in the official encoder are not rotated.
        self.made["rotary_encoding.generators"] = torch.nn.functional.pad(entries, (0, 0, 0, blocks - per_head))
        self.fields |= {
            "position_encoding": "rope_mixed" if size == 2 else "liere",
            "block_size": size,
            "coordinates": "train_grid",
            "share_heads": share_heads,
            "share_layers": share_layers,
        }

    def _set_fixed_encoding(self, table: torch.Tensor) -> None:
        """The baselines: a learned table, or VisionLLaMA's frequencies e^(−4t), t from 0 to 1, for each axis."""
        encoding, is_used = self.options.position_encoding, bool(table.count_nonzero())
        require_one_of("position_encoding", encoding, (None, "absolute", "visionllama"))
        encoding = encoding or ("absolute" if is_used else "visionllama")
        if encoding == "absolute":
            self.fields["position_encoding"] = "absolute"
            return
        planes = min(self.head_dim, HEAD_DIM) // len(self.patch) // 2
        frequencies = torch.exp(-4 * torch.linspace(0, 1, planes, dtype=torch.float64))
        theta = math.exp(4 * planes / (planes - 1)) if planes > 1 else 1.0
        self.set_frequencies(frequencies, theta, HEAD_DIM)
        self.fields["coordinates"] = "train_grid"
        if is_used:
            self.fields |= {"use_absolute_position_embeddings": True, "position_table_resize": "truncate"}
        else:
            self.ignore("pos_embedding")
