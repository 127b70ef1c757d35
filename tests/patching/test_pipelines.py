"""Pipelines of transformers with patched models: those that start neutral answer as the plain model does."""

import numpy as np
import pytest
import torch
import transformers
from patching_cases import IMAGE, randomize, widen
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from training_helpers import small_clip
from transformers import pipeline

from hf_liere import RotaryPatchConfig, patch


PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 24, 3), dtype=np.uint8))
PROCESSOR = {"size": {"height": 16, "width": 16}}
LABELS = {"candidate_labels": ["a cat", "a dog", "a map"]}


def vit():
    config = transformers.ViTConfig(**IMAGE, num_labels=3)
    return widen(transformers.ViTForImageClassification(config)), {
        "image_processor": transformers.ViTImageProcessor(**PROCESSOR)
    }


def dinov2():
    processor = transformers.BitImageProcessor(size={"shortest_edge": 16}, crop_size=PROCESSOR["size"])
    return widen(transformers.Dinov2Model(transformers.Dinov2Config(**IMAGE))), {"image_processor": processor}


def clip():
    model, tokenizer = small_clip()
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=PROCESSOR["size"])
    return model, {"tokenizer": tokenizer, "image_processor": processor}


def words():
    names = ["<unk>", "<s>", "the", "cat", "sat", "on", "a", "mat"]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<s>")


def llama(cls=transformers.LlamaForCausalLM):
    size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=8, pad_token_id=1, initializer_range=0.5, num_labels=3, **size)
    return cls(config), {"tokenizer": words()}


GREEDY = {"max_new_tokens": 6, "do_sample": False}
TEXT = "the cat sat on a mat"
ZEROS = {"position_encoding": "liere", "block_size": 4, "rotary_init": "zeros"}
PRETRAINED = {"position_encoding": "rope_mixed", "rotary_init": "pretrained"}
CASES = {
    "image-classification": (vit, ZEROS, PICTURE, {}),
    "image-feature-extraction": (dinov2, ZEROS, PICTURE, {}),
    "zero-shot-image-classification": (clip, ZEROS, PICTURE, LABELS),
    "text-generation": (llama, PRETRAINED, TEXT, GREEDY),
    "text-classification": (lambda: llama(transformers.LlamaForSequenceClassification), PRETRAINED, TEXT, {"top_k": 3}),
    "token-classification": (lambda: llama(transformers.LlamaForTokenClassification), PRETRAINED, TEXT, {}),
}


@pytest.mark.parametrize("task", CASES)
def test_a_neutral_model_answers_as_the_plain_one(task, tmp_path):
    build, fields, question, options = CASES[task]
    model, parts = build()

    def answer(model):
        return pipeline(task, model=model, device="cpu", **parts)(question, **options)

    def numbers(found):
        return torch.tensor([entry["score"] for entry in found] if isinstance(found[0], dict) else found)

    model.eval()
    plain = answer(model)
    patch(model, RotaryPatchConfig(**fields))
    model.save_pretrained(tmp_path)
    found = answer(type(model).from_pretrained(tmp_path))
    randomize(model)
    changed = answer(model)
    if task == "text-generation":
        assert found == plain
        return
    # Rotations of unpatched attention are rounded in another order.
    torch.testing.assert_close(numbers(found), numbers(plain), rtol=1e-4, atol=1e-5)
    assert (numbers(changed) - numbers(plain)).abs().max() > 1e-4
