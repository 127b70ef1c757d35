"""Pooling of tokens, the attention masks that it accepts, and the classifier of what was pooled."""

import torch
from torch import nn

from ..fast.dispatch import values_are_unknown
from .configuration_liere import LieREConfig


def pool(config, hidden_states: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    """
    (B, hidden_size), the token of (B, tokens, hidden_size) states that `config.pooling` selects, or the mean of those
    that are true in (1 or B, tokens) `visible`.
    """
    if config.pooling == "cls":
        return hidden_states[:, 0]  # (B, hidden_size)
    first = _start_of_mean(config)
    if visible is None:
        return hidden_states[:, first:].mean(dim=1)  # (B, hidden_size)
    visible = visible[:, first:, None].to(hidden_states.device)  # (1 or B, averaged tokens, 1)
    return hidden_states[:, first:].masked_fill(~visible, 0.0).sum(dim=1) / visible.sum(dim=1)


def visible_tokens(config, mask: torch.Tensor | object, batch_size: int, num_tokens: int) -> torch.Tensor | None:
    """
    (1 or B, tokens), true for tokens that a query attends to; `None` if the mask is not a tensor. Raises `ValueError`
    if a mask has the wrong shape, or hides every token of a sample or all that are averaged.
    """
    averaged = config.pooling != "cls"
    if not isinstance(mask, torch.Tensor):
        if averaged:
            raise ValueError(
                f"pooling={config.pooling!r} cannot tell which tokens a {type(mask).__name__} hides; pass an "
                f"attention_mask of shape {(batch_size, num_tokens)}."
            )
        return None
    pairs = ((1, batch_size), (1, config.num_attention_heads), (1, num_tokens), (num_tokens,))
    exact = mask.dtype == torch.bool or mask.is_floating_point()
    if mask.ndim == 4 and exact and all(size in accepted for size, accepted in zip(mask.shape, pairs)):
        # Added masks hide a token by the most negative number of their dtype or by minus infinity.
        attended = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        visible = attended.flatten(1, 2).any(dim=1)  # (1 or B, tokens)
    elif tuple(mask.shape) == (batch_size, num_tokens):
        if not values_are_unknown(mask) and (mask < 0).any():
            raise ValueError(
                f"attention_mask of shape {tuple(mask.shape)} contains {mask.min().item()}: a mask of tokens is 1 or "
                "true for tokens to attend to, else 0; only a mask of pairs is added to attention scores."
            )
        visible = mask.bool()
    else:
        raise ValueError(
            f"attention_mask of shape {tuple(mask.shape)} in {mask.dtype} must be {(batch_size, num_tokens)} "
            "(batch, class and register tokens and patches), or for pairs of tokens, Boolean or floating point, "
            f"(1 or {batch_size}, 1 or {config.num_attention_heads}, 1 or {num_tokens}, {num_tokens})."
        )
    pooled = visible[:, _start_of_mean(config) :] if averaged else visible  # (1 or B, pooled)
    if not values_are_unknown(visible) and not pooled.any(dim=1).all():
        samples = (~pooled.any(dim=1)).nonzero().flatten().tolist()
        raise ValueError(f"attention_mask hides all {pooled.shape[1]} tokens to be pooled of samples {samples}.")
    return visible


def _start_of_mean(config) -> int:
    return config.num_prefix_tokens if config.pooling == "mean" else 0


def build_classifier(config: LieREConfig) -> nn.Module:
    """(…, hidden_size) → (…, num_labels): linear or with one hidden layer; the identity without labels."""
    if config.num_labels == 0:
        return nn.Identity()
    if config.classifier_hidden_size is None:
        return nn.Linear(config.hidden_size, config.num_labels)
    return nn.Sequential(
        nn.Linear(config.hidden_size, config.classifier_hidden_size),
        nn.ReLU(),
        nn.Linear(config.classifier_hidden_size, config.num_labels),
    )
