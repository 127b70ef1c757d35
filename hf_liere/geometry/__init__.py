"""
Orientations and poses of tokens in space. `orientations.py` converts between matrices, quaternions and the rotation
vectors that encodings take as positions; `pose_embedding.py` rotates by whole poses.
"""
