"""Which encodings and block sizes the tests run over: an encoding that has traits is in all of these lists."""

from hf_liere.models.encoding_traits import ENCODING_TRAITS


ENCODINGS = tuple(ENCODING_TRAITS)
LEARNED = tuple(name for name, traits in ENCODING_TRAITS.items() if traits.learned)
COMMUTING = tuple(name for name, traits in ENCODING_TRAITS.items() if traits.commutes)
# Encodings that can start without any rotation.
NEUTRAL = tuple(name for name, traits in ENCODING_TRAITS.items() if "zeros" in traits.rotary_inits)


def on_axes(axes, encodings=ENCODINGS):
    """Those that exist on so many axes."""
    return tuple(name for name in encodings if ENCODING_TRAITS[name].num_axes in (None, axes))


def block_sizes(encoding, head_dim=24, axes=2, among=(2, 3, 4, 8, 24)):
    """The sizes of `among` that an encoding accepts; its only one if it has only one."""
    accepted = ENCODING_TRAITS[encoding].block_sizes.accepted(head_dim, axes)
    return accepted if len(accepted) == 1 else [size for size in among if size in accepted]


def block_size(encoding, head_dim=24, axes=2, wanted=4):
    """The size `wanted`, or the nearest that the encoding accepts."""
    accepted = ENCODING_TRAITS[encoding].block_sizes.accepted(head_dim, axes)
    return min(accepted, key=lambda size: abs(size - wanted))


def fields(encoding, head_dim=24, axes=2, wanted=4):
    """Fields of a configuration with any encoding, also `none` and `absolute`."""
    if encoding not in ENCODING_TRAITS:
        return {"position_encoding": encoding}
    return {"position_encoding": encoding, "block_size": block_size(encoding, head_dim, axes, wanted)}
