"""Which tokens are pooled, and which attention masks allow this."""

import torch

from ..rotation.dispatch import values_are_unknown


def pool(config, hidden_states: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    """
    The tokens, or their mean, that `config.pooling` selects.

    Args:
        hidden_states: (B, tokens, hidden_size).
        visible: (1 or B, tokens), true for tokens that a mean takes; `None` for all.

    Returns:
        (B, hidden_size), or (B, prefix tokens, hidden_size) for `pooling="prefix"`.
    """
    if config.pooling == "cls":
        return hidden_states[:, 0]
    if config.pooling == "prefix":
        return hidden_states[:, : config.num_prefix_tokens]
    first = _first_averaged(config)
    if visible is None:
        return hidden_states[:, first:].mean(dim=1)
    visible = visible[:, first:, None].to(hidden_states.device)  # (1 or B, averaged tokens, 1)
    return hidden_states[:, first:].masked_fill(~visible, 0.0).sum(dim=1) / visible.sum(dim=1)


def visible_tokens(config, mask: torch.Tensor | object | None, batch_size: int, num_tokens: int) -> torch.Tensor | None:
    """
    (1 or B, tokens), true for tokens that a query attends to; `None` for all tokens, or if the mask is not a
    tensor.

    Raises:
        ValueError: if an attention mask is of the wrong shape, hides every token of a sample, or all that are averaged.
    """
    averaged = config.pooling in ("mean", "mean_all")
    if mask is None:
        return None
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
        # Masks that are added hide a token by the most negative number of their type, or minus infinity.
        attended = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        visible = attended.flatten(1, 2).any(dim=1)
    elif tuple(mask.shape) == (batch_size, num_tokens):
        if not values_are_unknown(mask) and (mask < 0).any():
            raise ValueError(
                f"attention_mask of shape {tuple(mask.shape)} holds {mask.min().item()}: a mask of tokens is true "
                "or 1 for those that are attended to, 0 for others; only a mask of pairs is added to attention scores."
            )
        visible = mask.bool()
    else:
        raise ValueError(
            f"attention_mask of shape {tuple(mask.shape)} in {mask.dtype} must be {(batch_size, num_tokens)} "
            "(batch, class and register tokens and patches), or one for pairs of tokens, Boolean or floating "
            f"point, (1 or {batch_size}, 1 or {config.num_attention_heads}, 1 or {num_tokens}, {num_tokens})."
        )
    pooled = visible[:, _first_averaged(config) :] if averaged else visible
    if not values_are_unknown(visible) and not pooled.any(dim=1).all():
        samples = (~pooled.any(dim=1)).nonzero().flatten().tolist()
        raise ValueError(f"attention_mask hides all {pooled.shape[1]} tokens to be pooled of samples {samples}.")
    return visible


def _first_averaged(config) -> int:
    return config.num_prefix_tokens if config.pooling == "mean" else 0
