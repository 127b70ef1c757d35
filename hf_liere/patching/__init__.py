"""Learned rotations inside pretrained vision transformers."""
