"""
Transformers of images, video and tokens, with their configurations.

Start with `modeling_liere.py`: its `forward` leads to `embeddings.py` and `layers.py`. `configuration_liere.py`
documents the fields.
"""
