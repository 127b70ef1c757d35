"""Families with random weights for the tests of patching: one table, small but with every part of the real models."""

import copy
import dataclasses
import importlib
import inspect
from collections.abc import Callable

import torch
import transformers
from checkout import SUPPORT
from fresh_process import run_two_processes
from torch import nn

import hf_liere


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
IMAGE = {**SMALL, "image_size": 16, "patch_size": 4}
VIDEO = {**SMALL, "image_size": 8, "num_frames": 4}
CLIP_TEXT = {**SMALL, "vocab_size": 64, "max_position_embeddings": 8, "eos_token_id": 2, "bos_token_id": 1}


@dataclasses.dataclass
class Case:
    """
    Attributes:
        build: Makes the model.
        inputs: Makes its inputs for an image size.
        tower: Name of the vision tower.
        prefix: Class and register tokens.
        other_size: Another image size, or `None` where the family takes none.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[..., dict]
    tower: str = ""
    prefix: int = 1
    other_size: tuple[int, int] | None = (24, 16)

    @property
    def size(self) -> tuple[int, int]:
        """The image size of the model."""
        return inspect.signature(self.inputs).parameters["size"].default


def images(size=(16, 16)):
    return {"pixel_values": torch.randn(2, 3, *size)}


def clips(size=(8, 8)):
    return {"pixel_values": torch.randn(2, 4, 3, *size)}


def masked_clips(size=(8, 8)):
    mask = torch.tensor([[True, False, False, True, True, False, True, True]] * 2)
    mask[1] = mask[1].flip(0)
    return {**clips(size), "bool_masked_pos": mask}


def images_and_text(size=(16, 16)):
    return {**images(size), "input_ids": torch.tensor([[1, 5, 6, 2], [1, 7, 2, 2]])}


def flexible(size=(16, 16)):
    """SigLIP2's input: patches as vectors, padded, with the grid of each sample."""
    rows, columns = size[0] // 4, size[1] // 4
    shapes = torch.tensor([[rows, columns], [2, 3]])
    length = rows * columns
    mask = (torch.arange(length) < shapes.prod(-1, keepdim=True)).long()
    return {"pixel_values": torch.randn(2, length, 48), "spatial_shapes": shapes, "pixel_attention_mask": mask}


def clip_config(**vision):
    return transformers.CLIPConfig(
        text_config=CLIP_TEXT, vision_config={**IMAGE, "projection_dim": 8, **vision}, projection_dim=8, num_labels=3
    )


def model(config_name, model_name, **fields):
    return lambda: getattr(transformers, model_name)(getattr(transformers, config_name)(**fields))


def part(family, config_name, model_name, **fields):
    """A tower that transformers does not export."""
    folder = f"transformers.models.{family}"
    configs = importlib.import_module(f"{folder}.configuration_{family}")
    models = importlib.import_module(f"{folder}.modeling_{family}")
    return lambda: getattr(models, model_name)(getattr(configs, config_name)(**fields))


CASES = {
    "clip_vision": Case(model("CLIPVisionConfig", "CLIPVisionModel", **IMAGE), images),
    "clip": Case(lambda: transformers.CLIPModel(clip_config()), images_and_text, "vision_model"),
    "clip_projection": Case(
        model("CLIPVisionConfig", "CLIPVisionModelWithProjection", **IMAGE, projection_dim=8), images, "vision_model"
    ),
    "clip_classifier": Case(lambda: transformers.CLIPForImageClassification(clip_config()), images, "vision_model"),
    "siglip": Case(model("SiglipVisionConfig", "SiglipVisionModel", **IMAGE), images, prefix=0),
    "siglip_classifier": Case(
        lambda: transformers.SiglipForImageClassification(
            transformers.SiglipConfig(text_config=CLIP_TEXT, vision_config=IMAGE, num_labels=3)
        ),
        images,
        "vision_model",
        prefix=0,
    ),
    "siglip_two_towers": Case(
        lambda: transformers.SiglipModel(transformers.SiglipConfig(text_config=CLIP_TEXT, vision_config=IMAGE)),
        images_and_text,
        "vision_model",
        prefix=0,
    ),
    "siglip2": Case(
        model("Siglip2VisionConfig", "Siglip2VisionModel", **SMALL, patch_size=4, num_patches=16), flexible, prefix=0
    ),
    "vit": Case(model("ViTConfig", "ViTForImageClassification", **IMAGE, num_labels=3), images, "vit"),
    "deit": Case(model("DeiTConfig", "DeiTForImageClassification", **IMAGE, num_labels=3), images, "deit", prefix=2),
    "dinov2": Case(model("Dinov2Config", "Dinov2Model", **IMAGE), images),
    "dinov2_registers": Case(
        model("Dinov2WithRegistersConfig", "Dinov2WithRegistersModel", **IMAGE, num_register_tokens=3), images, prefix=4
    ),
    "vit_mae": Case(model("ViTMAEConfig", "ViTMAEModel", **IMAGE, mask_ratio=0.5), images),
    "vit_mae_pretraining": Case(
        model(
            "ViTMAEConfig",
            "ViTMAEForPreTraining",
            **IMAGE,
            decoder_hidden_size=24,
            decoder_num_hidden_layers=1,
            decoder_num_attention_heads=2,
            decoder_intermediate_size=32,
        ),
        images,
        "vit",
        other_size=None,
    ),
    "beit": Case(
        model("BeitConfig", "BeitForImageClassification", **IMAGE, use_absolute_position_embeddings=True, num_labels=3),
        images,
        "beit",
    ),
    "beit_relative": Case(
        model("BeitConfig", "BeitModel", **IMAGE, use_relative_position_bias=True, use_mask_token=True), images
    ),
    "videomae": Case(
        model("VideoMAEConfig", "VideoMAEForVideoClassification", **VIDEO, patch_size=4, num_labels=3),
        clips,
        "videomae",
        prefix=0,
        other_size=None,
    ),
    "videomae_pretraining": Case(
        model(
            "VideoMAEConfig",
            "VideoMAEForPreTraining",
            **VIDEO,
            patch_size=4,
            decoder_hidden_size=24,
            decoder_num_hidden_layers=1,
            decoder_num_attention_heads=2,
            decoder_intermediate_size=32,
        ),
        masked_clips,
        "videomae",
        prefix=0,
        other_size=None,
    ),
    "vivit": Case(model("VivitConfig", "VivitModel", **VIDEO, tubelet_size=[2, 4, 4]), clips),
}


QWEN = {"hidden_size": 32, "depth": 2, "num_heads": 2, "patch_size": 4}
# They rotate queries and keys by themselves.
ROTATING = {
    "dinov3": model("DINOv3ViTConfig", "DINOv3ViTModel", **IMAGE),
    "mlcd": model("MLCDVisionConfig", "MLCDVisionModel", **IMAGE),
    "pixtral": model("PixtralVisionConfig", "PixtralVisionModel", **IMAGE),
    "vjepa2": model("VJEPA2Config", "VJEPA2Model", **SMALL, crop_size=16, patch_size=4, frames_per_clip=4),
    "qwen2_vl": part("qwen2_vl", "Qwen2VLVisionConfig", "Qwen2VisionTransformerPretrainedModel", **QWEN, embed_dim=32),
    "qwen2_5_vl": part(
        "qwen2_5_vl", "Qwen2_5_VLVisionConfig", "Qwen2_5_VisionTransformerPretrainedModel", **QWEN, intermediate_size=48
    ),
    "qwen3_vl": part("qwen3_vl", "Qwen3VLVisionConfig", "Qwen3VLVisionModel", **QWEN, intermediate_size=48),
    "eomt_dinov3": model("EomtDinov3Config", "EomtDinov3ForUniversalSegmentation", **IMAGE, num_queries=5),
    "liere": lambda: hf_liere.LieREViTModel(hf_liere.LieREViTConfig(**IMAGE, position_encoding="rope_mixed")),
}
# Which of their tokens is which patch cannot be told.
UNFIT = {
    "eomt": model("EomtConfig", "EomtForUniversalSegmentation", **IMAGE, num_queries=5, num_blocks=1),
    "yolos": model("YolosConfig", "YolosModel", **{**IMAGE, "image_size": [16, 16]}, num_detection_tokens=3),
    "x_clip": model("XCLIPVisionConfig", "XCLIPVisionModel", **IMAGE, mit_hidden_size=32),
    "segformer": model(
        "SegformerConfig", "SegformerModel", hidden_sizes=[8] * 4, num_attention_heads=[1] * 4, decoder_hidden_size=8
    ),
    "hunyuan": part("hunyuan_vl", "HunYuanVLVisionConfig", "HunYuanVLVisionTransformer", **SMALL, patch_size=4),
}


VIT_B = {
    "hidden_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "image_size": 224,
    "patch_size": 16,
}
# Two layers at the width, heads and number of tokens of the published models.
REAL_SIZES = {
    "clip": model("CLIPVisionConfig", "CLIPVisionModel", **VIT_B),
    "siglip": model("SiglipVisionConfig", "SiglipVisionModel", **VIT_B),
    "vit": model("ViTConfig", "ViTModel", **VIT_B),
    "deit": model("DeiTConfig", "DeiTModel", **VIT_B),
    "dinov2": model("Dinov2Config", "Dinov2Model", **VIT_B),
    "dinov2_registers": model("Dinov2WithRegistersConfig", "Dinov2WithRegistersModel", **VIT_B),
    "vit_mae": model("ViTMAEConfig", "ViTMAEModel", **VIT_B),
    "beit": model("BeitConfig", "BeitModel", **VIT_B, use_relative_position_bias=True),
    "videomae": model("VideoMAEConfig", "VideoMAEModel", **VIT_B, num_frames=8),
    "vivit": model("VivitConfig", "VivitModel", **{**VIT_B, "tubelet_size": [2, 16, 16]}, num_frames=8),
}


@torch.no_grad()
def widen(built, std=0.2):
    """Draw weights that are large enough for attention, and so for rotations, to matter; return the model."""
    for parameter in built.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=std)
    return built


def build(name, implementation="sdpa"):
    """A model in evaluation mode with wide weights ([`widen`]), and its inputs."""
    case = CASES[name]
    torch.manual_seed(0)
    built = widen(case.build().eval())
    built.set_attn_implementation(implementation)
    return built, case.inputs()


def run(built, inputs, **kwargs):
    """All tensors of the output, in order, with the random choices of masked autoencoders fixed."""
    torch.manual_seed(1)
    return tensors(built(**inputs, **kwargs))


def outputs(built, inputs, **options):
    """All tensors of the output that are not a cache."""
    if built.can_generate():
        options.setdefault("use_cache", False)
    return run(built, inputs, **options)


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    return [tensor for inner in value for tensor in tensors(inner)] if not isinstance(value, (int, float)) else []


def randomize(built, std=0.3):
    """Generators and multipliers away from zero."""
    from hf_liere.patching.apply import rotary_parameters

    with torch.no_grad():
        for _, parameter in rotary_parameters(built):
            parameter.normal_(std=std)


def realign(model):
    """Copy weights of a file to aligned addresses, because on some processors products round by address."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


def same_bits(first, second):
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second))


def check_step_of_two_processes(built, batch, folder, least, kind="ddp"):
    """
    One step of SGD under DDP or FSDP2 (`kind`: see `patching_worker`) is that of one process, and moves every generator
    by more than `least` somewhere.
    """
    from hf_liere.patching.apply import rotary_parameters

    torch.save((copy.deepcopy(built), batch), folder / "start.pt")
    before = {name: value.detach().clone() for name, value in rotary_parameters(built)}
    built.train()(**batch).loss.backward()
    torch.optim.SGD(built.parameters(), lr=0.1).step()
    run_two_processes(SUPPORT / "patching_worker.py", kind, folder)
    stepped = torch.load(folder / "stepped.pt")
    for name, value in built.named_parameters():
        # Means of two halves in float32 instead of one mean.
        torch.testing.assert_close(stepped[name], value.detach(), rtol=0, atol=1e-6, msg=name)
    assert all((stepped[name] - value).abs().max() > least for name, value in before.items())
