"""What patches of models of other libraries have in common: facts, checks of the start, and rotations by a grid."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..models.encoding.folding import build_rotary_encoding
from ..models.patched.rotary_patch import RotaryPatchConfig
from ..models.patched.tower_patch import Patchable, TowerPatch
from ..models.patched.vision_patch import TowerConfig
from ..models.probing.attention_tower import AttentionTower
from .rotations import StateRotations


@dataclass
class LibraryPatch(TowerPatch[Patchable]):
    """
    The patch of a model of another library, which transformers cannot save or load with its rotations.

    Attributes:
        heads, head_dim: Heads with separate rotations in every attention module, and their channels.
        frequencies: Of models that rotate by the same frequencies in every layer.
        train_grid, coordinates: Patches per axis in training and the convention of their coordinates, for models that
            do not rotate.
    """

    heads: int
    head_dim: int
    frequencies: tuple[float, ...] = field(default=(), kw_only=True)
    train_grid: tuple[int, ...] = field(default=(), kw_only=True)
    coordinates: str = field(default="", kw_only=True)

    def describe_base(self, module: nn.Module) -> dict:
        base: dict[str, Any] = {"heads": self.heads, "head_dim": self.head_dim, "train_grid": list(self.train_grid)}
        if self.frequencies:
            base["frequencies"] = [float(f"{value:.5g}") for value in self.frequencies]
        return base

    def model_type(self, module: nn.Module) -> str:
        return type(module).__name__


def check_start(tower: AttentionTower, config: RotaryPatchConfig, rotates: bool) -> list[int]:
    """
    The indices of the attention modules to patch.

    Args:
        rotates: Whether the model rotates queries and keys.

    Raises:
        ValueError: if there are no such modules, the model has no values yet, or the configuration does not fit it.
    """
    layers = tower.choose_layers(config.layers)
    if any(parameter.is_meta for parameter in tower.module.parameters()):
        raise ValueError(f"{tower.label} has parameters without values: patch it before they are offloaded.")
    if config.keep_absolute != "interpolate":
        raise ValueError(
            f"keep_absolute={config.keep_absolute!r} is for vision towers of transformers; {tower.label} accepts "
            "interpolate."
        )
    if rotates != (config.rotary_init == "pretrained"):
        raise ValueError(
            f"rotary_init={config.rotary_init!r}: {tower.label} "
            + ("already rotates query and key" if rotates else "does not rotate, so there is nothing to start from")
            + f"; accepted: {'pretrained' if rotates else 'zeros'}."
        )
    return layers


def build_from_grid(
    rotary_config: TowerConfig, config: RotaryPatchConfig, heads: int, layers: list[int]
) -> StateRotations:
    """Rotations by the position in a grid, for models that do not rotate."""
    encoding = build_rotary_encoding(rotary_config, len(rotary_config.train_grid))
    assert encoding is not None, "the configuration names an encoding that rotates"
    return StateRotations(encoding, config, heads, layers)
