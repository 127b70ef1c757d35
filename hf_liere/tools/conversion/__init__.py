"""
Conversion of the papers' checkpoints into our models, and exact upgrades of our models.

It imports `auto`, `errors`, `models` and `storage`; only files at the package's root import it. Start with
`checkpoints.py`, which lists the kinds of checkpoints, each with its own file. Upgrades are in `upgrades.py`.
"""
