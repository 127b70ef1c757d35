"""
Vision towers inside Transformers models: attention that uses transformers' attention interface, inside a module with
a patch embedding. They are found by what their modules do, never by class name.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..probing.attention_tower import AttentionTower
from ..probing.module_inspection import names_in_forward, takes


# Matches `apply_rotary_pos_emb`, `q_rope`, `rotate_half` and `Sam3ViTRoPEAttention`, but not `properties`.
ROTATING_NAME = re.compile(r"(?:^|_)(?:rope|rotary|rotat)|Ro[Pp][Ee]|Rotary")


@dataclass
class Tower(AttentionTower):
    """A vision tower that can be patched: the smallest module around a patch embedding and attention modules."""

    embeddings: nn.Module
    patch_embedding: nn.Module

    @property
    def is_flexible(self) -> bool:
        """Whether every sample has its own grid (`spatial_shapes`, as in SigLIP2)."""
        return self.patch_embedding is self.embeddings

    @property
    def train_grid(self) -> tuple[int, ...]:
        """
        Patches of the trained size along each axis: (frames,) rows and columns. Raises `ValueError` if the
        configuration of the tower does not name that size.
        """
        config: Any = getattr(self.module, "config", None)
        extent = getattr(self.patch_embedding, "kernel_size", ())
        needed = ("num_patches",) if self.is_flexible else ("image_size", "num_frames")[: len(extent) - 1]
        missing = [name for name in needed if getattr(config, name, None) is None]
        if missing:
            raise ValueError(
                f"{type(self.module).__name__} has no {' and no '.join(missing)} in its configuration, so the size "
                "that positions refer to is unknown; accepted: models of images (or clips) of one configured size."
            )
        if self.is_flexible:
            return (math.isqrt(config.num_patches),) * 2
        sizes = trained_size(config)
        sizes = (config.num_frames, *sizes) if len(extent) == 3 else sizes
        return tuple(size // patch for size, patch in zip(sizes, extent))


def trained_size(config) -> tuple[int, ...]:
    """Height and width of the images of another model's configuration."""
    size = config.image_size
    return (size, size) if isinstance(size, int) else tuple(size)


def find_towers(model: nn.Module) -> list[Tower]:
    """All vision towers in a model. Raises `ValueError` if there is none, with the reason and a list of the modules."""
    modules = dict(model.named_modules())
    attentions = {name: module for name, module in modules.items() if _uses_interface(module)}
    patch_embeddings = {name: module for name, module in modules.items() if _is_patch_embedding(module)}
    towers: dict[str, Tower] = {}
    for name, patch_embedding in patch_embeddings.items():
        path = name.split(".") if name else []
        for depth in reversed(range(len(path))):
            tower_name = ".".join(path[:depth])
            inside = [(n, m) for n, m in attentions.items() if not tower_name or n.startswith(tower_name + ".")]
            if inside:
                embeddings = modules[".".join(path[: depth + 1])]
                if embeddings is patch_embedding and not takes(patch_embedding, "spatial_shapes"):
                    refuse_rotating(modules[tower_name], inside)
                    raise ValueError(
                        f"The patch embedding {name!r} has no module around it that adds class tokens and positions, "
                        "so which token is which patch is unknown."
                    )
                tower = Tower(tower_name, modules[tower_name], inside, embeddings, patch_embedding)
                towers.setdefault(tower_name, tower)
                break
    if towers:
        return list(towers.values())
    kind = type(model).__name__
    if not patch_embeddings:
        raise ValueError(
            f"{kind} has no patch embedding (a convolution whose kernel is its stride, or a module that takes "
            f"spatial_shapes), so it is not a vision transformer; its modules are {_children(model)}."
        )
    candidates = sorted(name for name in {type(m).__name__ for m in modules.values()} if "attention" in name.lower())
    raise ValueError(
        f"The attention of {kind} is not routed through transformers' attention interface (ALL_ATTENTION_FUNCTIONS), "
        f"where query and key can be rotated; attention modules found: {candidates or 'none'}, modules: "
        f"{_children(model)}."
    )


def refuse_rotating(tower: nn.Module, attentions: list[tuple[str, nn.Module]]) -> None:
    """
    Raises `ValueError` if a tower already rotates queries and keys: the forward of its attention names a rotation, or a
    module inside has the name of one or contains frequencies (`inv_freq`). After two rotations R₂(p)R₁(p) about
    different axes, attention would no longer depend on the difference of positions alone.
    """
    found = [
        f"{type(attention).__name__}.forward uses {name}"
        for _, attention in attentions
        for name in names_in_forward(attention)
        if ROTATING_NAME.search(name)
    ]
    found += [
        f"{name} ({type(module).__name__})"
        for name, module in tower.named_modules()
        if module is not tower
        and (
            ROTATING_NAME.search(name.rpartition(".")[2])
            or ROTATING_NAME.search(type(module).__name__)
            or "inv_freq" in dict(module.named_buffers(recurse=False))
        )
    ]
    if found:
        raise ValueError(
            f"{type(tower).__name__} already rotates query and key ({found[0]}), and would rotate them twice. Pass "
            "rotary_init='pretrained' to start at its rotations. Accepted: models whose attention does not rotate, "
            "such as CLIP, SigLIP, DINOv2 or ViT."
        )


def refuse_other_tokens(tower: Tower, attentions: list[tuple[str, nn.Module]]) -> None:
    """
    Raises `ValueError` if some of `attentions` may see other tokens than the embeddings return: if they belong to
    several stacks (of windows, frames or messages), or if the tower learns further tokens, outside its embeddings or
    inside under a name that does not place them before the patches.
    """
    kind = type(tower.module).__name__
    stacks = {re.sub(r"\d+", "*", name) for name, _ in attentions}
    if len(stacks) > 1:
        raise ValueError(
            f"{kind} has several stacks of attention, {', '.join(sorted(stacks))}, which do not see the same tokens; "
            "accepted: layers of the one that sees all patches."
        )
    for name, parameter in tower.embeddings.named_parameters(recurse=False):
        vectors = parameter.ndim == 3 and parameter.shape[0] == 1
        if vectors and not re.search("class|cls|dist|register|mask|pos", name):
            raise ValueError(
                f"The embeddings of {kind} learn {name} ({parameter.shape[1]} vectors), which may come after the "
                "patches: which token is which patch is unknown; accepted: class, distillation, register, mask tokens."
            )
    embeddings = set(tower.embeddings.modules())
    for name, module in tower.module.named_modules():
        if isinstance(module, nn.Embedding) and module not in embeddings:
            raise ValueError(
                f"{kind} learns {name} ({module.num_embeddings} vectors) outside the embeddings of its patches, so "
                "which token is which patch is unknown; accepted: models whose embeddings make all tokens."
            )


def _uses_interface(module: nn.Module) -> bool:
    return hasattr(module, "config") and "ALL_ATTENTION_FUNCTIONS" in names_in_forward(module)


def _is_patch_embedding(module: nn.Module) -> bool:
    if isinstance(module, (nn.Conv2d, nn.Conv3d)):
        return tuple(module.kernel_size) == tuple(module.stride) and math.prod(module.kernel_size) > 1
    if not takes(module, "spatial_shapes"):
        return False
    return not any(_uses_interface(inner) for inner in module.modules())


def _children(module: nn.Module) -> str:
    return ", ".join(f"{name} ({type(child).__name__})" for name, child in module.named_children()) or "none"


def position_table(embeddings: nn.Module) -> torch.Tensor | None:
    """(entries, hidden_size) of a module's absolute position table, or `None`."""
    for name in ("position_embeddings", "position_embedding"):
        table = getattr(embeddings, name, None)
        if isinstance(table, nn.Embedding):
            return table.weight
        if isinstance(table, torch.Tensor):
            return table.squeeze(0)
    return None


def table_method(embeddings: nn.Module) -> str | None:
    """Name of the method by which a module resizes its table for another grid, or `None`."""
    names = ("interpolate_pos_encoding", "resize_positional_embeddings")
    return next((name for name in names if hasattr(type(embeddings), name)), None)
