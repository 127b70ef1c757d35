"""
The forward pass of a patched vision transformer of timm.

Hooks on the patch embedding, on the module that drops patches and on the norm before the blocks find where the tokens
are; the model's methods (`forward_features`, `forward_intermediates` …) call all of them. Attention then passes queries
and keys through `q_norm` and `k_norm`, where hooks rotate them, or through its own rotation, which gets other cos and
sin.
"""

import weakref
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
import wrapt
from torch import nn

from ..models.encoding.encoding_traits import rotated_prefix
from ..models.encoding.positions import TokenPositions
from ..models.patched.patched_forward import place_grid, place_samples
from ..models.patched.tower_patch import thread
from ..models.rotation.dispatch import product_dtype
from .timm_rope import place_patches


# A base in which half types represent the digits of indices exactly.
BASE = 256


class ImagePass:
    """
    One forward pass, from the patches to the last attention module; it belongs to its thread.

    Attributes:
        shapes: (B, 2) patches per axis of every sample; `grid` where all samples have the same.
        length: Number of patches of a sample, with padding.
        kept: (B, kept) indices of the patches that are not dropped.
        coordinates: ((B,) N, 2) of the patches, for models that rotate.
        positions: Those of all tokens.
        rotation, pending: The rotation of the attention module that runs, and which of its states are not rotated yet.
    """

    def __init__(self, tower: nn.Module, grid: tuple[int, ...] | None, shapes: torch.Tensor | None, length: int):
        self.tower = weakref.ref(tower)
        self.grid, self.shapes, self.length = grid, shapes, length
        self.kept: torch.Tensor | None = None
        self.coordinates: torch.Tensor | None = None
        self.positions: TokenPositions | None = None
        self.rotation: Any = None
        self.pending: set[str] = set()

    def place(self, tower: Any, tokens: torch.Tensor) -> None:
        """Find the positions of (B, prefix + patches, C) tokens."""
        patch, prefix, device = tower.rotary_patch, tower.num_prefix_tokens, tokens.device
        centre = rotated_prefix(patch) if patch.config.rotate_prefix else 0.0
        if patch.train_grid and self.grid is not None and self.kept is None:
            self.positions = place_grid(tower, self.grid, device, prefix, centre)
        else:
            patches = self._place_patches(tower, device)  # ((B,) N, 2)
            if self.kept is not None:
                patches = patches.expand(len(self.kept), -1, -1)  # (B, N, 2)
                patches = patches.gather(1, self.kept.unsqueeze(-1).expand(-1, -1, patches.shape[-1]))
            self.coordinates = patches
            self.positions = TokenPositions.from_coordinates(patches, prefix, centre)
        if self.positions.shape[-2] != tokens.shape[1]:
            raise RuntimeError(
                f"{type(tower).__name__} has {tokens.shape[1]} tokens, but the positions of {self.positions.shape[-2]} "
                "are known: its embeddings were replaced after it was patched?"
            )

    def _place_patches(self, tower: Any, device: torch.device) -> torch.Tensor:
        """((B,) N, 2) coordinates of all patches."""
        if tower.rotary_patch.train_grid:
            if self.grid is not None:
                return place_grid(tower, self.grid, device).coordinates
            return place_samples(tower, self.shapes, self.length, device)
        if self.grid is not None:
            return place_patches(tower.rope, torch.tensor([self.grid], device=device), self.length)[0]
        assert self.shapes is not None, "a pass has a grid or shapes"
        return place_patches(tower.rope, self.shapes.to(device), self.length)


def begin_image(tower: nn.Module, embedding: Any, args: tuple, output: torch.Tensor) -> None:
    """Forward hook of a patch embedding."""
    grid = output.shape[1:3] if output.ndim == 4 else embedding.dynamic_feat_size(args[0].shape[-2:])
    thread.image_pass = ImagePass(tower, tuple(grid), None, grid[0] * grid[1])


def begin_batch(tower: Any, embedding: nn.Module, args: tuple, kwargs: dict, output: tuple) -> None:
    """Forward hook of the embeddings of a NaFlexVit: a grid of its own for every sample, or one for all."""
    tokens, grid = output
    places = kwargs.get("patch_coord")  # (B, N, 2)
    shapes = None if places is None else places.amax(dim=1) + 1
    length = tokens.shape[1] - tower.num_prefix_tokens
    thread.image_pass = ImagePass(tower, tuple(grid) if shapes is None else None, shapes, length)


def record_kept(tower: nn.Module, module: nn.Module, args: tuple, output: tuple) -> None:
    """Forward hook of a module that drops patches and returns the indices of the others."""
    find_pass(tower).kept = output[1]


def carry_indices(tower: Any, module: Any, args: tuple) -> tuple | None:
    """Forward pre-hook of a module that drops patches and returns no indices: they travel behind the channels."""
    if not module.training or not module.prob:
        return None
    tokens = args[0]  # (B, prefix + N, C)
    index = torch.arange(tokens.shape[1], device=tokens.device) - tower.num_prefix_tokens
    digits = torch.stack([index // BASE, index % BASE], dim=-1).to(tokens.dtype)  # (prefix + N, 2)
    return (torch.cat([tokens, digits.expand(len(tokens), -1, -1)], dim=-1),)


def take_indices(tower: Any, module: Any, args: tuple, output: torch.Tensor) -> torch.Tensor | None:
    """Forward hook of the same module: takes them off."""
    if not module.training or not module.prob:
        return None
    high, low = output[:, tower.num_prefix_tokens :, -2:].long().unbind(-1)  # (B, kept) each
    find_pass(tower).kept = high * BASE + low
    return output[..., :-2].contiguous()


def place_tokens(tower: nn.Module, norm: nn.Module, args: tuple, output: torch.Tensor) -> None:
    """Forward hook of the norm before the blocks."""
    find_pass(tower).place(tower, output)


def find_pass(tower: nn.Module) -> ImagePass:
    """
    The pass of a model that runs in this thread.

    Raises:
        RuntimeError: if none does.
    """
    current = getattr(thread, "image_pass", None)
    if current is None or current.tower() is not tower:
        raise RuntimeError(
            f"A part of {type(tower).__name__} ran outside of it, so the positions of its tokens are unknown. Call the "
            "model, or unpatch it."
        )
    return current


def prepare_attention(
    tower: Any, layer: int, names: tuple[str, ...], attention: nn.Module, args: tuple, kwargs: dict
) -> tuple[tuple, dict]:
    """Forward pre-hook of an attention module whose arguments have these names."""
    patch, options = tower.rotary_patch, {**dict(zip(names, args)), **kwargs}
    current, rope = find_pass(tower), options.get("rope")
    if patch.turns:
        places = current.coordinates  # ((B,) N, 2)
        assert rope is not None and places is not None, "the model rotates"
        sin, cos = rope.chunk(2, dim=-1)  # ((B, 1,) N, D) each
        cos, sin = tower.rotary_encoding(layer, (cos, sin), places.unsqueeze(1) if rope.ndim == 4 else places)
        options["rope"] = torch.cat([sin, cos], dim=-1)
        return tuple(options.pop(name) for name in names[: len(args)]), options
    if rope is not None:
        options["rope"] = None
    current.rotation, current.pending = None, {"query", "key"}
    return tuple(options.pop(name) for name in names[: len(args)]), options


def rotate_states(
    tower: Any, layer: int, part: str, norm: nn.Module, args: tuple, output: torch.Tensor
) -> torch.Tensor:
    """Forward hook of `q_norm` or `k_norm`: R(p) of (B, H, N, D) queries or keys."""
    current = find_pass(tower)
    if current.rotation is None:
        rotation = tower.rotary_encoding(layer, current.positions, product_dtype(output))
        current.rotation = rotation.to(output.device)
    current.pending.discard(part)
    return tower.rotary_encoding.rotate(current.rotation, output, True)


def finish_attention(tower: Any, layer: int, attention: nn.Module, args: tuple, output: Any) -> None:
    """Forward hook of an attention module, also called when it fails."""
    current = getattr(thread, "image_pass", None)
    if current is None:
        return
    pending, current.pending, current.rotation = current.pending, set(), None
    if output is not None and pending:
        raise RuntimeError(
            f"{type(attention).__name__} of layer {layer} did not call {sorted(pending)} norms, so these are not "
            "rotated: they were replaced after the model was patched?"
        )


class InPass:
    """A part of a model that is recomputed in the backward pass, with the positions of its forward pass."""

    def __init__(self, function: Callable, current: ImagePass):
        self.function, self.current = function, current

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outer, thread.image_pass = getattr(thread, "image_pass", None), self.current
        try:
            return self.function(*args, **kwargs)
        finally:
            thread.image_pass = outer


def _checkpoint(wrapped: Callable, _: Any, args: tuple, kwargs: dict) -> Any:
    """Wraps timm's `checkpoint(function, …)` and `checkpoint_seq(functions, …)`."""
    current = getattr(thread, "image_pass", None)
    if current is None:
        return wrapped(*args, **kwargs)
    given, *inputs = args
    if isinstance(given, nn.Sequential):
        return wrapped([InPass(part, current) for part in given], *inputs, **kwargs)
    return wrapped(InPass(given, current), *inputs, **kwargs)


def _guard(names: tuple[str, ...], module: ModuleType) -> None:
    """Install the wrappers once a module of timm is imported."""
    for name in names:
        wrapt.wrap_function_wrapper(module, name, _checkpoint)


for _name, _functions in (
    ("vision_transformer", ("checkpoint", "checkpoint_seq")),
    ("eva", ("checkpoint",)),
    ("naflexvit", ("checkpoint",)),
):
    wrapt.register_post_import_hook(partial(_guard, _functions), f"timm.models.{_name}")
