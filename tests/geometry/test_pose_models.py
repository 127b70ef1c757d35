"""Models that attend by poses, and poses, sizes and options that are refused."""

import logging

import pytest
import torch
from pose_reference import HEAD_DIM, HEADS, by_distance, expected, random_poses, random_states, tiled
from transformers import (
    AttentionInterface,
    AutoModelForImageClassification,
    AutoModelForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import hf_liere
from hf_liere import PoseEmbedding, RotaryPatchConfig, grid_positions, patch


SIZES = {"hidden_size": HEADS * HEAD_DIM, "num_attention_heads": HEADS, "intermediate_size": 48}
IMAGES = {"image_size": 16, "patch_size": 8, "num_hidden_layers": 1, **SIZES}


def tokens_model(**fields):
    """A model of transformers that attends by poses, with weights that are large enough to tell tokens apart."""
    sizes = {**SIZES, "num_hidden_layers": 2, "feature_size": 3, "num_labels": 2, "num_axes": 6}
    sizes |= {"initializer_range": 0.3, "position_encoding": "none", "use_class_token": False, "pooling": "mean"}
    model = hf_liere.LieRETokensForTokenClassification(hf_liere.LieRETokensConfig(**sizes | fields)).eval()
    model.set_attn_implementation("pose_embedding")
    return model


def patched_vit():
    model = ViTForImageClassification(ViTConfig(initializer_range=0.3, **IMAGES)).eval()
    return patch(model, RotaryPatchConfig(position_encoding="liere"))


def patched_llama():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=20, num_hidden_layers=1, **SIZES)).eval()
    return patch(model, RotaryPatchConfig(position_encoding="rope_mixed", rotary_init="pretrained"))


@torch.no_grad()
def test_attention_of_a_model_is_that_of_every_pair_of_tokens():
    attention = tokens_model().double().liere.layers[0].attention
    states, poses = torch.randn(1, 6, HEADS * HEAD_DIM, dtype=torch.float64), random_poses(1, 6)
    heads = [getattr(attention, f"{name}_proj")(states).unflatten(-1, (HEADS, -1)).transpose(1, 2) for name in "qkv"]
    wanted = expected(heads, tiled(torch.linalg.inv(poses))).transpose(1, 2).flatten(2)
    found, _ = attention(states, poses=poses)
    torch.testing.assert_close(found, attention.o_proj(wanted), rtol=0, atol=1e-10)


@torch.no_grad()
def test_outputs_of_a_model_do_not_change_when_the_scene_moves():
    model, features, poses = tokens_model(), torch.randn(2, 6, 3), random_poses(2, 6)
    visible = torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]])

    def logits(poses):
        return model(features, poses=poses, attention_mask=visible).logits

    before, moved = logits(poses), random_poses(2, 1, distance=50.0) @ poses
    # Poses in float64 become relative before they are rounded.
    torch.testing.assert_close(logits(moved), before, rtol=0, atol=1e-5 * before.abs().max().item())
    assert torch.equal(logits(PoseEmbedding(HEAD_DIM).frames(poses)), before)
    assert (logits(poses.roll(1, 1)) - before).abs().max() > 1e-2
    # Hidden tokens are not attended to, wherever they are.
    hidden = torch.where(visible.bool()[..., None, None], poses, random_poses(2, 6))
    torch.testing.assert_close(logits(hidden)[visible.bool()], before[visible.bool()], rtol=0, atol=1e-5)


NEAR = {"distance_axes": [5, 1, 3], "position_scale": 0.5}


def near_model(**fields):
    model = tokens_model(**NEAR, **fields).double()
    with torch.no_grad():
        for layer, weights in zip(model.liere.layers, ((0.5, -0.25), (1.0, 0.5))):
            layer.attention.distance_weight.copy_(torch.tensor(weights))
    return model


@torch.no_grad()
def test_attention_by_poses_and_distances():
    """In a float64 loop; hidden tokens and class tokens are at no distance, and nothing changes at the start."""
    features, poses, places = torch.randn(2, 6, 3).double(), random_poses(2, 6), torch.randn(2, 6, 6).double()
    model, visible = near_model(), torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]])
    states, seen = model.liere.embeddings(features), visible.bool()
    for layer in model.liere.layers:
        attention, normal = layer.attention, layer.layernorm_before(states)
        heads = [
            getattr(attention, f"{name}_proj")(normal).unflatten(-1, (HEADS, -1)).transpose(1, 2) for name in "qkv"
        ]
        columns = 0.5 * places[..., [1, 3, 5]]
        bias = by_distance((-attention.distance_weight).tolist(), columns, columns)
        bias = bias.masked_fill(~seen[:, None, None], -torch.inf)
        attended = expected(heads, tiled(torch.linalg.inv(poses)), bias=bias).transpose(1, 2).flatten(2)
        states = states + attention.o_proj(attended)
        states = states + layer.mlp(layer.layernorm_after(states))
    wanted = model.classifier(model.liere.layernorm(states))
    hidden = torch.where(seen[..., None], places, torch.nan)
    found = model(features, hidden, visible, poses=poses).logits
    torch.testing.assert_close(found[seen], wanted[seen], rtol=0, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("fields", [{"num_register_tokens": 2}, {"position_encoding": "rope_mixed"}])
def test_distances_under_other_attention(fields):
    model, rotates = near_model(**fields), "position_encoding" in fields
    start = tokens_model(**fields, position_scale=0.5 if rotates else 1.0).double()
    start.load_state_dict(model.state_dict(), strict=False)
    features, places, mask = torch.randn(1, 6, 3).double(), torch.randn(6, 6).double(), torch.arange(6)[None] < 4
    for given in (None, mask):
        found = []
        for implementation in ("eager", "sdpa"):
            model.set_attn_implementation(implementation)
            found.append(model(features, places, given).logits)
        torch.testing.assert_close(*found, rtol=0, atol=1e-12)
    # Places that move together, and columns that are no place.
    moved = places + torch.tensor([0, 7.0, 0, -3.0, 0, 2.0])
    if not rotates:
        moved[:, [0, 2, 4]] += torch.randn(6, 3)
    torch.testing.assert_close(model(features, moved, mask).logits[:, :4], found[1][:, :4], rtol=0, atol=1e-10)
    start.set_attn_implementation("sdpa")
    # All at one place, where prefix tokens are as well, and then any places without weights.
    for given in (torch.zeros(6, 6).double(), places):
        before = start(features, given if rotates else None, mask).logits
        torch.testing.assert_close(model(features, given, mask).logits, before, rtol=0, atol=1e-12)
        for layer in model.liere.layers:
            layer.attention.distance_weight.zero_()
    with pytest.raises(ValueError, match="'none' needs positions|'rope_mixed' needs positions"):
        model(features)
    model.set_attn_implementation("flex_attention")
    # transformers would compile the blocks of its mask first, for seconds.
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(ValueError, match="'flex_attention': distance_axes need eager, sdpa or"),
    ):
        model(features, places, mask)


def test_a_model_needs_the_poses_of_all_tokens():
    features, poses = torch.randn(1, 6, 3), random_poses(1, 6)
    with pytest.raises(ValueError, match=r"attn_implementation='pose_embedding' needs the poses of all tokens"):
        tokens_model()(features)
    with pytest.raises(ValueError, match="poses of 6 tokens in 1 samples, but query of shape"):
        tokens_model(use_class_token=True)(features, poses=poses)


@torch.no_grad()
def test_a_saved_model_attends_by_poses(tmp_path):
    """Also when a patched model of transformers is saved; a name that is asked for comes before the saved one."""
    patched = patched_vit()
    patched.set_attn_implementation("pose_embedding")
    for model, auto, inputs in (
        (tokens_model(), AutoModelForTokenClassification, torch.randn(2, 5, 3)),
        (patched, AutoModelForImageClassification, torch.randn(1, 3, 16, 16)),
    ):
        model.save_pretrained(tmp_path)
        loaded, poses = auto.from_pretrained(tmp_path).eval(), random_poses(5)
        wanted = model(inputs, poses=poses).logits
        assert torch.equal(loaded(inputs, poses=poses).logits, wanted)
        assert (model(inputs, poses=poses.flip(0)).logits - wanted).abs().max() > 1e-4
        auto.from_pretrained(tmp_path, attn_implementation="sdpa").save_pretrained(tmp_path / "sdpa")
        assert "attn_implementation" not in (tmp_path / "sdpa" / "config.json").read_text()


def own(name, config, **fields):
    return lambda: getattr(hf_liere, name)(getattr(hf_liere, config)(**IMAGES, **fields))


IGNORING = [
    (own("LieREViTForImageClassification", "LieREViTConfig"), torch.randn(1, 3, 16, 16)),
    (own("LieREViTBackbone", "LieREViTConfig"), torch.randn(1, 3, 16, 16)),
    (own("LieREVideoForVideoClassification", "LieREVideoConfig", num_frames=2), torch.randn(1, 2, 3, 16, 16)),
    (tokens_model, torch.randn(1, 5, 3)),
    (patched_vit, torch.randn(1, 3, 16, 16)),
    (patched_llama, torch.arange(5)[None]),
]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("build, inputs", IGNORING)
def test_poses_that_attention_would_ignore(build, inputs, implementation):
    model = build().eval()
    model.set_attn_implementation(implementation)
    with pytest.raises(ValueError, match=f"poses were given, but attn_implementation='{implementation}' ignores them"):
        model(inputs, poses=random_poses(5))
    model(inputs, poses=None)


@torch.no_grad()
def test_other_attention_that_takes_poses(tmp_path):
    """The name of a user's own attention function is saved as well, and frames keep the options of their layer."""

    def scaled(module, query, key, value, mask, poses=None, **kwargs):
        frames = PoseEmbedding(HEAD_DIM, translation_scale=0.1).frames(poses)
        return AttentionInterface()["pose_embedding"](module, query, key, value, mask, poses=frames, **kwargs)

    AttentionInterface.register("scaled_poses", scaled)
    try:
        model, features, poses = tokens_model(), torch.randn(1, 6, 3), random_poses(1, 6)
        model.set_attn_implementation("scaled_poses")
        model.save_pretrained(tmp_path)
        loaded = AutoModelForTokenClassification.from_pretrained(tmp_path).eval()
        found = loaded(features, poses=poses).logits
        assert torch.equal(found, model(features, poses=poses).logits)
        loaded.set_attn_implementation("pose_embedding")
        poses[..., :3, 3] *= 0.1
        torch.testing.assert_close(found, loaded(features, poses=poses).logits, rtol=1e-5, atol=1e-5)
    finally:
        del AttentionInterface._global_mapping["scaled_poses"]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda pose: pose[:3, :3].mul_(1.01), r"poses\[1, 2\] is not a pose.*RᵀR differs from the identity by 0\.02;"),
        (lambda pose: pose[:3, 0].neg_(), r"poses\[1, 2\].*determinant is -1"),
        (lambda pose: pose[3].copy_(torch.tensor([1.0, 2.0, 3.0, 1.0])), r"last row is \[1.0, 2.0, 3.0, 1.0\] instead"),
        (lambda pose: pose[0, 3].fill_(torch.nan), r"not finite.* 1 of 6 are refused"),
    ],
)
def test_matrices_that_are_not_poses(change, message):
    layer, poses = PoseEmbedding(HEAD_DIM), random_poses(2, 3)
    change(poses[1, 2])
    with pytest.raises(ValueError, match=message):
        layer(*random_states(2, 3), poses)
    with pytest.raises(ValueError, match="reference"):
        layer.frames(random_poses(2, 3), reference=poses[:, 2])
    layer.frames(poses, known=torch.tensor([True, True, False]))


def test_states_that_do_not_fit():
    plain, layer = PoseEmbedding(HEAD_DIM), PoseEmbedding(HEAD_DIM, patch_share=0.5)
    states, poses = random_states(2, 4), random_poses(2, 4)
    for message, refused in (
        (r"head_dim=16", lambda: plain(*(x[..., :8] for x in states), poses)),
        ("poses of 4 tokens in 3 samples", lambda: plain(*states, random_poses(3, 4))),
        ("torch.int64", lambda: plain.undo(states[0].long(), poses)),
        ("none were given", lambda: layer(*states, poses)),
        ("patches of 4 tokens in 3 samples", lambda: layer(*states, layer.frames(poses, patches=torch.rand(3, 4, 2)))),
        ("coordinates of patches='train_grid'.*are index", lambda: layer.frames(poses, patches=grid_positions((2, 2)))),
        ("3 tokens and poses of 4", lambda: layer.frames(poses, patches=torch.rand(3, 2))),
        ("query is a list", lambda: layer([[1.0]], *states[1:], layer.frames(poses, patches=torch.rand(4, 2)))),
        ("translation_scale=1.0; this one has .*patch_share=0.5", lambda: layer(*states, plain.frames(poses))),
    ):
        with pytest.raises(ValueError, match=message):
            refused()


@pytest.mark.parametrize("options", [{"translation_scale": 0.1}, {"patch_share": 0.5, "rope_theta": 50.0}])
def test_frames_of_another_layer(options):
    fixed, poses = torch.eye(4, dtype=torch.float64), random_poses(2, 4)
    other = PoseEmbedding(HEAD_DIM, **options)
    patches = None if other.rotary is None else grid_positions((2, 2), "index")
    layer, states = PoseEmbedding(HEAD_DIM, patch_share=other.patch_share), random_states(2, 4)
    own, others = (each.frames(poses, reference=fixed, patches=patches) for each in (layer, other))
    name, value = list(options.items())[-1]
    with pytest.raises(ValueError, match=f"{name}={value}.*this one has .*{name}={getattr(layer, name)}"):
        layer(*states, own, others)
    with pytest.raises(ValueError, match=f"{name}={value}"):
        layer.undo(states[0], others)


@pytest.mark.parametrize("dtype, warned", [(torch.float32, True), (torch.float64, False)])
def test_distant_poses_in_float32_are_reported(dtype, warned, caplog):
    poses = random_poses(2, 4, dtype=dtype)
    poses[0, 0, 0, 3] = 1000.0
    logger = logging.getLogger("hf_liere.geometry.pose_embedding")
    # transformers' loggers do not hand their messages on.
    logger.addHandler(caplog.handler)
    try:
        # A scale of its own, so that the warning has not appeared yet.
        PoseEmbedding(HEAD_DIM, translation_scale=0.99).frames(poses)
        assert ("more than 169 units" in caplog.text) == warned
    finally:
        logger.removeHandler(caplog.handler)
