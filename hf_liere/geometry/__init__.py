"""
Orientations and poses of tokens in space. `orientations.py` converts between matrices, quaternions and the rotation
vectors that encodings take as positions; `pose_embedding.py` transforms states by whole poses, also inside Transformers
models. `common_planes.py` finds the planes that commuting generators share.
"""
