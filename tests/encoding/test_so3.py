"""Orientations as positions: LieRE that starts at representations of so(3), in the layer and in models of tokens."""

import logging
import math

import pytest
import reference
import torch
from scipy.spatial.transform import Rotation
from transformers.utils import logging as transformers_logging

import hf_liere
from hf_liere import (
    LieRETokensConfig,
    LieRETokensForSequenceClassification,
    LieRETokensForTokenClassification,
    LieRotaryEmbedding,
    RotaryPatchConfig,
    grid_positions,
    patch,
)
from hf_liere.plain.encodings import representation


# 24 channels: blocks of 7 and of 15 leave some over.
HEADS, HEAD_DIM, TOKENS = 2, 24, 6
KINDS = {
    "spin 1": {},
    "spin 2": {"block_size": 5},
    "spin 3": {"block_size": 7},
    "mixed": {"spins": [1, 2, 3]},
    "constant channels": {"spins": [0, 1, 1, 3]},
}
# Of the largest logit. In float32 rotations are rounded; in float64 the exponential's polynomial is off by 2e-13, and
# each of four squarings doubles that.
INVARIANT = {torch.float32: 1e-5, torch.float64: 1e-11}


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request):
    """The default type, in which layers and models are made."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


def build(**fields):
    return LieRotaryEmbedding(HEADS, HEAD_DIM, 3, rotary_init="so3", **fields)


def orientations(count=TOKENS):
    """The orientations and their rotation vectors in float64; the last are half a turn and no turn."""
    turned = Rotation.concatenate(
        [Rotation.random(count - 2, random_state=0), Rotation.from_rotvec([[0, math.pi, 0], [0, 0, 0]])]
    )
    return turned, as_vectors(turned)


def as_vectors(rotations):
    return torch.from_numpy(rotations.as_rotvec())


def logits(rotary, query, key, positions):
    query, key = rotary(query, key, positions)
    return query @ key.mT


@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)
def test_rotations_are_representations(dtype, fields, every_path):
    """R(p)R(q) = R(pq), so R(p)ᵀR(q) = R(p⁻¹q); a full turn is none; those of the layer are the reference's."""
    rotary, (turned, positions) = build(**fields), orientations()

    def matrices(vectors):
        """(N, D, D) from the images of unit vectors, (D, heads, N, D)."""
        units = torch.eye(HEAD_DIM)[:, None, None].expand(-1, HEADS, len(vectors), -1)
        return rotary.rotate(units, vectors)[:, 0].permute(1, 2, 0).double()

    # Rotations in float32 are rounded, and their products as well.
    close = {"atol": {torch.float32: 2e-6, torch.float64: 5e-12}[dtype], "rtol": 0}
    found = matrices(positions)
    generators = representation(rotary.config.spins)
    blocks = [torch.block_diag(*[generator] * (HEAD_DIM // len(generator))) for generator in generators]
    over = HEAD_DIM - len(blocks[0])
    # Channels that are left over do not rotate.
    blocks = torch.nn.functional.pad(torch.stack(blocks), (0, over, 0, over))
    torch.testing.assert_close(found, reference.rotations(blocks, positions), **close)
    first, second = turned[:-1], turned[1:]
    relative = matrices(as_vectors(first.inv() * second))
    torch.testing.assert_close(found[:-1].mT @ found[1:], relative, **close)
    torch.testing.assert_close(found[:-1] @ found[1:], matrices(as_vectors(first * second)), **close)
    lengths = positions[:-1].norm(dim=-1, keepdim=True)
    for turns in (-1, 2):
        torch.testing.assert_close(matrices(positions[:-1] * (1 + turns * 2 * math.pi / lengths)), found[:-1], **close)
    quaternions = hf_liere.rotation_vector_to_quaternion(positions, "wxyz")
    for sign in (1, -1):
        vectors = hf_liere.quaternion_to_rotation_vector(sign * quaternions, "wxyz")
        torch.testing.assert_close(matrices(vectors), found, **close)


def test_generators_are_exact_to_the_type_of_the_layer(dtype):
    for fields in KINDS.values():
        rotary = build(num_layers=2, **fields)
        generators = representation(rotary.config.spins)
        size = generators.shape[-1]
        row, column = torch.triu_indices(size, size, offset=1)
        expected = generators[:, column, row].to(dtype).view(3, 1, 1, 1, -1)
        assert torch.equal(rotary.encoding.generators, expected.expand_as(rotary.encoding.generators))
        assert rotary.encoding.generators.dtype == dtype
        # `double()` has only the rounded values of a layer that was made in float32.
        assert torch.equal(rotary.double().encoding.generators[0, 0, 0, 0], expected[0].flatten().double())


def test_positions_have_gradients():
    """Of the relative rotation of spin 1, against finite differences."""
    rotary = build().double()
    query, key = torch.randn(2, 1, HEADS, 2, HEAD_DIM, dtype=torch.float64)
    positions = torch.tensor([[0.3, -0.2, 0.9], [0.0, math.pi, 0.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda moved: logits(rotary, query, key, moved), positions)


def tokens_model(kind, **fields):
    # Weights that are large enough for attention to tell tokens apart.
    sizes = {"hidden_size": HEADS * HEAD_DIM, "num_attention_heads": HEADS, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 64, "feature_size": 5, "num_labels": 3, "initializer_range": 0.3, "num_axes": 3}
    # A class token would be in the frame of the world.
    sizes |= {"use_class_token": False, "pooling": "mean", "rotary_init": "so3"}
    return kind(LieRETokensConfig(**sizes | fields)).eval()


@pytest.mark.parametrize("fields", [*KINDS.values(), {"rotate_values": True}], ids=[*KINDS, "values"])
@pytest.mark.parametrize("kind", [LieRETokensForSequenceClassification, LieRETokensForTokenClassification])
def test_outputs_of_models_do_not_change_with_the_frame(dtype, kind, fields):
    model, (turned, positions) = tokens_model(kind, **fields), orientations()
    features = torch.randn(1, TOKENS, 5)
    with torch.no_grad():
        before = model(features, positions).logits
        for seed in range(3):
            moved = as_vectors(Rotation.random(random_state=seed) * turned)
            difference = (model(features, moved).logits - before).abs().max()
            assert difference <= INVARIANT[dtype] * before.abs().max()
        assert (model(features, positions.roll(1, 0)).logits - before).abs().max() > 1e-3 * before.abs().max()


@pytest.mark.parametrize("has_orientation", [True, False])
def test_a_class_token_without_an_orientation_is_in_the_frame_of_the_world(has_orientation):
    fields = {"use_class_token": True, "pooling": "cls", "rotate_prefix": has_orientation}
    model = tokens_model(LieRETokensForSequenceClassification, **fields)
    features, (turned, positions) = torch.randn(1, TOKENS, 5), orientations()
    moved = as_vectors(Rotation.random(random_state=1) * turned)
    if has_orientation:
        # That of the first body.
        positions, moved = (torch.cat([given[:1], given]) for given in (positions, moved))
    with torch.no_grad():
        before, after = (model(features, given).logits for given in (positions, moved))
    assert ((after - before).abs().max() <= INVARIANT[torch.float32] * before.abs().max()) == has_orientation


def test_models_are_saved_with_their_representation(tmp_path):
    model = tokens_model(LieRETokensForTokenClassification, spins=[1, 2, 3])
    model.save_pretrained(tmp_path)
    loaded = LieRETokensForTokenClassification.from_pretrained(tmp_path)
    for name in ("spins", "rotary_init", "block_size"):
        assert getattr(loaded.config, name) == getattr(model.config, name)
    features, (_, positions) = torch.randn(1, TOKENS, 5), orientations()
    assert torch.equal(loaded(features, positions).logits, model(features, positions).logits)


def test_places_on_a_grid_are_not_orientations():
    with pytest.raises(ValueError, match="positions are orientations, not for patches or words"):
        patch(torch.nn.Linear(2, 2), RotaryPatchConfig(position_encoding="liere", rotary_init="so3", spins=[1]))
    query, key = torch.randn(2, 1, HEADS, 8, HEAD_DIM)
    with pytest.raises(ValueError, match="those of a grid of patches; .* rotation vectors of shape"):
        build()(query, key, grid_positions((2, 2, 2)))


@pytest.mark.parametrize("angle, warned", [(180.0, True), (6.2, False)])
def test_degrees_are_noticed(angle, warned, caplog, monkeypatch):
    """In the layer and in models of tokens; a vector up to a full turn is no reason to warn."""
    logger = logging.getLogger("hf_liere.encoding.placement")
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(logger, "propagate", True)
    transformers_logging.warning_once.cache_clear()
    vectors = torch.tensor([[0.0, angle, 0.0], [1.0, 0.0, 0.0]])
    rotary, states = hf_liere.LieRotaryEmbedding(2, 12, 3, rotary_init="so3"), torch.zeros(1, 2, 2, 12)
    for _ in range(2):
        rotary(states, states, vectors)
    assert caplog.text.count("longer than 2π") == warned
