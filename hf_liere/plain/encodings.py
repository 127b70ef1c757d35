"""
Rotations of queries and keys as the papers write them, in plain PyTorch: R(p) = exp(Σ_a p_a A_a) with skew-symmetric
generators A_a in blocks (LieRE eq. 4, ComRoPE eq. 3), for positions p of A axes. Every encoding is a class that makes
its generators. Rotations are computed in float64 where the device has it.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class LieRotary(nn.Module):
    """
    R(p) q and R(p′) k for the layers of a transformer, after its query and key projections; train it without weight
    decay. Attention sees R(p)ᵀR(p′), which depends on p′ − p alone where the A_a commute: not in LieRE on several axes.

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
        num_layers: Number of layers with generators of their own.
        share_heads: One set of generators for all heads.
        rotary_init: A start among `starts`, the first by default.
        rotary_init_scale: Its scale; 2π for `"uniform"`, √2 for `"normal"` and 1 for others by default.
        fields: `rope_theta` and what belongs to the encoding (`fields`) or the start (`STARTS`) alone.

    Raises `ValueError` for sizes or a start, and `TypeError` for fields, that the encoding does not have.
    """

    # What its paper uses for `grid_positions`; models read `config.coordinates`.
    coordinates = "index"
    starts: tuple[str, ...] = ("uniform", "normal", "zeros")
    rope_theta: float = 10.0
    # The size of blocks by default, `None` for the whole head.
    default_size: int | None = 8
    # Whether blocks may have a size.
    accepts: Callable[[int, int, int], bool] = staticmethod(lambda size, head_dim, num_axes: head_dim % size == 0)
    # Whether R(p) is a product of exponentials, see [`rotations`].
    product = False
    fields: dict = {}

    def __init__(
        self, num_heads, head_dim, num_axes, block_size=None, *, num_key_value_heads=None, num_layers=1, **fields
    ):
        super().__init__()
        key_heads = num_heads if num_key_value_heads is None else num_key_value_heads
        size = (self.default_size or head_dim) if block_size is None else block_size
        if key_heads < 1 or num_heads % key_heads:
            raise ValueError(f"num_heads={num_heads} must be a multiple of num_key_value_heads={key_heads}.")
        sizes = [each for each in range(2, head_dim + 1) if self.accepts(each, head_dim, num_axes)]
        if size not in sizes:
            raise ValueError(f"block_size={size} with head_dim={head_dim} and {num_axes} axes; accepted: {sizes}.")
        start = fields.get("rotary_init") or next(iter(self.starts), "")
        if start not in (self.starts or ("",)):
            raise ValueError(f"rotary_init={start!r}; accepted: {', '.join(self.starts) or 'None'}.")
        scale = {"uniform": 2 * math.pi, "normal": math.sqrt(2)}.get(start, 1.0)
        known = {"share_heads": False, "rotary_init": start, "rotary_init_scale": scale}
        known |= {"rope_theta": 100.0 if start == "axial" else self.rope_theta, **self.fields_of(start)}
        if unknown := sorted(fields.keys() - known.keys()):
            raise TypeError(f"{type(self).__name__} with this start has no {', '.join(unknown)}.")
        for name, default in known.items():
            setattr(self, name, default if fields.get(name) is None else fields[name])
        self.num_heads, self.key_heads, self.head_dim, self.num_axes = num_heads, key_heads, head_dim, num_axes
        self.num_layers = num_layers
        self.block_size, self.num_blocks, self.heads = size, head_dim // size, 1 if self.share_heads else key_heads
        self.num_entries, self.num_planes = size * (size - 1) // 2, head_dim // size * (size // 2)
        self.make_parameters()
        self.reset_parameters()

    @classmethod
    def fields_of(cls, rotary_init: str | None) -> dict:
        """Fields of the encoding or its start alone, with their defaults."""
        return cls.fields | (STARTS[rotary_init][1] if rotary_init in STARTS else {})

    @property
    def device(self) -> torch.device:
        return next(itertools.chain(self.parameters(), self.buffers())).device

    def make_parameters(self) -> None:
        """Free generators, (A, layers, heads or 1, blocks, b(b−1)/2)."""
        shape = (self.num_axes, self.num_layers, self.heads, self.num_blocks, self.num_entries)
        self.generators = nn.Parameter(torch.empty(shape))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.rotary_init == "uniform":
            nn.init.uniform_(self.generators, 0.0, self.rotary_init_scale)
        elif self.rotary_init == "zeros":
            nn.init.zeros_(self.generators)
        elif self.rotary_init == "normal":
            nn.init.normal_(self.generators, 0.0, self.rotary_init_scale)
        elif self.rotary_init in STARTS:
            self.start_at(STARTS[self.rotary_init][0](self) * self.rotary_init_scale)

    def start_at(self, frequencies: torch.Tensor) -> None:
        """Rotate plane i of a head, channels 2i and 2i + 1, by Σ_a p_a f_ai: (A, 1, 1 or heads, planes) frequencies."""
        self.generators.copy_(self.entries_of_planes(frequencies))

    def entries_of_planes(self, frequencies: torch.Tensor) -> torch.Tensor:
        """(A, 1, heads, blocks, b(b−1)/2) entries of [`skew`] that rotate planes of neighbouring channels."""
        blocks = planar(frequencies.expand(-1, -1, self.heads, -1), self.block_size)
        column, row = torch.triu_indices(self.block_size, self.block_size, offset=1)
        return blocks[..., row, column]

    def matrices(self) -> torch.Tensor:
        """The blocks of the generators, (A, layers or 1, heads or 1, blocks, b, b)."""
        return skew(self.generators, self.block_size)

    def rotations(self, positions: torch.Tensor) -> list[torch.Tensor]:
        """R(p) at (N, A) or (B, N, A) positions for every layer: (1 or B, heads or 1, N, blocks, b, b)."""
        with torch.autocast(self.device.type, enabled=False):
            matrices = self.matrices()
            dtype = torch.promote_types(matrices.dtype, torch.float32)
            # Angles of distant positions need the digits.
            matrices = matrices.to(working_dtype(self.device))
            positions = positions.to(matrices).view(-1, *positions.shape[-2:])  # (1 or B, N, A)
            by_layer = (rotations(layer, positions, self.product) for layer in matrices.unbind(1))
            return [matrices.transpose(1, 2).to(dtype) for matrices in by_layer]

    def forward(self, query, key, positions, key_positions=None) -> tuple[torch.Tensor, ...]:
        """
        R(p) q and R(p′) k of the first layer, for (B, num_heads, N, head_dim) queries, (B, num_key_value_heads, N,
        head_dim) keys and (N, A) or (B, N, A) positions p; p′ are `key_positions` where keys are of other tokens.
        Raises `ValueError` for other shapes or types.
        """
        pairs = ((query, positions), (key, positions if key_positions is None else key_positions))
        for states, given in pairs:
            heads, tokens, width = states.shape[1:]
            fits = heads in (self.num_heads, self.key_heads) and width == self.head_dim
            if not fits or given.shape[-2:] != (tokens, self.num_axes) or not given.is_floating_point():
                raise ValueError(
                    f"States of shape {tuple(states.shape)} and positions of shape {tuple(given.shape)} and "
                    f"{given.dtype} must be (batch, {self.num_heads} or {self.key_heads} heads, tokens, "
                    f"{self.head_dim}) and ((batch,) tokens, {self.num_axes}), floating point."
                )
        return tuple(rotate(states, self.rotations(given)[0]) for states, given in pairs)


def rotate(states: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """R(p) x of (B, H, N, D) queries or keys, in their type, by (1 or B, 1 or heads, N, blocks, b, b) rotations."""
    heads, (blocks, size) = rotation.shape[1], rotation.shape[-3:-1]
    if heads > 1:
        # Neighbouring query heads attend to one key head.
        rotation = rotation.repeat_interleave(states.shape[1] // heads, dim=1)
    parts = states[..., : blocks * size].unflatten(-1, (blocks, size)).unsqueeze(-1).to(rotation.dtype)
    with torch.autocast(states.device.type, enabled=False):
        rotated = (rotation @ parts).flatten(-3).to(states.dtype)  # (B, H, N, blocks · b)
    return torch.cat([rotated, states[..., blocks * size :]], dim=-1)


def rotations(matrices: torch.Tensor, positions: torch.Tensor, product: bool = False) -> torch.Tensor:
    """
    R(p) of (A, …, b, b) generators at (B, N, A) positions: (B, N, …, b, b), exp(Σ_a p_a A_a) or the `product`
    exp(p_0 A_0) exp(p_1 A_1) ….
    """
    if not product:
        exponents = torch.tensordot(positions, matrices, dims=1)
        # Recomputed in the backward pass: the squares of all layers would fill the memory.
        return checkpoint(exponential, exponents, use_reentrant=False, preserve_rng_state=False)
    first, *others = (rotations(matrices[[axis]], positions[..., [axis]]) for axis in range(len(matrices)))
    for other in others:
        first = first @ other
    return first


def exponential(exponents: torch.Tensor) -> torch.Tensor:
    """
    exp(X) of skew-symmetric (…, b, b) matrices: cos and sin for b = 2, else scaling and squaring: E = exp(2⁻ˢX) − I
    from its series, then s times E ← 2E + E². A constant s, unlike `torch.matrix_exp`, lets graphs be captured without
    reading a value. NaN for norms above `LARGEST_NORM` radians.
    """
    size = exponents.shape[-1]
    if size == 2:
        cos, sin = exponents[..., 1, 0].cos(), exponents[..., 1, 0].sin()
        return torch.stack([cos, -sin, sin, cos], dim=-1).unflatten(-1, (2, 2))
    # No less than the largest angle: the eigenvalues are pairs ±iφ.
    norm = torch.linalg.matrix_norm(exponents, keepdim=True) / math.sqrt(2)
    x = exponents.where(norm <= LARGEST_NORM, math.nan) / 2**SQUARINGS
    x2 = x @ x
    x3 = x2 @ x
    rest = x3 @ (x / 5_040 + x2 / 40_320 + x3 / 362_880)
    result = x + x2 / 2 + x3 / 6 + x3 @ (x / 24 + x2 / 120 + x3 / 720 + rest)
    for _ in range(SQUARINGS):
        result = 2 * result + result @ result
    return result + torch.eye(size, dtype=x.dtype, device=x.device)


# The series ends at X⁹: its remainder is below 1e-14 times the norm up to this one.
SQUARINGS, LARGEST_NORM = 16, 10_000.0


def skew(entries: torch.Tensor, size: int) -> torch.Tensor:
    """Skew-symmetric (…, b, b) from (…, b(b−1)/2) entries below the diagonal, column by column."""
    column, row = torch.triu_indices(size, size, offset=1, device=entries.device)  # row > column, below the diagonal
    lower = entries.new_zeros(*entries.shape[:-1], size, size)
    lower[..., row, column] = entries
    return lower - lower.mT


def planar(frequencies: torch.Tensor, size: int) -> torch.Tensor:
    """Blocks that rotate planes of neighbouring channels: (…, planes) to (…, blocks, b, b)."""
    by_block = frequencies.unflatten(-1, (-1, size // 2))
    lower = frequencies.new_zeros(*by_block.shape[:-1], size, size)
    for plane in range(size // 2):
        lower[..., 2 * plane + 1, 2 * plane] = by_block[..., plane]
    return lower - lower.mT


def working_dtype(device: torch.device | str) -> torch.dtype:
    """Of positions and exponents: float64, which MPS does not have."""
    return torch.float32 if torch.device(device).type == "mps" else torch.float64


def patch_indices(grid: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """(N, A) indices of the patches of a grid, first axis slowest."""
    ranges = [torch.arange(size, dtype=working_dtype(device), device=device) for size in grid]
    return torch.stack([axis.flatten() for axis in torch.meshgrid(*ranges, indexing="ij")], dim=-1)


def grid_positions(
    grid: Sequence[int],
    coordinates: str = "train_grid",
    train_grid: Sequence[int] | None = None,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    (N, A) coordinates of the patches of a grid. Raises `ValueError` for other `coordinates` than these:

    Args:
        coordinates: Of patch i among n on an axis that had n₀ in training: `"index"` i (RoPE); `"train_grid"`
            i·(n/n₀)/(n − 1) (LieRE), `"centred_grid"` the same minus the middle; `"train_index"` i·n₀/n; `"fixed_grid"`
            i/(n − 1); `"unit"` (i + ½)/n (ComRoPE); `"unit_width"` (i + ½)/w with w columns.
        indices: (N, A) i where patches moved; those of [`patch_indices`] by default.
    """
    indices = patch_indices(grid) if indices is None else indices
    axes = []
    for axis, (n, trained) in enumerate(zip(grid, grid if train_grid is None else train_grid, strict=True)):
        i, steps = indices[..., axis], max(n - 1, 1)
        places = {
            "index": i,
            "train_grid": i * n / trained / steps,
            "centred_grid": (i - (n - 1) / 2) * n / trained / steps,
            "train_index": i * trained / n,
            "fixed_grid": i / steps,
            "unit": (i + 0.5) / n,
            "unit_width": (i + 0.5) / grid[-1],
        }
        if coordinates not in places:
            raise ValueError(f"coordinates={coordinates!r}; accepted: {', '.join(places)}.")
        axes.append(places[coordinates])
    return torch.stack(axes, dim=-1)


def geometric_frequencies(rotary: LieRotary) -> torch.Tensor:
    """RoPE-Mixed's spectrum (RoPE-ViT §3.2): θ^(−i/q), and random orthonormal directions in every head."""
    group = math.ceil(rotary.num_planes / rotary.num_axes)
    plane = torch.arange(rotary.num_planes)
    directions, _ = torch.linalg.qr(torch.randn(rotary.num_layers, rotary.heads, rotary.num_axes, rotary.num_axes))
    magnitudes = rotary.rope_theta ** -((plane % group) / group)
    return (directions[..., plane // group] * magnitudes).permute(2, 0, 1, 3)  # (A, layers, heads, planes)


def golden_gate_frequencies(rotary: LieRotary) -> torch.Tensor:
    """Golden gate RoPE's spectrum (jerryxio.ng/posts/nd-rope): a geometric band, directions spread evenly."""
    # The positive root of x^(A+1) = x + 1.
    golden = 2.0
    for _ in range(64):
        golden = (1 + golden) ** (1 / (rotary.num_axes + 1))
    planes, unrotated = rotary.num_planes, round(rotary.unrotated_share * rotary.num_planes)
    plane = patch_indices((planes,), rotary.device)[:, 0]
    index = patch_indices((rotary.heads * planes,), rotary.device).view(rotary.heads, planes) + 1
    uniform = torch.stack([index / golden ** (axis + 1) % 1 for axis in range(rotary.num_axes)])
    directions = nn.functional.normalize(torch.special.ndtri(uniform), dim=0)  # (A, heads, planes)
    share = (plane - unrotated) / max(planes - unrotated - 1, 1)
    magnitudes = rotary.min_frequency ** (1 - share) * rotary.max_frequency**share * (plane >= unrotated)
    return (magnitudes * directions).unsqueeze(1)  # (A, 1, heads, planes)


def axial_frequencies(rotary: LieRotary) -> torch.Tensor:
    """Axial RoPE's (VisionLLaMA): θ^(−i/q) for the planes of an axis, else zero. A start divides them by `steps`."""
    axes, count = rotary.num_axes, rotary.head_dim // (2 * rotary.num_axes)
    magnitudes = rotary.rope_theta ** -(patch_indices((count,), rotary.device)[:, 0] / count)
    frequencies = magnitudes.new_zeros(axes, 1, 1, rotary.head_dim // 2)
    steps = getattr(rotary, "steps", None) or [1.0] * axes
    for axis in range(axes):
        blocks, interleaved = slice(axis * count, (axis + 1) * count), slice(axis, axes * count, axes)
        frequencies[axis, 0, 0, blocks if rotary.axial_layout == "blocks" else interleaved] = magnitudes / steps[axis]
    return frequencies


# Starts that give every plane a frequency, and their own fields with defaults.
GOLDEN_GATE = {"min_frequency": 0.1, "max_frequency": 1.0, "unrotated_share": 0.0}
AXIAL = {"axial_layout": "blocks"}
STARTS: dict[str, tuple[Callable[[LieRotary], torch.Tensor], dict]] = {
    "frequencies": (geometric_frequencies, {}),
    "golden_gate": (golden_gate_frequencies, GOLDEN_GATE),
    "axial": (axial_frequencies, AXIAL | {"steps": None}),
}


def representation(spins: Sequence[int]) -> torch.Tensor:
    """Direct sum of [`spin_generators`] in the order of `spins`: (3, b, b), b = Σ (2l + 1), in float64 on the CPU."""
    return torch.stack([torch.block_diag(*axis) for axis in zip(*map(spin_generators, spins))])


def spin_generators(spin: int) -> torch.Tensor:
    """
    L_x, L_y, L_z of spin l: real skew-symmetric matrices with [L_x, L_y] = L_z, and cyclically, so that exp(p · L) is
    the rotation by the angle ‖p‖ about p in the irreducible representation of size 2l + 1 (Hall 2015, §4.6).

    The entries are those of the ladder operators, ½√((l − m)(l + m + 1)) between m and m + 1. The basis consists of the
    real spherical harmonics: √2 (−1)ᵐ Re Yₗᵐ and √2 (−1)ᵐ Im Yₗᵐ for m = 1 … l, then Yₗ⁰. L_z rotates its pairs of
    neighbouring channels with the frequencies 1 … l. Spin 1 is the rotation of (x, y, z) itself; spin 0 is constant.
    Returns (3, 2l + 1, 2l + 1), in float64 on the CPU.
    """
    lower = torch.zeros(3, 2 * spin + 1, 2 * spin + 1, dtype=torch.float64, device="cpu")
    x, y, z = lower
    # Channels of the cosines for m = 0 … l; that of a sine is the next one, and m = 0 has none.
    channels = [2 * spin, *range(0, 2 * spin, 2)]
    for m, cosine in enumerate(channels):
        sine = cosine + 1
        if m > 0:
            z[sine, cosine] = m
        if m == spin:
            break
        upper = channels[m + 1]
        step = math.sqrt((spin - m) * (spin + m + 1) / (4 if m > 0 else 2))
        y[upper, cosine], x[upper + 1, cosine] = step, -step
        if m > 0:
            y[upper + 1, sine], x[upper, sine] = step, step
    return lower - lower.transpose(-1, -2)


class LieRE(LieRotary):
    """
    Free generators for every axis (LieRE §4). `rotary_init="so3"` starts at the representation of so(3) with `spins` l
    in every block of Σ (2l + 1) channels, for positions that are rotation vectors.
    """

    coordinates = "train_grid"
    starts = ("uniform", "normal", "zeros", *STARTS, "so3")
    fields = {"spins": None}
    accepts = staticmethod(lambda size, head_dim, num_axes: True)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.rotary_init != "so3":
            super().reset_parameters()
            return
        spins: Sequence[int] = self.spins or [(self.block_size - 1) // 2]
        matrices = representation(spins)
        if matrices.shape[-1] != self.block_size or self.num_axes != 3:
            raise ValueError(
                f"spins={list(spins)} need {matrices.shape[-1]} channels, which is block_size, and 3 axes."
            )
        column, row = torch.triu_indices(self.block_size, self.block_size, offset=1)
        self.generators.copy_(matrices[:, None, None, None, row, column].expand_as(self.generators))


class RoPEMixed(LieRotary):
    """Planes with learned frequencies of all axes (RoPE-ViT §3.2): LieRE with blocks of two."""

    starts = (*STARTS, "uniform", "normal", "zeros")
    default_size = 2
    accepts = staticmethod(lambda size, head_dim, num_axes: size == 2)


class ComRoPEAxialPartition(LieRotary):
    """ComRoPE-AP (§3.3.1, eq. 8): block j rotates with coordinate j mod A alone."""

    coordinates = "unit"
    starts = ("normal", "uniform", "zeros", "axial")
    accepts = staticmethod(lambda size, head_dim, num_axes: head_dim % (size * num_axes) == 0)

    def make_parameters(self) -> None:
        """(layers, heads or 1, blocks, b(b−1)/2)."""
        self.generators = nn.Parameter(torch.empty(self.num_layers, self.heads, self.num_blocks, self.num_entries))

    def multiples(self) -> torch.Tensor:
        """(A, layers or 1, heads or 1, blocks) multiples of a block's matrix in the generators of the axes."""
        served = torch.arange(self.num_blocks, device=self.device) % self.num_axes
        return (served == torch.arange(self.num_axes, device=self.device).view(-1, 1, 1, 1)).to(self.generators)

    def matrices(self) -> torch.Tensor:
        return self.multiples()[..., None, None] * skew(self.generators, self.block_size)

    def start_at(self, frequencies: torch.Tensor) -> None:
        entries = self.entries_of_planes(frequencies)  # (A, 1, heads, blocks, b(b−1)/2)
        self.generators.copy_(entries.sum(0))
        if (entries != self.multiples().unsqueeze(-1).to(entries) * entries.sum(0)).any():
            raise ValueError("A block would rotate planes of several axes, or of another axis than its own.")


class ComRoPELinearlyDependent(ComRoPEAxialPartition):
    """ComRoPE-LD (§3.3.2, eq. 10): A_a = θ_a (P − Pᵀ), with one θ for each axis, head and block."""

    accepts = staticmethod(lambda size, head_dim, num_axes: head_dim % size == 0)

    def make_parameters(self) -> None:
        self.generators = nn.Parameter(torch.empty(self.num_layers, self.heads, self.num_blocks, self.num_entries))
        self.multipliers = nn.Parameter(torch.empty(self.num_axes, self.num_layers, self.heads, self.num_blocks))

    def multiples(self) -> torch.Tensor:
        return self.multipliers

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.rotary_init != "axial":
            nn.init.normal_(self.multipliers)

    def start_at(self, frequencies: torch.Tensor) -> None:
        served = self.entries_of_planes(frequencies).any(-1)  # (A, 1, heads, blocks)
        self.multipliers.copy_(served | ~served.any(0))  # θ = 1 for axes that a block serves, or all
        super().start_at(frequencies)


class AxialRoPE(LieRotary):
    """RoPE on each axis separately (VisionLLaMA; RoPE-ViT §3.1): plane i of the q of an axis rotates with θ^(−i/q)."""

    starts = ()
    rope_theta = 100.0
    default_size = 2
    fields: dict = AXIAL
    frequencies = staticmethod(axial_frequencies)
    accepts = staticmethod(lambda size, head_dim, num_axes: size == 2)

    def make_parameters(self) -> None:
        # Where the module is: frequencies that it contained would be rounded with it.
        self.register_buffer("place", torch.empty(0), persistent=False)

    def matrices(self) -> torch.Tensor:
        return planar(self.rotary_init_scale * self.frequencies(self), 2)


class GoldenGateRoPE(AxialRoPE):
    """Planes with fixed frequencies of all axes, see [`golden_gate_frequencies`]."""

    fields = GOLDEN_GATE
    frequencies = staticmethod(golden_gate_frequencies)


class SphericalRoPE(LieRotary):
    """R(p) = R_z(ω₀ p₀) R_x(ω₁ p₁) in blocks of three channels (arXiv 2511.08368)."""

    starts = ("frequencies", "uniform", "normal", "zeros")
    rope_theta = 100.0
    default_size = 3
    product = True
    accepts = staticmethod(lambda size, head_dim, num_axes: size == 3 and num_axes == 2)

    def make_parameters(self) -> None:
        """(2, layers, heads or 1, blocks) frequencies."""
        self.generators = nn.Parameter(torch.empty(2, self.num_layers, self.heads, self.num_blocks))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.rotary_init != "frequencies":
            super().reset_parameters()
            return
        magnitudes = self.rope_theta ** -(torch.arange(self.num_blocks) / self.num_blocks)
        self.generators.copy_((magnitudes * self.rotary_init_scale).expand_as(self.generators))

    def matrices(self) -> torch.Tensor:
        # The first factor rotates channels 0 and 1, the second one channels 1 and 2.
        entries = self.generators.new_zeros(2, self.num_layers, self.heads, self.num_blocks, 3)
        entries[0, ..., 0], entries[1, ..., 2] = self.generators
        return skew(entries, 3)


class CayleyString(LieRotary):
    """Cayley-STRING: planes with frequencies of all axes in the basis (I − S)(I + S)⁻¹, S skew-symmetric."""

    starts: tuple[str, ...] = (*STARTS, "uniform", "normal", "zeros")
    default_size = None
    accepts = staticmethod(lambda size, head_dim, num_axes: head_dim % size == 0 and size % 2 == 0)

    def make_parameters(self) -> None:
        """Frequencies (A, layers, heads or 1, planes, 1), entries of S (layers, heads or 1, blocks, b(b−1)/2)."""
        self.generators = nn.Parameter(torch.empty(self.num_axes, self.num_layers, self.heads, self.num_planes, 1))
        self.skew = nn.Parameter(torch.empty(self.num_layers, self.heads, self.num_blocks, self.num_entries))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.skew)

    def start_at(self, frequencies: torch.Tensor) -> None:
        self.generators.copy_(frequencies.unsqueeze(-1))

    def matrices(self) -> torch.Tensor:
        matrices = skew(self.skew, self.block_size)  # ((A,) layers, heads or 1, blocks, b, b)
        identity = torch.eye(self.block_size, dtype=matrices.dtype, device=self.device)
        # linalg.solve reads whether I + S is singular, which it never is.
        basis = torch.linalg.solve_ex(identity + matrices, identity - matrices).result
        return basis @ planar(self.generators[..., 0], self.block_size) @ basis.mT


class LieREProduct(CayleyString):
    """R(p) = Π_a U_a rot(p_a ω_a) U_aᵀ with a basis U_a for every axis."""

    product = True

    def make_parameters(self) -> None:
        super().make_parameters()
        self.skew = nn.Parameter(torch.empty(self.num_axes, *self.skew.shape))


class CirculantString(LieRotary):
    """Circulant-STRING (eq. 11): A = C − Cᵀ with a circulant C in every block."""

    starts = ("frequencies", "golden_gate", "uniform", "normal", "zeros")
    default_size = 16
    accepts = staticmethod(lambda size, head_dim, num_axes: head_dim % size == 0 and size > 2)

    def make_parameters(self) -> None:
        """The first row's entries right of the diagonal, (A, layers, heads or 1, blocks, ⌊(b−1)/2⌋)."""
        count = (self.block_size - 1) // 2
        self.num_planes = self.num_blocks * count
        self.generators = nn.Parameter(torch.empty(self.num_axes, self.num_layers, self.heads, self.num_blocks, count))

    def start_at(self, frequencies: torch.Tensor) -> None:
        """Planes of the Fourier basis: s = f · sin(2πmk/b) · 2/b."""
        index = torch.arange(1, (self.block_size + 1) // 2, dtype=torch.float64)
        sines = 2 * (2 * torch.pi / self.block_size * torch.outer(index, index)).sin()
        by_block = frequencies.unflatten(-1, (self.num_blocks, -1)).double()
        self.generators.copy_(by_block @ sines / self.block_size)

    def matrices(self) -> torch.Tensor:
        entries = self.generators  # (A, layers, heads or 1, blocks, ⌊(b−1)/2⌋)
        row = nn.functional.pad(entries, (1, self.block_size - 1 - entries.shape[-1]))
        circulant = torch.stack([row.roll(shift, -1) for shift in range(self.block_size)], dim=-2)
        return circulant - circulant.mT


class Shares(LieRotary):
    """Several encodings, each with a share of the channels of a head, in whole blocks, and its own axes."""

    starts = ()
    default_size = None
    fields = {"shares": [["liere", {}], ["rope_mixed", {}]]}
    accepts = staticmethod(lambda size, head_dim, num_axes: size == head_dim)

    def make_parameters(self) -> None:
        self.parts, self.axes = nn.ModuleList(), []
        named = [given["share"] for _, given in self.shares if "share" in given]
        rest = (1 - sum(named)) / max(len(self.shares) - len(named), 1)
        for name, given in self.shares:
            kind, fields = ENCODINGS[name], {"share_heads": self.share_heads, **given}
            axes, size = fields.pop("axes", [*range(self.num_axes)]), fields.pop("block_size", None)
            step = (size or kind.default_size or 2) * (len(axes) if kind in (AxialRoPE, ComRoPEAxialPartition) else 1)
            share = round(fields.pop("share", rest) * self.head_dim / step)
            width = min(max(share, 1), (self.head_dim - sum(each.head_dim for each in self.parts)) // step) * step
            sizes = {"num_key_value_heads": self.key_heads, "num_layers": self.num_layers}
            self.parts.append(kind(self.num_heads, width, len(axes), size, **sizes, **fields))
            self.axes.append(axes)

    def rotations(self, positions: torch.Tensor) -> list[torch.Tensor]:
        """Those of the shares, in a block of the whole head: (1 or B, heads, N, 1, D, D) for every layer."""
        found = [part.rotations(positions[..., axes]) for part, axes in zip(self.parts, self.axes)]
        # Fixed frequencies are those of every layer.
        return [self.join(*layer) for layer in zip(*(each * (self.num_layers // len(each)) for each in found))]

    def join(self, *rotations: torch.Tensor) -> torch.Tensor:
        sizes, first = torch.broadcast_shapes(*(each.shape[:3] for each in rotations)), 0
        whole = torch.eye(self.head_dim, dtype=rotations[0].dtype, device=self.device).repeat(*sizes, 1, 1)
        for part, blocks in zip(self.parts, rotations):
            for index, block in enumerate(blocks.unbind(3)):
                channels = slice(start := first + index * part.block_size, start + part.block_size)
                whole[..., channels, channels] = block
            first += part.head_dim
        return whole.unsqueeze(3)


ENCODINGS = {
    "axial_rope": AxialRoPE,
    "golden_gate_rope": GoldenGateRoPE,
    "rope_mixed": RoPEMixed,
    "liere": LieRE,
    "comrope_ap": ComRoPEAxialPartition,
    "comrope_ld": ComRoPELinearlyDependent,
    "cayley_string": CayleyString,
    "circulant_string": CirculantString,
    "spherical_rope": SphericalRoPE,
    "liere_product": LieREProduct,
    "shares": Shares,
}
