"""Learned rotations in pretrained vision transformers, and adapters that store them."""
