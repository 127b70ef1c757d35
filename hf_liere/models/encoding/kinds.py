"""Registers of encodings, starts and conventions of coordinates, and the block sizes that encodings accept."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..registers import Register


# Value of `position_encoding` → its [`rotary_encoding.RotaryEncoding`].
ENCODINGS = Register("position_encoding")
# Value of `rotary_init` → its [`starts.Start`].
STARTS = Register("rotary_init")
# Value of `coordinates` → its [`Convention`].
CONVENTIONS = Register("coordinates")


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


def encoding_of(config) -> Any:
    """The class of a configuration's encoding; `None` if it rotates nothing."""
    return ENCODINGS.get(config.position_encoding)


def generators_commute(config) -> bool:
    """Whether the rotations of a rotary encoding are relative for any values of its parameters."""
    return encoding_of(config).commutes or config.block_size == 2


def needs_exponential(config) -> bool:
    """Whether rotations need a matrix exponential, so that folding stores them as constants."""
    encoding = encoding_of(config)
    return encoding is not None and not encoding.product and not generators_commute(config)


@dataclass(frozen=True)
class Convention:
    """
    A value of `coordinates`, see [`rotary_fields.GridFields`].

    ```python
    from hf_liere import Convention
    Convention("0 … 1 over any grid", lambda index, size, trained, width: (index + 0.5) / size, centre=0.5)
    ```

    Attributes:
        description: Range of the coordinates, in reports on models.
        place: (index i of a patch, size n of its axis, n₀ of training, size w of the last axis) → coordinate, for
            numbers and for tensors.
        is_proportional: Whether coordinates are multiples of the index, or of its distance from the middle.
        centre: Coordinate of the centre of any input (of its columns, in `unit_width`); `None` if it depends on the
            size.
        extents: What computes the extents of patches from the spacing of an input, such as
            [`physical_spacing.physical_extents`]; `place` is then that of an input with an extent of one unit.
    """

    description: str
    place: Callable
    is_proportional: bool = False
    centre: float | None = None
    extents: Callable | None = None

    @functools.cached_property
    def samples(self) -> tuple[float, ...]:
        """The coordinates of patches of a few grids: those of another function are others."""
        sizes = itertools.product((2, 3, 5), (3, 4), (3, 5))  # n, n₀ and w
        return tuple(float(self.place(i, n, *others)) for n, *others in sizes for i in range(n))


def convention_of(config) -> Convention | None:
    """The convention of a configuration; `None` for tokens, and for models without coordinates."""
    return CONVENTIONS.get(getattr(config, "coordinates", None))


def needs_spacing(config) -> bool:
    """Whether coordinates follow from the spacing of an input, not from its grid alone."""
    convention = convention_of(config)
    return convention is not None and convention.extents is not None
