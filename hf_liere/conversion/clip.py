"""The vision tower of CLIP under transformers' names: alone, beside a text tower or under a classifier."""

import re
from dataclasses import dataclass

import torch

from .base import Source


NAMES = {
    "layernorm_before": "layer_norm1",
    "layernorm_after": "layer_norm2",
    "attention.q_proj": "self_attn.q_proj",
    "attention.k_proj": "self_attn.k_proj",
    "attention.v_proj": "self_attn.v_proj",
    "attention.o_proj": "self_attn.out_proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
OTHER_TOWERS = r"text_model\..*|text_projection\..*|visual_projection\..*|logit_scale"


class CLIPTower(Source):
    """Shared by the CLIP and ComRoPE sources; subclasses declare the options."""

    @property
    def prefix(self) -> str:
        return "vision_model." if "vision_model.embeddings.class_embedding" in self.tensors else ""

    def take_class_token(self) -> torch.Tensor:
        """(hidden_size,)"""
        return self.tensors.take(f"{self.prefix}embeddings.class_embedding", None)

    def convert_tower(self, found_heads: int | None = None, axes: int = 2) -> None:
        """Convert everything except positions, the final norm and the classifier."""
        prefix, class_token = self.prefix, self.take_class_token()
        hidden_size = len(class_token)
        weight = self.tensors.take(f"{prefix}embeddings.patch_embedding.weight", hidden_size, None, None, None)
        if axes == 3:
            weight = weight.unsqueeze(2)
        layers = self.tensors.count(re.escape(prefix) + r"encoder\.layers\.(\d+)\.")
        self.set_transformer(weight, layers, found_heads)
        self.fields |= {"use_pre_layernorm": True, "final_norm": "pooled", "pooling": "cls"}
        # CLIP's patch projection has no bias.
        self.set_projection(weight, torch.zeros(hidden_size))
        self.encoder["embeddings.cls_token"] = class_token.view(1, 1, -1)
        self.copy("pre_layernorm", f"{prefix}pre_layrnorm", hidden_size)
        self.copy_layers(f"{prefix}encoder.layers.{{}}", NAMES)


@dataclass
class CLIPSource(CLIPTower):
    num_attention_heads: int | None = None
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    image_size: int | None = None

    def convert(self) -> None:
        self.convert_tower()
        hidden_size = self.fields["hidden_size"]
        table = self.tensors.take(f"{self.prefix}embeddings.position_embedding.weight", None, hidden_size)
        self.set_square_table(table.unsqueeze(0), 1, self.image_size)
        if "classifier.weight" in self.tensors:
            self.copy_head("classifier")
            self.fields |= {"pooling": "mean", "final_norm": "none"}
            self.ignored += self.tensors.ignore(re.escape(self.prefix) + r"post_layernorm\..*")
        else:
            self.copy("layernorm", f"{self.prefix}post_layernorm", hidden_size)
        self.ignored += self.tensors.ignore(rf"{OTHER_TOWERS}|{re.escape(self.prefix)}embeddings\.position_ids")
        self.fields |= {"position_encoding": "absolute"}
