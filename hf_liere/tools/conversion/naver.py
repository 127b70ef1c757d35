"""Checkpoints of rope-vit (naver): DeiT-III with a learned table, Axial RoPE or RoPE-Mixed."""

import math
from collections.abc import Mapping

import torch

from ...upgrades import ConversionError, sizes
from .base import Source, number_of_heads, require_one_of


class NaverSource(Source):
    kind = "naver"
    names = {
        "embeddings.cls_token": "cls_token",
        "embeddings.patch_embeddings.projection": "patch_embed.proj",
        "embeddings.position_embeddings": "pos_embed",
        "layers": "blocks",
        "layernorm_before": "norm1",
        "attention.o_proj": "attn.proj",
        "attention": "attn",
        "layer_scale1.scale": "gamma_1",
        "layernorm_after": "norm2",
        "layer_scale2.scale": "gamma_2",
        "layernorm": "norm",
        "classifier": "head",
    }

    @classmethod
    def stated_options(cls, source_config: Mapping) -> dict:
        """The options in a `config.json` as timm writes it: the architecture's name, arguments and pretraining."""
        architecture, arguments = source_config.get("architecture"), source_config.get("model_args") or {}
        trained = source_config.get("pretrained_cfg") or source_config
        stated = {
            "num_attention_heads": arguments.get("num_heads"),
            "image_size": arguments.get("img_size") or list(trained.get("input_size") or [])[1:],
        }
        if architecture:
            rotary = "mixed" if "rope_mixed" in architecture else "axial"
            stated["position_encoding"] = rotary if "rope" in architecture else "absolute"
        return {name: value for name, value in stated.items() if value}

    def read(self) -> None:
        accepted = ("mixed",) if "freqs" in self.tensors else ("axial", "absolute")
        require_one_of("position_encoding", self.options.position_encoding, (None, *accepted))
        kernel = self.take("patch_embed.proj.weight", None, None, None, None)
        hidden_size = len(kernel)
        has_bias = self.has("layers.0.attention.qkv.bias")
        self.set_transformer(
            kernel,
            number_of_heads(self.options.num_attention_heads, None, hidden_size),
            hidden_act=self.options.hidden_act,
            layer_norm_eps=self.options.layer_norm_eps,
            qkv_bias=has_bias,
            layerscale_value=1e-5 if self.has("layers.0.layer_scale1.scale") else None,
        )
        self.split_qkv("weight", 3 * hidden_size, hidden_size)
        if has_bias:
            self.split_qkv("bias", 3 * hidden_size)
        self.ignore("freqs_t_x", "freqs_t_y")
        self._set_table()
        encoding = self.options.position_encoding or accepted[0]
        if encoding == "mixed":
            self._set_mixed()
        elif encoding == "axial":
            self._set_axial()
        else:
            self.fields["position_encoding"] = encoding

    def _set_table(self) -> None:
        """Set the size of images and, if there is one, the table of patches; the class token has no row in it."""
        if "pos_embed" not in self.tensors:
            self.set_shape(sizes("image_size", 224 if self.options.image_size is None else self.options.image_size, 2))
            return
        table = self.take("pos_embed", 1, None, self.fields["hidden_size"])
        self.set_shape(self.find_image(self.options.image_size, table.shape[1]))
        self.fields["use_absolute_position_embeddings"] = True
        self.made["embeddings.position_embeddings"] = torch.cat([torch.zeros_like(table[:, :1]), table], dim=1)

    def _set_mixed(self) -> None:
        layers, heads = self.fields["num_hidden_layers"], self.fields["num_attention_heads"]
        # (columns, rows), layers, planes of all heads
        frequencies = self.take("freqs", 2, layers, self.fields["hidden_size"] // 2)
        self.made["rotary_encoding.generators"] = frequencies.flip(0).unflatten(-1, (heads, -1, 1)).float()
        self.fields |= {"position_encoding": "rope_mixed", "coordinates": "index"}

    def _set_axial(self) -> None:
        """Set rope_theta^(−4i/head_dim) for the planes of each half of a head, at the indices of patches."""
        self.require_planes()
        theta = self.options.rope_theta
        if not 0 < theta < math.inf:
            raise ConversionError(f"rope_theta={theta} must be positive and finite.")
        self.fields |= {"position_encoding": "axial_rope", "rope_theta": theta, "coordinates": "index"}
        # Our heads begin with the planes of the rows, those of rope-vit with the planes of the columns.
        for key in [key for key in self.made if ".q_proj." in key or ".k_proj." in key]:
            halves = self.made[key].unflatten(0, (self.fields["num_attention_heads"], 2, -1))
            self.made[key] = halves.flip(1).flatten(0, 2)
