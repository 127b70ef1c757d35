"""The initial values of encodings."""

import math
from collections.abc import Collection, Sequence

import torch
from transformers import initialization as init

from ..plain.encodings import representation
from ..rotation.exponential import skew_entries
from .kinds import ANY, ENCODINGS, STARTS, Start, encoding_of


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


@STARTS.add("uniform")
class Uniform(Start):
    """U[0, scale), as in LieRE's code."""

    default_scale = 2 * math.pi

    @classmethod
    def parameters(cls, encoding) -> dict[str, torch.Tensor]:
        return {"generators": torch.empty_like(encoding.generators).uniform_(0, encoding.config.rotary_init_scale)}


@STARTS.add("normal")
class Normal(Start):
    """N(0, scale²): the entries of P − Pᵀ for a standard normal P, as in ComRoPE's code."""

    default_scale = math.sqrt(2)

    @classmethod
    def parameters(cls, encoding) -> dict[str, torch.Tensor]:
        return {"generators": torch.empty_like(encoding.generators).normal_(0, encoding.config.rotary_init_scale)}


@STARTS.add("zeros")
class Zeros(Start):
    """No rotations: exp(0) = I (ComRoPE §4.4)."""

    @classmethod
    def parameters(cls, encoding) -> dict[str, torch.Tensor]:
        return {"generators": torch.zeros_like(encoding.generators)}


class Spectrum(Start):
    """Starts that give every plane of a head a frequency on every axis."""

    has_planes = True

    @classmethod
    def frequencies(cls, config, num_axes: int, layers: int, heads: int, planes: int) -> torch.Tensor:
        """(A, layers, heads, planes), without scale."""
        raise NotImplementedError

    @classmethod
    def parameters(cls, encoding) -> dict[str, torch.Tensor]:
        config, sizes = encoding.config, (encoding.num_axes, encoding.layers, encoding.heads, encoding.num_planes)
        return encoding.parameters_for_planes(cls.frequencies(config, *sizes) * config.rotary_init_scale)

    @classmethod
    def obstacle(cls, config) -> str | None:
        if encoding_of(config).block_sizes is not ANY or config.block_size % 2 == 0:
            return None
        return (
            "it gives every plane of two channels a frequency, and blocks of "
            f"{config.block_size} channels would cut them"
        )


@STARTS.add("frequencies")
class Frequencies(Spectrum):
    """
    RoPE-Mixed's initial spectrum (RoPE-ViT §3.2): the planes of a head form one group per axis, plane i of q in a group
    rotates with θ^(−i/q), and the groups' directions are random and orthonormal, drawn for every layer and head.
    """

    @classmethod
    def frequencies(cls, config, num_axes: int, layers: int, heads: int, planes: int) -> torch.Tensor:
        group_size = math.ceil(planes / num_axes)
        plane = torch.arange(planes)  # (planes,)
        magnitudes = config.rope_theta ** -((plane % group_size) / group_size)  # (planes,)
        # torch has no QR decomposition of half types. (layers, heads, A, A)
        directions, _ = torch.linalg.qr(torch.randn(layers, heads, num_axes, num_axes, dtype=torch.float32))
        return (directions[..., plane // group_size] * magnitudes).permute(2, 0, 1, 3)


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
