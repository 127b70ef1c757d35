"""Families that rotate in other forms than most: each one from its start over a step of training to its adapter."""

import pytest
import torch
from patching_cases import randomize, same_bits
from patching_checks import check_cached_steps, close_to_start, refused
from relative_positions import check_relative
from rope_cases import FAMILIES, PLANES, blocks, build, find_case, outputs
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from hf_liere import RotaryPatchConfig, patch, rotary_parameters, unpatch


CONFIGS = {"planes": PLANES, "blocks": blocks()}
# Why a family cannot have blocks in all layers.
WITHOUT_BLOCKS = {
    "sam2_video": "may attend to other tokens than those of its queries, .* named in layers",
    "edgetam_video": "may attend to other tokens than those of its queries",
    "molmo2": "several modules that compute rotations, rotary_emb, rotary_emb_unscaled: which attention module uses",
    "granite_swa": "several modules that compute rotations, .*: which attention module uses which is unknown",
    "llama_dynamic": "rope_type='dynamic', which computes other frequencies for longer inputs, and blocks have fixed",
    "llama_longrope": "rope_type='longrope', which computes other frequencies for longer inputs, and blocks have fixed",
}
WITH_BLOCKS = [name for name in FAMILIES if name not in WITHOUT_BLOCKS]


def take_step(model, inputs):
    """One step against the gradient, which must reach every number."""
    torch.manual_seed(2)
    found = [value for value in outputs(model.train(), inputs) if value.requires_grad]
    sum((value * torch.randn_like(value)).sum() for value in found).backward()
    with torch.no_grad():
        for name, value in rotary_parameters(model):
            assert value.grad.abs().min() > 0, name
            value -= 0.1 * value.grad / value.grad.abs().max()
    model.zero_grad()
    model.eval()


@pytest.mark.parametrize("name", WITH_BLOCKS)
def test_trained_blocks(name):
    """They are relative on one axis, and in steps with a cache."""
    if name not in ("sam3", "mlcd"):
        check_relative(name, blocks())
    if find_case(name).generates:
        model, inputs = build(name)
        take_step(patch(model, blocks()), inputs)
        check_cached_steps(model, inputs)


@pytest.mark.parametrize("name", [name for name in WITHOUT_BLOCKS if name in FAMILIES])
def test_blocks_that_would_not_start_at_the_rotation(name):
    with refused(model := build(name)[0], WITHOUT_BLOCKS[name]):
        patch(model, blocks())


def test_blocks_in_the_self_attention_of_sam2_video():
    model, inputs = build("sam2_video")
    expected = outputs(model, inputs)
    patch(model, RotaryPatchConfig(position_encoding="liere", block_size=4, rotary_init="pretrained", layers=[0, 2]))
    close_to_start(outputs(model, inputs), expected)
    take_step(model, inputs)
    assert not same_bits(outputs(model, inputs), expected)


@pytest.mark.parametrize("length", [6, 11])
@pytest.mark.parametrize("name", ["llama_dynamic", "llama_longrope"])
def test_frequencies_that_change_with_the_length(name, length):
    """Learned factors multiply those that the model computes for an input, short or long, and after another one."""
    model, inputs = build(name)
    short = {"input_ids": inputs["input_ids"][:, :length]}
    patched = patch(build(name)[0], PLANES)
    for given in (inputs, short, inputs):
        assert same_bits(outputs(patched, given), outputs(model, given))


@pytest.mark.skipif("deepseek_v32" not in FAMILIES, reason="transformers has no DeepSeek 3.2")
@pytest.mark.parametrize("kind", CONFIGS)
def test_indexers_get_the_pretrained_cos_and_sin(kind):
    model, inputs = build("deepseek_v32")
    given = []
    for layer in model.model.layers:
        layer.self_attn.indexer.register_forward_hook(lambda module, args, output: given.append(args[2]))
    expected = outputs(model, inputs)
    randomize(patch(model, CONFIGS[kind]))
    assert not same_bits(outputs(model, inputs), expected)
    # Both runs, and what `patch` called in between.
    assert all(same_bits(pair, other) for pair, other in zip(given[:2], given[-2:]))


class ScaledRotary(LlamaRotaryEmbedding):
    """LeRoPE: planes rotate with ω exp(α)."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("alpha", torch.linspace(-0.5, 0.5, len(self.inv_freq)))

    def factors(self):
        return self.alpha.exp()

    def forward(self, x, position_ids):
        angles = position_ids[..., None].float() * (self.inv_freq * self.factors())
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class LinearlyScaledRotary(ScaledRotary):
    def factors(self):
        return 1 + self.alpha


@pytest.mark.parametrize("kind", CONFIGS)
def test_frequencies_with_factors_that_the_model_has_learned(kind):
    model, inputs = build("llama")
    model.model.rotary_emb = ScaledRotary(model.config)
    expected = outputs(model, inputs)
    patch(model, CONFIGS[kind])
    assert kind == "blocks" or same_bits(outputs(model, inputs), expected)
    close_to_start(outputs(model, inputs), expected)
    unpatch(model)
    model.model.rotary_emb = LinearlyScaledRotary(model.config)
    with pytest.raises(ValueError, match="does not return the cos and sin of one coordinate times one frequency"):
        patch(model, CONFIGS[kind])


def test_one_norm_for_values_queries_and_keys():
    model, inputs = build("llama")

    class OneNorm(LlamaAttention):
        def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
            shape = (*hidden_states.shape[:-1], -1, self.head_dim)
            made = (proj(hidden_states).view(shape) for proj in (self.v_proj, self.q_proj, self.k_proj))
            value, query, key = (self.norm(states).transpose(1, 2) for states in made)
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
            function = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
            output, _ = function(self, query, key, value, attention_mask, scaling=self.scaling)
            return self.o_proj(output.flatten(-2)), None

    for layer in model.model.layers:
        layer.self_attn.__class__, layer.self_attn.norm = OneNorm, LlamaRMSNorm(layer.self_attn.head_dim)
    expected = outputs(model, inputs)
    patch(model, CONFIGS["blocks"])
    close_to_start(outputs(model, inputs), expected)
    take_step(model, inputs)
    assert not same_bits(outputs(model, inputs), expected)


def test_cos_and_sin_that_no_attention_takes():
    """As those of a time embedding, beside models that rotate."""

    class Time(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("inv_freq", torch.ones(4))

    whole = torch.nn.ModuleDict({"time": Time(), "text": build("llama")[0]})
    assert [name for name, _ in rotary_parameters(patch(whole, PLANES))] == ["text.model.rotary_encoding.log_factors"]
    with pytest.raises(ValueError, match="time.* computes rotations, but no module in .* takes them"):
        patch(torch.nn.ModuleDict({"time": Time()}), PLANES)
