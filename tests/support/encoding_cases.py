"""Which encodings and block sizes the tests run over: an encoding that has traits is in all of these lists."""

import torch

from hf_liere.models.encoding.kinds import CONVENTIONS
from hf_liere.models.encoding.kinds import ENCODINGS as KINDS


ENCODINGS = tuple(KINDS)
# Coordinates that follow from a grid alone.
GRID_CONVENTIONS = tuple(name for name, convention in CONVENTIONS.items() if not convention.needs_spacing)
LEARNED = tuple(name for name, traits in KINDS.items() if traits.learned)
COMMUTING = tuple(name for name, traits in KINDS.items() if traits.commutes)
PRODUCTS = tuple(name for name, traits in KINDS.items() if traits.product)
# Encodings that fold into the query and key weights, where they have a basis, and need no exponentials.
FOLDABLE = (*COMMUTING, "liere_product")
# Encodings that can start without any rotation.
NEUTRAL = tuple(name for name, traits in KINDS.items() if "zeros" in traits.rotary_inits)
# One of each way to compute rotations, for tests that compile, which takes seconds each.
COMPILED_FAST = ("liere", "comrope_ld", "liere_product")
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
