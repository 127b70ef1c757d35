"""Weights of timm and transformers under our names, so that our models can be compared with theirs."""

import re

import torch


TIMM_NAMES = {
    r"^patch_embed\.proj\.": "embeddings.patch_embeddings.projection.",
    r"^blocks\.": "layers.",
    r"\.norm1\.": ".layernorm_before.",
    r"\.norm2\.": ".layernorm_after.",
    r"\.attn\.proj\.": ".attention.o_proj.",
    r"\.ls([12])\.gamma": r".layer_scale\1.scale",
    r"^norm_pre\.": "pre_layernorm.",
    r"^(fc_)?norm\.": "layernorm.",
    r"^cls_token": "embeddings.cls_token",
    r"^reg_token": "embeddings.register_tokens",
    r"^pos_embed": "embeddings.position_embeddings",
}
DINOV3_NAMES = {
    r"^(model\.)?layer\.": "layers.",
    r"^embeddings\.patch_embeddings\.": "embeddings.patch_embeddings.projection.",
    r"\.norm1\.": ".layernorm_before.",
    r"\.norm2\.": ".layernorm_after.",
    r"\.up_proj\.": ".fc1.",
    r"\.down_proj\.": ".fc2.",
    r"\.lambda1": ".scale",
    r"^norm\.": "layernorm.",
}


def rename(tensors, patterns):
    renamed = {}
    for key, tensor in tensors.items():
        for pattern, replacement in patterns.items():
            key = re.sub(pattern, replacement, key)
        renamed[key] = tensor
    return renamed


def timm_weights(model):
    """The weights of one of timm's plain ViTs for a `LieREViTForImageClassification`."""
    tensors = {name: value for name, value in model.state_dict().items() if "rotary" not in name}
    head = {name: tensors.pop(f"head.{name}") for name in ("weight", "bias")}
    named = rename(tensors, TIMM_NAMES)
    for key in [key for key in named if ".attn.qkv." in key]:
        for name, part in zip("qkv", named.pop(key).chunk(3)):
            named[key.replace("attn.qkv", f"attention.{name}_proj")] = part
    width = len(named["embeddings.patch_embeddings.projection.weight"])
    named.setdefault("embeddings.patch_embeddings.projection.bias", torch.zeros(width))
    prefix, tokens, table = model.num_prefix_tokens, "embeddings.register_tokens", "embeddings.position_embeddings"
    if table in named and not model.no_embed_class and prefix > 1:
        # Ours has no rows for further tokens.
        rows = named[table]
        named[tokens] = named[tokens] + rows[:, 1:prefix]
        named[table] = torch.cat([rows[:, :1], rows[:, prefix:]], dim=1)
    weights = {f"liere.{name}": value for name, value in named.items()}
    return weights | {f"classifier.{name}": value for name, value in head.items()}


def dinov3_weights(model):
    """The weights of transformers' DINOv3 for a `LieREViTModel`, whose planes are neighbouring channels."""
    # It has a parameter of register tokens even where there are none.
    tensors = {name: value for name, value in model.state_dict().items() if value.numel() and "mask" not in name}
    named = rename(tensors, DINOV3_NAMES)
    heads = model.config.num_attention_heads
    for key in [key for key in named if re.search(r"\.[qk]_proj\.", key)]:
        named[key] = named[key].unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    for key in [key for key in named if key.endswith("_proj.weight") or re.search(r"\.mlp\.\w+\.weight", key)]:
        named.setdefault(key.replace("weight", "bias"), torch.zeros(len(named[key])))
    return named
