"""Checkpoints of other projects as ours, and ours as more general ones."""
