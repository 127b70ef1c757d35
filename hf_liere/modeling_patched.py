"""
Pretrained vision transformers of transformers with learned rotations inside (ComRoPE §4.4). Unusual in this file:

- attention modules are found by what they do (they dispatch through transformers' attention interface below a patch
  embedding), never by class name, and keep their weights: a registered attention function rotates query and key and
  then calls the implementation that the model was configured with;
- that function is selected by a view of the configuration that only the attention modules see, so the masks,
  `set_attn_implementation` and `output_attentions` of the model work as before;
- the rotations of a forward pass live on a stack that belongs to the thread and the pass, never on a module.
"""

import inspect
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial

import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    CLIPConfig,
    CLIPForImageClassification,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    ViTConfig,
    ViTForImageClassification,
    ViTForMaskedImageModeling,
    ViTModel,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from .attention import eager_attention_forward, rotate
from .configuration_liere import ROTARY_ENCODINGS, LieREVideoConfig, LieREViTConfig
from .encodings import RotaryEncoding, build_rotary_encoding
from .lie_algebra import working_dtype
from .positions import grid_positions, perturbation, with_prefix


# Code that came with a checkpoint and the package may be loaded side by side, each with forward passes of its own.
ROTARY_ATTENTION = f"rotary:{__name__}"
FORMAT_VERSION = 1
KEEP_ABSOLUTE = ("interpolate", "train_size", "fade", "drop")


@dataclass
class RotaryPatchConfig:
    r"""
    Which rotations a pretrained vision transformer gets, and where.

    Args:
        position_encoding: `comrope_ld`, `comrope_ap`, `liere`, `rope_mixed` or `axial_rope`.
        block_size: Size b of the diagonal blocks of the generators; `None` means the encoding's own (8, RoPE: 2).
        layers: Indices of the attention layers to rotate, from 0; `None` means all.
        target: Dotted name of the vision tower, as in `model.named_modules()`; `None` means every tower.
        share_heads, share_layers: One set of generators for all heads of a layer, for all layers.
        rotary_init: `"zeros"` leaves the model exactly as it is: zero generators, exp(0) = I (ComRoPE §4.4). Any other
            (`"frequencies"`, `"normal"`, `"uniform"`, `None` for the encoding's own, see `LieREConfig`) is **not
            neutral**: it changes what the pretrained model computes. `axial_rope` learns nothing and takes only `None`.
        rotary_init_scale, rope_theta, coordinates, position_perturbation: See `LieREConfig`.
        rotate_prefix: Whether class and register tokens are rotated as tokens at the centre (official ComRoPE).
        keep_absolute: What becomes of the model's own position table, for the patches (prefix tokens keep theirs).
            `"interpolate"`: as the model interpolates it; `"train_size"`: every patch reads the entry of its index,
            patches beyond the trained grid the nearest one; `"fade"`: interpolated and multiplied by
            `absolute_weight`, which `set_absolute_weight` changes during training; `"drop"`: not used.
        absolute_weight: Weight of the table for `keep_absolute="fade"`.

    Raises:
        ValueError: for values that no model could take; what a given model cannot take is refused by `patch`.
    """

    position_encoding: str = "comrope_ld"
    block_size: int | None = None
    layers: list[int] | None = None
    target: str | None = None
    share_heads: bool = False
    share_layers: bool = False
    rotary_init: str | None = "zeros"
    rotary_init_scale: float | None = None
    rope_theta: float | None = None
    coordinates: str | None = None
    position_perturbation: float = 0.0
    rotate_prefix: bool = False
    keep_absolute: str = "interpolate"
    absolute_weight: float = 1.0
    format_version: int = FORMAT_VERSION

    def __post_init__(self):
        if self.format_version > FORMAT_VERSION:
            raise ValueError(
                f"format_version={self.format_version} was written by a newer hf_liere; this one reads up to "
                f"{FORMAT_VERSION}. Please upgrade hf_liere."
            )
        if self.position_encoding not in ROTARY_ENCODINGS:
            raise ValueError(
                f"position_encoding={self.position_encoding!r} is not a rotary encoding; accepted: "
                f"{', '.join(ROTARY_ENCODINGS)}."
            )
        if self.keep_absolute not in KEEP_ABSOLUTE:
            raise ValueError(f"keep_absolute={self.keep_absolute!r} must be one of {', '.join(KEEP_ABSOLUTE)}.")
        if not 0 <= self.absolute_weight <= 1:
            raise ValueError(f"absolute_weight={self.absolute_weight} must lie in [0, 1].")
        if self.absolute_weight != 1 and self.keep_absolute != "fade":
            raise ValueError(
                f"absolute_weight={self.absolute_weight} belongs to keep_absolute='fade', not {self.keep_absolute!r}."
            )
        if self.position_encoding == "axial_rope" and self.rotary_init is not None:
            raise ValueError(
                f"rotary_init={self.rotary_init!r}: axial_rope learns nothing and never starts neutral; pass "
                "rotary_init=None to accept that, or another position_encoding."
            )
        if self.layers is not None:
            self.layers = sorted(set(self.layers))

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> "RotaryPatchConfig":
        """Raises `ValueError` for names that are no fields."""
        known = {field.name for field in fields(cls)}
        if unknown := set(values) - known:
            raise ValueError(f"{sorted(unknown)} are no fields of RotaryPatchConfig; accepted: {sorted(known)}.")
        return cls(**values)


class RotaryAttentionConfig:
    """What a rotated attention module sees as its configuration: all of `base`, but our attention implementation."""

    _attn_implementation = ROTARY_ATTENTION

    def __init__(self, base, layer: int, eager):
        self.base = base
        self.layer = layer
        self.eager = eager

    def __getattr__(self, name: str):
        # Copying and unpickling ask an object without attributes.
        if name == "base" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.base, name)


class _Unrotated:
    """An attention module with its own configuration, for implementations that read their name there."""

    def __init__(self, module: nn.Module):
        self._module = module
        self.config = module.config.base

    def __getattr__(self, name: str):
        return getattr(self._module, name)


class ForwardPass:
    """One forward pass of one tower: its grid, once patches are embedded, then its rotations."""

    def __init__(self, tower: nn.Module):
        self.tower = tower
        self.grid: tuple[int, ...] | None = None
        self.rotations: Sequence[torch.Tensor] | None = None
        self.rotated: list[int] = []


_thread = threading.local()


def _passes() -> tuple[ForwardPass, ...]:
    return getattr(_thread, "passes", ())


def rotary_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    R(p) q and R(p) k (LieRE §4, ComRoPE eq. 3), then the attention that the model is configured with.

    Args:
        query, key, value: (B, H, N, D).

    Raises:
        RuntimeError: if the patched model is not being run, or its tokens are not those that were embedded.
    """
    config, passes = module.config, _passes()
    if not passes or passes[-1].rotations is None:
        raise RuntimeError(
            "A rotated attention module ran outside the forward pass of its vision tower, so the positions of its "
            "tokens are unknown. Call the vision tower (or a model around it), or unpatch the model."
        )
    rotation = passes[-1].rotations[config.layer]
    if rotation.shape[2] != query.shape[2]:
        raise RuntimeError(
            f"Attention sees {query.shape[2]} tokens, but {rotation.shape[2]} were embedded: models that merge or "
            "window tokens cannot be patched."
        )
    passes[-1].rotated.append(config.layer)
    rotation = rotation.to(query.device)
    query, key = _as_laid_out(rotate(query, rotation), query), _as_laid_out(rotate(key, rotation), key)
    implementation = config.base._attn_implementation
    function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, config.eager)
    if implementation not in ("eager", "sdpa", "flex_attention"):
        module = _Unrotated(module)
    return function(module, query, key, value, attention_mask, **kwargs)


def _as_laid_out(states: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """The same numbers in the original's memory order: matrix products round differently in another one."""
    if states.stride() == original.stride():
        return states
    return states.transpose(1, 2).contiguous().transpose(1, 2)


AttentionInterface.register(ROTARY_ATTENTION, rotary_attention_forward)


@dataclass
class Tower:
    """A vision tower that can be patched: the smallest module around a patch embedding and attention modules."""

    name: str
    module: nn.Module
    embeddings: nn.Module
    patch_embedding: nn.Module
    attentions: list[tuple[str, nn.Module]]

    @property
    def is_flexible(self) -> bool:
        """Whether every sample comes with its own grid (`spatial_shapes`, as in SigLIP2)."""
        return self.patch_embedding is self.embeddings

    @property
    def train_grid(self) -> tuple[int, ...]:
        config = self.module.config
        if self.is_flexible:
            return (math.isqrt(config.num_patches),) * 2
        extent = self.patch_embedding.kernel_size
        size = config.image_size
        sizes = (size, size) if isinstance(size, int) else tuple(size)
        sizes = (config.num_frames, *sizes) if len(extent) == 3 else sizes
        return tuple(size // patch for size, patch in zip(sizes, extent))


def find_towers(model: nn.Module) -> list[Tower]:
    """
    All vision towers in a model.

    Raises:
        ValueError: if there is none, with the reason and what there is instead.
    """
    modules = dict(model.named_modules())
    attentions = {name: module for name, module in modules.items() if _uses_interface(module)}
    patch_embeddings = {name: module for name, module in modules.items() if _is_patch_embedding(module)}
    towers = {}
    for name, patch_embedding in patch_embeddings.items():
        path = name.split(".") if name else []
        for depth in reversed(range(len(path))):
            tower_name = ".".join(path[:depth])
            inside = [(n, m) for n, m in attentions.items() if not tower_name or n.startswith(tower_name + ".")]
            if inside:
                embeddings = modules[".".join(path[: depth + 1])]
                if embeddings is patch_embedding and not _takes(patch_embedding, "spatial_shapes"):
                    raise ValueError(
                        f"The patch embedding {name!r} has no module around it that adds class tokens and positions, "
                        "so the tokens that reach attention cannot be told apart."
                    )
                towers.setdefault(
                    tower_name, Tower(tower_name, modules[tower_name], embeddings, patch_embedding, inside)
                )
                break
    if towers:
        return list(towers.values())
    kind = type(model).__name__
    if not patch_embeddings:
        raise ValueError(
            f"{kind} has no patch embedding (a convolution whose kernel is its stride, or a module that takes "
            f"spatial_shapes), so it is no vision transformer; its modules are {_children(model)}."
        )
    candidates = sorted({type(module).__name__ for module in modules.values() if _looks_like_attention(module)})
    raise ValueError(
        f"The attention of {kind} is not routed through transformers' attention interface (ALL_ATTENTION_FUNCTIONS), "
        f"where query and key can be rotated; attention modules found: {candidates or 'none'}, modules: "
        f"{_children(model)}."
    )


def _uses_interface(module: nn.Module) -> bool:
    if not hasattr(module, "config"):
        return False
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _is_patch_embedding(module: nn.Module) -> bool:
    if isinstance(module, (nn.Conv2d, nn.Conv3d)):
        return tuple(module.kernel_size) == tuple(module.stride) and math.prod(module.kernel_size) > 1
    if not _takes(module, "spatial_shapes"):
        return False
    return not any(_uses_interface(inner) for inner in module.modules())


def _takes(module: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(type(module).forward).parameters


def _looks_like_attention(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower() or isinstance(module, nn.MultiheadAttention)


def _children(module: nn.Module) -> str:
    return ", ".join(f"{name} ({type(child).__name__})" for name, child in module.named_children()) or "none"


def projections(attention: nn.Module) -> list[nn.Module]:
    """The query and key projections of an attention module, or the one that makes both."""
    for names in (("q_proj", "k_proj"), ("query", "key"), ("qkv",)):
        found = [getattr(attention, name, None) for name in names]
        if all(isinstance(module, nn.Module) for module in found):
            return found
    return []


def head_shape(attention: nn.Module) -> tuple[int, int]:
    """
    (heads, head_dim) of an attention module.

    Raises:
        ValueError: if they cannot be told, or keys have another number of heads than queries.
    """
    heads = next((getattr(attention, n) for n in ("num_heads", "num_attention_heads") if hasattr(attention, n)), None)
    heads = heads or getattr(attention.config, "num_attention_heads", None)
    widths = {getattr(projection, "out_features", None) for projection in projections(attention)}
    if heads is None or len(widths) != 1 or None in widths:
        raise ValueError(
            f"The heads of {type(attention).__name__} cannot be rotated: {heads} heads, query and key projections of "
            f"widths {sorted(map(str, widths)) or 'unknown'}; one number of heads and equal widths are needed."
        )
    head_dim = next((getattr(attention, n) for n in ("head_dim", "attention_head_size") if hasattr(attention, n)), None)
    return heads, head_dim or widths.pop() // heads


@dataclass
class RotaryPatch:
    """What `unpatch` needs to know of a patched tower, kept on it as `rotary_patch`."""

    config: RotaryPatchConfig
    attention_names: list[str]
    embeddings_name: str
    train_grid: tuple[int, ...]
    coordinates: str
    is_flexible: bool
    interpolates: bool
    handles: list


@dataclass
class Plan:
    """Everything of a patch that can be refused, made before a model is touched."""

    tower: Tower
    attentions: list[tuple[str, nn.Module]]
    config: RotaryPatchConfig
    rotary_config: LieREViTConfig | LieREVideoConfig

    def build_encoding(self) -> RotaryEncoding:
        return build_rotary_encoding(self.rotary_config, len(self.tower.train_grid))


def plan(model: nn.Module, config: RotaryPatchConfig) -> list[Plan]:
    """
    Raises:
        ValueError: if the model is patched already, has nothing to patch, or the configuration does not fit it.
    """
    patched = [name or type(model).__name__ for name, _ in patched_towers(model)]
    if patched:
        raise ValueError(f"{', '.join(patched)} is patched already; call unpatch(model) first.")
    towers = find_towers(model)
    names = [tower.name for tower in towers]
    if config.target is not None:
        towers = [tower for tower in towers if config.target == tower.name]
        if not towers:
            raise ValueError(f"target={config.target!r} matches no vision tower; there are {names}.")
    return [_plan_tower(tower, config) for tower in towers]


def _plan_tower(tower: Tower, config: RotaryPatchConfig) -> Plan:
    available = list(range(len(tower.attentions)))
    layers = available if config.layers is None else config.layers
    if not layers or set(layers) - set(available):
        raise ValueError(
            f"layers={layers} do not match: {tower.name or type(tower.module).__name__} has attention layers "
            f"{[f'{index}: {name}' for index, (name, _) in enumerate(tower.attentions)]}."
        )
    attentions = [tower.attentions[layer] for layer in layers]
    shapes = {head_shape(attention) for _, attention in attentions}
    if len(shapes) != 1:
        raise ValueError(f"The layers have different (heads, head_dim): {sorted(shapes)}; name equal ones in layers.")
    if hasattr(tower.module, "rotary_encoding"):
        raise ValueError(f"{type(tower.module).__name__} has a rotary_encoding of its own; it would be overwritten.")
    if config.keep_absolute != "interpolate":
        _check_table(tower, config)
    heads, head_dim = shapes.pop()
    grid = tower.train_grid
    size = {"image_size": grid[-2:], "patch_size": 1}
    config_class = LieREViTConfig
    if len(grid) == 3:
        config_class = LieREVideoConfig
        size.update(num_frames=grid[0], tubelet_size=1)
    shared = ("position_encoding", "block_size", "share_heads", "share_layers", "coordinates", "rotary_init")
    more = ("rotary_init_scale", "rope_theta", "position_perturbation", "rotate_prefix")
    try:
        rotary_config = config_class(
            hidden_size=heads * head_dim,
            num_attention_heads=heads,
            head_dim=head_dim,
            num_hidden_layers=len(layers),
            **size,
            **{name: getattr(config, name) for name in (*shared, *more)},
        )
    except StrictDataclassError as error:
        raise ValueError(str(error.__cause__ or error)) from error
    return Plan(tower, attentions, config, rotary_config)


def _check_table(tower: Tower, config: RotaryPatchConfig) -> None:
    name = type(tower.module).__name__
    if tower.is_flexible or len(tower.train_grid) == 3:
        raise ValueError(f"keep_absolute={config.keep_absolute!r} is not available for {name}; accepted: interpolate.")
    if position_table(tower.embeddings) is None:
        raise ValueError(f"keep_absolute={config.keep_absolute!r}: {name} has no absolute position table.")


def position_table(embeddings: nn.Module) -> torch.Tensor | None:
    """(entries, hidden_size) of a module's absolute position table, or `None`."""
    for name in ("position_embeddings", "position_embedding"):
        table = getattr(embeddings, name, None)
        if isinstance(table, nn.Embedding):
            return table.weight
        if isinstance(table, torch.Tensor):
            return table.squeeze(0)
    return None


def attach(plans: list[Plan], encodings: list[RotaryEncoding] | None = None) -> None:
    """Put rotations into the towers of `plans`; `encodings` may come from an adapter."""
    for index, planned in enumerate(plans):
        tower = planned.tower
        encoding = planned.build_encoding() if encodings is None else encodings[index]
        # Quantized projections may have no parameters.
        weight = next(planned.attentions[0][1].parameters(), next(tower.module.parameters()))
        if encodings is None and not weight.is_meta:
            encoding.reset_parameters()
        prefix = len(tower.name) + 1 if tower.name else 0
        tower.module.rotary_encoding = encoding.to(weight.device).train(tower.module.training)
        tower.module.rotary_patch = RotaryPatch(
            config=planned.config,
            attention_names=[name[prefix:] for name, _ in planned.attentions],
            embeddings_name=next(n for n, m in tower.module.named_modules() if m is tower.embeddings),
            train_grid=tower.train_grid,
            coordinates=planned.rotary_config.coordinates,
            is_flexible=tower.is_flexible,
            interpolates=_takes(tower.embeddings, "interpolate_pos_encoding"),
            handles=[
                tower.module.register_forward_pre_hook(_enter, prepend=True),
                tower.module.register_forward_hook(_leave, always_call=True),
                tower.embeddings.register_forward_pre_hook(_accept_any_size, with_kwargs=True),
                tower.embeddings.register_forward_hook(_rotations_of_tokens, with_kwargs=True),
            ],
        )
        if tower.module.rotary_patch.interpolates and len(tower.train_grid) == 3:
            tower.embeddings.interpolate_pos_encoding = partial(_interpolate_video_table, tower.embeddings)
        if not tower.is_flexible:
            tower.module.rotary_patch.handles.append(tower.patch_embedding.register_forward_hook(_see_grid))
        for layer, (_, attention) in enumerate(planned.attentions):
            eager = inspect.unwrap(type(attention).forward).__globals__.get("eager_attention_forward")
            attention.config = RotaryAttentionConfig(attention.config, layer, eager or eager_attention_forward)


def detach(tower: nn.Module) -> None:
    """Take everything out of a tower that `attach` put in."""
    for handle in tower.rotary_patch.handles:
        handle.remove()
    vars(tower.get_submodule(tower.rotary_patch.embeddings_name)).pop("interpolate_pos_encoding", None)
    for name in tower.rotary_patch.attention_names:
        attention = tower.get_submodule(name)
        attention.config = attention.config.base
    for module in tower.modules():
        checkpointing = getattr(module, "_gradient_checkpointing_func", None)
        if isinstance(checkpointing, _CheckpointingInPass):
            module._gradient_checkpointing_func = checkpointing.function
    del tower.rotary_encoding, tower.rotary_patch


def patched_towers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of the towers that are patched."""
    for name, module in model.named_modules():
        if isinstance(vars(module).get("rotary_patch"), RotaryPatch):
            yield name, module


class _CheckpointingInPass:
    """Recomputes a checkpointed layer in the forward pass that it belongs to, whichever thread runs the backward."""

    def __init__(self, function):
        self.function = function

    def __call__(self, layer, *args, **kwargs):
        forward_pass = _passes()[-1]

        def layer_in_pass(*inputs, **named_inputs):
            outer = _passes()
            again = ForwardPass(forward_pass.tower)
            again.rotations, again.rotated = inputs[len(args) :], forward_pass.rotated
            _thread.passes = (*outer, again)
            try:
                return layer(*inputs[: len(args)], **named_inputs)
            finally:
                _thread.passes = outer

        # As inputs, because reentrant checkpointing differentiates with respect to nothing else.
        return self.function(layer_in_pass, *args, *forward_pass.rotations, **kwargs)


def _enter(tower: nn.Module, args) -> None:
    if tower.training and not torch.compiler.is_compiling():
        for module in tower.modules():
            checkpointing = getattr(module, "_gradient_checkpointing_func", None)
            if checkpointing is not None and not isinstance(checkpointing, _CheckpointingInPass):
                module._gradient_checkpointing_func = _CheckpointingInPass(checkpointing)
    _thread.passes = (*_passes(), ForwardPass(tower))


def _leave(tower: nn.Module, args, output) -> None:
    passes = _passes()
    if not passes or passes[-1].tower is not tower:
        return
    _thread.passes = passes[:-1]
    if output is None or torch.compiler.is_compiling():
        return
    missing = set(range(len(tower.rotary_patch.attention_names))) - set(passes[-1].rotated)
    if missing:
        names = [tower.rotary_patch.attention_names[layer] for layer in sorted(missing)]
        raise RuntimeError(
            f"{names} ran without rotations: their attention did not go through transformers' attention interface. "
            "Was the configuration or the forward of these modules replaced after patching?"
        )


def _accept_any_size(embeddings: nn.Module, args, kwargs):
    """Make the embeddings interpolate their table, for patched towers of another size than the trained one."""
    passes = _passes()
    if not passes or not passes[-1].tower.rotary_patch.interpolates:
        return None
    pixels = args[0] if args else kwargs["pixel_values"]
    config = passes[-1].tower.config
    trained = (config.image_size,) * 2 if isinstance(config.image_size, int) else tuple(config.image_size)
    if tuple(pixels.shape[-2:]) == trained and (pixels.ndim < 5 or pixels.shape[1] == config.num_frames):
        return None
    return args, {**kwargs, "interpolate_pos_encoding": True}


def _interpolate_video_table(embeddings: nn.Module, tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """(1, prefix + N, hidden_size) table on the grid of the pass, trilinear; transformers' own takes square images."""
    passes = _passes()
    if not passes:
        return type(embeddings).interpolate_pos_encoding(embeddings, tokens, height, width)
    trained, table = passes[-1].tower.rotary_patch.train_grid, position_table(embeddings)
    prefix, patches = table.split([len(table) - math.prod(trained), math.prod(trained)])
    patches = patches.T.unflatten(-1, trained).unsqueeze(0).float()
    resized = nn.functional.interpolate(patches, size=passes[-1].grid, mode="trilinear", align_corners=False)
    return torch.cat([prefix, resized[0].flatten(1).T.to(prefix)]).unsqueeze(0)


def _see_grid(patch_embedding: nn.Module, args, output: torch.Tensor) -> torch.Tensor | None:
    """Read the grid off the embedded patches (B, hidden_size, *grid), and correct the table that is added to them."""
    passes = _passes()
    if not passes:
        return None
    forward_pass = passes[-1]
    patch = forward_pass.tower.rotary_patch
    forward_pass.grid = tuple(output.shape[2:])
    if patch.config.keep_absolute == "interpolate":
        return None
    return output + _table_correction(forward_pass, output)


def _table_correction(forward_pass: ForwardPass, patches: torch.Tensor) -> torch.Tensor:
    """(1, hidden_size, *grid): the table that `keep_absolute` asks for minus the one that the model will add."""
    patch, grid = forward_pass.tower.rotary_patch, forward_pass.grid
    embeddings = forward_pass.tower.get_submodule(patch.embeddings_name)
    table = position_table(embeddings)
    num_trained, num_patches = math.prod(patch.train_grid), math.prod(grid)
    trained = table[-num_trained:]
    if grid == patch.train_grid:
        added = trained
    else:
        tokens = patches.new_zeros(1, len(table) - num_trained + num_patches, table.shape[-1])
        height, width = (size * extent for size, extent in zip(grid, _patch_extent(forward_pass.tower)))
        added = embeddings.interpolate_pos_encoding(tokens, height, width)[0, -num_patches:]
    if patch.config.keep_absolute == "train_size":
        rows, columns = (
            torch.arange(size, device=table.device).clamp(max=limit - 1) for size, limit in zip(grid, patch.train_grid)
        )
        correction = trained.unflatten(0, patch.train_grid)[rows][:, columns].flatten(0, 1) - added
    else:
        weight = patch.config.absolute_weight if patch.config.keep_absolute == "fade" else 0.0
        correction = (weight - 1) * added
    return correction.T.unflatten(-1, grid).unsqueeze(0).to(patches)


def _patch_extent(tower: nn.Module) -> tuple[int, int]:
    size = tower.config.patch_size
    return (size, size) if isinstance(size, int) else tuple(size)


def _rotations_of_tokens(embeddings: nn.Module, args, kwargs, output) -> None:
    """Compute the rotations of all layers, outside any checkpointed layer."""
    passes = _passes()
    if not passes:
        return
    tower = passes[-1].tower
    tokens = output[0] if isinstance(output, tuple) else output
    device = next(tower.rotary_encoding.parameters(), tokens).device
    # Offloaded generators come to the tokens.
    device = tokens.device if device.type == "meta" else device
    if tower.rotary_patch.is_flexible:
        shapes = kwargs["spatial_shapes"] if "spatial_shapes" in kwargs else args[1]
        positions = _flexible_positions(tower, shapes, tokens.shape[1], device)
    else:
        positions = _kept_positions(passes[-1], embeddings, args, kwargs, output, device)
    prefix_length = tokens.shape[1] - positions.shape[-2]
    if prefix_length < 0:
        raise RuntimeError(f"{tokens.shape[1]} tokens were made of {positions.shape[-2]} patches: which is unknown.")
    centre = 0.5 if tower.rotary_patch.config.rotate_prefix else 0.0
    passes[-1].rotations = tower.rotary_encoding(with_prefix(positions, prefix_length, centre))


def _kept_positions(forward_pass: ForwardPass, embeddings, args, kwargs, output, device) -> torch.Tensor:
    """(N, A) coordinates of the patches, or (B, kept, A) where the embeddings pass only some of them on."""
    tower, grid = forward_pass.tower, forward_pass.grid
    patch = tower.rotary_patch
    offsets, dtype = None, working_dtype(device)
    if tower.training and patch.config.position_perturbation:
        offsets = perturbation(grid, patch.config.position_perturbation, device, dtype)
    positions = grid_positions(grid, patch.train_grid, patch.coordinates, offsets, device, dtype)
    num_patches = math.prod(grid)
    if isinstance(output, tuple) and hasattr(embeddings, "random_masking"):
        restore = output[2].to(device)
        kept = int(num_patches * (1 - embeddings.config.mask_ratio))
        return positions[restore.argsort(dim=1)[:, :kept]]
    tokens = output[0] if isinstance(output, tuple) else output
    masked = (
        inspect.signature(type(embeddings).forward).bind(embeddings, *args, **kwargs).arguments.get("bool_masked_pos")
    )
    if masked is not None and tokens.shape[1] < num_patches:
        return positions.expand(len(masked), *positions.shape)[~masked.to(device)].unflatten(0, (len(masked), -1))
    return positions


def _flexible_positions(tower: nn.Module, shapes: torch.Tensor, length: int, device) -> torch.Tensor:
    """(B, length, 2) coordinates for one (height, width) per sample; padding gets coordinate 0."""
    patch = tower.rotary_patch
    samples = []
    for grid in map(tuple, shapes.tolist()):
        positions = grid_positions(grid, patch.train_grid, patch.coordinates, None, device, working_dtype(device))
        samples.append(nn.functional.pad(positions, (0, 0, 0, length - len(positions))))
    return torch.stack(samples)


class RotaryModelMixin:
    """A model class of transformers whose configuration says how it is patched; reloads like any other model."""

    # A generator rounded to bfloat16 turns far patches by several degrees too much.
    _keep_in_fp32_modules_strict = ["rotary_encoding"]

    def __init__(self, config):
        super().__init__(config)
        attach(plan(self, RotaryPatchConfig.from_dict(config.rotary_patch)))

    def initialize_weights(self) -> None:
        super().initialize_weights()
        # Below a tower that is a model of its own, transformers asks that model, which does not know generators. Those
        # that were loaded are marked and left alone.
        for _, tower in patched_towers(self):
            tower.rotary_encoding.reset_parameters()


def _finish_config(config, kwargs: dict, auto_map: dict) -> None:
    """`rotary_patch` in full, checked, and every Auto class in `auto_map`."""
    config.rotary_patch = RotaryPatchConfig.from_dict(config.rotary_patch or {}).to_dict()
    kwargs["auto_map"] = {**auto_map, **(kwargs.get("auto_map") or {})}


@strict
class RotaryCLIPVisionConfig(CLIPVisionConfig):
    r"""
    Configuration of CLIP's vision tower with learned rotations.

    Args:
        rotary_patch (`dict`, *optional*): Fields of [`RotaryPatchConfig`].
    """

    model_type = "rotary_clip_vision_model"
    base_config_key = ""
    rotary_patch: dict | None = None

    _auto_map = {
        "AutoConfig": "modeling_patched.RotaryCLIPVisionConfig",
        "AutoModel": "modeling_patched.RotaryCLIPVisionModel",
    }

    def __post_init__(self, **kwargs):
        _finish_config(self, kwargs, self._auto_map)
        super().__post_init__(**kwargs)


@strict
class RotaryCLIPConfig(CLIPConfig):
    r"""
    Configuration of CLIP with learned rotations in its vision tower.

    Args:
        rotary_patch (`dict`, *optional*): Fields of [`RotaryPatchConfig`].
    """

    model_type = "rotary_clip"
    rotary_patch: dict | None = None

    _auto_map = {
        "AutoConfig": "modeling_patched.RotaryCLIPConfig",
        "AutoModel": "modeling_patched.RotaryCLIPModel",
        "AutoModelForImageClassification": "modeling_patched.RotaryCLIPForImageClassification",
        "AutoModelForZeroShotImageClassification": "modeling_patched.RotaryCLIPModel",
    }

    def __post_init__(self, **kwargs):
        _finish_config(self, kwargs, self._auto_map)
        super().__post_init__(**kwargs)


@strict
class RotaryViTConfig(ViTConfig):
    r"""
    Configuration of ViT with learned rotations.

    Args:
        rotary_patch (`dict`, *optional*): Fields of [`RotaryPatchConfig`].
    """

    model_type = "rotary_vit"
    rotary_patch: dict | None = None

    _auto_map = {
        "AutoConfig": "modeling_patched.RotaryViTConfig",
        "AutoModel": "modeling_patched.RotaryViTModel",
        "AutoModelForImageClassification": "modeling_patched.RotaryViTForImageClassification",
        "AutoModelForMaskedImageModeling": "modeling_patched.RotaryViTForMaskedImageModeling",
    }

    def __post_init__(self, **kwargs):
        _finish_config(self, kwargs, self._auto_map)
        super().__post_init__(**kwargs)


class RotaryCLIPVisionModel(RotaryModelMixin, CLIPVisionModel):
    """[`CLIPVisionModel`] with learned rotations."""

    config: RotaryCLIPVisionConfig
    config_class = RotaryCLIPVisionConfig


class RotaryCLIPVisionModelWithProjection(RotaryModelMixin, CLIPVisionModelWithProjection):
    """[`CLIPVisionModelWithProjection`] with learned rotations."""

    config: RotaryCLIPVisionConfig
    config_class = RotaryCLIPVisionConfig


class RotaryCLIPModel(RotaryModelMixin, CLIPModel):
    """[`CLIPModel`] with learned rotations in its vision tower."""

    config: RotaryCLIPConfig
    config_class = RotaryCLIPConfig


class RotaryCLIPForImageClassification(RotaryModelMixin, CLIPForImageClassification):
    """[`CLIPForImageClassification`] with learned rotations."""

    config: RotaryCLIPConfig
    config_class = RotaryCLIPConfig


class RotaryViTModel(RotaryModelMixin, ViTModel):
    """[`ViTModel`] with learned rotations."""

    config: RotaryViTConfig
    config_class = RotaryViTConfig


class RotaryViTForImageClassification(RotaryModelMixin, ViTForImageClassification):
    """[`ViTForImageClassification`] with learned rotations."""

    config: RotaryViTConfig
    config_class = RotaryViTConfig


class RotaryViTForMaskedImageModeling(RotaryModelMixin, ViTForMaskedImageModeling):
    """[`ViTForMaskedImageModeling`] with learned rotations."""

    config: RotaryViTConfig
    config_class = RotaryViTConfig


COMPLETE_MODELS = {
    CLIPVisionModel: RotaryCLIPVisionModel,
    CLIPVisionModelWithProjection: RotaryCLIPVisionModelWithProjection,
    CLIPModel: RotaryCLIPModel,
    CLIPForImageClassification: RotaryCLIPForImageClassification,
    ViTModel: RotaryViTModel,
    ViTForImageClassification: RotaryViTForImageClassification,
    ViTForMaskedImageModeling: RotaryViTForMaskedImageModeling,
}


# transformers renames the keys of older checkpoints, and of what it saves, by the name of the class.
for plain in (CLIPVisionModel, ViTModel):
    renaming = get_checkpoint_conversion_mapping(plain.__name__)
    if renaming is not None:
        register_checkpoint_conversion_mapping(COMPLETE_MODELS[plain].__name__, renaming, overwrite=True)
