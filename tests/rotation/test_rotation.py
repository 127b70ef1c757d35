"""The fast forms of rotations, and their gradients, against matrices in float64, for all kinds of generators."""

import math

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rotating import rotate, rotate_query_key

import hf_liere
import hf_liere.encoding.commuting_encodings
import hf_liere.encoding.rotary_encoding
import hf_liere.encoding.string_encodings
from hf_liere.encoding.positions import TokenPositions
from hf_liere.fast.scaling_and_squaring import POLYNOMIAL, POLYNOMIAL_NORM
from hf_liere.geometry.common_planes import find_common_planes
from hf_liere.rotation.bases import eigenbasis, to_basis
from hf_liere.rotation.exponential import block_rotations, skew
from hf_liere.rotation.rotation import PlaneRotation


pytestmark = pytest.mark.usefixtures("every_path")


def generators_of(seed, count, size, kind, scale):
    """Skew matrices with the spectra that break naive eigensolvers."""
    generator = torch.Generator().manual_seed(seed)
    matrices = skew(torch.randn(count, size * (size - 1) // 2, generator=generator, dtype=torch.float64), size)
    if kind == "zero":
        matrices = matrices * 0
    elif kind == "kernel":
        matrices[:, size // 2 :] = 0
        matrices[:, :, size // 2 :] = 0
    elif kind == "repeated":
        frame = torch.linalg.qr(torch.randn(count, size, size, generator=generator, dtype=torch.float64))[0]
        plane = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
        planes = torch.block_diag(*[plane] * (size // 2), *[torch.zeros(1, 1, dtype=torch.float64)] * (size % 2))
        matrices = frame @ planes @ frame.transpose(-1, -2)
    return matrices * scale


spectra = st.sampled_from(["generic", "zero", "kernel", "repeated"])
scales = st.sampled_from([1e-6, 0.1, 1.0, 30.0, 1000.0])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12), spectra, scales)
def test_eigenbasis_is_orthogonal_and_makes_planes(seed, size, kind, scale):
    matrices = generators_of(seed, 3, size, kind, scale)
    basis = eigenbasis(matrices)
    identity = torch.eye(size, dtype=torch.float64).expand(3, size, size)
    torch.testing.assert_close(basis.transpose(-1, -2) @ basis, identity, rtol=0, atol=1e-13)
    planes = basis.transpose(-1, -2) @ matrices @ basis
    for plane in range(0, size - 1, 2):
        planes[:, plane + 1, plane] = planes[:, plane, plane + 1] = 0
    # A kernel is split by a perturbation of 2e-12 of the norm.
    assert planes.abs().max() <= 1e-11 * max(matrices.flatten(1).norm(dim=1).max().item(), 1e-300)
    if kind == "zero":
        assert torch.equal(basis, identity)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 12), st.integers(1, 4), st.sampled_from(["generic", "axial", "repeated"]))
def test_generators_share_planes_if_and_only_if_they_commute(seed, size, axes, kind):
    generator = torch.Generator().manual_seed(seed)
    frame = torch.linalg.qr(torch.randn(3, size, size, generator=generator, dtype=torch.float64))[0]
    frequencies = torch.randn(axes, 3, size // 2, generator=generator, dtype=torch.float64)
    if kind == "axial":
        frequencies = frequencies * (torch.arange(size // 2) % axes == torch.arange(axes)[:, None])[:, None]
    elif kind == "repeated":
        frequencies = frequencies.round()
    planes = torch.zeros(axes, 3, size, size, dtype=torch.float64)
    even = torch.arange(0, size - 1, 2)
    planes[..., even + 1, even], planes[..., even, even + 1] = frequencies, -frequencies
    matrices = frame @ planes @ frame.transpose(-1, -2)
    found = find_common_planes(matrices)
    assert found.error.max() < 1e-9
    # Sums over the axes of p_a f_a, the angles of a rotation, do not depend on the basis.
    position = torch.randn(axes, generator=generator, dtype=torch.float64)
    angles, expected = (
        torch.einsum("a,akp->kp", position, each).abs().sort().values for each in (found.frequencies, frequencies)
    )
    torch.testing.assert_close(angles, expected, rtol=0, atol=1e-9)
    if axes > 1 and size > 2:
        noise = skew(torch.randn(axes, 3, size * (size - 1) // 2, generator=generator, dtype=torch.float64), size)
        assert find_common_planes(noise).error.min() > 1e-3


def rotated_in_eigenbasis(phases, matrices, query, key):
    """By cos and sin for (H, blocks, b, b) generators and (B, H, N, blocks) phases; states are changed to the basis."""
    basis = eigenbasis(matrices)
    inside = basis.mT @ matrices @ basis
    frequencies = inside[..., range(1, inside.shape[-1], 2), range(0, inside.shape[-1], 2)]
    angles = (phases.unsqueeze(-1) * frequencies.unsqueeze(-3)).flatten(-2)
    rotation = PlaneRotation(torch.stack([angles.cos(), angles.sin()], -1), basis, inside, phases)
    heads = query.shape[1]
    folded = [
        torch.stack([to_basis(state.mT.flatten(0, 1), basis).unflatten(0, (heads, -1)) for state in part]).mT
        for part in (query, key)
    ]
    return rotate_query_key(*folded, rotation)


def rotated_by_matrices(phases, matrices, query, key):
    rotation = reference.exponential(phases[..., None, None] * matrices.unsqueeze(-4))
    return [
        (rotation @ part.unflatten(-1, (-1, matrices.shape[-1], 1))).squeeze(-1).flatten(-2) for part in (query, key)
    ]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([2, 4, 6, 8]), spectra, scales, st.booleans(), st.booleans())
def test_eigen_rotations_have_the_products_and_gradients_of_matrices(seed, size, kind, scale, shared, per_sample):
    """Attention sees (R q)·(R k); its gradients by autograd through exact exponentials in float64."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads, tokens, blocks = 2, 2, 3, 2
    matrices = generators_of(seed, (1 if shared else heads) * blocks, size, kind, scale).unflatten(0, (-1, blocks))
    phases = torch.randn(batch if per_sample else 1, matrices.shape[0], tokens, blocks, generator=generator).double()
    phases[:, :, 0] = 0
    query, key = torch.randn(2, batch, heads, tokens, blocks * size, generator=generator).double()
    weight = torch.randn(batch, heads, tokens, tokens, generator=generator).double()
    results = []
    for rotated in (rotated_in_eigenbasis, rotated_by_matrices):
        leaves = [part.clone().requires_grad_() for part in (matrices, query, key)]
        left, right = rotated(phases, *leaves)
        products = left @ right.mT
        gradients = torch.autograd.grad((products * weight).sum(), leaves)
        # Only the skew part of the gradient reaches the entries.
        results.append([products, gradients[0] - gradients[0].mT, *gradients[1:]])
    # The splitting of kernels rotates by 2e-12 of the norm times the phases.
    for ours, expected in zip(*results):
        torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-9 * (1 + scale))


@pytest.mark.parametrize(
    "grid, coordinates, rays",
    [
        ((14, 14), "train_grid", 117),
        ((14, 14), "centred_grid", 82),
        ((4, 14, 14), "train_grid", 631),
        ((4, 14, 14), "centred_grid", 376),
    ],
)
def test_number_of_exponentials(grid, coordinates, rays):
    assert len(TokenPositions.from_grid(grid, grid, coordinates).facts.rays().tokens().indices) == rays


def test_a_grid_with_prefix_tokens_elsewhere_has_no_rays():
    assert TokenPositions.from_grid((3, 4), (3, 4), "centred_grid", 1, 0.5).facts.rays() is None
    assert TokenPositions.from_grid((3, 4), (3, 4), "unit").facts.rays() is None


@pytest.mark.parametrize("coordinates", ["index", "train_grid", "centred_grid", "train_index", "fixed_grid"])
@pytest.mark.parametrize("size, scale", [(3, 1.0), (8, 2 * math.pi), (16, 30.0)])
def test_rays_change_neither_rotations_nor_gradients(coordinates, size, scale):
    placed = TokenPositions.from_grid((6, 9), (4, 4), coordinates, 1)
    rays, positions = placed.facts.rays(), placed.coordinates
    entries = (torch.rand(2, 3, 2, size * (size - 1) // 2, dtype=torch.float64) * scale).requires_grad_()
    weight = torch.randn(3, 2, len(positions), size, size, dtype=torch.float64)
    results = []
    for given_rays in (rays, None):
        rotations = block_rotations(positions, skew(entries, size), torch.float64, given_rays)
        results.append((rotations, *torch.autograd.grad((rotations * weight).sum(), entries)))
    exact = reference.exponential(torch.einsum("pa,aglij->glpij", positions, skew(entries, size)))
    # Powers and squarings of matrices of norm up to 2,000 lose five to six digits of sixteen.
    torch.testing.assert_close(results[0][0], exact, rtol=0, atol=1e-8)
    torch.testing.assert_close(results[0], results[1], rtol=1e-7, atol=1e-7)


def test_the_polynomial_is_the_exponential_on_the_imaginary_axis():
    x = 1j * torch.linspace(-POLYNOMIAL_NORM, POLYNOMIAL_NORM, 1001, dtype=torch.float64)
    b1, b2, b3, b4, b5 = (sum(c * x**d for c, d in zip(row, (0, 1, 2, 3, 6))) for row in POLYNOMIAL)
    product = b1 * b5 + b4
    assert (b2 + (b3 + product) * product - x.exp()).abs().max() < 1e-12


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("contiguous", [True, False])
def test_states_of_any_layout_and_type(size, dtype, contiguous):
    """Views on a projection's output, heads split off by slicing, odd offsets, ten samples: one result."""
    states = torch.randn(10, 5, 2 * 17 + 1, dtype=torch.float32).to(dtype)
    query, key = (part.unflatten(-1, (2, 17)).transpose(1, 2) for part in (states[..., 1:], states[..., :-1]))
    if contiguous:
        query, key = query.contiguous(), key.contiguous()
    entries = 7 * torch.randn(1, 2, 5, 16 // size, size * (size - 1) // 2)
    matrices = torch.matrix_exp(skew(entries, size).double())
    rotation = (matrices[..., 0] if size == 2 else matrices).float()  # cos and sin of planes
    for rotated, state in zip(rotate_query_key(query, key, rotation), (query, key)):
        assert rotated.dtype == dtype and torch.equal(rotated[..., 16:], state[..., 16:])
        blocks = state[..., :16].double().unflatten(-1, (-1, size, 1))
        # Products of eight terms of size one in the type itself.
        close = {"rtol": 0, "atol": 8 * 4 * torch.finfo(dtype).eps}
        torch.testing.assert_close(rotated[..., :16].double(), (matrices @ blocks).flatten(-3), **close)
        torch.testing.assert_close(rotate(state, rotation), rotated, **close)


@pytest.mark.parametrize(
    "encoding, module, computes",
    [
        ("liere", hf_liere.encoding.rotary_encoding, "layer_block_rotations"),
        ("comrope_ld", hf_liere.encoding.commuting_encodings, "eigenbasis"),
        ("cayley_string", hf_liere.encoding.string_encodings, "cayley_map"),
    ],
)
def test_gradient_checkpointing_recomputes_no_rotation(tiny, encoding, module, computes, monkeypatch):
    calls, original = [], getattr(module, computes)
    monkeypatch.setattr(module, computes, lambda *args: calls.append(1) or original(*args))
    model = hf_liere.LieREViTForImageClassification(tiny(position_encoding=encoding, block_size=8)).train()
    model.gradient_checkpointing_enable()
    model(torch.randn(2, 3, 16, 16), labels=torch.tensor([0, 1])).loss.backward()
    # All layers at once.
    assert len(calls) == 1


def test_large_rotations_are_computed_layer_by_layer(tiny, monkeypatch):
    model = hf_liere.LieREViTModel(tiny(position_encoding="liere", block_size=8)).eval()
    pixel_values = torch.randn(1, 3, 16, 16)
    expected = model(pixel_values).pooler_output
    (expected.sum()).backward()
    gradient = model.rotary_encoding.generators.grad.clone()
    model.zero_grad()
    monkeypatch.setattr("hf_liere.encoding.rotary_encoding.ALL_LAYERS_BYTES", 1000)
    grid = model.config.train_grid
    rotations = model.rotations(model.grid_positions(grid, pixel_values.device))
    assert iter(rotations) is rotations, "a layer's rotations must be freed before the next layer's are made"
    pooled = model(pixel_values).pooler_output
    pooled.sum().backward()
    assert torch.equal(pooled, expected)
    torch.testing.assert_close(model.rotary_encoding.generators.grad, gradient)
