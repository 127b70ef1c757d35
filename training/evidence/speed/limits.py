"""A lower limit for the cost of an encoding: the bytes and products of its mathematics at the machine's rates."""

import dataclasses

import torch

from hf_liere.encoding.kinds import encoding_of
from hf_liere.encoding.positions import GridPositions, TokenPositions
from hf_liere.encoding.rotary_encoding import RotaryEncoding
from hf_liere.fast.quaternions import CLOSED_FORMS
from hf_liere.fast.scaling_and_squaring import POLYNOMIAL_NORM
from hf_liere.rotation.exponential import skew
from training.evidence.speed.additions import Addition


# cos and sin in float32 by polynomials of four terms, after subtracting whole revolutions.
CIRCLE_PRODUCTS = 8
# Matrix products of an exponential with a norm up to POLYNOMIAL_NORM; every squaring takes one more.
EXPONENTIAL_PRODUCTS = 5
NUMBER_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Work:
    """Bytes read and written, and multiply-adds in float32 and float64."""

    bytes: float = 0.0
    products: float = 0.0
    double_products: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other))))

    def seconds(self, rates: dict[str, dict[str, float]], clock: str) -> float:
        """Seconds at the rates of `clocks.machine_rates`, without overlap."""
        amounts = {"bandwidth": self.bytes, "float32": self.products, "float64": self.double_products}
        return sum(amount / rates[name][clock] for name, amount in amounts.items())


@torch.no_grad()
def needed_work(addition: Addition) -> Work:
    """
    The work of a step of an addition: applying rotations and, unless these are cached, computing them and, if
    generators commute, changing the basis of the weights. Work that depends on neither tokens nor weights, such as
    eigenbases of the blocks, is ignored.
    """
    encoder, encoding = addition.encoder, addition.encoder.rotary_encoding
    positions = encoder.grid_positions(addition.grid, addition.device)
    rotation = next(iter(encoder.rotations(positions)))
    planes = rotation.num_planes()
    learned = addition.training and any(parameter.requires_grad for parameter in encoding.parameters())
    # Gradients of learned frequencies come from planes, those of block matrices from outer products over the blocks.
    of_planes = planes and getattr(rotation, "generators", None) is None
    inner = getattr(rotation, "inner", None)
    factors = 1 if inner is None else 1 + len(inner)
    outer_size = 2 if of_planes else encoding.block_size
    work = application_work(addition, encoding, planes // factors, learned, outer_size, factors)
    constant = encoding.config.folded_grids is not None and not planes
    if constant or not (addition.training or addition.settings.compile or not addition.keeps_rotations):
        return work
    if planes:
        work += plane_work(encoding, positions, planes, axes=positions.shape[-1] // factors)
    elif encoding_of(encoding.config).product:
        work += product_work(encoding, positions)
    elif encoding.block_size in CLOSED_FORMS:
        work += quaternion_work(encoding, positions, learned)
    else:
        work += block_work(encoding, positions, learned)
    if addition.changes_basis:
        weights = [layer.attention.q_proj.weight for layer in encoder.layers]
        work += basis_work(weights, encoding.block_size, addition.training)
    return work


def application_work(
    addition: Addition, encoding: RotaryEncoding, planes: int, learned: bool, outer_size: int, factors: int
) -> Work:
    """
    Rotations of queries and keys (B, H, N, C) in L layers, with C rotated channels and n = BHNC.

    Forward, each layer reads 2n states and the numbers of the rotations and writes 2n states. For N tokens and H heads
    (1 if shared), rotations have 2 numbers per plane or b² per block. A layer takes 2nb multiply-adds, with b = 2 for
    planes. Backward, gradients take the same. If generators are learned, 2n rotated states are read again, and Σ g qᵀ
    over blocks of `outer_size` takes that number of further multiply-adds per state.

    A product of `factors` rotates planes as often, and takes b multiply-adds for a state between two of them, and as
    many for the gradient of their bases.
    """
    query, _ = addition.states.layers[0]
    batch, heads, tokens, _ = query.shape
    blocks, size = encoding.num_blocks, encoding.block_size
    channels, numbers, applied = (2 * planes, 2 * planes, 2) if planes else (blocks * size, blocks * size**2, size)
    between = (factors - 1) * size
    numbers, applied, outer_size = factors * numbers, factors * applied + between, factors * outer_size + between
    states, layers = 2 * batch * heads * tokens * channels, encoding.num_layers
    once = Work(
        layers * (2 * states * query.element_size() + tokens * encoding.heads * numbers * NUMBER_BYTES),
        layers * states * applied,
    )
    work = once + once if addition.training else once
    if learned:
        work += Work(layers * states * query.element_size(), layers * states * outer_size)
    return work


def plane_work(encoding: RotaryEncoding, positions: TokenPositions, planes: int, axes: int) -> Work:
    """
    Computes and writes cos and sin of N · planes angles Σ_a p_a f_a of `axes` terms, for all layers and heads with
    frequencies.
    """
    tokens = positions.shape[-2]
    angles = tokens * planes * encoding.heads * encoding.layers
    return Work(2 * angles * NUMBER_BYTES, angles * (axes + CIRCLE_PRODUCTS))


def product_work(encoding: RotaryEncoding, positions: TokenPositions) -> Work:
    """Computes and writes blocks of three channels from cos and sin of two angles, with four products per block."""
    tokens = positions.shape[-2]
    blocks = tokens * encoding.num_blocks * encoding.heads * encoding.layers
    return Work(blocks * 9 * NUMBER_BYTES, blocks * (2 * (1 + CIRCLE_PRODUCTS) + 4))


def quaternion_work(encoding: RotaryEncoding, positions: TokenPositions, learned: bool) -> Work:
    """
    Computes and writes blocks of three and four channels in closed form: cos and sin of the length of one or two sums
    Σ_a p_a u_a of three numbers, and four products for each entry. The gradient takes twice as many.
    """
    (tokens, axes), size = positions.shape[-2:], encoding.block_size
    blocks = tokens * encoding.num_blocks * encoding.heads * encoding.layers
    products = blocks * ((size - 2) * (3 * (axes + 1) + CIRCLE_PRODUCTS) + 4 * size**2)
    return Work(blocks * size**2 * NUMBER_BYTES, 3 * products if learned else products)


def block_work(encoding: RotaryEncoding, positions: TokenPositions, learned: bool) -> Work:
    """
    Computes and writes exp(Σ_a p_a A_a) of b×b blocks at N tokens, for all layers and heads with generators.

    In float64, an exponential takes five products and one for each halving of its norm down to `POLYNOMIAL_NORM`. On
    the rays of a grid, see [`RayTokens`], tokens after the first take one product instead, and transposes none. The
    gradient takes two float32 products for each of these.
    """
    placed = positions.locate().coordinates
    coordinates = placed.double().cpu()
    tokens, size = coordinates.shape[-2], encoding.block_size
    first, powers = coordinates.any(-1).nonzero().squeeze(-1), 0
    if isinstance(positions, GridPositions) and (rays := positions.facts.rays()):
        indices, step, _ = rays.tokens()
        first, lengths = indices[:, 0], (indices >= 0).sum(1)
        # Where multiples are 1, 3, 5, …, a ray with several tokens also needs R(p)².
        powers = int((lengths - 1).sum()) + (int((lengths > 1).sum()) if step == 2 else 0)
    entries = encoding.entries(placed.device).double().cpu()  # (A, layers, heads, blocks, b(b−1)/2)
    products = 0
    for layer in entries.flatten(2, 3).unbind(1):
        exponents = torch.einsum("pa,akij->pkij", coordinates[first], skew(layer, size))
        squarings = (norms(exponents) / POLYNOMIAL_NORM).clamp(min=1).log2().ceil()
        count = EXPONENTIAL_PRODUCTS * squarings.numel() + squarings.sum().item() + powers * layer.shape[1]
        products += count * size**3
    numbers = tokens * encoding.layers * encoding.heads * encoding.num_blocks * size**2
    return Work(numbers * NUMBER_BYTES, 2 * products if learned else 0, products)


def norms(matrices: torch.Tensor) -> torch.Tensor:
    """Lower bounds (…) of the spectral norms of skew-symmetric matrices (…, b, b): (‖X⁴‖ / ‖X²‖)^½, Frobenius norms."""
    squares = matrices @ matrices
    fourth = torch.linalg.matrix_norm(squares @ squares)
    return (fourth / torch.linalg.matrix_norm(squares)).nan_to_num(0.0).sqrt()


def basis_work(weights: list[torch.Tensor], size: int, training: bool) -> Work:
    """Reads query and key weights, multiplies them by b×b blocks and writes them; in training also gradients."""
    passes = 2 if training else 1
    bytes_once = sum(2 * 2 * weight.nbytes for weight in weights)
    return Work(passes * bytes_once, passes * sum(2 * weight.numel() * size for weight in weights))
