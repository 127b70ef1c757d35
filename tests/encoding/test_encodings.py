"""What encodings promise beyond their definition in `hf_liere.plain`: which are relative, their sizes and precision."""

import math
import operator
import statistics

import pytest
import torch
from encoding_cases import (
    COMMUTING,
    LEARNED,
    OWN_PLAIN,
    PRODUCTS,
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


def layer(encoding, axes, size=None, **options):
    return hf_liere.LieRotaryEmbedding(2, 24, axes, encoding, size or block_size(encoding, axes=axes), **options)


def scores(rotary, positions):
    """(2, N, N, D, D) R(p)ᵀ R(q) of all pairs of tokens in each head."""
    units = torch.eye(24)[:, None, None].expand(-1, 2, len(positions), -1)
    matrices = rotary.rotate(units, positions).detach().permute(1, 2, 3, 0).double()  # (2, N, D, D)
    return matrices.mT.unsqueeze(2) @ matrices.unsqueeze(1)


# In one dimension there is one generator, which commutes with itself (LieRE App. A).
RELATIVE = [(encoding, axes, block_size(encoding, axes=axes)) for axes in (1, 2, 3) for encoding in COMMUTING]
RELATIVE = [case for case in RELATIVE if case[0] in on_axes(case[1])]
RELATIVE += [("liere", 2, 2), ("liere", 3, 2), ("liere", 1, 8)]


@pytest.mark.parametrize("encoding, axes, size", RELATIVE)
def test_relative_encodings(encoding, axes, size):
    """Rᵀ(p) R(q) depends on q − p alone (ComRoPE's RoPE equation, eq. 2), for any parameters."""
    rotary, positions = perturb(layer(encoding, axes, size)), 3 * torch.rand(6, axes, dtype=torch.float64)
    shift = torch.tensor([0.7, -1.9, 0.3])[:axes]
    # Products of float32 rotations.
    torch.testing.assert_close(scores(rotary, positions + shift), scores(rotary, positions), rtol=0, atol=2e-6)
    assert (scores(rotary, positions * 1.1) - scores(rotary, positions)).abs().max() > 0.01


OTHERS = [(name, axes, size) for name in ("liere", *PRODUCTS) for axes in (2, 3) for size in (3, 8)]
OTHERS = [case for case in OTHERS if case[0] in on_axes(case[1]) and case[2] in block_sizes(case[0], axes=case[1])]


@pytest.mark.parametrize("encoding, axes, size", OTHERS)
def test_other_encodings(encoding, axes, size):
    """Products are relative along the first axis: R_x(−ω q₁) R_z(ω (q₀ − p₀)) R_x(ω p₁). LieRE is along none."""
    rotary, positions = perturb(layer(encoding, axes, size)), 3 * torch.rand(6, axes, dtype=torch.float64)
    expected = scores(rotary, positions)
    for axis, shift in enumerate(0.7 * torch.eye(axes)):
        deviation = (scores(rotary, positions + shift) - expected).abs().max()
        assert deviation < 2e-6 if axis == 0 and encoding in PRODUCTS else deviation > 0.1


# Parameters of ViT-B on images, as the classes say; those of LieRE are in its Table 10.
COUNTS = [
    *(
        ("liere", size, {"generators": count})
        for size, count in {2: 9_216, 4: 27_648, 8: 64_512, 16: 138_240, 32: 285_696, 64: 580_608}.items()
    ),
    ("comrope_ap", None, {"generators": 32_256}),
    ("comrope_ld", None, {"generators": 32_256, "multipliers": 2_304}),
    ("axial_rope", None, {}),
    ("golden_gate_rope", None, {}),
    ("cayley_string", None, {"generators": 9_216, "skew": 290_304}),
    ("circulant_string", None, {"generators": 8_064}),
    ("spherical_rope", None, {"generators": 6_048}),
    ("liere_product", None, {"generators": 9_216, "skew": 580_608}),
]


@pytest.mark.parametrize("encoding, size, counts", COUNTS)
def test_parameter_counts(encoding, size, counts):
    with torch.device("meta"):
        module = build_rotary_encoding(hf_liere.LieREViTConfig(position_encoding=encoding, block_size=size), 2)
    assert {name: parameter.numel() for name, parameter in module.named_parameters()} == counts


@pytest.mark.parametrize("scale", [0.1, 10.0, 1e4])
def test_bases_of_a_product_are_orthogonal_for_any_parameters(scale):
    module = perturb(layer("liere_product", 3, 24, rotary_init="zeros"), scale).encoding
    bases, _ = module.spectrum(torch.device("cpu"))
    # Solved in float64, with condition numbers of I + S up to the norm of S.
    identity = torch.eye(24).double().expand_as(bases)
    torch.testing.assert_close(bases.mT @ bases, identity, rtol=0, atol=1e-10)


def test_golden_gate_directions_are_spread_evenly():
    """Of 1,000 planes on two axes, sectors of a twentieth of all directions hold a twentieth each."""
    config = hf_liere.LieREViTConfig(position_encoding="golden_gate_rope")
    angles = torch.atan2(*golden_gate_frequencies(config, 2, 1, 10, 100).flatten(1))
    # Independent directions would have a deviation of seven.
    assert (torch.histc(angles, 20, -math.pi, math.pi) - 50).abs().max() <= 8


def test_directions_of_rope_mixed_are_orthogonal():
    """Those of the two halves of the planes (RoPE-ViT §3.2), with a turn for every layer and head."""
    frequencies = layer("rope_mixed", 2, num_layers=3).encoding.generators.detach().squeeze(-1)  # (2, 3, 2, planes)
    directions = torch.nn.functional.normalize(frequencies, dim=0)
    first, second = directions[..., :6], directions[..., 6:]
    torch.testing.assert_close(first, first[..., :1].expand_as(first))
    torch.testing.assert_close((first * second).sum(0), torch.zeros(3, 2, 6), rtol=0, atol=1e-6)
    assert directions[0, ..., 0].unique().numel() == 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("encoding", LEARNED)
def test_generators_are_float32_until_they_are_cast(tiny, encoding, dtype, caplog):
    """In models built in a half type. A later cast is carried out, and warned of."""
    model = AutoModelForImageClassification.from_config(tiny(**fields(encoding)), dtype=dtype)
    assert {parameter.dtype for _, parameter in model.rotary_parameters()} == {torch.float32}
    assert model.classifier.weight.dtype == dtype
    logger = logging.get_logger("hf_liere.encoding.rotary_encoding")
    logger.warning_once.cache_clear()
    logger.addHandler(caplog.handler)
    model.to(dtype)
    logger.removeHandler(caplog.handler)
    assert f"generators of {encoding} were rounded to {dtype}" in caplog.text


@pytest.mark.slow
def test_checkpoints_load_without_the_package(tiny, tmp_path):
    """Of every encoding of the package, as training could have led to, in a process without hf_liere."""
    pixel_values, logits = torch.randn(2, 3, 8, 24), {}
    for encoding in OWN_PLAIN:
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


def angle_of(encoding, place, head, plane):
    """Radians by which a plane turns at (row, column), in numbers of Python."""
    if encoding == "axial_rope":
        return place[plane // 4] * 100 ** -(plane % 4 / 4)
    golden = 1.324717957244746  # the root of g³ = g + 1
    shares = [(1 + 8 * head + plane) * golden ** -(axis + 1) % 1 for axis in range(2)]
    normal = [statistics.NormalDist().inv_cdf(share) for share in shares]
    return 0.1 * 10 ** (plane / 7) * sum(map(operator.mul, place, normal)) / math.hypot(*normal)


@pytest.mark.parametrize("encoding, error", [("axial_rope", 1e-15), ("golden_gate_rope", 1e-14)])
@torch.no_grad()
def test_fixed_rotations_are_exact_in_float64(encoding, error):
    """Of a layer that was made in float32, used and converted. Normal quantiles of torch and Python are rounded."""
    rotary, grid = hf_liere.LieRotaryEmbedding(2, 16, 2, encoding).eval(), hf_liere.grid_positions((2, 3), "index")
    rotary.rotations(grid, torch.float64)
    (rotation,) = rotary.double().rotations(grid, torch.float64)
    for head in range(2):
        places = [divmod(token, 3) for token in range(6)]
        angles = [[angle_of(encoding, place, head, plane) for plane in range(8)] for place in places]
        angles = torch.tensor(angles, dtype=torch.float64)  # (tokens, planes)
        found = rotation.cos_sin[0, head % rotation.cos_sin.shape[1]]  # (tokens, planes, 2)
        torch.testing.assert_close(found, torch.stack([angles.cos(), angles.sin()], -1), rtol=0, atol=error)


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
