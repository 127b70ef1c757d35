import math
import operator
import statistics

import pytest
import reference
import torch
from encoding_cases import (
    COMMUTING,
    ENCODINGS,
    LEARNED,
    NEUTRAL,
    PRODUCTS,
    ROUNDED,
    block_size,
    block_sizes,
    fields,
    on_axes,
    perturb,
)
from fresh_process import run_code
from transformers import AutoModelForImageClassification
from transformers.utils import logging

import hf_liere
from hf_liere.encoding.fixed_encodings import golden_gate_frequencies
from hf_liere.encoding.folding import build_rotary_encoding
from hf_liere.encoding.kinds import ENCODINGS as KINDS
from hf_liere.encoding.positions import TokenPositions
from hf_liere.rotation.exponential import skew
from hf_liere.rotation.model_basis import rotate_pair


GRIDS = {1: (5,), 2: (2, 3), 3: (2, 1, 3)}
CASES = [
    (encoding, axes, size) for axes in GRIDS for encoding in on_axes(axes) for size in block_sizes(encoding, axes=axes)
]


def build(encoding, axes, **overrides):
    """A configuration and a rotary encoding on any number of axes."""
    sizes = {"hidden_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2, **overrides}
    config = hf_liere.LieRETokensConfig(position_encoding=encoding, num_axes=axes, **sizes)
    return config, build_rotary_encoding(config, axes)


def rotations_of(module, positions, config):
    return [
        reference.dense(rotation, config.head_dim, 2) for rotation in module(TokenPositions.from_coordinates(positions))
    ]


@pytest.mark.parametrize("encoding, axes, block_size", CASES)
def test_rotations_match_the_reference_and_are_orthogonal(encoding, axes, block_size):
    config, module = build(encoding, axes, block_size=block_size)
    positions = TokenPositions.from_grid(GRIDS[axes], GRIDS[axes], KINDS[encoding].coordinates).coordinates
    parameters = dict(module.named_parameters())
    for layer, rotation in enumerate(rotations_of(module, positions, config)):
        for head in range(2):
            for token, position in enumerate(positions):
                expected = reference.head_rotation(position, parameters, config, axes, layer, head)
                # Computed in float64 and rounded to float32: once, or basis, cos and sin by themselves.
                tolerance = 3e-7 if module.block_size == 2 or encoding == "liere" else 1e-6
                torch.testing.assert_close(rotation[0, head, token], expected, rtol=0, atol=tolerance)
        gram = rotation @ rotation.transpose(-1, -2)
        torch.testing.assert_close(gram, torch.eye(24).double().expand_as(gram), rtol=0, atol=1e-6)


@pytest.mark.parametrize("axes", GRIDS)
@pytest.mark.parametrize("encoding", [name for name in ENCODINGS if name not in LEARNED])
def test_the_scale_of_fixed_frequencies_multiplies_them(encoding, axes):
    positions = TokenPositions.from_grid(GRIDS[axes], GRIDS[axes], "index").coordinates
    config, scaled = build(encoding, axes, rotary_init_scale=0.3)
    plain = build(encoding, axes)[1]
    nearer = rotations_of(plain, 0.3 * positions, config)
    for rotation, expected in zip(rotations_of(scaled, positions, config), nearer, strict=True):
        # Angles are computed in float64 and their cos and sin rounded to float32.
        torch.testing.assert_close(rotation, expected, rtol=0, atol=3e-7)
    reference_of_last = reference.head_rotation(positions[-1], {}, config, axes, 0, 0)
    torch.testing.assert_close(rotation[0, 0, -1], reference_of_last, rtol=0, atol=3e-7)


@pytest.mark.parametrize("share_heads", [False, True])
@pytest.mark.parametrize("share_layers", [False, True])
@pytest.mark.parametrize("encoding", LEARNED)
def test_sharing(encoding, share_heads, share_layers):
    # Starting values that differ between layers and heads.
    fields = {"block_size": block_size(encoding, wanted=2), "rotary_init": "normal"}
    config, module = build(encoding, 2, share_heads=share_heads, share_layers=share_layers, **fields)
    positions = torch.rand(4, 2)
    parameters = dict(module.named_parameters())
    rotations = rotations_of(module, positions, config)
    for layer, head in ((0, 0), (0, 1), (1, 0), (1, 1)):
        expected = reference.head_rotation(positions[3], parameters, config, 2, layer, head)
        torch.testing.assert_close(rotations[layer][0, head, 3], expected, rtol=0, atol=1e-6)
    assert torch.equal(rotations[0][:, 0], rotations[0][:, 1]) == share_heads
    assert torch.equal(rotations[0], rotations[1]) == share_layers
    full = sum(parameter.numel() for parameter in build(encoding, 2, **fields)[1].parameters())
    count = sum(parameter.numel() for parameter in parameters.values())
    assert count == full // (1 + share_heads) // (1 + share_layers)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_positions_of_each_sample(encoding):
    _, module = build(encoding, 2, block_size=block_size(encoding))
    positions = torch.rand(3, 5, 2)
    for layer, rotation in enumerate(
        rotation.matrices() for rotation in module(TokenPositions.from_coordinates(positions))
    ):
        assert rotation.shape[0] == 3
        for sample in range(3):
            torch.testing.assert_close(
                rotation[sample],
                module(TokenPositions.from_coordinates(positions[sample]))[layer].matrices()[0],
                rtol=0,
                atol=1e-7,
            )


@pytest.mark.parametrize("axes", GRIDS)
@pytest.mark.parametrize("encoding", COMMUTING)
def test_commuting_encodings_are_relative(encoding, axes):
    """Rᵀ(p) R(q) depends on q − p alone (ComRoPE's RoPE equation, eq. 2)."""
    config, module = build(encoding, axes, block_size=block_size(encoding, axes=axes))
    positions, shift = torch.rand(6, axes).double(), torch.tensor([0.7, -1.9, 0.3])[:axes]
    for before, after in zip(rotations_of(module, positions, config), rotations_of(module, positions + shift, config)):
        pairs = [r.transpose(-1, -2).unsqueeze(-3) @ r.unsqueeze(-4) for r in (before, after)]
        # Products of float32 rotations.
        torch.testing.assert_close(*pairs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("block_size, relative", [(2, True), (3, False), (8, False)])
def test_liere_is_relative_for_planes_only(block_size, relative):
    config, module = build("liere", 2, block_size=block_size)
    positions, shift = torch.rand(6, 2).double(), torch.tensor([0.7, -1.9])
    pairs = [
        rotation.transpose(-1, -2).unsqueeze(-3) @ rotation.unsqueeze(-4)
        for rotation in (rotations_of(module, p, config)[0] for p in (positions, positions + shift))
    ]
    deviation = (pairs[0] - pairs[1]).abs().max()
    assert deviation < 2e-6 if relative else deviation > 0.1


@pytest.mark.parametrize("encoding", ["liere", "comrope_ld"])
def test_one_axis_is_always_relative(encoding):
    """In one dimension there is one generator, which commutes with itself (LieRE App. A)."""
    config, module = build(encoding, 1, block_size=8)
    positions = torch.rand(6, 1).double()
    pairs = [
        rotation.transpose(-1, -2).unsqueeze(-3) @ rotation.unsqueeze(-4)
        for rotation in (rotations_of(module, p, config)[0] for p in (positions, positions + 0.7))
    ]
    torch.testing.assert_close(*pairs, rtol=0, atol=2e-6)


def test_parameter_counts_of_liere_table_10():
    counts = {2: 9_216, 4: 27_648, 8: 64_512, 16: 138_240, 32: 285_696, 64: 580_608}
    for size, count in counts.items():
        with torch.device("meta"):
            module = build_rotary_encoding(hf_liere.LieREViTConfig(block_size=size), 2)
        assert sum(parameter.numel() for parameter in module.parameters()) == count


def test_parameter_counts_of_comrope():
    with torch.device("meta"):
        partition = build_rotary_encoding(hf_liere.LieREViTConfig(position_encoding="comrope_ap"), 2)
        dependent = build_rotary_encoding(hf_liere.LieREViTConfig(position_encoding="comrope_ld"), 2)
    assert {name: p.numel() for name, p in partition.named_parameters()} == {"generators": 32_256}
    assert {name: p.numel() for name, p in dependent.named_parameters()} == {"generators": 32_256, "multipliers": 2_304}


def test_parameter_counts_of_the_other_encodings():
    """ViT-B on images, as the classes say."""
    expected = {
        "axial_rope": {},
        "golden_gate_rope": {},
        "cayley_string": {"generators": 9_216, "skew": 290_304},
        "circulant_string": {"generators": 8_064},
        "spherical_rope": {"generators": 6_048},
        "liere_product": {"generators": 9_216, "skew": 580_608},
    }
    for encoding, counts in expected.items():
        with torch.device("meta"):
            module = build_rotary_encoding(hf_liere.LieREViTConfig(position_encoding=encoding), 2)
        assert {name: p.numel() for name, p in module.named_parameters()} == counts


def pairs_of(module, positions, config):
    return [r.transpose(-1, -2).unsqueeze(-3) @ r.unsqueeze(-4) for r in rotations_of(module, positions, config)]


@pytest.mark.parametrize("encoding, axes", [(name, axes) for axes in (2, 3) for name in on_axes(axes, PRODUCTS)])
def test_products_are_relative_along_the_first_axis_alone(encoding, axes):
    """R_x(−ω q₁) R_z(ω (q₀ − p₀)) R_x(ω p₁): a shift of another coordinate matters."""
    config, module = build(encoding, axes)
    perturb(module)
    positions, parameters = 3 * torch.rand(6, axes).double(), dict(module.named_parameters())
    for layer, rotation in enumerate(rotations_of(module, positions, config)):
        matrices = reference.generators(parameters, config, axes, layer, 1)
        torch.testing.assert_close(
            rotation[0, 1], reference.rotations(matrices, positions, encoding), rtol=0, atol=1e-6
        )
    expected = pairs_of(module, positions, config)[0]
    for axis, shift in enumerate(0.7 * torch.eye(axes)):
        shifted = pairs_of(module, positions + shift, config)[0]
        if axis == 0:
            torch.testing.assert_close(shifted, expected, rtol=0, atol=2e-6)
        else:
            assert (shifted - expected).abs().max() > 0.1


@pytest.mark.parametrize("layout", ["blocks", "interleaved"])
@pytest.mark.parametrize("axes", GRIDS)
def test_the_product_starts_at_axial_rope(axes, layout):
    """With its frequencies and bases at zero: the same bits, of rotations and of rotated states."""
    axial = build("axial_rope", axes, axial_layout=layout)[1]
    product = build("liere_product", axes)[1]
    # The product stores its frequencies in float32.
    entries = axial.entries(torch.device("cpu")).float()  # (A, 1, 1, planes, 1)
    axial.entries = lambda device: entries
    with torch.no_grad():
        for name, values in product.parameters_for_planes(entries.squeeze(-1).expand(-1, 2, 2, -1)).items():
            getattr(product, name).copy_(values)
    positions = TokenPositions.from_coordinates(9 * torch.randn(5, axes))
    states = torch.randn(2, 3, 2, 5, 24)
    for one, other in zip(product(positions), axial(positions), strict=True):
        rotated = one.rotate(*map(one.change_basis, states))
        assert all(map(torch.equal, rotated, other.rotate(*states)))


def inverse_cayley(basis):
    """Entries below the diagonal, column by column, of the S with U = (I − S)(I + S)⁻¹."""
    identity = torch.eye(len(basis), dtype=basis.dtype)
    skew = torch.linalg.solve(identity + basis, identity - basis)
    return torch.cat([skew[column + 1 :, column] for column in range(len(basis))])


def test_spherical_rope_is_a_product_of_exponentials():
    """Planes (0, 1) and (1, 2) of every three channels are the first columns of one basis of the head for each axis."""
    config, spherical = build("spherical_rope", 2, share_layers=True, share_heads=True)
    product_config, product = build("liere_product", 2, share_layers=True, share_heads=True)
    with torch.no_grad():
        for parameter in product.parameters():
            parameter.zero_()
        for axis in range(2):
            # Eight planes of two channels, and the channels that the axis does not rotate.
            order = [3 * block + axis + channel for block in range(8) for channel in (0, 1)]
            basis = torch.eye(24).double()[:, order + [3 * block + 2 - 2 * axis for block in range(8)]]
            # The basis of a plane may turn; so none has the eigenvalue −1, which a permutation may have.
            turn = torch.matrix_exp(skew(torch.linspace(0.3, 1.9, 12).double().unsqueeze(-1), 2))
            basis = basis @ torch.block_diag(*turn) * torch.linalg.det(basis).sign()
            product.skew[axis] = inverse_cayley(basis)
            product.generators[axis, 0, 0, :8, 0] = spherical.generators[axis, 0, 0] * torch.linalg.det(basis).sign()
    positions = 3 * torch.randn(5, 2)
    for one, other in zip(rotations_of(product, positions, product_config), rotations_of(spherical, positions, config)):
        # Entries of S are rounded to float32.
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


def test_a_product_on_one_axis_is_cayley_string():
    config, product = build("liere_product", 1, block_size=8)
    string_config, string = build("cayley_string", 1, block_size=8)
    perturb(product)
    with torch.no_grad():
        string.generators.copy_(product.generators)
        string.skew.copy_(product.skew[0])
    positions = 3 * torch.randn(5, 1)
    for one, other in zip(rotations_of(product, positions, config), rotations_of(string, positions, string_config)):
        assert torch.equal(one, other)


@pytest.mark.parametrize("scale", [0.1, 10.0, 1e4])
def test_bases_of_a_product_are_orthogonal_for_any_parameters(scale):
    config, module = build("liere_product", 3, rotary_init="zeros")
    perturb(module, scale)
    bases, _ = module.spectrum(torch.device("cpu"))
    # Solved in float64, with condition numbers of I + S up to the norm of S.
    gram = bases.transpose(-1, -2) @ bases
    torch.testing.assert_close(gram, torch.eye(24).double().expand_as(gram), rtol=0, atol=1e-10)


@pytest.mark.parametrize("axes", [2, 3])
def test_gradients_of_a_product_are_those_of_its_definition(axes):
    """Π U rot(p ω) Uᵀ by exponentials of matrices in float64."""
    config, module = build("liere_product", axes, block_size=8)
    perturb(module).double()
    positions = torch.randn(5, axes).double()
    query, key, *weights = torch.randn(4, 3, 2, 5, 24).double()

    def score(query, key):
        return sum((states * weight).sum() for states, weight in zip((query, key), weights))

    rotation = list(module(TokenPositions.from_coordinates(positions)))[1]
    gradients = torch.autograd.grad(score(*rotate_pair(rotation, query, key)), list(module.parameters()))
    generators = skew(module.entries(torch.device("cpu"))[:, 1], 8)  # (A, H, blocks, b, b)
    matrices = torch.eye(8).double()
    for axis in range(axes):
        matrices = matrices @ torch.matrix_exp(positions[:, axis].view(1, -1, 1, 1, 1) * generators[axis].unsqueeze(1))
    rotated = [(matrices @ x.unflatten(-1, (3, 8, 1))).flatten(-3) for x in (query, key)]
    expected = torch.autograd.grad(score(*rotated), list(module.parameters()))
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


def test_cayley_string_leaves_the_planes_of_rope_mixed_when_it_learns():
    """It starts as RoPE-Mixed; with any S its scores are those of RoPE-Mixed on queries and keys in another basis."""
    config, module = build("cayley_string", 2)
    mixed_config, mixed = build("rope_mixed", 2)
    mixed.generators.data = module.generators.data.clone()
    positions = 3 * torch.rand(5, 2)
    before = rotations_of(mixed, positions, mixed_config)
    for one, other in zip(rotations_of(module, positions, config), before):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    torch.nn.init.normal_(module.skew)
    for one, other, basis in zip(rotations_of(module, positions, config), before, module.bases()):
        basis = basis[:, 0].detach()
        torch.testing.assert_close(basis @ basis.mT, torch.eye(24).double().expand(2, 24, 24))
        assert (one - other).abs().max() > 0.5
        basis = basis.unsqueeze(1)
        # Basis and planes are rounded to float32.
        torch.testing.assert_close(one[0], basis @ other[0] @ basis.mT, rtol=0, atol=2e-6)


@pytest.mark.parametrize("size", [8, 3])
def test_circulant_string_starts_with_the_frequencies_of_a_spectrum(size):
    config, module = build("circulant_string", 2, block_size=size, rotary_init="golden_gate")
    matrices = reference.generators(dict(module.named_parameters()), config, 2, 0, 1)
    # Frequencies of one axis are the eigenvalues of its generator.
    found = torch.linalg.eigvalsh(1j * matrices).abs().sort(-1).values[:, ::2]
    golden = golden_gate_frequencies(config, 2, 1, 2, module.num_planes)[:, 0, 1].abs().sort(-1).values
    golden = torch.nn.functional.pad(golden, (24 // 2 - golden.shape[-1], 0))
    torch.testing.assert_close(found, golden, rtol=0, atol=1e-6)


def test_golden_gate_directions_are_spread_evenly():
    """Of 1,000 planes on two axes, sectors of a twentieth of all directions hold a twentieth each."""
    config = hf_liere.LieREViTConfig(position_encoding="golden_gate_rope", unrotated_share=0.25)
    frequencies = golden_gate_frequencies(config, 2, 1, 10, 100)[:, 0]
    magnitudes = frequencies.norm(dim=0)
    assert (magnitudes[:, :25] == 0).all()
    expected = 0.1 * 10 ** torch.linspace(0, 1, 75, dtype=torch.float64)
    torch.testing.assert_close(magnitudes[:, 25:], expected.expand(10, 75))
    everything = golden_gate_frequencies(hf_liere.LieREViTConfig(position_encoding="golden_gate_rope"), 2, 1, 10, 100)
    angles = torch.atan2(*everything.flatten(1))
    counts = torch.histc(angles, 20, -math.pi, math.pi)
    # Independent directions would have a deviation of seven.
    assert (counts - 50).abs().max() <= 8


@pytest.mark.parametrize("layout", ["blocks", "interleaved"])
def test_layouts_of_axial_rope(layout):
    """(axis, frequency) of every plane."""
    config, module = build("axial_rope", 3, axial_layout=layout, rope_theta=10_000.0)
    spectrum = [10_000.0 ** -(i / 4) for i in range(4)]
    planes = {
        "blocks": [(i // 4, spectrum[i % 4]) for i in range(12)],
        "interleaved": [(i % 3, spectrum[i // 3]) for i in range(12)],
    }[layout]
    entries = module.entries(torch.device("cpu"))[:, 0, 0, :, 0]
    expected = torch.zeros(3, 12, dtype=torch.float64)
    for plane, (axis, frequency) in enumerate(planes):
        expected[axis, plane] = frequency
    torch.testing.assert_close(entries, expected)
    position = torch.randn(3)
    rotation = rotations_of(module, position.view(1, 3), config)[0][0, 0, 0]
    expected = reference.head_rotation(position, {}, config, 3, 0, 0)
    torch.testing.assert_close(rotation, expected, rtol=0, atol=3e-7)


def test_rope_mixed_starts_with_the_spectrum_of_rope_vit():
    """Per head: orthogonal directions for the two halves of the planes, magnitudes 10^(−4i/head_dim) in each."""
    config, module = build("rope_mixed", 2)
    frequencies = module.generators.detach().squeeze(-1)
    magnitudes = frequencies.square().sum(0).sqrt()
    expected = 10.0 ** -(torch.arange(6) * 4 / config.head_dim)
    torch.testing.assert_close(magnitudes, expected.repeat(2).expand(2, 2, 12))
    directions = frequencies / magnitudes
    torch.testing.assert_close(directions[..., 0:1].expand(2, 2, 2, 6), directions[..., :6])
    inner = (directions[..., 0] * directions[..., 6]).sum(0)
    torch.testing.assert_close(inner, torch.zeros(2, 2), rtol=0, atol=1e-6)
    assert directions[0, ..., 0].flatten().unique().numel() == 4


def test_liere_with_frequencies_rotates_like_rope_mixed():
    config, module = build("liere", 2, block_size=8, rotary_init="frequencies", rotary_init_scale=0.5)
    planes_config, planes = build("rope_mixed", 2)
    row, column = torch.triu_indices(8, 8, offset=1)
    in_plane = (row % 2 == 0) & (column == row + 1)
    planes.generators.data = module.generators.detach()[..., in_plane].reshape(planes.generators.shape)
    assert (module.generators[..., ~in_plane] == 0).all() and planes.generators.abs().max() <= 0.5
    positions = torch.rand(4, 2) * 10
    for ours, mixed in zip(rotations_of(module, positions, config), rotations_of(planes, positions, planes_config)):
        torch.testing.assert_close(ours, mixed, rtol=0, atol=1e-6)


def test_initialisations():
    wide = {"hidden_size": 512, "num_attention_heads": 4}
    uniform = build("liere", 2, **wide)[1].generators
    assert uniform.min() >= 0 and uniform.max() < 2 * math.pi and abs(uniform.mean() - math.pi) < 0.1
    scaled = build("liere", 2, rotary_init_scale=1.0, **wide)[1].generators
    assert scaled.max() < 1 and abs(scaled.mean() - 0.5) < 0.02
    dependent = build("comrope_ld", 2, **wide)[1]
    # The entries of P − Pᵀ for a standard normal P.
    assert abs(dependent.generators.std() - math.sqrt(2)) < 0.07 and abs(dependent.multipliers.std() - 1) < 0.1
    zeros = build("comrope_ld", 2, rotary_init="zeros", **wide)[1]
    assert (zeros.generators == 0).all() and zeros.multipliers.abs().min() > 0


@pytest.mark.parametrize("encoding", NEUTRAL)
def test_zero_generators_are_the_identity_and_get_a_gradient(encoding):
    config, module = build(encoding, 2, block_size=block_size(encoding), rotary_init="zeros")
    rotations = module(TokenPositions.from_coordinates(torch.rand(5, 2) * 100))
    matrices = rotations[0].matrices().float()
    identity = torch.eye(matrices.shape[-1]).expand_as(matrices)
    torch.testing.assert_close(matrices, identity, rtol=0, atol=2e-7 if encoding in ROUNDED else 0)
    query, key = torch.randn(2, 1, 2, 5, 24)
    rotated = [state for rotation in rotations for state in rotation.rotate(query, key)]
    sum((state * torch.randn_like(state)).sum() for state in rotated).backward()
    assert (module.generators.grad != 0).all()


@pytest.mark.parametrize("encoding", LEARNED)
def test_a_module_by_itself_is_initialised(encoding):
    """As `rotary_init` says, without a model around it; unset memory would not survive a large fill of the heap."""
    poison = [torch.full((4096,), torch.nan) for _ in range(64)]
    del poison
    for axes in (axes for axes in (1, 2, 3) if encoding in on_axes(axes)):
        for parameter in build(encoding, axes, block_size=block_size(encoding, axes=axes))[1].parameters():
            assert torch.isfinite(parameter).all() and parameter.abs().max() < 20
        assert 0.05 < parameter.std() < 3 or not parameter.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("encoding", LEARNED)
def test_generators_stay_in_float32(tiny, tmp_path, encoding, dtype, caplog):
    """In models built or loaded in a half type; a later cast is carried out, and warned of."""
    config = tiny(position_encoding=encoding, block_size=block_size(encoding))
    model = AutoModelForImageClassification.from_config(config, dtype=dtype)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path, dtype=dtype)
    for each in (model, loaded):
        assert {parameter.dtype for _, parameter in each.rotary_parameters()} == {torch.float32}
        assert each.classifier.weight.dtype == dtype and each(torch.randn(1, 3, 16, 16)).logits.dtype == dtype
    logger = logging.get_logger("hf_liere.encoding.rotary_encoding")
    logger.warning_once.cache_clear()
    logger.addHandler(caplog.handler)
    loaded.to(dtype)
    logger.removeHandler(caplog.handler)
    assert f"generators of {encoding} were rounded to {dtype}" in caplog.text


@pytest.mark.slow
def test_checkpoints_load_without_the_package(tiny, tmp_path):
    """Of every encoding, with parameters that training could have led to, in a process without hf_liere."""
    pixel_values, logits = torch.randn(2, 3, 8, 24), {}
    for encoding in ENCODINGS:
        model = AutoModelForImageClassification.from_config(tiny(**fields(encoding), initializer_range=0.2))
        perturb(model).eval().save_pretrained(tmp_path / encoding)
        logits[encoding] = model(pixel_values).logits.detach()
    torch.save({"pixel_values": pixel_values, "logits": logits}, tmp_path / "expected.pt")
    code = """
        import torch
        from transformers import AutoModelForImageClassification
        expected = torch.load("expected.pt", weights_only=True)
        for encoding, logits in expected["logits"].items():
            model = AutoModelForImageClassification.from_pretrained(encoding, trust_remote_code=True)
            torch.testing.assert_close(model(expected["pixel_values"]).logits, logits, rtol=0, atol=1e-5)
    """
    run_code(code, tmp_path, package=False)


@pytest.mark.parametrize("encoding", ["axial_rope", "golden_gate_rope"])
@torch.no_grad()
def test_fixed_rotations_are_exact_in_float64(encoding):
    """Of a layer that was made in float32, used and converted; by formulas in numbers of float64."""
    rotary = hf_liere.LieRotaryEmbedding(2, 16, 2, position_encoding=encoding).eval()
    grid = hf_liere.grid_positions((2, 3), "index")
    rotary.rotations(grid, torch.float64)
    (rotation,) = rotary.double().rotations(grid, torch.float64)
    for head in range(2):
        for token in range(6):
            place = divmod(token, 3)
            for plane in range(8):
                if encoding == "axial_rope":
                    angle = place[plane // 4] * 100 ** -(plane % 4 / 4)
                else:
                    golden = 1.324717957244746  # the root of g³ = g + 1
                    shares = [(1 + 8 * head + plane) * golden ** -(axis + 1) % 1 for axis in range(2)]
                    normal = [statistics.NormalDist().inv_cdf(share) for share in shares]
                    angle = 0.1 * 10 ** (plane / 7) * sum(map(operator.mul, place, normal)) / math.hypot(*normal)
                found = rotation.cos_sin[0, head % rotation.cos_sin.shape[1], token, plane]
                wanted = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
                # torch's normal quantiles and Python's are each rounded.
                atol = 1e-15 if encoding == "axial_rope" else 1e-14
                torch.testing.assert_close(found, wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("encoding", ["axial_rope", "golden_gate_rope"])
def test_fixed_rotations_have_the_precision_of_their_model(encoding, tiny, tmp_path):
    """Nothing is learned that could show it: converted, loaded, or rounded to a half type and back."""
    config = tiny(**fields(encoding), use_class_token=False, pooling="mean", initializer_range=0.2)
    model = AutoModelForImageClassification.from_config(config).half().double().eval()
    pixels = torch.randn(1, 3, 16, 16, dtype=torch.float64)
    positions = torch.cartesian_prod(*2 * [torch.arange(4, dtype=torch.float64)])
    logits = model(pixels, positions=positions).logits
    # Relative positions up to the rounding of angles and sums in float64; in float32 it is 1e-6.
    assert (model(pixels, positions=positions + 3.7).logits - logits).abs().max() < 1e-12
    model.save_pretrained(tmp_path)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        loaded = AutoModelForImageClassification.from_pretrained(tmp_path, dtype=dtype)
        wanted = torch.float64 if dtype == torch.float64 else torch.float32
        assert loaded.base_model.rotary_encoding.rotation_dtype == wanted


@pytest.mark.parametrize("encoding", ["rope_mixed", "liere"])
def test_golden_gate_as_a_start(encoding):
    """Learned frequencies start where golden gate RoPE is, and leave it when they learn."""
    fields = {"unrotated_share": 0.25, "max_frequency": 2.0}
    config, module = build(encoding, 3, block_size=block_size(encoding), rotary_init="golden_gate", **fields)
    golden_config, golden = build("golden_gate_rope", 3, **fields)
    positions = 3 * torch.randn(5, 3)
    for one, other in zip(rotations_of(module, positions, config), rotations_of(golden, positions, golden_config)):
        # Frequencies are rounded to float32, at angles up to twenty.
        torch.testing.assert_close(one, other, rtol=0, atol=3e-6)
