"""Patches of timm's vision transformers: the plan, which is checked before the model is changed, and its hooks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..models.encoding.encoding_traits import rotary_traits
from ..models.encoding.rotary_embedding import LieRotaryEmbedding
from ..models.patched.rotary_patch import RotaryPatchConfig
from ..models.patched.tower_patch import TowerPlan, choose_target
from ..models.patched.vision_patch import make_tower_config
from ..models.probing.attention_tower import AttentionTower
from ..models.probing.module_inspection import forward_arguments
from .checks import LibraryPatch, build_from_grid, check_start
from .families import find_kind
from .planes import ADJACENT, HALVES
from .rotations import PretrainedFrequencies, StateRotations
from .timm_forward import (
    begin_batch,
    begin_image,
    carry_indices,
    end_pass,
    keep_passes,
    place_tokens,
    record_kept,
    replace_rotation,
    rotate_states,
    take_indices,
    turn_attention,
)
from .timm_rope import find_table, read_spectrum


# The classes of models, and where each makes tokens of an image.
EMBEDDINGS = {"VisionTransformer": "patch_embed", "Eva": "patch_embed", "NaFlexVit": "embeds"}
# The classes of attention, which pass queries and keys through `q_norm` and `k_norm`.
ATTENTIONS = ("Attention", "AttentionRope", "EvaAttention")
DROPS = ("Identity", "NoneType", "PatchDropout", "PatchDropoutWithIndices")


@dataclass
class TimmTower(AttentionTower):
    """A vision transformer of timm; `kind` is the name of its class in `EMBEDDINGS`."""

    kind: str

    @property
    def embedding(self) -> Any:
        return getattr(self.module, EMBEDDINGS[self.kind])

    @property
    def train_grid(self) -> tuple[int, int]:
        """
        Patches per axis of the model's table of positions, or of the images that it is made for.

        Raises:
            ValueError: if it has none.
        """
        name = "pos_embed_grid_size" if self.kind == "NaFlexVit" else "grid_size"
        grid = getattr(self.embedding, name)
        if grid is None:
            raise ValueError(f"{self.label} was made without a size of images; accepted: models with img_size.")
        return tuple(grid)


@dataclass
class TimmPatch(LibraryPatch[TimmTower]):
    """
    The patch of a vision transformer of timm.

    Attributes:
        turns: Whether frequencies are learned, so that the model's own rotation is turned further and not replaced.
    """

    turns: bool

    def add_hooks(self, tower: TimmTower) -> None:
        module: Any = tower.module
        if tower.kind == "NaFlexVit":
            hook: Any = partial(begin_batch, module)
            self.handles.append(tower.embedding.register_forward_hook(hook, with_kwargs=True))
        else:
            self.handles.append(tower.embedding.register_forward_hook(partial(begin_image, module)))
        drop = module.patch_drop
        if type(drop).__name__ == "PatchDropout":
            self.handles.append(drop.register_forward_pre_hook(partial(carry_indices, module)))
            self.handles.append(drop.register_forward_hook(partial(take_indices, module)))
        elif type(drop).__name__ == "PatchDropoutWithIndices":
            self.handles.append(drop.register_forward_hook(partial(record_kept, module)))
        self.handles.append(module.register_forward_hook(end_pass, always_call=True))
        self.handles.append(module.norm_pre.register_forward_hook(partial(place_tokens, module)))
        for layer, (_, attention) in enumerate(tower.attentions):
            if layer in module.rotary_encoding.place:
                self._hook_attention(module, layer, attention)
        keep_passes(module)
        # timm's optimizers ask for it.
        module.no_weight_decay = partial(without_decay, module)

    def _hook_attention(self, module: nn.Module, layer: int, attention: Any) -> None:
        names, norms = tuple(forward_arguments(attention)), (attention.q_norm, attention.k_norm)
        hook = partial(turn_attention, module, layer, names) if self.turns else partial(replace_rotation, norms, names)
        self.handles.append(attention.register_forward_pre_hook(hook, with_kwargs=True))
        for norm in () if self.turns else norms:
            self.handles.append(norm.register_forward_hook(partial(rotate_states, module, layer)))

    def remove_hooks(self, module: nn.Module) -> None:
        super().remove_hooks(module)
        del module.no_weight_decay


def without_decay(model: Any) -> set[str]:
    """Names of the parameters that timm's optimizers train without weight decay."""
    names = (name for name, _ in model.rotary_encoding.named_parameters())
    return {*type(model).no_weight_decay(model), *(f"rotary_encoding.{name}" for name in names)}


def is_timm_model(model: nn.Module) -> bool:
    """Whether a model is of timm, or contains a vision transformer of timm and no model of transformers."""
    if type(model).__module__.startswith("timm."):
        return True
    modules = list(model.modules())
    return any(_find_kind(module) for module in modules) and not any(
        isinstance(module, PreTrainedModel) for module in modules
    )


def _find_kind(module: nn.Module) -> str | None:
    is_timm = any(kind.__module__.startswith("timm.") for kind in type(module).__mro__)
    return find_kind(module, EMBEDDINGS) if is_timm else None


def plan_timm(model: nn.Module, config: RotaryPatchConfig) -> list[TowerPlan[TimmTower]]:
    """
    Check a configuration against a model of timm, before the model is changed.

    Raises:
        ValueError: if the model has no vision transformer that can be patched, or the configuration does not fit it.
    """
    towers = []
    for name, module in model.named_modules():
        kind = _find_kind(module)
        if kind is not None:
            attentions = [(f"{name}.{inner}".lstrip("."), one) for inner, one in _find_attentions(module)]
            towers.append(TimmTower(name, module, attentions, kind))
    if not towers:
        raise ValueError(
            f"{type(model).__name__} is not a vision transformer of timm whose rotations are known; accepted: "
            f"{', '.join(EMBEDDINGS)}."
        )
    return [_plan_tower(tower, config) for tower in choose_target(towers, config.target, "vision transformer")]


def _find_attentions(model: Any) -> list[tuple[str, nn.Module]]:
    """
    (name, module) of the attention modules.

    Raises:
        ValueError: if a block has none that is known.
    """
    found = []
    for index, block in enumerate(model.blocks):
        inside = [
            (f"blocks.{index}.{name}", module)
            for name, module in block.named_modules()
            if type(module).__name__ in ATTENTIONS and type(module).__module__.startswith("timm.")
        ]
        if not inside:
            others = sorted({type(module).__name__ for module in block.modules() if hasattr(module, "num_heads")})
            raise ValueError(
                f"blocks.{index} of {type(model).__name__} attends by {', '.join(others) or type(block).__name__}, "
                f"whose queries and keys cannot be rotated here; accepted: {', '.join(ATTENTIONS)}."
            )
        found += inside
    return found


def _plan_tower(tower: TimmTower, config: RotaryPatchConfig) -> TowerPlan[TimmTower]:
    model: Any = tower.module
    rope = getattr(model, "rope", None)
    layers = check_start(tower, config, rope is not None)
    turns = config.rotary_init == "pretrained" and rotary_traits(config).pretrained == "planes"
    _check_drop(tower)
    heads, head_dim = _head_shape(tower, layers, needs_keys=not turns)
    patch = TimmPatch(config, tower.attention_names(layers), heads, head_dim, turns)
    if rope is None:
        patch.train_grid = tower.train_grid
        rotary_config = make_tower_config(config, patch.train_grid, len(layers), heads, head_dim)
        patch.coordinates = str(rotary_config.coordinates)
        build: Callable[[], nn.Module] = partial(build_from_grid, rotary_config, config, heads, layers)
    else:
        grid = (4, 4) if tower.kind == "NaFlexVit" else tower.train_grid
        half = bool(getattr(tower.attentions[0][1], "rotate_half", False))
        spectrum = read_spectrum(rope, half, grid, tower.label)
        table, pairing = find_table(spectrum), HALVES if half else ADJACENT
        patch.frequencies = table.frequencies if table is not None else ()
        if not turns:
            build = partial(_build_blocks, spectrum, layers, config, patch, pairing, tower.label)
        elif table is None:
            raise ValueError(
                f"{tower.label} learns the frequencies of every layer and head already: train rope.freqs, or pass "
                "position_encoding='liere', whose blocks start there."
            )
        else:
            build = partial(PretrainedFrequencies, table, layers, config, pairing)
    build()
    return TowerPlan(tower, patch, build)


def _head_shape(tower: TimmTower, layers: list[int], needs_keys: bool) -> tuple[int, int]:
    """
    (heads, head_dim) of queries, or of keys if blocks rotate them.

    Raises:
        ValueError: if they differ between the layers.
    """
    chosen: list[Any] = [tower.attentions[layer][1] for layer in layers]
    shapes = {
        (getattr(one, "num_kv_heads", one.num_heads) if needs_keys else one.num_heads, one.head_dim) for one in chosen
    }
    if len(shapes) != 1:
        raise ValueError(
            f"The layers of {tower.label} have different (heads, head_dim), {sorted(shapes)}: name equal ones in "
            "layers."
        )
    return shapes.pop()


def _check_drop(tower: TimmTower) -> None:
    drop: Any = tower.module.patch_drop
    if type(drop).__name__ not in DROPS:
        raise ValueError(f"{tower.label} drops patches by a {type(drop).__name__}; accepted: {', '.join(DROPS[2:])}.")
    prefix = getattr(drop, "num_prefix_tokens", tower.module.num_prefix_tokens)
    if prefix != tower.module.num_prefix_tokens:
        raise ValueError(
            f"{tower.label} has {tower.module.num_prefix_tokens} tokens before the patches and drops all but {prefix} "
            "of them (patch_drop_rate); accepted: patch_drop_rate=0."
        )


def _build_blocks(
    spectrum: torch.Tensor, layers: list[int], config: RotaryPatchConfig, patch: TimmPatch, pairing: str, label: str
) -> StateRotations:
    """Blocks of the encoding that `config` names, which start as the planes of the pretrained rotation."""
    if spectrum.shape[1] > 1:
        spectrum = spectrum[:, layers]  # (2, layers, heads, planes)
    for shared, size in (("share_layers", spectrum.shape[1]), ("share_heads", spectrum.shape[2])):
        if getattr(config, shared) and size > 1:
            raise ValueError(f"{shared}=True: the {shared[6:]} of {label} rotate with different frequencies.")
    rotary = LieRotaryEmbedding(
        patch.heads,
        patch.head_dim,
        len(spectrum),
        config.position_encoding,
        config.block_size,
        num_layers=len(layers),
        frequencies=spectrum.cpu(),
        pairing=pairing,
        share_heads=config.share_heads,
        share_layers=config.share_layers,
        relative_axis=config.relative_axis,
    )
    order = None if rotary.order is None else rotary.order.unsqueeze(0)
    return StateRotations(rotary.encoding, config, patch.heads, layers, order)
