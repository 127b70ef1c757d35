"""RoPE whose frequencies are not learned, and starts of other encodings at these frequencies."""

import torch
from torch import nn

from ..fast.dispatch import working_dtype
from .encoding_traits import AXIAL, ENCODING_CLASSES, FREQUENCIES, axis_of_plane
from .positions import COORDINATES
from .rotary_encoding import RotaryEncoding


def grid_steps(train_grid: tuple[int, ...], coordinates: str) -> tuple[float, ...]:
    """
    Distance of neighbouring patches of the training grid on every axis, in `coordinates`; for `physical`, that of an
    input with an extent of one unit.
    """
    place = COORDINATES["unit" if coordinates == "physical" else coordinates]
    return tuple(place(1.0, size, size, train_grid[-1]) - place(0.0, size, size, train_grid[-1]) for size in train_grid)


@FREQUENCIES.offer("golden_gate")
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
    [`AxialRoPE`].
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


@FREQUENCIES.offer(AXIAL)
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


def fixed_scale(config) -> float:
    """The factor of fixed frequencies."""
    return 1.0 if config.rotary_init_scale is None else config.rotary_init_scale


@ENCODING_CLASSES.offer("axial_rope")
class AxialRoPE(RotaryEncoding):
    """
    RoPE on each axis separately, nothing learned (VisionLLaMA; RoPE-ViT §3.1): an axis has q = ⌊head_dim / 2A⌋ planes,
    and plane i rotates with s θ^(−i/q); remaining channels are not rotated. The scale s is `rotary_init_scale`, 1 by
    default.

    `axial_layout` puts all planes of the first axis first (`"blocks"`) or the axes in turn (`"interleaved"`); with
    `"heads"`, head h of H serves axis ⌊hA/H⌋ alone, with q = ⌊head_dim / 2⌋ (MHRoPE, arXiv 2510.23095). With
    `axial_spectrum="shared"`, plane j of the head rotates with s θ^(−j/Aq) on any axis: in blocks, every axis has its
    band of frequencies (Qwen2-VL's chunks); interleaved, every A-th frequency (Qwen3-VL). Those models also give axes
    different numbers of planes, which is not supported here.
    """

    def __init__(self, config, num_axes: int):
        super().__init__(config, num_axes)
        self.layers = 1
        self.heads = config.num_attention_heads if config.axial_layout == "heads" else 1

    def entries(self, device: torch.device) -> torch.Tensor:
        frequencies = fixed_scale(self.config) * axial_frequencies(self.config, self.num_axes, device)
        return frequencies[:, None, :, :, None]  # (A, 1, heads or 1, planes, 1)


@ENCODING_CLASSES.offer("golden_gate_rope")
class GoldenGateRoPE(RotaryEncoding):
    """
    Planes with fixed frequencies of all axes, see [`golden_gate_frequencies`], times `rotary_init_scale`, 1 by default;
    nothing is learned. Heads differ unless they are shared, layers do not. An odd last channel is not rotated.
    """

    def __init__(self, config, num_axes: int):
        super().__init__(config, num_axes)
        self.layers = 1
        # A buffer would be rounded with the model. Computed now, because ONNX lacks normal quantiles.
        frequencies = golden_gate_frequencies(config, num_axes, 1, self.heads, self.num_blocks)
        self.frequencies = fixed_scale(config) * frequencies  # (A, 1, heads or 1, planes)

    def entries(self, device: torch.device) -> torch.Tensor:
        return self.frequencies.to(working_dtype(device)).to(device).unsqueeze(-1)
