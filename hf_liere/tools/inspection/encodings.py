"""
Measurements of a rotary encoding from its generators in float64, without running the model.

If layers or heads share generators, "layers" or "heads" is 1 in the shapes below.
"""

import copy
import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm

from ...encoding.commuting_encodings import ROUNDING, FoldedPlanes
from ...encoding.fixed_encodings import grid_steps
from ...encoding.folding import build_encoding, fold_encoding
from ...encoding.kinds import encoding_of, start_of
from ...encoding.positions import TokenPositions, needs_spacing
from ...encoding.rotary_encoding import RotaryEncoding
from ...geometry.common_planes import find_common_planes, generator_matrices
from ...plain.encodings import rotations


# Number of sampled pairs of patches; each needs an eigenvalue decomposition per block.
PAIRS = 24
OFFSETS = 12
HISTOGRAM_BINS = 61
# Number of draws of untrained generators, and of elements compared with learned ones.
DRAWS = 10
ELEMENTS_COMPARED = 20_000


class Commutators(NamedTuple):
    """
    The Frobenius norms ‖A_a A_b − A_b A_a‖_F for every pair of axes a < b.

    Attributes:
        axes: The pairs of axes.
        norm: (pairs, layers, heads).
        relative: The same divided by ‖A_a‖_F ‖A_b‖_F, or 0 if a generator is zero; at most √2 (Böttcher and Wenzel).
    """

    axes: tuple[tuple[int, int], ...]
    norm: torch.Tensor
    relative: torch.Tensor


class RelativityError(NamedTuple):
    """
    How far R(p)ᵀR(q) is from a function of q − p: the spectral norm e(c) = ‖R(p + c)ᵀR(q + c) − R(p)ᵀR(q)‖, which is 0
    for a relative encoding (the RoPE equation, ComRoPE eq. 2) and at most 2. It bounds the change of a unit q · k.

    Attributes:
        offsets: (offsets,), the common displacement c of both tokens along every axis, in patches.
        largest, mean: (offsets, layers, heads), over the pairs of patches and over blocks.
    """

    offsets: torch.Tensor
    largest: torch.Tensor
    mean: torch.Tensor


class AngleStatistics(NamedTuple):
    """
    Statistics of the elements in the upper triangles of the angle matrices A_a (ComRoPE App. F, Table 8, Fig. 8),
    without the blocks that are zero by construction, as in `comrope_ap` and `axial_rope`.

    Attributes:
        std: Standard deviation over everything.
        layer_std: (layers,).
        edges: (bins + 1,), symmetric around zero.
        density: (bins,), the share of elements per unit of their value.
    """

    std: float
    layer_std: torch.Tensor
    edges: torch.Tensor
    density: torch.Tensor


class Movement(NamedTuple):
    """
    How far training moved the generators A_a from the A_a⁰ with which they started, as Frobenius norms over a head in
    radians per patch of the trained grid, or per unit of the positions of tokens.

    Attributes:
        distance: (A, layers, heads), ‖A_a − A_a⁰‖_F.
        start: (A, layers, heads), ‖A_a⁰‖_F.
    """

    distance: torch.Tensor
    start: torch.Tensor

    def by_layer(self) -> list[torch.Tensor]:
        """The norms of a layer, (layers,) each."""
        return [part.square().sum((0, 2)).sqrt() for part in self]


class Initialization(NamedTuple):
    """
    Elements of generators drawn with `rotary_init` and `rotary_init_scale`, compared with those of [`AngleStatistics`].
    Checkpoints do not contain the initial generators, so only distributions are comparable, unless the configuration
    determines the start, as with `rotary_init="axial"` or `"zeros"`.

    Attributes:
        name, scale: `rotary_init` and `rotary_init_scale`.
        std: Standard deviation over everything.
        edges, density: As in [`AngleStatistics`], over the range of both sets of elements.
        learned_density: Density of the learned elements over the same edges.
        distance: Largest difference between the cumulative distributions of learned and untrained elements (the
            Kolmogorov–Smirnov statistic, from 0 to 1), over at most `ELEMENTS_COMPARED` elements.
        chance: Largest distance between one of `DRAWS` draws of untrained generators and all others.
        movement: See [`Movement`]; `None` if the start is random, and for folded planes, whose order is another.
    """

    name: str
    scale: float
    std: float
    edges: torch.Tensor
    density: torch.Tensor
    learned_density: torch.Tensor
    distance: float
    chance: float
    movement: Movement | None


class Frequencies(NamedTuple):
    """
    The canonical form of rotations with commuting generators: the frequencies of their common planes. In the basis of
    these planes they are RoPE-Mixed, and query and key weights can absorb the basis. So models with the same
    frequencies can compute the same function, whatever their encodings are called.

    The planes of a head are sorted by decreasing magnitude, then by their first frequency. The first nonzero frequency
    of a plane is positive; its sign would depend on the order of the plane's two channels.

    Attributes:
        per_coordinate: (A, layers, heads, planes) in radians per unit of a coordinate; 0 for unrotated channels.
        per_patch: The same in radians per patch of the trained grid, or per unit of the positions of tokens; the angle
            between patches p and q is f · (q − p).
    """

    per_coordinate: torch.Tensor
    per_patch: torch.Tensor


@dataclass
class EncodingAnalysis:
    """
    The measurements of a rotary encoding.

    Attributes:
        generators: (A, layers, heads, blocks, b, b).
        positions: (P, A) coordinates of `rotations`: one patch from the origin along each axis, then along all axes;
            for models of tokens, one unit of their positions.
        rotations: (layers, heads, blocks, P, b, b).
        commutators, angles: See [`Commutators`] and [`AngleStatistics`].
        relativity: See [`RelativityError`]; `None` for models of tokens, whose positions have no known range.
        frequencies: See [`learned_frequencies`].
        initialization: Elements of untrained generators; `None` for fixed encodings.
        representation: See [`representation_error`].
    """

    generators: torch.Tensor
    positions: torch.Tensor
    rotations: torch.Tensor
    commutators: Commutators
    relativity: RelativityError | None
    angles: AngleStatistics
    frequencies: Frequencies | None
    initialization: Initialization | None
    representation: torch.Tensor | None


def rotary_encoding(tower: nn.Module) -> RotaryEncoding | None:
    """The encoding of a vision tower, ours or patched; `None` without rotations."""
    encoding = getattr(tower, "rotary_encoding", None)
    return encoding if isinstance(encoding, RotaryEncoding) else None


def step_sizes(encoding: RotaryEncoding) -> torch.Tensor:
    """
    (A,) distances in coordinates of neighbouring patches of the trained grid, 0 along an axis of one patch; for models
    of tokens, of positions that differ by 1.
    """
    if encoding.config.train_grid is None:
        return torch.tensor(encoding.config.by_axis("position_scale"), dtype=torch.float64)
    grid = torch.tensor(encoding.config.train_grid)
    steps = grid_steps(encoding.config.train_grid, encoding.config.coordinates)
    return torch.tensor(steps, dtype=torch.float64) * (grid > 1)


def commutators(matrices: torch.Tensor) -> Commutators:
    """Norms for generators (A, layers, heads, blocks, b, b), over all blocks of a head."""
    axes = tuple(itertools.combinations(range(len(matrices)), 2))
    first, second = (matrices[[pair[end] for pair in axes]] for end in (0, 1))
    absolute = _commutator(first, second).flatten(-3).norm(dim=-1)
    scale = first.flatten(-3).norm(dim=-1) * second.flatten(-3).norm(dim=-1)
    return Commutators(axes, absolute, torch.where(scale > 0, absolute / scale.where(scale > 0, 1), 0))


def _commutator(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """[A, B] = A B − B A of skew-symmetric matrices, for which B A = (A B)ᵀ."""
    product = first @ second
    return product - product.mT


def relativity_error(encoding: RotaryEncoding, progress: bool = False) -> RelativityError:
    """
    See [`RelativityError`]. Offsets go from 0 to the longest axis of the trained grid; the pairs of its patches are two
    opposite corners, and others from a fixed seed.
    """
    config = encoding.config
    # For an input with an extent of one unit, physical coordinates are these.
    coordinates = "unit" if needs_spacing(config) else config.coordinates
    longest = max(config.train_grid)
    offsets = torch.linspace(0, longest, min(longest, OFFSETS) + 1, dtype=torch.float64)
    steps = step_sizes(encoding)
    patches = TokenPositions.from_grid(config.train_grid, config.train_grid, coordinates).coordinates  # (N, A)
    chosen = torch.randint(len(patches), (2, PAIRS), generator=torch.Generator().manual_seed(0))
    chosen[:, 0] = torch.tensor([0, len(patches) - 1])
    matrices = generator_matrices(encoding)
    largest = matrices.new_zeros(len(offsets), *matrices.shape[1:3])
    mean = largest.clone()

    def between(generators: torch.Tensor, offset: torch.Tensor | float) -> torch.Tensor:
        """R(p + c)ᵀR(q + c) of every pair, (pairs, heads, blocks, b, b)."""
        first, second = rotations(generators, patches[chosen] + offset * steps, encoding_of(config).product)
        return first.mT @ second

    for layer, generators in enumerate(tqdm(matrices.unbind(1), desc="relativity", disable=not progress)):
        unmoved = between(generators, 0)
        for index, offset in enumerate(offsets):
            difference = between(generators, offset) - unmoved
            # The Gram matrix gives the largest singular value faster than an SVD and with sufficient accuracy.
            errors = torch.linalg.eigvalsh(difference.mT @ difference)[..., -1].clamp(min=0).sqrt()
            largest[index, layer], mean[index, layer] = errors.amax((0, 2)), errors.mean((0, 2))
    return RelativityError(offsets, largest, mean)


def angle_statistics(encoding: RotaryEncoding) -> AngleStatistics:
    """Statistics of the generators' elements, see [`AngleStatistics`]."""
    elements = _elements(generator_matrices(encoding), encoding_of(encoding.config))
    layer_std = elements.flatten(1).std(dim=1, correction=0)
    return AngleStatistics(elements.std(correction=0).item(), layer_std, *_densities(elements))


def _elements(matrices: torch.Tensor, traits: type[RotaryEncoding]) -> torch.Tensor:
    """(layers, axes · blocks, heads · elements) of the upper triangles."""
    row, column = torch.triu_indices(*matrices.shape[-2:], offset=1)
    elements = matrices[..., row, column].permute(1, 0, 3, 2, 4).flatten(3).flatten(1, 2)
    served = (elements != 0).any(2).any(0)
    return elements[:, served] if traits.serves_one_axis and served.any() else elements


def _densities(*samples: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Edges of bins that contain all samples, and the density of each sample."""
    bound = max(*(sample.abs().max().item() for sample in samples), torch.finfo(torch.float32).tiny)
    densities = [torch.histogram(sample, HISTOGRAM_BINS, range=(-bound, bound), density=True) for sample in samples]
    return densities[0].bin_edges, *(density.hist for density in densities)


def initialization(encoding: RotaryEncoding) -> Initialization | None:
    """Compare with untrained generators, see [`Initialization`]; `None` for fixed ones."""
    config, traits = copy.deepcopy(encoding.config), encoding_of(encoding.config)
    if not traits.learned:
        return None
    config.folded_grids = None
    draws, starts = [], []
    trained = generator_matrices(encoding)
    learned = _elements(trained, traits).flatten()
    with torch.random.fork_rng(devices=[]):
        untrained = build_encoding(config, encoding.num_axes)
        torch.manual_seed(0)
        for _ in range(DRAWS):
            untrained.reset_parameters()
            is_planes = isinstance(encoding, FoldedPlanes) and encoding.inner is None
            matrices = generator_matrices(fold_encoding(untrained, encoding.config, {}) if is_planes else untrained)
            draws.append(_sample(_elements(matrices, traits).flatten()))
            starts.append(matrices)
        drawn = torch.cat(draws)
        distance = _distance(_sample(learned), drawn)
    chance = max(_distance(draw, torch.cat(draws[:index] + draws[index + 1 :])) for index, draw in enumerate(draws))
    name, scale, std = config.rotary_init, config.rotary_init_scale, drawn.std(correction=0).item()
    edges, density, learned_density = _densities(drawn, learned)
    movement, start = None, starts[0]
    comparable = not isinstance(encoding, FoldedPlanes) or not start.any()
    if comparable and all(torch.equal(start, other) for other in starts):
        steps = step_sizes(encoding).view(-1, 1, 1)
        movement = Movement(*(matrices.flatten(-3).norm(dim=-1) * steps for matrices in (trained - start, start)))
    return Initialization(name, scale, std, edges, density, learned_density, distance, chance, movement)


def _sample(elements: torch.Tensor) -> torch.Tensor:
    """A random choice of at most `ELEMENTS_COMPARED` elements."""
    return elements[torch.randperm(len(elements))[:ELEMENTS_COMPARED]]


def _distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """The Kolmogorov–Smirnov statistic."""
    values = torch.cat([first, second])
    shares = [torch.searchsorted(sample.sort().values, values, right=True) / len(sample) for sample in (first, second)]
    return (shares[0] - shares[1]).abs().max().item()


def learned_frequencies(encoding: RotaryEncoding) -> Frequencies | None:
    """Frequencies of the common planes, see [`Frequencies`]; `None` if the generators do not commute."""
    planes = find_common_planes(generator_matrices(encoding))
    if planes.error.max() > ROUNDING:
        return None
    frequencies = planes.frequencies.flatten(3)  # (A, layers, heads, planes)
    frequencies = nn.functional.pad(frequencies, (0, encoding.config.head_dim // 2 - frequencies.shape[-1]))
    first = (frequencies.abs() > ROUNDING * frequencies.norm(dim=0)).int().argmax(dim=0, keepdim=True)
    frequencies = frequencies * frequencies.gather(0, first).sign()
    # Axial encodings have planes of equal magnitude, whose order must not depend on rounding.
    magnitudes = frequencies.norm(dim=0)
    rounding = 10 * ROUNDING * magnitudes.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    order = torch.from_numpy(np.lexsort((-frequencies[0], -(magnitudes / rounding).round())))
    frequencies = frequencies.gather(-1, order.expand_as(frequencies))
    return Frequencies(frequencies, frequencies * step_sizes(encoding).view(-1, 1, 1, 1))


def representation_error(encoding: RotaryEncoding) -> torch.Tensor | None:
    """
    How far generators that started at a representation of so(3) are from one: (layers, heads) largest
    ‖[A_a, A_b] − A_c‖ / ‖A_c‖ over blocks and over (a, b, c) = (x, y, z), (y, z, x) and (z, x, y), in the Frobenius
    norm. It is 0 where R(p)ᵀR(q) represents p⁻¹q, and infinite where A_c is zero and [A_a, A_b] is not; `None` for any
    other start.
    """
    if not start_of(encoding.config).takes_orientations:
        return None
    first, second, third = (generator_matrices(encoding).roll(-axis, dims=0) for axis in range(3))
    difference = (_commutator(first, second) - third).flatten(-2).norm(dim=-1)  # (3, layers, heads, blocks)
    return (difference / third.flatten(-2).norm(dim=-1)).nan_to_num(0.0, posinf=torch.inf).amax((0, -1))


def analyse_encoding(encoding: RotaryEncoding, progress: bool = False) -> EncodingAnalysis:
    """All measurements of this file."""
    matrices = generator_matrices(encoding)
    steps = torch.diag(step_sizes(encoding))
    positions = torch.cat([steps, steps.sum(0, keepdim=True)])
    return EncodingAnalysis(
        generators=matrices.float(),
        positions=positions,
        rotations=rotations(matrices, positions, encoding_of(encoding.config).product).movedim(0, -3).float(),
        commutators=commutators(matrices),
        relativity=None if encoding.config.train_grid is None else relativity_error(encoding, progress=progress),
        angles=angle_statistics(encoding),
        frequencies=learned_frequencies(encoding),
        initialization=initialization(encoding),
        representation=representation_error(encoding),
    )
