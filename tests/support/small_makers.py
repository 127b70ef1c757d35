"""Small configurations and a layer, of which tests change fields."""

from functools import partial

from published_models import SMALL

import hf_liere
from hf_liere import LieRotaryEmbedding


IMAGE = partial(hf_liere.LieREViTConfig, **SMALL, image_size=16, num_labels=3)
VIDEO = partial(hf_liere.LieREVideoConfig, **SMALL, image_size=8, num_frames=4)
TOKENS = partial(hf_liere.LieRETokensConfig, hidden_size=48, num_attention_heads=2, num_axes=2, block_size=None)
LAYER = partial(LieRotaryEmbedding, num_heads=4, head_dim=48, num_axes=2)
