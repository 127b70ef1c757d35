"""The start at a representation of so(3), for tokens whose positions are orientations."""

import torch

from ...plain.encodings import representation
from ..rotation.exponential import skew_entries
from .kinds import STARTS, Start


# Block sizes with one irreducible representation of so(3), and its spin.
SPINS = {3: 1, 5: 2, 7: 3}


@STARTS.add("so3")
class SO3(Start):
    """[L_x, L_y] = L_z in every block, see `spins` in [`rotary_fields.RotaryFields`]."""

    # The default follows from the block size.
    fields = {"spins": None}
    takes_orientations = True
    encodings = ("liere",)

    @classmethod
    def fill_in(cls, config) -> None:
        if config.spins is None:
            config.block_size = config.block_size or min(SPINS)
            config.spins = [SPINS[config.block_size]] if config.block_size in SPINS else None
        elif config.block_size is None and isinstance(config.spins, list) and config.spins:
            # Values of other types are refused later.
            config.block_size = sum(2 * spin + 1 for spin in config.spins if isinstance(spin, int))

    @classmethod
    def obstacle(cls, config) -> str | None:
        size, spins = config.block_size, config.spins
        if hasattr(config, "coordinates"):
            return "it is for tokens whose positions are orientations, not for patches on a grid"
        if config.num_axes != 3:
            return f"it rotates by rotation vectors, which have 3 axes; there are num_axes={config.num_axes}"
        if spins is None:
            blocks = ", ".join(f"{block} (spin {spin})" for block, spin in SPINS.items())
            return (
                f"block_size={size} is not the size of one spin; accepted are {blocks}, and any other together with "
                "spins, such as spins=[1, 2, 3] for 15 = 3 + 5 + 7"
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

    @classmethod
    def parameters(cls, encoding) -> dict[str, torch.Tensor]:
        entries = skew_entries(representation(encoding.config.spins))  # (3, b(b−1)/2)
        return {"generators": entries[:, None, None, None].expand_as(encoding.generators)}
