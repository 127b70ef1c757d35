"""Constant facts about every rotary encoding, which all other parts read here."""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ..saved_code import Parts


# Initial values with a frequency per plane; the others draw all entries from one distribution.
SPECTRA = ("frequencies", "golden_gate")
AXIAL = "axial"
DRAWN = ("uniform", "normal", "zeros")
# Fields for some encodings or values of `rotary_init` only, with their defaults.
GOLDEN_GATE_FIELDS = {"min_frequency": 0.1, "max_frequency": 1.0, "unrotated_share": 0.0}
AXIAL_FIELDS = {"axial_layout": "blocks", "axial_spectrum": "full"}
# The default follows from the block size.
SO3_FIELDS = {"spins": None}
PRODUCT_FIELDS = {"relative_axis": 0}
OWN_FIELDS = {**GOLDEN_GATE_FIELDS, **AXIAL_FIELDS, **SO3_FIELDS, **PRODUCT_FIELDS}
START_FIELDS: dict[str | None, dict] = {"golden_gate": GOLDEN_GATE_FIELDS, AXIAL: AXIAL_FIELDS, "so3": SO3_FIELDS}
# Block sizes with one irreducible representation of so(3), and its spin.
SPINS = {3: 1, 5: 2, 7: 3}
# Coordinates with ½ at the centre of the input (in `unit_width`, of its columns).
CENTRED_COORDINATES = ("unit", "unit_width", "fixed_grid", "physical")
# Fields that move patches in training, with the values that turn them off.
DISPLACEMENTS = {"position_perturbation": 0.0, "position_shift": 0.0, "position_jitter": None, "position_rescale": None}
# Fields that act in training only.
TRAINING_ONLY = {**DISPLACEMENTS, "patch_dropout_prob": 0.0}


# Encoding → its class.
ENCODING_CLASSES = Parts("position_encoding")
# Encoding → its class for `round_angles`.
ROUNDED = Parts("round_angles with position_encoding")
# Values of `rotary_init` that give every plane a frequency: (A, layers, heads, planes) from config and these numbers.
FREQUENCIES = Parts("rotary_init")


@dataclass(frozen=True)
class BlockSizes:
    """
    The block sizes b that an encoding accepts.

    Attributes:
        accepts: (b, head_dim, number of axes) → whether the size is accepted.
        rule: Message about other sizes, with the names size, encoding, head_dim and axes; `None` if all are accepted.
        default: Default size; `None` means the whole head.
    """

    accepts: Callable[[int, int, int], bool]
    rule: str | None
    default: int | None

    @property
    def varies(self) -> bool:
        return self not in (PLANES, TRIPLES)

    def accepted(self, head_dim: int, num_axes: int) -> list[int]:
        return [size for size in range(2, head_dim + 1) if self.accepts(size, head_dim, num_axes)]


PLANES_RULE = "block_size={size}: {encoding} rotates planes, its only block_size is 2"
PLANES = BlockSizes(lambda size, *_: size == 2, PLANES_RULE, 2)
TRIPLES = BlockSizes(
    lambda size, *_: size == 3,
    "block_size={size}: {encoding} rotates three channels about two axes, its only block_size is 3",
    3,
)
ANY = BlockSizes(lambda size, *_: True, None, 8)
DIVISORS = BlockSizes(
    lambda size, head_dim, _: head_dim % size == 0,
    "block_size={size} must divide head_dim={head_dim} for {encoding}",
    8,
)
DIVISORS_BY_AXIS = BlockSizes(
    lambda size, head_dim, axes: head_dim % (size * axes) == 0,
    "block_size={size} times {axes} axes must divide head_dim={head_dim} for {encoding} (each block serves one axis)",
    8,
)
EVEN_DIVISORS = BlockSizes(
    lambda size, head_dim, _: head_dim % size == 0 and size % 2 == 0,
    "block_size={size} must be even and divide head_dim={head_dim} for {encoding}, whose blocks are made of planes",
    None,
)
CIRCULANTS = BlockSizes(
    lambda size, head_dim, _: head_dim % size == 0 and size > 2,
    "block_size={size} must be above 2 and divide head_dim={head_dim} for {encoding}: circulant skew-symmetric "
    "matrices of size 2 are zero",
    16,
)


@dataclass(frozen=True)
class EncodingTraits:
    """
    Facts about an encoding.

    Attributes:
        title: Name in tables.
        description: Explanation in reports on models.
        block_sizes: Accepted sizes of blocks.
        commutes: Whether the generators of all axes commute for any values, which makes rotations relative. Blocks of
            two channels always do.
        rotary_inits: Accepted `rotary_init`, the default first; none for encodings that learn nothing.
        coordinates: Default of `coordinates`.
        rope_theta: Default of `rope_theta`; `None` if the encoding does not use it.
        rotate_prefix: Default of `rotate_prefix` in `CENTRED_COORDINATES`.
        product: R(p) = Π_a exp(p_a A_a) instead of exp(Σ_a p_a A_a), the factor of `relative_axis` first.
        serves_one_axis: Whether every block has a generator for one axis only.
        proportional: Whether the generators of a block are multiples of one matrix.
        num_axes: The only number of axes for which the encoding is defined; `None` means any.
        pretrained: How it starts at the planes of a pretrained RoPE: `"planes"`, by factors of the pretrained
            frequencies; `"blocks"`, by its parameters; or the reason why it cannot start at those of any RoPE.
        fields: Fields of the configuration for this encoding alone.
    """

    title: str
    description: str
    block_sizes: BlockSizes
    commutes: bool
    rotary_inits: tuple[str, ...]
    coordinates: str
    rope_theta: float | None
    rotate_prefix: bool = False
    product: bool = False
    serves_one_axis: bool = False
    proportional: bool = False
    num_axes: int | None = None
    pretrained: str = "blocks"
    fields: tuple[str, ...] = ()

    @property
    def learned(self) -> bool:
        return bool(self.rotary_inits)

    @property
    def planar(self) -> bool:
        """Whether the encoding rotates planes of neighbouring channels."""
        return self.block_sizes is PLANES


ENCODING_TRAITS = {
    "axial_rope": EncodingTraits(
        title="Axial RoPE",
        description="RoPE on each axis separately, with fixed frequencies",
        block_sizes=PLANES,
        commutes=True,
        rotary_inits=(),
        coordinates="index",
        rope_theta=100.0,
        serves_one_axis=True,
        pretrained="it learns nothing",
        fields=tuple(AXIAL_FIELDS),
    ),
    "golden_gate_rope": EncodingTraits(
        title="Golden gate RoPE",
        description="golden gate RoPE: rotations of planes by fixed frequencies whose directions are spread evenly",
        block_sizes=PLANES,
        commutes=True,
        rotary_inits=(),
        coordinates="index",
        rope_theta=None,
        pretrained="it learns nothing",
        fields=tuple(GOLDEN_GATE_FIELDS),
    ),
    "rope_mixed": EncodingTraits(
        title="RoPE-Mixed",
        description="RoPE-Mixed: rotations of planes by learned frequencies of all axes",
        block_sizes=PLANES,
        commutes=True,
        rotary_inits=(*SPECTRA, *DRAWN, AXIAL),
        coordinates="index",
        rope_theta=10.0,
        pretrained="planes",
    ),
    "liere": EncodingTraits(
        title="LieRE",
        description="LieRE: rotations R(p) = exp(Σ pₐ Aₐ) with free skew-symmetric generators Aₐ",
        block_sizes=ANY,
        commutes=False,
        rotary_inits=(*DRAWN, *SPECTRA, AXIAL, "so3"),
        coordinates="train_grid",
        rope_theta=10.0,
    ),
    "comrope_ap": EncodingTraits(
        title="ComRoPE-AP",
        description="ComRoPE-AP: learned rotations whose generators commute, each block serving one axis",
        block_sizes=DIVISORS_BY_AXIS,
        commutes=True,
        rotary_inits=("normal", "uniform", "zeros", AXIAL),
        coordinates="unit",
        rope_theta=None,
        rotate_prefix=True,
        serves_one_axis=True,
        proportional=True,
    ),
    "comrope_ld": EncodingTraits(
        title="ComRoPE-LD",
        description="ComRoPE-LD: learned rotations whose generators commute, being multiples of one matrix",
        block_sizes=DIVISORS,
        commutes=True,
        rotary_inits=("normal", "uniform", "zeros", AXIAL),
        coordinates="unit",
        rope_theta=None,
        rotate_prefix=True,
        proportional=True,
    ),
    "cayley_string": EncodingTraits(
        title="Cayley-STRING",
        description="Cayley-STRING: RoPE-Mixed in a learned orthogonal basis, the Cayley map of a skew matrix",
        block_sizes=EVEN_DIVISORS,
        commutes=True,
        rotary_inits=(*SPECTRA, *DRAWN, AXIAL),
        coordinates="index",
        rope_theta=10.0,
    ),
    "circulant_string": EncodingTraits(
        title="Circulant-STRING",
        description="Circulant-STRING: learned rotations whose generators commute, being circulant",
        block_sizes=CIRCULANTS,
        commutes=True,
        rotary_inits=(*SPECTRA, *DRAWN),
        coordinates="index",
        rope_theta=10.0,
        pretrained="its blocks rotate the planes of a Fourier basis, not pairs of channels as RoPE does",
    ),
    "spherical_rope": EncodingTraits(
        title="Spherical RoPE",
        description="Spherical RoPE: products of rotations of three channels about two of their axes",
        block_sizes=TRIPLES,
        commutes=False,
        rotary_inits=("frequencies", *DRAWN),
        coordinates="index",
        rope_theta=100.0,
        product=True,
        num_axes=2,
        pretrained="it rotates three channels, not pairs of channels as RoPE does",
        fields=tuple(PRODUCT_FIELDS),
    ),
    "liere_product": EncodingTraits(
        title="LieRE product",
        description="LieRE product: R(p) = Π Uₐ rot(pₐ ωₐ) Uₐᵀ, planes of each axis in a learned basis",
        block_sizes=EVEN_DIVISORS,
        commutes=False,
        rotary_inits=(*SPECTRA, *DRAWN, AXIAL),
        coordinates="index",
        rope_theta=10.0,
        product=True,
        fields=tuple(PRODUCT_FIELDS),
    ),
}


def traits_of(config) -> EncodingTraits | None:
    """The traits of a configuration's encoding; `None` if it rotates nothing."""
    return ENCODING_TRAITS.get(config.position_encoding)


def closest(name: object, accepted: Iterable[str]) -> str:
    """The most similar of the accepted names, for the end of a sentence; nothing if none is similar."""
    plain = str(name).lower().replace("-", "_")
    close = difflib.get_close_matches(plain, accepted, n=2, cutoff=0.6)
    return f"; the closest is {' or '.join(map(repr, close))}" if close else ""


def check_encoding(name: str) -> None:
    """Raises `ValueError` if there is no `position_encoding` of this name."""
    accepted = ("none", "absolute", *ENCODING_TRAITS)
    if name not in accepted:
        raise ValueError(f"position_encoding={name!r}{closest(name, accepted)}; accepted are {', '.join(accepted)}.")


def rotary_traits(config) -> EncodingTraits:
    """The traits of the encoding of a configuration that rotates."""
    return ENCODING_TRAITS[config.position_encoding]


def rotated_prefix(config, coordinate: float = 0.5) -> float:
    """The coordinate of rotated class and register tokens on every axis: 0 if that is the centre, or the given one."""
    return 0.0 if getattr(config, "coordinates", None) == "centred_grid" else coordinate


def default_rotate_prefix(config) -> bool:
    """The default of `rotate_prefix` for images and videos."""
    traits = traits_of(config)
    return (
        traits is not None
        and traits.rotate_prefix
        and (config.coordinates or traits.coordinates) in CENTRED_COORDINATES
    )


def generators_commute(config) -> bool:
    """Whether the rotations of a rotary encoding are relative for any values of its parameters."""
    traits = rotary_traits(config)
    return traits.commutes or config.block_size == 2


def accepted_inits(config) -> tuple[str, ...]:
    """The accepted values of `rotary_init`; blocks of odd size do not consist of planes."""
    traits = rotary_traits(config)
    free_odd = traits.block_sizes is ANY and config.block_size % 2
    names = (name for name in traits.rotary_inits if not (free_odd and name in SPECTRA))
    return tuple(name for name in names if start_obstacle(config, name) is None)


def start_obstacle(config, name: str) -> str | None:
    """Why the encoding of a configuration cannot start as `rotary_init=name` asks, for values with such rules."""
    return OBSTACLES[name](config) if name in OBSTACLES else None


def axis_of_plane(plane: int | torch.Tensor, planes_per_axis: int, num_axes: int, layout: str | None):
    """The axis that plane i of a head of `axial_rope` serves, for one or many i."""
    return plane % num_axes if layout == "interleaved" else plane // planes_per_axis


def _axial_obstacle(config) -> str | None:
    """Why an encoding cannot rotate pairs of channels in place as `axial_rope` does."""
    traits, encoding, head_dim, axes = rotary_traits(config), config.position_encoding, config.head_dim, config.num_axes
    if AXIAL not in traits.rotary_inits:
        return f"{encoding} cannot contain axial_rope: {traits.pretrained}"
    if obstacle := heads_obstacle(config):
        return obstacle
    whole_heads = config.axial_layout == "heads"
    count = head_dim // (2 if whole_heads else 2 * axes)
    if not count:
        return f"head_dim={head_dim} is too small for axial_rope, which needs a plane for each of {axes} axes"
    if whole_heads:
        # Every axis has heads in which it is the only one.
        served = [0] * count
    else:
        served = [axis_of_plane(plane, count, axes, config.axial_layout) for plane in range(axes * count)]
    reason = _block_obstacle(traits, config.block_size, head_dim, axes, served)
    if reason is None:
        return None
    sizes = traits.block_sizes.accepted(head_dim, axes)
    fitting = [size for size in sizes if _block_obstacle(traits, size, head_dim, axes, served) is None]
    return (
        f"{encoding} with block_size={config.block_size} cannot contain axial_rope with head_dim={head_dim}, {axes} "
        f"axes and axial_layout={config.axial_layout!r}: {reason}; accepted here: "
        f"{f'block_size in {fitting}' if fitting else 'no block_size'}"
    )


def heads_obstacle(config) -> str | None:
    """Why heads cannot serve one axis each, where `axial_layout` says so."""
    heads, axes = config.num_attention_heads, config.num_axes
    if config.axial_layout != "heads" or (
        heads >= axes and not config.share_heads and config.axial_spectrum != "shared"
    ):
        return None
    return (
        f"axial_layout='heads' needs a head for each of {axes} axes, share_heads=False and axial_spectrum='full'; here "
        f"are {heads} heads, share_heads={config.share_heads} and axial_spectrum={config.axial_spectrum!r}"
    )


def _block_obstacle(traits: EncodingTraits, size: int, head_dim: int, axes: int, served: list[int]) -> str | None:
    """Why blocks of one size do not contain planes whose axes are `served`."""
    rotated = head_dim // size * size
    if size % 2:
        return f"blocks of {size} channels would cut its planes of two"
    if rotated < 2 * len(served):
        return f"blocks leave {head_dim - rotated} channels unrotated, axial_rope only {head_dim - 2 * len(served)}"
    if traits.proportional:
        blocks = [set(served[first : first + size // 2]) for first in range(0, len(served), size // 2)]
        if any(len(block) > 1 for block in blocks):
            return "a block would rotate planes of several axes, and its generators are multiples of one matrix"
        if traits.serves_one_axis and any(block != {index % axes} for index, block in enumerate(blocks)):
            return "its blocks serve the axes in turn"
    return None


# Why an encoding cannot start from a value of `rotary_init`, `None` if it can, for values with rules.
OBSTACLES: dict[str, Callable[..., str | None]] = {AXIAL: _axial_obstacle}


def default_rope_theta(config) -> float | None:
    """The default of `rope_theta`, which the start at Axial RoPE shares with it."""
    return ENCODING_TRAITS["axial_rope"].rope_theta if config.rotary_init == AXIAL else rotary_traits(config).rope_theta


def own_fields(config) -> dict[str, object]:
    """Fields for the encoding or the `rotary_init` of a configuration alone, with their defaults."""
    traits = traits_of(config)
    names = () if traits is None else traits.fields
    if config.rotary_init in START_FIELDS:
        names = tuple(START_FIELDS[config.rotary_init])
    return {name: value for name, value in OWN_FIELDS.items() if name in names}


def needs_exponential(config) -> bool:
    """Whether rotations need a matrix exponential, so that folding stores them as constants."""
    traits = traits_of(config)
    return traits is not None and not traits.product and not generators_commute(config)
