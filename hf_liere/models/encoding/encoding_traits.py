"""Constant facts about every rotary encoding and its starts, which all other parts read here."""

import difflib
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..saved_code import Parts


# Starts that give every plane a frequency; in the drawn ones, all entries have one distribution.
SPECTRA = ("frequencies", "golden_gate")
AXIAL = "axial"
DRAWN = ("uniform", "normal", "zeros")
# Fields for some encodings or starts only, with their defaults.
GOLDEN_GATE_FIELDS = {"min_frequency": 0.1, "max_frequency": 1.0, "unrotated_share": 0.0}
AXIAL_FIELDS = {"axial_layout": "blocks", "axial_spectrum": "full"}
# The default follows from the block size.
SO3_FIELDS = {"spins": None}
PRODUCT_FIELDS = {"relative_axis": 0}
OWN_FIELDS: dict[str, Any] = {**GOLDEN_GATE_FIELDS, **AXIAL_FIELDS, **SO3_FIELDS, **PRODUCT_FIELDS}
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
# Encoding → its class whose rotations of some grids are constants.
FOLDED = Parts("folded position_encoding")
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
        rule: Message about other sizes after "block_size=5", with the names encoding, head_dim and axes.
        default: Default size; `None` means the whole head.
    """

    accepts: Callable[[int, int, int], bool]
    rule: str
    default: int | None

    @property
    def varies(self) -> bool:
        return self not in (PLANES, TRIPLES)

    def accepted(self, head_dim: int, num_axes: int) -> list[int]:
        return [size for size in range(2, head_dim + 1) if self.accepts(size, head_dim, num_axes)]


PLANES = BlockSizes(lambda size, *_: size == 2, ": {encoding} rotates planes, its only block_size is 2", 2)
TRIPLES = BlockSizes(lambda size, *_: size == 3, ": {encoding} rotates three channels, its only block_size is 3", 3)
ANY = BlockSizes(lambda *_: True, " does not fit a head_dim of {head_dim}", 8)
DIVISORS = BlockSizes(lambda size, width, _: width % size == 0, " must divide head_dim={head_dim} for {encoding}", 8)
DIVISORS_BY_AXIS = BlockSizes(
    lambda size, head_dim, axes: head_dim % (size * axes) == 0,
    " times {axes} axes must divide head_dim={head_dim} for {encoding} (each block serves one axis)",
    8,
)
EVEN_DIVISORS = BlockSizes(
    lambda size, head_dim, _: head_dim % size == 0 and size % 2 == 0,
    " must be even and divide head_dim={head_dim} for {encoding}, whose blocks are made of planes",
    None,
)
CIRCULANTS = BlockSizes(
    lambda size, head_dim, _: head_dim % size == 0 and size > 2,
    " must be above 2 and divide head_dim={head_dim} for {encoding}: circulant skew-symmetric matrices of size 2 are 0",
    16,
)


@dataclass(frozen=True)
class EncodingTraits:
    """
    Facts about an encoding.

    Attributes:
        description: Name in tables, and after a colon its explanation in reports on models.
        block_sizes: Accepted sizes of blocks.
        rotary_inits: Accepted `rotary_init`, the default first; none for encodings that learn nothing.
        rope_theta: Default of `rope_theta`; `None` if the encoding does not use it.
        coordinates: Default of `coordinates`.
        commutes: Whether the generators of all axes commute for any values, which makes rotations relative. Blocks of
            two channels always do.
        rotate_prefix: Default of `rotate_prefix` in `CENTRED_COORDINATES`.
        product: R(p) = Π_a exp(p_a A_a) instead of exp(Σ_a p_a A_a), the factor of `relative_axis` first.
        serves_one_axis: Whether every block has a generator for one axis only.
        proportional: Whether the generators of a block are multiples of one matrix.
        num_axes: The only number of axes for which the encoding is defined; `None` means any.
        pretrained: How it starts at the planes of a pretrained RoPE: `"planes"`, by factors of the pretrained
            frequencies; `"blocks"`, by its parameters; or the reason why it cannot start at those of any RoPE.
        fields: Fields of the configuration for this encoding alone, with their defaults.
    """

    description: str
    block_sizes: BlockSizes
    rotary_inits: tuple[str, ...]
    rope_theta: float | None
    coordinates: str = "index"
    commutes: bool = True
    rotate_prefix: bool = False
    product: bool = False
    serves_one_axis: bool = False
    proportional: bool = False
    num_axes: int | None = None
    pretrained: str = "blocks"
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return self.description.partition(":")[0]

    @property
    def learned(self) -> bool:
        return bool(self.rotary_inits)

    @property
    def planar(self) -> bool:
        """Whether the encoding rotates planes of neighbouring channels."""
        return self.block_sizes is PLANES


ENCODING_TRAITS = {
    "axial_rope": EncodingTraits(
        "Axial RoPE: planes that each rotate with one axis, by fixed frequencies",
        PLANES,
        rotary_inits=(),
        rope_theta=100.0,
        serves_one_axis=True,
        pretrained="it learns nothing",
        fields=AXIAL_FIELDS,
    ),
    "golden_gate_rope": EncodingTraits(
        "Golden gate RoPE: rotations of planes by fixed frequencies whose directions are spread evenly",
        PLANES,
        rotary_inits=(),
        rope_theta=None,
        pretrained="it learns nothing",
        fields=GOLDEN_GATE_FIELDS,
    ),
    "rope_mixed": EncodingTraits(
        "RoPE-Mixed: rotations of planes by learned frequencies of all axes",
        PLANES,
        rotary_inits=(*SPECTRA, *DRAWN, AXIAL),
        rope_theta=10.0,
        pretrained="planes",
    ),
    "liere": EncodingTraits(
        "LieRE: rotations R(p) = exp(Σ pₐ Aₐ) with free skew-symmetric generators Aₐ",
        ANY,
        rotary_inits=(*DRAWN, *SPECTRA, AXIAL, "so3"),
        rope_theta=10.0,
        coordinates="train_grid",
        commutes=False,
    ),
    "comrope_ap": EncodingTraits(
        "ComRoPE-AP: learned rotations whose generators commute, each block serving one axis",
        DIVISORS_BY_AXIS,
        rotary_inits=("normal", "uniform", "zeros", AXIAL),
        rope_theta=None,
        coordinates="unit",
        rotate_prefix=True,
        serves_one_axis=True,
        proportional=True,
    ),
    "comrope_ld": EncodingTraits(
        "ComRoPE-LD: learned rotations whose generators commute, being multiples of one matrix",
        DIVISORS,
        rotary_inits=("normal", "uniform", "zeros", AXIAL),
        rope_theta=None,
        coordinates="unit",
        rotate_prefix=True,
        proportional=True,
    ),
    "cayley_string": EncodingTraits(
        "Cayley-STRING: RoPE-Mixed in a learned orthogonal basis, the Cayley map of a skew matrix",
        EVEN_DIVISORS,
        rotary_inits=(*SPECTRA, *DRAWN, AXIAL),
        rope_theta=10.0,
    ),
    "circulant_string": EncodingTraits(
        "Circulant-STRING: learned rotations whose generators commute, being circulant",
        CIRCULANTS,
        rotary_inits=(*SPECTRA, *DRAWN),
        rope_theta=10.0,
        pretrained="its blocks rotate the planes of a Fourier basis, not pairs of channels as RoPE does",
    ),
    "spherical_rope": EncodingTraits(
        "Spherical RoPE: products of rotations of three channels about two of their axes",
        TRIPLES,
        rotary_inits=("frequencies", *DRAWN),
        rope_theta=100.0,
        commutes=False,
        product=True,
        num_axes=2,
        pretrained="it rotates three channels, not pairs of channels as RoPE does",
        fields=PRODUCT_FIELDS,
    ),
    "liere_product": EncodingTraits(
        "LieRE product: R(p) = Π Uₐ rot(pₐ ωₐ) Uₐᵀ, planes of each axis in a learned basis",
        EVEN_DIVISORS,
        rotary_inits=(*SPECTRA, *DRAWN, AXIAL),
        rope_theta=10.0,
        commutes=False,
        product=True,
        fields=PRODUCT_FIELDS,
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


def check_encoding(name: str, accepted: Collection[str] = ("none", "absolute", *ENCODING_TRAITS)) -> None:
    """Raises `ValueError` for a `position_encoding` that is not accepted."""
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


def axis_of_plane(plane: int | torch.Tensor, planes_per_axis: int, num_axes: int, layout: str | None):
    """The axis that plane i of a head of `axial_rope` serves, for one or many i."""
    return plane % num_axes if layout == "interleaved" else plane // planes_per_axis


def _axial_obstacle(config) -> str | None:
    """Why an encoding cannot rotate pairs of channels in place as `axial_rope` does."""
    traits, encoding, head_dim, axes = rotary_traits(config), config.position_encoding, config.head_dim, config.num_axes
    if obstacle := heads_obstacle(config):
        return obstacle
    # In whole heads, the axis is the only one.
    shared = 1 if config.axial_layout == "heads" else axes
    count = head_dim // (2 * shared)
    if not count:
        return f"head_dim={head_dim} is too small for axial_rope, which needs a plane for each of {axes} axes"
    served = [axis_of_plane(plane, count, axes, config.axial_layout) for plane in range(shared * count)]
    sizes = traits.block_sizes.accepted(head_dim, axes)
    reasons = {size: _block_obstacle(traits, size, head_dim, axes, served) for size in sizes}
    if (reason := reasons[config.block_size]) is None:
        return None
    fitting = [size for size, other in reasons.items() if other is None]
    return (
        f"{encoding} cannot contain axial_rope with head_dim={head_dim}, {axes} axes and axial_layout="
        f"{config.axial_layout!r}: {reason}; accepted here: block_size in {fitting}"
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


def _odd_block_obstacle(config) -> str | None:
    """Why the free blocks of an encoding do not consist of planes."""
    if rotary_traits(config).block_sizes is not ANY or config.block_size % 2 == 0:
        return None
    return (
        f"it gives every plane of two channels a frequency, and blocks of {config.block_size} channels would cut them"
    )


def _so3_obstacle(config) -> str | None:
    """Why the generators of an encoding do not start as a representation of so(3)."""
    size, spins = config.block_size, config.spins
    if hasattr(config, "coordinates"):
        return "it is for tokens whose positions are orientations, not for patches on a grid"
    if config.num_axes != 3:
        return f"it rotates by rotation vectors, which have 3 axes; there are num_axes={config.num_axes}"
    if spins is None:
        blocks = ", ".join(f"{block} (spin {spin})" for block, spin in SPINS.items())
        return (
            f"block_size={size} is not the size of one spin; accepted are {blocks}, and any other together with spins, "
            "such as spins=[1, 2, 3] for 15 = 3 + 5 + 7"
        )
    if not any(spins) or min(spins) < 0:
        return f"spins={spins} must be whole numbers of at least 0, and one of them above 0"
    if size != (needed := sum(2 * spin + 1 for spin in spins)):
        return f"spins={spins} have 2l + 1 channels each, {needed} together; block_size={size} must be that"
    if config.rotary_init_scale == 1:
        return None
    return (
        f"rotary_init_scale={config.rotary_init_scale} must be 1: multiples of its generators do not represent "
        "rotations, because [sL_x, sL_y] = s² L_z is not sL_z"
    )


@dataclass(frozen=True)
class Start:
    """
    Facts about a value of `rotary_init`.

    Attributes:
        scale: Default of `rotary_init_scale`.
        obstacle: Why the encoding of a configuration, which knows the start, cannot start so; `None` if it can.
        fields: Fields of the configuration for this start alone, with their defaults.
    """

    scale: float = 1.0
    obstacle: Callable[[Any], str | None] = lambda config: None
    fields: dict[str, Any] = field(default_factory=dict)


STARTS = {
    "uniform": Start(2 * math.pi),
    "normal": Start(math.sqrt(2)),
    "zeros": Start(),
    "frequencies": Start(obstacle=_odd_block_obstacle),
    "golden_gate": Start(obstacle=_odd_block_obstacle, fields=GOLDEN_GATE_FIELDS),
    AXIAL: Start(obstacle=_axial_obstacle, fields=AXIAL_FIELDS),
    "so3": Start(obstacle=_so3_obstacle, fields=SO3_FIELDS),
}


def own_fields(config) -> dict[str, Any]:
    """Fields for the start or else the encoding of a configuration alone, with their defaults."""
    start, traits = STARTS.get(config.rotary_init), traits_of(config)
    return (start and start.fields) or (traits.fields if traits else {})


def needs_exponential(config) -> bool:
    """Whether rotations need a matrix exponential, so that folding stores them as constants."""
    traits = traits_of(config)
    return traits is not None and not traits.product and not generators_commute(config)
