"""timm's ViTs with and without rotations, and rope-vit (naver), whose tensors have the same names."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from .base import ConversionError, Source, number_of_heads, require_one_of, sizes


LAYER = "blocks.{}"
NAMES = {
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "attention.o_proj": "attn.proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
LAYER_SCALES = ("gamma_{}", "ls{}.gamma")
# Maps timm's arguments to our options.
ARGUMENTS = {
    "num_heads": "num_attention_heads",
    "img_size": "image_size",
    "rope_temperature": "rope_theta",
    "ref_feat_shape": "reference_grid",
}


@dataclass
class TimmSource(Source):
    position_encoding: str | None = None
    num_attention_heads: int | None = None
    axis_order: str | None = None
    rope_theta: float | None = None
    reference_grid: int | Iterable[int] | None = None
    image_size: int | Iterable[int] | None = None
    pooling: str | None = None
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-6

    table_resize = "antialias"

    @classmethod
    def stated_options(cls, source_config: Mapping) -> dict:
        """The options in timm's `config.json`, from the architecture's name, arguments and pretraining fields."""
        architecture = source_config.get("architecture", "")
        arguments = source_config.get("model_args") or {}
        options: dict[str, object] = {}
        size = (source_config.get("pretrained_cfg") or source_config).get("input_size")
        if size:
            options["image_size"] = list(size[1:])
        options |= {ours: arguments[theirs] for theirs, ours in ARGUMENTS.items() if theirs in arguments}
        if architecture:
            rotary = "mixed" if "rope_mixed" in architecture else "axial"
            options["position_encoding"] = rotary if "rope" in architecture else "absolute"
        return options

    def convert(self) -> None:
        require_one_of("axis_order", self.axis_order, (None, "columns_first", "rows_first"))
        require_one_of("pooling", self.pooling, (None, "cls", "mean"))
        weight = self.tensors.take("patch_embed.proj.weight", None, None, None, None)
        hidden_size, layers = len(weight), self.tensors.count(r"blocks\.(\d+)\.")
        frequencies = self._frequencies(hidden_size, layers)
        accepted = ("axial", "absolute", "none") if frequencies is None else ("mixed",)
        require_one_of("position_encoding", self.position_encoding, (None, *accepted))
        found_heads = None if frequencies is None else frequencies.shape[2]
        self.set_transformer(weight, layers, found_heads)
        self._set_architecture()
        bias = torch.zeros(hidden_size)
        # timm omits this bias before a norm of the embeddings.
        if not self.fields["use_pre_layernorm"] or "patch_embed.proj.bias" in self.tensors:
            bias = self.tensors.take("patch_embed.proj.bias", hidden_size)
        self.set_projection(weight, bias)
        has_class = self.fields["use_class_token"]
        columns_first = has_class if self.axis_order is None else self.axis_order == "columns_first"
        prefix_rows = self._set_tokens(default_size=224 if columns_first else 256)
        encoding = self.position_encoding or self._default_encoding(frequencies, prefix_rows)
        self.copy_layers(LAYER, NAMES)
        self._copy_attention()
        for name in LAYER_SCALES:
            if self.tensors.any(rf"blocks\.\d+\.{name.format('[12]')}"):
                self.copy_layer_scales(f"{LAYER}.{name}", initial=1e-5)
                break
        self.copy("layernorm", "fc_norm" if "fc_norm.weight" in self.tensors else "norm", hidden_size)
        self.copy_head("head")
        self.ignored += self.tensors.ignore(r"freqs_t_[xy]|rope\.(bands|t_x|t_y|pos_embed)")
        if encoding == "mixed":
            self._set_mixed(frequencies)
        elif encoding == "axial":
            self._set_axial(columns_first)
        else:
            self.fields["position_encoding"] = encoding
            if (encoding == "absolute") != ("pos_embed" in self.tensors):
                raise ConversionError(
                    f"position_encoding={encoding!r} contradicts the presence or absence of 'pos_embed'."
                )

    def _frequencies(self, hidden_size: int, layers: int) -> torch.Tensor | None:
        """Learned frequencies, (columns and rows, layers, heads, planes); `None` if the model has none."""
        if "rope.freqs" in self.tensors:
            return self.tensors.take("rope.freqs", 2, layers, None, None)
        if "freqs" not in self.tensors:
            return None
        heads = number_of_heads(hidden_size, self.num_attention_heads)
        return self.tensors.take("freqs", 2, layers, hidden_size // 2).unflatten(-1, (heads, -1))

    def _set_architecture(self) -> None:
        has_class, pooled_norm = "cls_token" in self.tensors, "fc_norm.weight" in self.tensors
        if not has_class and not pooled_norm and self.pooling is None:
            raise ConversionError(
                "The checkpoint has no tensor 'cls_token' and no 'fc_norm' of a mean: please give pooling."
            )
        self.fields |= {
            "qkv_bias": self.tensors.any(r"blocks\.\d+\.attn\.(qkv\.bias|[qv]_bias)"),
            "use_class_token": has_class,
            "use_pre_layernorm": "norm_pre.weight" in self.tensors,
            "final_norm": "pooled" if pooled_norm else "tokens",
            "pooling": self.pooling or ("mean" if pooled_norm else "cls"),
        }

    def _default_encoding(self, frequencies: torch.Tensor | None, prefix_rows: int) -> str:
        if frequencies is not None:
            return "mixed"
        if self.fields["use_class_token"] and self.fields["num_register_tokens"] and not prefix_rows:
            raise ConversionError(
                "The names of a model with class and register tokens do not determine its rotations: please give "
                "position_encoding, one of 'axial', 'absolute' and 'none'."
            )
        # A plain ViT's table has a row for the class token; rope-vit's does not.
        return "absolute" if prefix_rows else "axial"

    def _set_tokens(self, default_size: int) -> int:
        """Set class and register tokens, norm and table; returns the number of table rows before the patches."""
        hidden_size, has_class = self.fields["hidden_size"], self.fields["use_class_token"]
        if has_class:
            self.encoder["embeddings.cls_token"] = self.tensors.take("cls_token", 1, 1, hidden_size)
        registers = self.tensors.take("reg_token", 1, None, hidden_size) if "reg_token" in self.tensors else None
        self.fields["num_register_tokens"] = 0 if registers is None else registers.shape[1]
        if self.fields["use_pre_layernorm"]:
            self.copy("pre_layernorm", "norm_pre", hidden_size)
        prefix_rows = 0
        if "pos_embed" in self.tensors:
            table = self.tensors.take("pos_embed", 1, None, hidden_size)
            prefix_length = int(has_class) + self.fields["num_register_tokens"]
            if self._has_prefix_rows(table, prefix_length):
                prefix_rows = prefix_length
            if prefix_rows and registers is not None:
                registers = registers + table[:, int(has_class) : prefix_length]
            self.set_square_table(table, prefix_rows, self.image_size)
            self.fields |= {"use_absolute_position_embeddings": True, "position_table_resize": self.table_resize}
        else:
            self.set_shape(sizes("image_size", self.image_size or default_size, 2))
        if registers is not None:
            self.encoder["embeddings.register_tokens"] = registers
        return prefix_rows

    def _has_prefix_rows(self, table: torch.Tensor, prefix_length: int) -> bool:
        """Whether a table (1, rows, D) has rows for class and register tokens."""
        rows = table.shape[1]
        if self.image_size is None:
            return math.isqrt(rows) ** 2 != rows
        image = sizes("image_size", self.image_size, 2)
        return rows == math.prod(size // extent for size, extent in zip(image, self.patch)) + prefix_length

    def _copy_attention(self) -> None:
        hidden_size = self.fields["hidden_size"]
        is_fused = self.tensors.any(r"blocks\.\d+\.attn\.qkv\.bias")
        for index in range(self.fields["num_hidden_layers"]):
            official, ours = f"{LAYER.format(index)}.attn", f"layers.{index}.attention"
            parts = {"weight": self.tensors.take(f"{official}.qkv.weight", 3 * hidden_size, hidden_size).chunk(3)}
            if is_fused:
                parts["bias"] = self.tensors.take(f"{official}.qkv.bias", 3 * hidden_size).chunk(3)
            elif self.fields["qkv_bias"]:
                query, value = (self.tensors.take(f"{official}.{name}_bias", hidden_size) for name in "qv")
                parts["bias"] = [query, torch.zeros_like(query), value]
            for kind, tensors in parts.items():
                self.encoder |= {f"{ours}.{name}_proj.{kind}": tensor for name, tensor in zip("qkv", tensors)}

    def _set_mixed(self, frequencies: torch.Tensor) -> None:
        self.fields |= {"position_encoding": "rope_mixed", "coordinates": "index"}
        if frequencies.shape[-1] * 2 != self.head_dim:
            raise ConversionError(f"{frequencies.shape[-1]} frequencies per head do not fill heads of {self.head_dim}.")
        # (columns, rows), layers, heads, planes -> rows first
        self.encoder["rotary_encoding.generators"] = frequencies.flip(0).unsqueeze(-1).float()

    def _set_axial(self, columns_first: bool) -> None:
        """Set theta^(−4i/head_dim) for each half of a head, at patch indices or at those of a reference grid."""
        self.require_planes()
        if columns_first:
            # Our heads begin with the planes of the rows, so swap the half that columns rotate with the other.
            self.reorder_heads(lambda halves: halves.flip(1))
        theta = self.rope_theta or (100.0 if columns_first else 10000.0)
        reference_grid = self.reference_grid
        if reference_grid is None and not columns_first:
            reference_grid = 16
        planes = self.head_dim // 4
        spectrum = theta ** -(torch.arange(planes, dtype=torch.float64) / planes)
        scale = None
        if reference_grid is not None:
            reference = sizes("reference_grid", reference_grid, 2)
            image = sizes("image_size", self.fields["image_size"], 2)
            grid = tuple(size // extent for size, extent in zip(image, self.patch))
            scale = [size / trained for size, trained in zip(reference, grid)]
        self.set_frequencies(spectrum, theta, self.head_dim, scale)
        self.fields["coordinates"] = "index" if reference_grid is None else "train_index"


class NaverSource(TimmSource):
    """rope-vit resizes a learned table differently from timm."""

    table_resize = "interpolate"
