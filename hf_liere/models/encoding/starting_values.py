"""Spectra of frequencies that encodings start from, or keep, and the order of planes in blocks."""

import math
from collections.abc import Collection, Sequence

import torch
from torch import nn

from ..rotation.dispatch import working_dtype
from .encoding_traits import ENCODING_TRAITS, axis_of_plane
from .positions import grid_steps


def geometric_frequencies(config, num_axes: int, layers: int, heads: int, planes: int) -> torch.Tensor:
    """
    RoPE-Mixed's initial spectrum (RoPE-ViT §3.2): the planes of a head form one group per axis, plane i of q in a group
    rotates with θ^(−i/q), and the groups' directions are random and orthonormal, drawn for every layer and head.

    Returns:
        (A, layers, heads, planes).
    """
    group_size = math.ceil(planes / num_axes)
    plane = torch.arange(planes)  # (planes,)
    magnitudes = config.rope_theta ** -((plane % group_size) / group_size)  # (planes,)
    # torch has no QR decomposition of half types. (layers, heads, A, A)
    directions, _ = torch.linalg.qr(torch.randn(layers, heads, num_axes, num_axes, dtype=torch.float32))
    return (directions[..., plane // group_size] * magnitudes).permute(2, 0, 1, 3)


def golden_gate_frequencies(config, num_axes: int, layers: int, heads: int, planes: int) -> torch.Tensor:
    """
    Golden gate RoPE's spectrum (Xiong, jerryxio.ng/posts/nd-rope): plane i
    of head h rotates with ω_i d_hi, where the ω are `min_frequency` … `max_frequency` in geometric progression after
    `unrotated_share` of the planes with ω = 0, and the unit vector d of the n-th plane of a layer, n = 1 … heads ·
    planes, has the direction of Φ⁻¹(n g⁻ᵃ mod 1), a = 1 … A: normal quantiles of the Kronecker sequence of the
    golden ratio's generalisation g, the root of g^(A+1) = g + 1, so that directions are spread evenly.

    This is the author's form for any number of axes, as copies of his code have it. For images he has another one,
    which is not here: direction n = 0, 1, … has the angle nπ(√5 − 1)/2. The band depends on the coordinates: copies
    for ViTs have 0.2 … 20, a quarter of the planes unrotated, where images run from −1 to 1, which is 0.03 … 3 per
    patch on fourteen patches. The defaults of `min_frequency` and `max_frequency` are ours, the band of RoPE-Mixed's
    spectrum with θ = 10, so that our results do not judge his.

    Returns:
        (A, layers, heads, planes) in float64 on the CPU, the same in every layer.
    """
    unrotated, real = round(config.unrotated_share * planes), {"dtype": torch.float64, "device": "cpu"}
    steps = torch.linspace(0, 1, planes - unrotated, **real)
    ratio = config.max_frequency / config.min_frequency
    magnitudes = torch.cat([steps.new_zeros(unrotated), config.min_frequency * ratio**steps])  # (planes,)
    golden = 2.0
    for _ in range(64):
        golden = (1 + golden) ** (1 / (num_axes + 1))
    exponents = torch.arange(1, num_axes + 1, **real).unsqueeze(-1)  # (A, 1)
    shares = torch.arange(1, heads * planes + 1, **real) * golden**-exponents % 1  # (A, heads · planes)
    directions = nn.functional.normalize(torch.erfinv(2 * shares - 1), dim=0).unflatten(1, (1, heads, planes))
    return (directions * magnitudes).expand(num_axes, layers, heads, planes)


def axial_frequencies(config, num_axes: int, device: torch.device) -> torch.Tensor:
    """
    (A, heads, planes) frequencies of `axial_rope` without scale, in the working dtype, with one head where all are
    alike: plane i of the q of an axis rotates with θ^(−i/q) (RoPE-ViT §3.1), in the order of `axial_layout`, see
    [`encodings.AxialRoPE`].
    """
    real = {"device": device, "dtype": working_dtype(device)}
    axes = torch.arange(num_axes, device=device).view(-1, 1, 1)  # (A, 1, 1)
    if config.axial_layout == "heads":
        count, heads = config.head_dim // 2, config.num_attention_heads
        served = torch.arange(heads, device=device).unsqueeze(-1) * num_axes // heads  # (heads, 1)
        return config.rope_theta ** -(torch.arange(count, **real) / count) * (served == axes)
    count = config.head_dim // (2 * num_axes)
    plane = torch.arange(num_axes * count, **real)  # (planes,)
    axis = axis_of_plane(plane, count, num_axes, config.axial_layout)  # (planes,)
    rank = plane // num_axes if config.axial_layout == "interleaved" else plane % count
    exponents = rank / count if config.axial_spectrum == "full" else plane / (num_axes * count)
    return config.rope_theta**-exponents * (axis == axes)


def axial_start(config, num_axes: int, layers: int, heads: int, planes: int) -> torch.Tensor:
    """
    The frequencies with which an encoding rotates patches of the training grid as `axial_rope` with `index`
    coordinates: those of `axial_rope` divided by the distance of neighbouring patches in the encoding's `coordinates`.
    Models of tokens and the layer have no grid and take coordinates as given. Planes beyond those of `axial_rope` are
    not rotated.

    Returns:
        (A, layers, heads, planes) in float64 on the CPU.
    """
    frequencies = axial_frequencies(config, num_axes, torch.device("cpu"))  # (A, heads or 1, planes)
    train_grid = getattr(config, "train_grid", None)
    if train_grid is not None:
        frequencies = frequencies / frequencies.new_tensor(grid_steps(train_grid, config.coordinates)).view(-1, 1, 1)
    padded = nn.functional.pad(frequencies, (0, planes - frequencies.shape[-1]))  # (A, heads or 1, planes)
    return padded.unsqueeze(1).expand(num_axes, layers, heads, planes)


# Values of `rotary_init` that give every plane a frequency: (A, layers, heads, planes) from config and these numbers.
FREQUENCIES = {"frequencies": geometric_frequencies, "golden_gate": golden_gate_frequencies, "axial": axial_start}


def _require_planes(block_size: int) -> None:
    if block_size % 2:
        raise ValueError(f"block_size={block_size}: a block is made of planes, two channels each; pass an even size.")


def order_planes(axes: Sequence[int], position_encoding: str, block_size: int, label: str) -> tuple[int, ...]:
    """
    The planes of a head, ordered so that each run of b/2 makes a block of the encoding: of any axes for LieRE and
    encodings with a basis, of one axis for ComRoPE-LD (eq. 10), of axis j mod A in block j for ComRoPE-AP (eq. 8).

    Args:
        axes: By plane, the axis with which it rotates, 0 … A − 1.
        label: Of the rotations, for errors.

    Raises:
        ValueError: if there is no such order.
    """
    planes_of_axis = [[p for p, axis in enumerate(axes) if axis == a] for a in range(max(axes) + 1)]
    counts, size = [len(planes) for planes in planes_of_axis], block_size // 2
    _require_planes(block_size)
    traits = ENCODING_TRAITS[position_encoding]
    if not traits.proportional:
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
    if traits.serves_one_axis:
        if len(set(counts)) > 1:
            raise ValueError(
                f"{label} rotates {counts} planes by its axes, but {position_encoding} needs equally many for each; "
                "accepted: comrope_ld, liere, cayley_string and liere_product."
            )
        # The axes take turns.
        blocks = [[block] for turn in zip(*blocks) for block in turn]
    return tuple(plane for blocks_of_axis in blocks for block in blocks_of_axis for plane in block)


def channel_pairs(pairing: str | Sequence[tuple[int, int]], head_dim: int, planes: int | None) -> list[tuple[int, int]]:
    """
    The two channels (c, d) of every plane, see [`LieRotaryEmbedding`].

    Args:
        planes: Their number; `None` means as many as there are channels for.

    Raises:
        ValueError: if `pairing` is unknown, names a channel twice or one that does not exist, or has another number of
            planes.
    """
    if isinstance(pairing, str):
        count = head_dim // 2 if planes is None else planes
        kinds = {
            "adjacent": [(2 * i, 2 * i + 1) for i in range(count)],
            "halves": [(i, i + count) for i in range(count)],
        }
        if pairing not in kinds:
            raise ValueError(f"pairing={pairing!r}: accepted are adjacent, halves, or a list of two channels a plane.")
        pairs = kinds[pairing]
    else:
        pairs = [(int(first), int(second)) for first, second in pairing]
    channels = [channel for pair in pairs for channel in pair]
    if len(set(channels)) < len(channels) or not set(channels) <= set(range(head_dim)):
        raise ValueError(
            f"pairing of {len(pairs)} planes, {pairs[:4]} …, must name channels from 0 to {head_dim - 1}, each once at "
            "most."
        )
    if planes not in (None, len(pairs)):
        raise ValueError(f"frequencies are of {planes} planes, and pairing names the channels of {len(pairs)}.")
    return pairs


def check_start(position_encoding: str, fields: Collection[str]) -> None:
    """Raises `ValueError` if an encoding cannot start with given frequencies, or other `fields` name its start."""
    traits = ENCODING_TRAITS[position_encoding]
    if traits.pretrained not in ("planes", "blocks"):
        accepted = [name for name, other in ENCODING_TRAITS.items() if other.pretrained in ("planes", "blocks")]
        raise ValueError(
            f"frequencies cannot start {position_encoding}: {traits.pretrained}; accepted: {', '.join(accepted)}. "
            "requires_grad_(False) keeps the frequencies of rope_mixed."
        )
    if named := sorted({"rotary_init", "rotary_init_scale"} & set(fields)):
        raise ValueError(f"{', '.join(named)} would do nothing with frequencies, which are where rotations start.")


@torch.no_grad()
def start_at(encoding, frequencies: torch.Tensor) -> Sequence[int]:
    """
    Set the parameters of an encoding so that the planes of its heads start with the given frequencies.

    Args:
        encoding: A [`RotaryEncoding`].
        frequencies: See [`LieRotaryEmbedding`].

    Returns:
        The planes in the order in which they make blocks.

    Raises:
        ValueError: if the frequencies have another shape or are not finite, or the encoding cannot rotate so.
    """
    values, config = frequencies.detach().to(torch.float64), encoding.config
    if values.ndim == encoding.num_axes == 1:
        values = values.unsqueeze(0)
    while 2 <= values.ndim < 4:
        values = values.unsqueeze(1)
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
    if (serves.sum(0) <= 1).all() or not ENCODING_TRAITS[config.position_encoding].proportional:
        axes = serves.int().argmax(0).tolist()
        planes = order_planes(axes, config.position_encoding, encoding.block_size, "the start")
    try:
        start = encoding.parameters_for_planes(values.expand(shape)[..., list(planes)])
    except ValueError as error:
        raise ValueError(f"{config.position_encoding} cannot start with these frequencies: {error}") from None
    for name, parameter in start.items():
        getattr(encoding, name).copy_(parameter)
    return planes
