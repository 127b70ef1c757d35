"""
[`LieRotaryEmbedding`], for attention in somebody's own code and in patched models. `embedding.py` has the public class,
which places patches and starts at the rotations of another implementation; `rotary_embedding.py` has what it does with
positions.
"""
