"""Which encodings and block sizes the tests run over: an encoding that is registered is in all of these lists."""

import own_rotations
import torch

from hf_liere.encoding.kinds import ENCODINGS as KINDS
from hf_liere.encoding.positions import CONVENTIONS
from hf_liere.plain import PLAIN_ENCODINGS, LieRotary
from hf_liere.plain.encodings import planar


class PlainTwoParameters(LieRotary):
    """The encoding of `own_rotations`, as the references of the package's own."""

    starts = ("normal", "zeros", "tenth")
    accepts = staticmethod(own_rotations.accepts)

    def make_parameters(self):
        sizes = self.num_axes, self.num_layers, self.heads, self.num_blocks, 1
        self.generators = torch.nn.Parameter(torch.empty(sizes))

    def reset_parameters(self):
        if self.rotary_init == "tenth":
            torch.nn.init.constant_(self.generators, 0.1)
        super().reset_parameters()

    def matrices(self):
        planes = self.generators.expand(-1, -1, -1, -1, self.block_size // 2)  # (A, layers, heads or 1, blocks, b/2)
        return planar(planes.flatten(-2), self.block_size)


# What the package's own encodings have, and one of a user lacks.
OWN_PLAIN = tuple(PLAIN_ENCODINGS)
PLAIN_ENCODINGS["two_parameters"] = PlainTwoParameters
ENCODINGS = tuple(KINDS)
# Coordinates that follow from a grid alone.
GRID_CONVENTIONS = tuple(name for name, convention in CONVENTIONS.items() if convention.extents is None)
LEARNED = tuple(name for name, traits in KINDS.items() if traits.learned)
COMMUTING = tuple(name for name, traits in KINDS.items() if traits.commutes)
PRODUCTS = tuple(name for name, traits in KINDS.items() if traits.product)
# Encodings that fold into the query and key weights, where they have a basis, and need no exponentials.
FOLDABLE = (*(name for name in COMMUTING if KINDS[name].in_basis or KINDS[name].planar), "liere_product")
# Encodings that can start without any rotation.
NEUTRAL = tuple(name for name, traits in KINDS.items() if "zeros" in traits.rotary_inits)
# Their basis is never the identity, so that even without any rotation queries and keys are rounded in it.
ROUNDED = ("circulant_string",)


def on_axes(axes, encodings=ENCODINGS):
    """Those that exist on so many axes."""
    return tuple(name for name in encodings if KINDS[name].only_axes in (None, axes))


def block_sizes(encoding, head_dim=24, axes=2, among=(2, 3, 4, 8, 24)):
    """The sizes of `among` that an encoding accepts; its only one if it has only one."""
    accepted = KINDS[encoding].block_sizes.accepted(head_dim, axes)
    return accepted if len(accepted) == 1 else [size for size in among if size in accepted]


def block_size(encoding, head_dim=24, axes=2, wanted=4):
    """The size `wanted`, or the nearest that the encoding accepts."""
    accepted = KINDS[encoding].block_sizes.accepted(head_dim, axes)
    return min(accepted, key=lambda size: abs(size - wanted))


def fields(encoding, head_dim=24, axes=2, wanted=4):
    """Fields of a configuration with any encoding, also `none` and `absolute`."""
    if encoding not in KINDS:
        return {"position_encoding": encoding}
    return {"position_encoding": encoding, "block_size": block_size(encoding, head_dim, axes, wanted)}


@torch.no_grad()
def perturb(model, std=0.3):
    """Move all parameters of rotations from their start, as training could; return the model or encoding."""
    named = model.rotary_parameters() if hasattr(model, "rotary_parameters") else model.named_parameters()
    for _, parameter in named:
        parameter.add_(std * torch.randn_like(parameter))
    return model


# Every encoding on images, with heads of 24 channels.
IMAGE_CASES = [("liere", 3), *((encoding, block_size(encoding, wanted=8)) for encoding in ENCODINGS)]
