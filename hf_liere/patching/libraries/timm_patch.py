"""
Patches of timm's vision transformers: what is known of them, the hooks, and the forward pass. The frequencies of their
rotary modules and the coordinates of their patches are computed here as timm does, and compared with the cos and sin of
a model before it is patched.

Hooks on the patch embedding, on the module that drops patches and on the norm before the blocks find where the tokens
are; the model's methods (`forward_features`, `forward_intermediates` …) call all of them. Attention then passes queries
and keys through `q_norm` and `k_norm`, where hooks rotate them, or through its own rotation, which gets other cos and
sin.
"""

import math
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...encoding.positions import TokenPositions
from ...fast.dispatch import product_dtype, working_dtype
from ...probing.planes import Planes, pair_channels
from ...rotation.rotation import TokenRotation
from ..patched_forward import place_grid, place_samples, prefix_coordinate
from ..tower_patch import Pass
from .library_patch import LibraryPatch, LibraryTower
from .rotations import require_known


# The classes of models, and where each makes tokens of an image.
EMBEDDINGS = {"VisionTransformer": "patch_embed", "Eva": "patch_embed", "NaFlexVit": "embeds"}
# The classes of attention, which pass queries and keys through `q_norm` and `k_norm`.
ATTENTIONS = ("Attention", "AttentionRope", "EvaAttention")
# By the name of the class, the frequencies of rows and of columns, (2, planes) or (2, layers, heads, planes). Planes of
# time, at 0 in an image, do not turn.
SPECTRA: dict[str, Callable[[Any], torch.Tensor]] = {
    "RotaryEmbeddingCat": lambda rope: torch.block_diag(rope.bands, rope.bands),
    "RotaryEmbeddingDinoV3": lambda rope: torch.block_diag(*[2 * math.pi / rope.periods.double()] * 2),
    "RotaryEmbeddingMixed": lambda rope: rope.freqs,
    "RotaryEmbeddingMRope": lambda rope: rope.inv_freq * torch.stack([rope.axis == 1, rope.axis == 2]),
}
DROPS = ("Identity", "NoneType", "PatchDropout", "PatchDropoutWithIndices")


class ImagePass(Pass):
    """
    State of one forward pass. A pass that starts in another method than `forward` is current until the next one.

    Attributes:
        shapes: (B, 2) patches per axis of every sample; `grid` where all samples have the same.
        length: Number of patches of a sample, with padding.
        kept: (B, kept) indices of the patches that are not dropped.
        coordinates: ((B,) N, 2) of the patches, for models that rotate.
        rotations: Those of all attention modules that learn, if queries and keys are rotated here.
    """

    def __init__(self, tower: nn.Module, grid: tuple[int, ...] | None, shapes: Any, length: int):
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
        if patch.train_grid and self.grid is not None and self.kept is None:
            positions = place_grid(tower, self.grid, device, prefix)
        else:
            patches = self._place_patches(tower, device)  # ((B,) N, 2)
            if self.kept is not None:
                patches = patches.expand(len(self.kept), -1, -1)  # (B, N, 2)
                patches = patches.gather(1, self.kept.unsqueeze(-1).expand(-1, -1, patches.shape[-1]))
            self.coordinates = patches
            positions = TokenPositions.from_coordinates(patches, prefix, prefix_coordinate(patch))
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
        shapes = self.shapes.to(device) if self.grid is None else torch.tensor([self.grid], device=device)
        places = place_patches(tower.rope, shapes, self.length)  # (B or 1, N, 2)
        return places if self.grid is None else places[0]


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
    """The pass whose checkpointed blocks a backward pass recomputes: `module` finds it, and its graph keeps it."""


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


@dataclass
class TimmPatch(LibraryPatch["TimmTower"]):
    """The patch of a vision transformer of timm."""

    def add_hooks(self, tower: "TimmTower") -> None:
        module: Any = tower.module
        self.handles.append(tower.embedding.register_forward_hook(partial(begin_pass, module), with_kwargs=True))
        drop = module.patch_drop
        if type(drop).__name__ == "PatchDropout":
            function = sys.modules[type(drop).__module__].patch_dropout_forward
            drop.forward = partial(drop_patches, module, drop, function)
        elif type(drop).__name__ == "PatchDropoutWithIndices":
            self.handles.append(drop.register_forward_hook(partial(record_kept, module)))
        self.handles.append(module.norm_pre.register_forward_hook(partial(place_tokens, module)))
        for layer in module.rotary_encoding.place:
            attention: Any = tower.attentions[layer][1]
            if self.turns:
                self.hook_arguments(attention, partial(turn_attention, module, layer))
                continue
            norms = attention.q_norm, attention.k_norm
            self.hook_arguments(attention, partial(replace_rotation, norms))
            for norm in norms:
                self.handles.append(norm.register_forward_hook(partial(rotate_states, module, layer)))
        for block in module.blocks:
            self.handles.append(block.register_forward_hook(partial(follow_block, module)))
        # timm's optimizers ask for it.
        module.no_weight_decay = partial(without_decay, module)

    def remove_hooks(self, module: nn.Module) -> None:
        super().remove_hooks(module)
        del module.no_weight_decay
        if type(module.patch_drop).__name__ == "PatchDropout":
            vars(module.patch_drop).pop("forward", None)


def without_decay(model: Any) -> set[str]:
    """Names of the parameters that timm's optimizers train without weight decay."""
    names = (name for name, _ in model.rotary_encoding.named_parameters())
    return {*type(model).no_weight_decay(model), *(f"rotary_encoding.{name}" for name in names)}


@dataclass
class TimmTower(LibraryTower):
    """A vision transformer of timm."""

    kinds, noun, library, patch_class = EMBEDDINGS, "vision transformer", "timm", TimmPatch

    @classmethod
    def belongs(cls, model: nn.Module) -> bool:
        """A model of transformers may also contain a vision transformer of timm."""
        modules = list(model.modules())
        return type(model).__module__.startswith("timm.") or (
            any(map(cls.find_kind, modules)) and not any(isinstance(module, PreTrainedModel) for module in modules)
        )

    @staticmethod
    def find_attentions(module: nn.Module, kind: str) -> list[tuple[str, nn.Module]]:
        found, name = [], type(module).__name__
        for index, block in enumerate(module.blocks):
            inside = [
                (f"blocks.{index}.{inner_name}", inner)
                for inner_name, inner in block.named_modules()
                if type(inner).__name__ in ATTENTIONS and type(inner).__module__.startswith("timm.")
            ]
            if not inside:
                others = sorted({type(inner).__name__ for inner in block.modules() if hasattr(inner, "num_heads")})
                raise ValueError(
                    f"blocks.{index} of {name} attends by {', '.join(others) or type(block).__name__}, "
                    f"whose queries and keys cannot be rotated here; accepted: {', '.join(ATTENTIONS)}."
                )
            found += inside
        return found

    @property
    def embedding(self) -> Any:
        return getattr(self.module, EMBEDDINGS[self.kind])

    @property
    def rotates(self) -> bool:
        return getattr(self.module, "rope", None) is not None

    @property
    def train_grid(self) -> tuple[int, int]:
        """Patches per axis of the model's table of positions, or of the images that it is made for."""
        name = "pos_embed_grid_size" if self.kind == "NaFlexVit" else "grid_size"
        grid = getattr(self.embedding, name)
        if grid is None:
            raise ValueError(f"{self.label} was made without a size of images; accepted: models with img_size.")
        return tuple(grid)

    def check_tokens(self) -> None:
        drop: Any = self.module.patch_drop
        if type(drop).__name__ not in DROPS:
            raise ValueError(
                f"{self.label} drops patches by a {type(drop).__name__}; accepted: {', '.join(DROPS[2:])}."
            )
        count: Any = self.module.num_prefix_tokens
        kept = getattr(drop, "num_prefix_tokens", count)
        if kept != count:
            raise ValueError(
                f"{self.label} has {count} tokens before the patches and drops all but {kept} of them "
                "(patch_drop_rate); accepted: patch_drop_rate=0."
            )

    def head_shape(self, layer: int, turns: bool) -> tuple[int, int]:
        attention: Any = self.attentions[layer][1]
        heads = attention.num_heads
        return heads if turns else getattr(attention, "num_kv_heads", heads), attention.head_dim

    def read_start(self) -> Planes:
        grid = (4, 4) if self.kind == "NaFlexVit" else self.train_grid
        pairing = "halves" if getattr(self.attentions[0][1], "rotate_half", False) else "adjacent"
        return read_planes(self.module.rope, pairing, grid, self.label)


def place_patches(rope: Any, shapes: torch.Tensor, length: int) -> torch.Tensor:
    """
    (B, N, 2) coordinates of patches in raster order, N = `length` with padding, whose coordinates are arbitrary, from
    (B, 2) patches per axis; in the order of the axes of the frequencies of `rope`, one of the classes in `SPECTRA`.
    """
    dtype = working_dtype(shapes.device)
    index = torch.arange(length, device=shapes.device)  # (N,)
    columns, sizes = shapes[:, 1:], shapes.unsqueeze(1).to(dtype)  # (B, 1), (B, 1, 2)
    places = torch.stack([index // columns, index % columns], dim=-1).to(dtype)  # (B, N, 2)
    is_dino = type(rope).__name__ == "RotaryEmbeddingDinoV3"
    kind, offset = getattr(rope, "grid_type", "centered" if is_dino else "index"), getattr(rope, "grid_offset", 0.0)
    if kind == "centered":
        norm = rope.normalize_coords
        extents = sizes if norm == "separate" else getattr(sizes, f"a{norm}")(-1, keepdim=True)  # (B, 1, 1 or 2)
        places = (places + 0.5 + offset) / extents
    elif kind == "pixel":
        places = places * 2 / (sizes - 1).clamp(min=1) - 1
    else:
        places = places + offset
    if getattr(rope, "ref_feat_shape", None) is not None:
        places = places / sizes * sizes.new_tensor(rope.ref_feat_shape)
    places = 2 * places - 1 if kind == "centered" else places
    return places.flip(-1) if rope.grid_indexing == "xy" else places


@torch.no_grad()
def read_planes(rope: nn.Module, pairing: str, grid: tuple[int, int], label: str) -> Planes:
    """
    The planes of a rotary module, whose cos and sin for the grid of its model and for another one were compared with
    these. Raises `ValueError` if the module is of an unknown class, draws random coordinates, or computes other
    rotations.
    """
    name = type(rope).__name__
    module: Any = rope
    if name not in SPECTRA or not type(rope).__module__.startswith("timm."):
        raise ValueError(f"{label} rotates by a {name}; accepted: {', '.join(SPECTRA)}.")
    # What timm multiplies coordinates by, or adds to them, in training.
    neutral = {"shift": 0, "jitter": 1, "rescale": 1}
    drawn = {part: getattr(module, f"{part}_coords", None) for part in neutral}
    if any(value not in (None, neutral[part]) for part, value in drawn.items()):
        given, accepted = (
            ", ".join(f"rope_{part}_coords={value}" for part, value in each.items()) for each in (drawn, neutral)
        )
        raise ValueError(f"{label} draws random coordinates in training, {given}; accepted: {accepted}.")
    values, cached = SPECTRA[name](module), getattr(module, "feat_shape", None)
    values = values if values.ndim == 4 else values[:, None, None]  # (2, layers or 1, heads or 1, planes)
    planes = Planes(values, pair_channels(pairing, values.shape[-1]))
    for shape in [tuple(cached)] if cached is not None else [grid, (2, 5)]:
        sin, cos = module.get_embed(shape=shape).chunk(2, dim=-1)  # ((layers, heads,) N, D) each
        places = place_patches(module, torch.tensor([shape], device=cos.device), math.prod(shape))[0]  # (N, 2)
        require_known((cos, sin), planes, places, f"{label}: {name}", "timm")
    return planes
