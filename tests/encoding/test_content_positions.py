"""Positions that tokens choose, p + W x or p + Σ W x of every layer, beside loops over tokens and heads in float64."""

import contextlib
import itertools

import pytest
import reference
import torch
from encoding_cases import NEUTRAL, OWN_PLAIN, block_size, on_axes
from model_cases import clips, hidden, images, of_sizes, own, points
from patching_cases import same_bits

from hf_liere import LieRotaryEmbedding, RotaryEncoding
from hf_liere.fast.dispatch import as_on_accelerators


CHOICES = ["shared_sum", "heads", "heads_sum", "shared"]
PADDED = {"attention_mask": torch.arange(5) >= torch.tensor([[0], [2]])}
# Kind of model, encoding, inputs, other fields.
CASES = {
    "image": ("image", "rope_mixed", images, {}),
    "rotated prefix": ("image", "comrope_ld", images, {"rotate_prefix": True}),
    "axes in turn": ("image", "comrope_ap", images, {"share_heads": True, "rotate_values": True}),
    "product": ("image", "liere_product", images, {"share_layers": True}),
    "odd blocks": ("video", "cayley_string", clips, {"block_size": 24}),
    "blocks": ("video", "liere", clips, {"block_size": 8}),
    "blocks of shared heads": ("image", "liere", hidden, {"share_heads": True}),
    "sizes": ("image", "golden_gate_rope", of_sizes, {}),
    "dropped": ("image", "rope_mixed", images, {"patch_dropout_prob": 0.5}),
    "shares": ("points", "shares", points, {}),
    "padded": ("points", "rope_mixed", lambda: points() | PADDED, {}),
    "of a user": ("points", "two_parameters", points, {}),
}
CHOSEN = [*itertools.product(["image"], CHOICES), *zip(CASES, itertools.cycle(CHOICES))]


def build(case, content):
    """A model at its start."""
    kind, encoding, inputs, fields = CASES[case]
    torch.manual_seed(0)
    return own(kind, encoding, inputs, content_positions=content, **fields).make().eval()


def perturb(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return module


def to_double(inputs):
    return {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}


def turns(model, layer, places, states, is_input):
    """(B, H, N, D, D) rotations of the states that a layer reads, where `is_input` tokens of (B, N) move."""
    config, encoding = model.config, model.liere.rotary_encoding
    heads, axes = config.num_attention_heads, config.num_axes
    weight = encoding.content.weight.detach()[layer].unflatten(0, (-1, axes))  # (1 or H, A, C)
    parameters = {name: x for name, x in encoding.named_parameters() if not name.startswith("content")}
    places = places.expand(len(states), -1, -1)
    found = torch.zeros(len(states), heads, states.shape[1], config.head_dim, config.head_dim).double()
    for sample, head in itertools.product(range(len(states)), range(heads)):
        matrices, total = reference.generators(parameters, config, axes, layer, head), torch.zeros(axes).double()
        for token in range(states.shape[1]):
            moved = weight[min(head, len(weight) - 1)] @ states[sample, token] * is_input[sample, token]
            total = total + moved if "sum" in config.content_positions else moved
            place = (places[sample, token] + total).view(1, -1)
            found[sample, head, token] = reference.rotations(matrices, place, config.position_encoding)[0]
    return found


@pytest.mark.parametrize("case, choice", CHOSEN)
@torch.no_grad()
def test_rotations_are_those_of_moved_positions(case, choice, monkeypatch):
    """In float64; prefix tokens stay, hidden ones add nothing, and training drops patches."""
    model, inputs = perturb(build(case, choice)).double(), to_double(CASES[case][2]())
    made, read = [], []

    def spy(encoding, positions, moves, dtype, layer, states):
        made.append((positions.coordinates, layer, states, real(encoding, positions, moves, dtype, layer, states)))
        return made[-1][-1]

    real = RotaryEncoding.rotate_moved
    monkeypatch.setattr(RotaryEncoding, "rotate_moved", spy)
    for layer in model.liere.layers:
        layer.attention.register_forward_pre_hook(lambda module, args: read.append(args[0]))
    model.train(case == "dropped")(**inputs)
    assert len(made) == 2
    for (places, layer, states, found), given in zip(made, read, strict=True):
        assert states is given
        batch, tokens, prefix = *states.shape[:2], model.config.num_prefix_tokens
        visible = inputs.get("attention_mask", inputs.get("pixel_attention_mask", torch.ones(batch, tokens))).bool()
        is_input = torch.nn.functional.pad(visible, (tokens - visible.shape[1], 0), value=True)
        is_input[:, :prefix] = False
        expected, dense = turns(model, layer, places, states, is_input), reference.dense(found, 24, 2)
        torch.testing.assert_close(dense, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("content", ["shared", "heads_sum"])
@pytest.mark.parametrize("encoding", on_axes(2, [name for name in NEUTRAL if name in OWN_PLAIN]))
@torch.no_grad()
def test_a_saved_model_without_is_a_start(encoding, content, tmp_path):
    """To the bit; on a grid dense blocks are powers, so that positions are given as numbers."""
    row = own("image", encoding, block_size=block_size(encoding))
    plain = perturb(row.make()).eval()
    plain.save_pretrained(tmp_path)
    moved = type(plain).from_pretrained(tmp_path, content_positions=content).eval()
    inputs = row.inputs() | {"positions": torch.rand(12, 2, dtype=torch.float64)}
    assert same_bits([moved(**inputs).logits], [plain(**inputs).logits])


@pytest.mark.parametrize("case", ["blocks", "axes in turn"])
def test_gradients_are_those_of_checkpoints_and_accelerators(case):
    model, inputs, found = perturb(build(case, "heads_sum")).train().double(), to_double(CASES[case][2]()), []
    for conditions in (contextlib.nullcontext, as_on_accelerators, contextlib.nullcontext):
        model.zero_grad()
        with conditions():
            model(**inputs).logits.square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
        model.gradient_checkpointing_enable()
    torch.testing.assert_close(found[1:], found[:1] * 2)
    assert model.liere.rotary_encoding.content.weight.grad.abs().amin() > 0


@pytest.mark.parametrize("content", ["shared_sum", "heads_sum"])
@torch.no_grad()
def test_layers_continue_sums(content):
    """In pieces, as with a cache, and where queries share the positions of their key heads."""
    options = {"num_key_value_heads": 2, "num_layers": 2, "hidden_size": 40}
    rotary = perturb(LieRotaryEmbedding(4, 24, 2, "rope_mixed", content_positions=content, **options)).double()
    shapes = (4, 6, 24), (2, 6, 24), (6, 40), (6, 2)
    query, key, states, positions = (torch.randn(2, *shape).double() for shape in shapes)
    whole = rotary(query, key, positions, layer=1, states=states)
    weight = rotary.encoding.content.weight[1].unflatten(0, (-1, 2))  # (1 or 2, A, C)
    offsets = torch.einsum("kac,bnc->bkna", weight, states).cumsum(2).expand(-1, 2, -1, -1)
    plain = LieRotaryEmbedding(4, 24, 2, "rope_mixed", num_key_value_heads=2, num_layers=2).double()
    plain.load_state_dict(rotary.state_dict(), strict=False)
    for head in range(2):
        expected = plain(query, key, positions + offsets[:, head], layer=1)
        torch.testing.assert_close(whole[1][:, head], expected[1][:, head])
        torch.testing.assert_close(whole[0][:, 2 * head : 2 * head + 2], expected[0][:, 2 * head : 2 * head + 2])
    past, pieces = None, []
    for piece in (slice(0, 4), slice(4, 5), slice(5, 6)):
        moved = rotary.moved(positions[:, piece], states[:, piece], layer=1, past=past)
        past = moved.total
        pieces.append(rotary.rotate(key[:, :, piece], moved, layer=1))
    torch.testing.assert_close(torch.cat(pieces, dim=2), whole[1])
    with pytest.raises(ValueError, match="content_positions need states"):
        rotary(query, key, rotary.rotations(positions), layer=1)
    with pytest.raises(ValueError, match="content_positions='.*_sum': every input has other rotations"):
        rotary.fold(torch.nn.Linear(8, 96), torch.nn.Linear(8, 48))
