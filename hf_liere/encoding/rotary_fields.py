"""Fields that models, patches and the layer share: the encoding, with defaults and rules."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from huggingface_hub.dataclasses import strict, validated_field
from huggingface_hub.errors import StrictDataclassError

from ..registers import UserFile
from .kinds import ANY, ENCODINGS, STARTS, encoding_of, needs_exponential, orientations_of, start_of
from .positions import CONVENTIONS, convention_of, needs_spacing


FLOAT32_MAX = 3.4028234e38
MAX_AXES = 6
UNROTATED = ("none", "absolute")
# Fields that move patches in training, with the values that turn them off.
DISPLACEMENTS = {"position_perturbation": 0.0, "position_shift": 0.0, "position_jitter": None, "position_rescale": None}
# Fields that act in training only.
TRAINING_ONLY = {**DISPLACEMENTS, "patch_dropout_prob": 0.0}
AT_LEAST_ONE = lambda value: value >= 1, "be at least 1"
SHARE = lambda value: 0 <= value < 1, "lie in [0, 1)"
POSITIVE = lambda value: 0 < value <= FLOAT32_MAX, "be positive and finite in float32"
NOT_NEGATIVE = lambda value: 0 <= value <= FLOAT32_MAX, "be at least 0 and finite in float32"
FACTORS = ("position_jitter", "position_rescale")
# (fields, predicate, wording of the error). Missing fields and `None` are skipped.
RANGES = (
    (("num_hidden_layers", "num_attention_heads", "head_dim"), *AT_LEAST_ONE),
    (("num_axes",), lambda value: 1 <= value <= MAX_AXES, f"lie in 1 … {MAX_AXES}"),
    (("rotary_init_scale", "position_perturbation", "position_shift"), *NOT_NEGATIVE),
    (FACTORS, lambda value: 1 <= value <= FLOAT32_MAX, "be at least 1 and finite in float32, or None"),
    (("rope_theta", "min_frequency", "max_frequency"), *POSITIVE),
    (("unrotated_share",), *SHARE),
)


@dataclass(repr=False)
class RotaryFields:
    r"""
    The position encoding of a model, a patch or a layer.

    Args:
        position_encoding (`str`, defaults to `"liere"`):
            `"none"`, `"absolute"` (learned table), `"axial_rope"` (fixed frequencies, each serving one axis, as in
            VisionLLaMA and RoPE-ViT), `"golden_gate_rope"` (fixed frequencies of all axes, evenly spread directions),
            `"rope_mixed"` (learned 2-D rotations, RoPE-Mixed), `"liere"` (LieRE: free generators), `"comrope_ap"` or
            `"comrope_ld"` (ComRoPE: generators that commute), `"cayley_string"` (RoPE-Mixed in a learned basis) or
            `"circulant_string"` (circulant generators; STRING), `"spherical_rope"` (products of rotations about two
            axes, for images), `"liere_product"` (products of rotations of planes, with a learned basis for every axis;
            relative along the first axis). A list of (name, fields) divides the channels of every head among several:
            `[("liere", {"rotary_init": "so3", "share": 0.75, "axes": [0, 1, 2]}), ("rope_mixed", {"axes": [3]})]`. The
            fields are those below, `share` (of the channels, rounded to whole blocks; by default an equal part of what
            others leave) and `axes` (of the positions; all by default). It is saved as `"shares"` with these `shares`.
        block_size (`int`, *optional*):
            Size b of the diagonal blocks of the generators. `None` means 2 for `axial_rope`, `golden_gate_rope` and
            `rope_mixed`, 3 for `spherical_rope` (no other value is possible there), 8 for `liere`, `comrope_ap` and
            `comrope_ld`, 16 for `circulant_string` and head_dim for `cayley_string` and `liere_product`. LieRE takes 2
            … head_dim and leaves the last `head_dim % block_size` channels unrotated; `comrope_ld`, `cayley_string` and
            `liere_product` (even sizes) and `circulant_string` (above 2) need block_size to divide head_dim,
            `comrope_ap` needs block_size · axes to divide it.
        share_heads (`bool`, defaults to `False`): One set of generators for all heads of a layer.
        share_layers (`bool`, defaults to `False`): One set of generators for all layers.
        rotary_init (`str`, *optional*):
            `"uniform"` U[0, scale); `"normal"` N(0, scale²); `"frequencies"` (geometric RoPE-Mixed spectrum times
            scale, for `rope_mixed`, STRING, `liere_product` and `liere` with even block_size; for `spherical_rope` that
            of `axial_rope`) and `"golden_gate"` (golden gate RoPE's times scale, for the same except `spherical_rope`);
            `"zeros"` (the initial model has no rotations; the multipliers of `comrope_ld` are normal, so that the
            generators get gradients); `"axial"` (the rotations of `axial_rope` with `index` coordinates on the training
            grid, times scale: its frequencies are divided by the distance of neighbouring patches in `coordinates`;
            models of tokens and the layer take coordinates as given). `"axial"` needs blocks that contain the planes of
            `axial_rope` in place: `rope_mixed`, `cayley_string`, `liere_product` and `liere` with an even block_size,
            `comrope_ld` if every block rotates planes of one axis, `comrope_ap` if these blocks also serve the axes in
            turn; `"so3"` (for `liere` on tokens whose positions are orientations, see `spins`). Bases of
            `cayley_string` and `liere_product` start at the identity. `None` means `uniform` for `liere`, `normal` for
            ComRoPE (from its code; the paper states none), else `frequencies` (we do not know STRING's choice).
        rotary_init_scale (`float`, *optional*):
            Scale of `rotary_init`, or of the fixed frequencies of `axial_rope` and `golden_gate_rope`. `None` means 2π
            for `uniform`, √2 for `normal` (the entries of P − Pᵀ, P standard normal), else 1.
        rope_theta (`float`, *optional*):
            Base of the geometric spectrum of `axial_rope`, `spherical_rope` and `rotary_init="axial"` (`None` means
            100) and of `rotary_init="frequencies"` of the others (`None` means 10), as in RoPE-ViT.
        min_frequency, max_frequency (`float`, *optional*):
            The band of frequencies, in radians per unit of the coordinate, of `golden_gate_rope` and
            `rotary_init="golden_gate"`; `None` means 0.1 and 1.
        unrotated_share (`float`, *optional*): Share of planes that do not rotate in that spectrum; `None` means 0.
        axial_layout (`str`, *optional*):
            Order of the planes of `axial_rope` and `rotary_init="axial"`: axis after axis (`"blocks"`, the default), or
            in turn (`"interleaved"`).
        spins (`list[int]`, *optional*):
            The representation of so(3) in every block at `rotary_init="so3"`: the direct sum of the irreducible ones
            with these spins l, each of size 2l + 1, so that block_size is Σ (2l + 1). `[1, 2, 3]` needs blocks of 15;
            spin 0 is a channel that does not rotate. `None` means `[1]`, `[2]` or `[3]` for a block_size of 3 (the
            default there), 5 or 7. Positions are then rotation vectors p of three axes, that is, unit axis times
            angle in radians, of orientations from body to world. R(p) represents the rotation, R(p)ᵀR(q) the relative
            one p⁻¹q, and attention does not change when the world is turned, p → g·p. Training moves the generators,
            and mixes the spins of a block, unless `requires_grad_(False)` keeps them.
        shares (`list`, *optional*): The encodings of `"shares"`, [name, fields] each, see `position_encoding`.
        content_positions (`str`, *optional*):
            Positions that tokens choose: rotations are those of p + W x, with the states x that the attention of a
            layer reads and a learned W of that layer, zero at the start. `"shared"` moves the tokens for all heads
            alike, `"heads"` for every key head by itself; `"shared_sum"` and `"heads_sum"` by the sum of W x over the
            visible tokens before it and itself, as the angles of Selective RoPE. Class and register tokens stay.
            Rotations are then made in every layer for every sample.
    """

    position_encoding: str | list = validated_field(
        lambda name: None if isinstance(name, list) else ENCODINGS.check(name, *UNROTATED), default="liere"
    )
    block_size: int | None = None
    share_heads: bool = False
    share_layers: bool = False
    rotary_init: str | None = validated_field(lambda name: STARTS.check(name), default=None)
    rotary_init_scale: float | int | None = None
    rope_theta: float | int | None = None
    min_frequency: float | int | None = None
    max_frequency: float | int | None = None
    unrotated_share: float | int | None = None
    axial_layout: Literal["blocks", "interleaved"] | None = None
    spins: list[int] | None = None
    shares: list | None = None
    content_positions: Literal["shared", "heads", "shared_sum", "heads_sum"] | None = None

    def name_shares(self) -> None:
        """Write a list of encodings as the field `shares` of the encoding of that name."""
        if isinstance(self.position_encoding, list):
            named = [[each, {}] if isinstance(each, str) else list(each) for each in self.position_encoding]
            self.position_encoding, self.shares = "shares", named

    def fill_in_rotations(self) -> None:
        """Replace `None` by the default of the encoding or its start, if it has one."""
        self.name_shares()
        encoding = encoding_of(self)
        if encoding is None:
            return
        if self.rotary_init in encoding.accepted_starts():
            start_of(self).fill_in(self)
        if self.block_size is None:
            self.block_size = encoding.block_sizes.default or vars(self)["head_dim"]
        if self.rotary_init is None and encoding.rotary_inits:
            self.rotary_init = encoding.rotary_inits[0]
        start = start_of(self)
        scale = None if self.rotary_init is None else start.default_scale
        defaults = {"rotary_init_scale": scale, "rope_theta": start.rope_theta or encoding.rope_theta}
        for name, value in (defaults | own_fields(self)).items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def user_files(self) -> list[UserFile]:
        """The files in which users registered the encoding, its start and its convention of coordinates."""
        named = (
            (ENCODINGS, str(self.position_encoding)),
            (STARTS, self.rotary_init),
            (CONVENTIONS, getattr(self, "coordinates", None)),
        )
        found = [file for register, name in named for file in register.files(name)]
        found += [file for part, _ in share_configs(self) for file in part.user_files()] if self.shares else []
        return list(dict.fromkeys(found))


@strict
@dataclass
class EncodingConfig(RotaryFields):
    """
    Configuration of a [`RotaryEncoding`] outside of our models. See [`RotaryFields`] for the other fields.

    Args:
        num_axes: Number A of axes of a position.
        num_hidden_layers, num_attention_heads, head_dim: Sizes of the attention whose keys are rotated.
        hidden_size: Channels of the states that `content_positions` reads.
        folded_grids, round_angles: See [`LieREConfig`] and [`LieRotaryEmbedding`].

    Raises:
        `huggingface_hub.errors.StrictDataclassError`: if a field has the wrong type or the fields do not fit together.
    """

    num_axes: int = 2
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    head_dim: int = 64
    hidden_size: int | None = None
    folded_grids: list[list[int]] | None = None
    round_angles: bool = False
    # Constants of a grid have one rotation for all prefix tokens.
    num_prefix_tokens: ClassVar[int] = 1

    def __post_init__(self):
        self.fill_in_rotations()

    def validate_rotations(self):
        check_rotations(self)


# Fields of some encodings or starts.
OWN_FIELDS = "min_frequency", "max_frequency", "unrotated_share", "axial_layout", "spins", "shares", "content_positions"


class Share(NamedTuple):
    """
    Attributes:
        config: Of an encoding, for heads of as many channels as its share has.
        axes: The axes of the positions that it rotates by.
    """

    config: EncodingConfig
    axes: list[int]


def share_configs(config) -> list[Share]:
    """
    The encodings that share the heads of a configuration. Raises `ValueError` for shares that do not fit a head.
    """
    num_axes, rest, total, found = config.num_axes, config.head_dim, 0.0, []
    for each in config.shares:
        if not (isinstance(each, (list, tuple)) and list(map(type, each)) == [str, dict]):
            raise ValueError(f"shares: {each!r}; accepted: the name of an encoding and a dictionary of its fields.")
    given = [fields["share"] for _, fields in config.shares if "share" in fields]
    others = (1 - sum(given)) / max(len(config.shares) - len(given), 1)
    for name, fields in [(name, dict(own)) for name, own in config.shares]:
        if fields.get("content_positions") is not None:
            raise ValueError(f"shares: {name} has content_positions; accepted: one for all shares, beside the list.")
        axes, share = fields.pop("axes", [*range(num_axes)]), fields.pop("share", others)
        total += share
        fits = share > 0 and total < 1 + 1e-6
        if not axes or sorted(set(axes)) != sorted(axes) or not set(axes) <= {*range(num_axes)} or not fits:
            raise ValueError(
                f"shares: {name} has axes={axes} and share={share}; accepted: different axes among 0 … {num_axes - 1}, "
                "and parts of the head that are positive and together at most 1."
            )
        ENCODINGS.check(name)
        step = fields.get("block_size") or ENCODINGS[name].block_sizes.default or 2
        step *= len(axes) if ENCODINGS[name].serves_one_axis else 1
        if rest < step:
            raise ValueError(
                f"shares: {name} needs {step} channels or more, and {rest} of a head of {config.head_dim} are left; "
                "accepted: smaller shares or blocks."
            )
        # Whole blocks, at least one.
        width = min(max(round(share * config.head_dim / step), 1), rest // step) * step
        rest -= width
        sizes = {"num_hidden_layers": config.num_hidden_layers, "num_attention_heads": config.num_attention_heads}
        try:
            part = EncodingConfig(
                **{"position_encoding": name, "share_heads": config.share_heads, **fields},
                **sizes,
                share_layers=config.share_layers,
                head_dim=width,
                num_axes=len(axes),
                folded_grids=None if config.folded_grids is None else [],
            )
        except (TypeError, StrictDataclassError) as error:
            raise ValueError(f"shares: {name} with {fields} on {width} channels: {error.__cause__ or error}") from None
        found.append(Share(part, list(axes)))
    return found


def require_modules(values: Mapping[str, Any], modules: Sequence[str] | None) -> None:
    """Raises `ValueError` if values of a file belong to modules of a user that are not imported."""
    registers = {"position_encoding": (*UNROTATED, *ENCODINGS), "rotary_init": STARTS, "coordinates": CONVENTIONS}
    unknown = [name for name, known in registers.items() if values.get(name) not in (None, "pretrained", *known)]
    if modules and unknown:
        raise ValueError(
            f"{', '.join(f'{name}={values[name]!r}' for name in unknown)} of this model is in {', '.join(modules)}: "
            f"import {modules[0]}, which registers it, before the model is loaded; scripts and hf-liere do so by "
            f"--register {modules[0]}.py. Where nobody has imported hf_liere, "
            "trust_remote_code=True does so."
        )


def own_fields(config) -> dict[str, Any]:
    """Fields for the encoding and the start of a configuration alone, with their defaults."""
    encoding = encoding_of(config)
    given = {} if config.content_positions is None else {"content_positions": None}
    return start_of(config).fields | (encoding.fields | given if encoding else {})


@dataclass(repr=False)
class GridFields:
    r"""
    The coordinates of patches on a grid, and how training moves them.

    Args:
        coordinates (`str`, *optional*):
            The coordinate of the patch with index i on an axis of n patches that had n₀ in training: `"index"` i;
            `"train_grid"` i·(n/n₀)/(n−1), that is linspace(0, n/n₀, n); `"centred_grid"` the same minus the middle,
            (i−(n−1)/2)·(n/n₀)/(n−1), which saves LieRE half of its exponentials: R(−p) = R(p)ᵀ; `"fixed_grid"` i/(n−1),
            that is linspace(0, 1, n) (LieRE §5.6); `"train_index"` i·n₀/n (timm's reference grid); `"unit"` (i+½)/n;
            `"unit_width"` (i+½)/w on every axis, w the number of columns (ComRoPE's code on video); `"physical"` ½ +
            (i+½−n/2)·e, where e is the extent of a patch in `physical_unit`: its pixels times the `spacing` of the
            input. In `centred_grid` class and register tokens are at 0, the middle, where nothing is rotated, with or
            without `rotate_prefix`. In `physical` the centre of the input is at ½, the same tissue in the same field of
            view has the same coordinates for any size of voxels, and an input with an extent of one unit has `unit`
            coordinates. `None` means `index` for the RoPE encodings and STRING, `train_grid` for `liere`, `unit` for
            ComRoPE, as in the papers.
        position_perturbation (`float`, defaults to 0.0):
            σ of ComRoPE eq. (11): during training, coordinates of patches are normal around the centre of the patch,
            deviation σ patch extents, truncated to the patch; one draw for all samples, see [`draw_perturbation`].
        position_shift (`float`, defaults to 0.0):
            DINOv3's augmentation of coordinates during training (its §3.2; `pos_embed_shift`): all patches of a batch
            move together by s_a · (half the extent of the input) on axis a, with s_a ~ U[−shift, shift] drawn for every
            forward pass. DINOv3's coordinates run from −1 to 1 over the image, so the same number means the same
            fraction of the input here, in any `coordinates`. Class and register tokens do not move, nor do `positions`
            given to the model and the table of training patches.
        position_jitter (`float`, *optional*):
            As `position_shift` and after it (`pos_embed_jitter`): distances from the centre of the input, where
            DINOv3's coordinates are zero, are multiplied by a factor per axis, log-uniform in [1/jitter, jitter].
        position_rescale (`float`, *optional*):
            As `position_jitter` and after it (`pos_embed_rescale`), with one factor for all axes, log-uniform in
            [1/rescale, rescale]. DINOv3 uses 2.
    """

    coordinates: str | None = validated_field(lambda name: CONVENTIONS.check(name), default=None)
    position_perturbation: float | int = 0.0
    position_shift: float | int = 0.0
    position_jitter: float | int | None = None
    position_rescale: float | int | None = None

    def fill_in_coordinates(self) -> None:
        """Replace `None` by the default coordinates of the encoding, if it rotates."""
        if self.coordinates is None and (encoding := encoding_of(self)) is not None:
            self.coordinates = encoding.default_coordinates(self)


def rotated_prefix(config, coordinate: float = 0.5) -> float:
    """Returns the coordinate of rotated class and register tokens: 0 if inputs are centred at 0, else `coordinate`."""
    convention = convention_of(config)
    return 0.0 if convention is not None and convention.centre == 0 else coordinate


def default_rotate_prefix(config) -> bool:
    """The default of `rotate_prefix` for images and videos."""
    encoding = encoding_of(config)
    if encoding is None or not encoding.rotate_prefix:
        return False
    convention = CONVENTIONS.get(config.coordinates or encoding.coordinates)
    return convention is not None and convention.centre == 0.5


def check_ranges(config, ranges: tuple[tuple[tuple[str, ...], Callable, str], ...]) -> None:
    """Raises `ValueError` for a value out of range, see `RANGES`."""
    for names, is_accepted, accepted in ranges:
        for name in names:
            value = getattr(config, name, None)
            if value is not None and not is_accepted(value):
                raise ValueError(f"{name}={value} must {accepted}.")


def check_format_version(version: int, newest: int) -> None:
    """Raises `ValueError` for a format that this release cannot read."""
    if version > newest:
        raise ValueError(
            f"format_version={version} was written by a newer hf_liere; this one reads up to {newest}. Please upgrade "
            "hf_liere."
        )


def refuse_unused(config, neutral: dict[str, Any], is_used: bool, owner: str) -> None:
    """Raises `ValueError` if a field that nothing uses differs from its neutral value."""
    given = {name: found for name, value in neutral.items() if (found := getattr(config, name, value)) != value}
    if given and not is_used:
        fields = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(f"{fields} would do nothing here: accepted with {owner}.")


def check_rotations(config) -> None:
    """
    Raises `ValueError` if values of a configuration with [`RotaryFields`] and sizes of attention are out of range, or
    do not fit together; their types are right, and defaults filled in.
    """
    check_ranges(config, RANGES)
    own = own_fields(config)
    for name in OWN_FIELDS:
        owners = [encoding for encoding, kind in ENCODINGS.items() if name in kind.fields]
        owners += [f"rotary_init={name_of_start!r}" for name_of_start, start in STARTS.items() if name in start.fields]
        refuse_unused(config, {name: None}, name in own, " or ".join(owners) or "other encodings")
    if (config.min_frequency or 0) > (config.max_frequency or 0):
        raise ValueError(
            f"min_frequency={config.min_frequency} must not be above max_frequency={config.max_frequency}."
        )
    if config.content_positions is not None and (orientations_of(config) or config.folded_grids is not None):
        raise ValueError(
            f"content_positions={config.content_positions!r}: orientations cannot be moved by addition, and folded "
            "rotations not by the input; accepted: None."
        )
    if encoding_of(config) is not None:
        _check_block_size(config)
        _check_start(config)
        if config.folded_grids is not None:
            _check_folding(config)


def _check_block_size(config) -> None:
    name, size, encoding = config.position_encoding, config.block_size, encoding_of(config)
    head_dim, axes, sizes = config.head_dim, config.num_axes, encoding.block_sizes
    if encoding.only_axes not in (None, axes):
        raise ValueError(
            f"{name} is defined on {encoding.only_axes} axes, and there are {axes}: no published form for another "
            "number is known. Accepted here are the other rotary encodings."
        )
    if head_dim < 2:
        # Patches and the layer have heads, and no hidden_size.
        width = getattr(config, "hidden_size", None)
        origin = "" if width is None else f" (hidden_size={width} / num_attention_heads={config.num_attention_heads})"
        raise ValueError(f"A head_dim of {head_dim}{origin} cannot be rotated; {name} needs at least 2.")
    accepted = sizes.accepted(head_dim, axes)
    if size not in accepted:
        rule = sizes.rule if 2 <= size <= head_dim or not sizes.varies else ANY.rule
        named = f"2 … {head_dim}" if sizes is ANY else accepted or "none, choose another head_dim"
        raise ValueError(
            f"block_size={size}{rule.format(encoding=name, head_dim=head_dim, axes=axes)}; accepted here: {named}."
        )
    if obstacle := encoding.obstacle(config):
        raise ValueError(f"{obstacle}.")


def _check_start(config) -> None:
    encoding, name, inits = config.position_encoding, config.rotary_init, encoding_of(config).accepted_starts()
    if name is None:
        return
    others = ", ".join(other for other, kind in ENCODINGS.items() if name in kind.accepted_starts())
    obstacle = start_of(config).obstacle(config) if name in inits else f"it is for {others}, not for {encoding}"
    if obstacle:
        accepted = ", ".join(start for start in inits if start in STARTS and STARTS[start].obstacle(config) is None)
        raise ValueError(
            f"rotary_init={name!r}: {obstacle}. With block_size={config.block_size}, {encoding} accepts "
            f"{accepted or 'None, having no parameters to initialise'}."
        )


def _check_folding(config) -> None:
    grids = config.folded_grids
    if grids and not needs_exponential(config):
        raise ValueError(
            f"folded_grids={grids}: only liere with block_size above 2 has rotations to keep; accepted for "
            f"{config.position_encoding}: [] or None."
        )
    if grids and needs_spacing(config):
        raise ValueError(
            f"folded_grids={grids}: with coordinates={config.coordinates!r} the rotations of a grid depend on the "
            "spacing of the input, so that none can be kept."
        )
    for grid in grids:
        if len(grid) != config.num_axes or any(size < 1 for size in grid):
            raise ValueError(f"folded_grids: {grid} must be {config.num_axes} numbers of patches, one per axis.")
