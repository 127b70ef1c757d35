"""Values of the parameters of an encoding: where they start, and which ones give a wanted rotation."""

from typing import Any, ClassVar

import torch

from ..fast.closed_forms import CLOSED_FORMS
from ..rotation.rotation import LearnedRotations
from .kinds import ANY, ENCODINGS, PLANES, BlockSizes
from .starts import STARTS, start_of


class GeneratorParameters(LearnedRotations):
    """
    What a [`RotaryEncoding`] knows of itself and its parameters apart from the rotations.

    Attributes:
        name: Its value of `position_encoding`, for [`registration.register_encoding`].
        description: Name in tables, and after a colon its explanation in reports on models.
        block_sizes: Accepted sizes of blocks.
        rotary_inits: Accepted `rotary_init`, the default first; none for encodings that learn nothing.
        rope_theta: Default of `rope_theta`; `None` if the encoding does not use it.
        coordinates: Default of `coordinates`.
        commutes: Whether the generators of all axes commute for any values, which makes rotations relative. Blocks of
            two channels always do.
        rotate_prefix: Default of `rotate_prefix` where the centre of an input is at ½.
        product: R(p) = Π_a exp(p_a A_a) instead of exp(Σ_a p_a A_a), the factor of `relative_axis` first.
        serves_one_axis: Whether every block has a generator for one axis only.
        proportional: Whether the generators of a block are multiples of one matrix.
        only_axes: The only number of axes for which the encoding is defined; `None` means any.
        pretrained: How it starts at the planes of a pretrained RoPE: `"planes"`, by factors of the pretrained
            frequencies; `"blocks"`, by its parameters; or the reason why it cannot start at those of any RoPE.
        fields: Fields of the configuration for this encoding alone, with their defaults.
        in_basis: Whether rotations act in bases that fold into weights, see [`commuting_encodings.EncodingInBasis`].
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

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise all parameters by `rotary_init` and `rotary_init_scale`, unless a checkpoint provided them."""
        if self.config.rotary_init is not None:
            start_of(self.config).reset(self)

    @property
    def num_planes(self) -> int:
        """Number of planes per head in [`parameters_for_planes`]."""
        return self.num_blocks * (self.block_size // 2)

    def parameters_for_planes(self, frequencies: torch.Tensor) -> dict[str, torch.Tensor]:
        """
        Parameters by name with which the encoding rotates plane i of a head by Σ_a p_a f_ai; planes are pairs of
        neighbouring channels, unless an encoding documents others.

        Args:
            frequencies: (A, layers or 1, heads or 1, planes).

        Raises:
            ValueError: as [`parameters_for_entries`].
        """
        return self.parameters_for_entries(self.to_blocks(frequencies))

    def parameters_for_entries(self, entries: torch.Tensor) -> dict[str, torch.Tensor]:
        """
        Parameters by name with which the generators have these free entries.

        Args:
            entries: (A, layers or 1, heads or 1, blocks, b(b−1)/2).

        Raises:
            ValueError: if the encoding does not have such generators, with the reason.
        """
        raise NotImplementedError

    @torch.no_grad()
    def scale_generators(self, factors: torch.Tensor) -> dict[str, torch.Tensor]:
        """The changed parameters by name, for generators multiplied by (A,) `factors`."""
        shape = (-1, *[1] * (self.generators.ndim - 1))
        return {"generators": self.generators * factors.to(self.generators).view(shape)}

    @classmethod
    def parts(cls, config) -> list:
        """What the code of a checkpoint needs beside this class, see [`parts.Parts`]."""
        forms = [form for size, form in CLOSED_FORMS.items() if size == config.block_size]
        return [*forms, cls.folded_class(config)]

    @classmethod
    def folded_class(cls, config) -> "type[GeneratorParameters]":
        """The class for a folded model: this one if its rotations cost only cos and sin."""
        return cls

    def plane_basis(self, device: torch.device) -> torch.Tensor | None:
        """(b, b) basis of a block, the planes of `parameters_for_planes` first; `None` for pairs of channels."""
        return None

    def to_blocks(self, frequencies: torch.Tensor) -> torch.Tensor:
        """(…, planes) frequencies → (…, blocks, b(b−1)/2) entries of blocks that rotate these planes."""
        row, column = torch.triu_indices(self.block_size, self.block_size, offset=1)  # (b(b−1)/2,)
        in_plane = (row % 2 == 0) & (column == row + 1)  # (b(b−1)/2,)
        entries = frequencies.new_zeros(*frequencies.shape[:-1], self.num_blocks, self.num_entries)
        entries[..., in_plane] = frequencies.unflatten(-1, (self.num_blocks, self.block_size // 2))
        return entries
