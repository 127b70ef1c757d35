"""Hidden tokens take part in nothing: neither in attention nor in what is pooled."""

import torch

import hf_liere


# The lower half of an image of 4 × 4 patches, after a class token.
VISIBLE = torch.arange(17) < 9


def encoder(tiny, pooling, implementation="sdpa"):
    config = tiny(pooling=pooling, position_encoding="liere", block_size=4, initializer_range=0.2)
    config._attn_implementation = implementation
    return hf_liere.LieREViTModel(config).eval()
