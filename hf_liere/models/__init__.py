"""
All code that is saved with checkpoints, in four rooms, each of which imports only those before it: `rotation` (R(p) and
its application to queries and keys), `encoding` (generators, positions), `transformer` (our models; start there with
`modeling_liere.py`) and `patched` (rotations in models of transformers).

transformers loads a checkpoint's code from one folder, so `saved_code.py` writes the needed files side by side.
"""
