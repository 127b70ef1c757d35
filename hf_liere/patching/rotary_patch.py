"""The configuration of a patch: learned rotations in a pretrained model."""

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from torch import nn

from ..encoding.kinds import ENCODINGS, STARTS, orientations_of
from ..encoding.positions import CONVENTIONS, needs_spacing
from ..encoding.rotary_fields import OWN_FIELDS, GridFields, RotaryFields, check_format_version, default_rotate_prefix
from ..registers import check_name
from .tower_patch import patched_towers


FORMAT_VERSION = 1
# Fields of positions and initial values that a model with RoPE defines itself.
PLACEMENT_FIELDS = (
    *("rotary_init_scale", "rope_theta", *OWN_FIELDS),
    *(field.name for field in fields(GridFields)),
    *("rotate_prefix", "keep_absolute", "absolute_weight"),
)


@dataclass
class RotaryPatchConfig(GridFields, RotaryFields):
    r"""
    Which rotations a pretrained vision transformer gets, and where. See [`RotaryFields`] for the encoding, here
    `comrope_ld` by default, and [`GridFields`] for coordinates; towers whose samples have different grids draw
    displacements for each sample.

    ```python
    from hf_liere import RotaryPatchConfig

    clip = RotaryPatchConfig(position_encoding="comrope_ld", block_size=8)  # for models without rotations
    llama = RotaryPatchConfig(position_encoding="rope_mixed", rotary_init="pretrained")  # for models with RoPE
    ```

    Args:
        compose: Whether a model with RoPE rotates queries and keys first, and these rotations, which start at the
            identity (`rotary_init="zeros"`), come behind. Planes keep attention relative; blocks only among tokens that
            share a position.
        num_axes: With `compose=True`, the number of axes of `rotary_positions`, which each forward pass then needs;
            `None` rotates by the model's own positions, unless `rotary_positions` of the same axes are passed.
        layers: Indices of the attention layers to rotate, from 0; `None` means all.
        target: Dotted name of the vision tower, or of the module around the one that computes RoPE, as in
            `model.named_modules()`; `None` means all.
        rotary_init: `"zeros"` leaves a model without rotations exactly as it is: zero generators, exp(0) = I (ComRoPE
            §4.4); `circulant_string`, whose basis is never the identity, within rounding. `"pretrained"` is for models
            that already rotate (RoPE) and starts at their rotations: `rope_mixed` learns the frequencies of every
            layer and computes the same bits at the start, `liere`, `comrope_ld`, `comrope_ap`, `cayley_string` and, on
            several axes, `liere_product` learn blocks of each key head and start within rounding. Any other
            (`"frequencies"`, `"normal"`, …, `None` for the encoding's own, see `RotaryFields`) is **not neutral**: it
            changes what the pretrained model computes.
            `axial_rope` and `golden_gate_rope` learn nothing and take only `None`.
        rotate_prefix: Whether class and register tokens are rotated as tokens at the centre; `None` becomes yes for
            ComRoPE in its own coordinates and others of a fixed range, else no, see `LieREConfig`.
        keep_absolute: How the patches use the model's own position table (prefix tokens always keep their entries).
            `"interpolate"`: as the model interpolates it; `"train_size"`: every patch reads the entry of its index,
            patches beyond the trained grid the nearest one; `"fade"`: interpolated and multiplied by
            `absolute_weight`, which `set_absolute_weight` changes during training; `"drop"`: not used.
        absolute_weight: Weight of the table for `keep_absolute="fade"`.
        folded_grids: Set by `fold_rotations`, as in [`LieREConfig`]; `None` for models that can be trained.

    Raises:
        ValueError: for values that no model accepts; `patch` refuses those that a given model does not accept.
    """

    position_encoding: str = "comrope_ld"
    compose: bool = False
    num_axes: int | None = None
    layers: list[int] | None = None
    target: str | None = None
    rotary_init: str | None = "zeros"
    rotate_prefix: bool | None = None
    keep_absolute: Literal["interpolate", "train_size", "fade", "drop"] = "interpolate"
    absolute_weight: float = 1.0
    folded_grids: list[list[int]] | None = None
    format_version: int = FORMAT_VERSION

    def __post_init__(self):
        self.name_shares()
        self._check_types()
        check_format_version(self.format_version, FORMAT_VERSION)
        if self.compose and (self.rotary_init != "zeros" or self.shares) or self.num_axes and not self.compose:
            raise ValueError(
                f"compose={self.compose}: accepted are compose=True with rotary_init='zeros', not "
                f"{self.rotary_init!r}, and one encoding for all channels, and num_axes={self.num_axes} with it alone."
            )
        check_name("position_encoding", self.position_encoding, ENCODINGS)
        CONVENTIONS.check(self.coordinates)
        STARTS.check(self.rotary_init, "pretrained")
        if needs_spacing(self):
            raise ValueError(
                f"coordinates={self.coordinates!r} need the spacing of every input, which pretrained models do not "
                "take."
            )
        if not 0 <= self.absolute_weight <= 1:
            raise ValueError(f"absolute_weight={self.absolute_weight} must lie in [0, 1].")
        if self.absolute_weight != 1 and self.keep_absolute != "fade":
            raise ValueError(
                f"absolute_weight={self.absolute_weight} belongs to keep_absolute='fade', not {self.keep_absolute!r}."
            )
        if orientations_of(self):
            raise ValueError(
                "rotary_init='so3' is for tokens whose positions are orientations, not for patches or "
                "words; accepted: 'zeros', 'pretrained' and others of RotaryFields."
            )
        if not ENCODINGS[self.position_encoding].rotary_inits and self.rotary_init is not None:
            raise ValueError(
                f"rotary_init={self.rotary_init!r}: {self.position_encoding} learns nothing and never starts neutral; "
                "pass rotary_init=None to accept that, or another position_encoding."
            )
        if self.rotate_prefix is None:
            self.rotate_prefix = not self.compose and self.rotary_init != "pretrained" and default_rotate_prefix(self)
        if self.compose or self.rotary_init == "pretrained":
            self._check_pretrained()

    def _check_pretrained(self) -> None:
        chosen = ENCODINGS[self.position_encoding]
        starting = [name for name, encoding in ENCODINGS.items() if encoding.pretrained in ("planes", "blocks")]
        if not self.compose and self.position_encoding not in starting:
            raise ValueError(
                f"rotary_init='pretrained' does not exist for {self.position_encoding}: {chosen.pretrained}; accepted: "
                f"{', '.join(starting)}."
            )
        defaults = {field.name: field.default for field in fields(self)} | {"rotate_prefix": False}
        refused = [name for name in PLACEMENT_FIELDS if name not in (*chosen.fields, "content_positions")]
        given = [name for name in refused if getattr(self, name) != defaults[name]]
        if given:
            raise ValueError(
                f"{', '.join(f'{name}={getattr(self, name)!r}' for name in given)}: in models with RoPE the "
                "coordinates of tokens and their frequencies are those of the model; leave these fields out."
            )

    def _check_types(self) -> None:
        if isinstance(self.layers, (list, tuple, range, set)) and all(type(layer) is int for layer in self.layers):
            self.layers = sorted(set(self.layers))
        elif self.layers is not None:
            raise ValueError(f"layers={self.layers!r} must be a list of indices from 0, or None.")
        for name, hint in get_type_hints(type(self)).items():
            value = getattr(self, name)
            kinds = [kind for part in get_args(hint) or (hint,) for kind in _accepted_kinds(part)]
            # An int is accepted as a float, a bool is not accepted as a number.
            kind = float if type(value) is int and float in kinds else type(value)
            if kind not in kinds and not (kind is str and value in kinds):
                accepted = ("None" if one is type(None) else getattr(one, "__name__", repr(one)) for one in kinds)
                raise ValueError(f"{name}={value!r} must be {' or '.join(accepted)}.")

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> "RotaryPatchConfig":
        """Raises `ValueError` for unknown names, and for values that their fields do not accept."""
        if not isinstance(values, dict):
            raise ValueError(f"rotary_patch={values!r} must be a dictionary of fields of RotaryPatchConfig.")
        known = {field.name for field in fields(cls)}
        if unknown := set(values) - known:
            raise ValueError(f"{sorted(unknown)} are not fields of RotaryPatchConfig; accepted: {sorted(known)}.")
        return cls(**values)


def _accepted_kinds(hint: Any) -> tuple[Any, ...]:
    """The types that a part of a type hint accepts; of a Literal its values."""
    container = get_origin(hint)
    return (container,) if container in (list, tuple) else get_args(hint) or (hint,)


def require_unpatched(model: nn.Module) -> None:
    """Raise `ValueError` if any part of a model is patched."""
    patched = [name or model._get_name() for name, _ in patched_towers(model)]
    if patched:
        raise ValueError(f"{', '.join(patched)} is patched already; call unpatch(model) first.")
