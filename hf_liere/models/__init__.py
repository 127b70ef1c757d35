"""
All code that is saved with checkpoints, in six rooms, each of which imports only those before it: `fast` (how rotations
are computed quickly), `probing` (what other models rotate), `rotation` (R(p) and its application to queries and keys),
`encoding` (generators, positions), `transformer` (our models; start there with `modeling_liere.py`) and `patched`
(rotations in Transformers models).

A checkpoint gets one file of it, which `hf_liere/bundles.py` makes of the modules that its configuration needs,
and `saved_code.py` writes.
"""
