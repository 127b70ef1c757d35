"""Small models under the names of the large ones that pages and notebooks load."""

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from training_helpers import small_clip
from transformers import (
    BitImageProcessor,
    CLIPConfig,
    CLIPModel,
    Dinov2Config,
    Dinov2Model,
    DINOv3ViTConfig,
    DINOv3ViTImageProcessor,
    DINOv3ViTModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLModel,
    ViTImageProcessor,
)

import hf_liere
from training.data.arrows import LABELS


WIDTHS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
TEXT = {**WIDTHS, "num_key_value_heads": 2, "vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def arrows():
    sizes = {"image_size": 108, "patch_size": 12, "use_class_token": False, "pooling": "mean"}
    config = hf_liere.LieREViTConfig(**WIDTHS, **sizes, id2label=dict(enumerate(LABELS)))
    return hf_liere.LieREViTForImageClassification(config), ViTImageProcessor(size={"height": 108, "width": 108})


def clip():
    vision = {**WIDTHS, "image_size": 224, "patch_size": 16}
    return CLIPModel(CLIPConfig(vision_config=vision, text_config={**WIDTHS, "vocab_size": 80})), small_clip()[1]


def dino():
    return DINOv3ViTModel(DINOv3ViTConfig(**WIDTHS)), DINOv3ViTImageProcessor()


def dinov2():
    config = Dinov2Config(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=56, patch_size=14)
    return Dinov2Model(config), BitImageProcessor(size={"shortest_edge": 56}, crop_size=56)


def llama():
    words = ["<pad>", "<s>", "</s>", *"one two three four five six seven eight".split()]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return LlamaForCausalLM(LlamaConfig(**TEXT)), PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def qwen():
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 64}
    text = {**TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    return (Qwen2_5_VLModel(Qwen2_5_VLConfig(text_config=text, vision_config=vision)),)


# A small model, with processor or tokenizer, under every name that a page loads.
MODELS = {
    "outputs/arrows/liere8": arrows,
    "openai/clip-vit-base-patch16": clip,
    "facebook/dinov2-small": dinov2,
    "facebook/dinov3-vits16-pretrain-lvd1689m": dino,
    "facebook/dinov3-vitb16-pretrain-lvd1689m": dino,
    "meta-llama/Llama-3.2-1B": llama,
    "outputs/dinov2": dinov2,
    "HuggingFaceTB/SmolLM2-135M-Instruct": llama,
    "Qwen/Qwen2.5-VL-3B-Instruct": qwen,
}
