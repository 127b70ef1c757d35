"""Small models of each class of ours with data for a step of training, for what frameworks ask of models."""

import rope_cases
import torch
import transformers
from torch import nn

import hf_liere
from hf_liere import RotaryPatchConfig, patch


SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
PICTURE = {**SIZES, "image_size": 8, "patch_size": 4}
TOKENS = {**SIZES, "feature_size": 3, "num_axes": 2}
CLIP = {**PICTURE, "num_frames": 2}
LABELS = {"num_labels": 3}
SEVERAL = {**LABELS, "problem_type": "multi_label_classification"}
ONE_NUMBER = {"num_labels": 1, "problem_type": "regression"}
TEXT = {**rope_cases.TEXT, "num_hidden_layers": 1}
PLANES = rope_cases.PLANES


def ours(name, config, **fields):
    return lambda: getattr(hf_liere, name)(getattr(hf_liere, config)(**fields))


def patched(name, config, patch_config, **fields):
    def build():
        model = getattr(transformers, name)(getattr(transformers, config)(**fields))
        patch(model, patch_config)
        return model

    return build


def classes(count):
    return torch.arange(count) % 3


def shares(count):
    """Of several labels, or soft ones."""
    return torch.rand(count, 3)


def numbers(count):
    return torch.linspace(-2, 3, count)


def pictures(labels, count=16):
    return {"pixel_values": torch.randn(count, 3, 8, 8), "labels": labels(count)}


def clips(labels, count=16):
    return {"pixel_values": torch.randn(count, 2, 3, 8, 8), "labels": labels(count)}


def masked(count=16):
    return {"pixel_values": torch.randn(count, 3, 8, 8), "bool_masked_pos": torch.arange(4).expand(count, -1) % 2 == 0}


def points(labels, count=16):
    return {"inputs_embeds": torch.randn(count, 5, 3), "positions": torch.rand(count, 5, 2), "labels": labels(count)}


def some_tokens(count):
    """Samples with different numbers of labels."""
    labels = torch.randint(0, 3, (count, 5))
    return labels.masked_fill(torch.arange(5) > torch.arange(count).unsqueeze(1) % 5, -100)


def no_tokens_in_some(count):
    """Whole batches without a label."""
    return some_tokens(count).masked_fill(torch.arange(count).unsqueeze(1) < 4, -100)


def sentences(labels, count=16):
    return {"input_ids": torch.randint(3, 60, (count, 5)), "labels": labels(count)}


IMAGES = ("LieREViTForImageClassification", "LieREViTConfig")
VIDEO = ("LieREVideoForVideoClassification", "LieREVideoConfig")
POINTS = ("LieRETokensForSequenceClassification", "LieRETokensConfig")
EACH_POINT = ("LieRETokensForTokenClassification", "LieRETokensConfig")
LLAMA = ("LlamaForSequenceClassification", "LlamaConfig", PLANES)
VIT = ("ViTForImageClassification", "ViTConfig", RotaryPatchConfig("liere", block_size=4))
# A model, its data, and the size of its accumulated batches.
STEPS = {
    "images": (ours(*IMAGES, **PICTURE, **LABELS), pictures(classes), 4),
    "images, a last batch of two": (ours(*IMAGES, **PICTURE, **LABELS), pictures(classes, 10), 4),
    "images, several labels": (ours(*IMAGES, **PICTURE, **SEVERAL), pictures(shares), 4),
    "images, several labels, a last batch of two": (ours(*IMAGES, **PICTURE, **LABELS), pictures(shares, 10), 4),
    "images, regression": (ours(*IMAGES, **PICTURE, **ONE_NUMBER), pictures(numbers), 4),
    "images, by one": (ours(*IMAGES, **PICTURE, **SEVERAL), pictures(shares), 1),
    "masked images": (ours("LieREViTForMaskedImageModeling", "LieREViTConfig", **PICTURE), masked(), 4),
    "masked images with labels": (
        ours("LieREViTForMaskedImageModeling", "LieREViTConfig", **PICTURE),
        {**masked(), "labels": classes(16)},
        4,
    ),
    "video": (ours(*VIDEO, **CLIP, **LABELS), clips(classes), 4),
    "video, several labels": (ours(*VIDEO, **CLIP, **SEVERAL), clips(shares), 4),
    "video, regression": (ours(*VIDEO, **CLIP, **ONE_NUMBER), clips(numbers), 4),
    "points": (ours(*POINTS, **TOKENS, **LABELS), points(classes), 4),
    "points, several labels": (ours(*POINTS, **TOKENS, **SEVERAL), points(shares), 4),
    "points, regression": (ours(*POINTS, **TOKENS, **ONE_NUMBER), points(numbers), 4),
    "each point": (ours(*EACH_POINT, **TOKENS, **LABELS), points(some_tokens), 4),
    "each point, none in some batches": (ours(*EACH_POINT, **TOKENS, **LABELS), points(no_tokens_in_some), 4),
    "patched ViT": (patched(*VIT, **PICTURE, **LABELS), pictures(classes), 4),
    "patched ViT, several labels": (patched(*VIT, **PICTURE, **SEVERAL), pictures(shares), 4),
    "patched ViT, regression": (patched(*VIT, **PICTURE, **ONE_NUMBER), pictures(numbers), 4),
    "patched Llama, classes": (patched(*LLAMA, **TEXT, **LABELS), sentences(classes), 4),
    "patched Llama, several labels": (patched(*LLAMA, **TEXT, **SEVERAL), sentences(shares), 4),
    "patched Llama, words": (
        patched("LlamaForCausalLM", "LlamaConfig", PLANES, **TEXT),
        sentences(lambda count: some_tokens(count) + 3 * (some_tokens(count) >= 0)),
        4,
    ),
}


class Ignoring(hf_liere.LieREViTForImageClassification):
    """A user's, whose own loss knows no number of items."""

    def forward(self, pixel_values, labels=None, **kwargs):
        outputs = super().forward(pixel_values, **kwargs)
        outputs.loss = nn.functional.cross_entropy(outputs.logits, labels, label_smoothing=0.1)
        return outputs


def with_own_loss():
    model = hf_liere.LieREViTForImageClassification(hf_liere.LieREViTConfig(**PICTURE, **LABELS))
    model.loss_function = lambda labels, logits, config, **kwargs: nn.functional.cross_entropy(logits, labels)
    return model


STEPS["a class of a user"] = (lambda: Ignoring(hf_liere.LieREViTConfig(**PICTURE, **LABELS)), pictures(classes), 4)
STEPS["a loss of a user"] = (with_own_loss, pictures(classes), 4)


# Each of our classes.
CLASSES = {
    "LieREViTModel": ours("LieREViTModel", "LieREViTConfig", **PICTURE),
    "LieREViTForImageClassification": ours(*IMAGES, **PICTURE),
    "LieREViTForMaskedImageModeling": ours("LieREViTForMaskedImageModeling", "LieREViTConfig", **PICTURE),
    "LieREViTBackbone": ours("LieREViTBackbone", "LieREViTConfig", **PICTURE),
    "LieREVideoModel": ours("LieREVideoModel", "LieREVideoConfig", **CLIP),
    "LieREVideoForVideoClassification": ours(*VIDEO, **CLIP),
    "LieRETokensModel": ours("LieRETokensModel", "LieRETokensConfig", **TOKENS),
    "LieRETokensForSequenceClassification": ours(*POINTS, **TOKENS),
    "LieRETokensForTokenClassification": ours(*EACH_POINT, **TOKENS),
    "patched Llama": patched("LlamaForCausalLM", "LlamaConfig", PLANES, **TEXT),
    "patched ViT": patched(*VIT, **PICTURE),
}
