"""Learned blocks that start at the pretrained rotation of models with RoPE, and their independent reference."""

import itertools
import math
from types import SimpleNamespace

import pytest
import reference
import torch
from patching_cases import randomize
from patching_checks import check_cached_steps, close_to_start, refused
from relative_positions import check_relative
from rope_cases import CASES, GRIDS, PLANES, blocks, build, build_patched, outputs, tokens
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_liere import RotaryPatchConfig, patch, rotary_parameters
from hf_liere.encoding.kinds import ENCODINGS


# Qwen3.5 rotates on three axes, which are equal for text.
ONE_AXIS = [name for name, case in CASES.items() if case.inputs is tokens and name != "qwen3_5"]
DENSE = [name for name, traits in ENCODINGS.items() if traits.pretrained == "blocks"]
# Why a family cannot have blocks; by encoding where the others can.
REFUSED = {
    ("qwen3_vl", "comrope_ap"): "must divide head_dim=128 for comrope_ap",
    **{(name, "liere_product"): "rotates with one axis, and a product of one factor" for name in ONE_AXIS},
}
ALL = list(itertools.product(CASES, DENSE))
FITTING = [(name, encoding) for name, encoding in ALL if not {name, (name, encoding)} & set(REFUSED)]


def one_each(pairs):
    """One encoding for each family, every family the next one; the other pairs are slow."""
    fast = {}
    for number, name in enumerate(CASES):
        encodings = [encoding for family, encoding in pairs if family == name]
        fast |= {name: encodings[number % len(encodings)]} if encodings else {}
    return [pair if fast[pair[0]] == pair[1] else pytest.param(*pair, marks=pytest.mark.slow) for pair in pairs]


@pytest.mark.parametrize("name, encoding", one_each(FITTING))
def test_blocks_start_at_the_pretrained_rotation_and_learn(name, encoding):
    model, inputs = build(name)
    expected = outputs(model, inputs)
    found = outputs(patch(model, blocks(encoding)), inputs)
    close_to_start(found, expected)
    sum(tensor.square().sum() for tensor in found if tensor.requires_grad).backward()
    others = {"comrope_ld": {"multipliers"}, "cayley_string": {"skew"}, "liere_product": {"skew"}}
    kinds = {"generators"} | others.get(encoding, set())
    assert {key.rpartition(".")[2] for key, _ in rotary_parameters(model)} == kinds
    for name, value in rotary_parameters(model):
        # The entry of S between the channels of a plane rotates the plane in itself, which changes nothing.
        reached = value.grad.abs().amax(-1) if name.endswith("skew") else value.grad.abs()
        if name.endswith("skew") and encoding == "liere_product":
            # Nor does the basis of an axis that rotates no plane of the block.
            reached = reached.amax(0)
        assert reached.min() > 0, name


@pytest.mark.parametrize(
    "name, encoding",
    # On one axis all generators commute with themselves.
    one_each([pair for pair in FITTING if ENCODINGS[pair[1]].commutes or pair[0] in ONE_AXIS]),
)
def test_outputs_depend_on_differences_of_positions(name, encoding):
    check_relative(name, blocks(encoding))


@pytest.mark.parametrize("name, encoding", [pair for pair in ALL if pair not in FITTING])
def test_families_that_blocks_do_not_fit(name, encoding):
    with refused(model := build(name)[0], REFUSED.get((name, encoding)) or REFUSED[name]):
        patch(model, blocks(encoding))


@pytest.mark.parametrize("name, encoding", one_each([pair for pair in FITTING if CASES[pair[0]].generates]))
def test_cached_steps_are_the_computation_without_a_cache(name, encoding):
    model, inputs = build_patched(name, blocks(encoding), std=0.1)
    check_cached_steps(model, inputs)


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_as_many_tokens_as_heads(name, length):
    """With four query and two key heads, whose norms see (tokens, heads) or (heads, tokens)."""
    model, inputs = build(name)
    inputs = {"input_ids": inputs["input_ids"][:, :length]}
    expected = outputs(model, inputs)
    close_to_start(outputs(patch(model, blocks("liere")), inputs), expected)


@pytest.mark.parametrize("heads", [2, 4, 7])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_norms_of_contiguous_states_with_as_many_tokens_as_heads(name, heads):
    """Neither shape nor strides tell (tokens, heads) from (heads, tokens); the probe has 7 tokens."""
    model, inputs = build(name)
    config = model.config
    config.num_attention_heads = config.num_key_value_heads = heads
    torch.manual_seed(0)
    model = type(model)(config).eval()
    for module in model.modules():
        for norm in ("q_norm", "k_norm"):
            if hasattr(module, norm):
                getattr(module, norm).register_forward_pre_hook(lambda module, args: (args[0].contiguous(),))
    inputs = {"input_ids": torch.randint(2, 20, (2, heads))}
    expected = outputs(model, inputs)
    close_to_start(outputs(patch(model, blocks("liere")), inputs), expected)
    # As a part of longer sequences, whose layout their shape tells.
    randomize(model)
    longer = {"input_ids": torch.cat([inputs["input_ids"], torch.randint(2, 20, (2, 3))], dim=1)}
    whole = model(**longer, use_cache=False).logits[:, :heads]
    # Sums of float32 in another order.
    torch.testing.assert_close(model(**inputs, use_cache=False).logits, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name, axes, planes", [("llama", 1, 8), ("dinov3", 2, 8)])
def test_planes_of_every_key_head(name, axes, planes):
    model, inputs = build(name)
    expected = outputs(model, inputs)
    patch(model, RotaryPatchConfig(position_encoding="liere", block_size=2, rotary_init="pretrained"))
    ((_, value),) = rotary_parameters(model)
    assert value.shape == (axes, 2, 2, planes, 1)
    close_to_start(outputs(model, inputs), expected)


def test_heads_and_layers_may_share_generators():
    model, inputs = build("llama")
    expected = outputs(model, inputs)
    patch(model, blocks("liere", share_heads=True, share_layers=True))
    ((_, value),) = rotary_parameters(model)
    assert value.shape == (1, 1, 1, 4, 6)
    close_to_start(outputs(model, inputs), expected)


@pytest.mark.parametrize("first", ["patch", "lora"])
@pytest.mark.parametrize("name, targets", [("llama", ["q_proj", "k_proj"]), ("qwen2_5_vl_tower", ["qkv"])])
def test_what_lora_adds_to_projections_is_rotated_too(name, targets, first):
    """As if its matrices were added to the weights, whichever was there first."""
    peft = pytest.importorskip("peft")
    copies = ["rotary_encoding"] if first == "patch" else None
    lora = peft.LoraConfig(target_modules=targets, r=2, init_lora_weights=False, modules_to_save=copies)
    model, inputs = build(name)
    if first == "patch":
        tuned = peft.get_peft_model(patch(model, blocks("liere")), lora)
    else:
        tuned = patch(peft.get_peft_model(model, lora), blocks("liere"))
    randomize(tuned.eval(), std=0.1)
    found = outputs(tuned, inputs)
    for value, expected in zip(outputs(tuned.merge_and_unload(), inputs), found, strict=True):
        # A sum of two products and one product.
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-4 * max(1.0, float(expected.detach().abs().max())))


seen = {}


def recording(module, query, key, value, attention_mask, **kwargs):
    # Towers with windows call it for every window.
    seen.setdefault(module, []).append((query, key))
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register("recording", recording)


def rope_of(name, model):
    """Frequencies (A, planes), by the definition of each family, and the attention modules."""
    if name == "glm":
        plane = torch.arange(4, dtype=torch.float64)
        return (10000 ** (-plane / 4)).unsqueeze(0), [layer.self_attn for layer in model.model.layers]
    if name == "llama":
        plane = torch.arange(8, dtype=torch.float64)
        return (10000 ** (-plane / 8)).unsqueeze(0), [layer.self_attn for layer in model.model.layers]
    plane = torch.arange(4, dtype=torch.float64)
    if name == "dinov3":
        return torch.block_diag(*[100 ** (-plane / 4)] * 2), [layer.attention for layer in model.model.layer]
    return torch.block_diag(*[10000 ** (-plane / 4)] * 2), [block.attn for block in model.blocks]


def positions_of(name, order):
    """(N, A) positions of all tokens, prefix tokens at zero, in the `order` that attention sees."""
    if name in ("llama", "glm"):
        return torch.arange(11, dtype=torch.float64).unsqueeze(-1)
    if name == "dinov3":
        # 4 × 6 patches, centres from −1 to 1, angles of 2π, after a class and two register tokens.
        patches = [
            [2 * math.pi * (2 * (row + 0.5) / 4 - 1), 2 * math.pi * (2 * (column + 0.5) / 6 - 1)]
            for row in range(4)
            for column in range(6)
        ]
        return torch.tensor([[0.0, 0.0]] * 3 + patches, dtype=torch.float64)
    # Groups of 2 × 2 patches follow one another.
    patches = [
        [2 * row + i, 2 * column + j]
        for _, rows, columns in GRIDS.tolist()
        for row in range(rows // 2)
        for column in range(columns // 2)
        for i in range(2)
        for j in range(2)
    ]
    return torch.tensor(patches, dtype=torch.float64)[order]


def record_projections(attentions):
    """Outputs of the projections, by attention module and name, filled by every pass."""
    projected = {}
    for attention, part in itertools.product(attentions, ("q_proj", "k_proj", "qkv")):
        if hasattr(attention, part):
            getattr(attention, part).register_forward_hook(
                lambda module, args, output, key=(attention, part): projected.update({key: output.detach().double()})
            )
    return projected


def projected_states(projected, attention):
    """Query and key (B, H, N, 16) before rotations."""
    if (attention, "qkv") in projected:
        return projected[attention, "qkv"].unflatten(-1, (3, 2, 16)).permute(1, 2, 0, 3).unsqueeze(1)[:2]
    return (projected[attention, part].unflatten(-1, (-1, 16)).transpose(1, 2) for part in ("q_proj", "k_proj"))


def order_of_windows(model, inputs):
    """(N,) the places of the tokens that attention sees, in the order of their embedding."""
    embedded, states = [], []
    with (
        model.patch_embed.register_forward_hook(lambda module, args, output: embedded.append(output)),
        model.blocks[0].register_forward_pre_hook(lambda module, args: states.append(args[0])),
    ):
        outputs(model, inputs)
    order = (states[0].unsqueeze(1) == embedded[0]).all(-1).int().argmax(-1)
    assert sorted(order.tolist()) == list(range(28)) and order.tolist() != list(range(28))
    return order


def reference_rotations(name, encoding, model, positions, frequencies, heads):
    """(layer, head) → (N, 16, 16) rotations of keys, on the channels that the model pairs."""
    learned = {key.rpartition(".")[2]: value for key, value in rotary_parameters(model)}
    if encoding == "rope_mixed":
        factors = learned["log_factors"].detach().double().exp()
        # (A, layers, 1, planes, 1)
        learned = {"generators": (frequencies.unsqueeze(1) * factors).unsqueeze(2).unsqueeze(-1)}
    planes = list(range(frequencies.shape[-1]))
    config = SimpleNamespace(
        position_encoding=encoding,
        block_size=2 if encoding == "rope_mixed" else 4,
        head_dim=2 * len(planes),
        num_attention_heads=heads,
        share_heads=encoding == "rope_mixed",
        rotary_init_scale=1.0,
        rope_theta=10000.0,
        spins=None,
    )
    if encoding == "comrope_ap" and len(frequencies) == 2:
        # Two planes of the rows, two of the columns, and so on.
        planes = [0, 1, 4, 5, 2, 3, 6, 7]
    # GLM rotates neighbours among the first half of the channels, the others channels of both halves.
    pairs = [(2 * plane, 2 * plane + 1) if name == "glm" else (plane, plane + 8) for plane in planes]
    channels = torch.tensor(pairs).flatten()

    def compute(layer, head):
        found = reference.generators(learned, config, positions.shape[-1], layer, head)
        matrices = found.new_zeros(len(found), 16, 16)
        matrices[:, channels.unsqueeze(-1), channels] = found
        return reference.rotations(matrices, positions, encoding)

    return compute


COMPARED = itertools.product(("llama", "glm", "dinov3", "qwen2_5_vl_tower"), ("rope_mixed", *DENSE))


@pytest.mark.parametrize("name, encoding", [pair for pair in COMPARED if pair not in REFUSED])
@torch.no_grad()
def test_queries_and_keys_are_rotated_as_the_reference_does(name, encoding):
    model, inputs = build(name)
    model.set_attn_implementation("recording")
    positions = positions_of(name, order_of_windows(model, inputs) if name == "qwen2_5_vl_tower" else None)
    frequencies, attentions = rope_of(name, model)
    # Before the hooks of the patch, which see the same outputs later.
    projected = record_projections(attentions)
    patch(model, PLANES if encoding == "rope_mixed" else blocks(encoding))
    for _, parameter in rotary_parameters(model):
        parameter.add_(0.1 * torch.randn_like(parameter))
    seen.clear()
    outputs(model, inputs)
    for layer, attention in enumerate(attentions):
        query, key = (torch.cat(windows, 2).double() for windows in zip(*seen[attention]))
        raw_query, raw_key = projected_states(projected, attention)
        heads = raw_key.shape[1]
        compute = reference_rotations(name, encoding, model, positions, frequencies, heads)
        for states, raw in ((query, raw_query), (key, raw_key)):
            for head in range(raw.shape[1]):
                expected = reference.rotate(raw[:, head], compute(layer, head // (raw.shape[1] // heads)))
                # Angles of up to ten full rotations and products are float32.
                torch.testing.assert_close(states[:, head], expected, rtol=0, atol=5e-5)
