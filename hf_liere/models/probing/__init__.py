"""
What the modules of somebody else's model do: which channels they rotate, in what order, from which positions, found by
calling them with chosen values. Imports nothing of ours. Start with `rope_layout.py`, then `attention_probe.py`.
"""
