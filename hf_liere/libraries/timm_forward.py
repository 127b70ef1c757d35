"""
The forward pass of a patched vision transformer of timm.

Hooks on the patch embedding, on the module that drops patches and on the norm before the blocks find where the tokens
are; the model's methods (`forward_features`, `forward_intermediates` …) call all of them. Attention then passes queries
and keys through `q_norm` and `k_norm`, where hooks rotate them, or through its own rotation, which gets other cos and
sin.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..models.encoding.positions import TokenPositions
from ..models.encoding.rotary_fields import rotated_prefix
from ..models.fast.dispatch import product_dtype
from ..models.patched.patched_forward import place_grid, place_samples
from ..models.patched.tower_patch import Pass
from ..models.rotation.rotation import TokenRotation
from .timm_rope import place_patches


class ImagePass(Pass):
    """
    One forward pass of a model; one through its other methods than `forward` is known until the next one.

    Attributes:
        shapes: (B, 2) patches per axis of every sample; `grid` where all samples have the same.
        length: Number of patches of a sample, with padding.
        kept: (B, kept) indices of the patches that are not dropped.
        coordinates: ((B,) N, 2) of the patches, for models that rotate.
        rotations: Those of all attention modules that learn, if queries and keys are rotated here.
    """

    def __init__(self, tower: nn.Module, grid: tuple[int, ...] | None, shapes: torch.Tensor | None, length: int):
        # It may outlive the model.
        super().__init__(weakref.ref(tower))
        self.grid, self.shapes, self.length = grid, shapes, length
        self.kept: torch.Tensor | None = None
        self.coordinates: torch.Tensor | None = None
        self.rotations: Sequence[TokenRotation] = ()

    def begin(self) -> None:
        self.end()
        super().begin()

    def place(self, tower: Any, tokens: torch.Tensor) -> None:
        """Find the positions of (B, prefix + patches, C) tokens, outside of checkpointed blocks."""
        patch, prefix, device = tower.rotary_patch, tower.num_prefix_tokens, tokens.device
        centre = rotated_prefix(patch) if patch.config.rotate_prefix else 0.0
        if patch.train_grid and self.grid is not None and self.kept is None:
            positions = place_grid(tower, self.grid, device, prefix, centre)
        else:
            patches = self._place_patches(tower, device)  # ((B,) N, 2)
            if self.kept is not None:
                patches = patches.expand(len(self.kept), -1, -1)  # (B, N, 2)
                patches = patches.gather(1, self.kept.unsqueeze(-1).expand(-1, -1, patches.shape[-1]))
            self.coordinates = patches
            positions = TokenPositions.from_coordinates(patches, prefix, centre)
        if positions.shape[-2] != tokens.shape[1]:
            raise RuntimeError(
                f"{type(tower).__name__} has {tokens.shape[1]} tokens, but the positions of {positions.shape[-2]} are "
                "known: its embeddings were replaced after it was patched?"
            )
        if not patch.turns:
            self.rotations = tower.rotary_encoding(None, positions, product_dtype(tokens))

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


def begin_pass(tower: nn.Module, embedding: Any, args: tuple, kwargs: dict, output: Any) -> None:
    """Forward hook of the module that makes tokens of images: a grid for all of them, or one for each."""
    places = kwargs.get("patch_coord")  # (B, N, 2) of a NaFlexVit
    if places is not None:
        ImagePass(tower, None, places.amax(dim=1) + 1, places.shape[1]).begin()
        return
    if isinstance(output, tuple):
        grid = output[1]
    else:
        grid = output.shape[1:3] if output.ndim == 4 else embedding.dynamic_feat_size(args[0].shape[-2:])
    ImagePass(tower, tuple(grid), None, math.prod(grid)).begin()


def record_kept(tower: nn.Module, module: nn.Module, args: tuple, output: tuple) -> None:
    """Forward hook of a module that drops patches and returns the indices of the others."""
    find_pass(tower).kept = output[1]


def drop_patches(tower: nn.Module, module: Any, function: Callable, tokens: torch.Tensor) -> torch.Tensor:
    """The forward of a module that drops patches by a function of timm, and keeps no indices of the others."""
    options = module.prob, module.num_prefix_tokens, module.ordered, module.training
    tokens, find_pass(tower).kept = function(tokens, *options)
    return tokens


def place_tokens(tower: nn.Module, norm: nn.Module, args: tuple, output: torch.Tensor) -> None:
    """Forward hook of the norm before the blocks."""
    find_pass(tower).place(tower, output)


def end_pass(tower: nn.Module, args: tuple, output: Any) -> None:
    """Forward hook of a model, also called when it fails."""
    ImagePass.end()


def find_pass(tower: nn.Module) -> ImagePass:
    """The pass of a model that runs in this thread. Raises `RuntimeError` if none does."""
    current = ImagePass.current()
    if current is None and (returned := ReturnedPass.current()) is not None:
        current = returned.module()
    if current is None or current.module() is not tower:
        raise RuntimeError(
            f"A part of {type(tower).__name__} ran outside of it, so the positions of its tokens are unknown. Call the "
            "model, or unpatch it."
        )
    return current


def turn_attention(tower: Any, layer: int, attention: nn.Module, options: dict) -> None:
    """Turns the rotation among the arguments of an attention module to the learned frequencies."""
    places = find_pass(tower).coordinates  # ((B,) N, 2)
    assert places is not None, "the model rotates"
    sin, cos = options["rope"].chunk(2, dim=-1)  # ((B, 1,) N, D) each
    places = places.unsqueeze(1) if cos.ndim == 4 else places
    cos, sin = tower.rotary_encoding(layer, (cos, sin), places)
    options["rope"] = torch.cat([sin, cos], dim=-1)


def replace_rotation(norms: tuple[nn.Module, nn.Module], attention: Any, options: dict) -> None:
    """Takes the rotation from the arguments of an attention module, which is rotated behind these norms."""
    if attention.q_norm is not norms[0] or attention.k_norm is not norms[1]:
        raise RuntimeError(
            f"q_norm or k_norm of {type(attention).__name__} was replaced after the model was patched, so queries and "
            "keys would not be rotated: unpatch the model before."
        )
    if "rope" in options:
        options["rope"] = None


def rotate_states(tower: Any, layer: int, norm: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
    """Forward hook of `q_norm` or `k_norm`: R(p) of (B, H, N, D) queries or keys."""
    encoding = tower.rotary_encoding
    rotation = find_pass(tower).rotations[encoding.place[layer]].to(output.device)
    rotated: torch.Tensor = encoding.rotate(rotation, output, True)
    return rotated


class ReturnedPass(Pass):
    """In a backward pass, the one whose blocks are computed again: `module` finds it, and its graph keeps it."""


def follow_block(tower: Any, block: nn.Module, args: tuple, output: torch.Tensor) -> None:
    """
    Forward hook of a block. When the gradient of its output arrives, and before a checkpointed block is computed again,
    its positions are those of this pass. Graphs recompute operations, and call no hook.
    """
    if tower.grad_checkpointing and output.requires_grad and not torch.compiler.is_compiling():
        output.register_hook(partial(_return_to_pass, find_pass(tower)))


def _return_to_pass(image: ImagePass, gradient: torch.Tensor) -> None:
    ImagePass.end()
    ReturnedPass.end()
    ReturnedPass(weakref.ref(image)).begin()
