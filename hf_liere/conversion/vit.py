"""ViT and DeiT of transformers, under the names of their files and of their modules."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from .base import Source


RENAMED: dict[str, str | Callable[[re.Match], str]] = {
    r"^(vit|deit)\.": "",
    r"^encoder\.layer\.": "layers.",
    r"\.attention\.attention\.(query|key|value)\.": lambda match: f".attention.{match[1][0]}_proj.",
    r"\.attention\.output\.dense\.": ".attention.o_proj.",
    r"\.intermediate\.dense\.": ".mlp.fc1.",
    r"(layers\.\d+)\.output\.dense\.": r"\1.mlp.fc2.",
}
QUERY_KEY_VALUE = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
# `RENAMED` has already given these modules our names.
NAMES = {
    name: name
    for name in ("layernorm_before", "layernorm_after", *QUERY_KEY_VALUE, "attention.o_proj", "mlp.fc1", "mlp.fc2")
}


@dataclass
class ViTSource(Source):
    num_attention_heads: int | None = None
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-12
    image_size: int | Iterable[int] | None = None

    def convert(self) -> None:
        self.tensors.rename(RENAMED)
        weight = self.tensors.take("embeddings.patch_embeddings.projection.weight", None, None, None, None)
        hidden_size, distilled = len(weight), "embeddings.distillation_token" in self.tensors
        self.set_transformer(weight, self.tensors.count(r"layers\.(\d+)\."))
        self.fields |= {
            "num_register_tokens": int(distilled),
            "qkv_bias": self.tensors.any(r"layers\.\d+\.attention\.[qkv]_proj\.bias"),
            "position_encoding": "absolute",
            "pooling": "cls",
        }
        self.copy("embeddings.patch_embeddings.projection", "embeddings.patch_embeddings.projection", *weight.shape)
        self.encoder["embeddings.cls_token"] = self.tensors.take("embeddings.cls_token", 1, 1, hidden_size)
        table = self.tensors.take("embeddings.position_embeddings", 1, None, hidden_size)
        if distilled:
            distillation = self.tensors.take("embeddings.distillation_token", 1, 1, hidden_size)
            self.encoder["embeddings.register_tokens"] = distillation + table[:, 1:2]
        self.set_square_table(table, 1 + distilled, self.image_size)
        self.copy_layers("layers.{}", NAMES, () if self.fields["qkv_bias"] else QUERY_KEY_VALUE)
        self.copy("layernorm", "layernorm", hidden_size)
        if "distillation_classifier.weight" in self.tensors:
            self._join_classifiers()
        else:
            self.copy_head("classifier")
        self.ignored += self.tensors.ignore(r"pooler\.dense\..*|embeddings\.mask_token|decoder\..*")

    def _join_classifiers(self) -> None:
        """Join the two classifiers of DeiT: their mean is one classifier of both tokens."""
        self.fields["pooling"] = "prefix"
        first = self.take_module("cls_classifier", None, self.fields["hidden_size"])
        second = self.take_module("distillation_classifier", *first["weight"].shape)
        weight = torch.cat([first["weight"], second["weight"]], dim=1)
        self.head = {"weight": weight / 2, "bias": (first["bias"] + second["bias"]) / 2}
