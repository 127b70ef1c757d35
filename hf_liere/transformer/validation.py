"""Rules for configurations; each raises a `ValueError` that names the field and the values it accepts."""

from transformers.activations import ACT2FN

from ..encoding.kinds import ENCODINGS, encoding_of
from ..encoding.positions import needs_spacing
from ..encoding.rotary_fields import (
    AT_LEAST_ONE,
    FACTORS,
    FLOAT32_MAX,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    TRAINING_ONLY,
    check_format_version,
    check_ranges,
    check_rotations,
    refuse_unused,
    rotated_prefix,
)
from .foreign_names import check_names


FORMAT_VERSION = 1

DROPPED = (
    *("hidden_dropout_prob", "mlp_dropout_prob", "attention_probs_dropout_prob"),
    *("drop_path_rate", "patch_dropout_prob"),
)
SIZES = ("hidden_size", "intermediate_size", "num_channels", "feature_size", "classifier_hidden_size")
# Fields, predicate and wording of the error, as in [`rotary_fields.RANGES`].
ARCHITECTURE_RANGES = (
    (SIZES, *AT_LEAST_ONE),
    (("num_register_tokens",), lambda value: value >= 0, "be at least 0"),
    (DROPPED, *SHARE),
    (("initializer_range", "token_initializer_range"), *POSITIVE),
    (("layer_norm_eps",), *NOT_NEGATIVE),
    (("layerscale_value", "prefix_coordinate"), lambda value: abs(value) <= FLOAT32_MAX, "be finite in float32"),
)
ROTARY = {
    **dict.fromkeys(("block_size", "rotary_init", "rope_theta", "folded_grids")),
    **dict.fromkeys(("share_heads", "share_layers", "rotate_prefix", "rotate_values"), False),
}
PLACED = {"coordinates": None, "position_shift": 0.0, **dict.fromkeys(FACTORS)}


def check_architecture(config) -> None:
    """Check a [`LieREConfig`] whose fields have the right types, with defaults filled in."""
    check_format_version(config.format_version, FORMAT_VERSION)
    check_names(config)
    check_ranges(config, ARCHITECTURE_RANGES)
    if config.hidden_act not in ACT2FN:
        raise ValueError(f"hidden_act={config.hidden_act!r} must be one of {', '.join(sorted(ACT2FN))}.")
    if config.head_dim is None:
        raise ValueError(
            f"hidden_size={config.hidden_size} is not divisible by num_attention_heads={config.num_attention_heads}."
        )
    if config.pooling == "cls" and not config.use_class_token:
        raise ValueError("pooling='cls' needs use_class_token=True; without it use pooling='mean' or 'mean_all'.")
    if config.position_encoding == "absolute" and not config.use_absolute_position_embeddings:
        raise ValueError(
            "position_encoding='absolute' is the learned table: use_absolute_position_embeddings=False contradicts "
            "it. For no positions at all use position_encoding='none'."
        )
    has_table, rotating = config.use_absolute_position_embeddings, f"one of the encodings {', '.join(ENCODINGS)}"
    refuse_unused(config, ROTARY, encoding_of(config) is not None, rotating)
    refuse_unused(config, {"position_table_size": None}, has_table, "use_absolute_position_embeddings=True")
    refuse_unused(config, PLACED, config.uses_positions, f"position_table_size or {rotating}")
    refuse_unused(config, {"prefix_coordinate": 0.5}, config.places_prefix, "rotate_prefix=True or position_table_size")
    size, axes = config.position_table_size, config.num_axes
    if size is not None and (len(size) != axes or any(entries < 1 for entries in size)):
        raise ValueError(f"position_table_size={size} must be {axes} numbers of at least 1, one per axis.")
    check_rotations(config)


def check_pixels(config) -> None:
    """Check the patches and their grid in a [`LieREPixelConfig`] that [`check_architecture`] accepts."""
    if any(patch < 1 for patch in config.patch_shape):
        raise ValueError(f"The patch extents {config.patch_shape} must all be at least 1.")
    if any(size < patch or size % patch for size, patch in zip(config.input_shape, config.patch_shape)):
        raise ValueError(
            f"The training input {config.input_shape} is not divisible into patches of {config.patch_shape}."
        )
    size, unit, axes = config.position_table_size, config.physical_unit, config.num_axes
    has_table = config.use_absolute_position_embeddings
    refuse_unused(
        config,
        {"position_table_resize": "interpolate"},
        has_table and size is None,
        "a table for each patch: use_absolute_position_embeddings=True, position_table_size=None",
    )
    moves = config.uses_positions or has_table
    refuse_unused(config, {"position_perturbation": 0.0}, moves, "any position_encoding but 'none'")
    refuse_unused(config, TRAINING_ONLY, config.folded_grids is None, "folded_grids=None, in training")
    is_physical = needs_spacing(config)
    refuse_unused(config, {"physical_unit": None}, is_physical, "coordinates='physical'")
    if rotated_prefix(config) == 0 and (size is not None or config.prefix_coordinate != 0.5):
        raise ValueError(
            f"position_table_size={size} and prefix_coordinate={config.prefix_coordinate} contradict "
            f"coordinates={config.coordinates!r}: a table is read at coordinates from 0 to 1, half of these are "
            "negative, and class and register tokens are at their origin; accepted: position_table_size=None, "
            "prefix_coordinate=0.5."
        )
    lengths = unit if isinstance(unit, (list, tuple)) else [unit] * axes
    fits = unit is not None and len(lengths) == axes and all(0 < length <= FLOAT32_MAX for length in lengths)
    if is_physical and not fits:
        raise ValueError(
            f"coordinates={config.coordinates!r} need physical_unit, not {unit}: the length that counts as 1, one "
            f"positive number or {axes}, such as the extents of a training input in mm."
        )
