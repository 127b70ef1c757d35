"""Every model that the properties run over, from the tables of cases: with no parameter at its start."""

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import encoding_cases
import patching_cases
import rope_cases
import torch
from torch import nn

import hf_liere
from hf_liere import LieRotaryEmbedding, PoseEmbedding, RotaryPatchConfig, patch


class Model(NamedTuple):
    """
    Attributes:
        make: Makes the model, at its start and before it is patched.
        inputs: Makes arguments of `forward`.
        outputs: Runs a model on them, and returns tensors.
        config: What it is patched with, or `None` if it is the package's own.
        is_saved: Whether `save_pretrained` and the model's class restore it.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], dict]
    outputs: Callable[..., list[torch.Tensor]]
    config: RotaryPatchConfig | None = None
    is_saved: bool = True


SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "num_labels": 3}
PICTURES = {"image_size": 16, "patch_size": 4}
CLIPS = {"image_size": 8, "patch_size": 4, "num_frames": 4}


def images(batch=2, size=(16, 12)):
    return {"pixel_values": torch.randn(batch, 3, *size)}


def clips(batch=2, size=(8, 12)):
    return {"pixel_values": torch.randn(batch, 4, 3, *size)}


def points(batch=2, count=5):
    return {"inputs_embeds": torch.randn(batch, count, 3), "positions": torch.rand(batch, count, 3)}


def masked(batch=2):
    return images(batch) | {"bool_masked_pos": torch.arange(12).expand(batch, -1) % 3 == 0}


def hidden(batch=2):
    return images(batch) | {"attention_mask": torch.arange(13).expand(batch, -1) < 9}


def padded(batch=2):
    return points(batch) | {"attention_mask": torch.arange(5) < torch.tensor([[5], [3]])[torch.arange(batch) % 2]}


def of_sizes(batch=2):
    config = hf_liere.LieREViTConfig(**SIZES, **PICTURES)
    return hf_liere.batch_of_patches([torch.randn(3, *size) for size in ((16, 16), (8, 24), (20, 12))[:batch]], config)


def timed(batch=2):
    times = {"spacing": torch.rand(batch, 2) + 0.5, "frame_times": torch.rand(batch, 4).cumsum(-1)}
    return clips(batch, (8, 8)) | times


def states(batch=2):
    return {"query": torch.randn(batch, 2, 5, 24), "key": torch.randn(batch, 2, 5, 24), "positions": torch.rand(5, 2)}


def read_states(batch=2):
    return states(batch) | {"states": torch.randn(batch, 5, 48)}


def poses(batch=2):
    turned = torch.linalg.qr(torch.randn(5, 3, 3))[0]
    found = torch.eye(4).repeat(5, 1, 1)
    found[:, :3, :3], found[:, :3, 3] = turned * turned.det().sign().view(-1, 1, 1), torch.randn(5, 3)
    return {name: torch.randn(batch, 2, 5, 16) for name in ("query", "key", "value")} | {"poses": found}


# Kind → class of models, class of configurations, fields, axes of the encoding, inputs.
OWN = {
    "image": ("LieREViTForImageClassification", "LieREViTConfig", PICTURES, 2, images),
    "video": ("LieREVideoForVideoClassification", "LieREVideoConfig", CLIPS, 3, clips),
    "points": ("LieRETokensForSequenceClassification", "LieRETokensConfig", {"feature_size": 3}, 3, points),
    "each point": ("LieRETokensForTokenClassification", "LieRETokensConfig", {"feature_size": 3}, 3, points),
    "masked": ("LieREViTForMaskedImageModeling", "LieREViTConfig", PICTURES, 2, masked),
    "backbone": ("LieREViTBackbone", "LieREViTConfig", PICTURES | {"out_features": ["stem", "stage2"]}, 2, images),
}
EVERY_ENCODING = ("image", "video", "points")


def own(kind, encoding, given=None, **options):
    name, config, sizes, axes, inputs = OWN[kind]
    fields = {**SIZES, **sizes, **encoding_cases.fields(encoding, 24, axes), **options}
    if kind in ("points", "each point"):
        fields["num_axes"] = axes
        if encoding == "absolute":
            fields["position_table_size"] = [3] * axes
    return Model(
        lambda: getattr(hf_liere, name)(getattr(hf_liere, config)(**fields)), given or inputs, patching_cases.run
    )


def layer(encoding, **options):
    size = encoding_cases.block_size(encoding)
    inputs = read_states if "content_positions" in options else states
    return Model(
        lambda: LieRotaryEmbedding(2, 24, 2, encoding, size, **options), inputs, patching_cases.run, None, False
    )


MODELS = {
    f"{kind} {encoding}": own(kind, encoding)
    for kind in EVERY_ENCODING
    for encoding in ("none", "absolute", *encoding_cases.on_axes(OWN[kind][3]))
}
MODELS |= {f"{kind} liere": own(kind, "liere") for kind in OWN if kind not in EVERY_ENCODING}
# Other inputs, and the fields that they need.
MODELS |= {
    "hidden tokens": own("image", "liere", hidden),
    "hidden tokens, mean": own("image", "liere", hidden, pooling="mean"),
    "padded points": own("points", "liere", padded, pooling="mean"),
    "sizes": own("image", "liere", of_sizes),
    "sizes, unit": own("image", "liere", of_sizes, coordinates="unit"),
    "sizes, centred": own("image", "liere", of_sizes, coordinates="centred_grid"),
    "sizes, rotated prefix": own("image", "comrope_ap", of_sizes, rotate_prefix=True),
    "image content": own("image", "rope_mixed", hidden, content_positions="heads"),
    "padded points content": own("points", "liere", padded, rotary_init="zeros", content_positions="shared_sum"),
    "padded points distance": own("points", "none", padded, distance_axes=[0, 2]),
    "physical": own("video", "liere", timed, coordinates="physical", physical_unit=[2.0, 8.0, 8.0]),
}
MODELS |= {f"layer {encoding}": layer(encoding) for encoding in encoding_cases.ENCODINGS}
MODELS["layer of content"] = layer("comrope_ld", content_positions="heads_sum")
MODELS["layer of halves"] = layer("liere", pairing="halves")
MODELS["layer of chosen channels"] = layer("liere", pairing=[(3, 1), (0, 5)])
MODELS["layer of frequencies"] = layer("liere", frequencies=torch.rand(2, 6), pairing="adjacent")
MODELS["poses"] = Model(lambda: PoseEmbedding(16, patch_share=0.0), poses, patching_cases.run, None, False)


def of_transformers(cases, name, case, config):
    return Model(lambda: cases.build(name)[0], case.inputs, cases.outputs, config, name not in UNSAVED)


ZEROS = RotaryPatchConfig("comrope_ld", block_size=4)
BLOCKS = rope_cases.blocks()
# Blocks of some families would not start at their rotation.
WITHOUT_BLOCKS = {"sam2_video", "edgetam_video", "molmo2", "granite_swa", "llama_dynamic", "llama_longrope"}
# No models of transformers, or not exported by it.
UNSAVED = {"sam2_video", "edgetam_video"}
for name, case in patching_cases.CASES.items():
    MODELS[f"patched {name}"] = of_transformers(patching_cases, name, case, ZEROS)
for name, case in {**rope_cases.CASES, **rope_cases.FAMILIES}.items():
    MODELS[f"rotating {name}, planes"] = of_transformers(rope_cases, name, case, rope_cases.PLANES)
    if name not in WITHOUT_BLOCKS:
        MODELS[f"rotating {name}, blocks"] = of_transformers(rope_cases, name, case, BLOCKS)
for name in ("llama", "dinov3", "qwen2_5_vl"):
    MODELS[f"composed {name}"] = of_transformers(rope_cases, name, rope_cases.CASES[name], rope_cases.composed())
MODELS["composed llama, panels"] = MODELS["composed llama"]._replace(
    inputs=rope_cases.in_panels, config=rope_cases.composed(num_axes=2)
)
MOVED = RotaryPatchConfig("comrope_ld", block_size=4, content_positions="heads_sum")
MODELS["patched clip_vision, content"] = MODELS["patched clip_vision"]._replace(config=MOVED)
MOVED = dataclasses.replace(rope_cases.PLANES, content_positions="shared_sum")
MODELS["rotating llama, content"] = MODELS["rotating llama, planes"]._replace(config=MOVED)
LIBRARIES = {"timm": "timm_cases", "diffusers": "diffusion_cases"}
for library, cases in LIBRARIES.items():
    if importlib.util.find_spec(library):
        cases = importlib.import_module(cases)
        for case in cases.CASES:
            configs = (cases.ZEROS,) if not case.rotates else getattr(case, "configs", (cases.PLANES, cases.BLOCKS))
            for config in configs:
                name = f"{case.name}, {config.position_encoding}"
                MODELS[name] = Model(case.build, case.inputs, cases.outputs, config, False)
        if library == "diffusers":
            flux = cases.BY_NAME["FluxTransformer2DModel"].build
            MODELS["composed flux"] = Model(flux, cases.flux, cases.outputs, cases.COMPOSED, False)
            MODELS["composed flux, panels"] = Model(flux, cases.flux_in_panels, cases.outputs, cases.PANELS, False)
PATCHED = [name for name, model in MODELS.items() if model.config]
SAVED = [name for name, model in MODELS.items() if model.is_saved]
# Patching takes a second each: these stand for the other families that rotate by themselves.
QUICK = {"rotating llama, planes", "rotating gpt_neox, blocks", "rotating dinov3, planes", "rotating gemma3n, planes"}
QUICK.add("rotating llama, content")
# The code of an encoding of a user is tried in another process whenever a model is saved.
SLOW = [name for name in MODELS if name.startswith("rotating ") and name not in QUICK or "two_parameters" in name]
SLOW.append("composed qwen2_5_vl")


def make(name: str, seed: int = 0) -> nn.Module:
    """A model in evaluation mode, patched where the table says so, with no parameter where it starts."""
    model = MODELS[name].make().eval()
    if MODELS[name].config:
        patch(model, MODELS[name].config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


class Built(NamedTuple):
    """A model that no test changes, its inputs and its outputs."""

    model: nn.Module
    inputs: dict
    expected: list[torch.Tensor]


@functools.cache
def build(name: str) -> Built:
    torch.manual_seed(0)
    model = make(name)
    inputs = MODELS[name].inputs()
    return Built(model, inputs, run(name, model, inputs))


@torch.no_grad()
def run(name: str, model: nn.Module, inputs: dict) -> list[torch.Tensor]:
    return patching_cases.tensors(MODELS[name].outputs(model, inputs))
