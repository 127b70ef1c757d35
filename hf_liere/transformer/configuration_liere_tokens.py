"""Configuration of the transformer of tokens with positions."""

import dataclasses

from huggingface_hub.dataclasses import strict

from ..encoding.kinds import needs_exponential, orientations_of
from ..encoding.rotary_fields import FLOAT32_MAX
from .configuration_liere import LieREConfig, LieREVideoConfig


@strict
class LieRETokensConfig(LieREConfig):
    r"""
    Configuration of the models of tokens with positions: points, steps of a series, detections, patches of any origin.
    See [`LieREConfig`] for the transformer and its position encoding.

    `position_encoding="absolute"` is a table that is read at coordinates and needs `position_table_size`. For the
    indices 0 … n − 1 of a series, `position_table_size=[n]` with `position_scale=1 / (n - 1)` has one entry per index.

    ```python
    from hf_liere import LieRETokensConfig

    # Points in a room of 10 m with three features each: coordinates from 0 to 1.
    config = LieRETokensConfig(feature_size=3, num_axes=3, position_encoding="liere", block_size=8, position_scale=0.1)
    ```

    Args:
        feature_size (`int`, defaults to 1): Number of features of a token.
        num_axes (`int`, defaults to 1): Number of axes of a position, 1 … 6.
        position_origin (`float` or `list[float]`, defaults to 0.0): See `position_scale`.
        position_scale (`float` or `list[float]`, defaults to 1.0):
            The encoding's coordinates are (positions − origin) · scale, with one number for all axes or one per axis.
            The initial generators of LieRE and ComRoPE suit coordinates from 0 to 1, those of RoPE and STRING
            coordinates that count tokens; a table is read from 0 to 1.
        distance_axes (`list[int]`, *optional*):
            Axes whose squared distance lowers attention scores: every head adds −w ‖xᵢ − xⱼ‖², with the coordinates x
            of tokens on these axes and a learned w that starts at zero. Class and register tokens are at no distance.

    Raises:
        `huggingface_hub.errors.StrictDataclassError`: as [`LieREConfig`], and for fields of images and videos.
    """

    model_type = "liere_tokens"

    feature_size: int = 1
    num_axes: int = 1
    position_origin: float | int | list[float | int] | tuple[float | int, ...] = 0.0
    position_scale: float | int | list[float | int] | tuple[float | int, ...] = 1.0
    distance_axes: list[int] | tuple[int, ...] | None = None

    _auto_map = {
        "AutoConfig": "modeling_liere.LieRETokensConfig",
        "AutoModel": "modeling_liere.LieRETokensModel",
        "AutoModelForSequenceClassification": "modeling_liere.LieRETokensForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_liere.LieRETokensForTokenClassification",
    }

    def by_axis(self, name: str) -> tuple[float, ...]:
        """`position_origin` or `position_scale` of each axis."""
        value = getattr(self, name)
        return (value,) * self.num_axes if isinstance(value, (int, float)) else tuple(value)

    def validate_positions(self):
        """Raise `ValueError` if the fields of positions contradict the encoding or each other."""
        axes, encoding = self.num_axes, self.position_encoding
        if self.use_absolute_position_embeddings and self.position_table_size is None:
            raise ValueError(
                "Tokens have no grid to learn a table for: use_absolute_position_embeddings=True, which "
                f"position_encoding='absolute' implies, needs position_table_size, {axes} numbers of entries, one per "
                "axis, of a table that is read at coordinates from 0 to 1."
            )
        for name, lowest, accepted, unused in (
            ("position_origin", -FLOAT32_MAX, "", 0),
            ("position_scale", 0, " above 0", 1),
        ):
            values, given = self.by_axis(name), f"{name}={getattr(self, name)}"
            if len(values) != axes or not all(lowest < value <= FLOAT32_MAX for value in values):
                raise ValueError(
                    f"{given} must be one number{accepted} that is finite in float32, or {axes} of them, one per axis."
                )
            if not self.uses_positions and any(value != unused for value in values):
                raise ValueError(f"{given} would do nothing with position_encoding={encoding!r}.")
            if any(values[axis] != unused for axes in orientations_of(self) for axis in axes):
                raise ValueError(
                    f"{given}: with rotary_init='so3' positions are rotation vectors, which cannot be "
                    f"moved or scaled: [sL_x, sL_y] = s² L_z is not sL_z. Accepted: {unused}."
                )
        chosen = self.distance_axes
        if chosen is not None and not 0 < len(chosen) == len(set(chosen) & set(range(axes))):
            raise ValueError(f"distance_axes={chosen} must be different axes among 0 … {axes - 1}, at least one.")
        if self.folded_grids is not None and needs_exponential(self):
            raise ValueError(
                f"folded_grids={self.folded_grids}: {encoding} with block_size={self.block_size} has constant "
                "rotations for grids only, and tokens have no grid; accepted: None."
            )
        others = {field.name for field in dataclasses.fields(LieREVideoConfig)}
        others -= {field.name for field in dataclasses.fields(self)}
        if refused := sorted(name for name in others if getattr(self, name, None) is not None):
            raise ValueError(
                f"{', '.join(refused)}: fields of images and videos have no meaning for tokens, which have "
                "feature_size, num_axes, position_origin and position_scale."
            )
