"""Random checkpoints under official names, and weights that make every part of a model matter."""

import os

import timm
import torch

from hf_liere.tools.conversion.checkpoints import convert_state_dict
from hf_liere.upgrades import ConversionError


FIELDS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
FIELDS |= {"image_size": 16, "patch_size": 4}


def randomize(model, scale=0.3):
    """Draw weights that make every part of a model matter: norms, biases, layer scales, tables, tokens."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Frequencies, and the one temperature of CLIP, stay what they are.
            if "freqs" in name or parameter.ndim == 0:
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1 and name.endswith("weight"):
                parameter.copy_(1 + 0.2 * noise)
            else:
                parameter.copy_(noise * (scale if parameter.ndim == 1 else scale / max(1, parameter.shape[-1] / 16)))
    return model.eval()


def images(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def liere_weights(heads=2, width=128, depth=2, axes=2, size=8, patches=16, patch=48, labels=3):
    """Random tensors under the official names (the format is that of conversion/liere.py)."""
    generator = torch.Generator().manual_seed(2)
    shapes = {
        "cls_token": (1, 1, width),
        "pos_embedding": (1, 1 + patches, width),
        "to_patch_embedding.1.weight": (width, patch),
        "to_patch_embedding.1.bias": (width,),
        "position_encoder.generator_raw_params": (axes, depth, heads * (64 // size), size, size),
        "mlp_head.0.weight": (width,),
        "mlp_head.0.bias": (width,),
        "mlp_head.1.weight": (labels, width),
        "mlp_head.1.bias": (labels,),
    }
    for index in range(depth):
        layer = f"transformer.layers.{index}"
        shapes |= {
            f"{layer}.0.norm.weight": (width,),
            f"{layer}.0.norm.bias": (width,),
            f"{layer}.0.fn.to_qkv.weight": (3 * heads * 64, width),
            f"{layer}.0.fn.to_out.0.weight": (width, heads * 64),
            f"{layer}.0.fn.to_out.0.bias": (width,),
            f"{layer}.1.norm.weight": (width,),
            f"{layer}.1.norm.bias": (width,),
            f"{layer}.1.fn.net.0.weight": (32, width),
            f"{layer}.1.fn.net.0.bias": (32,),
            f"{layer}.1.fn.net.3.weight": (width, 32),
            f"{layer}.1.fn.net.3.bias": (width,),
        }
    return {name: torch.randn(shape, generator=generator) * 0.5 for name, shape in shapes.items()}


def comrope_weights(width=64, heads=2, depth=2, size=8):
    """Random tensors under the names of ComRoPE, with LD's rotations of two axes, for images of 16 px."""
    blocks, generator = width // heads // size, torch.Generator().manual_seed(3)
    parts = {
        "vision_model.embeddings": {"patch_embedding.weight": (width, 3, 4, 4)},
        "classification_head": {"0.weight": (24, width), "0.bias": (24,), "2.weight": (3, 24), "2.bias": (3,)},
    }
    parts["vision_model.embeddings"] |= {"class_embedding": (width,), "position_embedding": (1, 4, 4, width)}
    norm = {"weight": (width,), "bias": (width,)}
    parts |= {f"vision_model.{name}": norm for name in ("pre_layrnorm", "post_layernorm")}
    for layer in (f"vision_model.encoder.layers.{index}" for index in range(depth)):
        parts |= {f"{layer}.{name}": norm for name in ("layer_norm1", "layer_norm2")}
        linear = {"weight": (width, width), "bias": (width,)}
        parts |= {f"{layer}.self_attn.{name}_proj": linear for name in ("q", "k", "v", "out")}
        rotations = {"freqs": (heads, 1, blocks, size, size), "multiplier": (1, 2, blocks, 1, 1)}
        mlp = {"fc1.weight": (40, width), "fc1.bias": (40,), "fc2.weight": (width, 40), "fc2.bias": (width,)}
        parts |= {f"{layer}.self_attn": rotations, f"{layer}.mlp": mlp}
    shapes = {f"{part}.{name}": shape for part, inside in parts.items() for name, shape in inside.items()}
    return {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}


SMALL_TIMM = {"img_size": 16, "patch_size": 4, "embed_dim": 64, "depth": 2, "num_heads": 2, "mlp_ratio": 0.5}


def rope_vit(kind="rope_mixed", width=64):
    """
    timm's port of rope-vit, and its tensors under the names of rope-vit, which differ in those of the frequencies.
    """
    options = {**SMALL_TIMM, "embed_dim": width, "num_classes": 3, "dynamic_img_size": True}
    theirs = randomize(timm.create_model(f"vit_small_patch16_{kind}_224", **options))
    tensors = {name: value for name, value in theirs.state_dict().items() if not name.startswith("rope.")}
    if "mixed" in kind:
        tensors["freqs"] = theirs.state_dict()["rope.freqs"].flatten(2)
    return theirs, tensors


def without(weights, name):
    return {key: value for key, value in weights.items() if key != name}


def converts(weights, options):
    try:
        convert_state_dict(weights, **options)
    except ConversionError:
        return False
    return True


class Code:
    def __reduce__(self):
        return os.system, ("touch executed",)
