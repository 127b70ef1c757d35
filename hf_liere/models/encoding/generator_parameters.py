"""Values of the parameters of an encoding: where they start, and which ones give a wanted rotation."""

import torch

from ..fast.closed_forms import CLOSED_FORMS
from ..rotation.learned_rotations import LearnedRotations
from .starts import start_of
from .traits import EncodingTraits


class GeneratorParameters(EncodingTraits, LearnedRotations):
    """The parameters of a [`RotaryEncoding`]: their shapes, start and exact upgrades."""

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
        Parameters by name with which the encoding rotates plane i of a head by Σ_a p_a f_ai, (A, layers or 1, heads or
        1, planes); planes are pairs of neighbouring channels, unless an encoding documents others. Raises as
        [`parameters_for_entries`].
        """
        return self.parameters_for_entries(self.to_blocks(frequencies))

    def parameters_for_entries(self, entries: torch.Tensor) -> dict[str, torch.Tensor]:
        """
        Parameters by name with which the generators have these free entries, (A, layers or 1, heads or 1, blocks,
        b(b−1)/2). Raises `ValueError` if the encoding does not have such generators, with the reason.
        """
        raise NotImplementedError

    @torch.no_grad()
    def scale_generators(self, factors: torch.Tensor) -> dict[str, torch.Tensor]:
        """The changed parameters by name, for generators multiplied by (A,) `factors`."""
        shape = (-1, *[1] * (self.generators.ndim - 1))
        return {"generators": self.generators * factors.to(self.generators).view(shape)}

    @classmethod
    def parts(cls, config) -> list:
        # A patch has the default size if it names none.
        chosen = config.block_size or cls.block_sizes.default
        forms = [form for size, form in CLOSED_FORMS.items() if chosen in (None, size)]
        return [*super().parts(config), *forms, cls.folded_class(config)]

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
