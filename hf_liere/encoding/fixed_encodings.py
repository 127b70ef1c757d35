"""RoPE whose frequencies are not learned, and starts of other encodings at these frequencies."""

import torch
from torch import nn

from ..fast.dispatch import working_dtype
from .kinds import ENCODINGS, PLANES, STARTS, encoding_of
from .positions import CONVENTIONS
from .rotary_encoding import RotaryEncoding
from .starts import Spectrum


GOLDEN_GATE_FIELDS = {"min_frequency": 0.1, "max_frequency": 1.0, "unrotated_share": 0.0}
AXIAL_FIELDS = {"axial_layout": "blocks"}


def grid_steps(train_grid: tuple[int, ...], coordinates: str) -> tuple[float, ...]:
    """Distance of neighbouring patches of the training grid on every axis, in `coordinates`."""
    place = CONVENTIONS[coordinates].place
    return tuple(place(1.0, size, size, train_grid[-1]) - place(0.0, size, size, train_grid[-1]) for size in train_grid)


def golden_gate_frequencies(config, num_axes: int, layers: int, heads: int, planes: int) -> torch.Tensor:
    """
    Golden gate RoPE's spectrum (Xiong, jerryxio.ng/posts/nd-rope): plane i of head h rotates with ω_i d_hi, where the ω
    are `min_frequency` … `max_frequency` in geometric progression after `unrotated_share` of the planes with ω = 0, and
    the unit vector d of the n-th plane of a layer, n = 1 … heads · planes, has the direction of Φ⁻¹(n g⁻ᵃ mod 1), a = 1
    … A: evenly spread normal quantiles of a Kronecker sequence of the golden ratio's generalisation g, g^(A+1) = g + 1.

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
    (A, 1, planes) frequencies of `axial_rope` without scale, in the working dtype: plane i of the q of an axis rotates
    with θ^(−i/q) (RoPE-ViT §3.1), in the order of `axial_layout`, see [`AxialRoPE`].
    """
    real = {"device": device, "dtype": working_dtype(device)}
    axes = torch.arange(num_axes, device=device).view(-1, 1, 1)  # (A, 1, 1)
    count = config.head_dim // (2 * num_axes)
    plane = torch.arange(num_axes * count, **real)  # (planes,)
    axis = axis_of_plane(plane, count, num_axes, config.axial_layout)  # (planes,)
    rank = plane // num_axes if config.axial_layout == "interleaved" else plane % count
    return config.rope_theta ** -(rank / count) * (axis == axes)


@STARTS.add("golden_gate")
class GoldenGate(Spectrum):
    """The frequencies of golden gate RoPE, see [`golden_gate_frequencies`]."""

    fields = GOLDEN_GATE_FIELDS
    encodings = ("rope_mixed", "liere", "cayley_string", "circulant_string", "liere_product")
    frequencies = staticmethod(golden_gate_frequencies)


@STARTS.add("axial")
class Axial(Spectrum):
    """
    The frequencies with which an encoding rotates patches of the training grid as `axial_rope` with `index`
    coordinates: those of `axial_rope` divided by the distance of neighbouring patches in the encoding's `coordinates`.
    Models of tokens and the layer have no grid and take coordinates as given. Planes beyond those of `axial_rope` are
    not rotated.
    """

    fields = AXIAL_FIELDS
    rope_theta = 100.0
    encodings = ("rope_mixed", "liere", "comrope_ap", "comrope_ld", "cayley_string", "liere_product")

    @classmethod
    def frequencies(cls, config, num_axes: int, layers: int, heads: int, planes: int) -> torch.Tensor:
        frequencies = axial_frequencies(config, num_axes, torch.device("cpu"))  # (A, 1, planes)
        if (train_grid := getattr(config, "train_grid", None)) is not None:
            steps = frequencies.new_tensor(grid_steps(train_grid, config.coordinates))
            frequencies = frequencies / steps.view(-1, 1, 1)
        padded = nn.functional.pad(frequencies, (0, planes - frequencies.shape[-1]))  # (A, 1, planes)
        return padded.unsqueeze(1).expand(num_axes, layers, heads, planes)

    @classmethod
    def obstacle(cls, config) -> str | None:
        """Why the encoding cannot rotate pairs of channels in place as `axial_rope` does."""
        encoding, name, head_dim, axes = encoding_of(config), config.position_encoding, config.head_dim, config.num_axes
        count = head_dim // (2 * axes)
        if not count:
            return f"head_dim={head_dim} is too small for axial_rope, which needs a plane for each of {axes} axes"
        served = [axis_of_plane(plane, count, axes, config.axial_layout) for plane in range(axes * count)]
        sizes = encoding.block_sizes.accepted(head_dim, axes)
        reasons = {size: _block_obstacle(encoding, size, head_dim, axes, served) for size in sizes}
        if (reason := reasons[config.block_size]) is None:
            return None
        fitting = [size for size, other in reasons.items() if other is None]
        return (
            f"{name} cannot contain axial_rope with head_dim={head_dim}, {axes} axes and axial_layout="
            f"{config.axial_layout!r}: {reason}; accepted here: block_size in {fitting}"
        )


def _block_obstacle(encoding, size: int, head_dim: int, axes: int, served: list[int]) -> str | None:
    """Why blocks of one size do not contain planes whose axes are `served`."""
    rotated = head_dim // size * size
    if size % 2:
        return f"blocks of {size} channels would cut its planes of two"
    if rotated < 2 * len(served):
        return f"blocks leave {head_dim - rotated} channels unrotated, axial_rope only {head_dim - 2 * len(served)}"
    if encoding.proportional:
        blocks = [set(served[first : first + size // 2]) for first in range(0, len(served), size // 2)]
        if any(len(block) > 1 for block in blocks):
            return "a block would rotate planes of several axes, and its generators are multiples of one matrix"
        if encoding.serves_one_axis and any(block != {index % axes} for index, block in enumerate(blocks)):
            return "its blocks serve the axes in turn"
    return None


def axis_of_plane(plane: int | torch.Tensor, planes_per_axis: int, num_axes: int, layout: str | None):
    """The axis that plane i of a head of `axial_rope` serves, for one or many i."""
    return plane % num_axes if layout == "interleaved" else plane // planes_per_axis


def fixed_scale(config) -> float:
    """The factor of fixed frequencies."""
    return 1.0 if config.rotary_init_scale is None else config.rotary_init_scale


@ENCODINGS.add("axial_rope")
class AxialRoPE(RotaryEncoding):
    """
    RoPE on each axis separately, nothing learned (VisionLLaMA; RoPE-ViT §3.1): an axis has q = ⌊head_dim / 2A⌋ planes,
    and plane i rotates with s θ^(−i/q); remaining channels are not rotated. The scale s is `rotary_init_scale`, 1 by
    default.

    `axial_layout` puts all planes of the first axis first (`"blocks"`) or the axes in turn (`"interleaved"`).
    """

    description = "Axial RoPE: planes that each rotate with one axis, by fixed frequencies"
    block_sizes = PLANES
    rope_theta = 100.0
    serves_one_axis = True
    pretrained = "it learns nothing"
    fields = AXIAL_FIELDS

    def __init__(self, config, num_axes: int):
        super().__init__(config, num_axes)
        self.layers = self.heads = 1

    @classmethod
    def obstacle(cls, config) -> str | None:
        if config.head_dim >= 2 * config.num_axes:
            return None
        return (
            f"A head_dim of {config.head_dim} is too small for {config.position_encoding} on {config.num_axes} axes: "
            f"it needs a plane for each axis, so at least {2 * config.num_axes}"
        )

    def entries(self, device: torch.device) -> torch.Tensor:
        frequencies = fixed_scale(self.config) * axial_frequencies(self.config, self.num_axes, device)
        return frequencies[:, None, :, :, None]  # (A, 1, 1, planes, 1)


@ENCODINGS.add("golden_gate_rope")
class GoldenGateRoPE(RotaryEncoding):
    """
    Planes with fixed frequencies of all axes, see [`golden_gate_frequencies`], times `rotary_init_scale`, 1 by default;
    nothing is learned. Heads differ unless they are shared, layers do not. An odd last channel is not rotated.
    """

    description = "Golden gate RoPE: rotations of planes by fixed frequencies whose directions are spread evenly"
    block_sizes = PLANES
    pretrained = "it learns nothing"
    fields = GOLDEN_GATE_FIELDS

    def __init__(self, config, num_axes: int):
        super().__init__(config, num_axes)
        self.layers = 1
        # A buffer would be rounded with the model. Computed now, because ONNX lacks normal quantiles.
        frequencies = golden_gate_frequencies(config, num_axes, 1, self.heads, self.num_blocks)
        self.frequencies = fixed_scale(config) * frequencies  # (A, 1, heads or 1, planes)

    def entries(self, device: torch.device) -> torch.Tensor:
        return self.frequencies.to(working_dtype(device)).to(device).unsqueeze(-1)
