"""
Vision towers inside models of transformers. They are found by what their modules do, never by class name: attention
that uses transformers' attention interface, inside a module with a patch embedding.
"""

import inspect
import math
import re
from dataclasses import dataclass

import torch
from torch import nn

from ..transformer.configuration_liere import pair


# Matches `apply_rotary_pos_emb`, `q_rope`, `rotate_half` and `Sam3ViTRoPEAttention`, but not `properties`.
ROTATING_NAME = re.compile(r"(?:^|_)(?:rope|rotary|rotat)|Ro[Pp][Ee]|Rotary")


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
        """
        Patches of the trained size along each axis: (frames,) rows and columns.

        Raises:
            ValueError: if the configuration of the tower does not name that size.
        """
        config, extent = getattr(self.module, "config", None), getattr(self.patch_embedding, "kernel_size", ())
        needed = ("num_patches",) if self.is_flexible else ("image_size", "num_frames")[: len(extent) - 1]
        missing = [name for name in needed if getattr(config, name, None) is None]
        if missing:
            raise ValueError(
                f"{type(self.module).__name__} has no {' and no '.join(missing)} in its configuration, so the size "
                "that positions refer to is unknown; accepted: models of images (or clips) of one configured size."
            )
        if self.is_flexible:
            return (math.isqrt(config.num_patches),) * 2
        sizes = pair("image_size", config.image_size)
        sizes = (config.num_frames, *sizes) if len(extent) == 3 else sizes
        return tuple(size // patch for size, patch in zip(sizes, extent))


def find_towers(model: nn.Module) -> list[Tower]:
    """
    All vision towers in a model.

    Raises:
        ValueError: if there is none; the message says why, and which modules there are.
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
                if embeddings is patch_embedding and not takes(patch_embedding, "spatial_shapes"):
                    refuse_rotating(modules[tower_name], inside)
                    raise ValueError(
                        f"The patch embedding {name!r} has no module around it that adds class tokens and positions, "
                        "so the tokens that reach attention cannot be told apart."
                    )
                tower = Tower(tower_name, modules[tower_name], embeddings, patch_embedding, inside)
                towers.setdefault(tower_name, tower)
                break
    if towers:
        return list(towers.values())
    kind = type(model).__name__
    if not patch_embeddings:
        raise ValueError(
            f"{kind} has no patch embedding (a convolution whose kernel is its stride, or a module that takes "
            f"spatial_shapes), so it is no vision transformer; its modules are {_children(model)}."
        )
    kinds = {type(module).__name__ for module in modules.values()}
    candidates = sorted(name for name in kinds if "attention" in name.lower())
    raise ValueError(
        f"The attention of {kind} is not routed through transformers' attention interface (ALL_ATTENTION_FUNCTIONS), "
        f"where query and key can be rotated; attention modules found: {candidates or 'none'}, modules: "
        f"{_children(model)}."
    )


def refuse_rotating(tower: nn.Module, attentions: list[tuple[str, nn.Module]]) -> None:
    """
    Raises:
        ValueError: if a tower rotates queries and keys by itself: the forward of its attention names a rotation, or a
            module inside has the name of one or holds frequencies (`inv_freq`). With two rotations R₂(p)R₁(p) about
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
            f"{type(tower).__name__} rotates query and key by itself ({found[0]}), and would rotate them twice. Pass "
            "rotary_init='pretrained' to start at its own rotations. Accepted: models whose attention does not rotate, "
            "such as CLIP, SigLIP, DINOv2 or ViT."
        )


def choose_layers(
    shown: str, module: nn.Module, attentions: list[tuple[str, nn.Module]], layers: list[int] | None
) -> list[int]:
    """
    The indices of the attention modules that are to be patched, all of them for `None`.

    Raises:
        ValueError: if there are no such layers, or the tower called `shown` has a `rotary_encoding` already.
    """
    available = list(range(len(attentions)))
    chosen = available if layers is None else layers
    if not chosen or set(chosen) - set(available):
        raise ValueError(
            f"layers={chosen} do not match: {shown} has attention layers "
            f"{[f'{index}: {name}' for index, (name, _) in enumerate(attentions)]}."
        )
    if hasattr(module, "rotary_encoding"):
        raise ValueError(f"{shown} has a rotary_encoding of its own; it would be overwritten.")
    return chosen


def refuse_other_tokens(tower: Tower, attentions: list[tuple[str, nn.Module]]) -> None:
    """
    Raises:
        ValueError: if some of `attentions` may see other tokens than the embeddings return: if they belong to several
            stacks (of windows, frames or messages), or if the tower learns further tokens, outside of its embeddings,
            or in them under a name that does not say that they come before the patches.
    """
    kind = type(tower.module).__name__
    stacks = {re.sub(r"\d+", "*", name) for name, _ in attentions}
    if len(stacks) > 1:
        raise ValueError(
            f"The attention of {kind} is that of several stacks, {', '.join(sorted(stacks))}, which do not see the "
            "same tokens; accepted: layers of the one that sees all patches."
        )
    for name, parameter in tower.embeddings.named_parameters(recurse=False):
        vectors = parameter.ndim == 3 and parameter.shape[0] == 1
        if vectors and not re.search("class|cls|dist|register|mask|pos", name):
            raise ValueError(
                f"The embeddings of {kind} learn {name} ({parameter.shape[1]} vectors), which may come after the "
                "patches: which token is which patch is unknown; accepted are class, distillation, register and mask "
                "tokens."
            )
    embeddings = set(tower.embeddings.modules())
    for name, module in tower.module.named_modules():
        if isinstance(module, nn.Embedding) and module not in embeddings:
            raise ValueError(
                f"{kind} learns {name} ({module.num_embeddings} vectors) outside the embeddings of its patches, for "
                "queries that join between the layers or images packed into one sequence: which token is which patch "
                "is unknown; accepted: models whose embeddings make all tokens."
            )


def _uses_interface(module: nn.Module) -> bool:
    return hasattr(module, "config") and "ALL_ATTENTION_FUNCTIONS" in names_in_forward(module)


def names_in_forward(module: nn.Module) -> tuple[str, ...]:
    """Names of globals and attributes that the forward of a module's class reads."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return () if code is None else code.co_names


def _is_patch_embedding(module: nn.Module) -> bool:
    if isinstance(module, (nn.Conv2d, nn.Conv3d)):
        return tuple(module.kernel_size) == tuple(module.stride) and math.prod(module.kernel_size) > 1
    if not takes(module, "spatial_shapes"):
        return False
    return not any(_uses_interface(inner) for inner in module.modules())


def takes(module: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(type(module).forward).parameters


def _children(module: nn.Module) -> str:
    return ", ".join(f"{name} ({type(child).__name__})" for name, child in module.named_children()) or "none"


def projections(attention: nn.Module, reads_keys: bool = False) -> list[nn.Module]:
    """
    The query and key projections of an attention module, or its one projection for queries, keys and values.

    Args:
        reads_keys: Whether the keys are those of another module: then there is only the first one.
    """
    for names in (("q_proj", "k_proj"), ("query", "key"), ("qkv",), ("Wqkv",), ("qkv_proj",)):
        found = [getattr(attention, name, None) for name in (names[:1] if reads_keys else names)]
        if all(isinstance(module, nn.Module) for module in found):
            return found
    return []


def device_of(*modules: nn.Module) -> torch.device:
    """
    Where the weights of the first module are, or of the next one if it has none, as quantized modules may; the CPU for
    none. Matrices count before vectors, which some models make on the CPU whatever the default device is.
    """
    found = [parameter for module in modules for parameter in module.parameters()]
    devices = [*(parameter.device for parameter in found if parameter.ndim > 1), *(value.device for value in found)]
    return devices[0] if devices else torch.device("cpu")


def linear_layer(projection: nn.Module) -> nn.Module:
    """The module with the weight of a projection, inside of what peft or the model itself wraps around it."""
    if hasattr(projection, "base_layer"):
        return projection.base_layer
    inner = (module for module in projection.modules() if hasattr(module, "out_features"))
    return projection if hasattr(projection, "weight") else next(inner, projection)


def head_shape(attention: nn.Module) -> tuple[int, int]:
    """
    (heads, head_dim) of an attention module.

    Raises:
        ValueError: if they are unknown, or if keys and queries have different numbers of heads.
    """
    heads = _stated_heads(attention)
    widths = {getattr(projection, "out_features", None) for projection in projections(attention)}
    if heads is None or len(widths) != 1 or None in widths:
        raise ValueError(
            f"The heads of {type(attention).__name__} cannot be rotated: {heads} heads, query and key projections of "
            f"widths {sorted(map(str, widths)) or 'unknown'}; one number of heads and equal widths are needed."
        )
    head_dim = next((getattr(attention, n) for n in ("head_dim", "attention_head_size") if hasattr(attention, n)), None)
    # One projection makes queries, keys and values.
    width = widths.pop() // (3 if len(projections(attention)) == 1 else 1)
    return heads, head_dim or width // heads


def projected_widths(attention: nn.Module, head_dim: int) -> tuple[int | None, list[int | None]]:
    """
    The number of query heads that an attention module states, and the widths of its projections to queries, to keys and
    so on; `None` where they are unknown. One projection makes queries, keys and values, the latter of equal widths.
    """
    widths = [getattr(linear_layer(part), "out_features", None) for part in projections(attention)]
    heads = _stated_heads(attention)
    if len(widths) == 1 and widths[0]:
        of_queries = heads * head_dim if heads else widths[0] // 3
        rest = widths[0] - of_queries
        widths = [of_queries, rest // 2 if rest % 2 == 0 else None]
    return heads, widths


def _stated_heads(attention: nn.Module) -> int | None:
    heads = next((getattr(attention, n) for n in ("num_heads", "num_attention_heads") if hasattr(attention, n)), None)
    return heads or getattr(getattr(attention, "config", None), "num_attention_heads", None)


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
