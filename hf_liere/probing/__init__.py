"""
What the modules of somebody else's model do: which channels they rotate, in what order, from which positions, found by
calling them with chosen values. Imports nothing of ours. Start with `planes.py`, then `rope_layout.py` and
`attention_probe.py`.
"""
