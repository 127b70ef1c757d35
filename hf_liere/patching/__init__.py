"""Learned rotations in pretrained models, and adapters that store them."""
