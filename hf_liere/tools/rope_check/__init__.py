"""
Checks of rotary position embeddings: of Transformers models on this machine, and of other engines by test vectors.

Start at `command.run`. `rotation` states what is right, in float64, and `faults` what wrong implementations compute.
"""
