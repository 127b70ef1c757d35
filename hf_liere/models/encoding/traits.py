"""Defaults and rules of an encoding, known before it has parameters."""

from collections.abc import Callable
from typing import Any, ClassVar

from .kinds import ANY, ENCODINGS, PLANES, STARTS, BlockSizes


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
        check: What refuses a new encoding of a user.
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
    in_basis: ClassVar[bool] = False
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
