"""
Rotations of queries and keys as the papers write them, in plain PyTorch: `torch.matrix_exp` and autograd. Rotations are
computed in float64 where the device has it, and applied in the type of the states.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


class LieRotary(nn.Module):
    """
    R(p) q and R(p) k with R(p) = exp(Σ_a p_a A_a) and skew-symmetric generators A_a in blocks (LieRE eq. 4, ComRoPE
    eq. 3), for one layer. Call it after the query and key projections of an attention; train its parameters without
    weight decay.

    ```python
    rotary = LieRE(num_heads=8, head_dim=64, num_axes=2)  # or another subclass
    query, key = rotary(query, key, grid_positions((14, 14), rotary.coordinates))  # (B, 8, 196, 64) each
    ```

    Args:
        num_heads: Number of query heads.
        head_dim: Channels of a head; the last head_dim mod b are not rotated.
        num_axes: Number A of axes of a position.
        block_size: Size b of the blocks of the generators; `None` means the default of the encoding.
        num_key_value_heads: Number of key heads, a divisor of `num_heads`; generators belong to key heads.
        share_heads: One set of generators for all heads.
        rotary_init: A start among `starts`, the first by default.
        rotary_init_scale: Its scale; `None` means 2π for `"uniform"`, √2 for `"normal"`, else 1.
        fields: `rope_theta` and what belongs to the encoding (`fields`) or the start (`STARTS`) alone.

    Attributes:
        coordinates: The convention of [`grid_positions`] that the encoding's paper uses.

    Raises:
        ValueError: for sizes or a start that the encoding does not have.
        TypeError: for fields that neither the encoding nor the start has.
    """

    coordinates = "index"
    starts: tuple[str, ...] = ("uniform", "normal", "zeros")
    rope_theta: float = 10.0
    # The size of blocks by default, `None` for the whole head.
    default_size: int | None = 8
    # Whether blocks may have a size.
    accepts: Callable[[int, int, int], bool] = staticmethod(lambda size, head_dim, num_axes: head_dim % size == 0)
    # Whether R(p) is a product of exponentials, see [`rotations`].
    product = False
    fields: dict[str, Any] = {}

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_axes: int,
        block_size: int | None = None,
        *,
        num_key_value_heads: int | None = None,
        share_heads: bool = False,
        rotary_init: str | None = None,
        rotary_init_scale: float | None = None,
        **fields: Any,
    ):
        super().__init__()
        key_heads = num_heads if num_key_value_heads is None else num_key_value_heads
        size = (self.default_size or head_dim) if block_size is None else block_size
        if key_heads < 1 or num_heads % key_heads:
            raise ValueError(f"num_heads={num_heads} must be a multiple of num_key_value_heads={key_heads}.")
        sizes = [each for each in range(2, head_dim + 1) if self.accepts(each, head_dim, num_axes)]
        if size not in sizes:
            raise ValueError(f"block_size={size} with head_dim={head_dim} and {num_axes} axes; accepted: {sizes}.")
        self.rotary_init: str = rotary_init or next(iter(self.starts), "")
        if self.rotary_init not in (self.starts or ("",)):
            raise ValueError(f"rotary_init={rotary_init!r}; accepted: {', '.join(self.starts) or 'None'}.")
        defaults = {"uniform": 2 * math.pi, "normal": math.sqrt(2)}
        self.scale = defaults.get(self.rotary_init, 1.0) if rotary_init_scale is None else rotary_init_scale
        known = {"rope_theta": 100.0 if self.rotary_init == "axial" else self.rope_theta, **self.fields}
        if self.rotary_init in STARTS:
            known |= STARTS[self.rotary_init][1]
        if unknown := sorted(fields.keys() - known.keys()):
            raise TypeError(f"{type(self).__name__} with this start has no {', '.join(unknown)}.")
        for name, default in known.items():
            setattr(self, name, default if fields.get(name) is None else fields[name])
        self.num_heads, self.key_heads, self.head_dim, self.num_axes = num_heads, key_heads, head_dim, num_axes
        self.block_size, self.num_blocks, self.heads = size, head_dim // size, 1 if share_heads else key_heads
        self.num_entries, self.num_planes = size * (size - 1) // 2, head_dim // size * (size // 2)
        self.make_parameters()
        self.reset_parameters()

    def make_parameters(self) -> None:
        """Free generators, (A, 1, heads or 1, blocks, b(b−1)/2); the axis of size one is that of layers elsewhere."""
        shape = (self.num_axes, 1, self.heads, self.num_blocks, self.num_entries)
        self.generators = nn.Parameter(torch.empty(shape))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.rotary_init == "uniform":
            nn.init.uniform_(self.generators, 0.0, self.scale)
        elif self.rotary_init == "zeros":
            nn.init.zeros_(self.generators)
        elif self.rotary_init == "normal":
            nn.init.normal_(self.generators, 0.0, self.scale)
        elif self.rotary_init in STARTS:
            self.start_at(STARTS[self.rotary_init][0](self) * self.scale)

    def start_at(self, frequencies: torch.Tensor) -> None:
        """Rotate plane i of a head, channels 2i and 2i + 1, by Σ_a p_a f_ai: (A, 1, heads or 1, planes) frequencies."""
        self.generators.copy_(self.entries_of_planes(frequencies))

    def entries_of_planes(self, frequencies: torch.Tensor) -> torch.Tensor:
        """(A, 1, heads or 1, blocks, b(b−1)/2) entries of [`skew`] that rotate planes of neighbouring channels."""
        blocks = planar(frequencies.expand(-1, -1, self.heads, -1), self.block_size)
        row, column = torch.triu_indices(self.block_size, self.block_size, offset=1)
        return blocks[..., column, row]

    def matrices(self) -> torch.Tensor:
        """The blocks of the generators, (A, heads or 1, blocks, b, b)."""
        return skew(self.generators[:, 0], self.block_size)

    def rotations(self, positions: torch.Tensor) -> torch.Tensor:
        """R(p) of (N, A) or (B, N, A) positions: (1 or B, heads or 1, N, blocks, b, b)."""
        matrices = self.matrices()
        # Angles of distant positions need the digits, and MPS has no float64.
        matrices = matrices if matrices.device.type == "mps" else matrices.double()
        positions = positions.to(matrices).view(-1, *positions.shape[-2:])  # (1 or B, N, A)
        return rotations(matrices, positions, self.product).transpose(1, 2)

    def rotate(self, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """R(p) x of (B, num_heads or num_key_value_heads, N, head_dim) queries or keys, in their type."""
        heads, tokens, width = states.shape[1], states.shape[2], self.num_blocks * self.block_size
        if states.ndim != 4 or heads not in (self.num_heads, self.key_heads) or states.shape[3] != self.head_dim:
            raise ValueError(
                f"States of shape {tuple(states.shape)} must be (batch, {self.num_heads} or {self.key_heads} heads, "
                f"tokens, {self.head_dim})."
            )
        if not positions.is_floating_point() or positions.shape[-2:] != (tokens, self.num_axes):
            raise ValueError(
                f"positions of shape {tuple(positions.shape)} and {positions.dtype} must be floating point and "
                f"({tokens}, {self.num_axes}) or (batch, {tokens}, {self.num_axes})."
            )
        rotations = self.rotations(positions)
        if rotations.shape[1] > 1:
            # Neighbouring query heads attend to one key head.
            rotations = rotations.repeat_interleave(heads // self.key_heads, dim=1)
        blocks = states[..., :width].unflatten(-1, (self.num_blocks, self.block_size)).unsqueeze(-1)
        # (B, H, N, blocks, b)
        rotated = (rotations.to(states.dtype) @ blocks).squeeze(-1)
        return torch.cat([rotated.flatten(-2), states[..., width:]], dim=-1)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, key_positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """R(p) q and R(p′) k; `key_positions` are p′ where keys are of other tokens than queries."""
        key_positions = positions if key_positions is None else key_positions
        return self.rotate(query, positions), self.rotate(key, key_positions)


def rotations(matrices: torch.Tensor, positions: torch.Tensor, product: bool = False) -> torch.Tensor:
    """
    R(p) of (A, …, b, b) generators at (B, N, A) positions: (B, N, …, b, b), exp(Σ_a p_a A_a) or the `product`
    exp(p_0 A_0) exp(p_1 A_1) ….
    """
    if not product:
        # torch.matrix_exp refuses some strides.
        return torch.matrix_exp(torch.tensordot(positions, matrices, dims=1).contiguous())
    first, *others = (rotations(matrices[[axis]], positions[..., [axis]]) for axis in range(len(matrices)))
    for other in others:
        first = first @ other
    return first


def skew(entries: torch.Tensor, size: int) -> torch.Tensor:
    """Skew-symmetric (…, b, b) from (…, b(b−1)/2) entries below the diagonal, column by column."""
    row, column = torch.triu_indices(size, size, offset=1, device=entries.device)
    lower = entries.new_zeros(*entries.shape[:-1], size, size)
    lower[..., column, row] = entries
    return lower - lower.mT


def planar(frequencies: torch.Tensor, size: int) -> torch.Tensor:
    """Blocks that rotate planes of neighbouring channels: (…, planes) to (…, blocks, b, b)."""
    by_block = frequencies.unflatten(-1, (-1, size // 2))
    lower = frequencies.new_zeros(*by_block.shape[:-1], size, size)
    for plane in range(size // 2):
        lower[..., 2 * plane + 1, 2 * plane] = by_block[..., plane]
    return lower - lower.mT


def grid_positions(
    grid: Sequence[int], coordinates: str = "train_grid", train_grid: Sequence[int] | None = None
) -> torch.Tensor:
    """
    (N, A) float64 coordinates of the patches of a grid, first axis slowest.

    Args:
        coordinates: Of patch i among n on an axis that had n₀ in training: `"index"` i (RoPE); `"train_grid"`
            i·(n/n₀)/(n − 1) (LieRE), `"centred_grid"` the same minus the middle; `"train_index"` i·n₀/n; `"fixed_grid"`
            i/(n − 1); `"unit"` (i + ½)/n (ComRoPE); `"unit_width"` (i + ½)/w with w columns.

    Raises:
        ValueError: for other `coordinates`.
    """
    axes = []
    for size, trained in zip(grid, grid if train_grid is None else train_grid, strict=True):
        index, steps = torch.arange(size, dtype=torch.float64), max(size - 1, 1)
        places = {
            "index": index,
            "train_grid": index * size / trained / steps,
            "centred_grid": (index - (size - 1) / 2) * size / trained / steps,
            "train_index": index * trained / size,
            "fixed_grid": index / steps,
            "unit": (index + 0.5) / size,
            "unit_width": (index + 0.5) / grid[-1],
        }
        if coordinates not in places:
            raise ValueError(f"coordinates={coordinates!r}; accepted: {', '.join(places)}.")
        axes.append(places[coordinates])
    return torch.stack([axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij")], dim=-1)


def geometric_frequencies(rotary: LieRotary) -> torch.Tensor:
    """RoPE-Mixed's spectrum (RoPE-ViT §3.2): θ^(−i/q), and random orthonormal directions in every head."""
    group = math.ceil(rotary.num_planes / rotary.num_axes)
    plane = torch.arange(rotary.num_planes)
    directions, _ = torch.linalg.qr(torch.randn(1, rotary.heads, rotary.num_axes, rotary.num_axes))
    magnitudes = rotary.rope_theta ** -((plane % group) / group)
    return (directions[..., plane // group] * magnitudes).permute(2, 0, 1, 3)  # (A, 1, heads, planes)


def golden_gate_frequencies(rotary: LieRotary) -> torch.Tensor:
    """Golden gate RoPE's spectrum (jerryxio.ng/posts/nd-rope): a geometric band, directions spread evenly."""
    # The positive root of x^(A+1) = x + 1.
    golden = 2.0
    for _ in range(64):
        golden = (1 + golden) ** (1 / (rotary.num_axes + 1))
    planes, unrotated = rotary.num_planes, round(rotary.unrotated_share * rotary.num_planes)
    frequencies = torch.zeros(rotary.num_axes, 1, rotary.heads, planes, dtype=torch.float64)
    for head in range(rotary.heads):
        for plane in range(unrotated, planes):
            index, share = head * planes + plane + 1, (plane - unrotated) / max(planes - unrotated - 1, 1)
            uniform = [index / golden ** (axis + 1) % 1 for axis in range(rotary.num_axes)]
            direction = torch.special.ndtri(torch.tensor(uniform, dtype=torch.float64))
            magnitude = rotary.min_frequency ** (1 - share) * rotary.max_frequency**share
            frequencies[:, 0, head, plane] = magnitude * direction / direction.norm()
    return frequencies


def axial_frequencies(rotary: LieRotary) -> torch.Tensor:
    """Axial RoPE's (VisionLLaMA): θ^(−i/q) for the planes of each axis, zero for those of others and what is left."""
    frequencies = torch.zeros(rotary.num_axes, 1, 1, rotary.head_dim // 2, dtype=torch.float64)
    count = rotary.head_dim // (2 * rotary.num_axes)
    for axis in range(rotary.num_axes):
        for rank in range(count):
            plane = axis * count + rank if rotary.axial_layout == "blocks" else rank * rotary.num_axes + axis
            frequencies[axis, 0, 0, plane] = rotary.rope_theta ** -(rank / count)
    return frequencies


# Starts that give every plane a frequency, and their own fields with defaults.
GOLDEN_GATE = {"min_frequency": 0.1, "max_frequency": 1.0, "unrotated_share": 0.0}
AXIAL = {"axial_layout": "blocks"}
STARTS: dict[str, tuple[Callable[[LieRotary], torch.Tensor], dict]] = {
    "frequencies": (geometric_frequencies, {}),
    "golden_gate": (golden_gate_frequencies, GOLDEN_GATE),
    "axial": (axial_frequencies, AXIAL),
}
