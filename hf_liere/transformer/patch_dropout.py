"""Patch dropout: a forward pass in training leaves out random patches (FLIP, Li et al. 2023, §3)."""

import torch

from ..rotation.rotation import gather_tokens


def draw_kept_tokens(embeddings: torch.Tensor, prefix: int, prob: float, visible: torch.Tensor | None) -> torch.Tensor:
    """
    Draw the (B, kept) ascending indices of tokens that every sample keeps: those of the prefix, class and register
    tokens, and n − ⌊prob · n⌋ of n patches, at least one, without replacement. Patches that (1 or B, tokens) `visible`
    hides are kept only if too few others exist.
    """
    batch_size, num_patches, device = embeddings.shape[0], embeddings.shape[1] - prefix, embeddings.device
    num_kept = max(1, num_patches - int(num_patches * prob))
    noise = torch.rand(batch_size, num_patches, device=device)  # (B, n)
    if visible is not None:
        noise = noise + (~visible[:, prefix:]).to(noise)  # hidden patches come last
    patches = noise.argsort(dim=1)[:, :num_kept].sort(dim=1).values  # (B, num_kept)
    return torch.cat([torch.arange(prefix, device=device).expand(batch_size, -1), patches + prefix], dim=1)


def gather_mask(mask: torch.Tensor | object | None, kept: torch.Tensor) -> torch.Tensor | None:
    """
    Select the tokens (B, kept) of every sample in an attention mask (B, N) or (1 or B, 1 or H, 1 or N, N). Raises
    `ValueError` if the mask is not a tensor.
    """
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor):
        raise ValueError(
            f"patch_dropout_prob cannot select tokens of a {type(mask).__name__}; pass attention_mask as a tensor, or "
            "train with patch_dropout_prob=0."
        )
    if mask.ndim == 2:
        return gather_tokens(mask, kept)
    kept = kept.to(mask.device)
    columns = mask.take_along_dim(kept[:, None, None, :], dim=3)  # (B, 1 or H, 1 or N, kept)
    return columns if mask.shape[2] == 1 else columns.take_along_dim(kept[:, None, :, None], dim=2)


def refuse_patch_dropout(config, reason: str) -> None:
    """Raises `ValueError` for a configuration that drops patches."""
    if config.patch_dropout_prob:
        raise ValueError(f"patch_dropout_prob={config.patch_dropout_prob} is not available where {reason}; use 0.")
