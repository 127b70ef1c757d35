"""
What [`LieRotaryEmbedding`] needs in somebody's own code and no checkpoint contains. `embedding.py` places patches and
has the public class, whose `like` starts at the rotations of another implementation, which `module_probe.py` finds.
"""
