"""
DINOv3's ViTs in transformers.

DINOv3 rotates plane i of an axis by 2π x θ^(−i/q) at the coordinate x = 2u − 1, where u is the `unit` coordinate of a
patch, and does not rotate class and register tokens. Scores depend only on differences of coordinates, so this is Axial
RoPE with frequencies 4π θ^(−i/q) at u, with class and register tokens at u = ½, where x is zero.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .base import ConversionError, Source, sizes


LAYER = "layer.{}"
NAMES = {
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    **{name: name for name in ("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj")},
    "mlp.fc1": "mlp.up_proj",
    "mlp.fc2": "mlp.down_proj",
}
# Maps our names to those of DINOv3's configuration.
AUGMENTATION = {f"position_{name}": f"pos_embed_{name}" for name in ("shift", "jitter", "rescale")}


@dataclass
class DINOv3Source(Source):
    num_attention_heads: int | None = None
    rope_theta: float = 100.0
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    image_size: int | Iterable[int] = 224
    position_shift: float = 0.0
    position_jitter: float | None = None
    position_rescale: float | None = None

    @classmethod
    def stated_options(cls, source_config: Mapping) -> dict:
        renamed = {ours: source_config.get(theirs, source_config.get(ours)) for ours, theirs in AUGMENTATION.items()}
        return super().stated_options({**source_config, **renamed})

    def convert(self) -> None:
        # A model in memory has an additional module around its layers.
        self.tensors.rename({r"^model\.layer\.": "layer."})
        weight = self.tensors.take("embeddings.patch_embeddings.weight", None, None, None, None)
        hidden_size = len(weight)
        self.set_transformer(weight, self.tensors.count(r"layer\.(\d+)\."))
        self.set_projection(weight, self.tensors.take("embeddings.patch_embeddings.bias", hidden_size))
        self.set_shape(sizes("image_size", self.image_size, 2))
        names = NAMES | ({"mlp.gate": "mlp.gate_proj"} if self.tensors.any(r"layer\.\d+\.mlp\.gate_proj\..*") else {})
        # No layer has a bias of keys, for example.
        absent = [ours for ours, name in names.items() if not self.tensors.any(rf"layer\.\d+\.{name}\.bias")]
        self.copy_layers(LAYER, names, without_bias=absent)
        for ours in absent:
            for index in range(self.fields["num_hidden_layers"]):
                weight = self.encoder[f"layers.{index}.{ours}.weight"]
                self.put(f"layers.{index}.{ours}", bias=weight.new_zeros(len(weight)))
        self.copy_layer_scales(f"{LAYER}.layer_scale{{}}.lambda1", initial=1.0)
        self._set_rotations()
        self.encoder["embeddings.cls_token"] = self.tensors.take("embeddings.cls_token", 1, 1, hidden_size)
        registers = self.tensors.take("embeddings.register_tokens", 1, None, hidden_size)
        if registers.shape[1]:
            self.encoder["embeddings.register_tokens"] = registers
        self.fields |= {"num_register_tokens": registers.shape[1], "pooling": "cls"}
        self.fields |= {"use_gated_mlp": "mlp.gate" in names, "position_shift": self.position_shift}
        self.fields |= {"position_jitter": self.position_jitter, "position_rescale": self.position_rescale}
        self.copy("layernorm", "norm", hidden_size)
        self.ignored += self.tensors.ignore(r"embeddings\.mask_token|rope_embeddings\.inv_freq")

    def _set_rotations(self) -> None:
        """Set the frequencies; make channels i and i + head_dim/2 (DINOv3's planes) neighbours in query and key."""
        self.require_planes()
        if not 0 < self.rope_theta < math.inf:
            raise ConversionError(f"rope_theta={self.rope_theta} must be positive and finite.")
        self.reorder_heads(lambda halves: halves.transpose(1, 2))
        self.fields |= {
            "position_encoding": "axial_rope",
            "rope_theta": self.rope_theta,
            "rotary_init_scale": 4 * math.pi,
            "coordinates": "unit",
            "rotate_prefix": True,
            "prefix_coordinate": 0.5,
        }
