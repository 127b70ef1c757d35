"""One small model of every kind that is published, as its owner saves it."""

from pathlib import Path

import torch
from transformers import CLIPConfig, CLIPModel, ViTImageProcessor

import hf_liere
from hf_liere.transformer.video_processing_liere import LieREVideoProcessor


CARD = "---\nlicense: apache-2.0\nlibrary_name: transformers\n---\n\n# A model of the tests\n"
SMALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "patch_size": 4}


def vit(**fields) -> hf_liere.LieREViTForImageClassification:
    """Our small classifier of images."""
    torch.manual_seed(0)
    config = hf_liere.LieREViTConfig(**{**SMALL, "image_size": 16, "num_labels": 3, **fields})
    return hf_liere.LieREViTForImageClassification(config).eval()


def tokens(**fields) -> hf_liere.LieRETokensForTokenClassification:
    sizes = {name: value for name, value in SMALL.items() if name != "patch_size"}
    config = hf_liere.LieRETokensConfig(**{**sizes, "feature_size": 2, "num_axes": 3, "num_labels": 3, **fields})
    return hf_liere.LieRETokensForTokenClassification(config).eval()


def save_models(folder: Path) -> dict[str, Path]:
    """Folders by kind: image, video, tokens, backbone, clip (patched and complete), adapter (and its plain base)."""
    torch.manual_seed(0)
    image = hf_liere.LieREViTConfig(**SMALL, image_size=16, num_labels=3, position_encoding="comrope_ld", block_size=4)
    video = hf_liere.LieREVideoConfig(**SMALL, image_size=8, num_frames=4, num_labels=3)
    models = {
        "image": hf_liere.LieREViTForImageClassification(image),
        "video": hf_liere.LieREVideoForVideoClassification(video),
        "tokens": tokens(),
        "backbone": hf_liere.LieREViTBackbone(hf_liere.LieREViTConfig(**SMALL, image_size=16, out_indices=[1, 2])),
    }
    width = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    clip_config = CLIPConfig(
        vision_config={**width, "image_size": 16, "patch_size": 4},
        text_config={**width, "vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 8},
        projection_dim=24,
    )
    clip = CLIPModel(clip_config)
    folders = {kind: folder / kind for kind in (*models, "clip", "adapter", "base")}
    clip.save_pretrained(folders["base"])
    hf_liere.patch(clip, hf_liere.RotaryPatchConfig(position_encoding="liere", block_size=4, rotary_init="uniform"))
    hf_liere.save_rotary(clip, folders["adapter"])
    models["clip"] = hf_liere.complete_model(clip)
    for kind, model in models.items():
        model.save_pretrained(folders[kind])
    size = {"height": 16, "width": 16}
    ViTImageProcessor(size=size).save_pretrained(folders["image"])
    LieREVideoProcessor(size=size, crop_size=size).save_pretrained(folders["video"])
    for kind in (*models, "adapter"):
        (folders[kind] / "README.md").write_text(CARD)
    return folders
