"""Learned blocks that start at the pretrained rotation of models with RoPE, and their independent reference."""

import itertools
import math
from types import SimpleNamespace

import pytest
import reference
import torch
from patching_cases import randomize, same_bits
from patching_checks import check_cached_steps, check_unpatched, close_to_start
from rope_cases import CASES, GRIDS, blocks, build, build_patched, check_relative, outputs, tokens
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


@pytest.mark.parametrize("name, encoding", FITTING)
def test_blocks_start_at_the_pretrained_rotation_and_learn(name, encoding):
    model, inputs = build(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    expected = outputs(model, inputs)
    patch(model, blocks(encoding))
    found = outputs(model, inputs)
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
    randomize(model)
    assert not same_bits(outputs(model, inputs), expected)
    check_unpatched(model, inputs, before, expected)


@pytest.mark.parametrize(
    "name, encoding",
    # On one axis all generators commute with themselves.
    one_each([pair for pair in FITTING if ENCODINGS[pair[1]].commutes or pair[0] in ONE_AXIS]),
)
def test_outputs_depend_on_differences_of_positions(name, encoding):
    check_relative(name, blocks(encoding))


@pytest.mark.parametrize("name, encoding", [pair for pair in ALL if pair not in FITTING])
def test_families_that_blocks_do_not_fit(name, encoding):
    model, inputs = build(name)
    expected = outputs(model, inputs)
    with pytest.raises(ValueError, match=REFUSED.get((name, encoding)) or REFUSED[name]):
        patch(model, blocks(encoding))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert same_bits(outputs(model, inputs), expected)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"block_size": 3, "position_encoding": "liere"}, "block_size=3"),
        ({"block_size": 32, "position_encoding": "liere"}, "block_size=32 does not fit a head_dim of 16"),
        (
            {"block_size": 16, "position_encoding": "comrope_ld"},
            "block_size=16: DINOv3ViTModel rotates .4, 4. planes by its axes",
        ),
        ({"block_size": 4, "position_encoding": "rope_mixed"}, "rope_mixed rotates planes, its only block_size is 2"),
    ],
)
def test_blocks_that_the_pairing_does_not_allow(fields, message):
    model, _ = build("dinov3")
    with pytest.raises(ValueError, match=message):
        patch(model, RotaryPatchConfig(rotary_init="pretrained", **fields))


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
    gemma, _ = build("gemma3")
    with pytest.raises(ValueError, match="share_layers=True: the layers of model .* different frequencies"):
        patch(gemma, blocks("liere", share_layers=True))


@pytest.mark.parametrize("first", ["patch", "lora"])
@pytest.mark.parametrize("name, targets", [("llama", ["q_proj", "k_proj"]), ("qwen2_5_vl_tower", ["qkv"])])
def test_what_lora_adds_to_projections_is_rotated_too(name, targets, first):
    """As if its matrices were added to the weights, whichever was there first."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=targets, r=2, init_lora_weights=False, modules_to_save=["rotary_encoding"])
    model, inputs = build(name)
    if first == "patch":
        tuned = peft.get_peft_model(patch(model, blocks("liere")), lora)
    else:
        tuned = patch(
            peft.get_peft_model(model, peft.LoraConfig(**{**lora.to_dict(), "modules_to_save": None})), blocks("liere")
        )
    tuned.eval()
    torch.manual_seed(5)
    for _, parameter in rotary_parameters(tuned):
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    found = outputs(tuned, inputs)
    rotations = [value.detach().clone() for _, value in rotary_parameters(tuned)]
    for _, module in tuned.named_modules():
        if hasattr(module, "merge") and hasattr(module, "base_layer"):
            module.merge()
    merged, _ = build(name)
    weights = {key.replace(".base_layer", ""): value for key, value in tuned.get_base_model().state_dict().items()}
    merged.load_state_dict({key: weights[key] for key in merged.state_dict()})
    patch(merged, blocks("liere"))
    for (_, parameter), value in zip(rotary_parameters(merged), rotations, strict=True):
        parameter.data.copy_(value)
    for value, expected in zip(outputs(merged, inputs), found, strict=True):
        # A sum of two products and one product.
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-4 * max(1.0, float(expected.detach().abs().max())))


def test_chosen_layers_get_blocks_and_the_others_stay():
    model, inputs = build("llama", "eager")
    expected = model(**inputs, output_attentions=True).attentions
    patch(model, blocks("comrope_ld", layers=[1]))
    randomize(model, std=0.1)
    found = model(**inputs, output_attentions=True).attentions
    assert torch.equal(found[0], expected[0]) and not torch.equal(found[1], expected[1])


@pytest.mark.parametrize("name", ["llama", "dinov3", "qwen2_5_vl_tower"])
def test_bfloat16(name):
    model, inputs = build(name)
    model = model.to(torch.bfloat16)
    inputs = {key: value.to(torch.bfloat16) if value.is_floating_point() else value for key, value in inputs.items()}
    expected = outputs(model, inputs)
    patch(model, blocks("liere"))
    assert all(value.dtype == torch.float32 for _, value in rotary_parameters(model))
    for value, start in zip(outputs(model, inputs), expected):
        # Queries and keys are rounded to eight bits once more or once less, in two layers.
        assert (value - start).abs().max() < 0.1 * start.abs().max() and value.dtype == torch.bfloat16


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


@pytest.mark.parametrize(
    "name, encoding",
    [
        (name, encoding)
        for name in ("llama", "glm", "dinov3", "qwen2_5_vl_tower")
        for encoding in ("rope_mixed", *DENSE)
        if (name, encoding) not in REFUSED
    ],
)
def test_queries_and_keys_are_rotated_as_the_reference_does(name, encoding):
    model, inputs = build(name)
    model.set_attn_implementation("recording")
    frequencies, attentions = rope_of(name, model)
    # Before the hooks of the patch, which see the same outputs later.
    projected, embedded, order = record_projections(attentions), {}, None
    if name == "qwen2_5_vl_tower":
        model.patch_embed.register_forward_hook(lambda module, args, output: embedded.update(packed=output))
        model.blocks[0].register_forward_pre_hook(lambda module, args: embedded.update(seen=args[0]))
    config = RotaryPatchConfig(position_encoding=encoding, rotary_init="pretrained")
    patch(model, config if encoding == "rope_mixed" else blocks(encoding))
    torch.manual_seed(4)
    with torch.no_grad():
        for _, parameter in rotary_parameters(model):
            parameter.add_(0.1 * torch.randn_like(parameter))
        seen.clear()
        outputs(model, inputs)
    if embedded:
        order = (embedded["seen"].unsqueeze(1) == embedded["packed"]).all(-1).int().argmax(-1)
        assert sorted(order.tolist()) == list(range(28)) and order.tolist() != list(range(28))
    positions = positions_of(name, order)
    learned = {key.rpartition(".")[2]: value for key, value in rotary_parameters(model)}
    size = 2 if encoding == "rope_mixed" else 4
    if encoding == "rope_mixed":
        factors = learned["log_factors"].detach().double().exp()
        # (A, layers, 1, planes, 1)
        learned = {"generators": (frequencies.unsqueeze(1) * factors).unsqueeze(2).unsqueeze(-1)}
    planes = list(range(frequencies.shape[-1]))
    _, made = projected_states(projected, attentions[0])
    described = SimpleNamespace(
        position_encoding=encoding,
        block_size=size,
        head_dim=2 * len(planes),
        num_attention_heads=made.shape[1],
        share_heads=encoding == "rope_mixed",
        rotary_init_scale=1.0,
        rope_theta=10000.0,
        spins=None,
    )
    if encoding == "comrope_ap" and len(frequencies) == 2:
        # Two planes of the rows, two of the columns, and so on.
        planes = [0, 1, 4, 5, 2, 3, 6, 7]
    # GLM rotates neighbours among the first half of the channels, the others channels of both halves.
    pair = (lambda plane: (2 * plane, 2 * plane + 1)) if name == "glm" else (lambda plane: (plane, plane + 8))
    channels = [channel for plane in planes for channel in pair(plane)]
    for layer, attention in enumerate(attentions):
        query, key = (torch.cat(windows, 2).detach().double() for windows in zip(*seen[attention]))
        raw_query, raw_key = projected_states(projected, attention)
        for states, raw in ((query, raw_query), (key, raw_key)):
            for head in range(raw.shape[1]):
                key_head = head // (raw.shape[1] // raw_key.shape[1])
                found = reference.generators(learned, described, positions.shape[-1], layer, key_head)
                matrices = found.new_zeros(len(found), 16, 16)
                matrices[:, torch.tensor(channels).unsqueeze(-1), torch.tensor(channels)] = found
                rotations = reference.rotations(matrices, positions, encoding)
                expected = reference.rotate(raw[:, head], rotations)
                # Angles of up to ten full rotations and products are float32.
                torch.testing.assert_close(states[:, head], expected, rtol=0, atol=5e-5)
