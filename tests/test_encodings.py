import math

import pytest
import reference
import torch
from transformers import AutoModelForImageClassification
from transformers.utils import logging

import hf_liere
from hf_liere.models.encodings import ENCODING_CLASSES
from hf_liere.models.folding import build_rotary_encoding
from hf_liere.models.positions import of_coordinates, of_grid


PLANAR = ("axial_rope", "rope_mixed")
GRIDS = {1: (5,), 2: (2, 3), 3: (2, 1, 3)}
CASES = [
    (encoding, axes, size)
    for encoding in ENCODING_CLASSES
    for axes in GRIDS
    for size in ([2] if encoding in PLANAR else [2, 3, 4, 8, 24])
    if encoding != "comrope_ap" or 24 % (size * axes) == 0
]


def build(tiny, encoding, axes, **overrides):
    """A rotary encoding on `axes` axes; the image configuration only knows two, the module any number."""
    config = tiny(position_encoding=encoding, **overrides)
    module = build_rotary_encoding(config, axes)
    module.reset_parameters()
    return config, module


def rotations_of(module, positions, config):
    return [reference.dense(rotation, config.head_dim, 2) for rotation in module(of_coordinates(positions))]


@pytest.mark.parametrize("encoding, axes, block_size", CASES)
def test_rotations_match_the_reference_and_are_orthogonal(tiny, encoding, axes, block_size):
    if encoding == "comrope_ap" and 24 % (block_size * 2):
        config = tiny(position_encoding="comrope_ld", block_size=block_size)
        config.position_encoding = "comrope_ap"
        module = build_rotary_encoding(config, axes)
        module.reset_parameters()
    else:
        config, module = build(tiny, encoding, axes, block_size=block_size)
    positions = of_grid(GRIDS[axes], GRIDS[axes], config.coordinates).coordinates
    parameters = dict(module.named_parameters())
    for layer, rotation in enumerate(rotations_of(module, positions, config)):
        for head in range(2):
            for token, position in enumerate(positions):
                expected = reference.head_rotation(position, parameters, config, axes, layer, head)
                # Computed in float64 and rounded to float32: once, or eigenbasis, cos and sin by themselves.
                tolerance = 1e-6 if encoding.startswith("comrope") else 3e-7
                torch.testing.assert_close(rotation[0, head, token], expected, rtol=0, atol=tolerance)
        gram = rotation @ rotation.transpose(-1, -2)
        torch.testing.assert_close(gram, torch.eye(24).double().expand_as(gram), rtol=0, atol=1e-6)


@pytest.mark.parametrize("axes", GRIDS)
def test_the_scale_of_axial_rope_multiplies_its_frequencies(tiny, axes):
    positions = of_grid(GRIDS[axes], GRIDS[axes], "index").coordinates
    config, scaled = build(tiny, "axial_rope", axes, rotary_init_scale=0.3)
    plain = build(tiny, "axial_rope", axes)[1]
    nearer = rotations_of(plain, 0.3 * positions, config)
    for rotation, expected in zip(rotations_of(scaled, positions, config), nearer, strict=True):
        # Angles are computed in float64 and their cos and sin rounded to float32.
        torch.testing.assert_close(rotation, expected, rtol=0, atol=3e-7)
    reference_of_last = reference.head_rotation(positions[-1], {}, config, axes, 0, 0)
    torch.testing.assert_close(rotation[0, 0, -1], reference_of_last, rtol=0, atol=3e-7)


@pytest.mark.parametrize("share_heads", [False, True])
@pytest.mark.parametrize("share_layers", [False, True])
@pytest.mark.parametrize("encoding", ["rope_mixed", "liere", "comrope_ap", "comrope_ld"])
def test_sharing(tiny, encoding, share_heads, share_layers):
    config, module = build(tiny, encoding, 2, block_size=2, share_heads=share_heads, share_layers=share_layers)
    positions = torch.rand(4, 2)
    parameters = dict(module.named_parameters())
    rotations = rotations_of(module, positions, config)
    for layer, head in ((0, 0), (0, 1), (1, 0), (1, 1)):
        expected = reference.head_rotation(positions[3], parameters, config, 2, layer, head)
        torch.testing.assert_close(rotations[layer][0, head, 3], expected, rtol=0, atol=1e-6)
    assert torch.equal(rotations[0][:, 0], rotations[0][:, 1]) == share_heads
    assert torch.equal(rotations[0], rotations[1]) == share_layers
    full = sum(parameter.numel() for parameter in build(tiny, encoding, 2, block_size=2)[1].parameters())
    count = sum(parameter.numel() for parameter in parameters.values())
    assert count == full // (1 + share_heads) // (1 + share_layers)


@pytest.mark.parametrize("encoding", ENCODING_CLASSES)
def test_positions_of_each_sample(tiny, encoding):
    _, module = build(tiny, encoding, 2, block_size=2 if encoding in PLANAR else 4)
    positions = torch.rand(3, 5, 2)
    for layer, rotation in enumerate(rotation.matrices() for rotation in module(of_coordinates(positions))):
        assert rotation.shape[0] == 3
        for sample in range(3):
            torch.testing.assert_close(
                rotation[sample], module(of_coordinates(positions[sample]))[layer].matrices()[0], rtol=0, atol=1e-7
            )


@pytest.mark.parametrize("encoding", ["axial_rope", "rope_mixed", "comrope_ap", "comrope_ld"])
def test_commuting_encodings_are_relative(tiny, encoding):
    """Rᵀ(p) R(q) depends on q − p alone (ComRoPE's RoPE equation, eq. 2)."""
    config, module = build(tiny, encoding, 2, block_size=2 if encoding in PLANAR else 4)
    positions, shift = torch.rand(6, 2).double(), torch.tensor([0.7, -1.9])
    for before, after in zip(rotations_of(module, positions, config), rotations_of(module, positions + shift, config)):
        pairs = [r.transpose(-1, -2).unsqueeze(-3) @ r.unsqueeze(-4) for r in (before, after)]
        # Products of float32 rotations.
        torch.testing.assert_close(*pairs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("block_size, relative", [(2, True), (3, False), (8, False)])
def test_liere_is_relative_for_planes_only(tiny, block_size, relative):
    config, module = build(tiny, "liere", 2, block_size=block_size)
    positions, shift = torch.rand(6, 2).double(), torch.tensor([0.7, -1.9])
    pairs = [
        rotation.transpose(-1, -2).unsqueeze(-3) @ rotation.unsqueeze(-4)
        for rotation in (rotations_of(module, p, config)[0] for p in (positions, positions + shift))
    ]
    deviation = (pairs[0] - pairs[1]).abs().max()
    assert deviation < 2e-6 if relative else deviation > 0.1


@pytest.mark.parametrize("encoding", ["liere", "comrope_ld"])
def test_one_axis_is_always_relative(tiny, encoding):
    """In one dimension there is one generator, which commutes with itself (LieRE App. A)."""
    config, module = build(tiny, encoding, 1, block_size=8)
    positions = torch.rand(6, 1).double()
    pairs = [
        rotation.transpose(-1, -2).unsqueeze(-3) @ rotation.unsqueeze(-4)
        for rotation in (rotations_of(module, p, config)[0] for p in (positions, positions + 0.7))
    ]
    torch.testing.assert_close(*pairs, rtol=0, atol=2e-6)


def test_parameter_counts_of_liere_table_10():
    counts = {2: 9_216, 4: 27_648, 8: 64_512, 16: 138_240, 32: 285_696, 64: 580_608}
    for block_size, count in counts.items():
        with torch.device("meta"):
            module = build_rotary_encoding(hf_liere.LieREViTConfig(block_size=block_size), 2)
        assert sum(parameter.numel() for parameter in module.parameters()) == count


def test_parameter_counts_of_comrope():
    with torch.device("meta"):
        partition = build_rotary_encoding(hf_liere.LieREViTConfig(position_encoding="comrope_ap"), 2)
        dependent = build_rotary_encoding(hf_liere.LieREViTConfig(position_encoding="comrope_ld"), 2)
    assert {name: p.numel() for name, p in partition.named_parameters()} == {"generators": 32_256}
    assert {name: p.numel() for name, p in dependent.named_parameters()} == {"generators": 32_256, "multipliers": 2_304}


def test_rope_mixed_starts_with_the_spectrum_of_rope_vit(tiny):
    """Per head: orthogonal directions for the two halves of the planes, magnitudes 10^(−4i/head_dim) in each."""
    config, module = build(tiny, "rope_mixed", 2)
    frequencies = module.generators.detach().squeeze(-1)
    magnitudes = frequencies.square().sum(0).sqrt()
    expected = 10.0 ** -(torch.arange(6) * 4 / config.head_dim)
    torch.testing.assert_close(magnitudes, expected.repeat(2).expand(2, 2, 12))
    directions = frequencies / magnitudes
    torch.testing.assert_close(directions[..., 0:1].expand(2, 2, 2, 6), directions[..., :6])
    inner = (directions[..., 0] * directions[..., 6]).sum(0)
    torch.testing.assert_close(inner, torch.zeros(2, 2), rtol=0, atol=1e-6)
    assert directions[0, ..., 0].flatten().unique().numel() == 4


def test_liere_with_frequencies_rotates_like_rope_mixed(tiny):
    config, module = build(tiny, "liere", 2, block_size=8, rotary_init="frequencies", rotary_init_scale=0.5)
    planes_config, planes = build(tiny, "rope_mixed", 2)
    row, column = torch.triu_indices(8, 8, offset=1)
    in_plane = (row % 2 == 0) & (column == row + 1)
    planes.generators.data = module.generators.detach()[..., in_plane].reshape(planes.generators.shape)
    assert (module.generators[..., ~in_plane] == 0).all() and planes.generators.abs().max() <= 0.5
    positions = torch.rand(4, 2) * 10
    for ours, mixed in zip(rotations_of(module, positions, config), rotations_of(planes, positions, planes_config)):
        torch.testing.assert_close(ours, mixed, rtol=0, atol=1e-6)


def test_initialisations(tiny):
    wide = {"hidden_size": 512, "num_attention_heads": 4}
    uniform = build(tiny, "liere", 2, **wide)[1].generators
    assert uniform.min() >= 0 and uniform.max() < 2 * math.pi and abs(uniform.mean() - math.pi) < 0.1
    scaled = build(tiny, "liere", 2, rotary_init_scale=1.0, **wide)[1].generators
    assert scaled.max() < 1 and abs(scaled.mean() - 0.5) < 0.02
    dependent = build(tiny, "comrope_ld", 2, **wide)[1]
    # The entries of P − Pᵀ for a standard normal P.
    assert abs(dependent.generators.std() - math.sqrt(2)) < 0.07 and abs(dependent.multipliers.std() - 1) < 0.1
    zeros = build(tiny, "comrope_ld", 2, rotary_init="zeros", **wide)[1]
    assert (zeros.generators == 0).all() and zeros.multipliers.abs().min() > 0


@pytest.mark.parametrize("encoding", ["liere", "comrope_ap", "comrope_ld"])
def test_zero_generators_are_the_identity_and_get_a_gradient(tiny, encoding):
    config, module = build(tiny, encoding, 2, block_size=4, rotary_init="zeros")
    rotations = module(of_coordinates(torch.rand(5, 2) * 100))
    assert torch.equal(rotations[0].matrices().float(), torch.eye(4).expand_as(rotations[0].matrices()))
    query, key = torch.randn(2, 1, 2, 5, 24)
    rotated = [state for rotation in rotations for state in rotation.rotate(query, key)]
    sum((state * torch.randn_like(state)).sum() for state in rotated).backward()
    assert (module.generators.grad != 0).all()


@pytest.mark.parametrize("encoding", ["rope_mixed", "liere", "comrope_ap", "comrope_ld"])
def test_a_module_by_itself_is_initialised(tiny, encoding):
    """As `rotary_init` says, without a model around it; unset memory would not survive a large fill of the heap."""
    poison = [torch.full((4096,), torch.nan) for _ in range(64)]
    del poison
    size = 2 if encoding == "rope_mixed" else 4
    for axes in (1, 2, 3):
        module = build_rotary_encoding(tiny(position_encoding=encoding, block_size=size), axes)
        for parameter in module.parameters():
            assert torch.isfinite(parameter).all() and 0.1 < parameter.std() < 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("encoding", ["rope_mixed", "liere", "comrope_ld"])
def test_generators_stay_in_float32(tiny, tmp_path, encoding, dtype, caplog):
    """In models built or loaded in a half type; a later cast is carried out, and warned of."""
    config = tiny(position_encoding=encoding, block_size=2 if encoding == "rope_mixed" else 8)
    model = AutoModelForImageClassification.from_config(config, dtype=dtype)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path, dtype=dtype)
    for each in (model, loaded):
        assert {parameter.dtype for _, parameter in each.rotary_parameters()} == {torch.float32}
        assert each.classifier.weight.dtype == dtype and each(torch.randn(1, 3, 16, 16)).logits.dtype == dtype
    logger = logging.get_logger("hf_liere.models.encodings")
    logger.warning_once.cache_clear()
    logger.addHandler(caplog.handler)
    loaded.to(dtype)
    logger.removeHandler(caplog.handler)
    assert f"generators of {encoding} were rounded to {dtype}" in caplog.text
