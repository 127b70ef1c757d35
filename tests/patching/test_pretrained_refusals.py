"""What `rotary_init="pretrained"` does not accept, and what models with RoPE do not."""

import pytest
import torch
import transformers
from patching_cases import IMAGE, SMALL
from patching_cases import model as model_of
from rope_cases import CASES, HEADS, PLANES, TEXT, build, rope
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_liere import RotaryPatchConfig, is_patched, load_rotary, patch, save_rotary


class TestRefusals:
    """Every refusal leaves the model as it was."""

    def refuse(self, model, message, function, *arguments):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            function(model, *arguments)
        after = model.state_dict()
        assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

    @pytest.mark.parametrize(
        "build, message",
        [
            (
                model_of("CLIPVisionConfig", "CLIPVisionModel", hidden_size=36, num_hidden_layers=1),
                "CLIPVisionModel has no module with frequencies .*pass rotary_init='zeros'",
            ),
            (
                model_of("Llama4VisionConfig", "Llama4VisionModel", **IMAGE),
                "Llama4VisionModel has no module with frequencies",
            ),
            (
                model_of("VJEPA2Config", "VJEPA2Model", **SMALL, crop_size=16, patch_size=4, frames_per_clip=4),
                "VJEPA2Model has no module with frequencies",
            ),
        ],
    )
    def test_models_that_do_not_fit(self, build, message):
        self.refuse(build(), message, patch, PLANES)

    def test_modules_whose_axes_are_unknown(self):
        # Before it, this tower rotates on two axes.
        pytest.importorskip("transformers", "5.18")
        sizes = {"hidden_size": 36, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
        tower = model_of("MiniMaxM3VLVisionConfig", "MiniMaxM3VLVisionModel", **sizes, patch_size=4)()
        self.refuse(tower, "takes positions on two axes and on three, and heads have 18 channels", patch, PLANES)

    def test_modules_that_rotate_and_hand_on(self):
        model, _ = build("llama")

        class Layer(type(model.model.layers[0])):
            def forward(self, hidden_states, position_embeddings=None, **kwargs):
                cos, sin = position_embeddings
                return super().forward(hidden_states, position_embeddings=(cos, sin), **kwargs)

        model.model.layers[0].__class__ = Layer
        self.refuse(model, "model.layers.0 .Layer. rotates with cos and sin and passes them", patch, PLANES)

    def test_towers_that_compute_cos_and_sin(self):
        model, _ = build("llama")

        class Tower(type(model.model)):
            def forward(self, *args, **kwargs):
                angles = torch.zeros(1)
                return super().forward(*args, scaling=angles.cos() + angles.sin(), **kwargs)

        model.model.__class__ = Tower
        self.refuse(model, "Tower. computes cos and sin in its forward pass, beside those of", patch, PLANES)

    @pytest.mark.parametrize("layers", [[2], [0, 2]])
    def test_layers_that_read_the_keys_of_another(self, layers):
        config = RotaryPatchConfig(position_encoding="rope_mixed", rotary_init="pretrained", layers=layers)
        message = (
            "layers.2.self_attn reads the keys of model.layers.0.self_attn and .*; name layer 0, and leave out .2."
        )
        self.refuse(build("gemma3n")[0], message, patch, config)

    def test_layers_that_could_not_be_called(self):
        """Parameters of a layer that does not rotate would learn nothing."""
        model, _ = build("llama")

        class Unknown(type(model.model.layers[1].self_attn)):
            def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
                raise NotImplementedError

        model.model.layers[1].self_attn.__class__ = Unknown
        message = "layers.1.self_attn .Unknown. could not be called with a few tokens to see whether it rotates"
        self.refuse(model, message, patch, PLANES)

    def test_planes_that_attention_does_not_use(self):
        model, _ = build("llama")

        class Partial(type(model.model.layers[1].self_attn)):
            def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
                cos, sin = (x.clone() for x in position_embeddings)
                for x, neutral in ((cos, 1), (sin, 0)):
                    x.unflatten(-1, (2, 8))[..., 4:] = neutral
                return super().forward(hidden_states, (cos, sin), attention_mask, **kwargs)

        model.model.layers[1].self_attn.__class__ = Partial
        self.refuse(model, "rotates 8 channels of each head, and rotary_emb has 8 planes", patch, PLANES)

    def test_layers_that_read_keys_of_another_model(self):
        """As the assistants of Gemma 4 do."""
        model, _ = build("gemma3n")
        model.model.layers = model.model.layers[2:]
        model.config.layer_types = model.config.layer_types[2:]
        message = "layers.0.self_attn .Gemma3nTextAttention. reads keys that no layer before it makes"
        self.refuse(model, message, patch, PLANES)

    def test_keys_of_unknown_origin(self):
        model, _ = build("llama")
        attention = type(model.model.layers[0].self_attn)

        class KeysOfOthers(attention):
            def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
                query = self.q_proj(hidden_states).unflatten(-1, (-1, 16)).transpose(1, 2)
                rotated, _ = apply_rotary_pos_emb(query, query, *position_embeddings)
                function = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
                return function(self, rotated, query, query, attention_mask)

        class KeysOfUnknown(attention):
            def forward(self, hidden_states, position_embeddings, shared_kv_states):
                return shared_kv_states.of_layer(self.layer_idx)

        model.model.layers[1].self_attn.__class__ = KeysOfOthers
        self.refuse(model, "layers.1.self_attn .KeysOfOthers. rotates its queries and not its keys", patch, PLANES)
        model.model.layers[1].self_attn.__class__ = KeysOfUnknown
        self.refuse(model, "self_attn .KeysOfUnknown. may read the keys of another layer", patch, PLANES)

    def test_towers_with_common_weights(self):
        """As encoder and decoder of Diffusion Gemma have: the decoder reads the keys that the encoder has cached."""
        model = torch.nn.ModuleDict({"encoder": build("llama")[0].model, "decoder": build("llama")[0].model})
        for first, second in zip(model["encoder"].layers, model["decoder"].layers):
            second.self_attn.k_proj.weight = first.self_attn.k_proj.weight
        message = "encoder.layers.0.self_attn and decoder.layers.0.self_attn have weights in common"
        self.refuse(model, message, patch, PLANES)
        config = RotaryPatchConfig(position_encoding="rope_mixed", rotary_init="pretrained", target="encoder")
        self.refuse(model, message, patch, config)

    @pytest.mark.parametrize("name", ["llama", "dinov3", "qwen2_5_vl_tower", "gemma4_vision"])
    def test_other_starts_of_models_that_rotate(self, name):
        if name not in CASES:
            pytest.skip(f"transformers {transformers.__version__} has no {name}")
        self.refuse(build(name)[0], "already rotates .*rotary_init='pretrained'", patch, RotaryPatchConfig())

    @pytest.mark.parametrize(
        "fields, message",
        [
            ({"layers": [5]}, r"layers=.5. do not match: model .LlamaModel. has attention layers .'0: model.layers.0"),
            (
                {"layers": [0, 1]},
                "layers=.1.: the model does not rotate in model.layers.1.self_attn; accepted: layers that it rotates",
            ),
            ({"target": "visual"}, r"target='visual' computes no rotations; modules that do: .'model'"),
        ],
    )
    def test_configuration_that_does_not_fit(self, fields, message):
        config = RotaryPatchConfig(position_encoding="rope_mixed", rotary_init="pretrained", **fields)
        name = "smollm3" if fields.get("layers") == [0, 1] else "llama"
        self.refuse(build(name)[0], message, patch, config)

    @pytest.mark.parametrize(
        "fields, message",
        [
            ({"position_encoding": "axial_rope"}, "axial_rope learns nothing"),
            ({"coordinates": "unit"}, "coordinates='unit': with rotary_init='pretrained' the coordinates"),
            ({"rope_theta": 10.0, "position_shift": 0.1}, "rope_theta=10.0, position_shift=0.1: with"),
            ({"keep_absolute": "drop"}, "keep_absolute='drop': with"),
        ],
    )
    def test_configuration_for_no_model(self, fields, message):
        with pytest.raises(ValueError, match=message):
            RotaryPatchConfig(**{"position_encoding": "rope_mixed", "rotary_init": "pretrained", **fields})

    def test_patched_twice_and_adapters_of_another_base(self, tmp_path):
        model, _ = build("llama")
        save_rotary(patch(model, PLANES), tmp_path)
        with pytest.raises(ValueError, match="model is patched already"):
            patch(model, PLANES)
        other = model_of("LlamaConfig", "LlamaForCausalLM", **{**TEXT, **HEADS}, **rope(rope_theta=500.0))()
        self.refuse(other, "frequencies .* there, .* here", load_rotary, tmp_path)
        # Rounded frequencies are those of the same model.
        rounded, _ = build("llama")
        assert is_patched(load_rotary(rounded.to(torch.bfloat16), tmp_path))
        self.refuse(build("mistral")[0], "model_type llama there, mistral here", load_rotary, tmp_path)

    def test_cos_and_sin_that_the_model_did_not_compute(self):
        model, _ = build("llama")
        patch(model, PLANES)
        layer = model.model.layers[0].self_attn
        with pytest.raises(RuntimeError, match="layer 0 got rotations of 16 channels in torch.float32, which do"):
            layer(torch.zeros(1, 3, 48), position_embeddings=(torch.ones(1, 3, 16), torch.zeros(1, 3, 16)))
