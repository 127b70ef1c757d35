"""Rules for configurations; each raises a `ValueError` that names the field and the values it accepts."""

from transformers.activations import ACT2FN

from ..encoding.encoding_traits import ENCODING_TRAITS, TRAINING_ONLY
from ..encoding.rotary_fields import (
    AT_LEAST_ONE,
    FACTORS,
    FLOAT32_MAX,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    check_format_version,
    check_ranges,
    check_rotations,
)


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


def check_architecture(config) -> None:
    """
    Args:
        config: A [`LieREConfig`] whose fields have the right types, with defaults filled in.

    Raises:
        ValueError: if a value is out of range or fields contradict each other.
    """
    check_format_version(config.format_version, FORMAT_VERSION)
    if config.check_names is not None:
        config.check_names()
    check_ranges(config, ARCHITECTURE_RANGES)
    if config.hidden_act not in ACT2FN:
        raise ValueError(f"hidden_act={config.hidden_act!r} must be one of {', '.join(sorted(ACT2FN))}.")
    _check_shapes(config)
    _check_table(config)
    check_rotations(config)
    if config.position_encoding not in ENCODING_TRAITS:
        _refuse_rotary_fields(config)


def check_pixels(config) -> None:
    """
    Args:
        config: A [`LieREPixelConfig`] that [`check_architecture`] accepts.

    Raises:
        ValueError: if the fields of patches and their grid contradict each other.
    """
    if any(patch < 1 for patch in config.patch_shape):
        raise ValueError(f"The patch extents {config.patch_shape} must all be at least 1.")
    if any(size < patch or size % patch for size, patch in zip(config.input_shape, config.patch_shape)):
        raise ValueError(
            f"The training input {config.input_shape} is not divisible into patches of {config.patch_shape}."
        )
    size, resize = config.position_table_size, config.position_table_resize
    has_table = config.use_absolute_position_embeddings
    if resize != "interpolate" and not has_table:
        raise ValueError(
            f"position_table_resize={resize!r} describes a learned table, but use_absolute_position_embeddings is "
            "False."
        )
    if size is not None and resize != "interpolate":
        raise ValueError(
            f"position_table_resize={resize!r} has no meaning with position_table_size={size}: a table that is "
            "read at coordinates is never resized."
        )
    if resize == "antialias" and config.num_axes != 2:
        raise ValueError(
            "position_table_resize='antialias' exists for images only; accepted here: 'interpolate', 'truncate'."
        )
    if config.coordinates == "centred_grid" and (size is not None or config.prefix_coordinate != 0.5):
        raise ValueError(
            f"position_table_size={size} and prefix_coordinate={config.prefix_coordinate} contradict "
            "coordinates='centred_grid': a table is read at coordinates from 0 to 1, half of these are negative, and "
            "class and register tokens are at their origin; accepted: position_table_size=None, prefix_coordinate=0.5."
        )
    _check_augmentation(config)
    _check_physical_unit(config)


def _check_augmentation(config) -> None:
    encoding, has_table = config.position_encoding, config.use_absolute_position_embeddings
    trained = {name: getattr(config, name) for name, none in TRAINING_ONLY.items() if getattr(config, name) != none}
    if trained and config.folded_grids is not None:
        names = " and ".join(f"{name}={value}" for name, value in trained.items())
        raise ValueError(f"{names} is for training, folded_grids={config.folded_grids} for inference.")
    if config.position_perturbation and encoding == "none" and not has_table:
        raise ValueError(
            f"position_perturbation={config.position_perturbation} has nothing to perturb with "
            "position_encoding='none'."
        )
    augmented = {name: getattr(config, name) for name in ("position_shift", *FACTORS) if getattr(config, name)}
    if augmented and config.coordinates is None and encoding not in ENCODING_TRAITS:
        raise ValueError(
            f"{augmented} would do nothing with position_encoding={encoding!r}, which has no coordinates: accepted "
            f"with {', '.join(ENCODING_TRAITS)} and with position_table_size."
        )


def _check_physical_unit(config) -> None:
    unit, axes = config.physical_unit, config.num_axes
    if config.coordinates != "physical":
        if unit is not None:
            raise ValueError(
                f"physical_unit={unit} would do nothing with coordinates={config.coordinates!r}: accepted with "
                "coordinates='physical'."
            )
        return
    lengths = unit if isinstance(unit, (list, tuple)) else [unit] * axes
    if unit is None or len(lengths) != axes or not all(0 < length <= FLOAT32_MAX for length in lengths):
        raise ValueError(
            f"coordinates='physical' need physical_unit, not {unit}: the length that counts as 1, one positive number "
            f"or {axes}, such as the extents of a training input in mm."
        )


def _check_shapes(config) -> None:
    if config.head_dim is None:
        raise ValueError(
            f"hidden_size={config.hidden_size} is not divisible by num_attention_heads={config.num_attention_heads}."
        )
    if config.pooling == "cls" and not config.use_class_token:
        raise ValueError("pooling='cls' needs use_class_token=True; without it use pooling='mean' or 'mean_all'.")
    if config.pooling == "prefix" and not config.num_prefix_tokens:
        raise ValueError("pooling='prefix' needs a class token or register tokens; this model has neither.")


def _check_table(config) -> None:
    size, axes = config.position_table_size, config.num_axes
    has_table = config.use_absolute_position_embeddings
    if size is not None and not has_table:
        raise ValueError(
            f"position_table_size={size} describes a learned table, but use_absolute_position_embeddings is False."
        )
    if size is not None and (len(size) != axes or any(entries < 1 for entries in size)):
        raise ValueError(f"position_table_size={size} must be {axes} numbers of at least 1, one per axis.")
    if config.prefix_coordinate != 0.5 and not config.rotate_prefix and size is None:
        raise ValueError(
            f"prefix_coordinate={config.prefix_coordinate} would do nothing without rotate_prefix=True or "
            "position_table_size."
        )
    if config.position_encoding == "absolute" and not has_table:
        raise ValueError(
            "position_encoding='absolute' is the learned table: use_absolute_position_embeddings=False contradicts "
            "it. For no positions at all use position_encoding='none'."
        )


def _refuse_rotary_fields(config) -> None:
    names = ("block_size", "coordinates", "rotary_init", "rope_theta", "folded_grids")
    refused = {name: value for name in names if (value := getattr(config, name, None)) is not None}
    if config.position_table_size is not None:
        # A table with `position_table_size` is read at coordinates.
        refused.pop("coordinates", None)
    flags = ("share_heads", "share_layers", "rotate_prefix", "rotate_values")
    refused |= {name: True for name in flags if getattr(config, name)}
    if refused:
        raise ValueError(
            f"position_encoding={config.position_encoding!r} has no rotations, so {refused} would do nothing; these "
            f"fields belong to {', '.join(ENCODING_TRAITS)}."
        )
