"""
Learned rotations R(p) q and R(p) k in vision towers of pretrained models without RoPE: CLIP, ViT, DeiT, DINOv2, SigLIP
(ComRoPE §4.4). Classes such as `RotaryCLIPVisionModel`, which load patched models, are made when they are requested.
"""

import functools
import inspect
import math
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, conversion_mapping
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.utils import logging

from .model import ENCODINGS, LieRotary, draw_displacements, make_rotary, place_patches, rotate


logger = logging.get_logger(__name__)
FAMILIES = (
    "clip",
    "clip_vision_model",
    "deit",
    "dinov2",
    "dinov2_with_registers",
    "siglip",
    "siglip_vision_model",
    "vit",
)
# In files, a dictionary with this note contains the value of one field, so that plain classes, which would drop the
# rotations, refuse it.
NOTE, CARRIERS = "note", ("initializer_range", "initializer_factor", "layer_norm_eps")
HOW_TO_LOAD = "These weights have learned rotations: import hf_liere before loading, or pass trust_remote_code=True."


def refusal(patch: dict, model_type: str) -> str | None:
    """Why this file cannot rotate a model with this `rotary_patch`; `None` if it can."""
    needed = {"position_encoding": list(ENCODINGS), "format_version": [1]}
    needed |= dict.fromkeys(("folded_grids", "content_positions"), [None])
    wrong = [f"{name}={patch.get(name)!r}" for name, accepted in needed.items() if patch.get(name) not in accepted]
    wrong += [] if model_type in FAMILIES else [f"model_type={model_type!r}"]
    wrong += ["rotary_init='pretrained'"] if patch.get("rotary_init") == "pretrained" else []
    return f"{', '.join(wrong)} of a patched model needs the package hf_liere." if wrong else None


class ModelType:
    """`rotary_…` of a class and in files; objects answer with the plain type, by which libraries know the model."""

    def __init__(self, plain: str):
        self.plain = plain

    def __get__(self, config, kind=None) -> str:
        return f"rotary_{self.plain}" if config is None else self.plain

    def __set__(self, config, value: str) -> None:
        """Transformers sets the type that it reads."""


class RotaryConfig:
    """Configurations with `rotary_patch`, the fields of a `RotaryPatchConfig` of hf_liere."""

    plain_class: type[PreTrainedConfig]
    rotary_parts: tuple = ()
    # There is none without `rotary_patch`.
    has_no_defaults_at_init = True

    def __post_init__(self, **kwargs):
        if reason := refusal(self.rotary_patch or {}, self.plain_class.model_type):
            raise ValueError(reason)
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        return super().from_dict(without_notes(config_dict), **kwargs)

    def to_diff_dict(self) -> dict:
        values = super().to_diff_dict()
        parts = [(values[name], type(getattr(self, name))) for name in self.rotary_parts]
        for part, plain in [(values, self.plain_class), *parts]:
            carrier = next(name for name in CARRIERS if name in plain.__dataclass_fields__)
            part[carrier] = {"value": part.get(carrier, getattr(plain(), carrier)), NOTE: HOW_TO_LOAD}
        return values


def without_notes(value):
    if not isinstance(value, dict):
        return value
    # A label may also be called "note".
    if value.keys() == {"value", NOTE} and isinstance(value[NOTE], str):
        return value["value"]
    return {name: without_notes(inner) for name, inner in value.items()}


class RotaryModel:
    """Models whose vision towers rotate queries and keys as `config.rotary_patch` says."""

    # A layer that is computed again would not find the rotations of its forward pass.
    supports_gradient_checkpointing = False

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        target = config.rotary_patch["target"]
        for name, parts in find_towers(self).items():
            if target in (None, name):
                attach(self.get_submodule(name), *parts, config.rotary_patch)
        with suppress(ImportError):
            if not __name__.startswith("hf_liere") and find_spec("hf_liere") is not None:
                logger.warning_once("`import hf_liere` before loading runs this model with fast kernels.")

    def initialize_weights(self):
        super().initialize_weights()
        # Nested models initialise what they know, which generators are not.
        for module in self.modules():
            values = list(module.parameters()) if isinstance(module, LieRotary) else []
            if values and not any(getattr(value, "_is_hf_initialized", False) for value in values):
                module.reset_parameters()


def find_towers(model: nn.Module) -> dict[str, tuple]:
    """By name, the smallest modules with a patch embedding and attention: embedding module, patch size, attention."""
    modules, found = dict(model.named_modules()), {}
    attentions = [name for name, module in modules.items() if uses_interface(module)]
    for name, module in modules.items():
        if not isinstance(module, nn.Conv2d) or module.kernel_size != module.stride:
            continue
        path = name.split(".")
        for depth in reversed(range(len(path))):
            tower = ".".join(path[:depth])
            inside = [modules[each] for each in attentions if not tower or each.startswith(f"{tower}.")]
            if inside:
                found.setdefault(tower, (modules[".".join(path[: depth + 1])], module.kernel_size, inside))
                break
    return found


def uses_interface(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return hasattr(module, "config") and code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def attach(tower: nn.Module, embeddings: nn.Module, patch_size: tuple, attentions: list, patch: dict) -> None:
    """Give a tower rotations of its queries and keys, computed once in a forward pass, after the embeddings."""
    size = tower.config.image_size
    size = (size, size) if isinstance(size, int) else tuple(size)
    attentions = attentions if patch["layers"] is None else [attentions[layer] for layer in patch["layers"]]
    config, heads = SimpleNamespace(**patch), tower.config.num_attention_heads
    config.num_axes, config.train_grid = 2, tuple(side // extent for side, extent in zip(size, patch_size))
    config.num_hidden_layers, config.num_attention_heads = len(attentions), heads
    config.head_dim = tower.config.hidden_size // heads
    config.coordinates = config.coordinates or ENCODINGS[config.position_encoding].coordinates
    tower.rotary_encoding, tower.rotations = make_rotary(config), None
    embeddings.register_forward_pre_hook(partial(accept_any_size, tower, config, size, patch_size), with_kwargs=True)
    embeddings.register_forward_hook(partial(place_tokens, tower, config))
    for layer, attention in enumerate(attentions):
        eager = inspect.unwrap(type(attention).forward).__globals__["eager_attention_forward"]
        own = {"tower": tower, "layer": layer, "eager": eager, "_attn_implementation": "rotary_tower"}
        attention.config = View(attention.config, **own)
    tower.register_forward_hook(forget, always_call=True)
    if config.keep_absolute != "interpolate":
        embeddings.interpolate_pos_encoding = partial(read_table, tower, config, embeddings)


def accept_any_size(tower, config, size, patch_size, embeddings, args, kwargs):
    pixels = args[0] if args else kwargs["pixel_values"]  # (B, C, H, W)
    tower.grid = tuple(side // extent for side, extent in zip(pixels.shape[-2:], patch_size))
    is_kept = tuple(pixels.shape[-2:]) == size and config.keep_absolute == "interpolate"
    if is_kept or "interpolate_pos_encoding" not in inspect.signature(type(embeddings).forward).parameters:
        return None
    return args, {**kwargs, "interpolate_pos_encoding": True}


def place_tokens(tower, config, embeddings, args, output) -> None:
    """R(p) of class and register tokens, which come first, and of patches."""
    count, device = output.shape[1] - math.prod(tower.grid), output.device
    moved = {tower.grid: draw_displacements(config, tower.grid, device)} if tower.training else {}
    positions = place_patches(config, tower.grid, None, moved, None, device)  # (N, 2)
    centre = 0.5 if config.rotate_prefix and config.coordinates != "centred_grid" else 0.0
    positions = nn.functional.pad(positions, (0, 0, count, 0), value=centre)  # (prefix + N, 2)
    tower.rotations = tower.rotary_encoding.rotations(positions)


class View:
    """An object with some attributes of its own."""

    def __init__(self, base, **own):
        vars(self).update(own, base=base)

    def __getattr__(self, name):
        if name == "base":
            raise AttributeError(name)
        return getattr(self.base, name)


def rotary_attention(module, query, key, value, attention_mask, **kwargs):
    """The attention of the model on R(p) q and R(p) k, of (B, H, N, D) states."""
    config, rotations = module.config, module.config.tower.rotations
    if rotations is None:
        raise RuntimeError("A rotated attention module ran outside the forward pass of its vision tower.")
    rotation = rotations[config.layer % len(rotations)]  # layers may share one
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(config.base._attn_implementation, config.eager)
    view, query, key = View(module, config=config.base), rotate(query, rotation), rotate(key, rotation)
    return attend(view, query, key, value, attention_mask, **kwargs)


AttentionInterface.register("rotary_tower", rotary_attention)


def forget(tower, args, output) -> None:
    tower.rotations = None


def read_table(tower, config, embeddings, tokens, height, width):
    """(1, prefix + N, hidden_size) position table of the model for a grid, as `keep_absolute` says."""
    table = getattr(embeddings, "position_embeddings", None)
    table = embeddings.position_embedding.weight if table is None else table.squeeze(0)
    prefix, patches = table.tensor_split([len(table) - math.prod(config.train_grid)])
    if config.keep_absolute == "drop":
        patches = patches.new_zeros(math.prod(tower.grid), patches.shape[-1])
    elif config.keep_absolute == "train_size":
        patches = patches.unflatten(0, config.train_grid)
        for axis, (size, limit) in enumerate(zip(tower.grid, config.train_grid)):
            patches = patches.index_select(axis, torch.arange(size, device=patches.device).clamp(max=limit - 1))
        patches = patches.flatten(0, 1)
    elif tower.grid != config.train_grid:
        patches = type(embeddings).interpolate_pos_encoding(embeddings, tokens, height, width)[0, len(prefix) :]
    patches = patches * config.absolute_weight if config.keep_absolute == "fade" else patches
    return torch.cat([prefix, patches]).unsqueeze(0)


@functools.cache
def __getattr__(name: str) -> type:
    plain = getattr(transformers, name.removeprefix("Rotary"), None) if name.startswith("Rotary") else None
    if not isinstance(plain, type) or not issubclass(plain, (PreTrainedConfig, PreTrainedModel)):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if issubclass(plain, PreTrainedConfig):
        fields = {"model_type": ModelType(plain.model_type), "plain_class": plain, "rotary_patch": None}
        fields |= {"__annotations__": {"rotary_patch": "dict | None"}, "__module__": __name__}
        return type(name, (RotaryConfig, plain), fields)
    config = __getattr__(f"Rotary{plain.config_class.__name__}")
    kept = {"_keep_in_fp32_modules_strict": [*(plain._keep_in_fp32_modules_strict or ()), "rotary_encoding"]}
    made = type(name, (RotaryModel, plain), {"config_class": config, "__module__": __name__, **kept})
    # How weights are renamed is looked up by class name, else by model type if the name is registered.
    if (renaming := conversion_mapping.get_checkpoint_conversion_mapping(plain.__name__)) is None:
        conversion_mapping.USER_REGISTERED_MAPPINGS.add(name)
    else:
        conversion_mapping.register_checkpoint_conversion_mapping(name, renaming, overwrite=True)
    return made
