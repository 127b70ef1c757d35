"""Tokens of patched models choose positions: p + W x, beside loops over samples, tokens and heads in float64."""

import copy
import inspect

import patching_cases
import pytest
import reference
import rope_cases
import torch
from model_cases import make
from patching_cases import randomize, same_bits
from patching_checks import check_cached_steps, refused, unit_grid
from torch import nn
from transformers import AttentionInterface, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_liere import RotaryPatchConfig, patch, unpatch
from hf_liere.patching.apply import require_patched
from hf_liere.probing.module_inspection import cache_name, projections


PRETRAINED = {"rotary_init": "pretrained"}
CONFIGS = {
    "clip_vision": RotaryPatchConfig("comrope_ld", block_size=4, content_positions="heads_sum"),
    "dinov2": RotaryPatchConfig("liere", block_size=4, coordinates="unit", content_positions="shared"),
    "planes": RotaryPatchConfig("rope_mixed", content_positions="shared_sum", **PRETRAINED),
    "blocks": RotaryPatchConfig("comrope_ld", block_size=4, content_positions="heads_sum", **PRETRAINED),
}
seen = []


def record(module, query, key, *args, **kwargs):
    seen.append((query, key))
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, *args, **kwargs)


AttentionInterface.register("record queries and keys", record)


def build(name):
    """A model away from its start, and its inputs."""
    built, inputs = (patching_cases if name in patching_cases.CASES else rope_cases).build(
        name if name in patching_cases.CASES else "llama"
    )
    torch.manual_seed(0)
    randomize(patch(built, CONFIGS[name]))
    return built, inputs


def generators(encoding, layer, head):
    """(A, D, D) of a key head, in the order of the model's channels."""
    if hasattr(encoding, "entries"):
        return reference.generators(parameters_of(encoding), encoding.config, encoding.num_axes, layer, head)
    if hasattr(encoding, "rotary"):
        inner = encoding.rotary.encoding
        adjacent = reference.generators(parameters_of(inner), inner.config, 1, layer, head)
    else:
        speeds = [10000.0 ** (-i / 8) for i in range(8)]
        learned = torch.tensor(speeds).double() * encoding.log_factors[layer].detach().double().exp()
        turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]]).double()
        adjacent = torch.block_diag(*(speed * turn for speed in learned)).unsqueeze(0)
    # Llama's plane i has channels i and i + 8.
    order = torch.tensor([i + 8 * half for i in range(8) for half in (0, 1)]).argsort()
    return adjacent[:, order][:, :, order]


def parameters_of(encoding):
    return {name: value for name, value in encoding.named_parameters() if not name.startswith("content")}


def move(tower, layer, states, places, head):
    """(B, N, A) positions of a key head that the (B, N, hidden_size) states choose; prefix tokens stay."""
    content, axes = tower.rotary_encoding.content, places.shape[-1]
    weight = content.weight.detach()[layer].double().unflatten(0, (-1, axes))  # (1 or key heads, A, C)
    own = weight[min(head, len(weight) - 1)]
    prefix, moved = states.shape[1] - len(places), places.new_zeros(*states.shape[:2], axes)
    config = tower.rotary_patch.config
    moved[:, :prefix] = 0.5 if config.rotate_prefix else 0.0
    for sample in range(len(states)):
        total = torch.zeros(axes).double()
        for token, place in enumerate(places):
            step = own @ states[sample, prefix + token]
            total = total + step if "sum" in config.content_positions else step
            moved[sample, prefix + token] = place + total
    return moved


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_queries_and_keys_are_rotated_where_states_move_their_tokens(name):
    """The products of every layer and head, of grouped queries too: rotations may be in a basis of their own."""
    model, inputs = build(name)
    model.double().set_attn_implementation("record queries and keys")
    inputs = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
    ((_, tower),) = require_patched(model)
    attentions, read = tower.rotary_patch.attentions(tower), []
    for attention in attentions:
        attention.register_forward_pre_hook(
            lambda module, args, kwargs: read.append(next(iter((*args, *kwargs.values())))), with_kwargs=True
        )
    seen.clear()
    model(**inputs)
    places = unit_grid(4, 4) if "pixel_values" in inputs else torch.arange(11.0).double().unsqueeze(-1)  # (N, A)
    for layer, (attention, states, (queries, keys)) in enumerate(zip(attentions, read, seen, strict=True)):
        for head in range(queries.shape[1]):
            key_head = head * keys.shape[1] // queries.shape[1]
            own = generators(tower.rotary_encoding, layer, key_head)
            moved = move(tower, layer, states, places, key_head)
            turns = reference.rotations(own, moved.flatten(0, 1)).unflatten(0, moved.shape[:2])  # (B, N, D, D)
            plain = (project(part, states, own.shape[-1]) for part in projections(attention))
            query, key = (reference.rotate(x[:, i], turns) for x, i in zip(plain, (head, key_head)))  # 2 × (B, N, D)
            found, expected = queries[:, head] @ keys[:, key_head].mT, query @ key.mT
            # The model's own angles are float32.
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def project(projection, states, head_dim):
    """(B, H, N, D) of (B, N, hidden_size) states, without the hooks of a projection."""
    return (
        nn.functional.linear(states, projection.weight, projection.bias).unflatten(-1, (-1, head_dim)).transpose(1, 2)
    )


@pytest.mark.parametrize("cache", [None, "static", "hidden"])
@pytest.mark.parametrize("name", ["planes", "blocks"])
def test_a_cache_continues_sums(name, cache):
    model, inputs = build(name)
    if cache == "hidden":
        inputs["attention_mask"], cache = (torch.arange(11) >= torch.tensor([[0], [4]])).long(), None
    for _ in range(2):
        # The second time, the cache of the first one is reset.
        check_cached_steps(model, inputs, cache)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}])
def test_beams_and_drafts_choose_sums_with_their_cache(options):
    model, inputs = build("blocks")
    inputs = {"input_ids": inputs["input_ids"][:1].repeat(1, 2)} if "num_beams" not in options else inputs
    length = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    plain = {} if "prompt_lookup_num_tokens" in options else options
    found = model.generate(**inputs, **length, **options)
    assert torch.equal(found, model.generate(**inputs, **length, **plain, use_cache=False))


@torch.no_grad()
def test_chunks_of_a_prompt_in_a_cache_that_grows_as_it_is_filled():
    model, inputs = build("planes")
    cache, ids = DynamicCache(), inputs["input_ids"]
    name = cache_name(inspect.signature(model.forward).parameters)
    chunks = [model(chunk, **{name: cache}).logits for chunk in ids.split([4, 1, 6], dim=1)]
    expected = model(ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(chunks, dim=1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_models_start_at_the_patch_without(name):
    """To the bit, away from the start of its rotations; on a grid, dense blocks are powers."""
    model, inputs = build(name)
    for module in require_patched(model)[0][1].rotary_encoding.modules():
        if hasattr(module, "sums"):
            module.weight.zero_()
    plain = copy.deepcopy(model)
    state = {key: value for key, value in model.state_dict().items() if ".content." not in key}
    config = copy.copy(CONFIGS[name])
    config.content_positions = None
    patch(unpatch(plain), config).load_state_dict(state)
    found, expected = (rope_cases.outputs(each, inputs) for each in (model, plain))
    if name == "dinov2":
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    else:
        assert same_bits(found, expected)


REFUSED = {
    "='shared': DINOv3ViTModel has one cos and sin .*='liere' with block_size=2": ("dinov3", "shared", "rope_mixed"),
    "='heads': .*Llama.* has one cos and sin for all heads": ("llama", "heads", "rope_mixed"),
    "='shared': .* has keys, or cos and sin, that are not of the states": ("gemma3n", "shared", "rope_mixed"),
    "='shared_sum': DINOv3.* has axes that do not commute, .* shared, heads": ("dinov3", "shared_sum", "liere"),
    "='shared_sum': ViTMAEModel shuffles patches": ("vit_mae", "shared_sum", "comrope_ld"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused_by_name(words):
    name, content, encoding = REFUSED[words]
    cases, start = (patching_cases, {}) if name in patching_cases.CASES else (rope_cases, PRETRAINED)
    size = None if encoding == "rope_mixed" else 4
    with refused(model := cases.build(name)[0], words):
        patch(model, RotaryPatchConfig(encoding, size, content_positions=content, **start))


def test_neither_folded_nor_written_as_plain_rope():
    for name in ("rotating llama, content", "patched clip_vision, content"):
        model = make(name)
        with pytest.raises(ValueError, match="moved by every input .content_positions='"):
            model.fold_rotations()
    with pytest.raises(ValueError, match="is more than one frequency for every plane"):
        unpatch(make("rotating llama, content"), keep_frequencies=True)
