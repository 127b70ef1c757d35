"""Pretrained towers of images and text as image classifiers."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_liere.errors import InputError
from training.engine.fine_tuning import Classifier


class ZeroShotClassifier(Classifier):
    """
    Classification by prompts (CLIP, §3.1): the logit of a class is the scaled cosine between the image's embedding and
    the mean of the normalised embeddings of the class's prompts. The text tower is frozen, so these are computed once.

    Args:
        prompts: Templates with `{}` for the name of a class.

    Raises:
        InputError: if the model has no text tower, or a prompt is too long for it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        class_names: Sequence[str],
        prompts: Sequence[str],
    ):
        super().__init__(model)
        self.register_buffer("text_embeddings", _embed(model, tokenizer, class_names, prompts), persistent=False)

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        # peft wraps `forward`, which is not called here; its LoRA layers are in the model itself.
        model = self.pretrained
        features = model.get_image_features(pixel_values, **self.any_size).pooler_output
        return {"logits": model.logit_scale.exp() * nn.functional.normalize(features, dim=-1) @ self.text_embeddings.T}

    def head_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(())

    def frozen_parameters(self) -> Iterator[nn.Parameter]:
        return (p for name, p in self.named_parameters() if "text_model." in name or "text_projection." in name)


@torch.no_grad()
def _embed(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, class_names: Sequence[str], prompts: Sequence[str]
) -> torch.Tensor:
    """The normalised embeddings of the classes, (classes, projection_dim)."""
    if not hasattr(model, "get_text_features") or not hasattr(model, "logit_scale"):
        raise InputError(
            f"--head zero_shot: {type(model).__name__} does not embed text; accepted: CLIP and the like, or --head "
            "classifier."
        )
    length = model.config.text_config.max_position_embeddings
    means = []
    for name in class_names:
        texts = [prompt.format(name) for prompt in prompts]
        longest = max(map(len, tokenizer(texts).input_ids))
        if longest > length:
            raise InputError(f"A prompt for {name!r} has {longest} tokens; the text tower takes {length}.")
        tokens = tokenizer(texts, padding="max_length", max_length=length, return_tensors="pt")
        embeddings = model.eval().get_text_features(**tokens.to(model.device)).pooler_output
        means.append(nn.functional.normalize(embeddings, dim=-1).mean(dim=0))
    return nn.functional.normalize(torch.stack(means), dim=-1)
