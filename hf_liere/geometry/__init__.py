"""Orientations and poses of tokens in space."""
