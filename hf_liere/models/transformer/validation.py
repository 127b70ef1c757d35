"""Which configurations describe a model: every rule raises a `ValueError` that names the field and what it accepts."""

from transformers.activations import ACT2FN

from ..encoding.encoding_traits import (
    ANY,
    ENCODING_TRAITS,
    OWN_FIELDS,
    TRAINING_ONLY,
    accepted_inits,
    needs_exponential,
    own_fields,
    traits_of,
)


FORMAT_VERSION = 1
ROTARY_ENCODINGS = tuple(ENCODING_TRAITS)

FLOAT32_MAX = 3.4028234e38
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "head_dim")
INPUT_SIZES = ("num_channels", "feature_size")
MAX_AXES = 6
DROPPED = (
    *("hidden_dropout_prob", "mlp_dropout_prob", "attention_probs_dropout_prob"),
    *("drop_path_rate", "patch_dropout_prob"),
)
SHARES = (*DROPPED, "unrotated_share")
SCALES = ("position_perturbation", "position_shift", "layer_norm_eps", "rotary_init_scale")
POSITIVE = ("initializer_range", "rope_theta", "min_frequency", "max_frequency")
FACTORS = ("position_jitter", "position_rescale")
# Fields, where a configuration has them, which values they accept, and how a message says so. Other rules decide where
# `None` is accepted.
RANGES = (
    ((*SIZES, *INPUT_SIZES, "classifier_hidden_size"), lambda value: value >= 1, "be at least 1"),
    (("num_axes",), lambda value: 1 <= value <= MAX_AXES, f"lie in 1 … {MAX_AXES}"),
    (("num_register_tokens",), lambda value: value >= 0, "be at least 0"),
    (SHARES, lambda value: 0 <= value < 1, "lie in [0, 1)"),
    (POSITIVE, lambda value: 0 < value <= FLOAT32_MAX, "be positive and finite in float32"),
    (SCALES, lambda value: 0 <= value <= FLOAT32_MAX, "be at least 0 and finite in float32"),
    (FACTORS, lambda value: 1 <= value <= FLOAT32_MAX, "be at least 1 and finite in float32, or None"),
    (("layerscale_value", "prefix_coordinate"), lambda value: abs(value) <= FLOAT32_MAX, "be finite in float32"),
)


def check_architecture(config) -> None:
    """
    Args:
        config: A [`LieREConfig`] whose fields have the right types, with defaults filled in.

    Raises:
        ValueError: if a value is out of range, or fields do not fit together.
    """
    check_format_version(config.format_version, FORMAT_VERSION)
    for names, is_accepted, accepted in RANGES:
        for name in names:
            value = getattr(config, name, None)
            if value is not None and not is_accepted(value):
                raise ValueError(f"{name}={value} must {accepted}.")
    if config.hidden_act not in ACT2FN:
        raise ValueError(f"hidden_act={config.hidden_act!r} must be one of {', '.join(sorted(ACT2FN))}.")
    _check_shapes(config)
    _check_table(config)
    _check_own_fields(config)
    if config.position_encoding in ROTARY_ENCODINGS:
        _check_block_size(config)
        _check_rotary_init(config)
        if config.folded_grids is not None:
            _check_folding(config)
    else:
        _refuse_rotary_fields(config)


def check_pixels(config) -> None:
    """
    Args:
        config: A [`LieREPixelConfig`] that [`check_architecture`] accepts.

    Raises:
        ValueError: if the fields of patches and their grid do not fit together.
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
    given = {name: getattr(config, name) for name in ("position_shift", *FACTORS) if getattr(config, name)}
    if given and config.coordinates is None and encoding not in ROTARY_ENCODINGS:
        raise ValueError(
            f"{given} would do nothing with position_encoding={encoding!r}, where nothing has coordinates: accepted "
            f"with {', '.join(ROTARY_ENCODINGS)} and with position_table_size."
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


def check_tokens(config) -> None:
    """
    Args:
        config: A [`LieRETokensConfig`] that [`check_architecture`] accepts.

    Raises:
        ValueError: if the fields of positions do not fit the encoding or each other.
    """
    for name, lowest, accepted in (("position_origin", -FLOAT32_MAX, ""), ("position_scale", 0, " above 0")):
        values = config.by_axis(name)
        if len(values) != config.num_axes or not all(lowest < value <= FLOAT32_MAX for value in values):
            raise ValueError(
                f"{name}={getattr(config, name)} must be one number{accepted} that is finite in float32, or "
                f"{config.num_axes} of them, one per axis."
            )
    if config.use_absolute_position_embeddings and config.position_table_size is None:
        raise ValueError(
            "Tokens have no grid to learn a table for: use_absolute_position_embeddings=True, which "
            f"position_encoding='absolute' implies, needs position_table_size, {config.num_axes} numbers of entries, "
            "one per axis, of a table that is read at coordinates from 0 to 1."
        )
    for name, unused in (("position_origin", 0), ("position_scale", 1)):
        if not config.uses_positions and any(value != unused for value in config.by_axis(name)):
            raise ValueError(
                f"{name}={getattr(config, name)} would do nothing with position_encoding={config.position_encoding!r}."
            )
    if config.folded_grids is not None and needs_exponential(config):
        raise ValueError(
            f"folded_grids={config.folded_grids}: {config.position_encoding} with block_size="
            f"{config.block_size} has rotations to keep for grids only, and tokens have none; accepted: None."
        )


def check_format_version(version: int, newest: int) -> None:
    """Raises `ValueError` for a format that this release cannot read."""
    if version > newest:
        raise ValueError(
            f"format_version={version} was written by a newer hf_liere; this one reads up to {newest}. Please upgrade "
            "hf_liere."
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


def _check_block_size(config) -> None:
    encoding, size, traits = config.position_encoding, config.block_size, traits_of(config)
    head_dim, axes = config.head_dim, config.num_axes
    if traits.num_axes not in (None, axes):
        raise ValueError(
            f"{encoding} is defined on {traits.num_axes} axes, and there are {axes}: no published form for another "
            "number is known. Accepted here are the other rotary encodings."
        )
    if head_dim < 2:
        raise ValueError(
            f"A head_dim of {head_dim} (hidden_size={config.hidden_size} / num_attention_heads="
            f"{config.num_attention_heads}) cannot be rotated; {encoding} needs at least 2."
        )
    sizes, fits = traits.block_sizes, 2 <= size <= head_dim
    # A size that an encoding fixes is said before that of the head; the sizes of others must be numbers to divide by.
    if (fits or not sizes.varies) and not sizes.accepts(size, head_dim, axes):
        rule = sizes.rule.format(size=size, encoding=encoding, head_dim=head_dim, axes=axes)
        raise ValueError(f"{rule}; {_accepted_sizes(config)}.")
    if not fits:
        accepted = f"{encoding} takes 2 … {head_dim}" if sizes.rule is None else _accepted_sizes(config)
        raise ValueError(f"block_size={size} does not fit a head_dim of {head_dim}: {accepted}.")
    if traits.planar and traits.serves_one_axis and head_dim < 2 * axes:
        raise ValueError(
            f"A head_dim of {head_dim} is too small for {encoding} on {axes} axes: it needs a plane for each axis, "
            f"so at least {2 * axes}."
        )


def _accepted_sizes(config) -> str:
    accepted = traits_of(config).block_sizes.accepted(config.head_dim, config.num_axes)
    return f"accepted here: {accepted or 'none, choose another head_dim'}"


def _check_rotary_init(config) -> None:
    encoding, name, block_size = config.position_encoding, config.rotary_init, config.block_size
    accepted = accepted_inits(config)
    if name is None or name in accepted:
        return
    if not accepted:
        raise ValueError(f"rotary_init={name!r}: {encoding} has no parameters to initialise.")
    available = [
        f"{other} with an even block_size" if traits.block_sizes is ANY else other
        for other, traits in ENCODING_TRAITS.items()
        if name in traits.rotary_inits
    ]
    raise ValueError(
        f"rotary_init={name!r} gives every plane of channels a frequency: it is available for {', '.join(available)}, "
        f"not for {encoding} with block_size={block_size}, which accepts {', '.join(accepted)}."
    )


def _check_own_fields(config) -> None:
    given = {name: value for name in OWN_FIELDS if (value := getattr(config, name)) is not None}
    if refused := {name: value for name, value in given.items() if name not in own_fields(config)}:
        raise ValueError(
            f"{refused} would do nothing with position_encoding={config.position_encoding!r} and rotary_init="
            f"{config.rotary_init!r}: axial_layout and axial_spectrum belong to axial_rope, the others to "
            "golden_gate_rope and to rotary_init='golden_gate'."
        )
    if given.get("min_frequency", 0) > given.get("max_frequency", 0):
        raise ValueError(
            f"min_frequency={config.min_frequency} must not be above max_frequency={config.max_frequency}."
        )


def _check_folding(config) -> None:
    grids = config.folded_grids
    if grids and not needs_exponential(config):
        raise ValueError(
            f"folded_grids={grids}: only liere with block_size above 2 has rotations to keep; accepted for "
            f"{config.position_encoding}: [] or None."
        )
    if grids and getattr(config, "coordinates", None) == "physical":
        raise ValueError(
            f"folded_grids={grids}: with coordinates='physical' the rotations of a grid depend on the spacing of the "
            "input, so that none can be kept."
        )
    for grid in grids:
        if len(grid) != config.num_axes or any(size < 1 for size in grid):
            raise ValueError(f"folded_grids: {grid} must be {config.num_axes} numbers of patches, one per axis.")


def _refuse_rotary_fields(config) -> None:
    names = ("block_size", "coordinates", "rotary_init", "rope_theta", "folded_grids")
    refused = {name: value for name in names if (value := getattr(config, name, None)) is not None}
    if config.position_table_size is not None:
        # A table with a size of its own is read at coordinates.
        refused.pop("coordinates", None)
    refused |= {name: True for name in ("share_heads", "share_layers", "rotate_prefix") if getattr(config, name)}
    if refused:
        raise ValueError(
            f"position_encoding={config.position_encoding!r} has no rotations, so {refused} would do nothing; these "
            f"fields belong to {', '.join(ROTARY_ENCODINGS)}."
        )
