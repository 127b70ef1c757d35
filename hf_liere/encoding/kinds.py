"""Registers of encodings, starts and conventions of coordinates, and what encodings say of themselves."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import initialization as init

from ..registers import Register


# Value of `position_encoding` → its [`rotary_encoding.RotaryEncoding`].
ENCODINGS = Register("position_encoding")
# Value of `rotary_init` → its [`starts.Start`].
STARTS = Register("rotary_init")


@dataclass(frozen=True)
class BlockSizes:
    """
    The block sizes b that an encoding accepts.

    ```python
    from hf_liere import PLANES, BlockSizes
    fours = BlockSizes(lambda size, head_dim, axes: size == 4, ": {encoding} rotates four channels", 4)
    assert fours.accepted(64, 2) == [4] and PLANES.accepted(64, 2) == [2]
    ```

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
WHOLE = BlockSizes(lambda size, head_dim, _: size == head_dim, ": every share has its own block_size", None)
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


def encoding_of(config) -> Any:
    """The class of a configuration's encoding; `None` if it rotates nothing."""
    return ENCODINGS.get(config.position_encoding)


def generators_commute(config) -> bool:
    """Whether the rotations of a rotary encoding are relative for any values of its parameters."""
    return encoding_of(config).commuting(config)


def needs_exponential(config) -> bool:
    """Whether rotations need a matrix exponential, so that folding stores them as constants."""
    encoding = encoding_of(config)
    return encoding is not None and encoding.exponential(config)


def orientations_of(config) -> list[list[int]]:
    """The axes of every orientation among the positions of a configuration, three each, see `spins`."""
    encoding = encoding_of(config)
    return [] if encoding is None else encoding.orientations(config)


class Start:
    """
    A value of `rotary_init`, see [`registration.register_start`].

    ```python
    from hf_liere import Start
    assert Start.default_scale == 1
    ```

    Attributes:
        name: Its value of `rotary_init`, for [`registration.register_start`].
        fields: Fields of the configuration for this start alone, with their defaults.
        default_scale: Default of `rotary_init_scale`.
        rope_theta: Default of `rope_theta`; `None` means that of the encoding.
        has_planes: Whether it gives planes frequencies.
        takes_orientations: Whether positions are rotation vectors, see `spins` in [`rotary_fields.RotaryFields`].
        encodings: Encodings that accept it, beside those whose `rotary_inits` name it.
    """

    name: ClassVar[str] = ""
    fields: ClassVar[dict[str, Any]] = {}
    default_scale: ClassVar[float] = 1.0
    rope_theta: ClassVar[float | None] = None
    has_planes: ClassVar[bool] = False
    takes_orientations: ClassVar[bool] = False
    encodings: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def fill_in(cls, config) -> None:
        """Replace `None` in a configuration by what follows from other fields."""

    @classmethod
    def obstacle(cls, config) -> str | None:
        """Why the encoding of a configuration, which accepts the start, cannot start so; `None` if it can."""
        return None

    @classmethod
    def parameters(cls, encoding) -> dict[str, torch.Tensor]:
        """Values of the parameters of a [`rotary_encoding.RotaryEncoding`] by name."""
        raise NotImplementedError

    @classmethod
    def reset(cls, encoding: nn.Module) -> None:
        """Set the parameters, unless a checkpoint provided them."""
        for name, values in cls.parameters(encoding).items():
            init.copy_(getattr(encoding, name), values.to(getattr(encoding, name)))


def start_of(config) -> type[Start]:
    """The start of a configuration; one without fields where nothing is learned or a model gives the rotations."""
    return STARTS.get(config.rotary_init, Start)


class EncodingTraits:
    """
    Defaults and rules of a rotary encoding.

    Attributes:
        name: Its value of `position_encoding`, for [`registration.register_encoding`].
        description: Name in tables, and after a colon its explanation in reports on models.
        block_sizes: Accepted sizes of blocks.
        rotary_inits: Accepted `rotary_init`, the default first; none for encodings that learn nothing.
        rope_theta: Default of `rope_theta`; `None` if the encoding does not use it.
        coordinates: Default of `coordinates`.
        commutes: Whether the generators of all axes commute for any values, which makes rotations relative. Blocks of
            two channels always do. Measured for encodings of users that do not say.
        rotate_prefix: Default of `rotate_prefix` where the centre of an input is at ½.
        product: R(p) = Π_a exp(p_a A_a) instead of exp(Σ_a p_a A_a).
        serves_one_axis: Whether every block has a generator for one axis only.
        proportional: Whether the generators of a block are multiples of one matrix.
        only_axes: The only number of axes for which the encoding is defined; `None` means any.
        pretrained: How it starts at the planes of a pretrained RoPE: `"planes"`, by factors of the pretrained
            frequencies; `"blocks"`, by its parameters; or the reason why it cannot start at those of any RoPE.
        fields: Fields of the configuration for this encoding alone, with their defaults.
        in_basis: Whether rotations act in bases that fold into weights, see [`commuting_encodings.EncodingInBasis`].
        check: Checks a user's encoding when it is added; raises if it is malformed.
        title: The name in `description`.
        learned: Whether it has parameters.
        planar: Whether it rotates planes of neighbouring channels.
    """

    name: ClassVar[str] = ""
    description: ClassVar[str] = ""
    block_sizes: ClassVar[BlockSizes] = ANY
    rotary_inits: ClassVar[tuple[str, ...]] = ()
    rope_theta: ClassVar[float | None] = None
    coordinates: ClassVar[str] = "index"
    commutes: ClassVar[bool] = True
    rotate_prefix: ClassVar[bool] = False
    product: ClassVar[bool] = False
    serves_one_axis: ClassVar[bool] = False
    proportional: ClassVar[bool] = False
    only_axes: ClassVar[int | None] = None
    pretrained: ClassVar[str] = "blocks"
    fields: ClassVar[dict[str, Any]] = {}
    in_basis: bool = False
    check: ClassVar[Callable | None] = None
    title: ClassVar[str]
    learned: ClassVar[bool]
    planar: ClassVar[bool]

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.title, cls.learned = cls.description.partition(":")[0], bool(cls.rotary_inits)
        cls.planar = cls.block_sizes is PLANES

    @classmethod
    def accepted_starts(cls) -> tuple[str, ...]:
        """The values of `rotary_init` that it accepts, the default first."""
        names = {name for name, kind in ENCODINGS.items() if kind is cls}
        return *cls.rotary_inits, *(name for name, start in STARTS.items() if names & {*start.encodings})

    @classmethod
    def obstacle(cls, config) -> str | None:
        """Why it cannot rotate with the sizes and fields of a configuration; `None` if it can."""
        return None

    @classmethod
    def commuting(cls, config) -> bool:
        """See [`generators_commute`]."""
        return cls.commutes or config.block_size == 2

    @classmethod
    def exponential(cls, config) -> bool:
        """See [`needs_exponential`]."""
        return not cls.product and not cls.commuting(config)

    @classmethod
    def orientations(cls, config) -> list[list[int]]:
        """See [`orientations_of`]."""
        return [[0, 1, 2]] if start_of(config).takes_orientations else []

    @classmethod
    def default_coordinates(cls, config) -> str:
        """The `coordinates` that `None` means."""
        return cls.coordinates
