"""What models of other libraries have in common when they are patched: checks of the start, and rotations by a grid."""

from ..models.encoding.folding import build_rotary_encoding
from ..models.patched.rotary_patch import RotaryPatchConfig, TowerConfig
from ..models.patched.tower_patch import AttentionTower
from .rotations import StateRotations


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
