"""Encodings that start at given frequencies, and the order of their planes in blocks."""

from collections.abc import Collection, Sequence

import torch
from transformers import initialization as init

from .kinds import ENCODINGS


def _require_planes(block_size: int) -> None:
    if block_size % 2:
        raise ValueError(f"block_size={block_size}: a block is made of planes, two channels each; pass an even size.")


def order_planes(axes: Sequence[int], position_encoding: str, block_size: int, label: str) -> tuple[int, ...]:
    """
    The planes of a head, ordered so that each run of b/2 makes a block of the encoding: of any axes for LieRE and
    encodings with a basis, of one axis for ComRoPE-LD (eq. 10), of axis j mod A in block j for ComRoPE-AP (eq. 8).
    Raises `ValueError` if there is no such order.

    Args:
        axes: By plane, the axis with which it rotates, 0 … A − 1.
    """
    planes_of_axis = [[p for p, axis in enumerate(axes) if axis == a] for a in range(max(axes) + 1)]
    counts, size = [len(planes) for planes in planes_of_axis], block_size // 2
    _require_planes(block_size)
    encoding = ENCODINGS[position_encoding]
    if not encoding.proportional:
        if sum(counts) % size:
            raise ValueError(
                f"block_size={block_size} does not divide the {2 * sum(counts)} rotated channels of {label}."
            )
        return tuple(range(sum(counts)))
    blocks = [[planes[i : i + size] for i in range(0, len(planes), size)] for planes in planes_of_axis]
    if any(count % size for count in counts):
        raise ValueError(
            f"block_size={block_size}: {label} rotates {counts} planes by its axes, and a block of {position_encoding} "
            f"has {size} of one axis; accepted: sizes that divide twice these numbers, and liere for any axes."
        )
    if encoding.serves_one_axis:
        if len(set(counts)) > 1:
            raise ValueError(
                f"{label} rotates {counts} planes by its axes, but {position_encoding} needs equally many for each; "
                "accepted: comrope_ld, liere, cayley_string and liere_product."
            )
        # The axes take turns.
        blocks = [[block] for turn in zip(*blocks) for block in turn]
    return tuple(plane for blocks_of_axis in blocks for block in blocks_of_axis for plane in block)


def check_start(position_encoding: str, fields: Collection[str]) -> None:
    """Raises `ValueError` if an encoding cannot start with given frequencies, or other `fields` name its start."""
    encoding = ENCODINGS[position_encoding]
    if encoding.pretrained not in ("planes", "blocks"):
        accepted = [name for name, other in ENCODINGS.items() if other.pretrained in ("planes", "blocks")]
        raise ValueError(
            f"frequencies cannot start {position_encoding}: {encoding.pretrained}; accepted: {', '.join(accepted)}. "
            "requires_grad_(False) keeps the frequencies of rope_mixed."
        )
    if named := sorted({"rotary_init", "rotary_init_scale"} & set(fields)):
        raise ValueError(f"{', '.join(named)} would do nothing with frequencies, which are where rotations start.")


@torch.no_grad()
def start_at(encoding, frequencies: torch.Tensor, label: str = "the start") -> Sequence[int]:
    """
    Set the parameters of an encoding so that the planes of its heads start with the given frequencies; those that a
    checkpoint has set keep their values.

    Returns:
        The planes in the order in which they make blocks.

    Raises:
        ValueError: if the frequencies, see [`LieRotaryEmbedding`], have another shape or are not finite, layers or
            heads that share generators have different ones, or the encoding cannot rotate so.
    """
    values, config = frequencies.detach().to(torch.float64), encoding.config
    if values.ndim == encoding.num_axes == 1:
        values = values.unsqueeze(0)
    while 2 <= values.ndim < 4:
        values = values.unsqueeze(1)
    for dim, part in ((1, "layers"), (2, "heads")):
        if values.ndim == 4 and getattr(config, f"share_{part}") and values.shape[dim] > 1:
            first = values.narrow(dim, 0, 1)
            if not torch.equal(values, first.expand_as(values)):
                raise ValueError(f"share_{part}=True: the {part} of {label} rotate with different frequencies.")
            values = first
    shape = (encoding.num_axes, encoding.layers, encoding.heads, frequencies.shape[-1])
    fits = values.ndim == 4 and all(size in (1, full) for size, full in zip(values.shape[1:3], shape[1:3]))
    if not fits or len(values) != encoding.num_axes or not values.isfinite().all():
        raise ValueError(
            f"frequencies of shape {tuple(frequencies.shape)} must be finite, and have the shape (axes, planes), "
            f"(axes, heads, planes) or (axes, layers, heads, planes), which is {shape} here, or 1 for equal ones."
        )
    _require_planes(encoding.block_size)
    serves = (values != 0).flatten(1, 2).any(1)  # (A, planes)
    planes: Sequence[int] = range(shape[-1])
    if (serves.sum(0) <= 1).all() or not type(encoding).proportional:
        axes = serves.int().argmax(0).tolist()
        planes = order_planes(axes, config.position_encoding, encoding.block_size, label)
    try:
        start = encoding.parameters_for_planes(values.expand(shape)[..., list(planes)])
    except ValueError as error:
        raise ValueError(f"{config.position_encoding} cannot start with these frequencies: {error}") from None
    for name, parameter in start.items():
        init.copy_(getattr(encoding, name), parameter.to(getattr(encoding, name)))
    return planes
