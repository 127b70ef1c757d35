"""Families that rotate queries and keys by themselves, with random weights: one table for the tests."""

import dataclasses
import importlib.util
from collections.abc import Callable

import torch
import transformers
from patching_cases import IMAGE, SMALL, model, outputs, part, randomize, widen  # noqa: F401 (cases have `outputs`)
from torch import nn

from hf_liere import RotaryPatchConfig, patch


PLANES = RotaryPatchConfig(position_encoding="rope_mixed", rotary_init="pretrained")
TEXT = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {"head_dim": 16}
VISION = {"hidden_size": 32, "depth": 2, "num_heads": 2, "patch_size": 4, "out_hidden_size": 48}
QWEN_TOKENS = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
# Images as the processors of Qwen-VL pack them: 4 × 6 and 2 × 2 patches of 2 × 4 × 4 values, in one sequence.
GRIDS = torch.tensor([[1, 4, 6], [1, 2, 2]])


@dataclasses.dataclass
class Case:
    """
    Attributes:
        build: Makes the model.
        inputs: Makes its inputs.
        towers: The modules around rotary modules.
        generates: Whether the model generates text.
        rotating_layers: How many of its layers rotate keys of their own.
        prefix: Tokens without a position before the others.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict]
    towers: tuple[str, ...]
    generates: bool = False
    rotating_layers: int = 2
    prefix: int = 0


def tokens():
    return {"input_ids": torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(0))}


def images():
    return {"pixel_values": torch.randn(2, 3, 16, 24)}


def packed():
    return {"hidden_states": torch.randn(28, 96), "grid_thw": GRIDS}


def pixtral_images():
    return {"pixel_values": torch.randn(2, 3, 16, 16), "image_sizes": torch.tensor([[16, 8], [8, 12]])}


def gemma_patches():
    """Two images of 4 × 6 and 2 × 4 patches of 4 × 4, the second one padded."""
    positions = torch.full((2, 24, 2), -1)
    for sample, (rows, columns) in enumerate(((4, 6), (2, 4))):
        grid = torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy")
        positions[sample, : rows * columns] = torch.stack(grid, -1).flatten(0, 1)
    return {"pixel_values": torch.rand(2, 24, 48), "pixel_position_ids": positions}


def images_in_text():
    """A sentence with two images in it; four patches make a token."""
    ids = [1, 5, 62, *[60] * 6, 63, 7, 62, 60, 63, 8, 9]
    types = [int(token == 60) for token in ids]
    return {
        "input_ids": torch.tensor([ids]),
        "mm_token_type_ids": torch.tensor([types]),
        "pixel_values": torch.randn(28, 96),
        "image_grid_thw": GRIDS,
    }


def rope(**fields):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **fields}}


def vision_language(family, name, sections, vision):
    def build():
        configs = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
        models = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        text = {**TEXT, **rope(mrope_section=sections)}
        config = getattr(configs, f"{name}Config")(
            text_config=text, vision_config={**VISION, **vision}, **QWEN_TOKENS, tie_word_embeddings=False
        )
        return getattr(models, f"{name}ForConditionalGeneration")(config)

    return build


def language(name, config=None, rotating_layers=2, **fields):
    built = model(f"{config or name}Config", f"{name}ForCausalLM", **{**TEXT, **fields})
    return Case(built, tokens, ("model",), generates=True, rotating_layers=rotating_layers)


# The first layer has linear attention, which takes cos and sin and does not read them.
HYBRID = {
    **HEADS,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    **rope(partial_rotary_factor=0.5),
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 2}
YARN = rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
LLAMA3 = rope(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
WINDOWS = {"fullatt_block_indexes": [1], "window_size": 16, "intermediate_size": 48}
DEEP = {"intermediate_size": 48, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
SHARED_KEYS = {
    **HEADS,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 6,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
}
GEMMA_VISION = {**TEXT, **HEADS, "patch_size": 4, "position_embedding_size": 16, "pooling_kernel_size": 2}
GEMMA_ROPE = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
}

CASES = {
    "llama": language("Llama", **HEADS),
    "llama_linear": language("Llama", **HEADS, **rope(rope_type="linear", factor=2.0)),
    "llama_llama3": language("Llama", **HEADS, **LLAMA3),
    "llama_yarn": language("Llama", **HEADS, **YARN),
    "mistral": language("Mistral", **HEADS, sliding_window=6),
    "qwen2": language("Qwen2"),
    "qwen3": language("Qwen3", **HEADS),
    "gemma3": language(
        "Gemma3",
        "Gemma3Text",
        **HEADS,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=6,
        **GEMMA_ROPE,
    ),
    # Adjacent channels make a plane, and only half of the channels are rotated.
    "cohere": language("Cohere"),
    "glm": language("Glm", **HEADS, partial_rotary_factor=0.5),
    "ernie": language("Ernie4_5", **HEADS),
    # Layers without a rotation, by the configuration or by the kind of their attention.
    "smollm3": language("SmolLM3", rotating_layers=1, no_rope_layers=[1, 0]),
    "cohere2": language(
        "Cohere2", rotating_layers=1, layer_types=["sliding_attention", "full_attention"], sliding_window=6
    ),
    # The last two layers read the keys of the first two.
    "gemma3n": language("Gemma3n", "Gemma3nText", **SHARED_KEYS, laurel_rank=4, activation_sparsity_pattern=[0.0] * 4),
    # The projection of queries also makes a gate.
    "qwen3_5": language(
        "Qwen3_5",
        "Qwen3_5Text",
        rotating_layers=1,
        **{**HYBRID, **rope(partial_rotary_factor=0.75, mrope_section=[2, 2, 2])},
    ),
    "qwen3_next": language("Qwen3Next", rotating_layers=1, **HYBRID, **EXPERTS),
    "olmo_hybrid": language("OlmoHybrid", rotating_layers=1, **{**HYBRID, **rope()}),
    # Vectors that are made on the CPU whatever the default device is.
    "diffllama": language("DiffLlama", **HEADS),
    # One projection for queries, keys and values after each other.
    "phi3": language("Phi3", partial_rotary_factor=1.0),
    # One projection in an order of its own.
    "gpt_neox": Case(model("GPTNeoXConfig", "GPTNeoXForCausalLM", **TEXT), tokens, ("gpt_neox",), generates=True),
    "modernbert": Case(
        model("ModernBertConfig", "ModernBertForMaskedLM", **TEXT, layer_types=["sliding_attention", "full_attention"]),
        tokens,
        ("model",),
    ),
    "dinov3": Case(model("DINOv3ViTConfig", "DINOv3ViTModel", **IMAGE, num_register_tokens=2), images, ("",), prefix=3),
    "pixtral": Case(model("PixtralVisionConfig", "PixtralVisionModel", **IMAGE), pixtral_images, ("",)),
    "qwen2_vl_tower": Case(
        part(
            "qwen2_vl",
            "Qwen2VLVisionConfig",
            "Qwen2VisionTransformerPretrainedModel",
            **{**VISION, "embed_dim": 32, "hidden_size": 48},
        ),
        packed,
        ("",),
    ),
    "qwen2_5_vl_tower": Case(
        part("qwen2_5_vl", "Qwen2_5_VLVisionConfig", "Qwen2_5_VisionTransformerPretrainedModel", **VISION, **WINDOWS),
        packed,
        ("",),
    ),
    "qwen2_5_vl": Case(
        vision_language("qwen2_5_vl", "Qwen2_5_VL", [2, 2, 2], WINDOWS),
        images_in_text,
        ("model.visual", "model.language_model"),
        generates=True,
    ),
    "qwen3_vl_tower": Case(
        part("qwen3_vl", "Qwen3VLVisionConfig", "Qwen3VLVisionModel", **VISION, **DEEP), packed, ("",)
    ),
    "qwen3_vl": Case(
        vision_language("qwen3_vl", "Qwen3VL", [2, 2, 2], DEEP),
        images_in_text,
        ("model.visual", "model.language_model"),
        generates=True,
    ),
}
if importlib.util.find_spec("transformers.models.gemma4"):
    CASES["gemma4_vision"] = Case(
        part("gemma4", "Gemma4VisionConfig", "Gemma4VisionModel", **GEMMA_VISION), gemma_patches, ("encoder",)
    )
    CASES["gemma4"] = language("Gemma4", "Gemma4Text", **SHARED_KEYS, global_head_dim=16, **GEMMA_ROPE)


LATENT = {
    **TEXT,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
}
EXPERTS = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LLAMA4 = {"num_hidden_layers": 4, "intermediate_size_mlp": 48, "num_local_experts": 2}
SAM3 = {"image_size": 24, "pretrain_image_size": 16, "patch_size": 4, "window_size": 3, "global_attn_indexes": [1]}
MEMORY = {
    "memory_attention_hidden_size": 64,
    "memory_attention_num_layers": 2,
    "memory_attention_num_attention_heads": 2,
    "memory_attention_feed_forward_hidden_size": 48,
    "memory_attention_rope_feat_sizes": [3, 4],
}
LONGROPE = rope(
    rope_type="longrope", factor=2.0, short_factor=[1.0] * 8, long_factor=[2.0] * 8, original_max_position_embeddings=8
)


def grids():
    return {"pixel_values": torch.randn(2, 3, 24, 24)}


def memories():
    """Features of 3 × 4 positions, and of two earlier frames with two tokens without a position."""
    names = ("current_vision_features", "current_vision_position_embeddings")
    current = {name: torch.randn(12, 1, 64) for name in names}
    # As the model spells it.
    earlier = {name: torch.randn(26, 1, 64) for name in ("memory", "memory_posision_embeddings")}
    return {**current, **earlier, "num_object_pointer_tokens": 2}


class MemoryAttention(nn.Module):
    """The part of a model of videos (SAM 2, EdgeTAM) that rotates."""

    def __init__(self, family, name, **fields):
        super().__init__()
        models = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        config = getattr(models, f"{name}Config")(**MEMORY, **fields)
        self.attention = getattr(models, f"{name}MemoryAttention")(config)

    def can_generate(self):
        return False

    def forward(self, **inputs):
        return (self.attention(**inputs),)


# Families that rotate in another form than those above: complex numbers, rotary modules in every layer or inside
# attention modules, several ones, other frequencies for longer inputs, norms after the rotation, heads of keys that all
# queries share, one projection for queries, keys and values of each head in turn, other angles of class tokens.
FAMILIES = {
    "mlcd": Case(model("MLCDVisionConfig", "MLCDVisionModel", **IMAGE), images, ("",), prefix=1),
    "llama4": language("Llama4", "Llama4Text", rotating_layers=3, **{**TEXT, **HEADS, **LLAMA4}),
    "deepseek_v2": language("DeepseekV2", **LATENT, **EXPERTS),
    "deepseek_v3": language("DeepseekV3", **LATENT, **EXPERTS),
    "minicpm3": language("MiniCPM3", **{**LATENT, "q_lora_rank": 16}),
    "sam3": Case(part("sam3", "Sam3ViTConfig", "Sam3ViTModel", **SMALL, **SAM3), grids, ("",)),
    "sam2_video": Case(lambda: MemoryAttention("sam2_video", "Sam2Video"), memories, ("attention",), rotating_layers=4),
    # Keys have positions of their own.
    "edgetam_video": Case(
        lambda: MemoryAttention("edgetam_video", "EdgeTamVideo", memory_attention_rope_k_sizes=[2, 4]),
        lambda: {**memories(), "num_spatial_memory_tokens": 3},
        ("attention",),
        rotating_layers=4,
    ),
    "recurrent_gemma": language("RecurrentGemma", **HEADS, num_hidden_layers=6, attention_window_size=32, lru_width=48),
    "moshi": language("Moshi", **HEADS, ffn_dim=64),
    "molmo2": Case(
        model("Molmo2TextConfig", "Molmo2TextModel", **TEXT, **HEADS, rope_scaling_layers=[0], **YARN),
        lambda: {**tokens(), "use_cache": False},
        ("",),
    ),
    "granite_swa": language("GraniteSWA"),
    "nanochat": language("NanoChat", **HEADS),
    "falcon": Case(
        model("FalconConfig", "FalconForCausalLM", **{**TEXT, "hidden_size": 64}),
        tokens,
        ("transformer",),
        generates=True,
    ),
    "llama_dynamic": language("Llama", **HEADS, **rope(rope_type="dynamic", factor=4.0)),
    "llama_longrope": language("Llama", **HEADS, **LONGROPE),
}
if not hasattr(transformers, "Molmo2TextModel"):
    del FAMILIES["molmo2"]
if hasattr(transformers, "DeepseekV32ForCausalLM"):
    # An indexer chooses the tokens that attention reads.
    indexer = {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 16}
    FAMILIES["deepseek_v32"] = language("DeepseekV32", **LATENT, **EXPERTS, **indexer)
if "gemma4" in CASES:
    # Heads of two widths.
    FAMILIES["gemma4_wide"] = language("Gemma4", "Gemma4Text", **SHARED_KEYS, global_head_dim=32, **GEMMA_ROPE)
if hasattr(transformers, "Lfm3ForCausalLM"):
    # One layer is a convolution.
    plain = {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}}
    FAMILIES["lfm3"] = language("Lfm3", rotating_layers=1, layer_types=["conv", "full_attention"], **plain)


def blocks(encoding="liere", **fields):
    return RotaryPatchConfig(position_encoding=encoding, block_size=4, rotary_init="pretrained", **fields)


def composed(encoding="liere", **fields):
    return RotaryPatchConfig(position_encoding=encoding, compose=True, **{"block_size": 4, **fields})


def in_panels():
    """Tokens with positions on two axes of their own, one-hot where they are in a panel."""
    return {**tokens(), "rotary_positions": torch.eye(3)[torch.arange(11) // 4, 1:].expand(2, -1, -1)}


def find_case(name):
    return CASES.get(name) or FAMILIES[name]


def build(name, implementation="sdpa"):
    """A model in evaluation mode with wide weights, and its inputs."""
    torch.manual_seed(0)
    built = widen(find_case(name).build().eval())
    if getattr(built, f"_supports_{implementation}", implementation == "eager"):
        built.set_attn_implementation(implementation)
    torch.manual_seed(1)
    return built, find_case(name).inputs()


def build_patched(name, config, std=0.3):
    """The same with rotations away from their start."""
    built, inputs = build(name)
    randomize(patch(built, config), std)
    return built, inputs
