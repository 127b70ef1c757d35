"""Patches of timm's vision transformers: what is known of them, and the hooks."""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..models.probing.planes import Planes
from .library_patch import LibraryPatch, LibraryTower
from .timm_forward import (
    begin_pass,
    drop_patches,
    end_pass,
    follow_block,
    place_tokens,
    record_kept,
    replace_rotation,
    rotate_states,
    turn_attention,
)
from .timm_rope import read_planes


# The classes of models, and where each makes tokens of an image.
EMBEDDINGS = {"VisionTransformer": "patch_embed", "Eva": "patch_embed", "NaFlexVit": "embeds"}
# The classes of attention, which pass queries and keys through `q_norm` and `k_norm`.
ATTENTIONS = ("Attention", "AttentionRope", "EvaAttention")
DROPS = ("Identity", "NoneType", "PatchDropout", "PatchDropoutWithIndices")


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
        self.handles.append(module.register_forward_hook(end_pass, always_call=True))
        self.handles.append(module.norm_pre.register_forward_hook(partial(place_tokens, module)))
        for layer, (_, attention) in enumerate(tower.attentions):
            if layer in module.rotary_encoding.place:
                self._hook_attention(module, layer, attention)
        for block in module.blocks:
            self.handles.append(block.register_forward_hook(partial(follow_block, module)))
        # timm's optimizers ask for it.
        module.no_weight_decay = partial(without_decay, module)

    def _hook_attention(self, module: nn.Module, layer: int, attention: Any) -> None:
        if self.turns:
            self.hook_arguments(attention, partial(turn_attention, module, layer))
            return
        norms = attention.q_norm, attention.k_norm
        self.hook_arguments(attention, partial(replace_rotation, norms))
        for norm in norms:
            self.handles.append(norm.register_forward_hook(partial(rotate_states, module, layer)))

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
