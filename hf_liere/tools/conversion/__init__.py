"""
Conversion of the papers' checkpoints into our models, and exact upgrades of our models.

Start with `checkpoints.py`, which lists the kinds of checkpoints, each with a file. Upgrades are in `upgrades.py`.
"""
